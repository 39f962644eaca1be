#include "kvprism/store/store_worker.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kvprism/run/mailbox.h"

namespace kvprism {
namespace {

// Where a job's next chunk is.
struct Cursor {
  std::uint32_t run = 0;
  std::uint32_t chunk = 0;  // within the run
};

// A job as this rank holds it, from submit to quiet. Recycled: its arrays keep their capacity.
struct Job {
  JobId id{};
  std::uint64_t epoch = 0;
  JobKind kind{};
  Duration timeout;
  Instant deadline;
  ReadyToken ready = ReadyToken::host();
  std::vector<RunRecord> runs;  // first_id and first_mark count from the job's own arrays
  std::vector<BlockId> ids;
  std::vector<std::uint8_t> hashes;  // hash_width bytes per mark
  std::uint32_t hash_width = 0;

  Cursor cursor;
  std::uint32_t unanswered = 0;  // items of calls without an outcome
  std::uint32_t calls = 0;       // calls that are not quiet
  bool told = false;             // its outcome is in a report
  std::vector<FailedChunk> failed;
  std::uint32_t objects = 0;
  std::uint32_t duplicates = 0;
  std::uint64_t bytes = 0;

  bool issued() const noexcept { return cursor.run >= runs.size(); }
  void reset() {
    ready = ReadyToken::host();
    runs.clear();
    ids.clear();
    hashes.clear();
    cursor = {};
    unanswered = 0;
    calls = 0;
    told = false;
    failed.clear();
    objects = 0;
    duplicates = 0;
    bytes = 0;
  }
};

struct Item {
  Job* job;
  StoreIndex group;
  std::uint32_t chunk;
};

// One call to the store.
struct Call {
  bool put = false;
  bool outcome = false;
  std::uint64_t bytes = 0;
  std::vector<Item> items;
  std::vector<std::pair<Job*, Cursor>> jobs;  // each once, with the cursor from before the call

  void reset() {
    outcome = false;
    bytes = 0;
    items.clear();
    jobs.clear();
  }
};

template <class T>
class Pool {
 public:
  std::unique_ptr<T> take() {
    if (idle_.empty()) return std::make_unique<T>();
    std::unique_ptr<T> item = std::move(idle_.back());
    idle_.pop_back();
    return item;
  }
  // Beyond some, what a burst has grown goes back to the system.
  void give(std::unique_ptr<T> item) {
    if (idle_.size() < kMost) idle_.push_back(std::move(item));
  }

 private:
  static constexpr std::size_t kMost = 256;
  std::vector<std::unique_ptr<T>> idle_;
};

std::string describe(const Error& error) { return error.what(); }

}  // namespace

struct StoreWorker::Impl {
  Impl(std::shared_ptr<const KeySchema> key_schema, std::shared_ptr<const SegmentMap> segment_map,
       std::shared_ptr<ObjectStore> object_store, const StoreWorkerOptions& wanted)
      : schema(std::move(key_schema)),
        map(std::move(segment_map)),
        store(std::move(object_store)),
        options(wanted),
        inbox(wanted.max_queued_jobs) {
    const StoreCapabilities capabilities = store->capabilities();
    if (capabilities.max_segments_per_call != 0) {
      options.max_segments_per_call =
          std::min(options.max_segments_per_call, capabilities.max_segments_per_call);
    }
    if (capabilities.max_bytes_per_call != 0) {
      options.max_bytes_per_call =
          std::min(options.max_bytes_per_call, capabilities.max_bytes_per_call);
    }
    const Projection& projection = map->projection();
    position = rank_position(options.rank, projection.parallel());
    for (const StoreIndex group : indices<StoreIndex>(projection.num_store_groups())) {
      shards.push_back(schema->shard_of(group, position));
    }
  }

  std::shared_ptr<const KeySchema> schema;
  std::shared_ptr<const SegmentMap> map;
  std::shared_ptr<ObjectStore> store;
  StoreWorkerOptions options;
  RankPosition position;
  std::vector<RankPosition> shards;  // by store group

