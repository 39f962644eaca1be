// How the layers of a world's model are spread over its pipeline stages.
#pragma once

#include <vector>

#include "sim/world_config.h"

namespace kvprism::sim {

// As many as cache.parallel.pp says, uneven, and often without layers of some groups, which the
// whole cache is told of (`pipeline_stages`) and the stages' own ones may not be. Gives groups that
// are too short more layers first; the groups of key schema `vllm` are cut alike.
std::vector<StageConfig> cut_into_stages(detail::SeededRandom& random, CacheConfig& cache);

}  // namespace kvprism::sim
