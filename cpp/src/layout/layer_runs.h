// Where one layer's bytes of a block lie inside a tensor, from the layout's name and the strides.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kvprism/base/error.h"
#include "kvprism/layout/segment_map.h"
#include "kvprism/spec/cache_spec.h"
#include "layout/layout_name.h"

namespace kvprism::detail {

// `length` bytes at offset + block * block_stride from the start of the allocation.
struct Run {
  std::uint64_t offset;
  std::uint64_t length;
  std::uint64_t head;  // 0 unless the layout splits a page by heads
};

// A layer at a position of a tensor. All sums saturate.
struct LayerShape {
  LayoutOrder layout;
  const CacheTensor* tensor;
  std::uint64_t position;  // in the tensor's layers
  PageAxes axes;
  std::uint64_t page;   // bytes, with padding
  std::uint64_t moved;  // bytes of it, from its beginning
  std::uint32_t num_blocks;

  bool splits_heads() const noexcept { return !layout.head_inside_page && axes.heads > 1; }
  // Bytes that lie together: of one head where the layout splits pages by heads, else of the page.
  std::uint64_t part_bytes() const noexcept;
  std::uint64_t parts() const noexcept { return splits_heads() ? axes.heads : 1; }
  // From one head to the next where the layout splits pages.
  std::uint64_t head_stride() const noexcept;
  std::uint64_t begin() const noexcept;
  // Where the layer's last block ends.
  std::uint64_t end() const noexcept;
  // Kernel blocks in a block; 1 unless the tensor declares smaller ones.
  std::uint64_t kernel_blocks() const noexcept;
};

// "12 bytes"; a saturated sum is "more than 2^64 bytes".
std::string bytes_text(std::uint64_t bytes);

// Adds what the strides contradict: the page, the layout's order, the kernel's blocks. `layers`
// of the group lie in the tensor, at positions up to `span` apart.
void check_strides(const LayerShape& shape, std::uint64_t layers, std::uint64_t span,
                   const std::string& tensor_path, ProblemList& problems);

// The pages' parts as the memory has them, for the proof that blocks are disjoint.
std::vector<Run> parts_of(const LayerShape& shape);

// The layer's bytes of a block that are moved, in the order that the layout's name demands of its
// content: heads, then positions, or the other way round. Kernel blocks smaller than a block put
// positions outside heads; where the name demands heads first, each head is collected from all of
// them.
std::vector<Run> runs_of(const LayerShape& shape);

}  // namespace kvprism::detail
