// What this rank's loads have come to, for engines that hear of loads from their workers instead of
// from the scheduler (vLLM: finished_recving, failed_recving, invalid block ids).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "kvprism/base/export.h"
#include "kvprism/base/ids.h"
#include "kvprism/wire/step_plan.h"
#include "kvprism/wire/worker_report.h"

namespace kvprism {

// The end of one load on one rank: quiet, so the engine may use or give away its blocks.
struct RankLoadEnd {
  JobId job{};
  RequestId request{};
  bool complete = false;
  // Blocks that do not hold what they should: what was not fetched, and every block when the load
  // failed as a whole.
  std::vector<BlockId> failed;

  bool operator==(const RankLoadEnd&) const = default;
};

// Remembers each load between its plan and its quiet. Nothing is kept of saves.
// Ownership: copies what it needs. Threads: one at a time.
class KVPRISM_API RankLoads {
 public:
  // Takes in the loads of a plan, once the worker has taken it and before its next poll: one of
  // another epoch forgets all loads before it. The plan must be checked (decode_plan).
  void expect(const StepPlanView& plan);

  // Reads the reports that StoreWorker::poll gave, one behind the other, and appends the loads that
  // are over. Reports of another epoch and unknown jobs are skipped. Throws Error as decode_report
  // does.
  void take(std::span<const std::byte> reports, std::vector<RankLoadEnd>& ends);

  // Ends a load before it is quiet, with every block failed; false when it is not known. For loads
  // in quarantine, whose blocks the scheduler keeps.
  bool abandon(JobId job, std::vector<RankLoadEnd>& ends);

  std::size_t size() const noexcept { return loads_.size(); }

 private:
  struct Load {
    RequestId request{};
    bool told = false;            // the outcome is known
    bool whole = false;           // failed as a whole
    std::vector<RunRecord> runs;  // first_id counts from the load's own ids
    std::vector<BlockId> ids;
    std::vector<FailedChunk> failed;
  };
  RankLoadEnd end_of(JobId job, Load& load) const;

  std::uint64_t epoch_ = 0;  // of the scheduler whose plans were taken last
  std::unordered_map<std::uint64_t, Load> loads_;
  WorkerReport report_;
};

}  // namespace kvprism
