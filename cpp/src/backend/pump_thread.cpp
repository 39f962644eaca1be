#include "kvprism/backend/pump_thread.h"

#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "backend/bounded_wait.h"
#include "backend/limited_log.h"
#include "backend/native_thread.h"
#include "kvprism/backend/clock.h"
#include "kvprism/backend/wake_signal.h"
#include "store/side_in_use.h"

namespace kvprism {
namespace {

// What a worker may need beyond its budget to come back.
constexpr Duration kGrace = seconds(1);

}  // namespace

struct PumpThread::State {
  State(std::shared_ptr<StoreWorker> pumped, detail::SideInUse<StoreWorker> use,
        const PumpThreadOptions& wanted)
      : in_use(std::move(use)), worker(std::move(pumped)), options(wanted) {}

  // A thread that was left behind still pumps: the worker is free when the last of both is gone.
  const detail::SideInUse<StoreWorker> in_use;
  const std::shared_ptr<StoreWorker> worker;
  const PumpThreadOptions options;
  WakeSignal signal;

  std::mutex mutex;
  std::condition_variable changed;  // moves or ended
  std::uint64_t moves = 0;
  std::uint64_t errors = 0;
  detail::LimitedLog lines;
  bool stopping = false;
  Duration budget;
  bool ended = false;
  CloseReport report;

  void count_move() {
    {
      const std::lock_guard lock(mutex);
      ++moves;
    }
    changed.notify_all();
  }
  bool must_stop() {
    const std::lock_guard lock(mutex);
    return stopping;
  }

  // Must not throw out of the thread: that would end the process.
  template <class Step>
  bool guarded(const char* what, Step&& step) noexcept {
    try {
      return step();
    } catch (const std::exception& error) {
      failed(what, error.what());
    } catch (...) {
      failed(what, "unknown exception");
    }
    return false;
  }
  void failed(const char* what, const char* why) noexcept {
    {
      const std::lock_guard lock(mutex);
      ++errors;
    }
    try {
      lines(LogLevel::kError, std::string(what) + ": " + why);
    } catch (...) {
      // No memory for a line either; it is counted.
      return;
    }
  }

  // Of the thread, and of whoever has the turn once that has ended.
  CloseReport close(Duration allowed) noexcept {
    CloseReport closed;
    // What could not be closed may go on: its memory must stay.
    if (!guarded("a store worker was not closed", [&] {
          closed = worker->close(monotonic_now(), allowed);
          return true;
        })) {
      closed.unquiet = std::max<std::size_t>(1, worker->counters().jobs_alive);
    }
    return closed;
  }

  void run() {
    while (!must_stop()) {
      if (guarded("the store worker goes on after an error",
                  [&] { return worker->pump(monotonic_now()); })) {
        count_move();
        continue;
      }
      signal.wait(worker->has_untold() ? options.busy_interval : options.idle_interval);
    }
    Duration allowed;
    {
      const std::lock_guard lock(mutex);
      allowed = budget;
    }
    CloseReport closed = close(allowed);
    {
      const std::lock_guard lock(mutex);
      report = std::move(closed);
      ended = true;
      ++moves;
    }
    changed.notify_all();
  }
};

struct PumpThread::Handle {
  std::mutex mutex;  // of the thread object
  std::jthread thread;
  pid_t owner = 0;  // the process that has the thread
  bool left_behind = false;
  bool told = false;  // what was unquiet when it was to end
};

PumpThread::PumpThread(std::shared_ptr<StoreWorker> worker,
                       const std::shared_ptr<ObjectStore>& store,
                       const PumpThreadOptions& options) {
  ProblemList problems;
  detail::SideInUse<StoreWorker> in_use(worker, "worker", "a store worker", problems,
                                        "one thread pumps it; destroy its other PumpThread first");
  if (options.busy_interval.ns <= 0)
    problems.add("busy_interval", std::to_string(options.busy_interval.ns) + " ns", "more than 0");
  if (options.idle_interval.ns <= 0)
    problems.add("idle_interval", std::to_string(options.idle_interval.ns) + " ns", "more than 0");
  problems.throw_if_any(ErrorCode::kInvalidArgument, "pump thread");
  state_ = std::make_shared<State>(std::move(worker), std::move(in_use), options);
  handle_ = std::make_unique<Handle>();
  if (store) store->set_wakeup(state_->signal.wakeup());
  // The thread shares its state: it may have to be left behind.
  handle_->thread = detail::start_thread("kvp-pump", [state = state_] { state->run(); });
  handle_->owner = getpid();
}

PumpThread::~PumpThread() {
  if (handle_->owner != getpid()) {
    // A forked child has no such thread; joining it would wait for ever.
    if (handle_->thread.joinable()) handle_->thread.detach();
    return;
  }
  const std::lock_guard turn(handle_->mutex);
  end_thread({});
}

void PumpThread::notify() noexcept { state_->signal.notify(); }

std::uint64_t PumpThread::moves() const noexcept {
  const std::lock_guard lock(state_->mutex);
  return state_->moves;
}

std::uint64_t PumpThread::errors() const noexcept {
  const std::lock_guard lock(state_->mutex);
  return state_->errors;
}

bool PumpThread::wait_moved(std::uint64_t seen, Duration longest) const {
  std::unique_lock lock(state_->mutex);
  return state_->changed.wait_for(lock, detail::bounded(longest),
                                  [&] { return state_->moves != seen || state_->ended; });
}

// With the turn. False: the thread is left behind.
bool PumpThread::end_thread(Duration budget) {
  State& state = *state_;
  std::unique_lock lock(state.mutex);
  if (!state.stopping) state.budget = budget;
  state.stopping = true;
  state.signal.notify();
  const Duration longest = handle_->left_behind ? Duration{} : state.budget + kGrace;
  const bool ended =
      state.changed.wait_for(lock, detail::bounded(longest), [&] { return state.ended; });
  lock.unlock();
  if (handle_->thread.joinable()) ended ? handle_->thread.join() : handle_->thread.detach();
  handle_->left_behind = !ended;
  return ended;
}

CloseReport PumpThread::stop(Duration budget) {
  if (handle_->owner != getpid()) return {};
  budget = std::clamp(budget, Duration{}, detail::kLongestWait);
  const std::lock_guard turn(handle_->mutex);  // later callers wait here for the first
  State& state = *state_;
  const bool ended = end_thread(budget);
  const bool again = std::exchange(handle_->told, true);
  if (!ended) return {1, {}};
  // The thread has gone: nobody else touches worker and report.
  if (again && state.report.unquiet != 0) state.report = state.close(budget);
  return state.report;
}

}  // namespace kvprism
