// What of a hit a load brings.
#pragma once

#include <cstdint>

#include "kvprism/hit/hit_group.h"

namespace kvprism::detail {

// A window of one token looks back to nothing: its object proves a hit (D1), nobody reads it, and
// engines keep no block for it.
constexpr bool only_proves(const HitGroup& group) noexcept {
  return group.rule == HitRule::kWindow && group.window == 1;
}

// Those of load_chunks() that have a block.
inline ChunkRange fetched_chunks(const HitGroup& group, std::uint32_t hit,
                                 std::uint32_t local) noexcept {
  ChunkRange range = load_chunks(group, hit, local);
  if (only_proves(group)) range.first = range.end;
  return range;
}

}  // namespace kvprism::detail
