// The adapter from blocking clients to the asynchronous store: its operations from start to close.
#include "kvprism/backend/blocking_store.h"

#include <dirent.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <fstream>
#include <memory>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "blocking_fixture.h"
#include "kvprism/base/error.h"
#include "thread_sanitizer.h"

namespace kvprism {
namespace {

using std::chrono::milliseconds;
using test::batch_of;
using test::Call;
using test::Clock;
using test::Ends;
using test::eventually;
using test::factory_of;
using test::Gate;
using test::kLater;
using test::kNow;
using test::quick;
using test::Script;
using test::start_exists;
using test::start_get;
using test::start_put;

TEST(BlockingStore, MovesBytesAndGivesTheBatchBack) {
  const auto script = std::make_shared<Script>();
  BlockingStore store(factory_of(script), quick());
  EXPECT_EQ(store.capabilities().name, "scripted");
  std::array<std::byte, 64> memory{};
  store.add_region({memory.data(), memory.size(), -1});
  Ends ends(store);

  std::memset(memory.data(), 7, 32);
  ASSERT_TRUE(start_put(store, 1, batch_of({"a", "b"}, memory.data(), 16)));
  ASSERT_TRUE(ends.wait_quiet(1));
  EXPECT_EQ(ends.outcomes[1], (std::vector<ItemResult>(2, {ItemStatus::kOk, 16})));
  EXPECT_EQ(ends.quiet[1]->keys[1], "b");

  ASSERT_TRUE(start_exists(store, 2, batch_of({"b", "c"})));
  ASSERT_TRUE(ends.wait_quiet(2));
  EXPECT_EQ(ends.outcomes[2][0].status, ItemStatus::kOk);
  EXPECT_EQ(ends.outcomes[2][1].status, ItemStatus::kMissing);

  ASSERT_TRUE(start_get(store, 3, batch_of({"a", "c"}, memory.data() + 32, 16)));
  ASSERT_TRUE(ends.wait_quiet(3));
  EXPECT_EQ(ends.outcomes[3][1].status, ItemStatus::kMissing);
  EXPECT_EQ(std::memcmp(memory.data(), memory.data() + 32, 16), 0);

  const BlockingStoreCounters counters = store.counters();
  EXPECT_EQ(counters.put_calls, 1u);
  EXPECT_EQ(counters.put_items, 2u);
  EXPECT_EQ(counters.put_bytes, 32u);
  EXPECT_EQ(counters.get_items, 2u);
  EXPECT_EQ(counters.get_bytes, 16u);
  EXPECT_EQ(counters.exists_items, 2u);
  EXPECT_EQ(counters.replacements, 0u);
  EXPECT_TRUE(counters.usable);
}

TEST(BlockingStore, StartsNeverWaitAndFullQueuesRefuse) {
  const auto script = std::make_shared<Script>();
  const auto gate = std::make_shared<Gate>();
  script->on_call = [gate](int, Call call, const ObjectBatch&, CallEnd&) {
    if (call == Call::kPut) gate->pass();
    return false;
  };
  BlockingStoreOptions options = quick();
  options.stuck_after = kvprism::seconds(60);
  options.queue_limit = 2;
  BlockingStore store(factory_of(script), options);
  std::array<std::byte, 16> memory{};
  Ends ends(store);
  const auto began = Clock::now();
  ASSERT_TRUE(start_put(store, 1, batch_of({"a"}, memory.data(), 16)));
  ASSERT_TRUE(gate->wait_for_visitor());
  ASSERT_TRUE(start_put(store, 2, batch_of({"b"}, memory.data(), 16)));
  ASSERT_TRUE(start_put(store, 3, batch_of({"c"}, memory.data(), 16)));
  auto refused = batch_of({"d"}, memory.data(), 16);
  EXPECT_FALSE(store.start_put(OpId{4}, refused, kNow, kLater));
  ASSERT_NE(refused, nullptr);
  EXPECT_EQ(refused->keys[0], "d");
  EXPECT_EQ(store.counters().queue_full, 1u);
  EXPECT_LT(Clock::now() - began, std::chrono::seconds(5));
  // The other kinds have threads of their own.
  ASSERT_TRUE(start_exists(store, 5, batch_of({"a"})));
  ASSERT_TRUE(ends.wait_quiet(5));
  EXPECT_FALSE(ends.has_outcome(1));
  gate->open();
  for (const int op : {1, 2, 3}) EXPECT_TRUE(ends.wait_quiet(op));
}

TEST(BlockingStore, WhatWaitedForAClientThatGoesIsCounted) {
  const auto script = std::make_shared<Script>();
  const auto gate = std::make_shared<Gate>();
  script->on_call = [gate](int, Call, const ObjectBatch&, CallEnd& end) {
    gate->pass();
    end.broken = true;
    return true;
  };
  script->on_make = [](int attempt) {
    if (attempt > 0) throw std::runtime_error("no second one");
  };
  BlockingStoreOptions options = quick();
  options.stuck_after = kvprism::seconds(60);
  BlockingStore store(factory_of(script), options);
  std::array<std::byte, 16> memory{};
  Ends ends(store);
  for (const int op : {1, 2, 3, 4}) {
    ASSERT_TRUE(start_put(store, op, batch_of({"a"}, memory.data(), 16)));
    if (op == 1) {
      ASSERT_TRUE(gate->wait_for_visitor());
    }
  }
  gate->open();
  for (const int op : {2, 3, 4}) {
    ASSERT_TRUE(ends.wait_quiet(op));
    EXPECT_EQ(ends.status(op), ItemStatus::kUnavailable);
  }
  EXPECT_EQ(store.counters().circuit_open, 3u);
  EXPECT_EQ(store.counters().put_calls, 1u);
}

// Whoever closes has given them up.
TEST(BlockingStore, WhatACloseCancelsWasNotCutOff) {
  const auto script = std::make_shared<Script>();
  const auto gate = std::make_shared<Gate>();
  script->on_call = [gate](int, Call, const ObjectBatch&, CallEnd&) {
    gate->pass();
    return false;
  };
  BlockingStoreOptions options = quick();
  options.stuck_after = kvprism::seconds(60);
  BlockingStore store(factory_of(script), options);
  std::array<std::byte, 16> memory{};
  Ends ends(store);
  for (const int op : {1, 2, 3}) {
    ASSERT_TRUE(start_put(store, op, batch_of({"a"}, memory.data(), 16)));
    if (op == 1) {
      ASSERT_TRUE(gate->wait_for_visitor());
    }
  }
  EXPECT_EQ(store.close_store(Duration{}).unquiet, 1u);
  for (const int op : {1, 2, 3}) {
    ASSERT_TRUE(ends.wait_outcome(op));
    EXPECT_EQ(ends.status(op), ItemStatus::kCancelled);
  }
  EXPECT_EQ(store.counters().circuit_open, 0u);
  gate->open();
}

TEST(BlockingStore, WaitingOperationsExpire) {
  const auto script = std::make_shared<Script>();
  const auto gate = std::make_shared<Gate>();
  script->on_call = [gate](int, Call, const ObjectBatch&, CallEnd&) {
    gate->pass();
    return true;
  };
  BlockingStoreOptions options = quick();
  options.stuck_after = kvprism::seconds(60);
  BlockingStore store(factory_of(script), options);
  std::array<std::byte, 16> memory{};
  Ends ends(store);
  ASSERT_TRUE(start_get(store, 1, batch_of({"a"}, memory.data(), 16)));
  ASSERT_TRUE(gate->wait_for_visitor());
  ASSERT_TRUE(
      start_get(store, 2, batch_of({"a"}, memory.data(), 16), kNow + kvprism::milliseconds(50)));
  ASSERT_TRUE(start_get(store, 3, batch_of({"a"}, memory.data(), 16)));
  ASSERT_TRUE(start_get(store, 4, batch_of({"a"}, memory.data(), 16), kNow));
  ends.drain();
  EXPECT_TRUE(ends.is_quiet(4));
  const auto began = Clock::now();
  ASSERT_TRUE(ends.wait_quiet(2));
  EXPECT_LT(Clock::now() - began, std::chrono::seconds(2));
  for (const int op : {2, 4}) EXPECT_EQ(ends.status(op), ItemStatus::kTimedOut);
  EXPECT_EQ(store.counters().expired, 2u);
  EXPECT_FALSE(ends.has_outcome(1));
  EXPECT_FALSE(ends.has_outcome(3));
  gate->open();
  EXPECT_TRUE(ends.wait_quiet(3));
}

TEST(BlockingStore, CloseDrains) {
  const auto script = std::make_shared<Script>();
  script->on_call = [](int, Call, const ObjectBatch&, CallEnd&) {
    std::this_thread::sleep_for(milliseconds(20));
    return false;
  };
  BlockingStore store(factory_of(script), quick());
  std::array<std::byte, 16> memory{};
  Ends ends(store);
  for (int op = 1; op <= 4; ++op) {
    ASSERT_TRUE(start_put(store, op, batch_of({"k" + std::to_string(op)}, memory.data(), 16)));
  }
  EXPECT_EQ(store.close_store(kvprism::seconds(5)).unquiet, 0u);
  EXPECT_FALSE(script->is_torn_down(0)) << "the other side may still want it";
  EXPECT_EQ(store.close_index(kvprism::seconds(5)).unquiet, 0u);
  EXPECT_TRUE(script->is_torn_down(0));
  ends.drain();
  for (int op = 1; op <= 4; ++op) {
    EXPECT_TRUE(ends.is_quiet(op));
    EXPECT_EQ(ends.status(op), ItemStatus::kOk);
  }
  EXPECT_FALSE(start_put(store, 5, batch_of({"x"}, memory.data(), 16)));
  EXPECT_EQ(store.close_store(kvprism::seconds(5)).unquiet, 0u);
}

TEST(BlockingStore, OneSideClosesWithoutTheOther) {
  const auto script = std::make_shared<Script>();
  BlockingStore store(factory_of(script), quick());
  Ends ends(store);
  ASSERT_TRUE(start_exists(store, 1, batch_of({"a"})));
  ASSERT_TRUE(ends.wait_quiet(1));
  EXPECT_EQ(store.close_store(kvprism::seconds(1)).unquiet, 0u);
  EXPECT_FALSE(script->is_torn_down(0));
  ASSERT_TRUE(start_exists(store, 2, batch_of({"a"})));
  ASSERT_TRUE(ends.wait_quiet(2));
  EXPECT_EQ(store.close_index(kvprism::seconds(5)).unquiet, 0u);
  EXPECT_TRUE(script->is_torn_down(0));
  EXPECT_FALSE(start_exists(store, 3, batch_of({"a"})));
}

TEST(BlockingStore, ASideThatClosesEarlyLeavesTheClientToTheOther) {
  // A scheduler may end before its worker has had its first job.
  const auto script = std::make_shared<Script>();
  BlockingStore store(factory_of(script), quick());
  Ends ends(store);
  EXPECT_EQ(store.close_index(kvprism::seconds(5)).unquiet, 0u);
  std::array<std::byte, 16> memory{};
  ASSERT_TRUE(start_put(store, 1, batch_of({"a"}, memory.data(), 16)));
  ASSERT_TRUE(ends.wait_quiet(1));
  EXPECT_EQ(ends.status(1), ItemStatus::kOk);
  EXPECT_FALSE(script->is_torn_down(0));
  EXPECT_EQ(store.close_store(kvprism::seconds(5)).unquiet, 0u);
  EXPECT_TRUE(script->is_torn_down(0));
}

TEST(BlockingStore, CloseCancelsReportsAndNeverHangs) {
  const auto script = std::make_shared<Script>();
  const auto gate = std::make_shared<Gate>();
  // Outlives the store, because the hung call may still write.
  const auto memory = std::make_shared<std::array<std::byte, 16>>();
  script->on_call = [gate, memory](int, Call, const ObjectBatch& batch, CallEnd&) {
    gate->pass();
    std::memset(batch.segments[0].base, 5, batch.segments[0].length);
    return true;
  };
  BlockingStoreOptions options = quick();
  options.stuck_after = kvprism::seconds(60);
  options.close_budget = kvprism::milliseconds(50);
  {
    BlockingStore store(factory_of(script), options);
    Ends ends(store);
    ASSERT_TRUE(start_get(store, 1, batch_of({"a"}, memory->data(), 16)));
    ASSERT_TRUE(gate->wait_for_visitor());
    ASSERT_TRUE(start_get(store, 2, batch_of({"a"}, memory->data(), 16)));
    const auto began = Clock::now();
    const CloseReport report = store.close_store(kvprism::milliseconds(50));
    EXPECT_LT(Clock::now() - began, std::chrono::seconds(2));
    EXPECT_EQ(report.unquiet, 1u);
    EXPECT_EQ(report.ops, std::vector<OpId>{OpId{1}});
    ends.drain();
    EXPECT_EQ(ends.status(1), ItemStatus::kCancelled);
    EXPECT_EQ(ends.status(2), ItemStatus::kCancelled);
    EXPECT_FALSE(ends.is_quiet(1));
    EXPECT_TRUE(ends.is_quiet(2));
  }
  // The threads that were left behind still have all that they need.
  gate->open();
  EXPECT_TRUE(eventually([&] { return script->is_torn_down(0); }));
  EXPECT_EQ((*memory)[15], std::byte{5});
}

TEST(BlockingStore, LateQuietIsDeliveredAfterClose) {
  const auto script = std::make_shared<Script>();
  const auto gate = std::make_shared<Gate>();
  script->on_call = [gate](int, Call, const ObjectBatch&, CallEnd&) {
    gate->pass();
    return true;
  };
  BlockingStoreOptions options = quick();
  options.stuck_after = kvprism::seconds(60);
  BlockingStore store(factory_of(script), options);
  std::array<std::byte, 16> memory{};
  Ends ends(store);
  ASSERT_TRUE(start_get(store, 1, batch_of({"a"}, memory.data(), 16)));
  ASSERT_TRUE(gate->wait_for_visitor());
  EXPECT_EQ(store.close_store(kvprism::milliseconds(20)).unquiet, 1u);
  gate->open();
  EXPECT_TRUE(ends.wait_quiet(1));
  EXPECT_EQ(store.close_store(kvprism::seconds(5)).unquiet, 0u);
}

TEST(BlockingStore, ConstructorThrowsWhatTheFactoryThrows) {
  const auto script = std::make_shared<Script>();
  script->on_make = [](int) {
    fail(ErrorCode::kNotFound, "library", {"library", "x", "a file", {}});
  };
  try {
    BlockingStore store(factory_of(script), quick());
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kNotFound);
  }
  EXPECT_THROW(BlockingStore([] { return std::unique_ptr<BlockingClient>(); }, quick()), Error);
}

TEST(BlockingStore, ConstructorGivesUpAndTheLateClientIsTornDown) {
  const auto script = std::make_shared<Script>();
  const auto gate = std::make_shared<Gate>();
  script->on_make = [gate](int) { gate->pass(); };
  BlockingStoreOptions options = quick();
  options.setup_timeout = kvprism::milliseconds(50);
  try {
    BlockingStore store(factory_of(script), options);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kTimedOut);
  }
  gate->open();
  EXPECT_TRUE(eventually([&] { return script->is_torn_down(0); }));
}

