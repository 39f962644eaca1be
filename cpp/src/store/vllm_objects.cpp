#include "store/vllm_objects.h"

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

// Of several layers the reference takes a whole row of the allocation: every byte of it must be the
// block's.
bool fills_rows(const SegmentMap& map, const std::vector<Segment>& block) {
  const std::uint64_t blocks = map.projection().num_blocks();
  if (block.size() != 1 || map.regions().size() != 1) return false;
  const Region& region = map.regions()[0];
  return region.length == block[0].length * blocks &&
         block[0].base == region.base + block[0].length;
}

}  // namespace

// The reference's object holds, for each stored layer of the pool, one stride of its tensor at the
// block's place, layers that overlay each other once.
void check_vllm_objects(const SegmentMap& map, ProblemList& problems) {
  const Projection& projection = map.projection();
  const auto refuse = [&](std::string path, std::string value, std::string expected) {
    problems.add(std::move(path), std::move(value), std::move(expected), kHint);
  };
  if (projection.num_store_groups() == 0 || projection.num_blocks() < 3) return;
  const std::vector<Segment> first = block_of(map, StoreIndex{0}, 1);
  for (const StoreIndex index : indices<StoreIndex>(projection.num_store_groups())) {
    const std::string path = "groups[" + std::to_string(raw(projection.group_id(index))) + "]";
    const std::vector<Segment> block = block_of(map, index, 1);
    if (!same_place(block, first)) {
      refuse(path, "layers at other places than those of the first stored group",
             "groups that overlay each other layer by layer, because the reference's objects hold "
             "the layers of all groups");
      continue;
    }
    const std::vector<Segment> next = block_of(map, index, 2);
    bool packed = true;
    for (std::size_t i = 0; i < block.size(); ++i)
      packed = packed && next[i].base == block[i].base + block[i].length;
    if (!packed) {
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
