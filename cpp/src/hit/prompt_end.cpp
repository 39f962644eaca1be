#include "kvprism/hit/prompt_end.h"

#include <algorithm>

namespace kvprism {
namespace {

std::uint32_t stored_tokens(const HitGroup& group, const PromptEnd& end) noexcept {
  return group.draft ? end.proof : end.boundary;
}

}  // namespace

PromptEnd prompt_end(std::uint32_t prompt_tokens, const HitGrid& grid, bool drafts,
                     std::uint32_t replay) noexcept {
  if (grid.alignment >= grid.step || prompt_tokens <= replay) return {};
  const auto aligned = [&](std::uint32_t tokens) { return tokens - tokens % grid.alignment; };
  // With drafts the last unit is computed anew as well, where that is more.
  const std::uint32_t kept_back = drafts ? grid.alignment : 0;
  const std::uint32_t proof =
      std::min(aligned(prompt_tokens - replay) + kept_back, aligned(prompt_tokens));
  if (proof <= kept_back) return {};
  const std::uint32_t boundary = proof - kept_back;
  if (proof <= boundary - boundary % grid.step) return {};
  return {boundary, proof};
}

ChunkRange end_chunks(const HitGroup& group, const HitGrid& grid, const PromptEnd& end) noexcept {
  if (group.rule == HitRule::kLastState || group.rule == HitRule::kNever) return {};
  const std::uint32_t whole = end.boundary - end.boundary % grid.step;
  const std::uint32_t tokens = stored_tokens(group, end);
  return {whole / group.chunk_tokens,
          tokens / group.chunk_tokens + (tokens % group.chunk_tokens != 0 ? 1 : 0)};
}

std::uint32_t end_mark(const HitGroup& group, const PromptEnd& end, std::uint32_t chunk) noexcept {
  return std::min((chunk + 1) * group.chunk_tokens, stored_tokens(group, end));
}

}  // namespace kvprism
