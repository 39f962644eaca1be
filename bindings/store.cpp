// StoreScheduler, StoreWorker and what passes between them.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <random>

#include "areas.h"
#include "handles.h"
#include "kvprism/backend/clock.h"
#include "kvprism/base/error.h"

namespace kvprism::bindings {
namespace {

using namespace nb::literals;

constexpr const char* kScheduler = "store scheduler";

nb::bytes to_bytes(const std::vector<std::byte>& bytes) {
  return nb::bytes(bytes.data(), bytes.size());
}

// None when there is nothing to hand on.
nb::object report_or_none(const std::vector<std::byte>& report) {
  if (report.empty()) return nb::none();
  return to_bytes(report);
}

using IdArray = nb::ndarray<nb::numpy, std::int32_t, nb::ndim<1>>;

IdArray to_array(std::vector<BlockId> ids) {
  auto* const kept = new std::vector<BlockId>(std::move(ids));
  const nb::capsule owner(kept,
                          [](void* p) noexcept { delete static_cast<std::vector<BlockId>*>(p); });
  return IdArray(kept->data(), {kept->size()}, owner);
}

std::uint64_t random_epoch() {
  std::random_device device;
  std::uint64_t epoch = 0;
  while (epoch == 0) epoch = static_cast<std::uint64_t>(device()) << 32 | device();
  return epoch;
}

BoundPlan decode(nb::handle data) {
  const EncodedBytes encoded(data, "data");
  const StepPlanView view = decode_plan(encoded.bytes());
  BoundPlan bound;
  StepPlan& plan = bound.plan;
  plan.digest = view.digest;
  plan.epoch = view.epoch;
  plan.step = view.step;
  plan.hash_width = view.hash_width;
  plan.jobs.assign(view.jobs.begin(), view.jobs.end());
  plan.runs.assign(view.runs.begin(), view.runs.end());
  plan.ids.assign(view.ids.begin(), view.ids.end());
  plan.mark_tokens.assign(view.mark_tokens.begin(), view.mark_tokens.end());
  plan.mark_hashes.assign(view.mark_hashes.begin(), view.mark_hashes.end());
  return bound;
}

nb::bytes encoded(const BoundPlan& bound) {
  std::vector<std::byte> bytes;
  encode(bound.plan.view(), bytes);
  return to_bytes(bytes);
}

ReadyToken event_token(std::uintptr_t event, std::uintptr_t query, int not_ready,
                       std::uintptr_t destroy) {
  if (query == 0)
    fail(ErrorCode::kInvalidArgument, "ready token",
         {"query", "0", "the address of a function", {}});
  DeviceEventApi api{};
  api.query = reinterpret_cast<int (*)(void*)>(query);
  api.not_ready = not_ready;
  api.destroy = reinterpret_cast<void (*)(void*)>(destroy);
  return ReadyToken::device_event(reinterpret_cast<void*>(event), api);
}

nb::dict to_dict(const StoreSchedulerCounters& c) {
  nb::dict ledger;
  ledger["started"] = c.ledger.started;
  ledger["outcomes"] = c.ledger.outcomes;
  ledger["quiets"] = c.ledger.quiets;
  ledger["expired"] = c.ledger.expired;
  ledger["quarantined"] = c.ledger.quarantined;
  ledger["late_notices"] = c.ledger.late_notices;
  ledger["duplicate_notices"] = c.ledger.duplicate_notices;
  ledger["unknown_notices"] = c.ledger.unknown_notices;
  ledger["alive"] = c.ledger.alive;
  ledger["blocks_held"] = c.ledger.blocks_held;
  ledger["blocks_in_quarantine"] = c.ledger.blocks_in_quarantine;
  nb::dict out;
  out["lookups"] = c.lookups;
  out["lookup_calls"] = c.lookup_calls;
  out["lookup_keys"] = c.lookup_keys;
  out["lookups_late"] = c.lookups_late;
  out["lookups_failed"] = c.lookups_failed;
  out["hit_tokens"] = c.hit_tokens;
  out["loaded_tokens"] = c.loaded_tokens;
  out["loads"] = c.loads;
  out["loads_failed"] = c.loads_failed;
  out["load_races"] = c.load_races;
  out["saves"] = c.saves;
  out["saved_objects"] = c.saved_objects;
  out["duplicate_objects"] = c.duplicate_objects;
  out["saved_bytes"] = c.saved_bytes;
  out["loaded_objects"] = c.loaded_objects;
  out["loaded_bytes"] = c.loaded_bytes;
  out["save_chunks_failed"] = c.save_chunks_failed;
  out["saves_dropped"] = c.saves_dropped;
  out["offers_refused"] = c.offers_refused;
  out["sources_skipped"] = c.sources_skipped;
  out["reports_foreign"] = c.reports_foreign;
  out["reports_malformed"] = c.reports_malformed;
  out["bypasses"] = c.bypasses;
  out["ledger"] = ledger;
  return out;
}

nb::dict to_dict(const StoreWorkerCounters& c) {
  nb::dict out;
  out["plans"] = c.plans;
  out["plans_refused"] = c.plans_refused;
  out["jobs"] = c.jobs;
  out["gets"] = c.gets;
  out["puts"] = c.puts;
  out["segments"] = c.segments;
  out["bytes_stored"] = c.bytes_stored;
  out["bytes_fetched"] = c.bytes_fetched;
  out["jobs_alive"] = c.jobs_alive;
  out["unquiet_calls"] = c.unquiet_calls;
  return out;
}

// Releasing the GIL costs more than copying a few hashes.
class ReleaseForLong {
 public:
  explicit ReleaseForLong(const HashList& hashes) {
    if (hashes.count > 2048) released_.emplace();
  }

