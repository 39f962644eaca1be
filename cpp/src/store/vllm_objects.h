// Where an object of key schema `vllm` would not have the bytes of the reference's.
#pragma once

#include "kvprism/base/error.h"
#include "kvprism/layout/segment_map.h"

namespace kvprism::detail {

void check_vllm_objects(const SegmentMap& map, ProblemList& problems);

}  // namespace kvprism::detail
