#include "store/vllm_objects.h"

#include <algorithm>
#include <string>
#include <vector>

namespace kvprism::detail {
namespace {

constexpr const char* kHint = "key schema vllm writes the reference's bytes; choose schema kvprism";

std::vector<Segment> block_of(const SegmentMap& map, StoreIndex group, std::int32_t block) {
  std::vector<Segment> segments;
  map.append_segments(group, BlockId{block}, segments);
  return segments;
}

bool same_place(const std::vector<Segment>& a, const std::vector<Segment>& b) {
  if (a.size() != b.size()) return false;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (a[i].base != b[i].base || a[i].length != b[i].length) return false;
  }
  return true;
}

bool packed(const std::vector<Segment>& block, const std::vector<Segment>& next) {
  for (std::size_t i = 0; i < block.size(); ++i) {
    if (next[i].base != block[i].base + block[i].length) return false;
  }
  return true;
}

// Of several layers the reference takes a whole row of the allocation: every byte of it must be the
// block's.
bool fills_rows(const SegmentMap& map, const std::vector<Segment>& block) {
  const std::uint64_t blocks = map.projection().num_blocks();
  if (block.size() != 1 || map.regions().size() != 1) return false;
  const Region& region = map.regions()[0];
  return region.length == block[0].length * blocks &&
         block[0].base == region.base + block[0].length;
}

// Heads outside layers: of several of both the reference takes a whole row for each, which overlaps
// the next block (W-C1).
bool rows_overlap(const Projection& projection, const ResolvedGroup& group) {
  return projection.kv_layout() == "BHLNC" && group.layers.size() > 1 &&
         std::any_of(group.specs.begin(), group.specs.end(),
                     [](const CacheSpec& spec) { return page_axes(spec).heads > 1; });
}

// The reference asserts that heads lie within the blocks that it is shown, which are the kernel's.
bool heads_outside_kernel_blocks(const SegmentMap& map, StoreIndex index) {
  const std::vector<CacheSpec>& specs = map.projection().group(index).specs;
  return map.projection().kv_layout() == "LHBNC" && map.has_kernel_blocks(index) &&
         std::any_of(specs.begin(), specs.end(),
                     [](const CacheSpec& spec) { return page_axes(spec).heads > 1; });
}

}  // namespace

std::optional<StoreIndex> first_placed(const SegmentMap& map) noexcept {
  for (const StoreIndex index : indices<StoreIndex>(map.projection().num_store_groups())) {
    if (map.segments_per_block(index) != 0) return index;
  }
  return std::nullopt;
}

// The reference's object holds, for each stored layer of the pool, one stride of its tensor at the
// block's place, layers that overlay each other once.
void check_vllm_objects(const SegmentMap& map, ProblemList& problems) {
  const Projection& projection = map.projection();
  const auto refuse = [&](std::string path, std::string value, std::string expected,
                          std::string why = {}) {
    if (!why.empty()) why += "; ";
    problems.add(std::move(path), std::move(value), std::move(expected), why + kHint);
  };
  if (projection.num_store_groups() == 0) return;
  const std::optional<StoreIndex> placed = first_placed(map);
  if (!placed) {
    refuse("groups", "no layer of a stored group on this rank", "at least one",
           "the reference looks for its objects, and would never hit");
    return;
  }
  if (projection.num_blocks() < 3) {
    refuse("num_blocks", std::to_string(projection.num_blocks()), "at least 3",
           "two blocks beside the null block show how far apart blocks are");
    return;
  }
  const std::vector<Segment> first = block_of(map, *placed, 1);
  for (const StoreIndex index : indices<StoreIndex>(projection.num_store_groups())) {
    if (map.segments_per_block(index) == 0) continue;
    const std::string path = "groups[" + std::to_string(raw(projection.group_id(index))) + "]";
    const std::vector<Segment> block = block_of(map, index, 1);
    if (rows_overlap(projection, projection.group(index))) {
      refuse(path, "several layers and heads in layout BHLNC", "one layer, or one head",
             "the reference's objects overlap the next blocks");
    } else if (heads_outside_kernel_blocks(map, index)) {
      refuse(path, "several heads in blocks of several kernel blocks in layout LHBNC",
             "one head, or kernel_block_size as large as the block",
             "the reference does not start with them");
    } else if (!same_place(block, first)) {
      refuse(path, "layers at other places than those of the first stored group",
             "groups that overlay each other layer by layer, because the reference's objects hold "
             "the layers of all groups");
    } else if (!packed(block, block_of(map, index, 2))) {
      refuse("block_stride", "more than a page", "the page, page_size_padded included");
    } else if (projection.kv_layout().front() == 'B' && projection.group(index).layers.size() > 1 &&
               !fills_rows(map, block)) {
      refuse(
          "bytes", "an allocation that is more than its blocks",
          "rows without gaps from the first byte to the last, in layout " + projection.kv_layout());
    }
  }
}

}  // namespace kvprism::detail
