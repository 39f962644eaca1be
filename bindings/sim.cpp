// What kvprism.sim re-exports: a simulated serving engine that knows what every byte it loads must
// be. Flat in the module, because a submodule would have no place in its type stub.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>

#include "areas.h"
#include "ids.h"
#include "kvprism/backend/clock.h"
#include "kvprism/base/error.h"
#include "sim_engine.h"
#include "text.h"
#include "whole.h"

namespace kvprism::bindings {
namespace {

using namespace nb::literals;

constexpr const char* kEngine = "simulated engine";

nb::dict to_dict(const JobMeter::Total& total) {
  nb::dict out;
  out["bytes"] = total.bytes;
  out["objects"] = total.objects;
  out["duplicates"] = total.duplicates;
  out["failed_chunks"] = total.failed_chunks;
  out["seconds"] = static_cast<double>(total.busy.ns) * 1e-9;
  return out;
}

nb::dict to_dict(const sim::EngineStats& s) {
  nb::list groups;
  for (const sim::GroupStats& group : s.groups) {
    nb::dict row;
    row["chunks_saved"] = group.chunks_saved;
    row["chunks_loaded"] = group.chunks_loaded;
    row["bytes_loaded"] = group.bytes_loaded;
    row["bytes_mismatched"] = group.bytes_mismatched;
    groups.append(row);
  }
  nb::dict out;
  out["steps"] = s.steps;
  out["submitted"] = s.submitted;
  out["finished"] = s.finished;
  out["aborted"] = s.aborted;
  out["rejected"] = s.rejected;
  out["preemptions"] = s.preemptions;
  out["prompt_tokens"] = s.prompt_tokens;
  out["local_hit_tokens"] = s.local_hit_tokens;
  out["external_hit_tokens"] = s.external_hit_tokens;
  out["computed_tokens"] = s.computed_tokens;
  out["generated_tokens"] = s.generated_tokens;
  out["loads_complete"] = s.loads_complete;
  out["loads_partial"] = s.loads_partial;
  out["loads_detached"] = s.loads_detached;
  out["jobs_saved"] = s.jobs_saved;
  out["jobs_loaded"] = s.jobs_loaded;
  out["bytes_verified"] = s.bytes_verified;
  out["bytes_mismatched"] = s.bytes_mismatched;
  out["groups"] = groups;
  return out;
}

// One call of the engine: open, and no other one running.
class Use {
 public:
  explicit Use(BoundEngine& bound) : exclusive_(bound.in_use, kEngine), engine_(bound.get()) {}
  sim::Engine* operator->() const noexcept { return &engine_; }

