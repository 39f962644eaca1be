// What the store has gained and lost, for engines that announce it.
#include <algorithm>
#include <iterator>

#include "store/scheduler_impl.h"

namespace kvprism {

// Hashes of the chunk's prefix and of the one before it. False when the request is no longer known:
// a chunk without its parent is of no use to a listener.
bool StoreScheduler::Impl::name_change(StoreChange& change, std::uint64_t generation,
                                       std::uint32_t chunk_tokens) {
  const Request* const request = find(change.request, generation);
  if (request == nullptr || change.tokens / hash_tokens > hash_count(*request)) return false;
  const HashList hashes = hashes_of(*request);
  const auto hash = hashes[change.tokens / hash_tokens - 1];
  change.hash.assign(hash.begin(), hash.end());
  const std::uint32_t length = change.tokens % chunk_tokens == 0 ? chunk_tokens : hash_tokens;
  const std::uint32_t before = change.tokens - length;
  if (before > 0) {
    const auto parent = hashes[before / hash_tokens - 1];
    change.parent.assign(parent.begin(), parent.end());
  }
  return true;
}

// The chunks of the job under construction, named while their request is known.
void StoreScheduler::Impl::note_chunks(detail::Save& save) {
  for (const RunRecord& run : builder.runs()) {
    const std::uint32_t chunk_tokens = groups[raw(run.group)].chunk_tokens;
    for (std::uint32_t i = 0; i < run.count; ++i) {
      const std::uint32_t tokens = plan.mark_tokens[run.first_mark + i];
      StoreChange change{
          true, save.request, projection().group_id(run.group), run.first_chunk + i, tokens, {},
          {}};
      if (name_change(change, save.generation, chunk_tokens)) save.chunks.push_back(change);
    }
  }
}

void StoreScheduler::Impl::tell_stored(detail::Save& save, const JobEvent& end) {
  if (end.whole) return;
  for (StoreChange& change : save.chunks) {
    const bool failed =
        std::any_of(end.failed.begin(), end.failed.end(), [&](const FailedChunk& chunk) {
          return projection().group_id(chunk.group) == change.group && chunk.chunk == change.chunk;
        });
    if (!failed) changes.push_back(std::move(change));
  }
}

// A lookup saw them, so they have gone since. Of a chunk that is not full it is not known under
// which of its prefixes the object was.
void StoreScheduler::Impl::tell_missing(const detail::Load& load, const JobEvent& end) {
  for (const FailedChunk& chunk : end.failed) {
    if (static_cast<ItemStatus>(chunk.status) != ItemStatus::kMissing) continue;
    const std::uint32_t chunk_tokens = groups[raw(chunk.group)].chunk_tokens;
    const bool full = std::none_of(load.runs.begin(), load.runs.end(), [&](const RunRecord& run) {
      return run.group == chunk.group && run.first_chunk + run.count - 1 == chunk.chunk &&
             run.valid_tokens_last < chunk_tokens;
    });
    if (!full) continue;
    StoreChange change{false,
                       load.request,
                       projection().group_id(chunk.group),
                       chunk.chunk,
                       (chunk.chunk + 1) * chunk_tokens,
                       {},
                       {}};
    if (name_change(change, load.generation, chunk_tokens)) changes.push_back(std::move(change));
  }
}

void StoreScheduler::take_changes(std::vector<StoreChange>& out) {
  std::move(impl_->changes.begin(), impl_->changes.end(), std::back_inserter(out));
  impl_->changes.clear();
}

}  // namespace kvprism
