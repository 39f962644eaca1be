#include "kvprism/hit/reachable_mask.h"

#include <algorithm>

namespace kvprism {

ReplayBoundaries replay_boundaries(std::uint32_t prompt_tokens, std::uint32_t step,
                                   bool drafts) noexcept {
  const auto aligned = [&](std::uint32_t tokens) { return tokens - tokens % step; };
  const std::uint32_t again = aligned(prompt_tokens == 0 ? 0 : prompt_tokens - 1);
  if (!drafts) return {{again, 0}, 1};
  const auto before = [&](std::uint32_t tokens) { return tokens - std::min(tokens, step); };
  const std::uint32_t longer = aligned(prompt_tokens);
  if (again == longer) return {{before(again), 0}, 1};
  return {{before(again), before(longer)}, before(again) == before(longer) ? 1u : 2u};
}

ReachableMask::ReachableMask(const HitGroup& group, const HitGrid& grid,
                             std::optional<std::uint32_t> retention,
                             const ReplayBoundaries& boundaries) noexcept {
  // Every chunk of a prefix serves it. A window's chunks cannot be told apart where hits do not end
  // on chunks. States are kept as the engine hands them off.
  if (group.rule != HitRule::kWindow || grid.step % group.chunk_tokens != 0) return;
  shift_ = group.draft ? 1 : 0;
  need_ = window_chunks(group) + shift_;
  const std::uint32_t segment_tokens = retention.value_or(grid.step);
  if (segment_tokens != 0) {
    segment_ = segment_tokens / group.chunk_tokens;
    if (need_ >= segment_) return;
  }
  all_ = false;
  if (!retention) return;
  for (std::uint32_t i = 0; i < boundaries.count; ++i) {
    const std::uint32_t end = boundaries.tokens[i] / group.chunk_tokens + shift_;
    tails_[count_++] = {end - std::min(end, need_), end};
  }
}

}  // namespace kvprism
