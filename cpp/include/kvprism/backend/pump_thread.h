// The thread that moves a store worker along where the engine does not do it itself.
#pragma once

#include <cstdint>
#include <memory>

#include "kvprism/base/export.h"
#include "kvprism/io/object_store.h"
#include "kvprism/run/instant.h"
#include "kvprism/store/store_worker.h"

namespace kvprism {

struct PumpThreadOptions {
  Duration busy_interval =
      milliseconds(1);  // longest sleep while a job has no outcome: ready tokens and timeouts
  Duration idle_interval = milliseconds(200);  // longest sleep otherwise
};

// One thread, "kvp-pump", which alone pumps and closes the worker. It blocks every signal and never
// calls Python. Ownership: shares the worker. Threads: any. Errors: the constructor throws Error
// (kInvalidArgument), also while another PumpThread of the worker lives.
class KVPRISM_API PumpThread {
 public:
  // Takes over the wakeup of `store`, the worker's own; null: the store is polled at the intervals.
  PumpThread(std::shared_ptr<StoreWorker> worker, const std::shared_ptr<ObjectStore>& store,
             const PumpThreadOptions& options = {});
  // Stops without a budget for what is in flight.
  ~PumpThread();
  PumpThread(const PumpThread&) = delete;
  PumpThread& operator=(const PumpThread&) = delete;

  // There is something to do, e.g. a plan was submitted.
  void notify() noexcept;

  // How often pumping has moved something; to be read before poll() and then given to wait_moved().
  std::uint64_t moves() const noexcept;
  // Exceptions while pumping or closing: each is logged, and pumping goes on.
  std::uint64_t errors() const noexcept;
  // Waits until moves() differs from `seen`, or the thread has ended, or `longest` has passed. True
  // in the first two.
  bool wait_moved(std::uint64_t seen, Duration longest) const;

  // Closes the worker with `budget` and ends the thread. If the worker has not come back a second
  // after it, the thread is left behind, and counted as one unquiet operation until it is back. A
  // later call tells what is unquiet then, and waits for it within its own budget.
  // In a forked child it returns at once.
  CloseReport stop(Duration budget);

 private:
  struct State;
  struct Handle;
  bool end_thread(Duration budget);
  std::shared_ptr<State> state_;
  std::unique_ptr<Handle> handle_;
};

}  // namespace kvprism
