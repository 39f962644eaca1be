#include "kvprism/backend/blocking_store.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <list>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "kvprism/base/error.h"
#include "kvprism/base/log.h"
#include "region_table.h"

namespace kvprism {
namespace {

using Clock = std::chrono::steady_clock;
using TimePoint = Clock::time_point;
using Lock = std::unique_lock<std::mutex>;

constexpr std::string_view kSubject = "store client";

enum Kind : std::size_t { kPut = 0, kGet = 1, kLook = 2 };
constexpr std::size_t kKinds = 3;
enum Side : std::size_t { kStore = 0, kIndex = 1 };
constexpr std::size_t kSides = 2;

constexpr Side side_of(Kind kind) noexcept { return kind == kLook ? kIndex : kStore; }
constexpr std::array<const char*, kKinds> kLaneNames = {"kvp-put", "kvp-get", "kvp-look"};

std::chrono::nanoseconds to_chrono(Duration duration) noexcept {
  return std::chrono::nanoseconds(duration.ns);
}

// Far deadlines of the caller's clock must not overflow ours.
TimePoint after(TimePoint now, Duration duration) noexcept {
  constexpr std::chrono::hours kFar{24 * 365};
  return now + std::min<std::chrono::nanoseconds>(to_chrono(duration), kFar);
}

// Signals belong to the engine's threads; those that a thread causes itself stay deliverable.
void set_up_thread(const char* name) noexcept {
  pthread_setname_np(pthread_self(), name);
  sigset_t blocked;
  sigfillset(&blocked);
  for (const int own : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGSYS, SIGPROF}) {
    sigdelset(&blocked, own);
  }
  pthread_sigmask(SIG_SETMASK, &blocked, nullptr);
}

std::string message_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& known) {
    return known.what();
  } catch (...) {
    return "unknown exception";
  }
}

// A thread that says when it is about to end, so that only finished ones are joined.
struct Worker {
  std::jthread thread;
  bool done = false;  // guarded by the core's mutex
};

}  // namespace

struct BlockingStore::Core : std::enable_shared_from_this<BlockingStore::Core> {
  struct Request {
    OpId op{};
    std::unique_ptr<ObjectBatch> batch;
    TimePoint deadline;
  };

  // An operation whose outcome was reported while native code may still use its memory.
  struct Unquiet {
    OpId op{};
    Kind kind{};
    std::unique_ptr<ObjectBatch> batch;
  };

  // One client with its threads, from set-up to tear-down.
  struct Generation {
    std::unique_ptr<BlockingClient> client;
    TimePoint born;
    std::array<Worker, kKinds> lanes;
    std::array<bool, kKinds> has_lane{};
    std::uint32_t busy = 0;  // threads inside a call
    bool retired = false;
    std::vector<Unquiet> unquiet;
  };

  struct Running {
    OpId op{};
    Kind kind{};
    std::unique_ptr<ObjectBatch> batch;
    std::vector<ItemResult> results;  // written by the native call
    TimePoint began;
    bool abandoned = false;  // its outcome was reported before the call returned
    std::shared_ptr<Generation> generation;
  };

  Core(BlockingClientFactory make, BlockingStoreOptions opts)
      : factory(std::move(make)), options(opts), pid(::getpid()) {}

  const BlockingClientFactory factory;
  const BlockingStoreOptions options;
  const pid_t pid;
  StoreCapabilities capabilities{};

  // Held for the length of native registrations, and before `mutex` where both are.
  std::mutex regions_mutex;
  detail::RegionTable regions;

