// The rules that every cache config obeys, whether it came from JSON or from an engine's own
// objects.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kvprism/base/error.h"
#include "kvprism/group/cache_config.h"
#include "kvprism/spec/spec_registry.h"
#include "kvprism/spec/spec_traits.h"

namespace kvprism::detail {

// Names that `kv_layout` and `key_schema` may take.
std::vector<std::string_view> layout_names();
std::vector<std::string_view> key_schema_names();

// "one of a, b, c"
std::string one_of(const std::vector<std::string_view>& words);

std::string group_path(std::size_t index);

// Adds every problem of `config`.
void check_config(const CacheConfig& config, const SpecRegistry& registry, ProblemList& problems);

// Whether a group enters the store projection.
bool stored(const GroupConfig& group, const SpecTraits& traits) noexcept;

// S and h of valid groups (decision 2). A value the engine gave holds; nullopt when the lcm does
// not fit.
struct BlockSizes {
  std::optional<std::uint32_t> scheduler;
  std::uint32_t hash;
};
BlockSizes block_sizes(const CacheConfig& config, const SpecRegistry& registry);

}  // namespace kvprism::detail
