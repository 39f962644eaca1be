// What a service that does not answer costs those who use a blocking client: no wait without a
// bound.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "blocking_fixture.h"
#include "failing_memory.h"
#include "kvprism/base/error.h"

namespace kvprism {
namespace {

using test::batch_of;
using test::Call;
using test::Ends;
using test::eventually;
using test::factory_of;
using test::Gate;
using test::LogLines;
using test::quick;
using test::Script;
using test::start_exists;
using test::start_get;
using test::start_put;

std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kTimedOut);
    return error.what();
  }
  return "no error";
}

// R51: a lookup that fails opens the circuit as a transfer does, and the client stays.
TEST(BlockingStore, ServiceThatDoesNotAnswerIsAskedOnceInAnInterval) {
  const auto script = std::make_shared<Script>();
  std::atomic<bool> up = true;
  std::atomic<int> calls = 0;
  script->on_call = [&](int, Call, const ObjectBatch&, CallEnd& end) {
    if (up) return false;
    ++calls;
    end.unreachable = true;
    return true;  // leaves kCancelled
  };
  BlockingStoreOptions options = quick();
  options.probe_interval = kvprism::seconds(3600);
  LogLines lines;
  {
    BlockingStore store(factory_of(script), options);
    std::array<std::byte, 16> memory{};
    Ends ends(store);
    up = false;
    ASSERT_TRUE(start_exists(store, 1, batch_of({"a"})));
    ASSERT_TRUE(ends.wait_quiet(1));
    EXPECT_FALSE(store.counters().usable);
    for (int op = 2; op < 22; ++op) {
      ASSERT_TRUE(start_exists(store, op, batch_of({"a", "b"})));
      ends.drain();
      ASSERT_TRUE(ends.is_quiet(op)) << "it has been answered without a wait";
      EXPECT_EQ(ends.status(op), ItemStatus::kUnavailable);
    }
    ASSERT_TRUE(start_get(store, 22, batch_of({"a"}, memory.data(), 16)));
    ASSERT_TRUE(start_put(store, 23, batch_of({"a"}, memory.data(), 16)));
    ends.drain();
    for (const int op : {22, 23}) EXPECT_EQ(ends.status(op), ItemStatus::kUnavailable);
    const BlockingStoreCounters counters = store.counters();
    EXPECT_EQ(calls, 1);
    EXPECT_EQ(counters.exists_calls, 1u);
    EXPECT_EQ(counters.get_calls + counters.put_calls, 0u);
    EXPECT_EQ(counters.circuit_open, 22u);
    EXPECT_EQ(counters.probes, 0u) << "not before the interval is over";
  }
  EXPECT_EQ(script->made, 1);
  EXPECT_EQ(lines.awaited("does not answer").size(), 1u);
  EXPECT_EQ(lines.containing("is replaced").size(), 0u);
}

TEST(BlockingStore, ServiceThatAnswersAgainIsUsedAgain) {
  const auto script = std::make_shared<Script>();
  std::atomic<bool> up = false;
  script->on_call = [&](int, Call, const ObjectBatch&, CallEnd& end) {
    end.unreachable = !up;
    return end.unreachable;
  };
  BlockingStoreOptions options = quick();
  options.probe_interval = kvprism::milliseconds(5);
  LogLines lines;
  BlockingStore store(factory_of(script), options);
  Ends ends(store);
  ASSERT_TRUE(start_exists(store, 1, batch_of({"a"})));
  ASSERT_TRUE(ends.wait_quiet(1));
  ASSERT_TRUE(eventually([&] { return store.counters().probes >= 3; }));
  EXPECT_FALSE(store.counters().usable);
  EXPECT_EQ(store.counters().exists_calls, 1u);
  up = true;
  ASSERT_TRUE(eventually([&] { return store.counters().usable; }));
  ASSERT_TRUE(start_exists(store, 2, batch_of({"a"})));
  ASSERT_TRUE(ends.wait_quiet(2));
  EXPECT_EQ(ends.status(2), ItemStatus::kMissing);
  EXPECT_EQ(script->made, 1);
  EXPECT_EQ(lines.awaited("does not answer").size(), 1u);
  EXPECT_EQ(lines.awaited("answers again").size(), 1u);
}