  mutable std::mutex mutex;  // guards everything below
  std::condition_variable care_wakes;
  std::array<std::condition_variable, kKinds> lane_wakes;
  std::condition_variable changed;  // a completion, an end of a call, of a thread, of a client
  std::shared_ptr<Generation> current;
  std::array<std::deque<Request>, kKinds> queues;
  std::vector<std::shared_ptr<Running>> running;
  std::array<std::deque<Completion>, kSides> completions;
  Wakeup wakeup;
  std::array<std::vector<OpId>, kSides> unquiet;
  std::array<bool, kSides> used{};
  std::array<bool, kSides> closed{};
  bool finished = false;  // no client will be made any more
  bool stop_care = false;
  TimePoint care_wake = TimePoint::max();
  std::unique_ptr<Worker> maker;
  std::exception_ptr make_error;
  std::list<Worker> graves;
  std::thread care;
  std::uint32_t failures = 0;         // in a row, also of clients that died young
  std::uint32_t failed_attempts = 0;  // in a row, to make a client
  TimePoint next_attempt = TimePoint::min();
  std::uint64_t jitter = 0x9E3779B97F4A7C15u;
  BlockingStoreCounters counters;

  bool in_child() const noexcept { return ::getpid() != pid; }

  // ---- completions ----

  static std::vector<ItemResult> all(const ObjectBatch& batch, ItemStatus status) {
    return std::vector<ItemResult>(batch.keys.size(), ItemResult{status, 0});
  }

  void publish(Kind kind, Completion completion) {
    completions[side_of(kind)].push_back(std::move(completion));
    changed.notify_all();
    if (wakeup.call != nullptr) wakeup.call(wakeup.context);
  }

  void end_unstarted(Kind kind, OpId op, std::unique_ptr<ObjectBatch> batch, ItemStatus status) {
    Completion completion;
    completion.op = op;
    completion.outcome = true;
    completion.quiet = true;
    completion.items = all(*batch, status);
    completion.batch = std::move(batch);
    publish(kind, std::move(completion));
  }

  void end_queue(Kind kind, ItemStatus status) {
    for (Request& request : queues[kind]) {
      end_unstarted(kind, request.op, std::move(request.batch), status);
    }
    queues[kind].clear();
  }

  void mark_unquiet(Kind kind, OpId op) {
    unquiet[side_of(kind)].push_back(op);
    ++counters.unquiet_now;
  }

  // Reports the outcome of a call that has not returned; its client goes.
  void abandon(Running& call, ItemStatus status) {
    call.abandoned = true;
    Completion completion;
    completion.op = call.op;
    completion.outcome = true;
    completion.items = all(*call.batch, status);
    mark_unquiet(call.kind, call.op);
    publish(call.kind, std::move(completion));
    retire(call.generation);
  }

  // ---- clients ----

  void retire(const std::shared_ptr<Generation>& generation) {
    if (generation->retired) return;
    generation->retired = true;
    ++counters.retired_now;
    if (current == generation) {
      current = nullptr;
      for (std::size_t kind = 0; kind < kKinds; ++kind) {
        end_queue(static_cast<Kind>(kind), ItemStatus::kUnavailable);
      }
      // A client that dies young is replaced more and more slowly.
      const TimePoint now = Clock::now();
      if (now - generation->born >= to_chrono(options.max_retry)) failures = 0;
      next_attempt = failures == 0 ? now : now + pause();
      ++failures;
    }
    for (std::condition_variable& wake : lane_wakes) wake.notify_all();
    wake_care();
    Worker& grave = graves.emplace_back();
    try {
      grave.thread = std::jthread([core = shared_from_this(), generation, &grave] {
        set_up_thread("kvp-grave");
        core->bury(generation);
        const Lock lock(core->mutex);
        grave.done = true;
        core->care_wakes.notify_all();
        core->changed.notify_all();
      });
    } catch (const std::exception& error) {
      // Without a thread the client is never torn down, so what is unquiet stays so: held, never
      // wrong.
      graves.pop_back();
      for (Worker& lane : generation->lanes) {
        if (lane.thread.joinable()) lane.thread.detach();
      }
      log(LogLevel::kError, std::string("no thread to tear a store client down: ") + error.what());
    }
  }

