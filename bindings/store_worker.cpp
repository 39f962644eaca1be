// StoreWorker.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "counters.h"
#include "handles.h"
#include "kvprism/backend/clock.h"
#include "whole.h"

namespace kvprism::bindings {

using namespace nb::literals;

namespace {

// None when there is nothing to hand on.
nb::object report_or_none(const std::vector<std::byte>& report) {
  if (report.empty()) return nb::none();
  return nb::bytes(report.data(), report.size());
}

}  // namespace

void bind_store_worker(nb::module_& m) {
  nb::class_<BoundWorker>(m, "StoreWorker",
                          R"(One rank's side of the store: carries plans out and reports.

A thread of its own moves the jobs along from the first `submit` on. Calls may come from any thread, and those that wait
or copy run without the GIL.)")
      .def(
          "__init__",
          [](BoundWorker* self, std::shared_ptr<const KeySchema> schema,
             nb::handle_t<SegmentMap> segment_map, std::shared_ptr<StoreHandle> store,
             const Whole<std::uint32_t>& rank, const Whole<std::uint32_t>& max_segments_per_call,
             const Whole<std::uint64_t>& max_bytes_per_call,
             const Whole<std::uint32_t>& max_gets_in_flight,
             const Whole<std::uint32_t>& max_puts_in_flight,
             const Whole<std::uint32_t>& max_queued_jobs,
             const Whole<std::uint64_t>& max_bytes_in_flight, bool only) {
            ProblemList problems;
            StoreWorkerOptions options;
            options.rank = Rank{rank("rank", problems)};
            options.max_segments_per_call =
                max_segments_per_call("max_segments_per_call", problems);
            options.max_bytes_per_call = max_bytes_per_call("max_bytes_per_call", problems);
            options.max_gets_in_flight = max_gets_in_flight("max_gets_in_flight", problems);
            options.max_puts_in_flight = max_puts_in_flight("max_puts_in_flight", problems);
            options.max_queued_jobs = max_queued_jobs("max_queued_jobs", problems);
            options.max_bytes_in_flight = max_bytes_in_flight("max_bytes_in_flight", problems);
            options.only = only;
            problems.throw_if_any(ErrorCode::kInvalidConfig, "store worker");
            new (self) BoundWorker(schema, segment_map, store, options);
          },
          "schema"_a, "segment_map"_a, "store"_a, nb::kw_only(), "rank"_a = 0,
          "max_segments_per_call"_a = 512, "max_bytes_per_call"_a = 64u << 20,
          "max_gets_in_flight"_a = 4, "max_puts_in_flight"_a = 2, "max_queued_jobs"_a = 65536,
          "max_bytes_in_flight"_a = std::uint64_t{1} << 30, "only"_a = false,
          R"(Takes the store side of `store` and registers the memory of `segment_map` with it.

Args:
    schema: Names the objects; of the same configuration as the scheduler's.
    segment_map: Where the blocks lie. Its memory must stay mapped until `close` has returned 0.
    store: Where objects are put and got; no other worker may use it.
    rank: Number of this worker, from 0: its place among tp x pp x pcp.
    max_segments_per_call: Pieces of memory per call to the store.
    max_bytes_per_call: Bytes per call to the store.
    max_gets_in_flight: Calls at a time.
    max_puts_in_flight: Calls at a time.
    max_queued_jobs: Jobs submitted and not yet seen by the thread.
    max_bytes_in_flight: Bytes of calls that are not quiet beyond which saves wait, and loads do not; 0 for no limit.
    only: No worker of this process has had jobs of this scheduler before: what the scheduler asks about and this one does
        not know is over. Otherwise that holds of jobs from its first plan on.

Raises:
    Error: An option is out of range, the configurations differ, or the memory cannot be registered.)")
      .def(
          "submit",
          [](BoundWorker& w, const BoundPlan& plan, const ReadyToken& ready) {
            return w.submit(plan.plan.view(), ready);
          },
          "plan"_a, "ready"_a, nb::call_guard<GilFree>(),
          R"(Takes a plan that was made in this process.

Args:
    plan: Of the scheduler's `end_step`; copied.
    ready: Says when the bytes that the plan saves are in memory.

Returns:
    Whether the plan was accepted. The jobs of a refused one are reported as failed, unless it was taken before.

Raises:
    ArgumentError: A simulated engine has taken the worker over.
    ClosedError: After `close`, or in a forked child.)")
      .def(
          "submit",
          [](BoundWorker& w, nb::handle data, const ReadyToken& ready) {
            const EncodedBytes encoded(data, "plan");
            const GilFree released;
            return w.submit(encoded.bytes(), ready);
          },
          "plan"_a, "ready"_a,
          nb::sig("def submit(self, plan: bytes | bytearray | memoryview, ready: ReadyToken) -> "
                  "SubmitResult"),
          R"(Takes an encoded plan, as bytes or a buffer.

Raises:
    ArgumentError: `plan` is no contiguous bytes, or a simulated engine has taken the worker over.
    ClosedError: After `close`, or in a forked child.)")
      .def(
          "poll",
          [](BoundWorker& w) {
            std::vector<std::byte> report;
            {
              const GilFree released;
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
                const GilFree released;
                report = w.wait(std::min(left, milliseconds(100)));
              }
              // What has been taken would be lost with an exception.
              if (report.empty() && PyErr_CheckSignals() != 0) throw nb::python_error();
            }
            return report_or_none(report);
          },
          "timeout_seconds"_a, nb::sig("def wait(self, timeout_seconds: float) -> bytes | None"),
          R"(Waits, without the GIL, for something to happen.

Args:
    timeout_seconds: Longest wait.

Returns:
    A report for the scheduler, or None when nothing has happened.

Raises:
    ArgumentError: The timeout is below 0, or a simulated engine has taken the worker over.
    ClosedError: After `close`, or in a forked child.)")
      .def(
          "counters", [](BoundWorker& w) { return to_dict(w.counters()); },
          nb::sig("def counters(self) -> dict[str, int]"), "Counters by name.")
      .def(
          "group_counters",
          [](BoundWorker& w) {
            nb::list out;
            for (const StoreGroupCounters& group : w.group_counters()) out.append(to_dict(group));
            return out;
          },
          nb::sig("def group_counters(self) -> list[dict[str, int | dict[str, int]]]"),
          R"(What this rank has moved of each group's blocks, in the order of the configuration's groups.)")
      .def(
          "close",
          [](BoundWorker& w, double timeout_seconds) {
            const Duration budget = to_duration(timeout_seconds, "timeout_seconds");
            const GilFree released;
            return w.close(budget).unquiet;
          },
          "timeout_seconds"_a = 5.0,
          R"(Starts nothing new, cancels what has not started, and waits for the rest.

A last report can be polled afterwards; other calls raise ClosedError.

Args:
    timeout_seconds: Longest wait.

Returns:
    Calls that may still touch the memory, which must then stay mapped: a kept reference to the segment map sees to it.
    A later call tells how many are left.

Raises:
    ArgumentError: The timeout is below 0, or a simulated engine has taken the worker over.)");
}

}  // namespace kvprism::bindings
