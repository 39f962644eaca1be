// What gives the bytes of stored groups their meaning on one rank.
#pragma once

#include <cstdint>
#include <vector>

#include "kvprism/group/projection.h"

namespace kvprism::detail {

// Kind, sizes, data type and windows of every stored group, by the first layer's spec.
std::vector<DigestFact> stored_group_facts(const Projection& projection);

// Tensor ranks that share one shard in schema `kvprism`: as many as hold the same bytes of every
// layer of the group for certain.
std::uint32_t shared_replicas(const ResolvedGroup& group, const ParallelSizes& parallel);

}  // namespace kvprism::detail
