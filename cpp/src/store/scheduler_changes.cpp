// What the store has gained and lost, for engines that announce it.
#include <algorithm>

#include "store/scheduler_impl.h"

namespace kvprism {
namespace {

constexpr std::size_t kMostChanges = 1 << 16;  // that nobody takes

}  // namespace

// Hashes of the chunk's prefix and of the one before it. False when the request is no longer known:
// a chunk without its parent is of no use to a listener.
bool StoreScheduler::Impl::name_change(StoreChange& change, std::uint64_t generation,
                                       std::uint32_t chunk_tokens) {
  const Request* const request = find(change.request, generation);
  if (request == nullptr || change.tokens / hash_tokens > hash_count(*request)) return false;
  const HashList hashes = hashes_of(*request);
  change.hash = hashes[change.tokens / hash_tokens - 1];
  const std::uint32_t length = change.tokens % chunk_tokens == 0 ? chunk_tokens : hash_tokens;
  const std::uint32_t before = change.tokens - length;
  if (before > 0) change.parent = hashes[before / hash_tokens - 1];
  return true;
}

// The chunks of the job under construction, named while their request is known.
void StoreScheduler::Impl::note_chunks(detail::Save& save) {
  std::size_t count = 0;
  for (const RunRecord& run : builder.runs()) count += run.count;
  save.chunks.reserve(count);
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

void StoreScheduler::Impl::tell(const StoreChange& change) {
  if (changes.size() == kMostChanges) {
    ++counters.changes_dropped;
    return;
  }
  changes.push_back(change);
}

void StoreScheduler::Impl::tell_stored(const detail::Save& save, const JobEvent& end, Instant now) {
  // A purge removes them.
  if (end.whole || purge.status.active()) return;
  const auto place = [](GroupId group, std::uint32_t chunk) {
    return std::uint64_t{raw(group)} << 32 | chunk;
  };
  failed_places.clear();
  for (const FailedChunk& chunk : end.failed) {
    failed_places.push_back(place(projection().group_id(chunk.group), chunk.chunk));
  }
  std::sort(failed_places.begin(), failed_places.end());
  for (const StoreChange& change : save.chunks) {
    if (!std::binary_search(failed_places.begin(), failed_places.end(),
                            place(change.group, change.chunk))) {
      tell(change);
      const StoreIndex index = *projection().store_index(change.group);
      announced.add(detail::RecentPrefixes::tag_of(change.hash, index), now);
    }
  }
}

// A lookup saw them, so they have gone since, or are damaged and will be removed. Of a chunk that
// is not full it is not known under which of its prefixes the object was.
void StoreScheduler::Impl::tell_missing(const detail::Load& load, const JobEvent& end) {
  for (const FailedChunk& chunk : end.failed) {
    if (!is_gone(load, chunk)) continue;
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
    if (!name_change(change, load.generation, chunk_tokens)) continue;
    announced.forget(detail::RecentPrefixes::tag_of(change.hash, chunk.group));
    tell(change);
  }
}

// What a lookup does not find of what was announced before it was asked. The answer may be older
// than an announcement that was made since.
void StoreScheduler::Impl::tell_gone(const Request& request, const detail::Answer& answer) {
  for (const auto& [index, tokens] : answer.gone) {
    const auto hash = hashes_of(request)[tokens / hash_tokens - 1];
    const std::uint64_t tag = detail::RecentPrefixes::tag_of(hash, index);
    if (!announced.older(tag, request.lookup.at)) continue;
    announced.forget(tag);
    const std::uint32_t chunk_tokens = groups[raw(index)].chunk_tokens;
    StoreChange change{false,
                       answer.request,
                       projection().group_id(index),
                       (tokens - 1) / chunk_tokens,
                       tokens,
                       {},
                       {}};
    if (name_change(change, request.generation, chunk_tokens)) tell(change);
  }
}

// What is to be stored by `changes` will have gone.
void StoreScheduler::Impl::take_back_stored() {
  std::erase_if(changes, [](const StoreChange& change) { return change.stored; });
}

void StoreScheduler::saving_requests(std::vector<RequestId>& out) const {
  for (const auto& [job, save] : impl_->saves) out.push_back(save.request);
  for (const detail::Offer& offer : impl_->offers) out.push_back(offer.request);
}

void StoreScheduler::take_changes(std::vector<StoreChange>& out) {
  out.insert(out.end(), impl_->changes.begin(), impl_->changes.end());
  impl_->changes.clear();
}

}  // namespace kvprism