TEST(BlockingStore, QuestionThatDoesNotReturnReplacesTheClient) {
  const auto script = std::make_shared<Script>();
  const auto gate = std::make_shared<Gate>();
  std::atomic<int> asked = 0;
  script->on_call = [&](int client, Call, const ObjectBatch&, CallEnd& end) {
    if (client != 0) return false;
    if (asked++ != 0) gate->pass();
    end.unreachable = true;
    return true;
  };
  BlockingStoreOptions options = quick();
  options.probe_interval = kvprism::milliseconds(1);
  LogLines lines;
  BlockingStore store(factory_of(script), options);
  std::array<std::byte, 64> memory{};
  store.add_region({memory.data(), memory.size(), -1});
  Ends ends(store);
  ASSERT_TRUE(start_exists(store, 1, batch_of({"a"})));
  ASSERT_TRUE(ends.wait_quiet(1));
  ASSERT_TRUE(eventually([&] { return store.counters().replacements == 1; }));
  ASSERT_TRUE(start_exists(store, 2, batch_of({"a"})));
  ASSERT_TRUE(ends.wait_quiet(2));
  EXPECT_EQ(ends.status(2), ItemStatus::kMissing);
  EXPECT_EQ(store.counters().stuck_calls, 1u);
  EXPECT_EQ(lines.awaited("a question does not return").size(), 1u);
  EXPECT_EQ(store.close_store(kvprism::milliseconds(1)).unquiet, 1u)
      << "no operation is unquiet, and the client that hangs has the memory";
  EXPECT_TRUE(script->regions_of(1).empty());
  gate->open();
  EXPECT_TRUE(eventually([&] { return script->is_torn_down(0); }));
  EXPECT_EQ(store.close_store(kvprism::seconds(10)).unquiet, 0u);
}

TEST(BlockingStore, RegistrationHasABound) {
  const auto script = std::make_shared<Script>();
  const auto gate = std::make_shared<Gate>();
  std::atomic<bool> hang = true;
  script->on_register = [&](int client, const Region&) {
    if (client == 0 && hang) gate->pass();
  };
  BlockingStoreOptions options = quick();
  options.region_timeout = kvprism::milliseconds(50);
  BlockingStore store(factory_of(script), options);
  std::array<std::byte, 64> memory{};
  const Region region{memory.data(), memory.size(), -1};
  const std::string why = message_of([&] { store.add_region(region); });
  EXPECT_NE(why.find("an end of registering memory within 50 ms"), std::string::npos) << why;
  EXPECT_NE(why.find("64 bytes"), std::string::npos) << why;
  // Its client is on its way out, and the next one does not know the region.
  EXPECT_EQ(store.counters().retired_now, 1u);
  ASSERT_TRUE(eventually([&] { return store.counters().replacements == 1; }));
  EXPECT_TRUE(script->regions_of(1).empty());
  hang = false;
  std::array<std::byte, 32> other{};
  const Region second{other.data(), other.size(), -1};
  store.add_region(second);
  EXPECT_EQ(script->regions_of(1), std::vector<Region>{second});
  EXPECT_EQ(store.close_store(kvprism::seconds(1)).unquiet, 2u) << "it may have the first one";
  gate->open();
  EXPECT_TRUE(eventually([&] { return store.counters().retired_now == 0; }));
  EXPECT_EQ(store.close_store(kvprism::seconds(10)).unquiet, 0u);
}

TEST(BlockingStore, RemovalOfARegionHasABound) {
  const auto script = std::make_shared<Script>();
  const auto gate = std::make_shared<Gate>();
  script->on_unregister = [&](int, const Region&) { gate->pass(); };
  BlockingStoreOptions options = quick();
  options.region_timeout = kvprism::milliseconds(50);
  BlockingStore store(factory_of(script), options);
  std::array<std::byte, 64> memory{};
  store.add_region({memory.data(), memory.size(), -1});
  const std::string why =
      message_of([&] { store.remove_region({memory.data(), memory.size(), -1}); });
  EXPECT_NE(why.find("an end of unregistering memory within 50 ms"), std::string::npos) << why;
  EXPECT_EQ(store.counters().retired_now, 1u);
  EXPECT_EQ(store.close_store(kvprism::milliseconds(1)).unquiet, 1u) << "it may still have it";
  gate->open();
  EXPECT_TRUE(eventually([&] { return store.counters().retired_now == 0; }));
}

