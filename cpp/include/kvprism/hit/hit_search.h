// The longest usable prefix over several groups: a fixpoint of one rule per group
// (store_connector 4.1, 4.2; vLLM: MooncakeStoreCoordinator).
#pragma once

#include <cstdint>
#include <vector>

#include "kvprism/base/export.h"
#include "kvprism/base/ids.h"
#include "kvprism/hit/hit_group.h"
#include "kvprism/hit/presence.h"

namespace kvprism {

// Ownership: value. Threads: one at a time, because a search writes its notes into the object.
class KVPRISM_API HitSearch {
 public:
  // The sizes of every group divide or are multiples of each other as a Projection guarantees.
  HitSearch(std::vector<HitGroup> groups, const HitGrid& grid);
  explicit HitSearch(const Projection& projection);

  // Each a draft where one of its family is.
  const std::vector<HitGroup>& groups() const noexcept { return groups_; }
  const HitGrid& grid() const noexcept { return grid_; }

  // The longest prefix of at most `max_tokens`, a multiple of the alignment, that every group
  // supports; `local` when there is none. Below `local`, which is a multiple of every group's
  // chunk, everything counts as present: it is in the engine's own cache. No allocation.
  std::uint32_t find(const Presence& presence, std::uint32_t local,
                     std::uint32_t max_tokens) noexcept;

  // The same for a lookup: the hit that `presence` proves up to `probed` tokens, but at most
  // `limit`, so that something stays to be computed (R13).
  std::uint32_t find_below(const Presence& presence, std::uint32_t local, std::uint32_t probed,
                           std::uint32_t limit) noexcept;

  // The longest valid prefix of at most `hit` tokens when `presence` tells what arrived: nothing is
  // kept back for drafts, because `hit` has it taken off already.
  std::uint32_t find_loaded(const Presence& presence, std::uint32_t local,
                            std::uint32_t hit) noexcept;

  // The longest prefix of at most `max_tokens`, a multiple of S, that the groups which need all of
  // a prefix have: up to where others went the same way, whatever windows are left of it. 0 when
  // there is no such group.
  std::uint32_t shared_prefix(const Presence& presence, std::uint32_t local,
                              std::uint32_t max_tokens) const noexcept;

  // Tokens of the prefix whose object holds a group's last chunk of a hit that find() gave: `hit`,
  // or a longer prefix in the same chunk. 0 when the group needs no object there, which a chunked
  // group allows (W-C4).
  std::uint32_t tail_tokens(StoreIndex group, const Presence& presence,
                            std::uint32_t hit) const noexcept;

 private:
  // Groups that are searched as one.
  struct Family {
    HitGroup rule;
    std::vector<StoreIndex> members;
    bool proven = false;  // a draft's extra object was seen in this search
  };
  class Rows;

  std::uint32_t search(const Presence& presence, std::uint32_t local, std::uint32_t max_tokens,
                       bool drafts) noexcept;
  std::uint32_t longest(const Family& family, const Presence& presence, std::uint32_t local,
                        std::uint32_t bound, bool drop) const noexcept;
  std::uint32_t longest_prefix(const HitGroup& rule, const Rows& rows, std::uint32_t local,
                               std::uint32_t bound, bool drop) const noexcept;
  std::uint32_t longest_window(const HitGroup& rule, const Rows& rows, std::uint32_t local,
                               std::uint32_t bound, bool drop) const noexcept;
  std::uint32_t longest_chunk(const HitGroup& rule, const Rows& rows, std::uint32_t local,
                              std::uint32_t bound, bool drop) const noexcept;
  std::uint32_t longest_state(const HitGroup& rule, const Rows& rows, std::uint32_t local,
                              std::uint32_t bound) const noexcept;
  std::uint32_t aligned(std::uint32_t tokens) const noexcept {
    return tokens - tokens % grid_.alignment;
  }

  std::vector<HitGroup> groups_;
  HitGrid grid_;
  std::vector<Family> families_;  // prefix rules first: they settle in one pass
};

}  // namespace kvprism
