// Proof that no two blocks of a pool share bytes that they must not share.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "kvprism/base/ids.h"

namespace kvprism::detail {

// The pages of one layer: page b begins at first + b * stride. stride >= page.
struct PageRow {
  std::uint64_t first;
  std::uint64_t stride;
  std::uint64_t page;
  GroupId group;
};

// Two pages that overlap although their ids differ or their group is the same.
struct Overlap {
  std::size_t row_a;
  std::uint32_t block_a;
  std::size_t row_b;
  std::uint32_t block_b;
};

// The first overlap in address order, if there is one. Rows that coincide, as groups do that
// overlay one pool, cost nothing; rows of one stride are compared in pairs, whatever the number of
// blocks; other rows that share bytes are swept page by page.
std::optional<Overlap> find_overlap(const std::vector<PageRow>& rows, std::uint32_t num_blocks);

}  // namespace kvprism::detail
