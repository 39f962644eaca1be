// Where an object of key schema `vllm` would not have the bytes of the reference's.
#pragma once

#include <optional>

#include "kvprism/base/error.h"
#include "kvprism/base/ids.h"
#include "kvprism/layout/segment_map.h"

namespace kvprism::detail {

// The first stored group with layers on this rank: the reference's objects hold its rows, whichever
// group they are of. Absent where there is none.
std::optional<StoreIndex> first_placed(const SegmentMap& map) noexcept;

void check_vllm_objects(const SegmentMap& map, ProblemList& problems);

}  // namespace kvprism::detail