TEST(BlockingStore, AFactoryThatFailsAfterTheStoresEndHarmsNobody) {
  for (int round = 0; round < 20; ++round) {
    const auto script = std::make_shared<Script>();
    const auto gate = std::make_shared<Gate>();
    script->on_make = [gate](int) {
      gate->pass();
      throw std::runtime_error("too late");
    };
    BlockingStoreOptions options = quick();
    options.setup_timeout = kvprism::milliseconds(5);
    auto factory = factory_of(script);
    EXPECT_THROW(BlockingStore(std::move(factory), options), Error);
    gate->open();
    // All of the store goes with the last thread of it.
    EXPECT_TRUE(eventually([&] { return script.use_count() == 1; }));
  }
}

TEST(BlockingStore, OptionsAreCheckedTogether) {
  BlockingStoreOptions options;
  options.queue_limit = 0;
  options.stuck_after = {-1};
  options.first_retry = {0};
  try {
    BlockingStore store(nullptr, options);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidConfig);
    EXPECT_EQ(error.problems().size(), 4u);
  }
}

TEST(BlockingStore, ForeverIsThirtyYears) {
  BlockingStoreOptions options;
  for (Duration* const member :
       {&options.stuck_after, &options.setup_timeout, &options.region_timeout,
        &options.probe_interval, &options.first_retry, &options.max_retry}) {
    *member = {INT64_MAX};
  }
  const std::vector<Problem> problems = validate_blocking_store_options(options);
  ASSERT_EQ(problems.size(), 6u);
  EXPECT_EQ(problems[0].path, "stuck_after");
  EXPECT_EQ(problems[0].value, "9223372036854775807");
  EXPECT_EQ(problems[0].expected, "at most 1000000000000000000 nanoseconds");

  const auto script = std::make_shared<Script>();
  options = quick();
  options.stuck_after = options.probe_interval = options.region_timeout = options.first_retry =
      options.max_retry = {1'000'000'000'000'000'000};
  BlockingStore store(factory_of(script), options);
  Ends ends(store);
  ASSERT_TRUE(start_exists(store, 1, batch_of({"a"})));
  ASSERT_TRUE(ends.wait_quiet(1));
  EXPECT_EQ(ends.status(1), ItemStatus::kMissing);
  EXPECT_EQ(store.counters().stuck_calls, 0u);
  EXPECT_EQ(store.counters().replacements, 0u);
}

