#include "kvprism/job/job_ledger.h"

#include <algorithm>
#include <optional>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "job/alarms.h"
#include "job/job_queue.h"

namespace kvprism {
namespace {

int severity(JobOutcome outcome) noexcept {
  switch (outcome) {
    case JobOutcome::kNone:
      return 0;
    case JobOutcome::kOk:
      return 1;
    case JobOutcome::kPartial:
      return 2;
    case JobOutcome::kExpired:
      return 3;
    case JobOutcome::kCancelled:
      return 4;
    case JobOutcome::kFailed:
      return 5;
  }
  return 5;
}

auto order(const FailedChunk& chunk) noexcept {
  return std::tuple(raw(chunk.group), chunk.chunk, chunk.status);
}

struct Job {
  RequestId request{};
  JobKind kind{};
  JobOutcome outcome = JobOutcome::kNone;
  std::uint64_t outcome_ranks = 0;  // one bit per rank
  std::uint64_t quiet_ranks = 0;
  bool whole = false;
  bool gone = false;
  bool final = false;  // the outcome is decided
  bool quarantined = false;
  bool quiet_queued = false;
  std::uint64_t bytes = 0;
  std::uint32_t objects = 0;
  std::uint32_t duplicates = 0;
  std::vector<FailedChunk> failed;
  std::vector<BlockId> blocks;
};

}  // namespace

struct JobLedger::Impl {
  LedgerOptions options;
  std::uint64_t all_ranks;
  std::uint64_t next_id = 1;
  std::unordered_map<std::uint64_t, Job> jobs;
  detail::Alarms deadlines;
  detail::Alarms quarantines;
  detail::Alarms questions;
  detail::JobQueue outcomes;
  detail::JobQueue quiets;
  detail::JobQueue quarantined;
  std::size_t quarantined_now = 0;
  LedgerCounters counters;

  Job* find(JobId id) {
    const auto it = jobs.find(raw(id));
    return it == jobs.end() ? nullptr : &it->second;
  }

  bool is_open(JobId id) {
    const Job* const job = find(id);
    return job != nullptr && !job->final;
  }
  bool is_unquiet(JobId id) {
    const Job* const job = find(id);
    return job != nullptr && !job->quiet_queued;
  }
  void ask_later(JobId id, Instant now) {
    questions.add(now + options.ask_after, id, jobs.size(),
                  [this](JobId other) { return is_unquiet(other); });
  }

  // For one more job: whatever becomes of those that are alive, to note it will not fail.
  void make_room() {
    const std::size_t alive = jobs.size() + 1;
    for (detail::Alarms* const alarms : {&deadlines, &quarantines, &questions})
      alarms->reserve(alive);
    for (detail::JobQueue* const queue : {&outcomes, &quiets, &quarantined}) queue->reserve(alive);
  }

  void settle(JobId id, Job& job, Instant now) noexcept {
    job.final = true;
    std::sort(job.failed.begin(), job.failed.end(),
              [](const FailedChunk& a, const FailedChunk& b) { return order(a) < order(b); });
    const auto same_chunk = [](const FailedChunk& a, const FailedChunk& b) {
      return a.group == b.group && a.chunk == b.chunk;
    };
    job.failed.erase(std::unique(job.failed.begin(), job.failed.end(), same_chunk),
                     job.failed.end());
    ++counters.outcomes;
    outcomes.push(id);
    if (job.quiet_ranks != all_ranks) {
      quarantines.add(now + options.quarantine_after, id, jobs.size(),
                      [this](JobId other) { return is_unquiet(other); });
      ask_later(id, now);
    }
    queue_quiet(id, job);
  }

  void queue_quiet(JobId id, Job& job) noexcept {
    if (!job.final || job.quiet_queued || job.quiet_ranks != all_ranks) return;
    job.quiet_queued = true;
    quiets.push(id);
  }

