#include "kvprism/hit/reachable_mask.h"

#include <algorithm>

namespace kvprism {

ReplayBoundaries replay_boundaries(std::uint32_t prompt_tokens, std::uint32_t step, bool drafts,
                                   std::uint32_t replay) noexcept {
  const auto less = [](std::uint32_t tokens, std::uint32_t by) {
    return tokens - std::min(tokens, by);
  };
  const auto aligned = [&](std::uint32_t tokens) { return tokens - tokens % step; };
  const std::uint32_t behind = drafts ? step : 0;
  const std::uint32_t again = less(aligned(less(prompt_tokens, 1)), behind);
  const std::uint32_t longer = drafts ? less(aligned(prompt_tokens), step) : again;
  const std::uint32_t replayed = std::min(aligned(less(prompt_tokens, replay)), longer);
  std::array all{replayed, again, longer};
  std::sort(all.begin(), all.end());
  ReplayBoundaries boundaries;
  for (const std::uint32_t tokens : all) {
    if (boundaries.count == 0 || boundaries.tokens[boundaries.count - 1] != tokens)
      boundaries.add(tokens);
  }
  return boundaries;
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
