#include "kvprism/store/store_scheduler.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "kvprism/base/log.h"
#include "kvprism/store/validate_store.h"
#include "store/scheduler_impl.h"

namespace kvprism {
namespace {

using detail::Request;
using detail::RunCall;
using detail::RunWriter;

constexpr std::size_t kMostAsked = 64;                   // jobs in a plan
constexpr Duration kLongest{1'000'000'000'000'000'000};  // a sum with a time must not overflow

void check_options(const StoreSchedulerOptions& options, const KeySchema* schema,
                   ProblemList& problems) {
  if (options.epoch == 0) problems.add("epoch", "0", "a random value other than 0");
  if (options.ranks > 64) {
    problems.add("ranks", std::to_string(options.ranks), "1 to 64 workers");
  } else if (schema != nullptr && options.ranks != schema->projection().parallel().world()) {
    problems.add("ranks", std::to_string(options.ranks),
                 std::to_string(schema->projection().parallel().world()) +
                     " workers, tp x pp x pcp of the cache config",
                 "a rank that is not counted would lose its blocks while it moves them");
  }
  const auto positive = [&](const char* name, Duration value) {
    if (value.ns <= 0 || value > kLongest)
      problems.add(name, std::to_string(value.ns) + " ns",
                   "a bound of more than 0 and at most " + std::to_string(kLongest.ns) + " ns");
  };
  positive("lookup_timeout", options.lookup_timeout);
  positive("lookup_fresh_for", options.lookup_fresh_for);
  positive("load_timeout", options.load_timeout);
  positive("save_timeout", options.save_timeout);
  positive("quarantine_after", options.quarantine_after);
  positive("backoff", options.backoff);
  positive("saved_fresh_for", options.saved_fresh_for);
  positive("avoid_failed_for", options.avoid_failed_for);
  positive("purge_settle", options.purge_settle);
  positive("healthy_after", options.healthy_after);
  if (options.max_held_percent == 0 || options.max_held_percent > 100) {
    problems.add("max_held_percent", std::to_string(options.max_held_percent), "1 to 100");
  }
  if (options.backoff_after == 0) problems.add("backoff_after", "0", "at least 1 save");
}

// With the ranks filled in. Throws when there are problems, those of before included.
StoreSchedulerOptions checked_options(const KeySchema* schema, StoreSchedulerOptions options,
                                      ProblemList& problems) {
  if (options.ranks == 0 && schema != nullptr) {
    options.ranks = schema->projection().parallel().world();
  }
  check_options(options, schema, problems);
  if (schema != nullptr) problems.append(validate_store(schema->projection()));
  problems.throw_if_any(ErrorCode::kInvalidConfig, "store scheduler");
  return options;
}

// Whether a decoder takes it; of a report that was put together by hand it may not.
bool decodable(const WorkerReport& report, const JobReport& job) {
  return std::uint64_t{job.first_failed} + job.num_failed <= report.failed.size() &&
         job.outcome <= JobOutcome::kExpired && job.quiet <= 1;
}

// The same in a form that a recording can hold: what names no chunks or no outcome names a chunk of
// no group, and so fails as a whole.
WorkerReport as_decodable(const WorkerReport& report) {
  WorkerReport taken = report;
  taken.failed.push_back({StoreIndex{UINT32_MAX}, 0, 0});
  for (JobReport& job : taken.jobs) {
    job.quiet = job.quiet != 0 ? 1 : 0;
    if (decodable(report, job)) continue;
    job.outcome = JobOutcome::kFailed;
    job.first_failed = static_cast<std::uint32_t>(report.failed.size());
    job.num_failed = 1;
  }
  return taken;
}

}  // namespace

bool StoreScheduler::Impl::take_hashes(Request& request, const HashList& hashes) {
  std::uint32_t known = hash_count(request);
  bool fits = hashes.first <= known && hashes.readable();
  if (hashes.count == 0) {
    if (!fits) ++counters.hashes_refused;
    return fits;
  }
  if (fits && hash_width == 0 && hashes.width >= kMinHashWidth && hashes.width <= kMaxHashWidth) {
    hash_width = hashes.width;
  }
  fits = fits && hash_width != 0 && hashes.width == hash_width;
  const std::uint32_t overlap_end = std::min(known, hashes.end());
  if (fits && overlap_end > hashes.first) {
    // Hashes are chained: when the last common one is equal, all before it are.
    const auto theirs = hashes[overlap_end - 1];
    const auto ours = hashes_of(request)[overlap_end - 1];
    if (!std::equal(theirs.begin(), theirs.end(), ours.begin(), ours.end())) {
      // The id serves another request now. What was told of it, and what its blocks may rest on,
      // holds for its new tokens too.
      Request fresh;
      fresh.access = request.access;
      fresh.prompt_tokens = request.prompt_tokens;
      fresh.purged = request.purged;
      fresh.load_from = request.load_from;
      fresh.load_to = request.load_to;
      fresh.generation = next_generation++;
      if (request.loading) inherit_load(request, fresh);
      request = std::move(fresh);
      known = 0;
      ++counters.requests_replaced;
      // Without those before them they name nothing, and the old ones name other tokens.
      fits = hashes.first == 0;
    }
  }
  if (!fits) {
    ++counters.hashes_refused;
    return false;
  }
  if (hashes.end() > known) {
    const auto fresh = hashes[known];
    request.hashes.insert(request.hashes.end(), fresh.data(),
                          hashes.data + static_cast<std::size_t>(hashes.count) * hashes.width);
  }
  return true;
}

// What the load leaves unwritten must not be saved, whatever of it arrives, and only its end ends
// the wait.
void StoreScheduler::Impl::inherit_load(Request& request, Request& heir) {
  for (auto& [job, load] : loads) {
    const bool own = load.generation == request.generation;
    if (load.reported || (!own && load.heir != request.generation)) continue;
    heir.load_from = load.local;
    heir.load_to = load.hit;
    heir.loading = true;
    load.heir = heir.generation;
    if (own) load.left = std::make_unique<Request>(std::move(request));
    return;
  }
}

// One sequence of marks for each chunk size that `ranges` uses, wide enough for every group of that
// size.
void StoreScheduler::Impl::add_marks(const Request& request) {
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const std::uint32_t chunk_tokens = groups[g].chunk_tokens;
    ChunkRange wide;
    bool earlier = false;
    for (std::size_t other = 0; other < groups.size(); ++other) {
      if (groups[other].chunk_tokens != chunk_tokens || ranges[other].empty()) continue;
      earlier |= other < g;
      wide = wide.empty() ? ranges[other]
                          : ChunkRange{std::min(wide.first, ranges[other].first),
                                       std::max(wide.end, ranges[other].end)};
    }
    if (!earlier && !ranges[g].empty())
      builder.add_marks(wide, chunk_tokens, hashes_of(request), hash_tokens);
  }
}

