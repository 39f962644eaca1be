#include "kvprism/store/store_worker.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "group/hash128.h"
#include "key/group_facts.h"
#include "kvprism/base/log.h"
#include "store/give_back.h"
#include "store/plan_check.h"
#include "store/stage_check.h"
#include "store/vllm_objects.h"
#include "store/worker_impl.h"

namespace kvprism {
namespace {

constexpr std::size_t kMostRefused = 64;  // jobs; one of a plan is enough to know it by

}  // namespace

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
  try {
    report->failed.insert(report->failed.end(), failed.begin(), failed.end());
  } catch (...) {
    report->jobs.pop_back();  // it would name the chunks of whoever comes next
    throw;
  }
}

// The scheduler waits for the ends of jobs. One that this worker does not know has told them in a
// report that was lost, or was in a plan that was lost and that comes no more, as steps only rise.
// Of an earlier worker's jobs nothing is known here.
void StoreWorker::Impl::answer(const StepPlanView& plan) {
  std::uint64_t unknown = 0;
  for (const JobId id : plan.asked) {
    if (!options.only && (first_job == 0 || raw(id) < first_job)) continue;
    if (std::binary_search(alive.begin(), alive.end(), raw(id))) continue;
    JobReport entry;
    entry.job = id;
    entry.outcome = JobOutcome::kFailed;
    entry.quiet = 1;
    tell(plan.epoch, entry, {});
    ++unknown;
  }
  if (unknown != 0) count([&](StoreWorkerCounters& c) { c.jobs_unknown += unknown; });
}

bool StoreWorker::Impl::was_refused(std::uint64_t epoch, JobId id) const {
  return std::find(refused.begin(), refused.end(), std::pair(epoch, id)) != refused.end();
}

// A refused plan's jobs have ended: no call was made for them.
SubmitResult StoreWorker::Impl::refuse(std::uint64_t epoch, const std::vector<JobId>& ids,
                                       const Error& why) {
  bool repeated = false;
  for (const JobId id : ids) {
    // A damaged copy of an earlier plan: its job may be running, and must not be told as quiet.
    if (epoch == bound_epoch && raw(id) <= last_job) {
      repeated = true;
      continue;
    }
    if (was_refused(epoch, id)) continue;
    JobReport entry;
    entry.job = id;
    entry.outcome = JobOutcome::kFailed;
    entry.quiet = 1;
    // First: what is told must not run, should the whole plan follow its damaged copy.
    if (bound_epoch == 0 || epoch == bound_epoch) {
      if (refused.size() == kMostRefused) refused.erase(refused.begin());
      refused.emplace_back(epoch, id);
    }
    tell(epoch, entry, {});
  }
  count([](StoreWorkerCounters& c) { ++c.plans_refused; });
  return {false, why.what(), why.problems(), repeated};
}

std::optional<Error> StoreWorker::Impl::why_refused(const StepPlanView& plan) {
  const Projection& projection = map->projection();
  const auto refusal = [](Problem problem) {
    return Error(ErrorCode::kMismatch, "step plan", {std::move(problem)});
  };
  if (closed) return refusal({"worker", "closed", "an open worker", {}});
  if (plan.digest != digest) {
    return refusal({"digest", to_hex(plan.digest), to_hex(digest),
                    "scheduler and worker were built from different cache configurations or key "
                    "facts"});
  }
  if (plan.epoch == 0) return refusal({"epoch", "0", "the scheduler's random epoch", {}});
  if (bound_epoch != 0 && plan.epoch != bound_epoch) {
    return refusal(
        {"epoch", std::to_string(plan.epoch), std::to_string(bound_epoch),
         "another scheduler owns this worker; a restarted scheduler needs a new worker"});
  }
  try {
    check_plan(plan);
  } catch (const Error& error) {
    return error;
  }
  auto wrong = detail::plan_problem(plan, projection, groups);
  if (wrong) return refusal(*std::move(wrong));
  return std::nullopt;
}

