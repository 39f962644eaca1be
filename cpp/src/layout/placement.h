// Where every block of every group lies, proven against the tensors that an engine declared.
#pragma once

#include <cstdint>
#include <vector>

#include "kvprism/base/ids.h"
#include "kvprism/layout/segment_map.h"

namespace kvprism::detail {

// What one block of a group adds: `length` bytes at first + block * stride.
struct Piece {
  std::byte* first;
  std::uint64_t stride;
  std::uint64_t length;
  std::size_t region;
};

struct Placement {
  std::vector<Piece> pieces;  // in the order of the layout's name, adjacent ones merged
  std::uint64_t bytes = 0;
  bool kernel_blocks = false;  // smaller than the blocks, of a layer
};

struct Placements {
  std::vector<Region> regions;
  IndexedVector<GroupId, Placement> groups;
};

// Throws Error (kInvalidConfig) with every problem, as SegmentMap::make() documents.
Placements place(const Projection& projection, const std::vector<CacheTensor>& tensors);

}  // namespace kvprism::detail