  void bury(const std::shared_ptr<Generation>& generation) {
    {
      Lock lock(mutex);
      changed.wait(lock, [&] {
        if (generation->busy != 0) return false;
        for (std::size_t kind = 0; kind < kKinds; ++kind) {
          if (generation->has_lane[kind] && !generation->lanes[kind].done) return false;
        }
        return true;
      });
    }
    for (Worker& lane : generation->lanes) {
      if (lane.thread.joinable()) lane.thread.join();
    }
    generation->client->tear_down();
    generation->client.reset();
    const Lock lock(mutex);
    for (Unquiet& operation : generation->unquiet) {
      Completion completion;
      completion.op = operation.op;
      completion.quiet = true;
      completion.batch = std::move(operation.batch);
      auto& list = unquiet[side_of(operation.kind)];
      list.erase(std::find(list.begin(), list.end(), operation.op));
      --counters.unquiet_now;
      publish(operation.kind, std::move(completion));
    }
    generation->unquiet.clear();
    --counters.retired_now;
    changed.notify_all();
  }

  // Doubles with every failure, and varies by a quarter so that many workers do not come back at
  // once (R51).
  std::chrono::nanoseconds pause() noexcept {
    const unsigned doublings = std::min(failures == 0 ? 0u : failures - 1, 20u);
    const std::int64_t base = std::min(options.first_retry.ns << doublings, options.max_retry.ns);
    jitter ^= jitter << 13;
    jitter ^= jitter >> 7;
    jitter ^= jitter << 17;
    return std::chrono::nanoseconds(base - base / 8 +
                                    static_cast<std::int64_t>(jitter % 1024) * base / 4096);
  }

  void start_maker() {
    maker = std::make_unique<Worker>();
    maker->thread = std::jthread([core = shared_from_this(), worker = maker.get()] {
      set_up_thread("kvp-make");
      core->make_client();
      const Lock lock(core->mutex);
      worker->done = true;
      core->care_wakes.notify_all();
      core->changed.notify_all();
    });
  }

  void make_client() {
    auto generation = std::make_shared<Generation>();
    std::exception_ptr error;
    try {
      generation->client = factory();
      if (generation->client == nullptr) {
        fail(ErrorCode::kUnavailable, kSubject, {"factory", "null", "a client", {}});
      }
      const std::lock_guard registration(regions_mutex);
      for (const Region& region : regions.regions()) generation->client->register_region(region);
      // Published before the next add_region can look for a client.
      const Lock lock(mutex);
      if (!finished) {
        generation->born = Clock::now();
        if (capabilities.name.empty()) {
          capabilities = generation->client->capabilities();
        } else {
          ++counters.replacements;
        }
        current = std::move(generation);
        failed_attempts = 0;
        changed.notify_all();
        return;
      }
    } catch (...) {
      error = std::current_exception();
    }
    if (generation->client != nullptr) generation->client->tear_down();
    if (error == nullptr) return;
    const Lock lock(mutex);
    make_error = error;
    ++counters.failed_attempts;
    ++failed_attempts;
    ++failures;
    log(LogLevel::kWarning, "no store client: " + message_of(error));
    next_attempt = Clock::now() + pause();
  }

  // ---- lanes ----

  void ensure_lane(const std::shared_ptr<Generation>& generation, Kind kind) {
    if (generation->has_lane[kind]) return;
    Worker& lane = generation->lanes[kind];
    lane.thread = std::jthread([core = shared_from_this(), generation, kind, &lane] {
      set_up_thread(kLaneNames[kind]);
      core->serve(generation, kind);
      const Lock lock(core->mutex);
      lane.done = true;
      core->changed.notify_all();
    });
    generation->has_lane[kind] = true;
  }

