// What gives the bytes of stored groups their meaning on one rank.
#pragma once

#include <vector>

#include "kvprism/group/projection.h"

namespace kvprism::detail {

// Kind, sizes, data type and windows of every stored group, by the first layer's spec.
std::vector<DigestFact> stored_group_facts(const Projection& projection);

}  // namespace kvprism::detail
