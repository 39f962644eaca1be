// The engine's own view of a group: which blocks a prefix of a given length needs, by its own
// arithmetic.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "kvprism/base/ids.h"
#include "kvprism/group/projection.h"
#include "kvprism/sim/content_oracle.h"

namespace kvprism::sim {

// Stored kinds, and the ring behind them. `engine_prefix` is one that an engine has added.
inline constexpr std::array<std::string_view, 11> kModelKinds{
    "full_attention", "mla_attention",       "hidden_state",
    "rswa",           "sink_full_attention", "chunked_local_attention",
    "sliding_window", "sliding_window_mla",  "mamba",
    "engine_prefix",  "circular_buffer"};
inline constexpr std::size_t kStoredKinds = kModelKinds.size() - 1;

struct GroupModel {
  enum class Kind : std::uint8_t { kFull, kWindow, kChunk, kState, kRing };

  GroupId id{};
  Kind kind{};
  std::size_t name = 0;          // in kModelKinds
  bool stored = false;           // by its kind and its membership in transfers
  std::uint32_t tokens = 0;      // per block; the capacity of a ring
  std::uint32_t window = 0;      // of a chunk: the tokens of an attention chunk
  std::uint32_t gap_window = 0;  // generated tokens farther back lose their blocks; 0: none do
  bool fine = false;             // hits may end inside its blocks
  std::uint32_t replay = 0;      // of a ring
  std::uint32_t extra = 0;       // blocks of a table behind the one with the state
  std::uint32_t replicas = 1;    // neighbouring tensor ranks that hold the same bytes
  std::uint32_t prefill_ranks = 1;
  // A hit needs one more object behind it, which is computed anew. Counts for all of a family.
  bool draft = false;
  std::size_t family = 0;                  // the first stored group of an equal spec
  std::vector<PageShape> shapes;           // by layer, of rank 0
  std::vector<std::uint64_t> page_bytes;   // by layer, with padding
  std::vector<std::uint64_t> moved_bytes;  // by layer, as objects have them

  std::uint32_t layers() const noexcept { return static_cast<std::uint32_t>(shapes.size()); }
  PageShape shape(std::uint32_t layer, std::uint32_t tensor_rank,
                  std::uint32_t prefill_rank = 0) const noexcept {
    return of_rank(shapes[layer], tensor_rank, prefill_rank);
  }
  // A page as another rank holds it. Ranks that share tokens, and replicas, hold the same heads;
  // where prefill ranks share the tokens, each tensor rank has heads of its own.
  PageShape of_rank(PageShape page, std::uint32_t tensor_rank,
                    std::uint32_t prefill_rank = 0) const noexcept {
    const bool over_prefill = prefill_ranks > 1 && page.context_ranks == prefill_ranks;
    const std::uint32_t alike = over_prefill ? replicas : std::max(page.context_ranks, replicas);
    page.prefill_rank = prefill_rank;
    page.first_head = tensor_rank / alike * page.heads;
    page.context_rank = (over_prefill ? prefill_rank : tensor_rank) % page.context_ranks;
    return page;
  }

  // Chunks that a prefix of `length` tokens touches; the last one may be used in part.
  std::uint32_t chunks(std::uint32_t length) const noexcept {
    return (length + tokens - 1) / tokens;
  }
  // First chunk that computing the token at `length` still reads; the last one is chunks(length)-1.
  std::uint32_t first_needed(std::uint32_t length) const noexcept {
    switch (kind) {
      case Kind::kFull:
        return 0;
      case Kind::kWindow:
        return length + 1 > window ? (length + 1 - window) / tokens : 0;
      case Kind::kChunk:
        return (length - length % window) / tokens;
      case Kind::kState:
        return length == 0 ? 0 : (length - 1) / tokens;
      case Kind::kRing:
        return 0;
    }
    return 0;
  }
};

// Groups of a projection in their order. Throws Error for a kind that the simulation does not know.
std::vector<GroupModel> model_groups(const Projection& projection);

// Where the engine keeps a state for whoever replays or continues a prompt of `prompt` tokens: the
// last multiple of `alignment` that leaves `replay` to compute; with drafts at least one unit
// earlier than the last one.
constexpr std::uint32_t model_checkpoint(std::uint32_t prompt, std::uint32_t alignment, bool drafts,
                                         std::uint32_t replay) noexcept {
  const std::uint32_t most = (prompt - std::min(prompt, replay)) / alignment * alignment;
  if (!drafts) return most;
  const std::uint32_t last = prompt / alignment * alignment;
  return std::min(most, last - std::min(last, alignment));
}

// Whether a hit of any of these groups is followed by objects that are computed anew.
bool model_drafts(const std::vector<GroupModel>& groups) noexcept;

// What the engine itself takes for S: tokens at which every stored group has a whole block.
std::uint32_t model_step(const std::vector<GroupModel>& groups) noexcept;

// Tokens that every request must compute itself after a hit.
std::uint32_t model_replay(const std::vector<GroupModel>& groups) noexcept;

}  // namespace kvprism::sim