std::set<std::string> thread_names() {
  std::set<std::string> names;
  DIR* folder = ::opendir("/proc/self/task");
  while (const dirent* entry = ::readdir(folder)) {
    std::ifstream file(std::string("/proc/self/task/") + entry->d_name + "/comm");
    std::string name;
    if (std::getline(file, name)) names.insert(name);
  }
  ::closedir(folder);
  return names;
}

TEST(BlockingStore, ThreadsHaveNamesAndLeaveSignalsAlone) {
  const auto script = std::make_shared<Script>();
  sigset_t in_call;
  sigemptyset(&in_call);
  script->on_call = [&in_call](int, Call, const ObjectBatch&, CallEnd&) {
    pthread_sigmask(SIG_SETMASK, nullptr, &in_call);
    return false;
  };
  sigset_t before;
  pthread_sigmask(SIG_SETMASK, nullptr, &before);
  {
    BlockingStore store(factory_of(script), quick());
    std::array<std::byte, 16> memory{};
    Ends ends(store);
    ASSERT_TRUE(start_put(store, 1, batch_of({"a"}, memory.data(), 16)));
    ASSERT_TRUE(start_get(store, 2, batch_of({"a"}, memory.data(), 16)));
    ASSERT_TRUE(start_exists(store, 3, batch_of({"a"})));
    for (const int op : {1, 2, 3}) ASSERT_TRUE(ends.wait_quiet(op));
    for (const char* name : {"kvp-put", "kvp-get", "kvp-look", "kvp-care"}) {
      EXPECT_TRUE(eventually([&] { return thread_names().contains(name); })) << name;
    }
  }
  EXPECT_TRUE(eventually([] { return !thread_names().contains("kvp-care"); }));
  sigset_t now;
  pthread_sigmask(SIG_SETMASK, nullptr, &now);
  for (int signal = 1; signal < NSIG; ++signal) {
    EXPECT_EQ(sigismember(&before, signal), sigismember(&now, signal)) << signal;
  }
  EXPECT_TRUE(sigismember(&in_call, SIGTERM));
  EXPECT_FALSE(sigismember(&in_call, SIGSEGV));
}

