// C++ objects behind the Python classes of the store path, shared by the files that bind them.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "converters.h"
#include "gil_free.h"
#include "kvprism/backend/fault_injection.h"
#include "kvprism/backend/flight_file.h"
#include "kvprism/backend/pump_thread.h"
#include "kvprism/backend/run_file.h"
#include "kvprism/checked/checked_scheduler.h"
#include "kvprism/io/object_store.h"
#include "kvprism/key/key_schema.h"
#include "kvprism/layout/segment_map.h"
#include "kvprism/store/store_scheduler.h"
#include "kvprism/store/store_worker.h"

namespace kvprism::bindings {

using Counters = std::map<std::string, std::uint64_t>;

// The two sides of a connection. Each is polled by one owner: a worker takes the store, a scheduler
// the index.
class StoreHandle {
 public:
  StoreHandle(std::shared_ptr<ObjectStore> store, std::shared_ptr<ObjectIndex> index);

  // Throw Error (kInvalidArgument) when it has been taken before, kClosed after close().
  std::shared_ptr<ObjectStore> take_store();
  std::shared_ptr<ObjectIndex> take_index();
  // Undo the taking, when the owner could not be made.
  void return_store();
  void return_index();
  StoreCapabilities capabilities() const { return store_->capabilities(); }
  // Closes the sides that nobody has taken, and refuses to be taken from then on. The owner of one
  // side calls it too when it closes, so that a connection with one owner ends with it.
  CloseReport close(Duration budget);

  std::function<Counters()> counters;  // empty: none
  std::function<Counters()> faults;    // empty: injects none
  std::function<void()> release_hung;

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<ObjectStore> store_;
  std::shared_ptr<ObjectIndex> index_;
  bool store_taken_ = false;
  bool index_taken_ = false;
  bool closed_ = false;
};

// A second call while one runs without the GIL is a mistake of the caller, and told as such.
class ExclusiveUse {
 public:
  ExclusiveUse(std::atomic<bool>& in_use, const char* subject);
  ~ExclusiveUse() { in_use_.store(false, std::memory_order_release); }
  ExclusiveUse(const ExclusiveUse&) = delete;
  ExclusiveUse& operator=(const ExclusiveUse&) = delete;

 private:
  std::atomic<bool>& in_use_;
};

struct BoundPlan {
  StepPlan plan;
};

class BoundScheduler {
 public:
  BoundScheduler(std::shared_ptr<const KeySchema> schema, std::shared_ptr<StoreHandle> store,
                 const StoreSchedulerOptions& options, std::uint32_t hash_width,
                 const std::string& flight_record_path, const std::optional<std::string>& record_to,
                 bool checked);

  // Throws Error (kClosed).
  const std::shared_ptr<StoreScheduler>& shared();
  // The same scheduler where its calls are checked; else null.
  CheckedScheduler* checked() const noexcept { return checked_; }
  CloseReport close(Duration budget);
  bool closed() const noexcept { return closed_; }
  bool records() const noexcept { return recording_ != nullptr; }

  std::atomic<bool> in_use{false};
  BlockRowsReader rows;
  std::vector<RowRange> row_ranges;
  HashListReader hashes;
  const std::uint32_t hash_width;

 private:
  std::shared_ptr<StoreHandle> handle_;
  std::shared_ptr<ObjectIndex> index_;
  std::unique_ptr<FlightFile> flight_;  // outlives the scheduler, as the next does
  std::unique_ptr<RunFile> recording_;
  std::shared_ptr<StoreScheduler> scheduler_;
  CheckedScheduler* checked_ = nullptr;
  const pid_t owner_;
  std::atomic<bool> closed_{false};
};

// Pumped by a thread of its own, which starts with the first submit. A simulated engine may take it
// over. Memory under calls that are not quiet is never given back: the map's Python object is then
// kept for ever.
class BoundWorker {
 public:
  BoundWorker(const std::shared_ptr<const KeySchema>& schema, nb::handle map,
              const std::shared_ptr<StoreHandle>& store, const StoreWorkerOptions& options);
  ~BoundWorker();
  BoundWorker(const BoundWorker&) = delete;
  BoundWorker& operator=(const BoundWorker&) = delete;

  // No call below needs the GIL.
  template <class Plan>
  SubmitResult submit(const Plan& plan, ReadyToken ready) {
    PumpThread& thread = pump();
    SubmitResult result = worker_->submit(plan, std::move(ready));
    thread.notify();
    return result;
  }
  // Every report there is, one behind the other; empty: none.
  std::vector<std::byte> poll();
  std::vector<std::byte> wait(Duration longest);
  StoreWorkerCounters counters() const { return worker_->counters(); }
  std::vector<StoreGroupCounters> group_counters() const { return worker_->group_counters(); }
  CloseReport close(Duration budget);

  // The caller submits and polls from now on, and closes with close_adopted(); the thread runs.
  // Throws Error when somebody has used the worker before.
  std::shared_ptr<StoreWorker> adopt();
  PumpThread& thread() noexcept { return *running_; }
  CloseReport close_adopted(Duration budget);
  const std::shared_ptr<const SegmentMap>& map() const noexcept { return map_; }

 private:
  void check_open() const;
  PumpThread& pump();
  PumpThread& start();
  void collect(std::vector<std::byte>& out);
  CloseReport close_once(Duration budget);

  nb::object map_object_;
  std::shared_ptr<const SegmentMap> map_;
  std::shared_ptr<StoreHandle> handle_;
  std::shared_ptr<ObjectStore> store_;
  std::shared_ptr<StoreWorker> worker_;
  const pid_t owner_;
  std::atomic<bool> closed_{false};
  std::atomic<bool> adopted_{false};
  std::atomic<PumpThread*> running_{nullptr};  // pump_, for readers without the mutex
  std::mutex mutex_;
  std::unique_ptr<PumpThread> pump_;
  bool ended_ = false;
  CloseReport close_report_;
};

// Parts of bind_store().
void bind_store_plan(
    nb::module_& module);  // store_plan.cpp: StepPlan, ReadyToken, LoadEnd, SubmitResult
void bind_store_scheduler(nb::module_& module);  // store_scheduler.cpp
void bind_store_worker(nb::module_& module);     // store_worker.cpp
void bind_store_loads(nb::module_& module);      // store_loads.cpp: RankLoads

}  // namespace kvprism::bindings
