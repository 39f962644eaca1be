// A worker's calls on the store: cut from jobs, started, and taken back as outcome and quiet.
#include <algorithm>
#include <utility>

#include "store/worker_impl.h"

namespace kvprism {

// Bytes that puts may add to what is in flight.
std::uint64_t StoreWorker::Impl::room_for_puts() const {
  if (options.max_bytes_in_flight == 0) return UINT64_MAX;
  return options.max_bytes_in_flight - std::min(options.max_bytes_in_flight, bytes_in_flight);
}

// Whether the job's next chunk has to wait until something that is in flight is quiet. Nothing
// overtakes it, so that large objects are not starved by small ones. Calls that have ended and may
// never be quiet hold up no last put: it goes alone.
bool StoreWorker::Impl::must_wait(const Job& job, std::uint64_t room) {
  const StoreIndex place = *places[raw(job.runs[job.cursor.run].group)];
  const bool waits = gets_open + puts_open != 0 && map->object_bytes(place) > room;
  if (waits && !held_up) count([](StoreWorkerCounters& c) { ++c.saves_held_up; });
  held_up = waits;
  return waits;
}

// Adds the job's next chunk to the call; false when the call is full.
bool StoreWorker::Impl::add_next(Job& job, Call& call, ObjectBatch& batch,
                                 std::uint64_t most_bytes) {
  const RunRecord& run = job.runs[job.cursor.run];
  const std::uint32_t at = run.first_id + job.cursor.chunk;
  const StoreIndex place = *places[raw(run.group)];
  const std::uint32_t segments = map->segments_per_block(place);
  const std::uint64_t bytes = map->object_bytes(place);
  const bool fits = batch.segments.size() + segments <= options.max_segments_per_call &&
                    call.bytes + bytes <= most_bytes;
  // One chunk beyond a limit is sent alone (R55).
  if (!fits && !call.items.empty()) return false;
  call.bytes += bytes;
  const auto hash = std::span<const std::uint8_t>(job.hashes)
                        .subspan(static_cast<std::size_t>(at) * job.hash_width, job.hash_width);
  schema->append_key(batch.keys, run.group, shards[raw(run.group)], hash);
  map->append_segments(place, job.ids[at], batch.segments);
  batch.ends.push_back(static_cast<std::uint32_t>(batch.segments.size()));
  call.items.push_back({&job, run.group, run.first_chunk + job.cursor.chunk});
  if (++job.cursor.chunk == run.count) job.cursor = {job.cursor.run + 1, 0};
  return true;
}

// Starts one call; false when there is nothing to start now.
bool StoreWorker::Impl::issue(std::deque<Job*>& queue, bool put, Instant now) {
  std::unique_ptr<Call> call;
  std::unique_ptr<ObjectBatch> batch;
  Instant deadline{INT64_MIN};
  const std::uint64_t room = put ? room_for_puts() : UINT64_MAX;
  const std::uint64_t most_bytes = std::min(options.max_bytes_per_call, room);
  for (auto it = queue.begin(); it != queue.end();) {
    Job& job = **it;
    if (job.issued() || job.told) {
      it = queue.erase(it);
      continue;
    }
    // Loads wait too: a block that a request has left may be written by a kernel queued before.
    const ReadyState ready = job.ready.query();
    if (ready == ReadyState::kPending) {
      ++it;
      continue;
    }
    if (ready == ReadyState::kFailed) {
      list_unfetched(job, ItemStatus::kFailed);
      tell_outcome(job, JobOutcome::kPartial);
      it = queue.erase(it);
      continue;
    }
    if (put && !call && must_wait(job, room)) return false;
    if (!call) {
      call = idle_calls.take();
      call->reset();
      batch = idle_batches.take();
      batch->clear();
    }
    const detail::Cursor before = job.cursor;
    bool full = false;
    while (!job.issued() && !full) full = !add_next(job, *call, *batch, most_bytes);
    if (before.run != job.cursor.run || before.chunk != job.cursor.chunk) {
      call->jobs.emplace_back(&job, before);
      // The latest: an old save must not take its neighbours along.
      deadline = std::max(deadline, job.deadline);
    }
    // Saves share calls; a load's calls are its own, so that one slow object holds up one request.
    if (full || !put) break;
    ++it;
  }
  if (!call) {
    if (put) held_up = false;  // what waited has expired
    return false;
  }
  call->put = put;
  call->began = now;
  const OpId op{next_op++};
  // Known before it starts, so that its end is.
  const auto at = calls.emplace(static_cast<std::uint64_t>(op), std::move(call)).first;
  bool started = false;
  try {
    started = put ? store->start_put(op, batch, now, deadline)
                  : store->start_get(op, batch, now, deadline);
  } catch (...) {
    // A store that has taken the batch may have begun: only it can say when that is quiet.
    if (batch != nullptr) {
      calls.erase(at);
    } else {
      begin(*at->second);
    }
    throw;
  }
  if (!started) {
    call = std::move(at->second);
    calls.erase(at);
    for (const auto& [job, cursor] : call->jobs) job->cursor = cursor;
    idle_batches.give(std::move(batch));
    idle_calls.give(std::move(call));
    return false;
  }
  begin(*at->second);
  return true;
}

void StoreWorker::Impl::begin(const Call& call) {
  for (const auto& [job, cursor] : call.jobs) ++job->calls;
  for (const Item& item : call.items) ++item.job->unanswered;
  ++(call.put ? puts_open : gets_open);
  bytes_in_flight += call.bytes;
  count([&](StoreWorkerCounters& c) {
    ++(call.put ? c.puts : c.gets);
    c.bytes_in_flight = bytes_in_flight;
  });
}

void StoreWorker::Impl::count_item(OpId op, const Call& call, const Item& item,
                                   const ItemResult& result, Duration took) {
  const GroupId group = map->projection().group_id(item.group);
  StoreGroupCounters& c = group_counters[raw(group)];
  const StoreIndex place = *places[raw(item.group)];
  // A call counts once for each group that it moves.
  if (timed_by[raw(group)] != static_cast<std::uint64_t>(op)) {
    timed_by[raw(group)] = static_cast<std::uint64_t>(op);
    (call.put ? c.put_time : c.get_time).add(took);
  }
  if (call.put && stored(result.status)) {
    ++c.stored_objects;
    c.stored_bytes += result.bytes;
  } else if (!call.put && result.status == ItemStatus::kOk) {
    ++c.loaded_objects;
    c.loaded_bytes += result.bytes;
  } else if (!call.put &&
             (result.status == ItemStatus::kMissing || result.status == ItemStatus::kNotReady)) {
    ++c.missed_objects;
    c.missed_bytes += map->object_bytes(place);
  } else {
    ++c.failed_objects;
  }
}

void StoreWorker::Impl::finish_items(OpId op, Call& call, const std::vector<ItemResult>& results,
                                     Instant now) {
  const std::lock_guard lock(counters_mutex);
  std::uint64_t moved = 0;
  std::uint64_t segments = 0;
  for (std::size_t i = 0; i < call.items.size(); ++i) {
    const Item& item = call.items[i];
    Job& job = *item.job;
    const StoreIndex place = *places[raw(item.group)];
    segments += map->segments_per_block(place);
    ItemResult result = i < results.size() ? results[i] : ItemResult{ItemStatus::kFailed, 0};
    // Every byte or none: an object of another size is not this object.
    if (!call.put && result.status == ItemStatus::kOk && result.bytes != map->object_bytes(place)) {
      result.status = ItemStatus::kSizeMismatch;
    }
    count_item(op, call, item, result, now - call.began);
    const bool good = call.put ? stored(result.status) : result.status == ItemStatus::kOk;
    if (good) moved += result.bytes;
    if (job.told) continue;  // expired: what comes now is not counted
    if (!good) {
      job.failed.push_back({item.group, item.chunk, static_cast<std::uint32_t>(result.status)});
      continue;
    }
    ++job.objects;
    job.bytes += result.bytes;
    if (result.status == ItemStatus::kDuplicate) ++job.duplicates;
  }
  counters.segments += segments;
  (call.put ? counters.bytes_stored : counters.bytes_fetched) += moved;
}

// A job whose account does not add up has failed as a whole: nobody can say which chunks are there.
void StoreWorker::Impl::tell_outcome(Job& job, JobOutcome outcome) {
  JobReport entry;
  entry.job = job.id;
  entry.outcome = job.adds_up() ? outcome : JobOutcome::kFailed;
  if (entry.outcome == JobOutcome::kFailed) job.failed.clear();
  entry.quiet = job.calls == 0 ? 1 : 0;
  entry.objects = job.objects;
  entry.duplicates = job.duplicates;
  entry.bytes = job.bytes;
  tell(job.epoch, entry, job.failed);
  job.told = true;
  job.told_quiet = entry.quiet != 0;
}

// Tells what of the job's two ends has come and is not told. An exception on the way leaves it to
// the next turn.
bool StoreWorker::Impl::tell_ends(Job& job) {
  if (!job.told && job.issued() && job.unanswered == 0) {
    tell_outcome(job, job.failed.empty() ? JobOutcome::kOk : JobOutcome::kPartial);
    return true;
  }
  if (!job.told || job.told_quiet || job.calls != 0) return false;
  JobReport entry;
  entry.job = job.id;
  entry.quiet = 1;
  tell(job.epoch, entry, {});
  job.told_quiet = true;
  return true;
}

// Everything without a good answer counts as failed: chunks not asked for, and chunks without an
// answer yet.
void StoreWorker::Impl::list_unfetched(Job& job, ItemStatus status) {
  for (const auto& [op, call] : calls) {
    if (call->outcome) continue;
    for (const Item& item : call->items) {
      if (item.job == &job)
        job.failed.push_back({item.group, item.chunk, static_cast<std::uint32_t>(status)});
    }
  }
  for (; !job.issued(); job.cursor = {job.cursor.run + 1, 0}) {
    const RunRecord& run = job.runs[job.cursor.run];
    for (std::uint32_t i = job.cursor.chunk; i < run.count; ++i) {
      job.failed.push_back({run.group, run.first_chunk + i, static_cast<std::uint32_t>(status)});
    }
  }
}

bool StoreWorker::Impl::take_completions(Instant now) {
  bool moved = false;
  while (store->poll_store(now, completion)) {
    moved = true;
    const auto it = calls.find(static_cast<std::uint64_t>(completion.op));
    if (it == calls.end()) continue;
    Call& call = *it->second;
    const bool ends = completion.outcome && !call.outcome;
    std::unique_ptr<Call> over;
    // What cannot fail comes first: it happens once.
    if (ends) {
      call.outcome = true;
      --(call.put ? puts_open : gets_open);
      for (const Item& item : call.items) --item.job->unanswered;
    }
    for (const auto& [job, cursor] : call.jobs) {
      if (completion.quiet) --job->calls;
    }
    if (completion.quiet) {
      bytes_in_flight -= call.bytes;
      over = std::move(it->second);
      calls.erase(it);
      if (completion.batch) idle_batches.give(std::move(completion.batch));
    }
    count([&](StoreWorkerCounters& c) {
      if (ends && !completion.quiet) ++c.unquiet_calls;
      if (!completion.outcome && completion.quiet) --c.unquiet_calls;
      c.bytes_in_flight = bytes_in_flight;
    });
    if (ends) finish_items(completion.op, call, completion.items, now);
    for (const auto& [job, cursor] : call.jobs) tell_ends(*job);
    if (over) idle_calls.give(std::move(over));
  }
  return moved;
}

}  // namespace kvprism