 private:
  std::optional<nb::gil_scoped_release> released_;
};

// One call of the scheduler: open, and no other one running.
class Use {
 public:
  explicit Use(BoundScheduler& bound)
      : bound_(bound), exclusive_(bound.in_use, kScheduler), scheduler_(*bound.shared()) {}
  StoreScheduler* operator->() const noexcept { return &scheduler_; }
  HashList hashes(nb::handle object, std::uint64_t request) const {
    return bound_.hashes.read(object, scheduler_.known_hashes(RequestId{request}),
                              bound_.hash_width);
  }
  HashList new_hashes(nb::handle object) const {
    return bound_.hashes.read(object, 0, bound_.hash_width);
  }
  BlockRows rows(nb::handle object) const { return bound_.rows.read(object); }

 private:
  BoundScheduler& bound_;
  ExclusiveUse exclusive_;
  StoreScheduler& scheduler_;
};

void bind_plan(nb::module_& m) {
  nb::class_<BoundPlan>(m, "StepPlan",
                        R"(The jobs of one engine step, from the scheduler to the workers.

In one process the object itself is submitted. It pickles as its encoded bytes.)")
      .def(
          "__len__", [](const BoundPlan& p) { return p.plan.jobs.size(); }, "Number of jobs.")
      .def(
          "__bool__", [](const BoundPlan& p) { return !p.plan.empty(); },
          "True when there is a job.")
      .def_prop_ro(
          "step", [](const BoundPlan& p) { return p.plan.step; },
          "Number of the engine step, from 1.")
      .def_prop_ro(
          "epoch", [](const BoundPlan& p) { return p.plan.epoch; },
          "The scheduler's random number.")
      .def_prop_ro(
          "num_blocks", [](const BoundPlan& p) { return p.plan.ids.size(); },
          "Blocks that the jobs move.")
      .def("encode", &encoded, R"(The plan as bytes, for a worker in another process.

Returns:
    Little-endian bytes whose size follows the blocks moved, not the length of any request.)")
      .def_static("decode", &decode, "data"_a, R"(Reads what `encode` has written.

Args:
    data: Bytes or a contiguous buffer.

Returns:
    The plan.

Raises:
    Error: The bytes are no plan of this version, or an index in them lies outside it.)")
      .def("__getstate__", &encoded, "The encoded plan.")
      .def(
          "__setstate__",
          [](BoundPlan& self, const nb::bytes& state) { new (&self) BoundPlan(decode(state)); },
          "state"_a, "Takes over an encoded plan.");
}

void bind_tokens_and_ends(nb::module_& m) {
  nb::class_<ReadyToken>(m, "ReadyToken", R"(Proof that the bytes of a step's saves are in memory.

Without it a save could read a block that the accelerator has not written yet.)")
      .def_static("host", &ReadyToken::host,
                  R"(The caller has synchronised: the bytes are there now.

Returns:
    A token that is ready.)")
      .def_static("device_event", &event_token, "event"_a, "query"_a, "not_ready"_a,
                  "destroy"_a = 0,
                  R"(A device event that was recorded after the writes.

Args:
    event: Handle of the event, as an integer.
    query: Address of a C function `int query(void *event)` that answers 0 when the event has happened,
        such as cudaEventQuery. It is called from a thread of the worker, without the GIL.
    not_ready: What `query` answers before, such as 600 (cudaErrorNotReady); anything else is an error.
    destroy: Address of `void destroy(void *event)`; 0 when the caller keeps the event alive.

Returns:
    A token that becomes ready with the event.

Raises:
    Error: `query` is 0.)");

  nb::class_<FailedBlock>(m, "FailedBlock", "A block that a load should have filled and did not.")
      .def_prop_ro(
          "group", [](const FailedBlock& b) { return raw(b.group); },
          "Index of the group in the configuration.")
      .def_ro("chunk", &FailedBlock::chunk, "Position of the block in the request's table.")
      .def_prop_ro("block", [](const FailedBlock& b) { return raw(b.block); }, "Id of the block.");

  nb::class_<LoadEnd>(m, "LoadEnd",
                      "The end of one load; exactly one for each job that `allocated` returned.")
      .def_prop_ro(
          "request", [](const LoadEnd& e) { return raw(e.request); }, "The request it was for.")
      .def_prop_ro(
          "job", [](const LoadEnd& e) { return raw(e.job); }, "The job that `allocated` returned.")
      .def_ro("valid_tokens", &LoadEnd::valid_tokens,
              "Length of the usable prefix, local tokens included.")
      .def_ro("complete", &LoadEnd::complete, "Everything that was promised has arrived.")
      .def_ro("blocks_quiet", &LoadEnd::blocks_quiet,
              "False: the blocks are in quarantine, the request needs others.")
      .def_ro("failed", &LoadEnd::failed, "Blocks that do not hold what they should.");

  nb::class_<SubmitResult>(m, "SubmitResult",
                           "Whether a worker took a plan; true in a condition when it did.")
      .def(
          "__bool__", [](const SubmitResult& r) { return r.accepted; }, "Same as `accepted`.")
      .def_ro("accepted", &SubmitResult::accepted,
              "False: the plan's jobs are reported as failed and quiet.")
      .def_ro("refusal", &SubmitResult::refusal, "Why not, with both values; empty when accepted.");
}

void bind_scheduler(nb::module_& m) {
  nb::class_<BoundScheduler>(m, "StoreScheduler", R"(The engine's scheduler side of the store.

It decides what is looked up, loaded and saved, and holds references on the blocks that jobs use. No call blocks; every
call is harmless for unknown requests and may be repeated. One call at a time, from any thread.

Block tables are given as `rows`, one row for each group of the configuration: lists, integer arrays, or bytes that hold
native 32-bit integers. `hashes` are the engine's block hashes: a list of bytes, an array of shape (count, width), or
flat bytes. Both are copied before the call returns.)")
      .def(
          "__init__",
          [](BoundScheduler* self, std::shared_ptr<const KeySchema> schema,
             std::shared_ptr<StoreHandle> store, std::optional<std::uint64_t> epoch,
             std::uint32_t ranks, bool loads, bool saves, double lookup_timeout_seconds,
             double lookup_fresh_for_seconds, double load_timeout_seconds,
             double save_timeout_seconds, double quarantine_after_seconds,
             bool detach_quarantined_loads, std::uint32_t full_backoff_after,
             double full_backoff_seconds, std::uint32_t hash_width) {
            StoreSchedulerOptions options;
            options.epoch = epoch ? *epoch : random_epoch();
            options.ranks = ranks;
            options.loads = loads;
            options.saves = saves;
            options.lookup_timeout = to_duration(lookup_timeout_seconds, "lookup_timeout_seconds");
            options.lookup_fresh_for =
                to_duration(lookup_fresh_for_seconds, "lookup_fresh_for_seconds");
            options.load_timeout = to_duration(load_timeout_seconds, "load_timeout_seconds");
            options.save_timeout = to_duration(save_timeout_seconds, "save_timeout_seconds");
            options.quarantine_after =
                to_duration(quarantine_after_seconds, "quarantine_after_seconds");
            options.detach_quarantined_loads = detach_quarantined_loads;
            options.full_backoff_after = full_backoff_after;
            options.full_backoff = to_duration(full_backoff_seconds, "full_backoff_seconds");
            new (self) BoundScheduler(std::move(schema), std::move(store), options, hash_width);
          },
          "schema"_a, "store"_a, nb::kw_only(), "epoch"_a = nb::none(), "ranks"_a = 1,
          "loads"_a = true, "saves"_a = true, "lookup_timeout_seconds"_a = 0.5,
          "lookup_fresh_for_seconds"_a = 5.0, "load_timeout_seconds"_a = 20.0,
          "save_timeout_seconds"_a = 60.0, "quarantine_after_seconds"_a = 120.0,
          "detach_quarantined_loads"_a = false, "full_backoff_after"_a = 3,
          "full_backoff_seconds"_a = 5.0, "hash_width"_a = 32, R"(Takes the index side of `store`.

Args:
    schema: Names the objects.
    store: Where objects are looked up; no other scheduler may use it.
    epoch: Travels in every plan and report; random by default.
    ranks: Workers that report each job, 1 to 64.
    loads: Look up and load.
    saves: Save.
    lookup_timeout_seconds: A later answer is a miss.
    lookup_fresh_for_seconds: An unused answer is asked again after this.
    load_timeout_seconds: Bound of a load's outcome.
    save_timeout_seconds: Bound of a save's outcome.
    quarantine_after_seconds: Blocks that are still in use this long after the outcome go to quarantine.
    detach_quarantined_loads: End such loads; the engine must then give the request other blocks.
    full_backoff_after: Consecutive saves that met a full store before saving pauses.
    full_backoff_seconds: Length of that pause.
    hash_width: Bytes of a hash in flat bytes; other forms tell it themselves.

Raises:
    Error: The configuration cannot be used with a store, or an option is out of range; all problems at once.)")
      .def_prop_ro(
          "epoch", [](BoundScheduler& b) { return b.shared()->options().epoch; },
          "Travels in every plan and report.")
      .def(
          "lookup",
          [](BoundScheduler& b, std::uint64_t request, std::uint32_t prompt_tokens,
             nb::handle hashes, std::uint32_t local_tokens) -> std::optional<std::uint32_t> {
            const Use use(b);
            const HashList list = use.hashes(hashes, request);
            const ReleaseForLong released(list);
            const LookupResult result =
                use->lookup(RequestId{request}, prompt_tokens, list, local_tokens, monotonic_now());
            if (result.pending) return std::nullopt;
            return result.external_tokens;
          },
          "request"_a, "prompt_tokens"_a, "hashes"_a, "local_tokens"_a = 0,
          nb::sig("def lookup(self, request: int, prompt_tokens: int, hashes: object, "
                  "local_tokens: int = 0) -> int | None"),
          R"(How many tokens the store offers beyond the engine's own.

Args:
    request: Chosen by the engine, unique among live requests.
    prompt_tokens: Length of the prompt.
    hashes: All hashes of the prompt; those known from an earlier call are not read again.
    local_tokens: The engine's own hit.

Returns:
    The number of tokens, 0 for none, or None: ask again in the next step.)")
      .def(
          "allocated",
          [](BoundScheduler& b, std::uint64_t request, std::uint32_t external_tokens,
             nb::handle rows) -> std::optional<std::uint64_t> {
            const Use use(b);
            const BlockRows view = external_tokens == 0 ? BlockRows() : use.rows(rows);
            std::optional<JobId> job;
            {
              const nb::gil_scoped_release released;
              job = use->allocated(RequestId{request}, external_tokens, view, monotonic_now());
            }
            if (!job) return std::nullopt;
            return raw(*job);
          },
          "request"_a, "external_tokens"_a, "rows"_a,
          nb::sig("def allocated(self, request: int, external_tokens: int, rows: object) -> int | "
                  "None"),
          R"(The engine has blocks for the request and will wait for the load.

Args:
    request: The request.
    external_tokens: What `lookup` offered, or 0 when the engine does not want it.
    rows: Block tables, a row for each group.

Returns:
    The load's job, whose end `take_load_ends` tells, or None: nothing is loaded.)")
      .def(
          "advanced",
          [](BoundScheduler& b, std::uint64_t request, std::uint32_t accepted_tokens,
             nb::handle new_hashes) {
            const Use use(b);
            const HashList list = use.new_hashes(new_hashes);
            const ReleaseForLong released(list);
            use->advanced(RequestId{request}, accepted_tokens, list);
          },
          "request"_a, "accepted_tokens"_a, "new_hashes"_a = nb::none(),
          nb::sig("def advanced(self, request: int, accepted_tokens: int, new_hashes: object = "
                  "None) -> None"),
          R"(Tells how many tokens of the request are computed and final after this step.

Args:
    request: The request.
    accepted_tokens: May shrink, when draft tokens are rejected.
    new_hashes: Hashes that follow those known already; see `known_hashes`.)")
      .def(
          "known_hashes",
          [](BoundScheduler& b, std::uint64_t request) {
            return Use(b)->known_hashes(RequestId{request});
          },
          "request"_a, R"(How many hashes of the request the scheduler has.

Args:
    request: The request.

Returns:
    Their number; 0 for unknown requests.)")
      .def(
          "wants_save",
          [](BoundScheduler& b,
             std::uint64_t request) -> std::optional<std::pair<std::uint32_t, std::uint32_t>> {
            const TokenRange range = Use(b)->wants_save(RequestId{request}, monotonic_now());
            if (range.empty()) return std::nullopt;
            return std::pair(range.from, range.to);
          },
          "request"_a, R"(What is ready to be saved and not yet planned.

Args:
    request: The request.

Returns:
    First and end token of the range, or None.)")
      .def(
          "save",
          [](BoundScheduler& b, std::uint64_t request,
             std::pair<std::uint32_t, std::uint32_t> range, nb::handle rows) {
            const Use use(b);
            const BlockRows view = use.rows(rows);
            const nb::gil_scoped_release released;
            use->save(RequestId{request}, {range.first, range.second}, view, monotonic_now());
          },
          "request"_a, "range"_a, "rows"_a,
          nb::sig("def save(self, request: int, range: tuple[int, int], rows: object) -> None"),
          R"(Plans a save from the engine's present block tables.

Args:
    request: The request.
    range: What `wants_save` returned, or a shorter range from the same token.
    rows: Block tables of this step, a row for each group; null blocks are never read.)")
      .def(
          "boundary",
          [](BoundScheduler& b, std::uint64_t request, std::uint32_t group, std::int32_t block,
             std::uint32_t tokens) {
            Use(b)->boundary(RequestId{request}, GroupId{group}, BlockId{block}, tokens);
          },
          "request"_a, "group"_a, "block"_a, "tokens"_a,
          R"(Offers the state that ends a prefix, for groups that hand off states.

Args:
    request: The request.
    group: Index of the group in the configuration.
    block: Block that holds the state.
    tokens: Length of the prefix, a multiple of the group's tokens per block.)")
      .def(
          "preempted",
          [](BoundScheduler& b, std::uint64_t request) { Use(b)->preempted(RequestId{request}); },
          "request"_a, R"(The request has lost its blocks and will start again.

Args:
    request: The request.)")
      .def(
          "finished",
          [](BoundScheduler& b, std::uint64_t request, bool aborted) {
            Use(b)->finished(RequestId{request},
                             aborted ? FinishReason::kAborted : FinishReason::kCompleted);
          },
          "request"_a, "aborted"_a = false,
          R"(The request is over; jobs in flight keep their blocks.

Args:
    request: The request.
    aborted: It was ended from outside.)")
      .def(
          "end_step",
          [](BoundScheduler& b) {
            const Use use(b);
            BoundPlan out;
            const nb::gil_scoped_release released;
            out.plan = use->end_step(monotonic_now());
            return out;
          },
          R"(Sends the step's lookups as one call and hands over the step's jobs.

Returns:
    The plan, for every worker; often empty.)")
      .def(
          "report",
          [](BoundScheduler& b, nb::handle data) {
            const Use use(b);
            const EncodedBytes encoded(data, "data");
            const nb::gil_scoped_release released;
            use->report(encoded.bytes(), monotonic_now());
          },
          "data"_a, nb::sig("def report(self, data: bytes | bytearray | memoryview) -> None"),
          R"(Takes in reports of workers.

Args:
    data: One or several reports, one behind the other. Malformed ones are counted, never raised.)")
      .def(
          "take_load_ends",
          [](BoundScheduler& b) {
            std::vector<LoadEnd> ends;
            Use(b)->take_load_ends(ends);
            return ends;
          },
          R"(Loads that have ended since the last call.

Returns:
    A list; each load appears once.)")
      .def(
          "take_acquired",
          [](BoundScheduler& b) {
            std::vector<BlockId> ids;
            Use(b)->take_acquired(ids);
            return to_array(std::move(ids));
          },
          R"(Blocks that need one more reference, to be added before any block is freed.

Returns:
    Block ids, in order; an id may appear more than once.)")
      .def(
          "take_released",
          [](BoundScheduler& b) {
            std::vector<BlockId> ids;
            Use(b)->take_released(ids);
            return to_array(std::move(ids));
          },
          R"(Blocks that need one reference less.

Returns:
    Block ids, in order; an id may appear more than once.)")
      .def(
          "has_pending_work", [](BoundScheduler& b) { return Use(b)->has_pending_work(); },
          "True while a job is not quiet: the engine must keep stepping.")
      .def(
          "tracked", [](BoundScheduler& b) { return Use(b)->tracked(); },
          "Requests, jobs and lookups that are remembered; 0 at the end of a clean run.")
      .def(
          "counters", [](BoundScheduler& b) { return to_dict(Use(b)->counters()); },
          nb::sig("def counters(self) -> dict[str, int | dict[str, int]]"),
          "Counters by name; those of the jobs under 'ledger'.")
      .def(
          "close",
          [](BoundScheduler& b, double timeout_seconds) {
            const Duration budget = to_duration(timeout_seconds, "timeout_seconds");
            const ExclusiveUse exclusive(b.in_use, kScheduler);
            const nb::gil_scoped_release released;
            return b.close(budget).unquiet;
          },
          "timeout_seconds"_a = 5.0,
          R"(Ends lookups; every later call but this one raises ClosedError.

Args:
    timeout_seconds: Longest wait for lookups in flight.

Returns:
    Lookups that did not end.)");
}

void bind_worker(nb::module_& m) {
  nb::class_<BoundWorker>(m, "StoreWorker",
                          R"(One rank's side of the store: carries plans out and reports.

A thread of its own moves the jobs along from the first `submit` on. Calls may come from any thread, and those that wait
or copy run without the GIL.)")
      .def(
          "__init__",
          [](BoundWorker* self, std::shared_ptr<const KeySchema> schema,
             nb::handle_t<SegmentMap> segment_map, std::shared_ptr<StoreHandle> store,
             std::uint32_t rank, std::uint32_t tp, std::uint32_t pp, std::uint32_t pcp,
             std::uint32_t dcp, std::uint32_t max_segments_per_call,
             std::uint64_t max_bytes_per_call, std::uint32_t max_gets_in_flight,
             std::uint32_t max_puts_in_flight, std::uint32_t max_queued_jobs) {
            StoreWorkerOptions options;
            options.rank = Rank{rank};
            options.position = {tp, pp, pcp, dcp};
            options.max_segments_per_call = max_segments_per_call;
            options.max_bytes_per_call = max_bytes_per_call;
            options.max_gets_in_flight = max_gets_in_flight;
            options.max_puts_in_flight = max_puts_in_flight;
            options.max_queued_jobs = max_queued_jobs;
            new (self) BoundWorker(std::move(schema), segment_map, std::move(store), options);
          },
          "schema"_a, "segment_map"_a, "store"_a, nb::kw_only(), "rank"_a = 0, "tp"_a = 0,
          "pp"_a = 0, "pcp"_a = 0, "dcp"_a = 0, "max_segments_per_call"_a = 512,
          "max_bytes_per_call"_a = 64u << 20, "max_gets_in_flight"_a = 4,
          "max_puts_in_flight"_a = 2, "max_queued_jobs"_a = 65536,
          R"(Takes the store side of `store` and registers the memory of `segment_map` with it.

Args:
    schema: Names the objects; of the same configuration as the scheduler's.
    segment_map: Where the blocks lie. Its memory must stay mapped until `close` has returned 0.
    store: Where objects are put and got; no other worker may use it.
    rank: Number of this worker, from 0.
    tp: Position in the tensor-parallel group.
    pp: Position in the pipeline.
    pcp: Position in the prefill-context-parallel group.
    dcp: Position in the decode-context-parallel group.
    max_segments_per_call: Pieces of memory per call to the store.
    max_bytes_per_call: Bytes per call to the store.
    max_gets_in_flight: Calls at a time.
    max_puts_in_flight: Calls at a time.
    max_queued_jobs: Jobs submitted and not yet seen by the thread.

Raises:
    Error: An option is out of range, the configurations differ, or the memory cannot be registered.)")
      .def(
          "submit",
          [](BoundWorker& w, const BoundPlan& plan, const ReadyToken& ready) {
            return w.submit(plan.plan.view(), ready);
          },
          "plan"_a, "ready"_a, nb::call_guard<nb::gil_scoped_release>(),
          R"(Takes a plan that was made in this process.

Args:
    plan: Of the scheduler's `end_step`; copied.
    ready: Says when the bytes that the plan saves are in memory.

Returns:
    Whether the plan was accepted. The jobs of a refused one are reported as failed.)")
      .def(
          "submit",
          [](BoundWorker& w, nb::handle data, const ReadyToken& ready) {
            const EncodedBytes encoded(data, "plan");
            const nb::gil_scoped_release released;
            return w.submit(encoded.bytes(), ready);
          },
          "plan"_a, "ready"_a,
          nb::sig("def submit(self, plan: bytes | bytearray | memoryview, ready: ReadyToken) -> "
                  "SubmitResult"),
          R"(Takes an encoded plan, as bytes or a buffer.)")
      .def(
          "poll",
          [](BoundWorker& w) {
            std::vector<std::byte> report;
            {
              const nb::gil_scoped_release released;
              report = w.poll();
            }
            return report_or_none(report);
          },
          nb::sig("def poll(self) -> bytes | None"), R"(What has happened since the last call.

Returns:
    A report for the scheduler, or None.)")
      .def(
          "wait",
          [](BoundWorker& w, double timeout_seconds) {
            const Instant until = monotonic_now() + to_duration(timeout_seconds, "timeout_seconds");
            std::vector<std::byte> report;
            // In slices, so that Ctrl-C is noticed.
            for (bool first = true; report.empty(); first = false) {
              const Duration left = until - monotonic_now();
              if (left.ns <= 0 && !first) break;
              {
                const nb::gil_scoped_release released;
                report = w.wait(std::min(left, milliseconds(100)));
              }
              if (PyErr_CheckSignals() != 0) throw nb::python_error();
            }
            return report_or_none(report);
          },
          "timeout_seconds"_a, nb::sig("def wait(self, timeout_seconds: float) -> bytes | None"),
          R"(Waits, without the GIL, for something to happen.

Args:
    timeout_seconds: Longest wait.

Returns:
    A report for the scheduler, or None when nothing has happened.)")
      .def(
          "counters", [](BoundWorker& w) { return to_dict(w.counters()); },
          nb::sig("def counters(self) -> dict[str, int]"), "Counters by name.")
      .def(
          "close",
          [](BoundWorker& w, double timeout_seconds) {
            const Duration budget = to_duration(timeout_seconds, "timeout_seconds");
            const nb::gil_scoped_release released;
            return w.close(budget).unquiet;
          },
          "timeout_seconds"_a = 5.0,
          R"(Starts nothing new, cancels what has not started, and waits for the rest.

A last report can be polled afterwards; other calls raise ClosedError.

Args:
    timeout_seconds: Longest wait.

Returns:
    Calls that may still touch the memory, which must then stay mapped: a kept reference to the segment map sees to it.)");
}

}  // namespace

void bind_store(nb::module_& m) {
  bind_plan(m);
  bind_tokens_and_ends(m);
  bind_scheduler(m);
  bind_worker(m);
}

}  // namespace kvprism::bindings