  void serve(const std::shared_ptr<Generation>& generation, Kind kind) {
    Lock lock(mutex);
    auto& queue = queues[kind];
    for (;;) {
      lane_wakes[kind].wait(lock, [&] { return generation->retired || !queue.empty(); });
      if (generation->retired) return;
      Request request = std::move(queue.front());
      queue.pop_front();
      const TimePoint now = Clock::now();
      if (now >= request.deadline) {
        ++counters.expired;
        end_unstarted(kind, request.op, std::move(request.batch), ItemStatus::kTimedOut);
        continue;
      }
      auto call = std::make_shared<Running>();
      call->op = request.op;
      call->kind = kind;
      call->batch = std::move(request.batch);
      call->results.resize(call->batch->keys.size());
      call->began = now;
      call->generation = generation;
      running.push_back(call);
      ++generation->busy;
      count(*call);
      if (now + to_chrono(options.stuck_after) < care_wake) wake_care();

      lock.unlock();
      const CallEnd end = perform(*generation->client, *call);
      lock.lock();

      --generation->busy;
      running.erase(std::find(running.begin(), running.end(), call));
      finish(*call, end);
      changed.notify_all();
    }
  }

  static CallEnd perform(BlockingClient& client, Running& call) noexcept {
    switch (call.kind) {
      case kPut:
        return client.put(*call.batch, call.results);
      case kGet:
        return client.get(*call.batch, call.results);
      case kLook:
        break;
    }
    return client.exists(*call.batch, call.results);
  }

  void count(const Running& call) noexcept {
    const std::size_t items = call.batch->keys.size();
    switch (call.kind) {
      case kPut:
        ++counters.put_calls;
        counters.put_items += items;
        return;
      case kGet:
        ++counters.get_calls;
        counters.get_items += items;
        return;
      case kLook:
        ++counters.exists_calls;
        counters.exists_items += items;
        return;
    }
  }

  // The call has returned: everything it wrote is visible to whoever takes the completion under the
  // mutex (R56).
  void finish(Running& call, CallEnd end) {
    Generation& generation = *call.generation;
    if (call.abandoned) {
      generation.unquiet.push_back({call.op, call.kind, std::move(call.batch)});
      return;
    }
    std::uint64_t bytes = 0;
    for (const ItemResult& item : call.results) bytes += item.bytes;
    if (call.kind == kPut) counters.put_bytes += bytes;
    if (call.kind == kGet) counters.get_bytes += bytes;

    Completion completion;
    completion.op = call.op;
    completion.outcome = true;
    completion.quiet = end.quiet;
    completion.items = std::move(call.results);
    if (end.quiet) {
      completion.batch = std::move(call.batch);
    } else {
      ++counters.unquiet_calls;
      mark_unquiet(call.kind, call.op);
      generation.unquiet.push_back({call.op, call.kind, std::move(call.batch)});
    }
    publish(call.kind, std::move(completion));
    if (!end.quiet || end.broken) {
      log(LogLevel::kWarning, std::string("a store client is replaced: a call of ") +
                                  kLaneNames[call.kind] + " came back " +
                                  (end.quiet ? "broken" : "without being quiet"));
      retire(call.generation);
    }
  }

  // ---- care ----

  void wake_care() {
    care_wake = TimePoint::min();
    care_wakes.notify_all();
  }

  void watch() {
    set_up_thread("kvp-care");
    Lock lock(mutex);
    while (!stop_care) {
      const TimePoint now = Clock::now();
      TimePoint next = now + std::chrono::hours(1);
      for (std::size_t kind = 0; kind < kKinds; ++kind) {
        expire(static_cast<Kind>(kind), now, next);
      }
      watch_calls(now, next);
      reap();
      consider_attempt(now, next);
      care_wake = next;
      care_wakes.wait_until(
          lock, next, [&] { return stop_care || care_wake == TimePoint::min() || can_reap(); });
    }
  }

  void expire(Kind kind, TimePoint now, TimePoint& next) {
    auto& queue = queues[kind];
    for (auto at = queue.begin(); at != queue.end();) {
      if (at->deadline > now) {
        next = std::min(next, at->deadline);
        ++at;
        continue;
      }
      ++counters.expired;
      end_unstarted(kind, at->op, std::move(at->batch), ItemStatus::kTimedOut);
      at = queue.erase(at);
    }
  }