bool StoreScheduler::Impl::could_fail(JobId job, std::span<const FailedChunk> failed) const {
  const auto load = loads.find(raw(job));
  return std::all_of(failed.begin(), failed.end(), [&](const FailedChunk& chunk) {
    if (raw(chunk.group) >= groups.size() ||
        chunk.chunk >= UINT32_MAX / groups[raw(chunk.group)].chunk_tokens) {
      return false;
    }
    // Cut to the 8 bits of a status it might be any.
    if (chunk.status == 0 || chunk.status > static_cast<std::uint32_t>(kLastItemStatus))
      return false;
    return load == loads.end() || detail::moves(load->second, chunk.group, chunk.chunk);
  });
}

void StoreScheduler::Impl::warn_of_quarantine(Instant now) {
  incident("blocks went to quarantine", now);
  const auto held_back = quarantine_lines.pass(now);
  if (!held_back) return;
  log(LogLevel::kWarning,
      with_held_back(fmt::format("job {} of request {} is not quiet after {} s: its blocks are "
                                 "held until the client that moves them is gone",
                                 raw(event.job), raw(event.request),
                                 options.quarantine_after.ns / 1'000'000'000),
                     *held_back));
}

// Turns what has become final in the ledger into load ends, watermarks and released references.
// What is taken out of the ledger comes no second time, so that nothing behind it may fail.
void StoreScheduler::Impl::settle(Instant now) {
  ledger.advance(now);
  while (ledger.take_outcome(event)) {
    flight.add(now, FlightKind::kOutcome, raw(event.job), static_cast<std::uint64_t>(event.outcome),
               event.failed.size());
    worker_silent = event.whole && event.outcome == JobOutcome::kExpired;
    if (worker_silent) {
      flight.add(now, FlightKind::kExpired, raw(event.request), raw(event.job));
      if_memory([&] { incident("a rank has not told the outcome of a job", now); });
    }
    if (event.kind == JobKind::kSave) {
      end_save(event, now);
    } else if (const auto load = loads.find(raw(event.job)); load != loads.end()) {
      sort_mismatches(load->second);
      if_memory([&] { remember_unloadable(load->second, event, now); });
      // Its end may be far: whoever watches need not wait for it.
      if (event.outcome == JobOutcome::kExpired && !load->second.overtaken) loads_fail = true;
    }
  }
  while (ledger.take_quarantined(event)) {
    flight.add(now, FlightKind::kQuarantine, raw(event.request), raw(event.job),
               ledger.blocks_held());
    if_memory([&] { warn_of_quarantine(now); });
    const auto load = loads.find(raw(event.job));
    if (load != loads.end() && options.detach_quarantined_loads && !load->second.reported)
      end_load(event.job, load->second, event, false, now);
  }
  while (ledger.take_quiet(event)) {
    flight.add(now, FlightKind::kQuiet, raw(event.job), event.blocks.size());
    released.insert(released.end(), event.blocks.begin(), event.blocks.end());
    const auto load = loads.find(raw(event.job));
    if (load == loads.end()) continue;
    if (!load->second.reported) end_load(event.job, load->second, event, true, now);
    loads.erase(load);
  }
}

StoreScheduler::StoreScheduler(std::shared_ptr<const KeySchema> schema,
                               std::shared_ptr<ObjectIndex> index,
                               const StoreSchedulerOptions& wanted) {
  ProblemList problems;
  if (!schema) problems.add("schema", "null", "a key schema");
  Impl::IndexInUse in_use(index, "index", "an object index", problems);
  const StoreSchedulerOptions options = checked_options(schema.get(), wanted, problems);
  impl_ = std::make_unique<Impl>(std::move(schema), std::move(index), std::move(in_use), options);
  for (StepPlan* const plan : {&impl_->plan, &impl_->sent}) {
    plan->digest = impl_->schema->plan_digest();
    plan->epoch = options.epoch;
  }
}
StoreScheduler::~StoreScheduler() = default;

void StoreScheduler::check(const KeySchema& schema, const StoreSchedulerOptions& options) {
  ProblemList problems;
  checked_options(&schema, options, problems);
}

const Projection& StoreScheduler::projection() const noexcept { return impl_->projection(); }
const StoreSchedulerOptions& StoreScheduler::options() const noexcept { return impl_->options; }

std::string_view to_string(StoreMode mode) noexcept {
  switch (mode) {
    case StoreMode::kReadWrite:
      return "read_write";
    case StoreMode::kReadOnly:
      return "read_only";
    case StoreMode::kWriteOnly:
      return "write_only";
    case StoreMode::kOff:
      break;
  }
  return "off";
}

void StoreScheduler::set_mode(StoreMode mode) noexcept {
  detail::RecordedCall call(impl_->recorder.get(), RunCall::kSetMode, impl_->last_step_at,
                            [&](RunWriter w) { w.put(static_cast<std::uint8_t>(mode)); });
  impl_->flight.add(impl_->last_step_at, FlightKind::kMode, static_cast<std::uint64_t>(mode));
  impl_->mode = mode;
  if (!impl_->may_load()) impl_->forget_questions();
}
StoreMode StoreScheduler::mode() const noexcept { return impl_->mode; }

void StoreScheduler::restrict(RequestId id, RequestAccess access) {
  detail::RecordedCall call(
      impl_->recorder.get(), RunCall::kRestrict, impl_->last_step_at, [&](RunWriter w) {
        w.put(raw(id));
        w.put(static_cast<std::uint8_t>((access.load ? 1 : 0) | (access.save ? 2 : 0)));
      });
  Request& request = impl_->remember(id);
  request.access = access;
  if (!access.load && request.lookup.state == detail::LookupState::kQueued)
    request.lookup.state = detail::LookupState::kNone;
  if (!access.save) impl_->drop_offers(id, request.generation);
}

void StoreScheduler::advanced(RequestId id, std::uint32_t accepted_tokens, const HashList& hashes) {
  detail::RecordedCall call(impl_->recorder.get(), RunCall::kAdvanced, impl_->last_step_at,
                            [&](RunWriter w) {
                              w.put(raw(id));
                              w.put(accepted_tokens);
                              w.hashes(hashes);
                            });
  Impl& s = *impl_;
  Request& request = s.remember(id);
  s.take_hashes(request, hashes);
  request.accepted = accepted_tokens;
}

std::uint32_t StoreScheduler::known_hashes(RequestId id) const noexcept {
  Request* const request = impl_->find(id);
  return request == nullptr ? 0 : impl_->hash_count(*request);
}

void StoreScheduler::preempted(RequestId id) {
  detail::RecordedCall call(impl_->recorder.get(), RunCall::kPreempted, impl_->last_step_at,
                            [&](RunWriter w) { w.put(raw(id)); });
  Request* const request = impl_->find(id);
  if (request == nullptr) return;
  impl_->flight.add(impl_->last_step_at, FlightKind::kPreempted, raw(id));
  request->accepted = 0;
  request->load_to = 0;
  if (request->purged) {
    // It is computed anew from its first token, and nothing of it is in the store.
    request->purged = false;
    request->forget_saves();
  }
  request->lookup.state = detail::LookupState::kNone;
}

void StoreScheduler::finished(RequestId id, FinishReason how) {
  detail::RecordedCall call(
      impl_->recorder.get(), RunCall::kFinished, impl_->last_step_at, [&](RunWriter w) {
        w.put(raw(id));
        w.put(static_cast<std::uint8_t>(how == FinishReason::kAborted ? 1 : 0));
      });
  Request* const request = impl_->find(id);
  if (request == nullptr) return;
  if (impl_->options.saves && request->access.save && !request->purged &&
      impl_->aligned(impl_->computed(*request)) > request->planned) {
    ++impl_->counters.saves_dropped;
  }
  impl_->flight.add(impl_->last_step_at, FlightKind::kFinished, raw(id));
  if (request->loading) impl_->leave_to_load(id, *request);
  impl_->requests.erase(raw(id));
}

// Damage that a load finds is counted and removed, also when nobody waits for it any more.
void StoreScheduler::Impl::leave_to_load(RequestId id, Request& request) {
  for (auto& [job, load] : loads) {
    if (load.request != id || load.generation != request.generation || load.reported) continue;
    load.left = std::make_unique<Request>(std::move(request));
    return;
  }
}

const StepPlan& StoreScheduler::end_step(Instant now) {
  Impl& s = *impl_;
  detail::RecordedCall call(impl_->recorder.get(), RunCall::kEndStep, now, [](RunWriter) {});
  s.last_step_at = now;
  s.take_answers(now);
  s.send_questions(now);
  s.settle(now);
  s.take_removed(now);
  s.remove_again(now);
  s.advance_purge(now);
  s.begin_plan();
  s.plan_offers(now);
  s.ledger.take_unquiet(now, kMostAsked, s.plan.asked);
  s.update_health(now);
  s.plan.step = ++s.step;
  call.result_of([&] {
    encode(s.plan.view(), s.recorded);
    return std::span<const std::byte>(s.recorded);
  });
  std::swap(s.plan, s.sent);
  s.plan.clear();
  return s.sent;
}

bool StoreScheduler::report(const WorkerReport& report, Instant now) {
  if (!std::all_of(report.jobs.begin(), report.jobs.end(),
                   [&](const JobReport& job) { return decodable(report, job); })) {
    return StoreScheduler::report(as_decodable(report), now);
  }
  Impl& s = *impl_;
  detail::RecordedCall call(impl_->recorder.get(), RunCall::kReport, now, [&](RunWriter w) {
    encode(report, s.recorded);
    w.append(s.recorded.data(), s.recorded.size());
  });
  if (report.epoch != s.options.epoch) {
    ++s.counters.reports_foreign;
    return false;
  }
  if (raw(report.rank) >= s.options.ranks) {
    ++s.counters.reports_malformed;
    s.flight.add(now, FlightKind::kReportError, s.counters.reports_malformed);
    return false;
  }
  bool all = true;
  for (const JobReport& job : report.jobs) {
    const auto failed = report.failed_of(job);
    if (s.could_fail(job.job, failed)) {
      const auto load = s.loads.find(raw(job.job));
      if (load != s.loads.end()) s.note_mismatches(load->second, report.rank, failed);
      s.ledger.notice(report.rank, job, failed, now);
      continue;
    }
    all = false;
    // Nothing of it can be counted on. That it is quiet still holds, or its blocks would be lost.
    ++s.counters.reports_malformed;
    s.flight.add(now, FlightKind::kReportError, s.counters.reports_malformed);
    JobReport whole = job;
    whole.outcome = JobOutcome::kFailed;
    s.ledger.notice(report.rank, whole, {}, now);
  }
  s.settle(now);
  return all;
}

bool StoreScheduler::report(std::span<const std::byte> bytes, Instant now) {
  detail::RecordedCall call(impl_->recorder.get(), RunCall::kReport, now,
                            [&](RunWriter w) { w.append(bytes.data(), bytes.size()); });
  bool all = true;
  while (!bytes.empty()) {
    try {
      decode_report(bytes, impl_->incoming);
    } catch (const Error&) {
      ++impl_->counters.reports_malformed;
      impl_->flight.add(now, FlightKind::kReportError, impl_->counters.reports_malformed);
      return false;
    }
    all &= report(impl_->incoming, now);
  }
  return all;
}

void StoreScheduler::rank_gone(Rank rank, Instant now) {
  detail::RecordedCall call(impl_->recorder.get(), RunCall::kRankGone, now,
                            [&](RunWriter w) { w.put(raw(rank)); });
  Impl& s = *impl_;
  if (raw(rank) < s.options.ranks) {
    // What no worker has yet would reach the one in its place, which holds nothing to be saved, and
    // whose loads would come into blocks that have been given back.
    s.drop_offers();
    for (const JobRecord& job : s.plan.jobs) s.ledger.withdraw(job.id, now);
    s.plan.clear();
  }
  s.ledger.rank_gone(rank, now);
  s.settle(now);
}

void StoreScheduler::take_load_ends(std::vector<LoadEnd>& out) {
  Impl& s = *impl_;
  detail::RecordedCall call(s.recorder.get(), RunCall::kTakeLoadEnds, s.last_step_at,
                            [](RunWriter) {});
  call.result_of([&] {
    s.recorded.clear();
    detail::write_load_ends(s.load_ends, s.recorded);
    return std::span<const std::byte>(s.recorded);
  });
  out.insert(out.end(), std::make_move_iterator(s.load_ends.begin()),
             std::make_move_iterator(s.load_ends.end()));
  s.load_ends.clear();
}
void StoreScheduler::take_acquired(std::vector<BlockId>& out) {
  Impl& s = *impl_;
  detail::RecordedCall call(s.recorder.get(), RunCall::kTakeAcquired, s.last_step_at,
                            [](RunWriter) {});
  call.result_of([&] { return std::as_bytes(std::span(s.acquired)); });
  out.insert(out.end(), s.acquired.begin(), s.acquired.end());
  s.acquired.clear();
}
void StoreScheduler::take_released(std::vector<BlockId>& out) {
  Impl& s = *impl_;
  detail::RecordedCall call(s.recorder.get(), RunCall::kTakeReleased, s.last_step_at,
                            [](RunWriter) {});
  call.result_of([&] { return std::as_bytes(std::span(s.released)); });
  out.insert(out.end(), s.released.begin(), s.released.end());
  s.released.clear();
}

bool StoreScheduler::has_pending_work() const noexcept {
  return impl_->ledger.size() > impl_->ledger.in_quarantine() || !impl_->offers.empty() ||
         !impl_->load_ends.empty() || !impl_->released.empty() || !impl_->changes.empty() ||
         impl_->purge.status.state == PurgeState::kRemoving;
}
std::size_t StoreScheduler::tracked() const noexcept {
  return impl_->requests.size() + impl_->ledger.size() + impl_->loads.size() + impl_->saves.size() +
         impl_->offers.size() + impl_->desk.in_flight();
}
StoreSchedulerCounters StoreScheduler::counters() const noexcept {
  StoreSchedulerCounters counters = impl_->counters;
  counters.lookup_calls = impl_->desk.counters().calls;
  counters.lookup_keys = impl_->desk.counters().keys;
  counters.chunks_avoided = impl_->desk.counters().avoided;
  counters.ledger = impl_->ledger.counters();
  counters.health = static_cast<std::uint64_t>(impl_->health.state);
  return counters;
}

}  // namespace kvprism
