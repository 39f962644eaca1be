// A group without its wrapper: the spec of every layer, and what they agree on.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kvprism/base/error.h"
#include "kvprism/group/cache_config.h"
#include "kvprism/spec/spec_registry.h"
#include "kvprism/spec/spec_traits.h"

namespace kvprism::detail {

struct Unwrapped {
  std::vector<std::string> layers;
  std::vector<CacheSpec> specs;              // one; of a wrapper: its members'
  std::vector<std::uint32_t> spec_of_layer;  // index in `specs`
};

Unwrapped unwrap(const GroupConfig& group);

// Adds what is wrong with the wrapper itself: a wrapper without members or with a spec of its own,
// members around no wrapper, an order that is not one of the members' layers.
void check_wrapper(const GroupConfig& group, const std::string& path, ProblemList& problems);

// Adds every fact in which members disagree. All specs must be valid on their own.
void check_agreement(const GroupConfig& group, const std::string& path,
                     const ParallelSizes& parallel, const SpecRegistry& registry,
                     ProblemList& problems);

// Traits of all specs together: cacheable and finely searched when each is, replay of the longest;
// the rest is the first's, which check_agreement() made the others'.
SpecTraits combined_traits(const std::vector<CacheSpec>& specs, const SpecRegistry& registry);

}  // namespace kvprism::detail
