// What the parts of the blocking store share. Clients are made and torn down in
// blocking_clients.cpp, called in blocking_lanes.cpp, watched in blocking_care.cpp, given memory in
// blocking_regions.cpp.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "backend/region_table.h"
#include "backend/retry_pause.h"
#include "kvprism/backend/blocking_store.h"
#include "kvprism/base/error.h"
#include "kvprism/base/log.h"
#include "run/rate_limit.h"

namespace kvprism {
namespace detail {

using Clock = std::chrono::steady_clock;
using TimePoint = Clock::time_point;
using Lock = std::unique_lock<std::mutex>;

inline constexpr std::string_view kSubject = "store client";

enum Kind : std::size_t { kPut = 0, kGet = 1, kLook = 2 };
inline constexpr std::size_t kKinds = 3;
enum Side : std::size_t { kStore = 0, kIndex = 1 };
inline constexpr std::size_t kSides = 2;

constexpr Side side_of(Kind kind) noexcept { return kind == kLook ? kIndex : kStore; }
inline constexpr std::array<const char*, kKinds> kLaneNames = {"kvp-put", "kvp-get", "kvp-look"};

inline std::chrono::nanoseconds to_chrono(Duration duration) noexcept {
  return std::chrono::nanoseconds(duration.ns);
}

// Far deadlines of the caller's clock must not overflow ours.
inline TimePoint after(TimePoint now, Duration duration) noexcept {
  constexpr std::chrono::hours kFar{24 * 365};
  return now + std::min<std::chrono::nanoseconds>(to_chrono(duration), kFar);
}

inline Error no_thread(const std::exception& why) {
  return Error(
      ErrorCode::kUnavailable, std::string(kSubject),
      {{"thread", why.what(), "one more thread", "the limit of this user, or of this container"}});
}

constexpr bool answers(ItemStatus status) noexcept {
  return status == ItemStatus::kOk || status == ItemStatus::kMissing;
}

// A thread that says when it is about to end, so that only finished ones are joined.
struct Worker {
  std::jthread thread;
  bool done = false;  // guarded by the core's mutex
};

}  // namespace detail

struct BlockingStore::Core : std::enable_shared_from_this<BlockingStore::Core> {
  using Kind = detail::Kind;
  using Side = detail::Side;
  using Lock = detail::Lock;
  using TimePoint = detail::TimePoint;
  using Worker = detail::Worker;
  struct Request {
    OpId op{};
    std::unique_ptr<ObjectBatch> batch;
    TimePoint deadline;
    std::optional<Removal> removal;  // of the lookup kind: removes instead of asking
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
    std::array<Worker, detail::kKinds> lanes;
    std::array<bool, detail::kKinds> has_lane{};
    std::uint32_t busy = 0;  // threads inside a call
    bool retired = false;
    std::vector<Unquiet> unquiet;
  };

  // A client in the making, guarded by the mutex.
  struct Attempt {
    TimePoint began;
    bool has_regions = false;  // nobody else may change them
    bool given_up = false;     // another one may be made; this one goes when it comes back
    bool counted = false;      // in retired_now, until its client is torn down
    bool over = false;         // its client is in use, or it has failed
  };

  struct Running {
    OpId op{};
    Kind kind{};
    std::unique_ptr<ObjectBatch> batch;
    std::vector<ItemResult> results;  // written by the native call
    TimePoint began;
    TimePoint deadline;  // of its operation
    std::optional<Removal> removal;
    bool late = false;       // still inside the call then: its kind takes nothing until it returns
    bool abandoned = false;  // its outcome was reported before the call returned
    std::shared_ptr<Generation> generation;
  };

  Core(BlockingClientFactory make, BlockingStoreOptions opts)
      : factory(std::move(make)),
        options(opts),
        pid(::getpid()),
        retry_pause(options.first_retry, options.max_retry, detail::seed_for(this)) {
    unburied.reserve(std::min(options.max_retired, 64u) + 1);
  }

  const BlockingClientFactory factory;
  const BlockingStoreOptions options;
  const pid_t pid;
  StoreCapabilities capabilities{};

  mutable std::mutex mutex;  // guards everything below
  detail::RegionTable regions;
  std::vector<Region> unreleased;  // no longer the engine's, and perhaps still a client's
  bool regions_busy = false;       // somebody registers or unregisters, without the mutex
  std::condition_variable care_wakes;
  std::array<std::condition_variable, detail::kKinds> lane_wakes;
  std::condition_variable changed;  // a completion, an end of a call, of a thread, of a client
  std::shared_ptr<Generation> current;
  std::array<std::deque<Request>, detail::kKinds> queues;
  std::vector<std::shared_ptr<Running>> running;
  std::array<std::deque<Completion>, detail::kSides> completions;
  Wakeup wakeup;
  std::array<std::vector<OpId>, detail::kSides> unquiet;
  std::array<bool, detail::kSides> closed{};
  std::array<bool, detail::kSides> used{};  // ever: it was given memory, or an operation
  bool finished = false;                    // no client will be made any more
  bool stop_care = false;
  TimePoint care_wake = TimePoint::max();
  std::list<Worker> maker;           // one, or none
  std::shared_ptr<Attempt> attempt;  // of the maker
  std::exception_ptr make_error;
  std::string away;           // why there is no client, as logged last; empty while there is one
  std::list<Worker> helpers;  // tear a client down, change a region, log, or were given up
  std::vector<std::shared_ptr<Generation>> unburied;  // retired, and no thread could be had
  TimePoint next_burial = TimePoint::max();
  std::jthread care;
  std::uint32_t failures = 0;         // in a row, also of clients that died young
  std::uint32_t failed_attempts = 0;  // in a row, to make a client
  TimePoint next_attempt = TimePoint::min();
  // The present client's service did not answer: nothing is started but one question at a time.
  bool silent = false;
  bool probe_due = false;                 // for the lane of lookups
  std::shared_ptr<Generation> probed;     // whose client is being asked
  TimePoint probe_at = TimePoint::max();  // when the next question is asked, or this one began
  std::array<RateLimit, detail::kKinds> late_lines{RateLimit{seconds(10)}, RateLimit{seconds(10)},
                                                   RateLimit{seconds(10)}};
  std::array<bool, detail::kKinds> late_told{};
  detail::RetryPause retry_pause;
  BlockingStoreCounters counters;
  std::vector<std::pair<LogLevel, std::string>> lines;  // to be logged without the mutex
  bool telling = false;                                 // a helper is at it