TEST(BlockingStore, NobodyWaitsForANewClientsRegistrationWithoutABound) {
  const auto script = std::make_shared<Script>();
  const auto gate = std::make_shared<Gate>();
  script->on_call = [&](int client, Call, const ObjectBatch&, CallEnd& end) {
    if (client == 1) gate->pass();  // the question to the new client
    end.broken = client == 0;
    return end.broken;
  };
  BlockingStoreOptions options = quick();
  options.region_timeout = kvprism::milliseconds(50);
  BlockingStore store(factory_of(script), options);
  std::array<std::byte, 64> memory{};
  Ends ends(store);
  ASSERT_TRUE(start_exists(store, 1, batch_of({"a"})));
  ASSERT_TRUE(gate->wait_for_visitor());
  const Region region{memory.data(), memory.size(), -1};
  for (const auto& call : std::vector<std::function<void()>>{
           [&] { store.add_region(region); }, [&] { store.remove_region(region); }}) {
    const std::string why = message_of(call);
    EXPECT_NE(why.find("another registration, of a new client perhaps, within 50 ms"),
              std::string::npos)
        << why;
  }
  gate->open();
  ASSERT_TRUE(eventually([&] { return store.counters().usable; }));
  store.add_region(region);
}

// Whoever tries again may unmap the memory once that succeeds.
TEST(BlockingStore, ARegionThatCouldNotBeTakenBackIsTakenBackByTheNextAttempt) {
  const auto script = std::make_shared<Script>();
  const auto gate = std::make_shared<Gate>();
  script->on_call = [&](int client, Call, const ObjectBatch&, CallEnd& end) {
    if (client == 1) gate->pass();  // the question to the new client, which has the region
    end.broken = client == 0;
    return end.broken;
  };
  BlockingStoreOptions options = quick();
  options.region_timeout = kvprism::seconds(1);
  BlockingStore store(factory_of(script), options);
  std::array<std::byte, 64> memory{};
  const Region region{memory.data(), memory.size(), -1};
  store.add_region(region);
  Ends ends(store);
  ASSERT_TRUE(start_exists(store, 1, batch_of({"a"})));
  ASSERT_TRUE(gate->wait_for_visitor());
  EXPECT_NE(message_of([&] { store.remove_region(region); }), "");
  gate->open();
  ASSERT_TRUE(eventually([&] { return store.counters().usable; }));
  ASSERT_EQ(script->regions_of(1).size(), 1u);
  ASSERT_TRUE(eventually([&] { return store.counters().retired_now == 0; }));
  store.remove_region(region);
  EXPECT_TRUE(script->regions_of(1).empty());
  EXPECT_EQ(store.close_store(kvprism::seconds(5)).unquiet, 0u);
}

// Also where memory runs out in the middle of it.
TEST(BlockingStore, ARegionIsNotForgottenForWantOfMemory) {
  const auto script = std::make_shared<Script>();
  BlockingStoreOptions options = quick();
  options.region_timeout = kvprism::seconds(10);
  int failed = 0;
  for (int succeed = 0; succeed < 12; ++succeed) {
    BlockingStore store(factory_of(script), options);
    const int client = script->made - 1;
    std::array<std::byte, 64> memory{};
    const Region region{memory.data(), memory.size(), -1};
    store.add_region(region);
    test::until_failure = succeed;
    test::counting = true;
    try {
      store.remove_region(region);
    } catch (const std::exception&) {
      ++failed;
    }
    test::counting = false;
    store.remove_region(region);
    EXPECT_TRUE(script->regions_of(client).empty()) << succeed << " allocations succeeded";
    EXPECT_EQ(store.close_store(kvprism::seconds(5)).unquiet, 0u);
  }
  EXPECT_GT(failed, 2);
}