  // The job's part at a rank that will tell no more of it.
  void end_with(JobLedger& ledger, Rank rank, JobId id, Instant now) {
    Job* const job = find(id);
    if (job == nullptr) return;
    JobReport gone;
    gone.job = id;
    gone.quiet = 1;
    if ((job->outcome_ranks >> raw(rank) & 1) == 0) {
      gone.outcome = JobOutcome::kFailed;
      job->gone |= !job->final;
    }
    ledger.notice(rank, gone, {}, now);
  }

  void describe(JobId id, const Job& job, JobEvent& out) const {
    out.job = id;
    out.request = job.request;
    out.kind = job.kind;
    out.outcome = job.outcome;
    out.whole = job.whole;
    out.gone = job.gone;
    out.quarantined = job.quarantined;
    out.bytes = job.bytes;
    out.objects = job.objects;
    out.duplicates = job.duplicates;
    out.failed.clear();
    out.blocks.clear();
  }
};

JobLedger::JobLedger(const LedgerOptions& options) : impl_(std::make_unique<Impl>()) {
  impl_->options = options;
  impl_->all_ranks =
      options.ranks >= 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << options.ranks) - 1;
}
JobLedger::~JobLedger() = default;
JobLedger::JobLedger(JobLedger&&) noexcept = default;
JobLedger& JobLedger::operator=(JobLedger&&) noexcept = default;

JobId JobLedger::start(JobKind kind, RequestId request, std::span<const BlockId> blocks,
                       Instant deadline) {
  const JobId id = next();
  Job job;
  job.request = request;
  job.kind = kind;
  job.blocks.assign(blocks.begin(), blocks.end());
  impl_->make_room();
  impl_->jobs.emplace(raw(id), std::move(job));
  ++impl_->next_id;
  impl_->deadlines.add(deadline, id, impl_->jobs.size(),
                       [this](JobId other) { return impl_->is_open(other); });
  ++impl_->counters.started;
  impl_->counters.blocks_held += blocks.size();
  return id;
}

JobId JobLedger::next() const noexcept { return JobId{impl_->next_id}; }

void JobLedger::notice(Rank rank, const JobReport& report, std::span<const FailedChunk> failed,
                       Instant now) {
  Job* const job = impl_->find(report.job);
  if (job == nullptr || raw(rank) >= impl_->options.ranks) {
    ++impl_->counters.unknown_notices;
    return;
  }
  const std::uint64_t bit = std::uint64_t{1} << raw(rank);
  const bool told = report.outcome != JobOutcome::kNone;
  const bool again = told && (job->outcome_ranks & bit) != 0;
  const bool counts = told && !again && !job->final;
  // What can fail comes first.
  if (counts) job->failed.insert(job->failed.end(), failed.begin(), failed.end());
  const bool newly_quiet = report.quiet != 0 && (job->quiet_ranks & bit) == 0;
  if (report.quiet != 0 && !newly_quiet) ++impl_->counters.duplicate_notices;
  // Before the outcome: what is quiet when it settles needs no watch.
  if (newly_quiet) job->quiet_ranks |= bit;
  if (again) ++impl_->counters.duplicate_notices;
  if (told) job->outcome_ranks |= bit;
  if (told && !again && job->final) ++impl_->counters.late_notices;
  if (counts) {
    if (severity(report.outcome) > severity(job->outcome)) job->outcome = report.outcome;
    // What failed and names no chunk has failed whole.
    const bool named =
        report.outcome == JobOutcome::kPartial || report.outcome == JobOutcome::kExpired;
    job->whole |= report.outcome != JobOutcome::kOk && !(named && !failed.empty());
    job->bytes += report.bytes;
    job->objects += report.objects;
    job->duplicates += report.duplicates;
    if (job->outcome_ranks == impl_->all_ranks) impl_->settle(report.job, *job, now);
  }
  if (newly_quiet) impl_->queue_quiet(report.job, *job);
}