  void watch_calls(TimePoint now, TimePoint& next) {
    for (const std::shared_ptr<Running>& call : running) {
      if (call->abandoned) continue;
      const TimePoint limit = call->began + to_chrono(options.stuck_after);
      if (limit > now) {
        next = std::min(next, limit);
        continue;
      }
      ++counters.stuck_calls;
      log(LogLevel::kWarning, std::string("a store client is replaced: a call of ") +
                                  kLaneNames[call->kind] + " does not return");
      abandon(*call, ItemStatus::kTimedOut);
    }
  }

  bool can_reap() const {
    return (maker != nullptr && maker->done) ||
           std::any_of(graves.begin(), graves.end(),
                       [](const Worker& grave) { return grave.done; });
  }

  // The threads have released the mutex for good when `done` is seen under it, so joining them is
  // short.
  void reap() {
    if (maker != nullptr && maker->done) maker.reset();
    for (auto grave = graves.begin(); grave != graves.end();) {
      grave = grave->done ? graves.erase(grave) : std::next(grave);
    }
  }

  void consider_attempt(TimePoint now, TimePoint& next) {
    if (current != nullptr || finished || maker != nullptr) return;
    if (options.max_attempts != 0 && failed_attempts >= options.max_attempts) return;
    if (counters.retired_now >= options.max_retired) return;
    if (next_attempt > now) {
      next = std::min(next, next_attempt);
      return;
    }
    try {
      start_maker();
    } catch (const std::exception&) {
      maker.reset();
      next_attempt = now + to_chrono(options.max_retry);
      next = std::min(next, next_attempt);
    }
  }

  // ---- calls ----

  bool start(Kind kind, OpId op, std::unique_ptr<ObjectBatch>& batch, Instant now,
             Instant deadline) {
    if (in_child() || batch == nullptr) return false;
    const Lock lock(mutex);
    if (closed[side_of(kind)] || finished) return false;
    used[side_of(kind)] = true;
    if (current == nullptr) {
      ++counters.circuit_open;
      end_unstarted(kind, op, std::move(batch), ItemStatus::kUnavailable);
      return true;
    }
    if (deadline <= now) {
      ++counters.expired;
      end_unstarted(kind, op, std::move(batch), ItemStatus::kTimedOut);
      return true;
    }
    if (queues[kind].size() >= options.queue_limit) {
      ++counters.queue_full;
      return false;
    }
    try {
      ensure_lane(current, kind);
    } catch (const std::exception&) {
      ++counters.circuit_open;
      end_unstarted(kind, op, std::move(batch), ItemStatus::kUnavailable);
      return true;
    }
    const TimePoint limit = after(Clock::now(), deadline - now);
    queues[kind].push_back({op, std::move(batch), limit});
    lane_wakes[kind].notify_all();
    if (limit < care_wake) wake_care();
    return true;
  }

  bool poll(Side side, Completion& out) {
    if (in_child()) return false;
    const Lock lock(mutex);
    auto& list = completions[side];
    if (list.empty()) return false;
    out = std::move(list.front());
    list.pop_front();
    return true;
  }

  bool idle(Side side) const {
    for (std::size_t kind = 0; kind < kKinds; ++kind) {
      if (side_of(static_cast<Kind>(kind)) == side && !queues[kind].empty()) return false;
    }
    return std::none_of(running.begin(), running.end(), [&](const auto& call) {
      return side_of(call->kind) == side && !call->abandoned;
    });
  }

  // No client will be made any more, and the present one goes.
  void finish_clients() {
    finished = true;
    if (current != nullptr) retire(std::shared_ptr<Generation>(current));
    wake_care();
  }

