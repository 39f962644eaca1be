// Which chunks of a group can ever serve a hit, and are therefore worth an object
// (store_connector 4.3; vLLM: reachable_block_mask).
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "kvprism/base/export.h"
#include "kvprism/hit/hit_group.h"

namespace kvprism {

// Prefixes at which a later request can start, multiples of S: those of replay_boundaries(), and
// where the prompt leaves one that others have stored.
struct ReplayBoundaries {
  std::array<std::uint32_t, 4> tokens{};
  std::uint32_t count = 0;

  // At most four in all.
  void add(std::uint32_t prefix) noexcept { tokens[count++] = prefix; }
  bool operator==(const ReplayBoundaries&) const = default;
};
// Where a request that replays a prompt of `prompt_tokens` starts: the same prompt again, of which
// `replay` tokens are computed anew, and one that is a little longer; one to three, ascending. With
// drafts a hit ends one step earlier.
KVPRISM_API ReplayBoundaries replay_boundaries(std::uint32_t prompt_tokens, std::uint32_t step,
                                               bool drafts, std::uint32_t replay) noexcept;

// Ownership: value. Threads: value.
class KVPRISM_API ReachableMask {
 public:
  // `retention`: absent keeps what serves a hit at any multiple of S; 0 only what serves one at
  // `boundaries`; a number of tokens what serves one at its multiples, and at `boundaries`.
  ReachableMask(const HitGroup& group, const HitGrid& grid, std::optional<std::uint32_t> retention,
                const ReplayBoundaries& boundaries) noexcept;

  // Of a lookup: what serves a hit at any multiple of S.
  ReachableMask(const HitGroup& group, const HitGrid& grid) noexcept
      : ReachableMask(group, grid, std::nullopt, {}) {}

  bool all() const noexcept { return all_; }
  bool keeps(std::uint32_t chunk) const noexcept {
    if (all_) return true;
    if (segment_ != 0 && chunk >= shift_ && (chunk - shift_) % segment_ >= segment_ - need_) {
      return true;
    }
    for (std::uint32_t i = 0; i < count_; ++i) {
      if (chunk >= tails_[i].first && chunk < tails_[i].end) return true;
    }
    return false;
  }

 private:
  bool all_ = true;
  std::uint32_t need_ = 0;     // chunks that a hit needs
  std::uint32_t shift_ = 0;    // chunks by which they lie beyond the hit
  std::uint32_t segment_ = 0;  // chunks between hits; 0: none
  std::array<ChunkRange, 4> tails_{};
  std::uint32_t count_ = 0;
};

}  // namespace kvprism