 private:
  ExclusiveUse exclusive_;
  sim::Engine& engine_;
};

void submit(BoundEngine& bound, const Whole<std::uint64_t>& request, nb::handle prompt,
            const Whole<std::uint32_t>& max_new_tokens) {
  const RequestId id{request("request")};
  const std::uint32_t most = max_new_tokens("max_new_tokens");
  const Use use(bound);
  bound.prompt.clear();
  append_tokens(prompt, "prompt", bound.prompt);
  const GilFree released;
  use->submit({id, std::move(bound.prompt), most});
}

// In slices, so that Ctrl-C is noticed.
bool run_until_idle(BoundEngine& bound, double timeout_seconds) {
  const Instant until = monotonic_now() + to_duration(timeout_seconds, "timeout_seconds");
  const ExclusiveUse exclusive(bound.in_use, kEngine);
  while (true) {
    bool idle = false;
    {
      const GilFree released;
      const Duration left = until - monotonic_now();
      idle = bound.run(std::clamp(left, Duration{0}, milliseconds(100)));
    }
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    if (idle || monotonic_now() >= until) return idle;
  }
}

void bind_memory(nb::module_& m) {
  nb::class_<BoundMemory>(
      m, "SimMemory",
      "The memory of a simulated rank, with guard bytes around every block and layer.")
      .def(
          "__init__",
          [](BoundMemory* self, std::shared_ptr<const Projection> projection,
             std::uint32_t guard_bytes,
             bool shadow) { new (self) BoundMemory(std::move(projection), {guard_bytes, shadow}); },
          "projection"_a, nb::kw_only(), "guard_bytes"_a = 64, "shadow"_a = false,
          R"(Allocates and poisons it.

Args:
    projection: Tells the groups and the number of blocks.
    guard_bytes: Between blocks, between layers and around it; a multiple of 8.
    shadow: Keep a second copy of what it should hold, for `Engine.check`.)")
      .def_prop_ro(
          "size_bytes", [](BoundMemory& m) { return m.memory.whole().size(); },
          "Bytes, guards included.")
      .def(
          "segment_map",
          [](BoundMemory& m) { return SegmentMap::make(m.projection, m.memory.tensors()); },
          nb::keep_alive<0, 1>(), R"(Where the blocks lie, for a worker.

Returns:
    A map that keeps this memory alive.)")
      .def(
          "array",
          [](BoundMemory& m) {
            const auto whole = m.memory.whole();
            return nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>(whole.data(), {whole.size()},
                                                                     nb::find(m));
          },
          R"(All of it, for tests that look or write where they should not.

Returns:
    A writable view that keeps this memory alive.)")
      .def(
          "page",
          [](BoundMemory& m, const PyGroupId& group, const Whole<std::uint32_t>& given_layer,
             const Whole<std::int32_t>& given_block) {
            const std::uint32_t layer = given_layer("layer");
            const std::int32_t block = given_block("block");
            const GroupId id = checked(group, m.projection->num_groups(), "GroupId");
            if (layer >= m.memory.num_layers(id)) throw nb::index_error("layer");
            if (block < 0 || static_cast<std::uint32_t>(block) >= m.projection->num_blocks())
              throw nb::index_error("block");
            const sim::PageShape& shape = m.memory.page_shape(id, layer);
            std::vector<std::byte> page(shape.bytes());
            sim::copy_page(shape, m.memory.page(id, layer, BlockId{block}),
                           sim::dense_view(shape, page.data()));
            return nb::bytes(page.data(), page.size());
          },
          "group"_a, "layer"_a, "block"_a, R"(A copy of one layer's page.

Args:
    group: The group whose page it is.
    layer: Position of the layer in the group.
    block: Id of the block.

Returns:
    Its bytes.)");
}

void bind_engine(nb::module_& m) {
  nb::class_<sim::FinishedRequest>(m, "SimFinishedRequest", "A request that has left the engine.")
      .def_prop_ro(
          "id", [](const sim::FinishedRequest& r) { return raw(r.id); }, "As submitted.")
      .def_ro("aborted", &sim::FinishedRequest::aborted, "Ended from outside.")
      .def_ro("rejected", &sim::FinishedRequest::rejected, "It can never fit.")
      .def_ro("prompt_tokens", &sim::FinishedRequest::prompt_tokens, "Length of its prompt.")
      .def_ro("local_hit_tokens", &sim::FinishedRequest::local_hit_tokens,
              "From the engine's own cache, at its first start.")
      .def_ro("external_hit_tokens", &sim::FinishedRequest::external_hit_tokens,
              "From the store, at its first start.")
      .def_ro("preemptions", &sim::FinishedRequest::preemptions, "How often it lost its blocks.")
      .def_ro("output", &sim::FinishedRequest::output,
              "Generated tokens, a function of the prompt.");

  nb::class_<BoundEngine>(m, "SimEngine",
                          R"(A simulated serving engine with a hybrid cache, in real time.

It makes the calls of a real engine in their order. What it computes is a function of the tokens, so it knows what every
loaded byte must be and compares all of them. One call at a time; calls that run it release the GIL.)")
      .def(
          "__init__",
          [](BoundEngine* self, std::shared_ptr<BoundScheduler> scheduler,
             std::shared_ptr<BoundWorker> worker, std::shared_ptr<BoundMemory> memory,
             bool local_cache, const Whole<std::uint32_t>& token_budget,
             const Whole<std::uint32_t>& max_running,
             const Whole<std::uint32_t>& max_model_tokens) {
            sim::EngineOptions options;
            options.local_cache = local_cache;
            options.token_budget = token_budget("token_budget");
            options.max_running = max_running("max_running");
            options.max_model_tokens = max_model_tokens("max_model_tokens");
            new (self)
                BoundEngine(std::move(scheduler), std::move(worker), std::move(memory), options);
          },
          "scheduler"_a, "worker"_a, "memory"_a, nb::kw_only(), "local_cache"_a = true,
          "token_budget"_a = 2048, "max_running"_a = 8, "max_model_tokens"_a = 1u << 20,
          R"(Takes over scheduler and worker.

Args:
    scheduler: Of one rank; used by the engine alone from now on.
    worker: Not used before; the engine submits, pumps and closes.
    memory: The memory behind the worker's segment map.
    local_cache: Keep a prefix cache of its own.
    token_budget: Tokens computed in a step.
    max_running: Requests computed in a step.
    max_model_tokens: Longest prompt with its output.

Raises:
    Error: The worker is in use, or the memory is not its own.)")
      .def("submit", &submit, "request"_a, "prompt"_a, "max_new_tokens"_a = 1,
           nb::sig(
               "def submit(self, request: int, prompt: object, max_new_tokens: int = 1) -> None"),
           R"(Adds a request.

Args:
    request: An id that no live request has.
    prompt: Token ids: a list, an integer array, or bytes that hold native 32-bit integers.
    max_new_tokens: Tokens to generate, at least 1.)")
      .def(
          "abort",
          [](BoundEngine& e, const Whole<std::uint64_t>& request) {
            const RequestId id{request("request")};
            Use(e)->abort(id);
          },
          "request"_a,
          R"(Ends a request; harmless for unknown ones.

Args:
    request: Its id.)")
      .def(
          "step",
          [](BoundEngine& e) {
            const ExclusiveUse exclusive(e.in_use, kEngine);
            const GilFree released;
            return e.step();
          },
          R"(Computes one step and moves loads and saves along.

Returns:
    False when there was nothing to do but wait for the store.)")
      .def("run_until_idle", &run_until_idle, "timeout_seconds"_a,
           R"(Steps until no request and no job is left.

Args:
    timeout_seconds: Longest time.

Returns:
    True when idle, False when the time is over.)")
      .def(
          "idle", [](BoundEngine& e) { return Use(e)->idle(); },
          "True when no request and no job is left.")
      .def(
          "unfinished", [](BoundEngine& e) { return Use(e)->unfinished(); },
          "Requests that have not left.")
      .def(
          "take_finished",
          [](BoundEngine& e) {
            std::vector<sim::FinishedRequest> finished;
            Use(e)->take_finished(finished);
            return finished;
          },
          R"(Requests that have left since the last call.

Returns:
    A list in the order of their leaving.)")
      .def(
          "stats",
          [](BoundEngine& e) {
            nb::dict out = to_dict(Use(e)->stats());
            out["loads"] = to_dict(e.meter().loads());
            out["saves"] = to_dict(e.meter().saves());
            return out;
          },
          nb::sig("def stats(self) -> dict[str, typing.Any]"),
          R"(What has happened so far.

Returns:
    Counters by name; 'groups' has a row for each group, 'loads' and 'saves' tell bytes and the seconds they took.)")
      .def(
          "verify_all",
          [](BoundEngine& e) {
            const Use use(e);
            const GilFree released;
            const sim::VerifyResult result = use->verify_all();
            return std::pair(result.bytes, result.mismatched);
          },
          R"(Compares everything the engine believes computed with what it must be.

Returns:
    Bytes compared, and bytes that differ.)")
      .def(
          "check", [](BoundEngine& e) { return Use(e)->check(); },
          "The first broken invariant, or an empty string. Needs a memory with a shadow.")
      .def(
          "describe", [](BoundEngine& e) { return Use(e)->describe(); },
          "Requests, blocks and jobs in one line.")
      .def(
          "close",
          [](BoundEngine& e, double timeout_seconds) {
            const Duration budget = to_duration(timeout_seconds, "timeout_seconds");
            const ExclusiveUse exclusive(e.in_use, kEngine);
            const GilFree released;
            return e.close(budget).unquiet;
          },
          "timeout_seconds"_a = 5.0,
          R"(Closes worker and scheduler; other calls raise ClosedError afterwards.

Args:
    timeout_seconds: Longest wait for calls to the store.

Returns:
    Calls that may still touch the memory.)");
}

struct BoundDetector {
  explicit BoundDetector(const Projection& projection) : detector(projection) {}

