// What hit searches and masks know of a group: a rule and its sizes; no kind, no key.
#pragma once

#include <cstdint>
#include <vector>

#include "kvprism/base/export.h"
#include "kvprism/group/projection.h"
#include "kvprism/spec/spec_traits.h"

namespace kvprism {

struct HitGroup {
  HitRule rule = HitRule::kNever;
  std::uint32_t chunk_tokens = 0;  // B, tokens per block
  std::uint32_t window = 0;        // tokens, for kWindow and kChunk
  // Belongs to a draft model: a hit must be followed by one more object, which is computed again,
  // because a draft's last position depends on the token behind it (R23).
  bool draft = false;
  // Tokens between the prefixes that may have an object of their own: B, or the hash unit where
  // hits may end inside a block. Presence is counted in these.
  std::uint32_t unit_tokens = 0;
  // Groups of one family have equal specs and are searched as one: an object counts when each of
  // them has it. Any number; equal for groups of one family.
  std::uint32_t family = 0;

  bool fine() const noexcept { return unit_tokens < chunk_tokens; }
  bool operator==(const HitGroup&) const = default;
};

// Sizes in tokens that all groups share.
struct HitGrid {
  std::uint32_t step = 0;       // S: saves and retention
  std::uint32_t unit = 0;       // h: one hash
  std::uint32_t alignment = 0;  // hits end on multiples: S, or h where hits may end inside a block

  bool operator==(const HitGrid&) const = default;
};

// The store groups of a projection in StoreIndex order.
KVPRISM_API std::vector<HitGroup> hit_groups(const Projection& projection);
KVPRISM_API HitGrid hit_grid(const Projection& projection);

// A range of chunks, [first, end).
struct ChunkRange {
  std::uint32_t first = 0;
  std::uint32_t end = 0;

  bool operator==(const ChunkRange&) const = default;
  bool empty() const noexcept { return first >= end; }
  std::uint32_t size() const noexcept { return empty() ? 0 : end - first; }
  bool contains(std::uint32_t chunk) const noexcept { return first <= chunk && chunk < end; }
};

// Chunks of a window group that a hit needs at its end: those of the window-1 tokens before the
// next one, and at least one, which proves that the prefix was computed.
KVPRISM_API std::uint32_t window_chunks(const HitGroup& group) noexcept;

// Chunks of a group that must be there for a prefix of `tokens` to be usable. The last one is only
// partly needed when `tokens` ends inside it.
KVPRISM_API ChunkRange needed_chunks(const HitGroup& group, std::uint32_t tokens) noexcept;

// Chunks that a load must fetch for a hit of `hit` tokens when `local` tokens are already there
// (R40): needed, and not wholly below `local`.
KVPRISM_API ChunkRange load_chunks(const HitGroup& group, std::uint32_t hit,
                                   std::uint32_t local) noexcept;

}  // namespace kvprism
