// The worker of the C interface.
#include <algorithm>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "c_api/guard.h"
#include "c_api/handles.h"
#include "store/give_back.h"

using namespace kvprism;         // NOLINT(google-build-using-namespace): functions outside of any
using namespace kvprism::c_api;  // NOLINT(google-build-using-namespace)

namespace {

class CallerReady final : public ReadySource {
 public:
  explicit CallerReady(const kvprism_ready& ready) noexcept : ready_(ready) {}
  ~CallerReady() override {
    if (ready_.destroy != nullptr) ready_.destroy(ready_.context);
  }
  CallerReady(const CallerReady&) = delete;
  CallerReady& operator=(const CallerReady&) = delete;

  ReadyState query() noexcept override {
    switch (ready_.query(ready_.context)) {
      case KVPRISM_READY:
        return ReadyState::kReady;
      case KVPRISM_READY_PENDING:
        return ReadyState::kPending;
      case KVPRISM_READY_FAILED:
        break;
    }
    return ReadyState::kFailed;
  }

 private:
  kvprism_ready ready_;
};

// Owns the caller's token from here on, whatever becomes of the call.
std::shared_ptr<ReadySource> take_ready(const kvprism_ready* ready) {
  if (ready == nullptr) return nullptr;
  try {
    return std::make_shared<CallerReady>(*ready);
  } catch (...) {
    if (ready->destroy != nullptr) ready->destroy(ready->context);
    throw;
  }
}

}  // namespace

kvprism_status kvprism_worker_options_init(kvprism_worker_options* options, size_t struct_size,
                                           kvprism_error** error) {
  const StoreWorkerOptions defaults;
  return init("kvprism_worker_options_init", options, struct_size,
              kvprism_worker_options{.struct_size = 0,
                                     .rank = raw(defaults.rank),
                                     .max_segments_per_call = defaults.max_segments_per_call,
                                     .max_bytes_per_call = defaults.max_bytes_per_call,
                                     .max_gets_in_flight = defaults.max_gets_in_flight,
                                     .max_puts_in_flight = defaults.max_puts_in_flight,
                                     .max_queued_jobs = defaults.max_queued_jobs,
                                     .max_bytes_in_flight = defaults.max_bytes_in_flight,
                                     .pump_thread = true,
                                     .only = defaults.only},
              error);
}

kvprism_status kvprism_worker_new(const kvprism_key_schema* schema, const kvprism_segment_map* map,
                                  kvprism_store* store, const kvprism_worker_options* options,
                                  kvprism_worker** worker, kvprism_error** error) {
  return guarded(error, [&] {
    Arguments arguments("kvprism_worker_new");
    arguments.need(schema, "schema");
    arguments.need(map, "map");
    arguments.need(store, "store");
    arguments.need_struct(options, "options");
    arguments.need(worker, "worker");
    arguments.check();
    StoreWorkerOptions wanted;
    wanted.rank = Rank{options->rank};
    wanted.max_segments_per_call = options->max_segments_per_call;
    wanted.max_bytes_per_call = options->max_bytes_per_call;
    wanted.max_gets_in_flight = options->max_gets_in_flight;
    wanted.max_puts_in_flight = options->max_puts_in_flight;
    wanted.max_queued_jobs = options->max_queued_jobs;
    wanted.max_bytes_in_flight = options->max_bytes_in_flight;
    wanted.only = options->only;
    auto made = std::make_unique<kvprism_worker>();
    made->store = store->store;
    made->worker = std::make_shared<StoreWorker>(schema->shared, map->shared, store->store, wanted);
    if (options->pump_thread) {
      try {
        made->pump = std::make_unique<PumpThread>(made->worker, store->store);
      } catch (...) {
        kvprism::detail::give_regions_back(*store->store, map->shared->regions());
      }
    }
    *worker = made.release();
  });
}

kvprism_status kvprism_worker_submit(kvprism_worker* worker, const void* plan, size_t length,
                                     const kvprism_ready* ready, kvprism_error** error) {
  return guarded(error, [&] {
    const std::shared_ptr<ReadySource> source = take_ready(ready);
    Arguments arguments("kvprism_worker_submit");
    arguments.need(worker, "worker");
    arguments.need_array(plan, length, "plan", "length", kMostMessage);
    if (length == 0) arguments.wrong("length", "0", "a plan: an empty one goes nowhere");
    if (ready != nullptr)
      arguments.need(reinterpret_cast<const void*>(ready->query), "ready.query");
    arguments.check();
    std::vector<std::uint64_t> aligned;
    const std::span<const std::byte> bytes = aligned_bytes(plan, length, aligned);
    const SubmitResult result =
        worker->worker->submit(bytes, source ? ReadyToken::source(source) : ReadyToken::host());
    if (worker->pump) worker->pump->notify();
    if (!result.accepted) {
      throw Error(ErrorCode::kMismatch, "kvprism_worker_submit: step plan", result.problems);
    }
  });
}

kvprism_status kvprism_worker_poll(kvprism_worker* worker, const void** report, size_t* length,
                                   kvprism_error** error) {
  return guarded(error, [&] {
    Arguments arguments("kvprism_worker_poll");
    arguments.need(worker, "worker");
    arguments.need(report, "report");
    arguments.need(length, "length");
    arguments.check();
    if (worker->pump) worker->seen = worker->pump->moves();
    worker->encoded.clear();
    while (worker->worker->poll(worker->report)) {
      encode(worker->report, worker->one);
      worker->encoded.insert(worker->encoded.end(), worker->one.begin(), worker->one.end());
    }
    *report = worker->encoded.data();
    *length = worker->encoded.size();
  });
}

kvprism_status kvprism_worker_wait(kvprism_worker* worker, int64_t longest_ns,
                                   kvprism_error** error) {
  return guarded(error, [&] {
    Arguments arguments("kvprism_worker_wait");
    arguments.need(worker, "worker");
    if (worker != nullptr && !worker->pump)
      arguments.wrong("worker", "no pump thread", "one made with pump_thread");
    arguments.check();
    worker->pump->wait_moved(worker->seen, Duration{std::max<std::int64_t>(longest_ns, 0)});
  });
}

kvprism_status kvprism_worker_pump(kvprism_worker* worker, int64_t now_ns, bool* moved,
                                   kvprism_error** error) {
  return guarded(error, [&] {
    Arguments arguments("kvprism_worker_pump");
    arguments.need(worker, "worker");
    if (worker != nullptr && worker->pump)
      arguments.wrong("worker", "a pump thread", "one made without pump_thread");
    arguments.need(moved, "moved");
    arguments.check();
    *moved = worker->worker->pump(Instant{now_ns});
  });
}

kvprism_status kvprism_worker_close(kvprism_worker* worker, int64_t now_ns, int64_t budget_ns,
                                    uint64_t* unquiet, kvprism_error** error) {
  return guarded(error, [&] {
    Arguments arguments("kvprism_worker_close");
    arguments.need(worker, "worker");
    arguments.need(unquiet, "unquiet");
    arguments.check();
    const Duration budget{std::max<std::int64_t>(budget_ns, 0)};
    const CloseReport report =
        worker->pump ? worker->pump->stop(budget) : worker->worker->close(Instant{now_ns}, budget);
    *unquiet = report.unquiet;
  });
}

void kvprism_worker_free(kvprism_worker* worker) { delete worker; }
