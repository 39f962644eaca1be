#include "sim/world_stages.h"

#include <algorithm>

namespace kvprism::sim {
namespace {

using detail::SeededRandom;

// Layers that every stage needs one of: those of a wrapper's first spec, which is all that an
// engine's scheduler knows of the wrapper.
std::vector<std::string>& spread_layers(GroupConfig& group) {
  return group.members.empty() ? group.layers : group.members[0].layers;
}

void lengthen(GroupConfig& group, std::size_t layers) {
  std::vector<std::string>& own = spread_layers(group);
  while (own.size() < layers) {
    const std::string name = own.front() + "." + std::to_string(own.size());
    own.push_back(name);
    if (!group.members.empty()) group.layers.insert(group.layers.end() - 1, name);
  }
}

// Where stages begin, ascending from 0; each has a layer at least.
std::vector<std::uint32_t> cuts(SeededRandom& random, std::uint32_t layers, std::uint32_t stages) {
  std::vector<std::uint32_t> first{0};
  for (std::uint32_t stage = 1; stage < stages; ++stage) {
    const std::uint32_t last = layers - (stages - stage);
    first.push_back(static_cast<std::uint32_t>(random.between(first.back() + 1, last)));
  }
  first.push_back(layers);
  return first;
}

}  // namespace

std::vector<StageConfig> cut_into_stages(SeededRandom& random, CacheConfig& cache) {
  const std::uint32_t stages = cache.parallel.pp;
  std::vector<std::vector<std::uint32_t>> first;  // by group
  for (GroupConfig& group : cache.groups) {
    lengthen(group, stages);
    const auto layers = static_cast<std::uint32_t>(spread_layers(group).size());
    first.push_back(cache.key_schema == "vllm" && !first.empty() ? first[0]
                                                                 : cuts(random, layers, stages));
  }
  std::vector<StageConfig> all;
  for (std::uint32_t stage = 0; stage < stages; ++stage) {
    StageConfig& one = all.emplace_back(StageConfig{cache, {}});
    for (std::size_t g = 0; g < cache.groups.size(); ++g) {
      const std::uint32_t from = first[g][stage];
      const std::uint32_t to = first[g][stage + 1];
      GroupConfig& group = one.cache.groups[g];
      std::vector<std::string>& own = spread_layers(group);
      const std::vector<std::string> kept(own.begin() + from, own.begin() + to);
      own = kept;
      if (!group.members.empty()) {
        // The layer of another spec is the model's last.
        if (stage + 1 < stages) group.members.resize(1);
        group.layers = kept;
        if (stage + 1 == stages) group.layers.push_back(group.members[1].layers[0]);
      }
      one.first_layers.push_back(from);
    }
  }
  return all;
}

}  // namespace kvprism::sim