  CloseReport close(Side side, Duration budget) {
    if (in_child()) return {};
    const TimePoint end = after(Clock::now(), budget);
    Lock lock(mutex);
    closed[side] = true;
    changed.wait_until(lock, end, [&] { return idle(side) && unquiet[side].empty(); });
    for (std::size_t kind = 0; kind < kKinds; ++kind) {
      if (side_of(static_cast<Kind>(kind)) == side) {
        end_queue(static_cast<Kind>(kind), ItemStatus::kCancelled);
      }
    }
    for (const std::shared_ptr<Running>& call : running) {
      if (side_of(call->kind) == side && !call->abandoned) abandon(*call, ItemStatus::kCancelled);
    }
    const Side other = side == kStore ? kIndex : kStore;
    if (closed[other] || !used[other]) {
      closed[other] = true;
      finish_clients();
      changed.wait_until(lock, end, [&] { return counters.retired_now == 0; });
    }
    return {unquiet[side].size(), unquiet[side]};
  }

  // Ends and joins what ends in time; what hangs keeps this object alive and goes on alone.
  void leave(TimePoint end) {
    std::vector<std::jthread> joinable;
    {
      Lock lock(mutex);
      finish_clients();
      const auto all_done = [&] {
        return (maker == nullptr || maker->done) &&
               std::all_of(graves.begin(), graves.end(),
                           [](const Worker& grave) { return grave.done; });
      };
      changed.wait_until(lock, end, all_done);
      stop_care = true;
      care_wakes.notify_all();
    }
    if (care.joinable()) care.join();
    const Lock lock(mutex);
    if (maker != nullptr) {
      if (!maker->done) {
        maker->thread.detach();
      } else {
        joinable.push_back(std::move(maker->thread));
      }
    }
    for (Worker& grave : graves) {
      if (grave.done) {
        joinable.push_back(std::move(grave.thread));
      } else {
        grave.thread.detach();
      }
    }
  }
};

BlockingStore::BlockingStore(BlockingClientFactory factory, BlockingStoreOptions options)
    : core_(std::make_shared<Core>(std::move(factory), options)) {
  ProblemList problems;
  const auto positive = [&](Duration duration, const char* path) {
    if (duration.ns <= 0) problems.add(path, std::to_string(duration.ns), "positive nanoseconds");
  };
  positive(options.stuck_after, "stuck_after");
  positive(options.setup_timeout, "setup_timeout");
  positive(options.first_retry, "first_retry");
  positive(options.max_retry, "max_retry");
  if (options.queue_limit == 0) problems.add("queue_limit", "0", "at least 1");
  if (options.max_retired == 0) problems.add("max_retired", "0", "at least 1");
  if (!core_->factory) problems.add("factory", "empty", "a callable");
  problems.throw_if_any(ErrorCode::kInvalidConfig, "blocking store options");

  Core& core = *core_;
  std::exception_ptr error;
  {
    Lock lock(core.mutex);
    core.start_maker();
    core.changed.wait_until(lock, after(Clock::now(), options.setup_timeout),
                            [&] { return core.current != nullptr || core.maker->done; });
    if (core.current == nullptr) {
      error = core.maker->done ? core.make_error : nullptr;
      if (error == nullptr) {
        error = std::make_exception_ptr(
            Error(ErrorCode::kTimedOut, std::string(kSubject),
                  {{"set-up", "no client",
                    "one within " + std::to_string(options.setup_timeout.ns / 1'000'000) + " ms",
                    "the service accepts connections but does not answer"}}));
      }
    } else {
      core.failures = 0;
    }
  }
  if (error != nullptr) {
    core.leave(Clock::now());
    std::rethrow_exception(error);
  }
  core.care = std::thread([core = core_.get()] { core->watch(); });
}

BlockingStore::~BlockingStore() {
  if (core_->in_child()) {
    // The threads live in the parent only: neither they nor their handles may be touched here
    // (R71).
    static_cast<void>(new std::shared_ptr<Core>(core_));
    return;
  }
  const TimePoint end = after(Clock::now(), core_->options.close_budget);
  const auto left = [&] {
    return Duration{std::max<std::int64_t>(0, (end - Clock::now()) / std::chrono::nanoseconds(1))};
  };
  core_->close(kStore, left());
  core_->close(kIndex, left());
  core_->leave(end);
}