  bool in_child() const noexcept { return ::getpid() != pid; }

  // Logs from a thread of its own: a sink that blocks must hold up nobody who needs the mutex.
  void say(LogLevel level, std::string line);

  // ---- completions ----

  static std::vector<ItemResult> all(const ObjectBatch& batch, ItemStatus status) {
    return std::vector<ItemResult>(batch.keys.size(), ItemResult{status, 0});
  }
  void publish(Kind kind, Completion completion);
  void end_unstarted(Kind kind, OpId op, std::unique_ptr<ObjectBatch> batch, ItemStatus status);
  void end_queue(Kind kind, ItemStatus status);
  void mark_unquiet(Kind kind, OpId op);
  // Reports the outcome of a call that has not returned; its client goes.
  void abandon(Running& call, ItemStatus status);

  // ---- clients ----

  // Logs `why` if that is news; empty: nothing is wrong with the client.
  void retire(const std::shared_ptr<Generation>& generation, const std::string& why);
  // Starts the thread that buries it; throws when there can be no more threads.
  void dig(const std::shared_ptr<Generation>& generation);
  void bury(const std::shared_ptr<Generation>& generation);
  void start_maker();
  void make_client(const std::shared_ptr<Attempt>& mine);
  void give_up_maker();
  // Its client comes into use.
  void take_over(Attempt& mine, std::shared_ptr<Generation>& generation);
  // One that is given up or has failed may have registered memory until its client is torn down.
  void count_retired(Attempt& mine);
  // Remembers why there is no client; the next attempt comes after a pause.
  void note_failure(const std::string& why);
  // What the client answers to a question about a key that need not be there.
  static CallEnd ask(BlockingClient& client, ItemStatus& answer) noexcept;
  // Throws Error when the client does not answer a question.
  static void probe(BlockingClient& client);

  // ---- regions ----

  // Gives back the regions of the closed side; the number of those that a client, present, retired
  // or given up, may still have registered. Those are tried again.
  std::uint64_t release_regions(Lock& lock, TimePoint end);
  // False when `end` came first. With the lock held, before and after.
  bool begin_regions(Lock& lock, TimePoint end);
  void end_regions();
  // Runs the native call on a thread of its own. Null: it is done.
  std::exception_ptr change_region(Lock& lock, std::shared_ptr<Generation> generation,
                                   const Region& region, bool add, TimePoint end);
  bool is_unreleased(const Region& region) const;
  void remember_unreleased(const Region& region);
  // The same with the present client; a region that it may keep is remembered as unreleased.
  std::exception_ptr change_present(Lock& lock, const Region& region, bool add, TimePoint end);

  // ---- lanes ----

  void ensure_lane(const std::shared_ptr<Generation>& generation, Kind kind);
  void serve(const std::shared_ptr<Generation>& generation, Kind kind);
  static CallEnd perform(BlockingClient& client, Running& call) noexcept;
  void count(const Running& call) noexcept;
  // The call has returned: everything it wrote is visible to whoever takes the completion under the
  // mutex (R56).
  void finish(Running& call, CallEnd end);
  // The service of the present client did not answer.
  void fall_silent();
  void ask_again(Lock& lock, const std::shared_ptr<Generation>& generation);
  // Does a late call of the present client hold the only thread for `kind`?
  bool held_up(Kind kind) const;

  // ---- care ----

  void wake_care();
  void watch();
  void expire(Kind kind, TimePoint now, TimePoint& next);
  void watch_calls(TimePoint now, TimePoint& next);
  bool can_reap() const;
  // The threads have released the mutex for good when `done` is seen under it, so joining them is
  // short.
  void reap();
  void consider_burials(TimePoint now, TimePoint& next);
  // Nobody has a use for a client when one side is closed and the other was never used.
  bool has_use() const;
  void consider_attempt(TimePoint now, TimePoint& next);
  void consider_probe(TimePoint now, TimePoint& next);

  // ---- calls ----

  bool start(Kind kind, OpId op, std::unique_ptr<ObjectBatch>& batch, Instant now, Instant deadline,
             const std::optional<Removal>& removal = {});
  bool poll(Side side, Completion& out);
  bool idle(Side side) const;
  void use(Side side);
  // No client will be made any more, and the present one goes.
  void finish_clients();
  CloseReport close(Side side, Duration budget);
  // Ends and joins what ends in time; what hangs keeps this object alive and goes on alone.
  void leave(TimePoint end);
};

}  // namespace kvprism