// Nothing of a group that this rank holds no layers of; what schema `vllm` stores of it nobody
// here reads. Of ranks that hold the same bytes each stores its part of the chunks; all of them
// load all.
void StoreWorker::Impl::add_run(const RunRecord& run, JobKind kind, Job& job) const {
  if (!places[raw(run.group)]) return;
  if (kind == JobKind::kLoad && map->segments_per_block(run.group) == 0) return;
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

// An object that no call takes would fail at each save.
void StoreWorker::Impl::check_objects(const SegmentMap& map, const StoreCapabilities& store,
                                      ProblemList& problems) {
  if (store.max_segments_per_call == 0) return;
  for (const StoreIndex group : indices<StoreIndex>(map.projection().num_store_groups())) {
    const std::uint32_t segments = map.segments_per_block(group);
    if (segments <= store.max_segments_per_call) continue;
    problems.add("groups[" + std::to_string(raw(map.projection().group_id(group))) + "]",
                 std::to_string(segments) + " segments in a block",
                 "at most " + std::to_string(store.max_segments_per_call) +
                     ", what the store takes in a call",
                 "choose a layout with longer runs, fewer layers in a group, or a higher limit of "
                 "the store (max_slices_per_call of MooncakeOptions, and Mooncake's TCP queue)");
  }
}

bool StoreWorker::Impl::take_inbox(Instant now) {
  bool moved = false;
  while (arriving || inbox.try_pop(arriving)) {
    Job& job = *arriving;
    job.deadline = now + job.timeout;
    (job.kind == JobKind::kLoad ? loads : saves).push_back(&job);
    jobs.push_back(std::move(arriving));
    moved = true;
  }
  return moved;
}

bool StoreWorker::Impl::expire(Instant now) {
  bool moved = false;
  for (const auto& job : jobs) {
    if (tell_ends(*job)) {  // a job without anything to move on this rank, for one
      moved = true;
    } else if (!job->told && job->deadline <= now) {
      list_unfetched(*job, ItemStatus::kTimedOut);
      tell_outcome(*job, JobOutcome::kExpired);
      moved = true;
    }
  }
  return moved;
}

// Forgets jobs that have told both ends.
bool StoreWorker::Impl::retire() {
  const auto done = [](const std::unique_ptr<Job>& job) { return job->told_quiet; };
  const auto ended = static_cast<std::size_t>(std::count_if(jobs.begin(), jobs.end(), done));
  if (ended == 0) return false;
  if (ended > retired.capacity()) retired.reserve(2 * ended);
  // From here on nothing fails.
  const auto gone = [](const Job* job) { return job->told; };
  loads.erase(std::remove_if(loads.begin(), loads.end(), gone), loads.end());
  saves.erase(std::remove_if(saves.begin(), saves.end(), gone), saves.end());
  for (auto& job : jobs) {
    if (!done(job)) continue;
    job->ready = ReadyToken::host();  // a device's event must not outlive its use
    retired.push_back(std::move(job));
  }
  jobs.erase(std::remove(jobs.begin(), jobs.end(), nullptr), jobs.end());
  const auto rises = [](const auto& a, const auto& b) { return raw(a->id) < raw(b->id); };
  if (!std::is_sorted(retired.begin(), retired.end(), rises))
    std::sort(retired.begin(), retired.end(), rises);
  {
    // A step waits for this: one pass, however many have ended.
    const std::lock_guard lock(submit_mutex);
    auto next = retired.begin();
    std::erase_if(alive, [&](std::uint64_t id) {
      while (next != retired.end() && raw((*next)->id) < id) ++next;
      return next != retired.end() && raw((*next)->id) == id;
    });
    for (auto job = retired.begin(); job != retired.end() && !idle_jobs.full(); ++job)
      idle_jobs.give(std::move(*job));
  }
  count([&](StoreWorkerCounters& c) { c.jobs_alive -= ended; });
  retired.clear();
  return true;
}

namespace {

// The digest leaves out what ranks may differ in; on one rank the keys must tell the map's bytes.
void check_groups(const KeySchema& schema, const Projection& of_map, ProblemList& problems) {
  const Projection& of_keys = schema.projection();
  const std::vector<DigestFact> keys = detail::stored_group_facts(of_keys);
  const std::vector<DigestFact> map = detail::stored_group_facts(of_map);
  if (keys == map) {
    if (schema.name() != "kvprism") return;
    // Keys of a wrapper's first layer: the others may be spread over fewer ranks alike.
    for (const StoreIndex index : indices<StoreIndex>(of_map.num_store_groups())) {
      const std::uint32_t alike = detail::shared_replicas(of_map.group(index), of_map.parallel());
      if (alike % schema.replicas(index) == 0) continue;
      problems.add("schema.store_groups[" + std::to_string(raw(index)) + "].replicas",
                   std::to_string(schema.replicas(index)),
                   "a divisor of " + std::to_string(alike) +
                       ", the tensor ranks that hold the same bytes of all layers of the map",
                   "make the schema from all layers of the group");
    }
    return;
  }
  problems.add("schema.projection",
               "stored groups " + to_hex(detail::hash128(detail::canonical_text(keys))),
               "those of the map, " + to_hex(detail::hash128(detail::canonical_text(map))),
               Projection::describe_mismatch(map, keys));
}

// Such a store would copy from an address that is none of the host's.
void check_devices(const SegmentMap& map, const StoreCapabilities& store, ProblemList& problems) {
  if (store.device_memory) return;
  for (std::size_t r = 0; r < map.regions().size(); ++r) {
    const int device = map.regions()[r].device;
    if (device < 0) continue;
    problems.add("regions[" + std::to_string(r) + "].device", std::to_string(device),
                 "host memory, as store " + store.name + " moves no other",
                 "of Mooncake a build for accelerators is needed: uninstall "
                 "mooncake-transfer-engine-non-cuda, then install mooncake-transfer-engine");
    return;
  }
}

}  // namespace

StoreWorker::StoreWorker(std::shared_ptr<const KeySchema> schema,
                         std::shared_ptr<const SegmentMap> map, std::shared_ptr<ObjectStore> store,
                         const StoreWorkerOptions& options) {
  ProblemList problems;
  if (!schema) problems.add("schema", "null", "a key schema");
  if (!map) problems.add("map", "null", "a segment map");
  Impl::StoreInUse in_use(store, "store", "an object store", problems);
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
  } else if (schema && map) {
    check_groups(*schema, map->projection(), problems);
  }
  if (schema) {
    const ParallelSizes& sizes = schema->projection().parallel();
    if (raw(options.rank) >= sizes.world()) {
      problems.add(
          "rank", std::to_string(raw(options.rank)),
          "below " + std::to_string(sizes.world()) + ", tp x pp x pcp of the cache config");
    }
  }
  if (map && raw(options.rank) < map->projection().parallel().world())
    detail::check_stage(map->projection(), options.rank, problems);
  if (map && store) Impl::check_objects(*map, store->capabilities(), problems);
  if (schema && map && schema->name() == "vllm") detail::check_vllm_objects(*map, problems);
  const bool well_formed = problems.empty();
  if (map && store) check_devices(*map, store->capabilities(), problems);
  problems.throw_if_any(well_formed ? ErrorCode::kUnsupported : ErrorCode::kInvalidArgument,
                        "store worker");
  impl_ = std::make_unique<Impl>(std::move(schema), std::move(map), std::move(store),
                                 std::move(in_use), options);

  const std::uint64_t limit = impl_->options.max_bytes_in_flight;
  if (limit != 0 &&
      limit / impl_->options.max_gets_in_flight <= impl_->options.max_bytes_per_call) {
    log(LogLevel::kWarning,
        fmt::format("max_bytes_in_flight {} is no more than {} loads of {} bytes: while loads keep "
                    "coming, saves wait and expire",
                    limit, impl_->options.max_gets_in_flight, impl_->options.max_bytes_per_call));
  }

  // All or nothing: a region that cannot be registered undoes those before it (R59).
  const std::vector<Region>& regions = impl_->map->regions();
  for (std::size_t r = 0; r < regions.size(); ++r) {
    try {
      impl_->store->add_region(regions[r]);
    } catch (...) {
      detail::give_regions_back(*impl_->store, std::span(regions).first(r));
    }
  }
}
StoreWorker::~StoreWorker() = default;

