// What passes between scheduler and workers.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <optional>

#include "handles.h"
#include "ids.h"
#include "kvprism/base/error.h"
#include "kvprism/spec/spec_registry.h"
#include "kvprism/store/replay_run.h"
#include "text.h"

namespace kvprism::bindings {

using namespace nb::literals;

namespace {

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
  plan.asked.assign(view.asked.begin(), view.asked.end());
  return bound;
}

nb::bytes encoded(const BoundPlan& bound) {
  std::vector<std::byte> bytes;
  encode(bound.plan.view(), bytes);
  return nb::bytes(bytes.data(), bytes.size());
}

std::vector<std::int32_t> blocks_of(const BoundPlan& bound, std::uint64_t job) {
  std::vector<std::int32_t> ids;
  const StepPlanView plan = bound.plan.view();
  for (const JobRecord& record : plan.jobs) {
    if (raw(record.id) != job) continue;
    for (const RunRecord& run : plan.runs.subspan(record.first_run, record.num_runs)) {
      for (const BlockId id : plan.ids.subspan(run.first_id, run.count)) ids.push_back(raw(id));
    }
  }
  return ids;
}

ReadyToken event_token(std::uintptr_t event, std::uintptr_t query, int not_ready,
                       std::uintptr_t destroy, std::uintptr_t bind, int device) {
  if (query == 0)
    fail(ErrorCode::kInvalidArgument, "ready token",
         {"query", "0", "the address of a function", {}});
  DeviceEventApi api{};
  api.query = reinterpret_cast<int (*)(void*)>(query);
  api.not_ready = not_ready;
  api.destroy = reinterpret_cast<void (*)(void*)>(destroy);
  api.bind = reinterpret_cast<int (*)(int)>(bind);
  api.device = device;
  return ReadyToken::device_event(reinterpret_cast<void*>(event), api);
}

void bind_step_plan(nb::module_& m) {
  nb::class_<BoundPlan>(m, "StepPlan",
                        R"(The jobs of one engine step, from the scheduler to the workers.

In one process the object itself is submitted. It pickles as its encoded bytes.)")
      .def(
          "__len__", [](const BoundPlan& p) { return p.plan.jobs.size(); }, "Number of jobs.")
      .def(
          "__bool__", [](const BoundPlan& p) { return !p.plan.empty(); },
          "True when there is something to tell a worker: a job, or a question about an earlier "
          "one.")
      .def_prop_ro(
          "step", [](const BoundPlan& p) { return p.plan.step; },
          "Number of the engine step, from 1.")
      .def_prop_ro(
          "epoch", [](const BoundPlan& p) { return p.plan.epoch; },
          "The scheduler's random number.")
      .def_prop_ro(
          "num_blocks", [](const BoundPlan& p) { return p.plan.ids.size(); },
          "Blocks that the jobs move.")
      .def("blocks", &blocks_of, "job"_a, R"(Where one job reads or writes.

Args:
    job: Its number.

Returns:
    Block ids in the order of the plan; none when the plan has no such job.)")
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
      .def_static("failed", &ReadyToken::failed,
                  R"(The bytes were not written, e.g. because the step has failed.

Returns:
    A token with which a plan's jobs end as failed, without a call.)")
      .def_static("device_event", &event_token, "event"_a, "query"_a, "not_ready"_a,
                  "destroy"_a = 0, "bind"_a = 0, "device"_a = 0,
                  R"(A device event that was recorded after the writes.

Args:
    event: Handle of the event, as an integer.
    query: Address of a C function `int query(void *event)` that answers 0 when the event has happened,
        such as cudaEventQuery. It is called from a thread of the worker, without the GIL.
    not_ready: What `query` answers before, such as 600 (cudaErrorNotReady); anything else is an error.
    destroy: Address of `void destroy(void *event)`; 0 when the caller keeps the event alive.
    bind: Address of `int bind(int device)`, such as cudaSetDevice: called before `query` and `destroy`,
        because the worker's thread is on no device of its own; answers 0. 0 where nothing is needed.
    device: What `bind` is given.

Returns:
    A token that becomes ready with the event.

Raises:
    Error: `query` is 0.)");

  nb::class_<FailedBlock>(m, "FailedBlock", "A block that a load should have filled and did not.")
      .def_prop_ro(
          "group", [](const FailedBlock& b) { return box(b.group); },
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

  nb::class_<StoreChange>(m, "StoreChange",
                          "A chunk that every rank has stored, or one that is no longer there.")
      .def_ro("stored", &StoreChange::stored, "False: it is gone.")
      .def_prop_ro(
          "request", [](const StoreChange& c) { return raw(c.request); },
          "The request that stored or missed it.")
      .def_prop_ro(
          "group", [](const StoreChange& c) { return box(c.group); },
          "Index of the group in the configuration.")
      .def_ro("chunk", &StoreChange::chunk, "Position of its block in the request's table.")
      .def_ro("tokens", &StoreChange::tokens, "Length of the prefix that ends with it.")
      .def_prop_ro(
          "hash", [](const StoreChange& c) { return nb::bytes(c.hash.data(), c.hash.size()); },
          "Hash of that prefix.")
      .def_prop_ro(
          "parent",
          [](const StoreChange& c) { return nb::bytes(c.parent.data(), c.parent.size()); },
          "Hash of the prefix shorter by a chunk, or by a hash unit where `tokens` ends inside a "
          "chunk; empty when there is none.");

  nb::class_<SubmitResult>(m, "SubmitResult",
                           "Whether a worker took a plan; true in a condition when it did.")
      .def(
          "__bool__", [](const SubmitResult& r) { return r.accepted; }, "Same as `accepted`.")
      .def_ro("accepted", &SubmitResult::accepted,
              "False: the plan's jobs are reported as failed and quiet, unless `repeated`.")
      .def_ro("refusal", &SubmitResult::refusal, "Why not, with both values; empty when accepted.")
      .def_ro("repeated", &SubmitResult::repeated,
              "Not accepted, and jobs of the plan were taken before: they may be running, and tell "
              "their ends themselves.");
}

}  // namespace

void bind_store_plan(nb::module_& m) {
  m.def(
      "replay_run",
      [](nb::handle data, const std::optional<SpecRegistry>& registry) {
        const EncodedBytes encoded(data, "recording");
        ReplayRunResult result;
        {
          const GilFree released;
          result = replay_run(encoded.bytes(), registry ? *registry : SpecRegistry::builtin());
        }
        nb::dict out;
        out["calls"] = result.calls;
        out["steps"] = result.steps;
        out["plans"] = result.plans;
        out["same"] = result.same;
        out["difference"] = result.difference;
        out["ignored_bytes"] = result.ignored_bytes;
        out["ended"] = result.ended;
        out["recorded_by"] = result.recorded_by;
        out["repeated_by"] = result.repeated_by;
        return out;
      },
      "recording"_a, "registry"_a = nb::none(),
      nb::sig("def replay_run(recording: bytes | bytearray | memoryview, registry: SpecRegistry | "
              "None = None) -> dict[str, int | bool | str]"),
      R"(Repeats what a StoreScheduler did, from the file that its `record_to` named.

Args:
    recording: The content of the file.
    registry: Knows the kinds of cache that the scheduler's engine has; None for the built-in ones.

Returns:
    "calls", "steps" and "plans" that were repeated; "same", whether every call did and returned what it had; the first
    "difference" otherwise; "ignored_bytes" of a last call that was cut off; "ended", whether the file says that nothing
    follows; "recorded_by" and "repeated_by", versions and compilers.

Raises:
    Error: The bytes are no recording of this version, go on behind its end, or name a kind that `registry` lacks.)");
  bind_step_plan(m);
  bind_tokens_and_ends(m);
}

}  // namespace kvprism::bindings
