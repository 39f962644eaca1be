// A blocking client that hangs or breaks, and the one that takes its place.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "blocking_fixture.h"
#include "kvprism/base/error.h"

namespace kvprism {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using test::batch_of;
using test::Call;
using test::Clock;
using test::Ends;
using test::eventually;
using test::factory_of;
using test::Gate;
using test::kNow;
using test::LogLines;
using test::quick;
using test::Script;
using test::start_exists;
using test::start_get;
using test::start_put;

TEST(BlockingStore, UnquietCallReplacesTheClientAndIsQuietOnlyAfterTearDown) {
  const auto script = std::make_shared<Script>();
  const auto call_gate = std::make_shared<Gate>();
  const auto grave_gate = std::make_shared<Gate>();
  script->on_call = [call_gate](int client, Call call, const ObjectBatch&, CallEnd& end) {
    if (client != 0 || call != Call::kGet) return false;
    call_gate->pass();
    end.quiet = false;
    return true;
  };
  script->on_tear_down = [grave_gate](int client) {
    if (client == 0) grave_gate->pass();
  };
  BlockingStoreOptions options = quick();
  options.stuck_after = kvprism::seconds(60);
  BlockingStore store(factory_of(script), options);
  std::array<std::byte, 64> memory{};
  const Region first{memory.data(), 32, -1};
  const Region second{memory.data() + 32, 32, -1};
  store.add_region(first);
  store.add_region(second);
  Ends ends(store);
  ASSERT_TRUE(start_get(store, 1, batch_of({"a"}, memory.data(), 16)));
  ASSERT_TRUE(call_gate->wait_for_visitor());
  ASSERT_TRUE(start_get(store, 2, batch_of({"b"}, memory.data(), 16)));
  call_gate->open();
  ASSERT_TRUE(ends.wait_outcome(1));
  ASSERT_TRUE(ends.wait_quiet(2));
  EXPECT_EQ(ends.status(2), ItemStatus::kUnavailable);
  EXPECT_FALSE(ends.is_quiet(1));

  // The new client knows the regions and works while the old one is still there.
  ASSERT_TRUE(eventually([&] { return store.counters().replacements == 1; }));
  EXPECT_EQ(script->regions_of(1), (std::vector<Region>{first, second}));
  ASSERT_TRUE(start_put(store, 3, batch_of({"c"}, memory.data(), 16)));
  ASSERT_TRUE(ends.wait_quiet(3));
  EXPECT_EQ(ends.status(3), ItemStatus::kOk);
  std::this_thread::sleep_for(milliseconds(50));
  ends.drain();
  EXPECT_FALSE(ends.is_quiet(1));
  EXPECT_EQ(store.counters().unquiet_now, 1u);
  EXPECT_EQ(store.counters().retired_now, 1u);

  grave_gate->open();
  ASSERT_TRUE(ends.wait_quiet(1));
  EXPECT_EQ(store.counters().unquiet_now, 0u);
  EXPECT_EQ(store.counters().unquiet_calls, 1u);
  EXPECT_EQ(script->made, 2);
}

TEST(BlockingStore, BrokenClientGoesAlthoughItsCallWasQuiet) {
  const auto script = std::make_shared<Script>();
  script->on_call = [](int client, Call, const ObjectBatch&, CallEnd& end) {
    end.broken = client == 0;
    return end.broken;
  };
  BlockingStore store(factory_of(script), quick());
  Ends ends(store);
  ASSERT_TRUE(start_exists(store, 1, batch_of({"a"})));
  ASSERT_TRUE(ends.wait_quiet(1));
  ASSERT_TRUE(eventually([&] { return script->is_torn_down(0) && store.counters().usable; }));
  ASSERT_TRUE(start_exists(store, 2, batch_of({"a"})));
  ASSERT_TRUE(ends.wait_quiet(2));
  EXPECT_EQ(ends.status(2), ItemStatus::kMissing);
}

TEST(BlockingStore, FailedItemsAreNoReasonToReplaceTheClient) {
  const auto script = std::make_shared<Script>();
  script->on_call = [](int, Call call, const ObjectBatch&, CallEnd&) {
    return call == Call::kPut;  // leaves kCancelled
  };
  BlockingStore store(factory_of(script), quick());
  std::array<std::byte, 16> memory{};
  store.add_region({memory.data(), memory.size(), -1});
  Ends ends(store);
  ASSERT_TRUE(start_get(store, 1, batch_of({"absent"}, memory.data(), 16)));
  ASSERT_TRUE(start_put(store, 2, batch_of({"a"}, memory.data(), 16)));
  ASSERT_TRUE(ends.wait_quiet(1));
  ASSERT_TRUE(ends.wait_quiet(2));
  EXPECT_EQ(ends.status(1), ItemStatus::kMissing);
  EXPECT_EQ(ends.status(2), ItemStatus::kCancelled);
  EXPECT_TRUE(store.counters().usable);
  EXPECT_EQ(store.counters().retired_now, 0u);
  EXPECT_EQ(script->made, 1);
}

TEST(BlockingStore, StuckCallEndsAsTimedOutAndIsQuietAfterItsReturnAndTheTearDown) {
  const auto script = std::make_shared<Script>();
  const auto gate = std::make_shared<Gate>();
  std::array<std::byte, 16> memory{};
  script->on_call = [gate, &memory](int client, Call call, const ObjectBatch&, CallEnd&) {
    if (client != 0 || call != Call::kGet) return false;
    gate->pass();
    memory.fill(std::byte{9});  // the late write
    return true;
  };
  BlockingStore store(factory_of(script), quick());
  store.add_region({memory.data(), memory.size(), -1});
  Ends ends(store);
  const auto began = Clock::now();
  ASSERT_TRUE(start_get(store, 1, batch_of({"a"}, memory.data(), 16)));
  ASSERT_TRUE(gate->wait_for_visitor());
  ASSERT_TRUE(start_get(store, 2, batch_of({"b"}, memory.data(), 16)));
  ASSERT_TRUE(ends.wait_outcome(1));
  EXPECT_GE(Clock::now() - began, milliseconds(150));
  EXPECT_EQ(ends.status(1), ItemStatus::kTimedOut);
  ASSERT_TRUE(ends.wait_quiet(2));
  EXPECT_EQ(ends.status(2), ItemStatus::kUnavailable);
  EXPECT_FALSE(ends.is_quiet(1));
  EXPECT_FALSE(script->is_torn_down(0));
  ASSERT_TRUE(eventually([&] { return store.counters().usable; }));
  ASSERT_TRUE(start_exists(store, 3, batch_of({"a"})));
  ASSERT_TRUE(ends.wait_quiet(3));
  EXPECT_EQ(store.counters().stuck_calls, 1u);

  gate->open();
  ASSERT_TRUE(ends.wait_quiet(1));
  EXPECT_TRUE(script->is_torn_down(0));
  memory.fill(std::byte{1});
  std::this_thread::sleep_for(milliseconds(20));
  for (const std::byte byte : memory) EXPECT_EQ(byte, std::byte{1});
}

TEST(BlockingStore, CallsOfTheOldClientThatRunOnEndNormally) {
  const auto script = std::make_shared<Script>();
  const auto gate = std::make_shared<Gate>();
  script->on_call = [gate](int client, Call call, const ObjectBatch&, CallEnd& end) {
    if (client == 0 && call == Call::kPut) gate->pass();
    if (client == 0 && call == Call::kExists) {
      end.broken = true;
      return true;
    }
    return false;
  };
  BlockingStoreOptions options = quick();
  options.stuck_after = kvprism::seconds(60);
  BlockingStore store(factory_of(script), options);
  std::array<std::byte, 16> memory{};
  Ends ends(store);
  ASSERT_TRUE(start_put(store, 1, batch_of({"a"}, memory.data(), 16)));
  ASSERT_TRUE(gate->wait_for_visitor());
  ASSERT_TRUE(start_exists(store, 2, batch_of({"a"})));
  ASSERT_TRUE(ends.wait_quiet(2));
  ASSERT_TRUE(eventually([&] { return store.counters().replacements == 1; }));
  EXPECT_FALSE(script->is_torn_down(0));
  gate->open();
  ASSERT_TRUE(ends.wait_quiet(1));
  EXPECT_EQ(ends.status(1), ItemStatus::kOk);
  EXPECT_TRUE(eventually([&] { return script->is_torn_down(0); }));
}

TEST(BlockingStore, OpenCircuitAnswersAtOnceAndCloses) {
  const auto script = std::make_shared<Script>();
  std::atomic<bool> up = true;
  script->on_make = [&up](int) {
    if (!up) fail(ErrorCode::kUnavailable, "store client", {"master", "m", "an answer", {}});
  };
  script->on_call = [&up](int, Call, const ObjectBatch&, CallEnd& end) {
    end.broken = !up;
    return end.broken;
  };
  BlockingStore store(factory_of(script), quick());
  Ends ends(store);
  up = false;
  ASSERT_TRUE(start_exists(store, 1, batch_of({"a"})));
  ASSERT_TRUE(ends.wait_quiet(1));
  ASSERT_TRUE(start_exists(store, 2, batch_of({"a", "b"})));
  ends.drain();
  ASSERT_TRUE(ends.is_quiet(2)) << "it has been answered without a wait";
  EXPECT_EQ(ends.outcomes[2], (std::vector<ItemResult>(2, {ItemStatus::kUnavailable, 0})));
  EXPECT_EQ(store.counters().circuit_open, 1u);
  std::byte byte{};
  EXPECT_THROW(store.add_region({&byte, 1, -1}), Error);

  // The pauses are 5, 10, 20, 20 ms ..., each shortened by at most an eighth.
  const auto began = Clock::now();
  const int before = script->attempts;
  ASSERT_TRUE(eventually([&] { return script->attempts - before >= 12; }));
  const int attempts = script->attempts - before;
  EXPECT_LE((attempts - 3) * microseconds(17'500), Clock::now() - began);
  EXPECT_FALSE(store.counters().usable);

  up = true;
  ASSERT_TRUE(eventually([&] { return store.counters().usable; }));
  ASSERT_TRUE(start_exists(store, 3, batch_of({"a"})));
  ASSERT_TRUE(ends.wait_quiet(3));
  EXPECT_EQ(ends.status(3), ItemStatus::kMissing);
}

TEST(BlockingStore, LateCallHoldsUpOnlyItsKindAndNobodyWaitsBehindIt) {
  const auto script = std::make_shared<Script>();
  const auto gate = std::make_shared<Gate>();
  std::atomic<int> asked = 0;
  script->on_call = [gate, &asked](int, Call call, const ObjectBatch&, CallEnd&) {
    if (call == Call::kExists && asked++ == 0) gate->pass();
    return false;
  };
  BlockingStoreOptions options = quick();
  options.stuck_after = kvprism::seconds(60);
  LogLines lines;
  BlockingStore store(factory_of(script), options);
  Ends ends(store);
  auto late = batch_of({"a"});
  ASSERT_TRUE(store.start_exists(OpId{1}, late, kNow, kNow + kvprism::milliseconds(200)));
  ASSERT_TRUE(gate->wait_for_visitor());
  ASSERT_TRUE(start_exists(store, 2, batch_of({"b"})));  // waits behind it, for a minute if need be
  ASSERT_TRUE(ends.wait_quiet(2));
  EXPECT_EQ(ends.status(2), ItemStatus::kUnavailable);
  EXPECT_FALSE(ends.has_outcome(1));
  ASSERT_TRUE(start_exists(store, 3, batch_of({"c"})));
  ends.drain();
  ASSERT_TRUE(ends.is_quiet(3));
  EXPECT_EQ(ends.status(3), ItemStatus::kUnavailable);
  std::array<std::byte, 16> memory{};
  ASSERT_TRUE(start_put(store, 4, batch_of({"a"}, memory.data(), 16)));
  ASSERT_TRUE(ends.wait_quiet(4));
  EXPECT_EQ(ends.status(4), ItemStatus::kOk);

  gate->open();
  ASSERT_TRUE(ends.wait_quiet(1));
  EXPECT_EQ(ends.status(1), ItemStatus::kOk);
  ASSERT_TRUE(start_exists(store, 5, batch_of({"d"})));
  ASSERT_TRUE(ends.wait_quiet(5));
  EXPECT_EQ(ends.status(5), ItemStatus::kMissing);
  EXPECT_EQ(asked, 2);
  EXPECT_EQ(store.counters().late_calls, 1u);
  EXPECT_EQ(store.counters().circuit_open, 2u);
  EXPECT_EQ(store.counters().replacements, 0u);
  EXPECT_EQ(lines.awaited("kvp-look is late").size(), 1u);
  EXPECT_EQ(lines.awaited("kvp-look return again").size(), 1u);
}

TEST(BlockingStore, NewClientMustAnswerBeforeItIsUsedAndEachChangeIsOneLine) {
  const auto script = std::make_shared<Script>();
  std::atomic<bool> answers = false;
  script->on_call = [&answers](int client, Call call, const ObjectBatch&, CallEnd& end) {
    if (client == 0) end.broken = true;
    if (client > 0 && call == Call::kExists && !answers) return true;  // leaves kCancelled
    return client == 0;
  };
  LogLines lines;
  BlockingStore store(factory_of(script), quick());
  Ends ends(store);
  ASSERT_TRUE(start_exists(store, 1, batch_of({"a"})));
  ASSERT_TRUE(ends.wait_quiet(1));
  ASSERT_TRUE(eventually([&] { return script->made >= 5; }));
  EXPECT_FALSE(store.counters().usable);
  EXPECT_EQ(store.counters().replacements, 0u);
  answers = true;
  ASSERT_TRUE(eventually([&] { return store.counters().usable; }));
  EXPECT_EQ(store.counters().replacements, 1u);
  ASSERT_TRUE(start_exists(store, 2, batch_of({"a"})));
  ASSERT_TRUE(ends.wait_quiet(2));
  EXPECT_EQ(ends.status(2), ItemStatus::kMissing);
  EXPECT_EQ(lines.awaited("no store client").size(), 1u);
  EXPECT_EQ(lines.awaited("has a new client").size(), 1u);
}

TEST(BlockingStore, AttemptsCanBeBounded) {
  const auto script = std::make_shared<Script>();
  script->on_make = [](int attempt) {
    if (attempt > 0) throw std::runtime_error("gone");
  };
  script->on_call = [](int, Call, const ObjectBatch&, CallEnd& end) {
    end.broken = true;
    return true;
  };
  BlockingStoreOptions options = quick();
  options.max_attempts = 3;
  BlockingStore store(factory_of(script), options);
  Ends ends(store);
  ASSERT_TRUE(start_exists(store, 1, batch_of({"a"})));
  ASSERT_TRUE(ends.wait_quiet(1));
  ASSERT_TRUE(eventually([&] { return store.counters().failed_attempts == 3; }));
  std::this_thread::sleep_for(milliseconds(100));
  EXPECT_EQ(script->attempts, 4);
}

TEST(BlockingStore, RetiredClientsAreBounded) {
  const auto script = std::make_shared<Script>();
  const auto gate = std::make_shared<Gate>();
  script->on_call = [](int, Call call, const ObjectBatch&, CallEnd& end) {
    end.quiet = call != Call::kGet;
    return !end.quiet;
  };
  script->on_tear_down = [gate](int) { gate->pass(); };
  BlockingStoreOptions options = quick();
  options.max_retired = 2;
  BlockingStore store(factory_of(script), options);
  std::array<std::byte, 16> memory{};
  Ends ends(store);
  for (const int op : {1, 2}) {
    ASSERT_TRUE(eventually([&] { return store.counters().usable; }));
    ASSERT_TRUE(start_get(store, op, batch_of({"a"}, memory.data(), 16)));
    ASSERT_TRUE(ends.wait_outcome(op));
  }
  std::this_thread::sleep_for(milliseconds(100));
  EXPECT_FALSE(store.counters().usable);
  EXPECT_EQ(store.counters().retired_now, 2u);
  EXPECT_EQ(store.counters().unquiet_now, 2u);
  gate->open();
  EXPECT_TRUE(ends.wait_quiet(1));
  EXPECT_TRUE(ends.wait_quiet(2));
  EXPECT_TRUE(eventually([&] { return store.counters().usable; }));
}

TEST(BlockingStore, RegionsAreCheckedAndIdempotent) {
  const auto script = std::make_shared<Script>();
  BlockingStore store(factory_of(script), quick());
  std::array<std::byte, 64> memory{};
  store.add_region({memory.data(), 32, -1});
  store.add_region({memory.data(), 32, -1});
  EXPECT_EQ(script->regions_of(0).size(), 1u);
  for (const Region& bad : {Region{memory.data() + 16, 32, -1}, Region{memory.data(), 31, -1},
                            Region{nullptr, 8, -1}, Region{memory.data(), 0, -1}}) {
    try {
      store.add_region(bad);
      FAIL();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    }
  }
  script->on_register = [](int, const Region&) {
    fail(ErrorCode::kUnavailable, "store client", {"region", "r", "0", {}});
  };
  EXPECT_THROW(store.add_region({memory.data() + 32, 32, -1}), Error);
  script->on_register = nullptr;
  store.add_region({memory.data() + 32, 32, -1});
  EXPECT_EQ(script->regions_of(0).size(), 2u);
  store.remove_region({memory.data(), 32, -1});
  store.remove_region({memory.data(), 32, -1});
  EXPECT_EQ(script->regions_of(0).size(), 1u);
}

TEST(BlockingStore, ClientThatCannotTakeTheRegionsIsNotUsed) {
  const auto script = std::make_shared<Script>();
  script->on_call = [](int client, Call, const ObjectBatch&, CallEnd& end) {
    end.broken = client == 0;
    return end.broken;
  };
  script->on_register = [](int client, const Region&) {
    if (client == 1) throw std::runtime_error("no memory to lock");
  };
  BlockingStore store(factory_of(script), quick());
  std::array<std::byte, 64> memory{};
  store.add_region({memory.data(), 64, -1});
  Ends ends(store);
  ASSERT_TRUE(start_exists(store, 1, batch_of({"a"})));
  ASSERT_TRUE(ends.wait_quiet(1));
  ASSERT_TRUE(eventually([&] { return store.counters().replacements == 1; }));
  EXPECT_TRUE(script->is_torn_down(1));
  EXPECT_EQ(script->regions_of(2).size(), 1u);
  EXPECT_EQ(store.counters().failed_attempts, 1u);
}

// Whoever has closed may unmap: no client, present or later, keeps the memory.
TEST(BlockingStore, AClosedSideGivesItsRegionsBack) {
  const auto script = std::make_shared<Script>();
  std::atomic<bool> broken = false;
  script->on_call = [&](int client, Call call, const ObjectBatch&, CallEnd& end) {
    if (client != 0 || call != Call::kExists || !broken) return false;
    end.broken = true;
    return true;
  };
  BlockingStore store(factory_of(script), quick());
  std::array<std::byte, 64> memory{};
  store.add_region({memory.data(), 32, -1});
  store.add_region({memory.data() + 32, 32, -1});
  ASSERT_EQ(script->regions_of(0).size(), 2u);
  EXPECT_EQ(store.close_store(kvprism::seconds(10)).unquiet, 0u);
  EXPECT_TRUE(script->regions_of(0).empty());
  // Lookups go on, and their next client gets none.
  Ends ends(store);
  broken = true;
  ASSERT_TRUE(start_exists(store, 1, batch_of({"a"})));
  ASSERT_TRUE(ends.wait_outcome(1));
  ASSERT_TRUE(eventually([&] { return store.counters().replacements == 1; }));
  EXPECT_TRUE(script->regions_of(1).empty());
  ASSERT_TRUE(start_exists(store, 2, batch_of({"a"})));
  ASSERT_TRUE(ends.wait_quiet(2));
  EXPECT_EQ(ends.status(2), ItemStatus::kMissing);
}

// With lookups going on, what was told as registered is tried again.
TEST(BlockingStore, ALaterCloseTriesRegionsAgain) {
  const auto script = std::make_shared<Script>();
  const auto gate = std::make_shared<Gate>();
  script->on_call = [](int client, Call, const ObjectBatch&, CallEnd& end) {
    end.broken = client == 0;
    return end.broken;
  };
  script->on_register = [gate](int client, const Region&) {
    if (client == 1) gate->pass();
  };
  BlockingStore store(factory_of(script), quick());
  std::array<std::byte, 64> memory{};
  store.add_region({memory.data(), 64, -1});
  Ends ends(store);
  ASSERT_TRUE(start_exists(store, 1, batch_of({"a"})));
  ASSERT_TRUE(gate->wait_for_visitor());
  EXPECT_EQ(store.close_store(kvprism::milliseconds(1)).unquiet, 1u) << "it is being registered";
  gate->open();
  ASSERT_TRUE(eventually([&] { return store.counters().usable; }));
  EXPECT_EQ(script->regions_of(1).size(), 1u);
  EXPECT_EQ(store.close_store(kvprism::seconds(10)).unquiet, 0u);
  EXPECT_TRUE(script->regions_of(1).empty());
}

TEST(BlockingStore, MemoryThatMayStillBeRegisteredIsNotGivenBack) {
  const auto script = std::make_shared<Script>();
  const auto gate = std::make_shared<Gate>();
  script->on_unregister = [gate](int, const Region&) { gate->pass(); };
  BlockingStore store(factory_of(script), quick());
  std::array<std::byte, 64> memory{};
  store.add_region({memory.data(), 64, -1});
  EXPECT_EQ(store.close_store(kvprism::milliseconds(1)).unquiet, 1u);
  // The owner closes the rest as well; nothing of that gives the memory back.
  EXPECT_EQ(store.close_index(kvprism::milliseconds(1)).unquiet, 0u);
  EXPECT_EQ(store.close_store(kvprism::milliseconds(1)).unquiet, 1u);
  gate->open();
  EXPECT_EQ(store.close_store(kvprism::seconds(10)).unquiet, 0u);
  EXPECT_TRUE(script->regions_of(0).empty());
}

}  // namespace
}  // namespace kvprism