SubmitResult StoreWorker::submit(const StepPlanView& plan, ReadyToken ready) {
  const std::lock_guard lock(impl_->submit_mutex);
  std::vector<JobId> refused;
  if (const std::optional<Error> why = impl_->why_refused(plan)) {
    for (const JobRecord& job : plan.jobs) refused.push_back(job.id);
    return impl_->refuse(plan.epoch, refused, *why);
  }
  // Its jobs may be running, so they are not reported: only the first copy is the plan.
  if (plan.step <= impl_->last_step) {
    impl_->count([](StoreWorkerCounters& c) { ++c.plans_repeated; });
    const Error why(
        ErrorCode::kMismatch, "step plan",
        {{"step", std::to_string(plan.step), "more than " + std::to_string(impl_->last_step),
          "this plan or a later one was taken"}});
    return {false, why.what(), why.problems(), true};
  }
  for (std::size_t i = 0; i < plan.jobs.size(); ++i) {
    const JobId id = plan.jobs[i].id;
    if (!impl_->was_refused(plan.epoch, id)) continue;
    for (const JobRecord& job : plan.jobs) refused.push_back(job.id);
    return impl_->refuse(
        plan.epoch, refused,
        Error(ErrorCode::kMismatch, "step plan",
              {{"jobs[" + std::to_string(i) + "].id", std::to_string(raw(id)),
                "a job that has not ended",
                "a damaged copy of the plan was refused, and its blocks were given back"}}));
  }
  // Also of a plan that finds no room: its jobs are told as failed, so it must not run later.
  impl_->bound_epoch = plan.epoch;
  impl_->last_step = plan.step;
  if (impl_->first_job == 0 && !plan.jobs.empty()) impl_->first_job = raw(plan.jobs[0].id);
  if (impl_->inbox.size() + plan.jobs.size() > impl_->options.max_queued_jobs) {
    for (const JobRecord& job : plan.jobs) refused.push_back(job.id);
    return impl_->refuse(plan.epoch, refused,
                         Error(ErrorCode::kMismatch, "step plan",
                               {{"jobs",
                                 std::to_string(plan.jobs.size()) + " beside " +
                                     std::to_string(impl_->inbox.size()) + " queued",
                                 "at most " + std::to_string(impl_->options.max_queued_jobs) +
                                     " together (max_queued_jobs)",
                                 {}}}));
  }
  try {
    impl_->take(plan, ready);
  } catch (const std::exception& error) {
    impl_->copied.clear();
    for (const JobRecord& job : plan.jobs) refused.push_back(job.id);
    return impl_->refuse(plan.epoch, refused,
                         Error(ErrorCode::kMismatch, "step plan",
                               {{"jobs",
                                 error.what(),
                                 "memory for a copy of " + std::to_string(plan.jobs.size()),
                                 {}}}));
  }
  try {
    impl_->answer(plan);
  } catch (const std::exception&) {
    return {};  // the plan is taken, and the question is asked again
  }
  return {};
}