StoreCapabilities BlockingStore::capabilities() const { return core_->capabilities; }

void BlockingStore::add_region(const Region& region) {
  const auto refuse = [&](ErrorCode code, std::string expected) {
    fail(code, kSubject,
         {"region", std::to_string(region.length) + " bytes", std::move(expected), {}});
  };
  Core& core = *core_;
  if (core.in_child()) refuse(ErrorCode::kClosed, "the process that made the store");
  if (region.base == nullptr || region.length == 0) {
    refuse(ErrorCode::kInvalidArgument, "an address and a positive length");
  }
  const std::lock_guard registration(core.regions_mutex);
  switch (core.regions.fit(region)) {
    case detail::RegionTable::Fit::kEqual:
      return;
    case detail::RegionTable::Fit::kOverlap:
      refuse(ErrorCode::kInvalidArgument, "no overlap with another region");
      break;
    case detail::RegionTable::Fit::kNew:
      break;
  }
  std::shared_ptr<Core::Generation> generation;
  {
    const Lock lock(core.mutex);
    generation = core.current;
    if (generation != nullptr) ++generation->busy;
  }
  if (generation == nullptr) refuse(ErrorCode::kUnavailable, "a usable client");
  const auto release = [&] {
    const Lock lock(core.mutex);
    --generation->busy;
    core.changed.notify_all();
  };
  try {
    generation->client->register_region(region);
    core.regions.insert(region);
  } catch (...) {
    release();
    throw;
  }
  release();
}

void BlockingStore::remove_region(const Region& region) {
  Core& core = *core_;
  if (core.in_child()) return;
  const std::lock_guard registration(core.regions_mutex);
  if (!core.regions.erase(region)) return;
  std::shared_ptr<Core::Generation> generation;
  {
    const Lock lock(core.mutex);
    generation = core.current;
    if (generation == nullptr) return;
    ++generation->busy;
  }
  generation->client->unregister_region(region);
  const Lock lock(core.mutex);
  --generation->busy;
  core.changed.notify_all();
}

bool BlockingStore::start_put(OpId op, std::unique_ptr<ObjectBatch>& batch, Instant now,
                              Instant deadline) {
  return core_->start(kPut, op, batch, now, deadline);
}

bool BlockingStore::start_get(OpId op, std::unique_ptr<ObjectBatch>& batch, Instant now,
                              Instant deadline) {
  return core_->start(kGet, op, batch, now, deadline);
}

void BlockingStore::set_wakeup(Wakeup wakeup) {
  const Lock lock(core_->mutex);
  core_->wakeup = wakeup;
}

bool BlockingStore::poll_store(Instant, Completion& out) { return core_->poll(kStore, out); }

CloseReport BlockingStore::close_store(Duration budget) { return core_->close(kStore, budget); }

bool BlockingStore::start_exists(OpId op, std::unique_ptr<ObjectBatch>& batch, Instant now,
                                 Instant deadline) {
  return core_->start(kLook, op, batch, now, deadline);
}

bool BlockingStore::poll_index(Instant, Completion& out) { return core_->poll(kIndex, out); }

CloseReport BlockingStore::close_index(Duration budget) { return core_->close(kIndex, budget); }

bool BlockingStore::wait_for_completion(Duration budget) {
  Core& core = *core_;
  if (core.in_child()) return false;
  Lock lock(core.mutex);
  return core.changed.wait_until(lock, after(Clock::now(), budget), [&] {
    return !core.completions[kStore].empty() || !core.completions[kIndex].empty();
  });
}

BlockingStoreCounters BlockingStore::counters() const {
  if (core_->in_child()) return {};
  const Lock lock(core_->mutex);
  BlockingStoreCounters counters = core_->counters;
  counters.usable = core_->current != nullptr;
  return counters;
}

}  // namespace kvprism