  // Between the engine's threads and the one that pumps.
  Mailbox<std::unique_ptr<Job>> inbox;
  std::mutex submit_mutex;
  std::uint64_t bound_epoch = 0;  // 0: none yet
  std::uint64_t last_step = 0;    // of that epoch
  std::uint64_t last_job = 0;     // highest id taken; ids rise within an epoch
  bool closed = false;
  Pool<Job> idle_jobs;
  std::mutex outbox_mutex;
  std::vector<WorkerReport> outbox;  // one per epoch
  mutable std::mutex counters_mutex;
  StoreWorkerCounters counters;

  // Of the thread that pumps.
  std::vector<std::unique_ptr<Job>> jobs;
  std::deque<Job*> loads;
  std::deque<Job*> saves;
  std::unordered_map<std::uint64_t, std::unique_ptr<Call>> calls;
  std::uint64_t next_op = 1;
  std::uint32_t gets_open = 0;
  std::uint32_t puts_open = 0;
  Pool<Call> idle_calls;
  Pool<ObjectBatch> idle_batches;
  Completion completion;

  template <class Change>
  void count(Change change) {
    const std::lock_guard lock(counters_mutex);
    change(counters);
  }

  void tell(std::uint64_t epoch, const JobReport& entry, const std::vector<FailedChunk>& failed);
  SubmitResult refuse(std::uint64_t epoch, const std::vector<JobId>& ids, std::string why);
  std::string why_refused(const StepPlanView& plan);
  void copy_job(const StepPlanView& plan, const JobRecord& record, Job& job) const;
  void add_run(const RunRecord& run, JobKind kind, Job& job) const;

