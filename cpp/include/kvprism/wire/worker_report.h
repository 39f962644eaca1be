// What one rank tells of its jobs: outcome and quiet, each exactly once per job (decision 5, 6).
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "kvprism/base/export.h"
#include "kvprism/base/ids.h"

namespace kvprism {

enum class JobOutcome : std::uint32_t {
  kNone = 0,  // this entry only tells of quiet
  kOk = 1,
  kPartial = 2,  // the listed chunks failed
  kFailed = 3,   // as a whole: refused, no chunk can be named
  kCancelled = 4,
  kExpired = 5,  // its timeout passed; what was not fetched is listed as failed
};

KVPRISM_API std::string_view to_string(JobOutcome outcome) noexcept;

// A chunk of a job that did not arrive or was not stored; `status` is an ItemStatus
// other than kOk.
struct FailedChunk {
  StoreIndex group{};
  std::uint32_t chunk = 0;
  std::uint32_t status = 0;

  bool operator==(const FailedChunk&) const = default;
};

struct JobReport {
  JobId job{};
  JobOutcome outcome = JobOutcome::kNone;
  std::uint32_t quiet = 0;         // 1: no native call can touch the job's blocks any more
  std::uint32_t first_failed = 0;  // into WorkerReport::failed
  std::uint32_t num_failed = 0;
  std::uint32_t objects = 0;     // stored or fetched
  std::uint32_t duplicates = 0;  // of those, found stored already
  std::uint64_t bytes = 0;       // moved

  bool operator==(const JobReport&) const = default;
};
static_assert(sizeof(JobReport) == 40);

// Ownership: value; clear() keeps the capacity. Threads: one at a time.
struct WorkerReport {
  Rank rank{};
  std::uint64_t epoch = 0;
  std::vector<JobReport> jobs;
  std::vector<FailedChunk> failed;

  bool empty() const noexcept { return jobs.empty(); }
  void clear() noexcept {
    jobs.clear();
    failed.clear();
  }
  std::span<const FailedChunk> failed_of(const JobReport& job) const noexcept {
    return std::span<const FailedChunk>(failed).subspan(job.first_failed, job.num_failed);
  }
  bool operator==(const WorkerReport&) const = default;
};

// Replaces `out`'s content, keeping its capacity. Reports of several ranks may be concatenated byte
// by byte.
KVPRISM_API void encode(const WorkerReport& report, std::vector<std::byte>& out);

// Decodes one report from the front of `bytes` and drops it from the view; throws Error as
// decode_plan does.
KVPRISM_API void decode_report(std::span<const std::byte>& bytes, WorkerReport& out);

}  // namespace kvprism
