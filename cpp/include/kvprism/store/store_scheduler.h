// The engine's scheduler side of the store: looks up, plans loads and saves, holds block
// references.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kvprism/base/export.h"
#include "kvprism/base/ids.h"
#include "kvprism/io/object_store.h"
#include "kvprism/job/job_ledger.h"
#include "kvprism/key/key_schema.h"
#include "kvprism/run/duration_histogram.h"
#include "kvprism/run/flight_recorder.h"
#include "kvprism/run/instant.h"
#include "kvprism/wire/step_plan.h"
#include "kvprism/wire/worker_report.h"

namespace kvprism {

// What the store is used for, on top of what the options allow. May change at any time.
enum class StoreMode : std::uint8_t { kReadWrite, kReadOnly, kWriteOnly, kOff };

KVPRISM_API std::string_view to_string(StoreMode mode) noexcept;  // "read_write", ...

// What one request may use the store for.
struct RequestAccess {
  bool load = true;
  bool save = true;
};

// A removal of every object of the key schema.
enum class PurgeState : std::uint8_t {
  kNone,
  kDraining,  // waits until what was planned before is quiet on every rank: it could land later
  kRemoving,  // asked for
  kWaiting,   // for leases to end, or for a store that did not answer
  kDone,
};

KVPRISM_API std::string_view to_string(PurgeState state) noexcept;  // "none", "draining", ...

struct PurgeStatus {
  PurgeState state = PurgeState::kNone;
  std::uint64_t removed = 0;  // objects, by this purge so far
  std::uint32_t passes = 0;   // that the store has answered

  bool active() const noexcept { return state != PurgeState::kNone && state != PurgeState::kDone; }
};

enum class HealthState : std::uint8_t { kHealthy, kDegraded, kOff };

// Why the store is degraded: bits of StoreHealth::reasons.
enum HealthReason : std::uint32_t {
  kLookupsFail = 1,    // the last lookup was late or could not be answered
  kLoadsFail = 2,      // the last load failed, and not because objects had gone meanwhile
  kSavingPaused = 4,   // the store refused saves: full, away or late
  kWorkerSilent = 8,   // a rank let the last job to end expire
  kQuarantine = 16,    // blocks are in quarantine
  kHoldsTooMuch = 32,  // jobs hold more than max_held_percent
  kPurging = 64,
};

struct StoreHealth {
  HealthState state = HealthState::kHealthy;
  std::uint32_t reasons = 0;

  bool operator==(const StoreHealth&) const = default;
};

// "healthy", "off", "degraded: lookups fail, saving is paused".
KVPRISM_API std::string describe(const StoreHealth& health);

// Where a scheduler's run is recorded. `write` gets whole records, at most once a call of the
// scheduler, and must not call it; false, or an exception, ends the recording, and nothing is built
// for it any more. So does a call that throws, and what lacks memory: no repetition would go on as
// the run does; `cut`, which must not throw, is told. A step waits for as long as `write` takes: a
// tool for tests and incidents.
struct RunSink {
  bool (*write)(void* context, std::span<const std::byte> bytes) = nullptr;
  void* context = nullptr;
  void (*cut)(void* context) = nullptr;  // null: not told
};

// Where the flight record goes at an incident: a quarantine, a silent rank or a mismatch, at most
// once a minute. `take` is called in the step that learns of it, may copy the events, and must
// neither wait nor call the scheduler; one that throws is not called again. FlightFile writes to a
// file.
struct FlightSink {
  void (*take)(void* context, std::uint64_t epoch, std::string_view what,
               const FlightRecorder& events) = nullptr;
  void* context = nullptr;
};

struct StoreSchedulerOptions {
  std::uint64_t epoch = 0;  // random, other than 0; travels in every plan and report
  std::uint32_t ranks =
      0;              // workers that report each job: tp x pp x pcp of the config, which 0 means
  bool loads = true;  // look up and load
  bool saves = true;
  Duration lookup_timeout = milliseconds(500);  // a later answer is a miss
  Duration lookup_fresh_for = seconds(5);       // an unused answer is asked again after this
  Duration load_timeout = seconds(20);          // to the outcome, at the worker and here
  Duration save_timeout = seconds(60);
  Duration quarantine_after = seconds(120);  // unquiet for longer than this after the outcome
  // Reports a load that went to quarantine although its blocks are not quiet. Only for engines that
  // then give the request other blocks; the quarantined ones stay referenced.
  bool detach_quarantined_loads = false;
  // Keeps for take_changes() what comes and goes, which an engine that asks for it must take.
  bool tell_changes = false;
  // Consecutive saves that the store refused (full, away or late: R50) before saving pauses.
  std::uint32_t backoff_after = 3;
  Duration backoff = seconds(5);  // saves dropped for so long
  // Of the pool's blocks. While jobs hold more, nothing is saved: a store slower than prefill must
  // not take the memory of an engine that serves many. 100: no bound.
  std::uint32_t max_held_percent = 100;
  Duration saved_fresh_for = seconds(60);  // what was saved is not saved again for so long
  Duration avoid_failed_for = seconds(5);  // a chunk whose load failed counts as absent for so long
  // How long the store may keep an object that was read or looked up, from the last use by this
  // scheduler's engine: the last pass of a purge begins after it. Mooncake's lease is 10 s.
  Duration purge_settle = seconds(12);
  // A reason for being degraded is told for at least so long, so that health does not flicker.
  Duration healthy_after = seconds(5);
  FlightSink flight{};  // none: the last lines go to the log
  RunSink record{};     // everything that decides; replay_run() repeats it
};

// Block tables of one request, a row per group of the engine (all groups, R07). Entries may be the
// null block.
using BlockRows = IndexedSpan<GroupId, const std::span<const BlockId>>;

struct LookupResult {
  bool pending = false;               // ask again in the next step
  std::uint32_t external_tokens = 0;  // beyond the local ones; 0: nothing to load
};

// Tokens [from, to): multiples of the scheduler block size, but for the end of a prompt, which is
// one of the hit alignment.
struct TokenRange {
  std::uint32_t from = 0;
  std::uint32_t to = 0;

