// StoreScheduler.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "counters.h"
#include "handles.h"
#include "ids.h"
#include "kvprism/backend/clock.h"
#include "kvprism/backend/run_file.h"
#include "kvprism/base/error.h"
#include "text.h"
#include "whole.h"

namespace kvprism::bindings {

using namespace nb::literals;

namespace {

constexpr const char* kScheduler = "store scheduler";

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

// Chunks of each group that a save of `range` reads: none of scratch and of states, which are
// handed off. Those outside a window are null in the engine's table and cost nothing.
void source_ranges(const Projection& projection, const TokenRange& range,
                   std::vector<RowRange>& out) {
  out.clear();
  for (const GroupId id : indices<GroupId>(projection.num_groups())) {
    const ResolvedGroup& group = projection.group(id);
    const bool positional =
        projection.store_index(id).has_value() && group.traits.save == SaveRule::kPositional;
    out.push_back(positional
                      ? RowRange{range.from / group.tokens_per_block,
                                 (range.to + group.tokens_per_block - 1) / group.tokens_per_block}
                      : RowRange{});
  }
}

std::uint32_t checked_width(const Whole<std::uint32_t>& given, ProblemList& problems) {
  const std::uint32_t width = given("hash_width", problems);
  if (!given.wrong.is_valid() && (width < kMinHashWidth || width > kMaxHashWidth))
    problems.add("hash_width", std::to_string(width), "16 to 64 bytes");
  return width;
}

// What the scheduler would find wrong as well, so that everything is told at once.
void add_problems_of(const KeySchema& schema, const StoreSchedulerOptions& options,
                     ProblemList& problems) {
  try {
    StoreScheduler::check(schema, options);
  } catch (const Error& error) {
    problems.append(error.problems());
  }
}

// Releasing the GIL costs more than copying a few hashes.
class ReleaseForLong {
 public:
  explicit ReleaseForLong(const HashList& hashes) {
    if (hashes.count > 2048) released_.emplace();
  }

 private:
  std::optional<GilFree> released_;
};

// One call of the scheduler: open, and no other one running.
class Use {
 public:
  explicit Use(BoundScheduler& bound)
      : bound_(bound), exclusive_(bound.in_use, kScheduler), scheduler_(*bound.shared()) {}
  StoreScheduler* operator->() const noexcept { return &scheduler_; }
  // The scheduler as what it is: calls of a checked one are checked.
  template <class Call>
  decltype(auto) with(const Call& call) const {
    // A recording is written when the call ends.
    std::optional<GilFree> released;
    if (bound_.records() && GilFree::has_gil()) released.emplace(GilFree::WhenExiting::kKeepGil);
    return bound_.checked() != nullptr ? call(*bound_.checked()) : call(scheduler_);
  }
  HashList hashes(nb::handle object, RequestId request) const {
    return bound_.hashes.read(object, scheduler_.known_hashes(request), bound_.hash_width);
  }
  HashList hashes_from(nb::handle object, std::uint32_t first) const {
    HashList list = bound_.hashes.read(object, 0, bound_.hash_width);
    list.first = first;
    return list;
  }
  BlockRows rows(nb::handle object) const { return bound_.rows.read(object); }
  BlockRows rows(nb::handle object, const TokenRange& range) const {
    source_ranges(scheduler_.projection(), range, bound_.row_ranges);
    return bound_.rows.read(object, bound_.row_ranges);
  }

