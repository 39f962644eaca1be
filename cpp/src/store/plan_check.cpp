#include "store/plan_check.h"

#include <string>

namespace kvprism::detail {
namespace {

Problem problem(std::string path, std::string value, std::string expected) {
  return {std::move(path), std::move(value), std::move(expected), {}};
}

// A mark shifted against its chunk would put the bytes under another prefix.
std::optional<Problem> mark_problem(const StepPlanView& plan, const RunRecord& run,
                                    const HitGroup& group, const std::string& path) {
  for (std::uint32_t i = 0; i < run.count; ++i) {
    const std::uint64_t end = (std::uint64_t{run.first_chunk} + i + 1) * group.chunk_tokens;
    const std::uint32_t mark = plan.mark_tokens[run.first_mark + i];
    const bool inside = group.fine() && i + 1 == run.count && mark < end &&
                        mark > end - group.chunk_tokens && mark % group.unit_tokens == 0;
    if (mark == end || inside) continue;
    return problem(path + ".marks[" + std::to_string(i) + "]", std::to_string(mark) + " tokens",
                   std::to_string(end) + " tokens, the end of its chunk");
  }
  return std::nullopt;
}

// What counts of the last chunk: all that its mark names, or less where a hit ends before it (R22).
std::optional<Problem> valid_problem(const StepPlanView& plan, const RunRecord& run,
                                     const HitGroup& group, const std::string& path) {
  const std::uint32_t valid = run.valid_tokens_last;
  if (!group.fine()) {
    if (valid == group.chunk_tokens) return std::nullopt;
    return problem(path + ".valid_tokens_last", std::to_string(valid),
                   std::to_string(group.chunk_tokens) + ", a whole chunk");
  }
  const std::uint32_t named =
      (plan.mark_tokens[run.first_mark + run.count - 1] - 1) % group.chunk_tokens + 1;
  const bool part = group.rule != HitRule::kLastState && valid > 0 && valid < named &&
                    valid % group.unit_tokens == 0;
  if (valid == named || part) return std::nullopt;
  return problem(path + ".valid_tokens_last", std::to_string(valid),
                 "up to the " + std::to_string(named) + " tokens of its mark, in units of " +
                     std::to_string(group.unit_tokens));
}

}  // namespace

std::optional<Problem> plan_problem(const StepPlanView& plan, const Projection& projection,
                                    const std::vector<HitGroup>& groups) {
  for (std::size_t r = 0; r < plan.runs.size(); ++r) {
    const RunRecord& run = plan.runs[r];
    const std::string path = "runs[" + std::to_string(r) + "]";
    if (raw(run.group) >= groups.size()) {
      return problem(path + ".group", std::to_string(raw(run.group)),
                     "a store index below " + std::to_string(groups.size()));
    }
    const HitGroup& group = groups[raw(run.group)];
    if (auto wrong = mark_problem(plan, run, group, path)) return wrong;
    if (auto wrong = valid_problem(plan, run, group, path)) return wrong;
  }
  for (std::size_t i = 0; i < plan.ids.size(); ++i) {
    if (static_cast<std::uint32_t>(raw(plan.ids[i])) < projection.num_blocks()) continue;
    return problem("ids[" + std::to_string(i) + "]", std::to_string(raw(plan.ids[i])),
                   "a block id below " + std::to_string(projection.num_blocks()));
  }
  return std::nullopt;
}

}  // namespace kvprism::detail