  bool empty() const noexcept { return from >= to; }
  bool operator==(const TokenRange&) const = default;
};

// A destination that does not hold what it should.
struct FailedBlock {
  GroupId group{};
  std::uint32_t chunk = 0;
  BlockId block{};

  bool operator==(const FailedBlock&) const = default;
};

// The end of one load; exactly one per job that allocated() promised, also after the request has
// finished (R11).
struct LoadEnd {
  RequestId request{};
  JobId job{};
  std::uint32_t valid_tokens =
      0;  // usable prefix, local ones included: a common boundary of all groups (R08)
  bool complete = false;     // everything that was promised arrived
  bool blocks_quiet = true;  // false: quarantined, the request needs other blocks
  std::vector<FailedBlock> failed;
};

// A copy of a hash, of any width that keys take.
struct HashBytes {
  std::array<std::uint8_t, kMaxHashWidth> bytes{};
  std::uint32_t width = 0;

  HashBytes() = default;
  // At most kMaxHashWidth bytes; of more, the first ones.
  HashBytes(std::span<const std::uint8_t> hash) noexcept  // NOLINT(google-explicit-constructor)
      : width(static_cast<std::uint32_t>(std::min(hash.size(), bytes.size()))) {
    std::copy_n(hash.begin(), width, bytes.begin());
  }
  operator std::span<const std::uint8_t>() const noexcept {  // NOLINT(google-explicit-constructor)
    return std::span(bytes).first(width);
  }
  const std::uint8_t* data() const noexcept { return bytes.data(); }
  std::size_t size() const noexcept { return width; }
  bool empty() const noexcept { return width == 0; }
  const std::uint8_t* begin() const noexcept { return bytes.data(); }
  const std::uint8_t* end() const noexcept { return bytes.data() + width; }

  bool operator==(const HashBytes&) const = default;
};

// A chunk that every rank has stored, or one that is gone: a load no longer found what a lookup had
// seen, or found it damaged, for which it is removed; or a lookup no longer found what this
// scheduler had told as stored, of which it remembers up to 262,144 chunks.
struct StoreChange {
  bool stored = true;  // false: gone
  RequestId request{};
  GroupId group{};
  std::uint32_t chunk = 0;
  std::uint32_t tokens = 0;  // of the prefix that ends with it
  HashBytes hash{};          // of that prefix
  // Of the prefix before it, which is shorter by a chunk, or by a hash unit where `tokens` ends
  // inside a chunk; empty when there is none.
  HashBytes parent{};