  void finish_items(Call& call, const std::vector<ItemResult>& results);
  void tell_outcome(Job& job, JobOutcome outcome);
  void list_unfetched(Job& job, ItemStatus status);
  bool take_completions(Instant now);
  bool take_inbox(Instant now);
  bool expire(Instant now);
  bool issue(std::deque<Job*>& queue, bool put, Instant now);
  bool add_next(Job& job, Call& call, ObjectBatch& batch);
  bool retire();
};

void StoreWorker::Impl::tell(std::uint64_t epoch, const JobReport& entry,
                             const std::vector<FailedChunk>& failed) {
  const std::lock_guard lock(outbox_mutex);
  auto report = std::find_if(outbox.begin(), outbox.end(),
                             [&](const WorkerReport& r) { return r.epoch == epoch; });
  if (report == outbox.end()) {
    outbox.emplace_back();
    report = std::prev(outbox.end());
    report->rank = options.rank;
    report->epoch = epoch;
  }
  JobReport placed = entry;
  placed.first_failed = static_cast<std::uint32_t>(report->failed.size());
  placed.num_failed = static_cast<std::uint32_t>(failed.size());
  report->jobs.push_back(placed);
  report->failed.insert(report->failed.end(), failed.begin(), failed.end());
}

// A refused plan's jobs have ended: no call was made for them.
SubmitResult StoreWorker::Impl::refuse(std::uint64_t epoch, const std::vector<JobId>& ids,
                                       std::string why) {
  for (const JobId id : ids) {
    // A damaged copy of an earlier plan: its job may be running, and must not be told as quiet.
    if (epoch == bound_epoch && raw(id) <= last_job) continue;
    JobReport entry;
    entry.job = id;
    entry.outcome = JobOutcome::kFailed;
    entry.quiet = 1;
    tell(epoch, entry, {});
  }
  count([](StoreWorkerCounters& c) { ++c.plans_refused; });
  return {false, std::move(why)};
}

std::string StoreWorker::Impl::why_refused(const StepPlanView& plan) {
  const Projection& projection = map->projection();
  const auto problem = [](std::string path, std::string value, std::string expected,
                          std::string hint = {}) {
    return std::string(
        Error(ErrorCode::kMismatch, "step plan",
              {{std::move(path), std::move(value), std::move(expected), std::move(hint)}})
            .what());
  };
  if (closed) return problem("worker", "closed", "an open worker");
  if (plan.digest != projection.digest()) {
    return problem("digest", to_hex(plan.digest), to_hex(projection.digest()),
                   "scheduler and worker were built from different cache configurations");
  }
  if (plan.epoch == 0) return problem("epoch", "0", "the scheduler's random epoch");
  if (bound_epoch != 0 && plan.epoch != bound_epoch) {
    return problem("epoch", std::to_string(plan.epoch), std::to_string(bound_epoch),
                   "another scheduler owns this worker; a restarted scheduler needs a new worker");
  }
  try {
    check_plan(plan);
  } catch (const Error& error) {
    return describe(error);
  }
  const std::size_t groups = projection.num_store_groups();
  for (std::size_t r = 0; r < plan.runs.size(); ++r) {
    const RunRecord& run = plan.runs[r];
    const std::string path = "runs[" + std::to_string(r) + "]";
    if (raw(run.group) >= groups) {
      return problem(path + ".group", std::to_string(raw(run.group)),
                     "a store index below " + std::to_string(groups));
    }
    const std::uint32_t chunk_tokens = projection.group(run.group).tokens_per_block;
    if (run.valid_tokens_last != chunk_tokens) {
      return problem(path + ".valid_tokens_last", std::to_string(run.valid_tokens_last),
                     std::to_string(chunk_tokens) + ", a whole chunk");
    }
    // A mark shifted against its chunk would put the bytes under another prefix.
    for (std::uint32_t i = 0; i < run.count; ++i) {
      const std::uint64_t tokens = (std::uint64_t{run.first_chunk} + i + 1) * chunk_tokens;
      if (plan.mark_tokens[run.first_mark + i] != tokens) {
        return problem(path + ".marks[" + std::to_string(i) + "]",
                       std::to_string(plan.mark_tokens[run.first_mark + i]) + " tokens",
                       std::to_string(tokens) + " tokens, the end of its chunk");
      }
    }
  }
  for (std::size_t i = 0; i < plan.ids.size(); ++i) {
    if (static_cast<std::uint32_t>(raw(plan.ids[i])) >= projection.num_blocks()) {
      return problem("ids[" + std::to_string(i) + "]", std::to_string(raw(plan.ids[i])),
                     "a block id below " + std::to_string(projection.num_blocks()));
    }
  }
  return {};
}

// Of ranks that hold the same bytes each stores its part of the chunks; all of them load all.
void StoreWorker::Impl::add_run(const RunRecord& run, JobKind kind, Job& job) const {
  if (kind == JobKind::kLoad || schema->replicas(run.group) == 1) {
    job.runs.push_back(run);
    return;
  }
  for (std::uint32_t i = 0; i < run.count; ++i) {
    if (!schema->stores(run.group, position, run.first_chunk + i)) continue;
    RunRecord one = run;
    one.first_chunk += i;
    one.first_id += i;
    one.first_mark += i;
    one.count = 1;
    job.runs.push_back(one);
  }
}

void StoreWorker::Impl::copy_job(const StepPlanView& plan, const JobRecord& record,
                                 Job& job) const {
  job.reset();
  job.id = record.id;
  job.epoch = plan.epoch;
  job.kind = record.kind;
  job.timeout = record.timeout;
  job.hash_width = plan.hash_width;
  for (const RunRecord& run : plan.runs.subspan(record.first_run, record.num_runs)) {
    RunRecord own = run;
    own.first_id = static_cast<std::uint32_t>(job.ids.size());
    own.first_mark = own.first_id;
    add_run(own, record.kind, job);
    const auto ids = plan.ids.subspan(run.first_id, run.count);
    job.ids.insert(job.ids.end(), ids.begin(), ids.end());
    const auto hashes =
        plan.mark_hashes.subspan(static_cast<std::size_t>(run.first_mark) * plan.hash_width,
                                 static_cast<std::size_t>(run.count) * plan.hash_width);
    job.hashes.insert(job.hashes.end(), hashes.begin(), hashes.end());
  }
}

// Adds the job's next chunk to the call; false when the call is full.
bool StoreWorker::Impl::add_next(Job& job, Call& call, ObjectBatch& batch) {
  const RunRecord& run = job.runs[job.cursor.run];
  const std::uint32_t at = run.first_id + job.cursor.chunk;
  const std::uint32_t segments = map->segments_per_block(run.group);
  const std::uint64_t bytes = map->object_bytes(run.group);
  const bool fits = batch.segments.size() + segments <= options.max_segments_per_call &&
                    call.bytes + bytes <= options.max_bytes_per_call;
  // One chunk beyond a limit is sent alone (R55).
  if (!fits && !call.items.empty()) return false;
  call.bytes += bytes;
  const auto hash = std::span<const std::uint8_t>(job.hashes)
                        .subspan(static_cast<std::size_t>(at) * job.hash_width, job.hash_width);
  schema->append_key(batch.keys, run.group, shards[raw(run.group)], hash);
  map->append_segments(run.group, job.ids[at], batch.segments);
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
  for (auto it = queue.begin(); it != queue.end();) {
    Job& job = **it;
    if (job.issued() || job.told) {
      it = queue.erase(it);
      continue;
    }
    if (put) {
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
    }
    if (!call) {
      call = idle_calls.take();
      call->reset();
      batch = idle_batches.take();
      batch->clear();
    }
    const Cursor before = job.cursor;
    bool full = false;
    while (!job.issued() && !full) full = !add_next(job, *call, *batch);
    if (before.run != job.cursor.run || before.chunk != job.cursor.chunk) {
      call->jobs.emplace_back(&job, before);
      // The latest: an old save must not take its neighbours along.
      deadline = std::max(deadline, job.deadline);
    }
    // Saves share calls; a load's calls are its own, so that one slow object holds up one request.
    if (full || !put) break;
    ++it;
  }
  if (!call) return false;
  call->put = put;
  const OpId op{next_op++};
  const bool started =
      put ? store->start_put(op, batch, now, deadline) : store->start_get(op, batch, now, deadline);
  if (!started) {
    for (const auto& [job, cursor] : call->jobs) job->cursor = cursor;
    idle_batches.give(std::move(batch));
    idle_calls.give(std::move(call));
    return false;
  }
  for (const auto& [job, cursor] : call->jobs) ++job->calls;
  for (const Item& item : call->items) ++item.job->unanswered;
  ++(put ? puts_open : gets_open);
  calls.emplace(static_cast<std::uint64_t>(op), std::move(call));
  count([&](StoreWorkerCounters& c) { ++(put ? c.puts : c.gets); });
  return true;
}

void StoreWorker::Impl::finish_items(Call& call, const std::vector<ItemResult>& results) {
  std::uint64_t moved = 0;
  std::uint64_t segments = 0;
  for (std::size_t i = 0; i < call.items.size(); ++i) {
    const Item& item = call.items[i];
    Job& job = *item.job;
    --job.unanswered;
    segments += map->segments_per_block(item.group);
    ItemResult result = i < results.size() ? results[i] : ItemResult{ItemStatus::kFailed, 0};
    // Every byte or none: an object of another size is not this object.
    if (!call.put && result.status == ItemStatus::kOk &&
        result.bytes != map->object_bytes(item.group)) {
      result.status = ItemStatus::kSizeMismatch;
    }
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
  count([&](StoreWorkerCounters& c) {
    c.segments += segments;
    (call.put ? c.bytes_stored : c.bytes_fetched) += moved;
  });
}

void StoreWorker::Impl::tell_outcome(Job& job, JobOutcome outcome) {
  job.told = true;
  JobReport entry;
  entry.job = job.id;
  entry.outcome = outcome;
  entry.quiet = job.calls == 0 ? 1 : 0;
  entry.objects = job.objects;
  entry.duplicates = job.duplicates;
  entry.bytes = job.bytes;
  tell(job.epoch, entry, job.failed);
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

bool StoreWorker::Impl::take_inbox(Instant now) {
  bool moved = false;
  std::unique_ptr<Job> job;
  while (inbox.try_pop(job)) {
    job->deadline = now + job->timeout;
    (job->kind == JobKind::kLoad ? loads : saves).push_back(job.get());
    jobs.push_back(std::move(job));
    moved = true;
  }
  return moved;
}

bool StoreWorker::Impl::take_completions(Instant now) {
  bool moved = false;
  while (store->poll_store(now, completion)) {
    moved = true;
    const auto it = calls.find(static_cast<std::uint64_t>(completion.op));
    if (it == calls.end()) continue;
    Call& call = *it->second;
    if (completion.outcome && !call.outcome) {
      call.outcome = true;
      --(call.put ? puts_open : gets_open);
      finish_items(call, completion.items);
      if (!completion.quiet) count([](StoreWorkerCounters& c) { ++c.unquiet_calls; });
    }
    // The outcome of a job that this call completes is told before its quiet.
    for (const auto& [job, cursor] : call.jobs) {
      if (completion.quiet) --job->calls;
      if (!job->told && job->issued() && job->unanswered == 0) {
        tell_outcome(*job, job->failed.empty() ? JobOutcome::kOk : JobOutcome::kPartial);
      } else if (job->told && completion.quiet && job->calls == 0) {
        JobReport entry;
        entry.job = job->id;
        entry.quiet = 1;
        tell(job->epoch, entry, {});
      }
    }
    if (completion.quiet) {
      if (!completion.outcome) count([](StoreWorkerCounters& c) { --c.unquiet_calls; });
      if (completion.batch) idle_batches.give(std::move(completion.batch));
      idle_calls.give(std::move(it->second));
      calls.erase(it);
    }
  }
  return moved;
}

bool StoreWorker::Impl::expire(Instant now) {
  bool moved = false;
  for (const auto& job : jobs) {
    if (job->told) continue;
    if (job->issued() && job->unanswered == 0) {  // a job without anything to move on this rank
      tell_outcome(*job, job->failed.empty() ? JobOutcome::kOk : JobOutcome::kPartial);
      moved = true;
    } else if (job->deadline <= now) {
      list_unfetched(*job, ItemStatus::kTimedOut);
      tell_outcome(*job, JobOutcome::kExpired);
      moved = true;
    }
  }
  return moved;
}

// Forgets jobs that have told both ends.
bool StoreWorker::Impl::retire() {
  const auto done = [](const std::unique_ptr<Job>& job) { return job->told && job->calls == 0; };
  if (std::none_of(jobs.begin(), jobs.end(), done)) return false;
  const auto gone = [](const Job* job) { return job->told; };
  loads.erase(std::remove_if(loads.begin(), loads.end(), gone), loads.end());
  saves.erase(std::remove_if(saves.begin(), saves.end(), gone), saves.end());
  const std::lock_guard lock(submit_mutex);
  std::uint64_t forgotten = 0;
  for (auto& job : jobs) {
    if (!done(job)) continue;
    job->ready = ReadyToken::host();  // a device's event must not outlive its use
    idle_jobs.give(std::move(job));
    ++forgotten;
  }
  jobs.erase(std::remove(jobs.begin(), jobs.end(), nullptr), jobs.end());
  count([&](StoreWorkerCounters& c) { c.jobs_alive -= forgotten; });
  return true;
}

namespace {

// Schema `vllm` promises the reference's bytes too. Its objects hold whole strides of every stored
// layer in the pool, which is what ours hold with one group and layers outermost.
void check_vllm_objects(const SegmentMap& map, ProblemList& problems) {
  const Projection& projection = map.projection();
  const auto refuse = [&](std::string path, std::string value, std::string expected) {
    problems.add(std::move(path), std::move(value), std::move(expected),
                 "key schema vllm writes the reference's bytes; choose schema kvprism");
  };
  if (projection.num_store_groups() > 1) {
    refuse("schema", std::to_string(projection.num_store_groups()) + " stored groups",
           "one, because the reference's objects hold the layers of all groups");
  }
  if (projection.kv_layout() != "LBHNC" && projection.kv_layout() != "LBNHC") {
    refuse("kv_layout", projection.kv_layout(), "LBHNC or LBNHC");
  }
  if (projection.num_store_groups() == 0 || projection.num_blocks() < 3) return;
  std::vector<Segment> two;
  const BlockId blocks[] = {BlockId{1}, BlockId{2}};
  map.append_blocks(projection.group_id(StoreIndex{0}), blocks, two);
  // Neighbouring blocks merge where the stride is the page.
  if (two.size() > map.segments_per_block(StoreIndex{0})) {
    refuse("block_stride", "more than a page", "the page, page_size_padded included");
  }
}

}  // namespace

StoreWorker::StoreWorker(std::shared_ptr<const KeySchema> schema,
                         std::shared_ptr<const SegmentMap> map, std::shared_ptr<ObjectStore> store,
                         const StoreWorkerOptions& options) {
  ProblemList problems;
  if (!schema) problems.add("schema", "null", "a key schema");
  if (!map) problems.add("map", "null", "a segment map");
  if (!store) problems.add("store", "null", "an object store");
  if (options.max_segments_per_call == 0)
    problems.add("max_segments_per_call", "0", "at least 1 segment");
  if (options.max_bytes_per_call == 0) problems.add("max_bytes_per_call", "0", "at least 1 byte");
  if (options.max_gets_in_flight == 0) problems.add("max_gets_in_flight", "0", "at least 1 call");
  if (options.max_puts_in_flight == 0) problems.add("max_puts_in_flight", "0", "at least 1 call");
  if (options.max_queued_jobs == 0) problems.add("max_queued_jobs", "0", "at least 1 job");
  if (schema && map && schema->projection().digest() != map->projection().digest()) {
    problems.add("schema.projection", to_hex(schema->projection().digest()),
                 to_hex(map->projection().digest()),
                 Projection::describe_mismatch(map->projection().digest_facts(),
                                               schema->projection().digest_facts()));
  }
  if (schema) {
    const ParallelSizes& sizes = schema->projection().parallel();
    if (raw(options.rank) >= sizes.world()) {
      problems.add(
          "rank", std::to_string(raw(options.rank)),
          "below " + std::to_string(sizes.world()) + ", tp x pp x pcp of the cache config");
    }
  }
  if (schema && map && schema->name() == "vllm") check_vllm_objects(*map, problems);
  problems.throw_if_any(ErrorCode::kInvalidArgument, "store worker");
  impl_ = std::make_unique<Impl>(std::move(schema), std::move(map), std::move(store), options);

  // All or nothing: a region that cannot be registered undoes those before it (R59).
  const std::vector<Region>& regions = impl_->map->regions();
  for (std::size_t r = 0; r < regions.size(); ++r) {
    try {
      impl_->store->add_region(regions[r]);
    } catch (...) {
      while (r-- > 0) impl_->store->remove_region(regions[r]);
      throw;
    }
  }
}
StoreWorker::~StoreWorker() = default;

SubmitResult StoreWorker::submit(const StepPlanView& plan, ReadyToken ready) {
  const std::lock_guard lock(impl_->submit_mutex);
  std::vector<JobId> refused;
  std::string why = impl_->why_refused(plan);
  if (!why.empty()) {
    for (const JobRecord& job : plan.jobs) refused.push_back(job.id);
    return impl_->refuse(plan.epoch, refused, std::move(why));
  }
  // Its jobs may be running, so they are not reported: only the first copy is the plan.
  if (plan.step <= impl_->last_step) {
    impl_->count([](StoreWorkerCounters& c) { ++c.plans_repeated; });
    return {false, "step plan: step = " + std::to_string(plan.step) + ": expected more than " +
                       std::to_string(impl_->last_step) + " (this plan or a later one was taken)"};
  }
  // Also of a plan that finds no room: its jobs are told as failed, so it must not run later.
  impl_->bound_epoch = plan.epoch;
  impl_->last_step = plan.step;
  if (impl_->inbox.size() + plan.jobs.size() > impl_->options.max_queued_jobs) {
    for (const JobRecord& job : plan.jobs) refused.push_back(job.id);
    return impl_->refuse(plan.epoch, refused,
                         "step plan: " + std::to_string(plan.jobs.size()) + " jobs beside " +
                             std::to_string(impl_->inbox.size()) + " queued: expected at most " +
                             std::to_string(impl_->options.max_queued_jobs) +
                             " together (max_queued_jobs)");
  }
  for (const JobRecord& record : plan.jobs) {
    std::unique_ptr<Job> job = impl_->idle_jobs.take();
    impl_->copy_job(plan, record, *job);
    job->ready = ready;
    impl_->last_job = std::max(impl_->last_job, raw(record.id));
    impl_->inbox.try_push(std::move(job));
  }
  impl_->count([&](StoreWorkerCounters& c) {
    ++c.plans;
    c.jobs += plan.jobs.size();
    c.jobs_alive += plan.jobs.size();
  });
  return {};
}

SubmitResult StoreWorker::submit(std::span<const std::byte> encoded_plan, ReadyToken ready) {
  try {
    return submit(decode_plan(encoded_plan), std::move(ready));
  } catch (const Error& error) {
    const std::lock_guard lock(impl_->submit_mutex);
    const PlanOutline outline = outline_of(encoded_plan);
    return impl_->refuse(outline.epoch, outline.jobs, describe(error));
  }
}

bool StoreWorker::poll(WorkerReport& out) {
  const std::lock_guard lock(impl_->outbox_mutex);
  for (WorkerReport& report : impl_->outbox) {
    if (report.empty()) continue;
    // The two trade their arrays, so that neither allocates again.
    std::swap(out, report);
    report.clear();
    report.rank = out.rank;
    report.epoch = out.epoch;
    // Of a scheduler that was refused nothing more will come.
    if (report.epoch != impl_->outbox.front().epoch)
      std::erase_if(impl_->outbox,
                    [&](const WorkerReport& r) { return r.empty() && r.epoch == out.epoch; });
    return true;
  }
  return false;
}

bool StoreWorker::pump(Instant now) {
  Impl& w = *impl_;
  bool moved = w.take_completions(now);
  moved |= w.take_inbox(now);
  moved |= w.expire(now);
  while (w.gets_open < w.options.max_gets_in_flight && w.issue(w.loads, false, now)) moved = true;
  while (w.puts_open < w.options.max_puts_in_flight && w.issue(w.saves, true, now)) moved = true;
  moved |= w.take_completions(now);
  moved |= w.retire();
  return moved;
}

CloseReport StoreWorker::close(Instant now, Duration budget) {
  Impl& w = *impl_;
  {
    const std::lock_guard lock(w.submit_mutex);
    w.closed = true;
  }
  w.take_inbox(now);
  for (const auto& job : w.jobs) {
    if (job->told || job->issued()) continue;
    w.list_unfetched(*job, ItemStatus::kCancelled);
    w.tell_outcome(*job, JobOutcome::kCancelled);
  }
  CloseReport report = w.store->close_store(budget);
  w.take_completions(now);
  for (const auto& job : w.jobs) {
    if (job->told) continue;
    w.list_unfetched(*job, ItemStatus::kCancelled);
    w.tell_outcome(*job, JobOutcome::kCancelled);
  }
  w.retire();
  return report;
}

StoreWorkerCounters StoreWorker::counters() const {
  const std::lock_guard lock(impl_->counters_mutex);
  return impl_->counters;
}

}  // namespace kvprism