  RingDetector detector;
  std::atomic<bool> in_use = false;
};

constexpr const char* kDetector = "ring detector";

void bind_detector(nb::module_& m) {
  nb::class_<BoundDetector>(m, "SimRingDetector",
                            R"(Recognises bytes of scratch rings wherever they are.

Made from tokens alone: it knows nothing of keys, hashes, blocks or objects. One call at a
time: a second thread gets an ArgumentError.)")
      .def(
          "__init__",
          [](BoundDetector* self, const std::shared_ptr<const Projection>& projection) {
            new (self) BoundDetector(*projection);
          },
          "projection"_a, R"(Knows no tokens yet.

Args:
    projection: Tells which groups are rings.)")
      .def(
          "add",
          [](BoundDetector& d, nb::handle tokens) {
            std::vector<std::uint32_t> list;
            append_tokens(tokens, "tokens", list);
            const ExclusiveUse exclusive(d.in_use, kDetector);
            const GilFree released;
            d.detector.add(list);
          },
          "tokens"_a, nb::sig("def add(self, tokens: object) -> None"),
          R"(Learns what rings hold while these tokens are computed.

Args:
    tokens: A prompt with its output.)")
      .def_prop_ro(
          "patterns",
          [](BoundDetector& d) {
            const ExclusiveUse exclusive(d.in_use, kDetector);
            return d.detector.patterns();
          },
          "Beginnings of ring positions that are known.")
      .def(
          "count",
          [](BoundDetector& d, nb::handle data) {
            const BufferView view(data, "data");
            if (!view.contiguous()) throw nb::value_error("data must be contiguous");
            const ExclusiveUse exclusive(d.in_use, kDetector);
            const GilFree released;
            return d.detector.count({view.data(), view.bytes()});
          },
          "data"_a, nb::sig("def count(self, data: object) -> int"), R"(Looks for ring bytes.

Args:
    data: Bytes or a contiguous buffer, as read from a store.

Returns:
    How many aligned words begin a position of a ring.)");
}

}  // namespace

void bind_sim(nb::module_& module) {
  bind_memory(module);
  bind_engine(module);
  bind_detector(module);
}

}  // namespace kvprism::bindings