TEST(BlockingStore, ARegionOfAClientThatHangsIsNotTakenBackBeforeItIsGone) {
  const auto script = std::make_shared<Script>();
  const auto gate = std::make_shared<Gate>();
  script->on_unregister = [&](int client, const Region&) {
    if (client == 0) gate->pass();
  };
  BlockingStoreOptions options = quick();
  options.region_timeout = kvprism::seconds(1);
  BlockingStore store(factory_of(script), options);
  std::array<std::byte, 64> memory{};
  const Region region{memory.data(), memory.size(), -1};
  store.add_region(region);
  for (int attempt = 0; attempt < 2; ++attempt) {
    const std::string why = message_of([&] { store.remove_region(region); });
    EXPECT_NE(why.find("until the client is gone (retired_now is 0)"), std::string::npos) << why;
  }
  gate->open();
  store.remove_region(region);
  EXPECT_TRUE(script->is_torn_down(0));
}

// A maker that hangs must not keep the store off, nor whoever changes its memory waiting.
TEST(BlockingStore, AClientThatIsNeverMadeIsGivenUp) {
  for (const bool registering : {false, true}) {
    const auto script = std::make_shared<Script>();
    const auto gate = std::make_shared<Gate>();
    script->on_call = [](int client, Call, const ObjectBatch&, CallEnd& end) {
      end.broken = client == 0;
      return end.broken;
    };
    script->on_make = [gate, registering](int attempt) {
      if (!registering && attempt == 1) gate->pass();
    };
    script->on_register = [gate, registering](int client, const Region&) {
      if (registering && client == 1) gate->pass();
    };
    BlockingStoreOptions options = quick();
    options.setup_timeout = kvprism::milliseconds(500);
    options.region_timeout = kvprism::milliseconds(500);
    LogLines lines;
    BlockingStore store(factory_of(script), options);
    const std::shared_ptr<void> at_end(nullptr, [gate](void*) { gate->open(); });
    std::array<std::byte, 64> memory{};
    const Region first{memory.data(), 32, -1};
    const Region second{memory.data() + 32, 32, -1};
    store.add_region(first);
    if (registering) store.add_region(second);
    Ends ends(store);
    ASSERT_TRUE(start_exists(store, 1, batch_of({"a"})));
    ASSERT_TRUE(ends.wait_quiet(1));
    ASSERT_TRUE(gate->wait_for_visitor());
    ASSERT_TRUE(eventually([&] { return store.counters().usable; })) << registering;
    store.add_region(second);
    EXPECT_EQ(script->attempts, 3);
    const int third = registering ? 2 : 1;
    EXPECT_EQ(script->regions_of(third), (std::vector<Region>{first, second}));
    ASSERT_TRUE(eventually([&] { return store.counters().retired_now == 1; }));
    EXPECT_EQ(store.counters().failed_attempts, 1u);
    EXPECT_EQ(lines.awaited("no store client, trying on: it was not made within 1000 ms").size(),
              1u);
    if (registering) {
      EXPECT_EQ(store.close_store(kvprism::seconds(2)).unquiet, 2u)
          << "the one that was given up may have them";
    }
    gate->open();
    ASSERT_TRUE(eventually([&] { return store.counters().retired_now == 0; }));
    if (registering) {
      EXPECT_EQ(script->regions_of(1), std::vector<Region>{first}) << "no more than it had begun";
      EXPECT_EQ(store.close_store(kvprism::seconds(10)).unquiet, 0u);
      EXPECT_TRUE(script->regions_of(third).empty());
    }
    const int late = registering ? 1 : 2;
    EXPECT_TRUE(script->is_torn_down(late)) << "it takes over from nobody";
    EXPECT_FALSE(script->is_torn_down(third));
    EXPECT_EQ(store.counters().replacements, 1u);
    ASSERT_TRUE(start_exists(store, 2, batch_of({"a"})));
    ASSERT_TRUE(ends.wait_quiet(2));
    EXPECT_EQ(ends.status(2), ItemStatus::kMissing);
  }
}