void JobLedger::rank_gone(Rank rank, Instant now) {
  if (raw(rank) >= impl_->options.ranks) {
    ++impl_->counters.unknown_notices;
    return;
  }
  const std::uint64_t bit = std::uint64_t{1} << raw(rank);
  std::vector<JobId> left;
  for (const auto& [id, job] : impl_->jobs) {
    if ((job.quiet_ranks & bit) == 0) left.push_back(JobId{id});
  }
  std::sort(left.begin(), left.end(), [](JobId a, JobId b) { return raw(a) < raw(b); });
  for (const JobId id : left) impl_->end_with(*this, rank, id, now);
}

void JobLedger::withdraw(JobId job, Instant now) {
  for (std::uint32_t rank = 0; rank < impl_->options.ranks; ++rank)
    impl_->end_with(*this, Rank{rank}, job, now);
}

void JobLedger::advance(Instant now) {
  while (const std::optional<JobId> id = impl_->deadlines.take(now)) {
    if (!impl_->is_open(*id)) continue;
    Job& job = *impl_->find(*id);
    job.outcome = JobOutcome::kExpired;
    job.whole = true;  // a rank is silent: nothing of it can be counted on
    ++impl_->counters.expired;
    impl_->settle(*id, job, now);
  }
  while (const std::optional<JobId> id = impl_->quarantines.take(now)) {
    if (!impl_->is_unquiet(*id)) continue;
    Job& job = *impl_->find(*id);
    job.quarantined = true;
    ++impl_->quarantined_now;
    ++impl_->counters.quarantined;
    impl_->counters.blocks_in_quarantine += job.blocks.size();
    impl_->quarantined.push(*id);
  }
}

bool JobLedger::take_outcome(JobEvent& out) {
  if (impl_->outcomes.empty()) return false;
  const JobId id = impl_->outcomes.front();
  const Job& job = *impl_->find(id);
  impl_->describe(id, job, out);
  out.failed = job.failed;
  impl_->outcomes.pop();
  return true;
}

bool JobLedger::take_quiet(JobEvent& out) {
  // A job's outcome is told before its quiet, so that a load's result is known when its blocks are.
  if (impl_->quiets.empty() || !impl_->outcomes.empty()) return false;
  const JobId id = impl_->quiets.front();
  impl_->quiets.pop();
  Job& job = *impl_->find(id);
  impl_->describe(id, job, out);
  out.failed = std::move(job.failed);
  out.blocks = std::move(job.blocks);
  ++impl_->counters.quiets;
  impl_->counters.blocks_held -= out.blocks.size();
  if (job.quarantined) {
    --impl_->quarantined_now;
    impl_->counters.blocks_in_quarantine -= out.blocks.size();
  }
  impl_->jobs.erase(raw(id));
  return true;
}

bool JobLedger::take_quarantined(JobEvent& out) {
  for (; !impl_->quarantined.empty(); impl_->quarantined.pop()) {
    const JobId id = impl_->quarantined.front();
    const Job* const job = impl_->find(id);
    if (job == nullptr) continue;
    impl_->describe(id, *job, out);
    out.failed = job->failed;
    impl_->quarantined.pop();
    return true;
  }
  return false;
}

void JobLedger::take_unquiet(Instant now, std::size_t most, std::vector<JobId>& out) {
  while (most != 0 && impl_->questions.due(now)) {
    if (out.size() == out.capacity()) out.reserve(out.size() + most);
    const std::optional<JobId> id = impl_->questions.take(now);
    if (!impl_->is_unquiet(*id)) continue;
    out.push_back(*id);
    impl_->ask_later(*id, now);
    ++impl_->counters.asked;
    --most;
  }
}

bool JobLedger::alive(JobId job) const noexcept { return impl_->jobs.contains(raw(job)); }
std::size_t JobLedger::size() const noexcept { return impl_->jobs.size(); }
std::size_t JobLedger::in_quarantine() const noexcept { return impl_->quarantined_now; }
std::uint64_t JobLedger::blocks_held() const noexcept { return impl_->counters.blocks_held; }
LedgerCounters JobLedger::counters() const noexcept {
  LedgerCounters counters = impl_->counters;
  counters.alive = impl_->jobs.size();
  return counters;
}

}  // namespace kvprism
