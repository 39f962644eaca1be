// The rank's side of the store: turns plans into calls on an object store and tells outcome and
// quiet.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kvprism/base/error.h"
#include "kvprism/base/export.h"
#include "kvprism/base/ids.h"
#include "kvprism/io/object_store.h"
#include "kvprism/key/key_schema.h"
#include "kvprism/layout/segment_map.h"
#include "kvprism/run/duration_histogram.h"
#include "kvprism/run/instant.h"
#include "kvprism/run/ready_token.h"
#include "kvprism/wire/step_plan.h"
#include "kvprism/wire/worker_report.h"

namespace kvprism {

struct StoreWorkerOptions {
  Rank rank{};  // its place in the parallel arrangement is rank_position(rank)
  std::uint32_t max_segments_per_call =
      512;  // small calls keep the time to quiet small (decision 5)
  std::uint64_t max_bytes_per_call = 64ull << 20;
  std::uint32_t max_gets_in_flight = 4;  // calls
  std::uint32_t max_puts_in_flight = 2;
  // Bytes of calls that are not quiet, gets and puts together. No put starts that would make them
  // more while a call without an outcome is open; it waits, and expires with its job. Gets start
  // regardless, and before puts. 0: no limit.
  std::uint64_t max_bytes_in_flight = 1ull << 30;
  std::uint32_t max_queued_jobs = 65536;  // submitted, not yet seen by pump
  // No worker of this process has had jobs of this scheduler before: what the scheduler asks about
  // and this one does not know is over. Else that holds of jobs from its first plan on.
  bool only = false;
};

// Why a plan was not taken, as a whole. Its jobs are reported failed and quiet, each once, but for
// a plan that was taken before. One whose damaged copy came first is refused: its jobs have ended.
struct SubmitResult {
  bool accepted = true;
  std::string refusal;            // names the field, both values and what was expected
  std::vector<Problem> problems;  // the same, taken apart
  // Not accepted, and jobs of it were taken before: they may be running, and tell their ends
  // themselves. What they write into must not be given to others.
  bool repeated = false;
};

struct StoreWorkerCounters {
  std::uint64_t plans = 0;
  std::uint64_t plans_refused = 0;
  std::uint64_t plans_repeated = 0;  // of a step that was taken already; nothing is moved or told
  std::uint64_t jobs = 0;
  std::uint64_t jobs_unknown = 0;  // the scheduler asked about them; told as failed and quiet
  std::uint64_t gets = 0;          // calls
  std::uint64_t puts = 0;
  std::uint64_t segments = 0;  // moved or tried
  std::uint64_t bytes_stored = 0;
  std::uint64_t bytes_fetched = 0;
  std::uint64_t jobs_alive = 0;       // known here, not quiet
  std::uint64_t unquiet_calls = 0;    // ended, native code may still touch memory
  std::uint64_t bytes_in_flight = 0;  // now: of calls that are not quiet
  std::uint64_t saves_held_up = 0;    // times that a put began to wait for max_bytes_in_flight
  std::uint64_t pump_errors = 0;      // exceptions out of pump() and close()
};

// What this rank has moved of one group's blocks.
struct StoreGroupCounters {
  std::uint64_t stored_objects = 0;  // those that were stored already included
  std::uint64_t stored_bytes = 0;
  std::uint64_t loaded_objects = 0;
  std::uint64_t loaded_bytes = 0;
  std::uint64_t missed_objects = 0;  // a load asked for them, and they were gone or unfinished
  std::uint64_t missed_bytes = 0;
  std::uint64_t failed_objects = 0;  // of loads and saves, for another reason
  DurationHistogram get_time;        // of calls that moved objects of the group, to their outcome
  DurationHistogram put_time;
};

// Ownership: shares schema, map and store; the memory of the map must stay mapped until close()
// says that nothing is unquiet. Threads: submit and poll from any thread; pump and close from one,
// which a PumpThread marks by begin_use().
class KVPRISM_API StoreWorker : public OneUser {
 public:
  // Registers the map's regions with the store. Throws Error with all problems: options out of
  // range, a store that another worker uses, a map whose groups hold other bytes than the schema's
  // or other layers than `pipeline_stages` tells, a block of more segments than the store takes in
  // a call; kUnsupported: memory of a device with a store that moves none. With key schema `vllm`
  // also where an object would not have the reference's bytes: stored groups that do not overlay
  // each other layer by layer, a stride that is not the page, rows with gaps, several layers and
  // heads in BHLNC, no stored layer, fewer than 3 blocks.
  StoreWorker(std::shared_ptr<const KeySchema> schema, std::shared_ptr<const SegmentMap> map,
              std::shared_ptr<ObjectStore> store, const StoreWorkerOptions& options);
  ~StoreWorker();
  StoreWorker(const StoreWorker&) = delete;
  StoreWorker& operator=(const StoreWorker&) = delete;

  // Copies the plan, all of it: without memory for it, it is refused. Its jobs start when `ready`
  // says so (R12: a save's bytes are there, and a load's blocks are written by nobody else); a
  // token that never fires expires them. Where there is no memory to tell a refusal either, an
  // exception is, and its jobs are told when the scheduler asks about them.
  SubmitResult submit(const StepPlanView& plan, ReadyToken ready);
  SubmitResult submit(std::span<const std::byte> encoded_plan, ReadyToken ready);

  // Replaces `out` by what has happened since the last call to jobs of one scheduler; false when
  // nothing has. Call until it is: after a scheduler's restart there may be reports for two.
  bool poll(WorkerReport& out);

  // Starts calls and takes completions, without waiting. True when something moved. After an
  // exception, of the store or for want of memory, it may be called again: a job that the exception
  // has hit ends as failed.
  bool pump(Instant now);

  // Nothing new is started; what has not started is cancelled; waits at most `budget` for the rest.
  CloseReport close(Instant now, Duration budget);

  // Whether time alone may move a job: one that has no outcome yet. From the thread that pumps.
  bool has_untold() const;

  StoreWorkerCounters counters() const;
  // By GroupId, of all groups; those that are not stored stay at 0.
  std::vector<StoreGroupCounters> group_counters() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvprism
