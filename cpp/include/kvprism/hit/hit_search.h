// The longest usable prefix over several groups: a fixpoint of one rule per group
// (store_connector 4.1, 4.2).
#pragma once

#include <cstdint>
#include <vector>

#include "kvprism/base/export.h"
#include "kvprism/base/ids.h"
#include "kvprism/group/projection.h"
#include "kvprism/hit/presence.h"
#include "kvprism/spec/spec_traits.h"

namespace kvprism {

// What the search knows of a group: no kind, no key.
struct HitGroup {
  HitRule rule;
  std::uint32_t chunk_tokens;  // tokens per block
  std::uint32_t window;        // tokens, for kWindow
  bool draft;                  // belongs to a draft model
};

// The store groups of a projection in StoreIndex order.
KVPRISM_API std::vector<HitGroup> hit_groups(const Projection& projection);

// A range of chunks, [first, end).
struct ChunkRange {
  std::uint32_t first = 0;
  std::uint32_t end = 0;

  bool operator==(const ChunkRange&) const = default;
  bool empty() const noexcept { return first >= end; }
  std::uint32_t size() const noexcept { return empty() ? 0 : end - first; }
};

// Chunks of a group that must be usable for a prefix of `tokens` (a multiple of the chunk) to be
// usable.
KVPRISM_API ChunkRange needed_chunks(const HitGroup& group, std::uint32_t tokens) noexcept;

// Chunks that a load must fetch for a hit of `hit` tokens when `local` tokens are already there
// (R40): needed, and not wholly below `local`.
KVPRISM_API ChunkRange load_chunks(const HitGroup& group, std::uint32_t hit,
                                   std::uint32_t local) noexcept;

// The largest multiple of `alignment` up to `max_tokens` that every group supports; at least
// `local`, below which every chunk counts as present (it is in the engine's own cache).
KVPRISM_API std::uint32_t find_hit(const std::vector<HitGroup>& groups, const Presence& presence,
                                   std::uint32_t local, std::uint32_t max_tokens,
                                   std::uint32_t alignment) noexcept;

}  // namespace kvprism
