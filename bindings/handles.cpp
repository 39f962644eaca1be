#include "handles.h"

#include <nanobind/stl/shared_ptr.h>

#include <unistd.h>

#include <algorithm>

#include "kvprism/backend/clock.h"
#include "kvprism/base/error.h"

namespace kvprism::bindings {
namespace {

[[noreturn]] void closed_error(const char* subject) {
  fail(ErrorCode::kClosed, subject, {"state", "closed", "an open " + std::string(subject), {}});
}

[[noreturn]] void forked_error(const char* subject, const char* what) {
  fail(ErrorCode::kClosed, subject,
       {"process", "a forked child", std::string("the process that made the ") + what, {}});
}

}  // namespace

StoreHandle::StoreHandle(std::shared_ptr<ObjectStore> store, std::shared_ptr<ObjectIndex> index)
    : store_(std::move(store)), index_(std::move(index)) {}

std::shared_ptr<ObjectStore> StoreHandle::take_store() {
  const std::lock_guard lock(mutex_);
  if (closed_) closed_error("object store");
  if (store_taken_) {
    fail(ErrorCode::kInvalidArgument, "object store",
         {"store", "in use", "a store that no worker uses",
          "make one store object for each worker"});
  }
  store_taken_ = true;
  return store_;
}

std::shared_ptr<ObjectIndex> StoreHandle::take_index() {
  const std::lock_guard lock(mutex_);
  if (closed_) closed_error("object store");
  if (index_taken_) {
    fail(ErrorCode::kInvalidArgument, "object store",
         {"index", "in use", "an index that no scheduler uses",
          "make one store object for each scheduler"});
  }
  index_taken_ = true;
  return index_;
}

void StoreHandle::return_store() {
  const std::lock_guard lock(mutex_);
  store_taken_ = false;
}

void StoreHandle::return_index() {
  const std::lock_guard lock(mutex_);
  index_taken_ = false;
}

// Waits without the mutex: others ask for it with the GIL.
CloseReport StoreHandle::close(Duration budget) {
  bool index = false;
  bool store = false;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    index = !index_taken_;
    store = !store_taken_;
  }
  const Instant until = monotonic_now() + budget;
  CloseReport report;
  if (index) report = index_->close_index(budget);
  if (store) {
    CloseReport more = store_->close_store(std::max(Duration{}, until - monotonic_now()));
    report.unquiet += more.unquiet;
    report.ops.insert(report.ops.end(), more.ops.begin(), more.ops.end());
  }
  return report;
}

ExclusiveUse::ExclusiveUse(std::atomic<bool>& in_use, const char* subject) : in_use_(in_use) {
  if (in_use.exchange(true, std::memory_order_acquire)) {
    fail(ErrorCode::kInvalidArgument, subject,
         {"thread", "a second one", "one call at a time", {}});
  }
}

BoundScheduler::BoundScheduler(std::shared_ptr<const KeySchema> schema,
                               std::shared_ptr<StoreHandle> store,
                               const StoreSchedulerOptions& wanted, std::uint32_t width,
                               const std::string& flight_record_path,
                               const std::optional<std::string>& record_to, bool checked)
    : hash_width(width), handle_(store), index_(store->take_index()), owner_(getpid()) {
  try {
    StoreSchedulerOptions options = wanted;
    if (!flight_record_path.empty()) {
      flight_ = std::make_unique<FlightFile>(flight_record_path);
      options.flight = flight_->sink();
    }
    if (record_to) {
      // What is refused leaves no file behind.
      StoreScheduler::check(*schema, options);
      recording_ = std::make_unique<RunFile>(*record_to);
      options.record = recording_->sink();
    }
    if (checked) {
      auto made = std::make_shared<CheckedScheduler>(std::move(schema), index_, options);
      checked_ = made.get();
      scheduler_ = std::move(made);
    } else {
      scheduler_ = std::make_shared<StoreScheduler>(std::move(schema), index_, options);
    }
  } catch (...) {
    store->return_index();
    throw;
  }
}

const std::shared_ptr<StoreScheduler>& BoundScheduler::shared() {
  if (closed_) closed_error("store scheduler");
  if (owner_ != getpid()) forked_error("store scheduler", "scheduler");
  return scheduler_;
}

CloseReport BoundScheduler::close(Duration budget) {
  closed_ = true;
  const Instant until = monotonic_now() + budget;
  CloseReport report = index_->close_index(budget);
  handle_->close(std::max(Duration{}, until - monotonic_now()));
  return report;
}

