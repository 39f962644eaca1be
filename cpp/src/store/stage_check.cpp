#include "store/stage_check.h"

#include <algorithm>
#include <string>

#include "kvprism/key/key_schema.h"

namespace kvprism::detail {

void check_stage(const Projection& projection, Rank rank, ProblemList& problems) {
  const std::uint32_t stage = rank_position(rank, projection.parallel()).pp;
  for (const StoreIndex index : indices<StoreIndex>(projection.num_store_groups())) {
    const ResolvedGroup& group = projection.group(index);
    // A stage that is told of no list knows only itself.
    if (!projection.config().groups[raw(group.id)].pipeline_stages) continue;
    const bool named = std::binary_search(group.stages.begin(), group.stages.end(), stage);
    if (named == !group.layers.empty()) continue;
    const std::string path = "groups[" + std::to_string(raw(group.id)) + "].";
    if (named) {
      problems.add(
          path + "layers", "[]",
          "the layers that stage " + std::to_string(stage) + " holds, as pipeline_stages says");
    } else {
      problems.add(path + "pipeline_stages", "a list without " + std::to_string(stage),
                   "the stage of rank " + std::to_string(raw(rank)) + ", which holds layer " +
                       group.layers[0]);
    }
  }
}

}  // namespace kvprism::detail
