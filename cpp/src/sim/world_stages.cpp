#include "sim/world_stages.h"

#include <algorithm>
#include <numeric>

namespace kvprism::sim {
namespace {

using detail::SeededRandom;

// Layers that every stage with the group needs one of: those of a wrapper's first spec, which is
// all that an engine's scheduler knows of the wrapper.
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

bool is_stored(const GroupConfig& group) {
  return group.spec.kind != "circular_buffer" && group.enable_kv_transfer;
}

// Which stages hold layers of each group, ascending: all, or some. Each holds a stored group.
std::vector<std::vector<std::uint32_t>> draw_holders(SeededRandom& random,
                                                     const CacheConfig& cache) {
  const std::uint32_t stages = cache.parallel.pp;
  const bool uneven = stages > 1 && random.chance(2, 3);
  std::vector<std::vector<std::uint32_t>> holders(cache.groups.size());
  std::vector<bool> bare(stages, true);
  std::size_t first_stored = cache.groups.size();
  for (std::size_t g = cache.groups.size(); g-- > 0;) {
    const auto certain =
        static_cast<std::uint32_t>(uneven && random.chance(1, 2) ? random.below(stages) : stages);
    for (std::uint32_t stage = 0; stage < stages; ++stage) {
      if (certain == stages || stage == certain || random.chance(1, 3)) holders[g].push_back(stage);
    }
    if (!is_stored(cache.groups[g])) continue;
    first_stored = g;
    for (const std::uint32_t stage : holders[g]) bare[stage] = false;
  }
  for (std::uint32_t stage = 0; stage < stages; ++stage) {
    if (bare[stage]) holders[first_stored].push_back(stage);
  }
  std::sort(holders[first_stored].begin(), holders[first_stored].end());
  return holders;
}

// Layers of a group on each stage; the groups of key schema `vllm` overlay each other.
std::vector<std::uint32_t> spread(SeededRandom& random, GroupConfig& group,
                                  const std::vector<std::uint32_t>& holders, std::uint32_t stages,
                                  const std::vector<std::uint32_t>& common) {
  std::vector<std::uint32_t> counts(stages);
  std::uint32_t all = 0;
  for (const std::uint32_t stage : holders)
    all += counts[stage] = common.empty() ? 1 : common[stage];
  lengthen(group, all);
  std::vector<std::string>& own = spread_layers(group);
  if (!common.empty()) {
    own.resize(all);
    return counts;
  }
  const auto first = cuts(random, static_cast<std::uint32_t>(own.size()),
                          static_cast<std::uint32_t>(holders.size()));
  for (std::size_t i = 0; i < holders.size(); ++i) counts[holders[i]] = first[i + 1] - first[i];
  return counts;
}

}  // namespace

std::vector<StageConfig> cut_into_stages(SeededRandom& random, CacheConfig& cache) {
  const std::uint32_t stages = cache.parallel.pp;
  const auto holders = draw_holders(random, cache);
  std::vector<std::uint32_t> common;
  if (cache.key_schema == "vllm") {
    GroupConfig any = cache.groups[0];
    std::vector<std::uint32_t> everywhere(stages);
    std::iota(everywhere.begin(), everywhere.end(), 0U);
    common = spread(random, any, everywhere, stages, {});
  }
  std::vector<StageConfig> all(stages);
  std::vector<std::vector<std::uint32_t>> counts;  // by group
  for (std::size_t g = 0; g < cache.groups.size(); ++g) {
    counts.push_back(spread(random, cache.groups[g], holders[g], stages, common));
    if (holders[g].size() < stages) cache.groups[g].pipeline_stages = holders[g];
  }
  // A worker may know only its own stage.
  const bool told = stages > 1 && random.chance(1, 2);
  std::vector<std::uint32_t> from(cache.groups.size());
  for (std::uint32_t stage = 0; stage < stages; ++stage) {
    StageConfig& one = all[stage];
    one.cache = cache;
    one.first_layers = from;
    for (std::size_t g = 0; g < cache.groups.size(); ++g) {
      GroupConfig& group = one.cache.groups[g];
      if (!told) group.pipeline_stages.reset();
      std::vector<std::string>& own = spread_layers(group);
      const auto begin = own.begin() + from[g];
      from[g] += counts[g][stage];
      const std::vector<std::string> kept(begin, begin + counts[g][stage]);
      own = kept;
      if (group.members.empty()) continue;
      // The layer of another spec is the model's last.
      const bool last = stage == holders[g].back();
      if (!last) group.members.resize(1);
      group.layers = kept;
      if (last) group.layers.push_back(group.members[1].layers[0]);
    }
  }
  return all;
}

}  // namespace kvprism::sim