  bool operator==(const StoreChange&) const = default;
};

enum class FinishReason : std::uint8_t { kCompleted, kAborted };

struct StoreSchedulerCounters {
  std::uint64_t lookups = 0;       // requests asked about
  std::uint64_t lookup_calls = 0;  // calls to the index
  std::uint64_t lookup_keys = 0;
  std::uint64_t lookups_refused = 0;  // local tokens off the grid of S
  std::uint64_t lookups_late = 0;     // counted as misses
  std::uint64_t lookups_failed = 0;   // refused or unavailable: misses
  std::uint64_t hit_tokens = 0;       // promised by lookups that were allocated
  std::uint64_t loaded_tokens = 0;    // delivered
  std::uint64_t loads = 0;
  std::uint64_t loads_failed = 0;  // not complete
  std::uint64_t load_races = 0;    // chunks that a lookup saw and the load did not (R44)
  std::uint64_t saves = 0;
  std::uint64_t saved_objects = 0;  // confirmed, duplicates included, all ranks
  std::uint64_t duplicate_objects = 0;
  std::uint64_t saved_bytes = 0;
  std::uint64_t loaded_objects = 0;
  std::uint64_t loaded_bytes = 0;
  std::uint64_t save_chunks_failed = 0;
  std::uint64_t saves_dropped = 0;    // while backing off from a full pool, or by mode
  std::uint64_t saves_held_back = 0;  // times that wants_save() said no because of max_held_percent
  std::uint64_t saves_known = 0;      // stretches of S tokens saved lately: not saved again
  std::uint64_t hashes_refused = 0;   // of another width, or with a gap before them
  std::uint64_t requests_replaced = 0;  // ids that came with other hashes, without finished()
  std::uint64_t tables_refused = 0;     // saves with another number of rows than groups
  std::uint64_t offers_refused =
      0;  // boundary() calls that named a null block or an unknown prefix
  std::uint64_t sources_skipped = 0;  // chunks without a source in the present table
  std::uint64_t reports_foreign = 0;  // other epoch
  std::uint64_t reports_malformed = 0;
  std::uint64_t chunks_avoided = 0;  // not asked for again yet: their load has just failed (R41)
  std::uint64_t mismatches = 0;  // chunks of a rank's loads: not what was stored, or another size
  std::uint64_t objects_removed =
      0;  // of those, by this scheduler, so that a save can replace them
  std::uint64_t removals_failed = 0;  // keys, and passes of purges
  std::uint64_t health = 0;           // now: 0 healthy, 1 degraded, 2 off
  std::uint64_t incidents = 0;        // quarantines, silent ranks, mismatches
  DurationHistogram lookup_time;      // from the question to its answer
  DurationHistogram load_time;        // from the plan to the load's end
  DurationHistogram save_time;        // from the plan to the outcome
  std::uint64_t purges = 0;
  std::uint64_t objects_purged = 0;
  std::uint64_t changes_dropped = 0;  // 65,536 others had not been taken
  std::uint64_t bypasses = 0;  // requests that are not looked up again after a failed load (R41)
  std::uint64_t offers_paused =
      0;  // times that nothing more was offered for avoid_failed_for (R51)
  LedgerCounters ledger;
};

// Ownership: shares schema and index. Threads: one, the engine's. No call blocks; every call is
// harmless for unknown requests and idempotent where an engine repeats it. Errors: std::bad_alloc
// where memory runs out; what the call had begun is whole, and it can be made again.
class KVPRISM_API StoreScheduler {
 public:
  // Throws Error (kInvalidConfig) with all problems: what validate_store reports, epoch 0, a bound
  // of 0 or less, an index that another scheduler uses.
  StoreScheduler(std::shared_ptr<const KeySchema> schema, std::shared_ptr<ObjectIndex> index,
                 const StoreSchedulerOptions& options);
  ~StoreScheduler();
  StoreScheduler(const StoreScheduler&) = delete;
  StoreScheduler& operator=(const StoreScheduler&) = delete;

  // Throws what the constructor would throw, and does nothing else: before a file is opened for the
  // recording.
  static void check(const KeySchema& schema, const StoreSchedulerOptions& options);

  const Projection& projection() const noexcept;
  const StoreSchedulerOptions& options() const noexcept;

  // From now on; what is in flight goes on to its end. A request that becomes savable again is
  // saved from where it was left.
  void set_mode(StoreMode mode) noexcept;
  StoreMode mode() const noexcept;

  // Removes every object whose key begins as this scheduler's keys do, all ranks' and groups', and
  // no other (W-C11). From now on nothing is looked up, loaded or saved until it is done; jobs in
  // flight end first, so that none lands afterwards, and a load that is overtaken fails as a whole.
  // What requests of now have computed is not saved, before or after. One that is preempted begins
  // anew, also if it was preempted before, and so does one whose load is overtaken and that has no
  // local tokens. Only tokens that advanced() has told count: tell of every request that has
  // computed any before the purge, or what it computes afterwards is taken for new from its first
  // token on. Lookups in flight end first as well. Moves on in end_step. Objects that another
  // engine of the namespace reads or looks up meanwhile stay: purge on all of them. A second call
  // begins again.
  void purge(Instant now);
  PurgeStatus purge_status() const noexcept;

  // Begins the request if it is unknown; call before its first lookup: what a lookup has offered
  // already is still loaded, as the engine counts on it. Only finished() ends the restriction: an
  // id reused without it keeps it.
  void restrict(RequestId request, RequestAccess access);

  // How many tokens the prompt has, for requests that are not looked up. Where hits may end inside
  // a block, the end of a prompt is saved as well. A lookup tells it too.
  void prompt(RequestId request, std::uint32_t prompt_tokens);