BoundWorker::BoundWorker(const std::shared_ptr<const KeySchema>& schema, nb::handle map,
                         const std::shared_ptr<StoreHandle>& store,
                         const StoreWorkerOptions& options)
    : map_object_(nb::borrow(map)),
      map_(nb::cast<std::shared_ptr<const SegmentMap>>(map)),
      handle_(store),
      store_(store->take_store()),
      owner_(getpid()) {
  try {
    // Registers memory, which takes a while; the Python objects behind the arguments stay alive.
    const GilFree released;
    worker_ = std::make_shared<StoreWorker>(schema, map_, store_, options);
  } catch (const Error& error) {
    store->return_store();
    if (error.code() == ErrorCode::kTimedOut) {
      // A native call may still be registering the memory: kept until the process ends.
      nb::set_leak_warnings(false);
      map_object_.release();
    }
    throw;
  } catch (...) {
    store->return_store();
    throw;
  }
}

BoundWorker::~BoundWorker() {
  CloseReport report;
  {
    const GilFree released(GilFree::WhenExiting::kKeepGil);
    report = close_once({});
  }
  if (report.unquiet == 0) return;
  // Kept on purpose until the process ends, so no leak to warn of.
  nb::set_leak_warnings(false);
  map_object_.release();
}

// The thread does not exist in a forked child, and Mooncake does not work there.
void BoundWorker::check_open() const {
  if (closed_) closed_error("store worker");
  if (owner_ != getpid()) forked_error("store worker", "worker");
}

PumpThread& BoundWorker::pump() {
  check_open();
  if (adopted_) {
    fail(ErrorCode::kInvalidArgument, "store worker",
         {"owner", "a simulated engine", "a worker of one's own", "the engine submits and polls"});
  }
  if (PumpThread* const thread = running_) return *thread;
  const std::lock_guard lock(mutex_);
  return start();
}

// With the mutex held.
PumpThread& BoundWorker::start() {
  check_open();
  if (!pump_) pump_ = std::make_unique<PumpThread>(worker_, store_);
  running_ = pump_.get();
  return *pump_;
}

void BoundWorker::collect(std::vector<std::byte>& out) {
  WorkerReport report;
  std::vector<std::byte> encoded;
  while (worker_->poll(report)) {
    encode(report, encoded);
    out.insert(out.end(), encoded.begin(), encoded.end());
    report.clear();
  }
}

// Works after close() too, which leaves a last report of what it cancelled.
std::vector<std::byte> BoundWorker::poll() {
  std::vector<std::byte> out;
  collect(out);
  return out;
}

std::vector<std::byte> BoundWorker::wait(Duration longest) {
  const Instant until = monotonic_now() + longest;
  std::vector<std::byte> out;
  PumpThread& thread = pump();
  while (true) {
    const std::uint64_t seen = thread.moves();
    collect(out);
    const Duration left = until - monotonic_now();
    if (!out.empty() || left.ns <= 0 || closed_) return out;
    thread.wait_moved(seen, left);
  }
}

CloseReport BoundWorker::close_once(Duration budget) {
  closed_ = true;
  const std::lock_guard lock(mutex_);
  if ((ended_ && close_report_.unquiet == 0) || owner_ != getpid()) return close_report_;
  ended_ = true;
  const Instant until = monotonic_now() + budget;
  const auto left = [&] { return std::max(Duration{}, until - monotonic_now()); };
  const auto ask = [&] {
    return pump_ ? pump_->stop(left()) : worker_->close(monotonic_now(), left());
  };
  close_report_.unquiet = 1;  // until it is known
  close_report_ = ask();
  handle_->close(left());
  // The connection has ended with it, and what it held.
  if (close_report_.unquiet != 0) close_report_ = ask();
  return close_report_;
}

CloseReport BoundWorker::close(Duration budget) {
  if (adopted_ && !closed_) {
    fail(ErrorCode::kInvalidArgument, "store worker",
         {"owner", "a simulated engine", "a worker of one's own", "close the engine"});
  }
  return close_once(budget);
}

CloseReport BoundWorker::close_adopted(Duration budget) { return close_once(budget); }

std::shared_ptr<StoreWorker> BoundWorker::adopt() {
  check_open();  // whoever closes holds the mutex for a while
  const std::lock_guard lock(mutex_);
  check_open();
  if (pump_) {
    fail(
        ErrorCode::kInvalidArgument, "store worker",
        {"owner", adopted_ ? "another engine" : "the caller", "a worker that nobody has used", {}});
  }
  start();
  adopted_ = true;
  return worker_;
}

}  // namespace kvprism::bindings
