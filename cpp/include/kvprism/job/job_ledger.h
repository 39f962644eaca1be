// The life of jobs over all ranks: outcome, quiet, deadlines and the block references they hold
// (decision 5).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kvprism/base/export.h"
#include "kvprism/base/ids.h"
#include "kvprism/run/instant.h"
#include "kvprism/wire/step_plan.h"
#include "kvprism/wire/worker_report.h"

namespace kvprism {

struct LedgerOptions {
  std::uint32_t ranks = 1;  // 1..64
  Duration quarantine_after =
      seconds(120);                  // from the outcome; unquiet longer: blocks go to quarantine
  Duration ask_after = seconds(30);  // from the outcome, and then again: ranks are asked about it
};

// What has become final. A job appears at most once in each of the two lists.
struct JobEvent {
  JobId job{};
  RequestId request{};
  JobKind kind{};
  JobOutcome outcome{};  // merged over the ranks: the worst; kExpired when one was silent
  bool whole = false;    // no chunk can be counted on: a rank failed as a whole, or did not answer
  // A rank's part ended with its process, or no rank had got the job: that says nothing of the
  // store.
  bool gone = false;
  bool quarantined = false;  // for quiet events: was in quarantine before
  std::uint64_t bytes = 0;   // over all ranks
  std::uint32_t objects = 0;
  std::uint32_t duplicates = 0;
  std::vector<FailedChunk> failed;  // of any rank, sorted, unique
  std::vector<BlockId> blocks;      // references to return, for quiet events
};

struct LedgerCounters {
  std::uint64_t started = 0;
  std::uint64_t outcomes = 0;
  std::uint64_t quiets = 0;
  std::uint64_t expired = 0;            // by the ledger's own deadline: a rank did not answer
  std::uint64_t quarantined = 0;        // jobs that ever entered quarantine
  std::uint64_t late_notices = 0;       // a rank's outcome after the job had expired here
  std::uint64_t duplicate_notices = 0;  // second outcome or quiet of a rank for a job
  std::uint64_t unknown_notices = 0;    // job not known (any more), or rank out of range
  std::uint64_t asked = 0;              // times that ranks were asked about an unquiet job
  std::uint64_t alive = 0;
  std::uint64_t blocks_held = 0;
  std::uint64_t blocks_in_quarantine = 0;
};

// Used by the store and the peer scheduler alike.
// Ownership: value. Threads: one, the scheduler's. Errors: none; odd notices are counted and
// harmless (R11). Where there is no memory, nothing has happened.
class KVPRISM_API JobLedger {
 public:
  explicit JobLedger(const LedgerOptions& options);
  ~JobLedger();
  JobLedger(JobLedger&&) noexcept;
  JobLedger& operator=(JobLedger&&) noexcept;

  // A new job that holds one reference on each of `blocks` until it is quiet on every rank.
  // At `deadline` it gets the outcome kExpired if a rank has not given one.
  JobId start(JobKind kind, RequestId request, std::span<const BlockId> blocks, Instant deadline);
  // The id of the job that is started next.
  JobId next() const noexcept;

  // One rank's notice. The failed chunks are those of `report`.
  void notice(Rank rank, const JobReport& report, std::span<const FailedChunk> failed, Instant now);

  // The rank's process has ended: nothing that it had not told will be, and its memory is gone with
  // it. Of all jobs alive it counts as failed and quiet; later ones are its successor's.
  void rank_gone(Rank rank, Instant now);

  // No rank has got the job, or will: on all of them it counts as failed and quiet.
  void withdraw(JobId job, Instant now);

  // Expires outcomes and moves jobs to quarantine.
  void advance(Instant now);

  // The next job whose outcome became final / that became quiet; false when there is none. Outcome
  // comes first.
  bool take_outcome(JobEvent& out);
  bool take_quiet(JobEvent& out);
  // Jobs that entered quarantine since the last call, each once. Their blocks stay held.
  bool take_quarantined(JobEvent& out);

  // Adds jobs that have an outcome and are unquiet for ask_after, each once in that time; at most
  // `most`. A report may have been lost.
  void take_unquiet(Instant now, std::size_t most, std::vector<JobId>& out);

  bool alive(JobId job) const noexcept;
  std::size_t size() const noexcept;
  // Of those, the ones in quarantine.
  std::size_t in_quarantine() const noexcept;
  // Blocks of its jobs, those in quarantine included.
  std::uint64_t blocks_held() const noexcept;
  LedgerCounters counters() const noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvprism
