// What workers tell of their jobs, and what follows from it.
#include <algorithm>
#include <utility>

#include "kvprism/io/object_store.h"
#include "sim/job_judge.h"

namespace kvprism::sim {
namespace {

// Jobs of plans that the world made up itself.
constexpr std::uint64_t kForeignJobs = std::uint64_t{1} << 60;

std::string number(std::uint64_t value) { return std::to_string(value); }

}  // namespace

bool JobJudge::hold_report(const WorkerReport& report) {
  if (raw(report.rank) >= options_.ranks) {
    fail("rank", "a report of rank " + number(raw(report.rank)));
    return false;
  }
  for (const JobReport& entry : report.jobs) {
    if (raw(entry.job) >= kForeignJobs) continue;
    const auto found = jobs_.find(raw(entry.job));
    if (found == jobs_.end()) {
      fail("job id", "a worker reports job " + number(raw(entry.job)) + ", which nobody planned");
      continue;
    }
    std::uint32_t& outcomes = found->second.outcomes[raw(report.rank)];
    std::uint32_t& quiets = found->second.quiets[raw(report.rank)];
    if (entry.outcome != JobOutcome::kNone) ++outcomes;
    if (entry.quiet != 0) ++quiets;
    if (outcomes > 1) fail("outcome", "job " + number(raw(entry.job)) + " has a second outcome");
    if (quiets > 1) fail("quiet", "job " + number(raw(entry.job)) + " is quiet a second time");
    if (quiets > outcomes)
      fail("quiet", "job " + number(raw(entry.job)) + " is quiet before its outcome");
    if (trace_ != nullptr) {
      std::string failed;
      for (const FailedChunk& chunk : report.failed_of(entry)) {
        failed += ", " + number(raw(chunk.group)) + ":" + number(chunk.chunk) + " " +
                  std::string(to_string(static_cast<ItemStatus>(chunk.status)));
      }
      trace("job " + number(raw(entry.job)) + ": " + std::string(to_string(entry.outcome)) +
            (entry.quiet != 0 ? ", quiet" : "") + failed);
    }
  }
  if (channel_ == nullptr) {
    delivered(report, now_);
    return false;
  }
  channel_->push_back(report);
  return true;
}

void JobJudge::delivered(const WorkerReport& report, Instant now) {
  for (const JobReport& entry : report.jobs) {
    const auto found = jobs_.find(raw(entry.job));
    if (found == jobs_.end()) continue;
    Job& job = found->second;
    const std::uint32_t rank = raw(report.rank);
    const bool quiet_before = everywhere(job.quiet_delivered);
    const bool outcome_before = everywhere(job.outcome_delivered);
    if (entry.outcome != JobOutcome::kNone && !job.outcome_delivered[rank]) {
      job.outcome_delivered[rank] = true;
      const auto failed = report.failed_of(entry);
      job.failed.insert(job.failed.end(), failed.begin(), failed.end());
      job.whole |= entry.outcome == JobOutcome::kFailed || entry.outcome == JobOutcome::kCancelled;
    }
    if (entry.quiet != 0) job.quiet_delivered[rank] = true;
    const bool outcome_now = everywhere(job.outcome_delivered);
    const bool quiet_now = everywhere(job.quiet_delivered);
    if (outcome_now && !outcome_before) {
      // After the scheduler's own bound its answer does not depend on these reports any more.
      const bool counts = now < job.planned_at + options_.save_timeout;
      const bool present = job.generation == generations_[raw(job.request)];
      // What the ledger has given up as a whole names no chunk.
      const bool in_time = now < job.planned_at + options_.load_timeout;
      if (job.kind == JobKind::kLoad && in_time && present && !job.whole) {
        for (const FailedChunk& chunk : job.failed) {
          if (static_cast<ItemStatus>(chunk.status) == ItemStatus::kChecksumMismatch) ++mismatches_;
        }
      }
      for (Piece& piece : job.pieces) {
        const bool failed =
            std::any_of(job.failed.begin(), job.failed.end(), [&](const FailedChunk& chunk) {
              return chunk.group == piece.group && chunk.chunk == piece.chunk;
            });
        if (!failed && !job.whole) stored_.insert(piece.content);
        if (failed && !job.hand_off && counts && present) {
          holes_[raw(job.request)].push_back(
              {piece.chunk * chunk_tokens_[raw(piece.group)], std::move(piece.content)});
        }
      }
      job.pieces.clear();
    }
    for (const BlockId block : job.blocks) {
      if (quiet_now && !quiet_before) --at_least_[static_cast<std::size_t>(raw(block))];
      if (quiet_now && outcome_now && !(quiet_before && outcome_before))
        --at_most_[static_cast<std::size_t>(raw(block))];
    }
  }
}

std::string JobJudge::check_references() {
  for (std::size_t b = 0; b < held_.size(); ++b) {
    if (held_[b] >= at_least_[b] && held_[b] <= at_most_[b]) continue;
    return "jobs hold block " + number(b) + " " + std::to_string(held_[b]) +
           " times, their reports say " + std::to_string(at_least_[b]) + " to " +
           std::to_string(at_most_[b]);
  }
  return "";
}

std::string JobJudge::check_ended() const {
  for (const auto& [id, job] : jobs_) {
    for (std::uint32_t rank = 0; rank < options_.ranks; ++rank) {
      if (job.outcomes[rank] != 1)
        return "job " + number(id) + " never had an outcome on rank " + number(rank);
      if (job.quiets[rank] != 1)
        return "job " + number(id) + " never became quiet on rank " + number(rank);
    }
  }
  if (!open_loads_.empty())
    return "load job " + number(open_loads_.begin()->first) + " never ended";
  return "";
}

std::string JobJudge::check_closed(std::uint32_t rank, std::size_t unquiet) const {
  for (const auto& [id, job] : jobs_) {
    if (job.outcomes[rank] != 1)
      return "job " + number(id) + " has no outcome although its worker has closed";
    if (job.quiets[rank] != 1 && unquiet == 0) {
      return "job " + number(id) + " is not quiet although its worker has closed";
    }
  }
  return "";
}

}  // namespace kvprism::sim
