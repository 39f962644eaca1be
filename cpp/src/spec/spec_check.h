// What a spec must fulfil on its own, whatever config it stands in.
#pragma once

#include <string_view>

#include "kvprism/base/error.h"
#include "kvprism/spec/spec_registry.h"

namespace kvprism::detail {

// Adds every problem of `spec`, which is of `kind`, with paths below `path`.
void check_spec(const CacheSpec& spec, const SpecKind& kind, std::string_view path,
                ProblemList& problems);

}  // namespace kvprism::detail