void StoreWorker::Impl::take(const StepPlanView& plan, const ReadyToken& ready) {
  for (const JobRecord& record : plan.jobs) {
    copied.push_back(idle_jobs.take());
    copy_job(plan, record, *copied.back());
    copied.back()->ready = ready;
  }
  const std::size_t most = alive.size() + copied.size();
  if (most > alive.capacity()) alive.reserve(2 * most);
  inbox.try_push_all(copied);
  // From here on nothing fails. Whoever forgets a job waits for submit_mutex.
  for (const JobRecord& record : plan.jobs) {
    last_job = std::max(last_job, raw(record.id));
    alive.insert(std::upper_bound(alive.begin(), alive.end(), raw(record.id)), raw(record.id));
  }
  count([&](StoreWorkerCounters& c) {
    ++c.plans;
    c.jobs += copied.size();
    c.jobs_alive += copied.size();
  });
  copied.clear();
}

SubmitResult StoreWorker::submit(std::span<const std::byte> encoded_plan, ReadyToken ready) {
  try {
    return submit(decode_plan(encoded_plan), std::move(ready));
  } catch (const Error& error) {
    const std::lock_guard lock(impl_->submit_mutex);
    const PlanOutline outline = outline_of(encoded_plan);
    return impl_->refuse(outline.epoch, outline.jobs, error);
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

template <class Step>
auto StoreWorker::Impl::counting_errors(Step&& step) {
  try {
    return step();
  } catch (...) {
    count([](StoreWorkerCounters& c) { ++c.pump_errors; });
    throw;
  }
}

bool StoreWorker::pump(Instant now) {
  Impl& w = *impl_;
  return w.counting_errors([&] {
    bool moved = w.take_completions(now);
    moved |= w.take_inbox(now);
    moved |= w.expire(now);
    while (w.gets_open < w.options.max_gets_in_flight && w.issue(w.loads, false, now)) moved = true;
    while (w.puts_open < w.options.max_puts_in_flight && w.issue(w.saves, true, now)) moved = true;
    moved |= w.take_completions(now);
    moved |= w.retire();
    return moved;
  });
}

CloseReport StoreWorker::close(Instant now, Duration budget) {
  return impl_->counting_errors([&] { return impl_->close(now, budget); });
}

CloseReport StoreWorker::Impl::close(Instant now, Duration budget) {
  {
    const std::lock_guard lock(submit_mutex);
    closed = true;
  }
  take_inbox(now);
  for (const auto& job : jobs) {
    if (job->told || job->issued()) continue;
    list_unfetched(*job, ItemStatus::kCancelled);
    tell_outcome(*job, JobOutcome::kCancelled);
  }
  CloseReport report = store->close_store(budget);
  take_completions(now);
  for (const auto& job : jobs) {
    if (tell_ends(*job) || job->told) continue;
    list_unfetched(*job, ItemStatus::kCancelled);
    tell_outcome(*job, JobOutcome::kCancelled);
  }
  retire();
  return report;
}

bool StoreWorker::has_untold() const {
  const Impl& w = *impl_;
  return w.arriving != nullptr || w.inbox.size() != 0 ||
         std::any_of(w.jobs.begin(), w.jobs.end(), [](const auto& job) { return !job->told; });
}

StoreWorkerCounters StoreWorker::counters() const {
  const std::lock_guard lock(impl_->counters_mutex);
  return impl_->counters;
}
std::vector<StoreGroupCounters> StoreWorker::group_counters() const {
  const std::lock_guard lock(impl_->counters_mutex);
  return impl_->group_counters;
}

}  // namespace kvprism