 private:
  BoundScheduler& bound_;
  ExclusiveUse exclusive_;
  StoreScheduler& scheduler_;
};

}  // namespace

void bind_store_scheduler(nb::module_& m) {
  nb::class_<BoundScheduler>(m, "StoreScheduler", R"(The engine's scheduler side of the store.

It decides what is looked up, loaded and saved, and holds references on the blocks that jobs use. No call blocks; every
call is harmless for unknown requests and may be repeated. One call at a time, from any thread: a second one raises
ArgumentError. A checked scheduler raises ArgumentError for calls out of order; a refused call does nothing.

Block tables are given as `rows`, one row for each group of the configuration: lists, integer arrays, or bytes that hold
native 32-bit integers. `hashes` are the engine's block hashes: a list of bytes, an array of shape (count, width), or
flat bytes. Both are copied before the call returns.)")
      .def(
          "__init__",
          [](BoundScheduler* self, std::shared_ptr<const KeySchema> schema,
             std::shared_ptr<StoreHandle> store, const std::optional<Whole<std::uint64_t>>& epoch,
             bool loads, bool saves, double lookup_timeout_seconds, double lookup_fresh_for_seconds,
             double load_timeout_seconds, double save_timeout_seconds,
             double quarantine_after_seconds, bool detach_quarantined_loads,
             const Whole<std::uint32_t>& backoff_after, double backoff_seconds,
             double saved_fresh_for_seconds, double avoid_failed_for_seconds,
             double purge_settle_seconds, double healthy_after_seconds,
             const Whole<std::uint32_t>& max_held_percent, const std::string& flight_record_path,
             const std::optional<std::string>& record_to, const Whole<std::uint32_t>& hash_width,
             bool tell_changes, bool checked) {
            ProblemList problems;
            const auto seconds = [&](double value, const char* path) {
              return to_duration(value, path, problems);
            };
            StoreSchedulerOptions options;
            options.epoch = epoch ? (*epoch)("epoch", problems) : random_epoch();
            options.loads = loads;
            options.saves = saves;
            options.lookup_timeout = seconds(lookup_timeout_seconds, "lookup_timeout_seconds");
            options.lookup_fresh_for =
                seconds(lookup_fresh_for_seconds, "lookup_fresh_for_seconds");
            options.load_timeout = seconds(load_timeout_seconds, "load_timeout_seconds");
            options.save_timeout = seconds(save_timeout_seconds, "save_timeout_seconds");
            options.quarantine_after =
                seconds(quarantine_after_seconds, "quarantine_after_seconds");
            options.detach_quarantined_loads = detach_quarantined_loads;
            options.backoff_after = backoff_after("backoff_after", problems);
            options.backoff = seconds(backoff_seconds, "backoff_seconds");
            options.saved_fresh_for = seconds(saved_fresh_for_seconds, "saved_fresh_for_seconds");
            options.max_held_percent = max_held_percent("max_held_percent", problems);
            options.tell_changes = tell_changes;
            options.avoid_failed_for =
                seconds(avoid_failed_for_seconds, "avoid_failed_for_seconds");
            options.purge_settle = seconds(purge_settle_seconds, "purge_settle_seconds");
            options.healthy_after = seconds(healthy_after_seconds, "healthy_after_seconds");
            const std::uint32_t width = checked_width(hash_width, problems);
            if (!problems.empty()) add_problems_of(*schema, options, problems);
            problems.throw_if_any(ErrorCode::kInvalidConfig, kScheduler);
            new (self) BoundScheduler(std::move(schema), std::move(store), options, width,
                                      flight_record_path, record_to, checked);
          },
          "schema"_a, "store"_a, nb::kw_only(), "epoch"_a = nb::none(), "loads"_a = true,
          "saves"_a = true, "lookup_timeout_seconds"_a = 0.5, "lookup_fresh_for_seconds"_a = 5.0,
          "load_timeout_seconds"_a = 20.0, "save_timeout_seconds"_a = 60.0,
          "quarantine_after_seconds"_a = 120.0, "detach_quarantined_loads"_a = false,
          "backoff_after"_a = 3, "backoff_seconds"_a = 5.0, "saved_fresh_for_seconds"_a = 60.0,
          "avoid_failed_for_seconds"_a = 5.0, "purge_settle_seconds"_a = 12.0,
          "healthy_after_seconds"_a = 5.0, "max_held_percent"_a = 100, "flight_record_path"_a = "",
          "record_to"_a = nb::none(), "hash_width"_a = 32, "tell_changes"_a = false,
          "checked"_a = false,
          R"(Takes the index side of `store`.

Args:
    schema: Names the objects.
    store: Where objects are looked up; no other scheduler may use it.
    epoch: Travels in every plan and report; random by default.
    loads: Look up and load.
    saves: Save.
    lookup_timeout_seconds: A later answer is a miss.
    lookup_fresh_for_seconds: An unused answer is asked again after this.
    load_timeout_seconds: Bound of a load's outcome.
    save_timeout_seconds: Bound of a save's outcome.
    quarantine_after_seconds: Blocks that are still in use this long after the outcome go to quarantine.
    detach_quarantined_loads: End such loads; the engine must then give the request other blocks.
    backoff_after: Consecutive saves that the store refused (full, away or late) before saving pauses.
    backoff_seconds: Length of that pause.
    saved_fresh_for_seconds: What was saved is not saved again for this long.
    avoid_failed_for_seconds: A chunk whose load failed counts as absent for this long.
    purge_settle_seconds: The last pass of a purge begins this long after the store was last used; above the store's lease.
    healthy_after_seconds: A reason for being degraded is told for this long at least.
    max_held_percent: Nothing is saved while jobs hold more of the pool's blocks; 100 for no bound.
    flight_record_path: File that gets the flight record at its end at a quarantine, a silent rank or a mismatch; "" for the log.
    record_to: New file that gets everything which decides, in the step itself; `kvprism replay-run` repeats it. It holds hashes, no tokens.
    hash_width: Bytes of a hash in flat bytes; other forms tell it themselves.
    tell_changes: Keep for `take_changes` what comes and goes.
    checked: Raise ArgumentError for calls out of order, which are otherwise counted and ignored; for an engine's first
        weeks.

Raises:
    Error: The configuration cannot be used with a store, or an option is out of range; all problems at once.)")
      .def_prop_ro(
          "epoch", [](BoundScheduler& b) { return b.shared()->options().epoch; },
          "Travels in every plan and report.")
      .def(
          "set_mode",
          [](BoundScheduler& b, std::string_view name) {
            constexpr StoreMode kModes[] = {StoreMode::kReadWrite, StoreMode::kReadOnly,
                                            StoreMode::kWriteOnly, StoreMode::kOff};
            for (const StoreMode mode : kModes) {
              if (to_string(mode) == name) return Use(b).with([&](auto& s) { s.set_mode(mode); });
            }
            fail(ErrorCode::kInvalidArgument, "store scheduler",
                 {"mode", std::string(name), "read_write, read_only, write_only or off", {}});
          },
          "mode"_a,
          R"(What the store is used for from now on; jobs in flight go on to their end.

Args:
    mode: "read_write", "read_only", "write_only" or "off", within what `loads` and `saves` allow.

Raises:
    ArgumentError: No such mode.
    ClosedError: After `close`, or in a forked child.)")
      .def_prop_ro(
          "mode", [](BoundScheduler& b) { return std::string(to_string(Use(b)->mode())); },
          "The mode in force.")
      .def(
          "purge",
          [](BoundScheduler& b) { Use(b).with([](auto& s) { s.purge(monotonic_now()); }); },
          R"(Removes every object whose key begins as this scheduler's keys do, and no other.

From now on nothing is looked up, loaded or saved until it is done, which the following steps see to: first jobs in
flight end, on every rank. A load that is overtaken fails as a whole. What requests of now have computed is not saved
any more. Objects that another engine reads or looks up meanwhile stay: purge on all engines of the namespace.

Raises:
    ClosedError: After `close`, or in a forked child.)")
      .def(
          "purge_status",
          [](BoundScheduler& b) {
            const PurgeStatus status = Use(b)->purge_status();
            nb::dict out;
            out["state"] = std::string(to_string(status.state));
            out["removed"] = status.removed;
            out["passes"] = status.passes;
            return out;
          },
          nb::sig("def purge_status(self) -> dict[str, str | int]"),
          R"(How far the last purge is.

Returns:
    "state": "none", "draining" (jobs in flight end), "removing", "waiting" (for leases, or for a store that does not
    answer) or "done"; "removed" objects; "passes" over the store.

Raises:
    ClosedError: After `close`, or in a forked child.)")
      .def(
          "restrict",
          [](BoundScheduler& b, const Whole<std::uint64_t>& request, bool load, bool save) {
            const RequestId id{request("request")};
            Use(b).with([&](auto& s) { s.restrict(id, {load, save}); });
          },
          "request"_a, nb::kw_only(), "load"_a = true, "save"_a = true,
          R"(Keeps one request out of the store, until `finished` ends it. Call it before its first lookup.

Args:
    request: The request; begun by this call if it is unknown.
    load: Whether it may load.
    save: Whether it may be saved.

Raises:
    ArgumentError: A number does not fit.
    ClosedError: After `close`, or in a forked child.)")
      .def(
          "lookup",
          [](BoundScheduler& b, const Whole<std::uint64_t>& request,
             const Whole<std::uint32_t>& prompt_tokens, nb::handle hashes,
             const Whole<std::uint32_t>& local_tokens) -> std::optional<std::uint32_t> {
            const RequestId id{request("request")};
            const std::uint32_t length = prompt_tokens("prompt_tokens");
            const std::uint32_t local = local_tokens("local_tokens");
            const Use use(b);
            const HashList list = use.hashes(hashes, id);
            const ReleaseForLong released(list);
            const LookupResult result = use.with(
                [&](auto& s) { return s.lookup(id, length, list, local, monotonic_now()); });
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
    local_tokens: The engine's own hit, a multiple of the scheduler block size; others get 0.

Returns:
    The number of tokens, 0 for none, or None: ask again in the next step.

Raises:
    ArgumentError: A number does not fit, or the hashes are none of the forms or not of 16 to 64 bytes; of a checked
        scheduler also a hit off the grid, hashes that do not continue the known ones, or a request that waits for a load.
    ClosedError: After `close`, or in a forked child.)")
      .def(
          "allocated",
          [](BoundScheduler& b, const Whole<std::uint64_t>& request,
             const Whole<std::uint32_t>& external_tokens,
             nb::handle rows) -> std::optional<std::uint64_t> {
            const RequestId id{request("request")};
            const std::uint32_t tokens = external_tokens("external_tokens");
            const Use use(b);
            const BlockRows view = tokens == 0 ? BlockRows() : use.rows(rows);
            std::optional<JobId> job;
            {
              const GilFree released;
              job =
                  use.with([&](auto& s) { return s.allocated(id, tokens, view, monotonic_now()); });
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
    The load's job, whose end `take_load_ends` tells, or None: nothing is loaded.

Raises:
    ArgumentError: A number does not fit, or a row holds no block ids; of a checked scheduler also an unknown request,
        other tokens than those offered, or tables that do not cover them.
    ClosedError: After `close`, or in a forked child.)")
      .def(
          "prompt",
          [](BoundScheduler& b, const Whole<std::uint64_t>& request,
             const Whole<std::uint32_t>& prompt_tokens) {
            const RequestId id{request("request")};
            const std::uint32_t length = prompt_tokens("prompt_tokens");
            Use(b).with([&](auto& s) { s.prompt(id, length); });
          },
          "request"_a, "prompt_tokens"_a,
          R"(Tells how long the prompt is, for requests that are not looked up.

Where hits may end inside a block, the end of a prompt is saved as well.

Args:
    request: The request.
    prompt_tokens: Tokens of its prompt.

Raises:
    ArgumentError: A number does not fit.
    ClosedError: After `close`, or in a forked child.)")
      .def(
          "advanced",
          [](BoundScheduler& b, const Whole<std::uint64_t>& request,
             const Whole<std::uint32_t>& accepted_tokens, nb::handle hashes,
             const Whole<std::uint32_t>& first_hash) {
            const RequestId id{request("request")};
            const std::uint32_t accepted = accepted_tokens("accepted_tokens");
            const std::uint32_t first = first_hash("first_hash");
            const Use use(b);
            const HashList list = use.hashes_from(hashes, first);
            const ReleaseForLong released(list);
            use.with([&](auto& s) { s.advanced(id, accepted, list); });
          },
          "request"_a, "accepted_tokens"_a, "hashes"_a = nb::none(), "first_hash"_a = 0,
          nb::sig("def advanced(self, request: int, accepted_tokens: int, hashes: object = None, "
                  "first_hash: int = 0) -> None"),
          R"(Tells how many tokens of the request are computed and final after this step.

Args:
    request: The request.
    accepted_tokens: May shrink, when draft tokens are rejected.
    hashes: Hashes of the request; those known already are skipped.
    first_hash: Index of the first of them; at most `known_hashes`.

Raises:
    ArgumentError: A number does not fit, or the hashes are none of the forms or not of 16 to 64 bytes; of a checked
        scheduler also hashes that do not continue the known ones, an open offer, or a request that waits for a load.
    ClosedError: After `close`, or in a forked child.)")
      .def(
          "known_hashes",
          [](BoundScheduler& b, const Whole<std::uint64_t>& request) {
            const RequestId id{request("request")};
            return Use(b)->known_hashes(id);
          },
          "request"_a, R"(How many hashes of the request the scheduler has.

Args:
    request: The request.

Returns:
    Their number; 0 for unknown requests.

Raises:
    ArgumentError: A number does not fit.
    ClosedError: After `close`, or in a forked child.)")
      .def(
          "wants_save",
          [](BoundScheduler& b, const Whole<std::uint64_t>& request)
              -> std::optional<std::pair<std::uint32_t, std::uint32_t>> {
            const RequestId id{request("request")};
            const TokenRange range =
                Use(b).with([&](auto& s) { return s.wants_save(id, monotonic_now()); });
            if (range.empty()) return std::nullopt;
            return std::pair(range.from, range.to);
          },
          "request"_a, R"(What is ready to be saved and not yet planned.

Args:
    request: The request.

Returns:
    First and end token of the range, or None.

Raises:
    ArgumentError: A number does not fit; of a checked scheduler also an unknown request.
    ClosedError: After `close`, or in a forked child.)")
      .def(
          "saves_paused",
          [](BoundScheduler& b) {
            return Use(b).with([&](auto& s) { return s.saves_paused(monotonic_now()); });
          },
          R"(Whether `wants_save` says no to every request now: by mode, purge, back-off or max_held_percent.

Returns:
    True while nothing is saved; afterwards `wants_save` is worth asking again.

Raises:
    ClosedError: After `close`, or in a forked child.)")
      .def(
          "save",
          [](BoundScheduler& b, const Whole<std::uint64_t>& request,
             std::pair<Whole<std::uint32_t>, Whole<std::uint32_t>> range, nb::handle rows) {
            const RequestId id{request("request")};
            const TokenRange asked{range.first("range[0]"), range.second("range[1]")};
            const Use use(b);
            const Instant now = monotonic_now();
            if (b.checked() != nullptr) {
              // The checks look at every entry.
              const BlockRows view = use.rows(rows);
              const GilFree released;
              return b.checked()->save(id, asked, view, now);
            }
            // Only the scheduler knows where the range really starts; entries before it are not
            // read.
            const TokenRange tokens{use->wants_save(id, now).from, asked.to};
            const BlockRows view = use.rows(rows, tokens);
            const GilFree released;
            use->save(id, tokens, view, now);
          },
          "request"_a, "range"_a, "rows"_a,
          nb::sig("def save(self, request: int, range: tuple[int, int], rows: object) -> None"),
          R"(Plans a save from the engine's present block tables.

Args:
    request: The request.
    range: What `wants_save` returned, or a shorter range from the same token.
    rows: Block tables of this step, a row for each group; null blocks are never read.

Raises:
    ArgumentError: A number does not fit, or a row holds no block ids; of a checked scheduler also an unknown request, a
        range that `wants_save` did not return, or tables that do not cover it.
    ClosedError: After `close`, or in a forked child.)")
      .def(
          "boundary",
          [](BoundScheduler& b, const Whole<std::uint64_t>& request, const PyGroupId& group,
             const Whole<std::int32_t>& block, const Whole<std::uint32_t>& tokens) {
            const RequestId id{request("request")};
            const BlockId state{block("block")};
            const std::uint32_t length = tokens("tokens");
            const Use use(b);
            const GroupId index = checked(group, use->projection().num_groups(), "GroupId");
            use.with([&](auto& s) { s.boundary(id, index, state, length); });
          },
          "request"_a, "group"_a, "block"_a, "tokens"_a,
          R"(Offers the state that ends a prefix, for groups that hand off states.

Args:
    request: The request.
    group: The group.
    block: Block that holds the state.
    tokens: Length of the prefix, a multiple of the group's tokens per block.

Raises:
    ArgumentError: A number does not fit; of a checked scheduler also an unknown request, the null block, a group that
        hands nothing off, or tokens off the grid.
    IndexError: The configuration has no such group.
    ClosedError: After `close`, or in a forked child.)")
      .def(
          "preempted",
          [](BoundScheduler& b, const Whole<std::uint64_t>& request) {
            const RequestId id{request("request")};
            Use(b).with([&](auto& s) { s.preempted(id); });
          },
          "request"_a, R"(The request has lost its blocks and will start again.

Args:
    request: The request.

Raises:
    ArgumentError: A number does not fit; of a checked scheduler also an unknown request, or acquired blocks not taken.
    ClosedError: After `close`, or in a forked child.)")
      .def(
          "finished",
          [](BoundScheduler& b, const Whole<std::uint64_t>& request, bool aborted) {
            const RequestId id{request("request")};
            const FinishReason how = aborted ? FinishReason::kAborted : FinishReason::kCompleted;
            Use(b).with([&](auto& s) { s.finished(id, how); });
          },
          "request"_a, "aborted"_a = false,
          R"(The request is over; jobs in flight keep their blocks.

Args:
    request: The request.
    aborted: It was ended from outside.

Raises:
    ArgumentError: A number does not fit; of a checked scheduler also an unknown request, or acquired blocks not taken.
    ClosedError: After `close`, or in a forked child.)")
      .def(
          "end_step",
          [](BoundScheduler& b) {
            const Use use(b);
            BoundPlan out;
            const GilFree released;
            use.with([&](auto& s) { out.plan = s.end_step(monotonic_now()); });
            return out;
          },
          R"(Sends the step's lookups as one call and hands over the step's jobs.

Returns:
    The plan, for every worker; often empty.

Raises:
    ArgumentError: Of a checked scheduler: acquired blocks, released blocks or load ends have not been taken.
    ClosedError: After `close`, or in a forked child.)")
      .def(
          "report",
          [](BoundScheduler& b, nb::handle data) {
            const Use use(b);
            const EncodedBytes encoded(data, "data");
            const GilFree released;
            return use.with([&](auto& s) { return s.report(encoded.bytes(), monotonic_now()); });
          },
          "data"_a, nb::sig("def report(self, data: bytes | bytearray | memoryview) -> bool"),
          R"(Takes in reports of workers.

Args:
    data: One or several reports, one behind the other.

Returns:
    False when some of it could not be taken, and was counted as `reports_malformed` or `reports_foreign`.

Raises:
    ArgumentError: `data` is no contiguous bytes.
    MismatchError: Of a checked scheduler, instead of False; the rest has been taken.
    ClosedError: After `close`, or in a forked child.)")
      .def(
          "rank_gone",
          [](BoundScheduler& b, const Whole<std::uint32_t>& rank) {
            ProblemList problems;
            const Rank gone{rank("rank", problems)};
            problems.throw_if_any(ErrorCode::kInvalidArgument, kScheduler);
            Use(b).with([&](auto& s) { s.rank_gone(gone, monotonic_now()); });
          },
          "rank"_a,
          R"(Says that a worker's process has ended, and its memory with it, so that no block waits for it.

Of all jobs planned so far the rank counts as failed and quiet. Never for a process that may live: its calls would go on
in blocks that are somebody else's. A worker that takes its place must get no plan of before.

Args:
    rank: Its number.

Raises:
    ArgumentError: A number does not fit; of a checked scheduler also a rank that the configuration does not have.
    ClosedError: After `close`, or in a forked child.)")
      .def(
          "take_load_ends",
          [](BoundScheduler& b) {
            std::vector<LoadEnd> ends;
            Use(b).with([&](auto& s) { s.take_load_ends(ends); });
            return ends;
          },
          R"(Loads that have ended since the last call.

Returns:
    A list; each load appears once.

Raises:
    ClosedError: After `close`, or in a forked child.)")
      .def(
          "take_changes",
          [](BoundScheduler& b) {
            std::vector<StoreChange> changes;
            Use(b).with([&](auto& s) { s.take_changes(changes); });
            return changes;
          },
          R"(What every rank has stored, and what a load no longer found or found damaged, or a lookup no longer found, since the last call.

Returns:
    A list, in order; empty unless `tell_changes` was set.

Raises:
    ClosedError: After `close`, or in a forked child.)")
      .def(
          "saving_requests",
          [](BoundScheduler& b) {
            std::vector<RequestId> requests;
            Use(b)->saving_requests(requests);
            nb::set out;
            for (const RequestId request : requests) out.add(nb::int_(raw(request)));
            return out;
          },
          nb::sig("def saving_requests(self) -> set[int]"),
          R"(Requests of which a save is in flight: changes may still name these and no other one that has finished.

Returns:
    Their numbers.

Raises:
    ClosedError: After `close`, or in a forked child.)")
      .def(
          "take_acquired",
          [](BoundScheduler& b) {
            std::vector<BlockId> ids;
            Use(b).with([&](auto& s) { s.take_acquired(ids); });
            return to_array(std::move(ids));
          },
          R"(Blocks that need one more reference, to be added before any block is freed.

Returns:
    Block ids, in order; an id may appear more than once.

Raises:
    ClosedError: After `close`, or in a forked child.)")
      .def(
          "take_released",
          [](BoundScheduler& b) {
            std::vector<BlockId> ids;
            Use(b).with([&](auto& s) { s.take_released(ids); });
            return to_array(std::move(ids));
          },
          R"(Blocks that need one reference less.

Returns:
    Block ids, in order; an id may appear more than once.

Raises:
    ArgumentError: Of a checked scheduler: acquired blocks have not been taken.
    ClosedError: After `close`, or in a forked child.)")
      .def(
          "has_pending_work",
          [](BoundScheduler& b) {
            return Use(b).with([](auto& s) { return s.has_pending_work(); });
          },
          "True while the engine must keep stepping: a job is not quiet, or something waits to be "
          "taken.")
      .def(
          "tracked", [](BoundScheduler& b) { return Use(b)->tracked(); },
          "Requests, jobs and lookups that are remembered; 0 at the end of a clean run.")
      .def(
          "health", [](BoundScheduler& b) { return describe(Use(b)->health()); },
          R"(How the store is doing, as of the last step. Each change is one log line.

Returns:
    "healthy", "off", or "degraded: " and the reasons.

Raises:
    ClosedError: After `close`, or in a forked child.)")
      .def(
          "flight_record",
          [](BoundScheduler& b, const Whole<std::size_t>& most) {
            return Use(b)->flight_record().text(most("most"));
          },
          "most"_a = FlightRecorder::kEvents,
          R"(The last events: seconds before the last one, what happened, and three numbers.

Args:
    most: At most so many events.

Returns:
    A line for each, oldest first.

Raises:
    ArgumentError: A number does not fit.
    ClosedError: After `close`, or in a forked child.)")
      .def(
          "counters",
          [](BoundScheduler& b) {
            nb::dict out = to_dict(Use(b)->counters());
            out["block_ids_read"] = b.rows.ids_read();
            return out;
          },
          nb::sig("def counters(self) -> dict[str, int | dict[str, int]]"),
          "Counters by name; those of the jobs under 'ledger', count and sum of durations by name.")
      .def(
          "durations",
          [](BoundScheduler& b) {
            const StoreSchedulerCounters c = Use(b)->counters();
            nb::dict out;
            out["lookup_time"] = to_dict(c.lookup_time);
            out["load_time"] = to_dict(c.load_time);
            out["save_time"] = to_dict(c.save_time);
            return out;
          },
          nb::sig("def durations(self) -> dict[str, dict[str, int]]"),
          R"(Histograms of durations.

Returns:
    By name of the duration: "count", "sum_us", and how many took at most so many microseconds and more than the bound
    before it, "up_to_us_" and the bound.

Raises:
    ClosedError: After `close`, or in a forked child.)")
      .def(
          "close",
          [](BoundScheduler& b, double timeout_seconds) {
            const Duration budget = to_duration(timeout_seconds, "timeout_seconds");
            const ExclusiveUse exclusive(b.in_use, kScheduler);
            const GilFree released;
            return b.close(budget).unquiet;
          },
          "timeout_seconds"_a = 5.0,
          R"(Ends lookups; every later call but this one raises ClosedError.

Args:
    timeout_seconds: Longest wait for lookups in flight.

Returns:
    Lookups that did not end.

Raises:
    ArgumentError: The timeout is below 0, or another call runs.)");
}

}  // namespace kvprism::bindings
