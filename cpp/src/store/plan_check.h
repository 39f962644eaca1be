// Whether a plan's runs and blocks make sense for the groups that a worker holds.
#pragma once

#include <optional>
#include <vector>

#include "kvprism/base/error.h"
#include "kvprism/group/projection.h"
#include "kvprism/hit/hit_group.h"
#include "kvprism/wire/step_plan.h"

namespace kvprism::detail {

// The first thing that is wrong with a plan that check_plan has passed; nothing when all is well.
// `groups` are hit_groups() of the projection.
std::optional<Problem> plan_problem(const StepPlanView& plan, const Projection& projection,
                                    const std::vector<HitGroup>& groups);

}  // namespace kvprism::detail