// R71: the child gets refusals, ends cleanly, and the parent goes on.
TEST(BlockingStore, ForkedChildIsRefused) {
  if (test::kThreadSanitizer) GTEST_SKIP() << "fork with threads";
  const auto script = std::make_shared<Script>();
  auto store = std::make_unique<BlockingStore>(factory_of(script), quick());
  std::array<std::byte, 16> memory{};
  store->add_region({memory.data(), memory.size(), -1});
  Ends ends(*store);
  ASSERT_TRUE(start_put(*store, 1, batch_of({"a"}, memory.data(), 16)));
  ASSERT_TRUE(ends.wait_quiet(1));
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(60);
    Completion completion;
    bool right = !start_put(*store, 2, batch_of({"b"}, memory.data(), 16)) &&
                 !store->poll_store(kNow, completion) &&
                 store->close_store(kvprism::seconds(1)).unquiet == 0;
    try {
      std::array<std::byte, 16> other{};
      store->add_region({other.data(), other.size(), -1});
      right = false;
    } catch (const Error& error) {
      right = right && error.code() == ErrorCode::kClosed;
    }
    store.reset();
    ::_exit(right ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  ASSERT_TRUE(start_get(*store, 3, batch_of({"a"}, memory.data(), 16)));
  ASSERT_TRUE(ends.wait_quiet(3));
  EXPECT_EQ(ends.status(3), ItemStatus::kOk);
}

// Every operation has each end exactly once, whatever its client does, and bytes are there when the
// outcome is (R56).
TEST(BlockingStore, ManyOperationsEachEndOnce) {
  const auto script = std::make_shared<Script>();
  std::atomic<std::uint32_t> counter = 0;
  script->on_call = [&counter](int, Call, const ObjectBatch&, CallEnd& end) {
    std::minstd_rand random(counter++);
    random.discard(3);
    const auto dice = random() % 100;
    if (dice < 3) {
      end.quiet = false;
      return true;
    }
    if (dice < 6) {
      end.broken = true;
      return true;
    }
    if (dice < 8) std::this_thread::sleep_for(milliseconds(30));
    return false;
  };
  script->on_tear_down = [](int client) { std::this_thread::sleep_for(milliseconds(client % 4)); };
  BlockingStoreOptions options = quick();
  options.stuck_after = kvprism::milliseconds(20);
  options.first_retry = kvprism::milliseconds(1);
  options.max_retry = kvprism::milliseconds(2);
  BlockingStore store(factory_of(script), options);
  constexpr int kOperations = 3000;
  constexpr std::size_t kBytes = 64;
  std::vector<std::byte> sources(kOperations * kBytes);
  std::vector<std::byte> targets(kOperations * kBytes);
  Ends ends(store);
  int started = 0;
  for (int op = 0; op < kOperations; ++op) {
    std::byte* source = sources.data() + op * kBytes;
    std::byte* target = targets.data() + op * kBytes;
    const std::string key = "k" + std::to_string(op % 50);
    bool taken = false;
    while (!taken) {
      switch (op % 3) {
        case 0:
          std::fill_n(source, kBytes, static_cast<std::byte>(op % 50));
          taken = start_put(store, op, batch_of({key}, source, kBytes));
          break;
        case 1:
          taken = start_get(store, op, batch_of({key}, target, kBytes));
          break;
        default:
          taken = start_exists(store, op, batch_of({key}));
      }
      ends.drain();
    }
    ++started;
    if (op % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  ASSERT_TRUE(ends.wait([&] { return ends.quiet.size() == static_cast<std::size_t>(started); },
                        std::chrono::seconds(60)));
  EXPECT_EQ(ends.outcomes.size(), static_cast<std::size_t>(kOperations));
  int right = 0;
  for (int op = 1; op < kOperations; op += 3) {
    if (ends.status(op) != ItemStatus::kOk) continue;
    ++right;
    for (std::size_t i = 0; i < kBytes; ++i) {
      ASSERT_EQ(targets[op * kBytes + i], static_cast<std::byte>(op % 50));
    }
  }
  EXPECT_GT(right, 100);
  const BlockingStoreCounters counters = store.counters();
  EXPECT_EQ(counters.unquiet_now, 0u);
  EXPECT_GT(counters.replacements, 5u);
}

}  // namespace
}  // namespace kvprism
