// Loads: from an offered hit to the tokens that the engine may count on.
#include "store/scheduler_impl.h"

namespace kvprism {
namespace {

using detail::Lookup;
using detail::LookupState;
using detail::Request;

// `failed` is sorted by group and chunk (JobEvent).
bool is_failed(const std::vector<FailedChunk>& failed, StoreIndex group, std::uint32_t chunk) {
  const auto at = std::lower_bound(
      failed.begin(), failed.end(), std::pair(group, chunk),
      [](const FailedChunk& f, const std::pair<StoreIndex, std::uint32_t>& wanted) {
        return std::pair(f.group, f.chunk) < wanted;
      });
  return at != failed.end() && at->group == group && at->chunk == chunk;
}

}  // namespace

// The chunk in which a hit ends, under the name by which the lookup has matched it.
void StoreScheduler::Impl::add_last_chunk(const Request& request, StoreIndex group, BlockId block) {
  const std::uint32_t hit = request.lookup.hit;
  const std::uint32_t chunk_tokens = groups[raw(group)].chunk_tokens;
  const std::uint32_t mark = request.lookup.tails[raw(group)];
  builder.add_marked(group, mark, chunk_tokens, hit % chunk_tokens, block,
                     hashes_of(request)[mark / hash_tokens - 1]);
}

// What of a chunk that has arrived serves a hit of at most `hit` tokens: each prefix that ends in
// it, and of states the one that it is (R22).
void StoreScheduler::Impl::mark_loaded(StoreIndex index, std::uint32_t chunk, std::uint32_t hit) {
  const HitGroup& group = groups[raw(index)];
  const std::uint32_t tokens = std::min((chunk + 1) * group.chunk_tokens, hit);
  std::uint32_t first = chunk * group.chunk_tokens + group.unit_tokens;
  if (group.rule == HitRule::kLastState) first = tokens;
  for (; first <= tokens; first += group.unit_tokens) {
    loaded.mark(index, first / group.unit_tokens - 1);
  }
}

// A shorter hit may need chunks that this load never asked for: only what was fetched counts as
// present.
void StoreScheduler::Impl::mark_arrived(const Load& load, const JobEvent& end) {
  loaded.reset(groups.size());
  for (const StoreIndex index : indices<StoreIndex>(groups.size())) {
    const HitGroup& group = groups[raw(index)];
    const std::uint32_t units = load.hit / group.unit_tokens;
    loaded.set_units(index, units);
    for (std::uint32_t unit = 0; unit < units && detail::only_proves(group); ++unit)
      loaded.mark(index, unit);
  }
  for (const RunRecord& run : load.runs) {
    for (std::uint32_t i = 0; i < run.count; ++i) {
      const std::uint32_t chunk = run.first_chunk + i;
      if (!is_failed(end.failed, run.group, chunk)) mark_loaded(run.group, chunk, load.hit);
    }
  }
}

void StoreScheduler::Impl::plan_load(RequestId id, Request& request, const BlockRows& rows,
                                     Instant now, JobId& job) {
  const std::uint32_t local = request.lookup.engine_local;
  const std::uint32_t hit = request.lookup.hit;
  begin_plan();
  const auto building = builder.begin();
  ranges.clear();
  const std::vector<std::uint32_t>& tails = request.lookup.tails;
  for (const HitGroup& group : groups) {
    ChunkRange range = detail::fetched_chunks(group, hit, local);
    range.end = std::min(range.end, hit / group.chunk_tokens);  // a part of a chunk comes by itself
    ranges.push_back(range);
  }
  add_marks(request);
  bool complete_rows = rows.size() == projection().num_groups();
  for (const StoreIndex index : indices<StoreIndex>(groups.size())) {
    const GroupId group = projection().group_id(index);
    for (std::uint32_t chunk = ranges[raw(index)].first; chunk < ranges[raw(index)].end; ++chunk) {
      if (complete_rows && usable_block(rows, group, chunk)) {
        builder.add_chunk(index, chunk, groups[raw(index)].chunk_tokens, rows[group][chunk]);
      } else {
        complete_rows = false;
      }
    }
    const std::uint32_t last = hit / groups[raw(index)].chunk_tokens;
    if (!detail::fetched_chunks(groups[raw(index)], hit, local).contains(last)) continue;
    complete_rows = complete_rows && usable_block(rows, group, last);
    if (complete_rows) add_last_chunk(request, index, rows[group][last]);
  }

  Load load;
  load.request = id;
  load.generation = request.generation;
  load.local = local;
  load.hit = hit;
  load.planned_at = now;
  load.tails = tails;
  load.withheld = !complete_rows;
  // As in start_save: what can fail comes first.
  std::span<const BlockId> blocks;
  if (complete_rows) {
    blocks = builder.blocks();
    load.ids.assign(blocks.begin(), blocks.end());
    load.lost.reserve(blocks.size());
    load.runs.assign(builder.runs().begin(), builder.runs().end());
    if (!load.runs.empty()) {
      const std::uint32_t base = load.runs.front().first_id;
      for (RunRecord& run : load.runs) run.first_id -= base;
    }
  }
  make_room_for_ends(blocks.size());
  detail::make_room(acquired, blocks.size());
  builder.make_room();
  job = start_job(JobKind::kLoad, id, blocks, detail::ledger_deadline(now, options.load_timeout),
                  loads, std::move(load));
  if (complete_rows) {
    acquired.insert(acquired.end(), blocks.begin(), blocks.end());
    builder.finish(job, id, JobKind::kLoad, options.load_timeout);
  } else {
    // The engine waits for this load, so it ends like any other: as failed, through the ledger.
    ledger.withdraw(job, now);
  }
  request.loading = true;
  request.lookup.state = LookupState::kNone;
  flight.add(now, FlightKind::kLoad, raw(id), raw(job), hit - local);
  ++counters.loads;
  counters.hit_tokens += hit - local;
}

// Of a chunk with several findings the ledger keeps one; damage says more than any other.
ItemStatus StoreScheduler::Impl::finding(const Load& load, const FailedChunk& chunk) {
  const auto first = std::lower_bound(
      load.mismatches.begin(), load.mismatches.end(), std::pair(chunk.group, chunk.chunk),
      [](const std::pair<Rank, FailedChunk>& mismatch,
         const std::pair<StoreIndex, std::uint32_t>& wanted) {
        return std::pair(mismatch.second.group, mismatch.second.chunk) < wanted;
      });
  const bool damaged =
      first != load.mismatches.end() && first->second.group == chunk.group &&
      first->second.chunk == chunk.chunk &&
      static_cast<ItemStatus>(first->second.status) == ItemStatus::kChecksumMismatch;
  return damaged ? ItemStatus::kChecksumMismatch : static_cast<ItemStatus>(chunk.status);
}

bool StoreScheduler::Impl::is_gone(const Load& load, const FailedChunk& chunk) {
  const ItemStatus status = finding(load, chunk);
  return status == ItemStatus::kMissing || status == ItemStatus::kChecksumMismatch;
}

// A load that fails may fail for all who ask: a damaged object is never replaced by a put, what lay
// on a dead node is listed until the master notices, and a worker may be cut off from a store that
// still answers lookups (R41).
void StoreScheduler::Impl::remember_unloadable(const Load& load, const JobEvent& end, Instant now) {
  const Request* const request = load.left ? load.left.get() : find(load.request, load.generation);
  if (request == nullptr) return;
  const auto remember = [&](detail::RecentPrefixes& in, StoreIndex group, std::uint32_t chunk) {
    const std::uint32_t tokens = mark_of(group, chunk, load.hit, load.tails);
    if (tokens / hash_tokens > hash_count(*request)) return;
    const auto hash = hashes_of(*request)[tokens / hash_tokens - 1];
    in.add(detail::RecentPrefixes::tag_of(hash, group), now);
  };
  if (end.whole) {
    if (end.gone) return;
    for (const RunRecord& run : load.runs) {
      for (std::uint32_t i = 0; i < run.count; ++i) {
        remember(unreached, run.group, run.first_chunk + i);
      }
    }
    return;
  }
  remove_mismatched(*request, load, now);
  for (const FailedChunk& chunk : end.failed) {
    const ItemStatus status = finding(load, chunk);
    if (status == ItemStatus::kMissing)
      forget_saved(saved_tags(*request, chunk.chunk * groups[raw(chunk.group)].chunk_tokens));
    // The next lookup sees by itself what is not there.
    if (status == ItemStatus::kMissing || status == ItemStatus::kNotReady) continue;
    const bool cut_off = status == ItemStatus::kUnavailable || status == ItemStatus::kCancelled;
    remember(cut_off ? unreached : unloadable, chunk.group, chunk.chunk);
  }
}

// A request that begins again goes on behind what it has saved; what has gone since it must save
// again itself.
void StoreScheduler::Impl::save_anew(Request& request, const Load& load,
                                     const JobEvent& end) const {
  for (const FailedChunk& chunk : end.failed) {
    if (!is_gone(load, chunk)) continue;
    const std::uint32_t from = chunk.chunk * groups[raw(chunk.group)].chunk_tokens;
    request.planned = std::min(request.planned, aligned(from));
    request.end_planned = 0;
    std::erase(request.handed_off, detail::state_mark(chunk.group, mark_of(chunk.group, chunk.chunk,
                                                                           load.hit, load.tails)));
  }
}

void StoreScheduler::Impl::save_anew(RequestId id, Request& request, const detail::Answer& answer) {
  // With drafts a hit ends one unit before what is there, and a retention thins windows out.
  const std::uint32_t found = answer.hit + (has_drafts ? search.grid().alignment : 0);
  const std::uint32_t there = aligned(std::max(found, answer.shared));
  const bool began =
      request.planned != 0 || request.end_planned != 0 || !request.handed_off.empty();
  if (!began || answer.hit >= request.lookup.max || request.accepted > 0 || request.loading) return;
  // What is on its way is not missing.
  for (const auto& [job, save] : saves) {
    const std::uint32_t from = save.range.empty() ? request.planned : save.range.from;
    if (save.request == id && save.generation == request.generation && there >= from) return;
  }
  std::uint32_t from = there;
  do forget_saved(saved_tags(request, from));
  while ((from += step_tokens) < request.planned);
  request.planned = std::min(request.planned, there);
  request.end_planned = 0;
  std::erase_if(request.handed_off,
                [&](std::uint64_t mark) { return detail::tokens_of_mark(mark) > found; });
}

// Where objects lie Mooncake tells only in structs that differ from version to version. When loads
// fail and few come whole between them, a storage process has died or this engine is cut off: each
// prefix would cost another load, and mostly a client (R51). A load that comes whole says that some
// process lives, not that all do: it makes good half a failure.
void StoreScheduler::Impl::count_unreached(const Load& load, const JobEvent& end, Instant now) {
  constexpr std::uint32_t kFailure = 2;
  constexpr std::uint32_t kMost = 3 * kFailure;
  const bool unreached =
      !load.runs.empty() && !end.gone &&
      (end.whole || std::any_of(end.failed.begin(), end.failed.end(), [&](const auto& chunk) {
         const ItemStatus status = finding(load, chunk);
         return status == ItemStatus::kFailed || status == ItemStatus::kUnavailable ||
                status == ItemStatus::kTimedOut || status == ItemStatus::kCancelled;
       }));
  if (!unreached) {
    if (end.failed.empty() && !end.whole && unreached_loads != 0) --unreached_loads;
    return;
  }
  unreached_loads = std::min(unreached_loads + kFailure, kMost);
  if (unreached_loads < kMost) return;
  const bool paused = now < offers_again;  // loads that were under way
  offers_again = now + options.avoid_failed_for;
  if (paused) return;
  ++counters.offers_paused;
  flight.add(now, FlightKind::kOffersPaused, counters.offers_paused);
}

// A promised end comes, also without memory for it: nothing here but what is told beside it needs
// any.
void StoreScheduler::Impl::end_load(JobId id, Load& load, const JobEvent& end, bool quiet,
                                    Instant now) {
  sort_mismatches(load);  // those of a late report too
  LoadEnd result;
  result.request = load.request;
  result.job = id;
  result.blocks_quiet = quiet;
  const bool void_all = end.whole || load.overtaken;
  // What is not quiet may still change, also where it seems to have arrived; and what cannot be
  // told apart counts as failed.
  const bool whole =
      void_all || !quiet || (!end.failed.empty() && !if_memory([&] { mark_arrived(load, end); }));
  if (whole) {
    result.valid_tokens = load.local;
  } else if (end.failed.empty()) {
    result.valid_tokens = load.hit;
  } else {
    result.valid_tokens = search.find_loaded(loaded, load.local, load.hit);
  }
  result.complete = !whole && end.failed.empty();

  result.failed = std::move(load.lost);
  for (const RunRecord& run : load.runs) {
    for (std::uint32_t i = 0; i < run.count && !result.complete; ++i) {
      const std::uint32_t chunk = run.first_chunk + i;
      if (!whole && !is_failed(end.failed, run.group, chunk)) continue;
      result.failed.push_back(
          {projection().group_id(run.group), chunk, load.ids[run.first_id + i]});
    }
  }
  for (const FailedChunk& chunk : end.failed) {
    const auto status = static_cast<ItemStatus>(chunk.status);
    if (status == ItemStatus::kMissing || status == ItemStatus::kNotReady) ++counters.load_races;
  }
  if (options.tell_changes) if_memory([&] { tell_missing(load, end); });

  counters.loaded_tokens += result.valid_tokens - load.local;
  counters.loaded_objects += end.objects;
  counters.loaded_bytes += end.bytes;
  if (!result.complete) ++counters.loads_failed;
  counters.load_time.add(now - load.planned_at);
  flight.add(now, FlightKind::kLoadEnd, raw(load.request), raw(id), result.valid_tokens);
  if (!load.overtaken) {
    // Neither a lost race nor a lost rank is trouble of the store's.
    loads_fail = !result.complete && !end.gone &&
                 (end.whole || !quiet ||
                  std::any_of(end.failed.begin(), end.failed.end(), [](const FailedChunk& chunk) {
                    const auto status = static_cast<ItemStatus>(chunk.status);
                    return status != ItemStatus::kMissing && status != ItemStatus::kNotReady;
                  }));
    count_unreached(load, end, now);
  }
  // Nothing is left of what came before the purge, and nothing was there beside it.
  const bool anew = load.overtaken && load.local == 0;
  if (Request* const request = find(load.request, load.generation)) {
    request->loading = false;
    request->load_from = load.local;
    request->load_to = result.valid_tokens > load.local ? result.valid_tokens : 0;
    // What came from the store is in the store; what was local may not be.
    if (load.local <= request->planned) {
      request->planned = std::max(request->planned, aligned(result.valid_tokens));
    }
    const PromptEnd prompt = end_of(*request);
    if (result.complete && result.valid_tokens == prompt.boundary) {
      request->end_planned = prompt.proof;
    }
    if (!void_all) save_anew(*request, load, end);
    if (anew) request->purged = false;
    // What went with its rank is in the store as before. A load that was withheld is gone as well,
    // and would be tried again at each step.
    const bool lost = end.gone && !load.withheld;
    if (!result.complete && !lost && !request->bypass) {
      request->bypass = true;
      ++counters.bypasses;
    }
  }
  if (Request* const heir = find(load.request, load.heir)) {
    heir->loading = false;
    if (anew) heir->purged = false;
  }
  load.reported = true;
  load_ends.push_back(std::move(result));
}

std::optional<JobId> StoreScheduler::allocated(RequestId id, std::uint32_t external_tokens,
                                               const BlockRows& rows, Instant now) {
  Impl& s = *impl_;
  detail::RecordedCall call(s.recorder.get(), detail::RunCall::kAllocated, now,
                            [&](detail::RunWriter w) {
                              w.put(raw(id));
                              w.put(external_tokens);
                              w.rows(rows);
                            });
  Request* const request = s.find(id);
  if (request == nullptr || request->loading) return std::nullopt;
  Lookup& lookup = request->lookup;
  const bool offered = lookup.state == LookupState::kDone && lookup.hit > lookup.engine_local &&
                       lookup.hit - lookup.engine_local == external_tokens;
  if (external_tokens == 0 || !offered) {
    if (lookup.state != LookupState::kQueued) lookup.state = LookupState::kNone;
    return std::nullopt;
  }
  JobId job{};
  s.plan_load(id, *request, rows, now, job);
  call.result(raw(job));
  return job;
}

}  // namespace kvprism