  // How many tokens beyond `local_tokens` (the engine's own hit, a multiple of S) the store offers.
  // `hashes` are all hashes of the prompt at granularity h; they are copied once. The answer leaves
  // replay_tokens() to compute.
  LookupResult lookup(RequestId request, std::uint32_t prompt_tokens, const HashList& hashes,
                      std::uint32_t local_tokens, Instant now);

  // The engine has blocks for the request and will wait for `external_tokens` (what lookup offered,
  // or 0: not wanted). Returns the load's job, whose end take_load_ends() tells, or nothing: then
  // nothing is loaded. The bytes may arrive as soon as a worker has the plan and its token has
  // fired: no device work behind the token may touch the blocks.
  std::optional<JobId> allocated(RequestId request, std::uint32_t external_tokens,
                                 const BlockRows& rows, Instant now);

  // `accepted_tokens` of the request will be computed and final after this step. May shrink (R25).
  // `hashes` say by `first` where they belong; those that are known are skipped. The first lookup
  // or advanced begins a request, and only finished() ends it.
  void advanced(RequestId request, std::uint32_t accepted_tokens, const HashList& hashes);
  std::uint32_t known_hashes(RequestId request) const noexcept;

  // What is ready to be saved and not yet planned; empty when nothing is.
  TokenRange wants_save(RequestId request, Instant now) noexcept;
  // Whether wants_save() says no to every request now: by mode, purge, back-off or
  // max_held_percent. Whoever asks only when a request has got further must ask again afterwards.
  bool saves_paused(Instant now) const noexcept;
  // Plans the save of `range` from the engine's present tables of this step. Left out are null
  // entries, and blocks of windows that neither the request nor its load has filled.
  void save(RequestId request, const TokenRange& range, const BlockRows& rows, Instant now);
  // The engine offers the state of a hand-off group that ends the prefix of `tokens`: a multiple of
  // the group's chunk, or of the hit alignment where hits may end inside a block. The block must
  // not change until the job that saves it is quiet.
  void boundary(RequestId request, GroupId group, BlockId block, std::uint32_t tokens);

  // The request has lost its blocks, and begins again when it is looked up or advances. What was
  // saved of it is not saved again, but for what its next lookup does not find.
  void preempted(RequestId request);
  void finished(RequestId request, FinishReason how);

  // Sends the step's lookups as one call and returns the step's jobs. The plan is valid until the
  // next end_step.
  const StepPlan& end_step(Instant now);

  // One or several concatenated worker reports. False when some of it could not be taken: bytes
  // that cannot be read, and all behind them (reports_malformed), jobs told of chunks that they do
  // not move, or of statuses that there are not (the same: they count as failed), a report of
  // another epoch (reports_foreign). The rest has been taken. Throws nothing but std::bad_alloc:
  // jobs that it had not come to are as those of a lost report, which end by their timeout and are
  // asked about.
  bool report(std::span<const std::byte> bytes, Instant now);
  bool report(const WorkerReport& report, Instant now);

  // The worker's process has ended, and its memory is gone with it: of all jobs planned so far it
  // counts as failed and quiet, so that no block waits for it. Never for a process that may live:
  // its calls would go on in blocks that are somebody else's. A worker that takes its place must
  // get no plan of before: what no plan has named yet ends on all ranks, states that were offered
  // included. What requests have computed is gone on that rank; tell that they were preempted. What
  // ended so is saved once it is computed again, and offered as before: the store refused nothing.
  void rank_gone(Rank rank, Instant now);

  // Appends and forgets.
  void take_load_ends(std::vector<LoadEnd>& out);
  // Appends and forgets, in order; nothing unless options().tell_changes. A purge takes back what
  // it will remove: no change tells of storing from its beginning to its end.
  void take_changes(std::vector<StoreChange>& out);
  // Appends the requests of which a save is in flight or about to be planned, some more than once:
  // changes may still name these and no other one that has finished.
  void saving_requests(std::vector<RequestId>& out) const;
  // Blocks to reference once more / once less, in order. Apply acquired ones before any block is
  // freed.
  void take_acquired(std::vector<BlockId>& out);
  void take_released(std::vector<BlockId>& out);

  // True while the engine must keep stepping: a job is not quiet, or something waits to be taken,
  // be it load ends, changes or blocks.
  // Jobs in quarantine do not count: only their client's end releases them, in a later step.
  bool has_pending_work() const noexcept;
  // Requests, jobs and lookups that are remembered; all 0 at the end of a clean run.
  std::size_t tracked() const noexcept;
  // As of the last end_step. Each change is one log line.
  StoreHealth health() const noexcept;
  // The last events; request and job numbers only, no tokens or keys.
  const FlightRecorder& flight_record() const noexcept;
  StoreSchedulerCounters counters() const noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvprism
