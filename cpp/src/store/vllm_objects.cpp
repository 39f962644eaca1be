#include "store/vllm_objects.h"

#include <string>
#include <utility>
#include <vector>

namespace kvprism::detail {

// Schema `vllm` promises the reference's bytes too. Its objects hold whole strides of every stored
// layer in the pool, which is what ours hold with one group and layers outermost.
void check_vllm_objects(const SegmentMap& map, ProblemList& problems) {
  const Projection& projection = map.projection();
  const auto refuse = [&](std::string path, std::string value, std::string expected) {
    problems.add(std::move(path), std::move(value), std::move(expected),
                 "key schema vllm writes the reference's bytes; choose schema kvprism");
  };
  if (projection.num_store_groups() > 1) {
    refuse("schema", std::to_string(projection.num_store_groups()) + " stored groups",
           "one, because the reference's objects hold the layers of all groups");
  }
  if (projection.kv_layout() != "LBHNC" && projection.kv_layout() != "LBNHC") {
    refuse("kv_layout", projection.kv_layout(), "LBHNC or LBNHC");
  }
  if (projection.num_store_groups() == 0 || projection.num_blocks() < 3) return;
  std::vector<Segment> two;
  const BlockId blocks[] = {BlockId{1}, BlockId{2}};
  map.append_blocks(projection.group_id(StoreIndex{0}), blocks, two);
  // Neighbouring blocks merge where the stride is the page.
  if (two.size() > map.segments_per_block(StoreIndex{0})) {
    refuse("block_stride", "more than a page", "the page, page_size_padded included");
  }
}

}  // namespace kvprism::detail