// Two calls of one client may come back broken: it is replaced once, and told once.
TEST(BlockingStore, ReplacementIsToldOnce) {
  const auto script = std::make_shared<Script>();
  const auto gate = std::make_shared<Gate>();
  script->on_call = [&](int client, Call call, const ObjectBatch&, CallEnd& end) {
    if (client != 0) return false;
    if (call == Call::kPut) gate->pass();
    end.quiet = false;
    return true;
  };
  BlockingStoreOptions options = quick();
  options.stuck_after = kvprism::seconds(60);
  LogLines lines;
  {
    BlockingStore store(factory_of(script), options);
    std::array<std::byte, 32> memory{};
    Ends ends(store);
    ASSERT_TRUE(start_put(store, 1, batch_of({"a"}, memory.data(), 16)));
    ASSERT_TRUE(gate->wait_for_visitor());
    ASSERT_TRUE(start_get(store, 2, batch_of({"b"}, memory.data() + 16, 16)));
    ASSERT_TRUE(ends.wait_outcome(2));
    gate->open();
    for (const int op : {1, 2}) ASSERT_TRUE(ends.wait_quiet(op));
    EXPECT_EQ(store.counters().unquiet_calls, 2u);
  }
  // Its end waits for what is still to be logged.
  EXPECT_EQ(lines.containing("is replaced").size(), 1u);
}

// Nor does a line about a client that is replaced: operations, counters and the end go on.
TEST(Log, ASinkThatBlocksHoldsUpNoStore) {
  struct Sink {
    Gate gate;
    std::atomic<int> lines = 0;
  } sink;
  set_log_sink(
      [](void* context, LogLevel, std::string_view) {
        auto& self = *static_cast<Sink*>(context);
        self.gate.pass();
        ++self.lines;
      },
      &sink, LogLevel::kWarning);
  {
    const auto script = std::make_shared<Script>();
    script->on_call = [](int client, Call, const ObjectBatch&, CallEnd& end) {
      end.broken = client == 0;
      return end.broken;
    };
    BlockingStoreOptions options = quick();
    options.close_budget = kvprism::milliseconds(50);
    BlockingStore store(factory_of(script), options);
    Ends ends(store);
    ASSERT_TRUE(start_exists(store, 1, batch_of({"a"})));
    ASSERT_TRUE(sink.gate.wait_for_visitor());
    ASSERT_TRUE(ends.wait_outcome(1));
    ASSERT_TRUE(eventually([&] { return store.counters().replacements == 1; }));
    ASSERT_TRUE(start_exists(store, 2, batch_of({"a"})));
    ASSERT_TRUE(ends.wait_quiet(2));
    EXPECT_EQ(ends.status(2), ItemStatus::kMissing);
    EXPECT_EQ(store.close_store(kvprism::milliseconds(50)).unquiet, 0u);
    EXPECT_EQ(sink.lines, 0);
  }
  sink.gate.open();
  EXPECT_TRUE(eventually([&] { return sink.lines == 2; })) << "no line is lost";
  set_log_sink(nullptr, nullptr, LogLevel::kOff);
}

// A sink that blocks holds up its own caller only.
TEST(Log, ASinkThatBlocksHoldsUpNobodyElse) {
  struct Sink {
    Gate gate;
    std::atomic<int> lines = 0;
  } sink;
  set_log_sink(
      [](void* context, LogLevel, std::string_view line) {
        auto& self = *static_cast<Sink*>(context);
        if (line == "slow") self.gate.pass();
        ++self.lines;
      },
      &sink, LogLevel::kWarning);
  std::thread slow([] { log(LogLevel::kWarning, "slow"); });
  ASSERT_TRUE(sink.gate.wait_for_visitor());
  log(LogLevel::kWarning, "quick");
  EXPECT_EQ(sink.lines, 1);
  sink.gate.open();
  slow.join();
  set_log_sink(nullptr, nullptr, LogLevel::kOff);
  EXPECT_EQ(sink.lines, 2);
}

}  // namespace
}  // namespace kvprism
