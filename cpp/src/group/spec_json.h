// A cache spec in the JSON form (docs/configuration.md).
#pragma once

#include <nlohmann/json.hpp>
#include <span>
#include <string_view>

#include "group/json_object.h"
#include "kvprism/base/error.h"
#include "kvprism/spec/cache_spec.h"
#include "kvprism/spec/spec_registry.h"

namespace kvprism::detail {

using nlohmann::ordered_json;

template <class T>
ordered_json or_null(const std::optional<T>& value) {
  return value ? ordered_json(*value) : ordered_json(nullptr);
}

// Reads a spec whose `kind` has been read, and refuses every key that is neither of such a spec nor
// one of `around`.
void read_spec(JsonObject& object, const SpecRegistry& registry,
               std::span<const std::string_view> around, ProblemList& problems, CacheSpec& spec);

// Every key of the spec, with its kind.
ordered_json spec_json(const CacheSpec& spec);

}  // namespace kvprism::detail
