// The end of a prompt: where hits may end inside a block, it is stored up to there.
#include <algorithm>

#include "store/scheduler_impl.h"

namespace kvprism {

PromptEnd StoreScheduler::Impl::end_due(Request& request, std::uint32_t planned, Instant now) {
  if (!fine) return {};
  const PromptEnd end = end_of(request);
  if (end.proof == 0 || end.proof == request.end_planned || end.proof > computed(request)) {
    return {};
  }
  // Behind a hole it is of no use (R50).
  if (planned < aligned(end.boundary)) return {};
  if (saved_prefixes.contains(end_tag(request, end), now)) {
    request.end_planned = end.proof;
    ++counters.saves_known;
    return {};
  }
  return end;
}

// Bytes behind the mark of a block are whatever the request computes there while they are read:
// nobody who loads the object takes them for valid.
void StoreScheduler::Impl::plan_end(RequestId id, Request& request, const PromptEnd& end,
                                    const BlockRows& rows, Instant now) {
  begin_plan();
  const auto building = builder.begin();
  bool whole = true;
  for (const StoreIndex index : indices<StoreIndex>(groups.size())) {
    if (save_rules[raw(index)] != SaveRule::kPositional) continue;
    const HitGroup& group = groups[raw(index)];
    const GroupId row = projection().group_id(index);
    ChunkRange chunks = end_chunks(group, search.grid(), end);
    // A window's blocks before its reach serve no replay, and may be gone.
    const std::uint32_t reach = needed_chunks(group, end.boundary).first;
    chunks.first = std::max(chunks.first, reach - std::min(reach, has_drafts ? 1u : 0u));
    for (std::uint32_t chunk = chunks.first; chunk < chunks.end; ++chunk) {
      if (!usable_block(rows, row, chunk) || !is_written(request, group, chunk)) {
        ++counters.sources_skipped;
        whole = false;
        continue;
      }
      const std::uint32_t mark = end_mark(group, end, chunk);
      builder.add_marked(index, mark, group.chunk_tokens, mark - chunk * group.chunk_tokens,
                         rows[row][chunk], hashes_of(request)[mark / hash_tokens - 1]);
    }
  }
  if (!builder.runs().empty()) {
    detail::Save save{id, request.generation, {}, now, true, {}, {}};
    if (whole) save.tags.push_back(end_tag(request, end));
    start_save(std::move(save), false);
  }
  request.end_planned = end.proof;
}

void StoreScheduler::prompt(RequestId id, std::uint32_t prompt_tokens) {
  const detail::RecordedCall call(impl_->recorder.get(), detail::RunCall::kPrompt,
                                  impl_->last_step_at, [&](detail::RunWriter w) {
                                    w.put(raw(id));
                                    w.put(prompt_tokens);
                                  });
  impl_->remember(id).prompt_tokens = prompt_tokens;
}

}  // namespace kvprism
