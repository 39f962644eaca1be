#include "kvprism/store/rank_loads.h"

#include <algorithm>
#include <utility>

namespace kvprism {
namespace {

std::pair<StoreIndex, std::uint32_t> place_of(const FailedChunk& chunk) noexcept {
  return {chunk.group, chunk.chunk};
}

}  // namespace

void RankLoads::expect(const StepPlanView& plan) {
  if (plan.epoch != epoch_) {
    // Job ids of another scheduler may be the same numbers.
    loads_.clear();
    epoch_ = plan.epoch;
  }
  for (const JobRecord& job : plan.jobs) {
    if (job.kind != JobKind::kLoad) continue;
    const auto [at, fresh] = loads_.try_emplace(raw(job.id));
    if (!fresh) continue;
    Load& load = at->second;
    load.request = job.request;
    for (const RunRecord& run : plan.runs.subspan(job.first_run, job.num_runs)) {
      load.runs.push_back(run);
      load.runs.back().first_id = static_cast<std::uint32_t>(load.ids.size());
      const auto ids = plan.ids.subspan(run.first_id, run.count);
      load.ids.insert(load.ids.end(), ids.begin(), ids.end());
    }
  }
}

void RankLoads::take(std::span<const std::byte> reports, std::vector<RankLoadEnd>& ends) {
  while (!reports.empty()) {
    decode_report(reports, report_);
    if (report_.epoch != epoch_) continue;
    for (const JobReport& job : report_.jobs) {
      const auto at = loads_.find(raw(job.job));
      if (at == loads_.end()) continue;
      Load& load = at->second;
      if (job.outcome != JobOutcome::kNone && !load.told) {
        load.told = true;
        const auto failed = report_.failed_of(job);
        load.failed.assign(failed.begin(), failed.end());
        load.whole = job.outcome != JobOutcome::kOk && failed.empty();
      }
      if (job.quiet == 0) continue;
      load.whole |= !load.told;
      ends.push_back(end_of(job.job, load));
      loads_.erase(at);
    }
  }
}

bool RankLoads::abandon(JobId job, std::vector<RankLoadEnd>& ends) {
  const auto at = loads_.find(raw(job));
  if (at == loads_.end()) return false;
  at->second.whole = true;
  ends.push_back(end_of(job, at->second));
  loads_.erase(at);
  return true;
}

RankLoadEnd RankLoads::end_of(JobId job, Load& load) const {
  RankLoadEnd end;
  end.job = job;
  end.request = load.request;
  end.complete = !load.whole && load.failed.empty();
  if (load.whole) {
    end.failed = std::move(load.ids);
  } else if (!load.failed.empty()) {
    std::ranges::sort(load.failed, {}, place_of);
    for (const RunRecord& run : load.runs) {
      for (std::uint32_t i = 0; i < run.count; ++i) {
        const std::pair place(run.group, run.first_chunk + i);
        if (std::ranges::binary_search(load.failed, place, {}, place_of)) {
          end.failed.push_back(load.ids[run.first_id + i]);
        }
      }
    }
  }
  return end;
}

}  // namespace kvprism
