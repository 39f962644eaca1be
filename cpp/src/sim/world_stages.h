// How the layers of a world's model are spread over its pipeline stages.
#pragma once

#include <vector>

#include "sim/world_config.h"

namespace kvprism::sim {

// As many as cache.parallel.pp says, uneven. Gives groups that are too short more layers first, so
// that every stage has one of each; the groups of key schema `vllm` are cut alike.
std::vector<StageConfig> cut_into_stages(detail::SeededRandom& random, CacheConfig& cache);

}  // namespace kvprism::sim
