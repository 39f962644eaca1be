// Closing a blocking store while a client is being made, has failed, or would be made for nobody.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <memory>
#include <thread>

#include "blocking_fixture.h"
#include "kvprism/base/error.h"

namespace kvprism {
namespace {

using std::chrono::milliseconds;
using test::batch_of;
using test::Call;
using test::Ends;
using test::eventually;
using test::factory_of;
using test::Gate;
using test::quick;
using test::Script;
using test::start_exists;
using test::start_get;

// Every call of the first `count` clients comes back broken.
void break_clients(Script& script, int count) {
  script.on_call = [count](int client, Call, const ObjectBatch&, CallEnd& end) {
    end.broken = client < count;
    return end.broken;
  };
}

TEST(BlockingClose, AClientThatFailedCountsUntilItIsTornDown) {
  const auto script = std::make_shared<Script>();
  const auto gate = std::make_shared<Gate>();
  break_clients(*script, 2);
  script->on_tear_down = [gate](int client) {
    if (client == 1) gate->pass();
  };
  BlockingStore store(factory_of(script), quick());
  std::array<std::byte, 64> memory{};
  store.add_region({memory.data(), 64, -1});
  Ends ends(store);
  ASSERT_TRUE(start_exists(store, 1, batch_of({"a"})));
  ASSERT_TRUE(gate->wait_for_visitor()) << "it has not answered";
  ASSERT_TRUE(eventually([&] { return script->is_torn_down(0); }));
  std::this_thread::sleep_for(milliseconds(20));
  EXPECT_EQ(store.counters().retired_now, 1u);
  EXPECT_EQ(script->regions_of(1).size(), 1u);
  EXPECT_EQ(store.close_store(kvprism::milliseconds(1)).unquiet, 1u);
  gate->open();
  EXPECT_EQ(store.close_store(kvprism::seconds(10)).unquiet, 0u);
  EXPECT_TRUE(script->is_torn_down(1));
  EXPECT_EQ(store.counters().retired_now, 0u);
}

TEST(BlockingClose, AClientThatFailedAndHangsCountsOnceWhenItIsGivenUp) {
  const auto script = std::make_shared<Script>();
  const auto gate = std::make_shared<Gate>();
  break_clients(*script, 2);
  script->on_tear_down = [gate](int client) {
    if (client == 1) gate->pass();
  };
  BlockingStoreOptions options = quick();
  options.setup_timeout = kvprism::milliseconds(200);
  options.region_timeout = kvprism::milliseconds(200);
  BlockingStore store(factory_of(script), options);
  Ends ends(store);
  ASSERT_TRUE(start_exists(store, 1, batch_of({"a"})));
  ASSERT_TRUE(eventually([&] { return store.counters().usable && script->made == 3; }));
  ASSERT_TRUE(eventually([&] { return script->is_torn_down(0); }));
  std::this_thread::sleep_for(milliseconds(20));
  EXPECT_EQ(store.counters().retired_now, 1u);
  EXPECT_EQ(store.counters().failed_attempts, 1u);
  gate->open();
  ASSERT_TRUE(eventually([&] { return store.counters().retired_now == 0; }));
  EXPECT_TRUE(script->is_torn_down(1));
}

// As Python's and C's stores do: lookups first.
TEST(BlockingClose, MemoryIsCountedWhileAClientRegistersItAndNoneIsRegisteredAfterwards) {
  const auto script = std::make_shared<Script>();
  const auto gate = std::make_shared<Gate>();
  std::atomic<int> registered = 0;
  break_clients(*script, 1);
  script->on_register = [gate, &registered](int client, const Region&) {
    if (client == 0) return;
    ++registered;
    gate->pass();
  };
  BlockingStore store(factory_of(script), quick());
  std::array<std::byte, 64> memory{};
  store.add_region({memory.data(), 32, -1});
  store.add_region({memory.data() + 32, 32, -1});
  Ends ends(store);
  ASSERT_TRUE(start_exists(store, 1, batch_of({"a"})));
  ASSERT_TRUE(gate->wait_for_visitor());
  ASSERT_TRUE(eventually([&] { return script->is_torn_down(0); }));
  EXPECT_EQ(store.close_index(kvprism::milliseconds(1)).unquiet, 0u);
  EXPECT_EQ(store.close_store(kvprism::milliseconds(1)).unquiet, 2u);
  gate->open();
  EXPECT_EQ(store.close_store(kvprism::seconds(10)).unquiet, 0u);
  EXPECT_TRUE(script->is_torn_down(1));
  EXPECT_EQ(registered, 1) << "after both sides were closed no registration may begin";
}

// A worker's process never asks.
TEST(BlockingClose, NoClientIsMadeForLookupsThatNobodyMakes) {
  const auto script = std::make_shared<Script>();
  const auto gate = std::make_shared<Gate>();
  script->on_call = [gate](int client, Call, const ObjectBatch&, CallEnd&) {
    if (client == 0) gate->pass();
    return client == 0;
  };
  BlockingStoreOptions options = quick();
  options.stuck_after = kvprism::seconds(60);
  BlockingStore store(factory_of(script), options);
  std::array<std::byte, 16> memory{};
  Ends ends(store);
  ASSERT_TRUE(start_get(store, 1, batch_of({"a"}, memory.data(), 16)));
  ASSERT_TRUE(gate->wait_for_visitor());
  EXPECT_EQ(store.close_store(kvprism::milliseconds(20)).unquiet, 1u);
  std::this_thread::sleep_for(milliseconds(100));
  EXPECT_EQ(script->attempts, 1);
  EXPECT_FALSE(store.counters().usable);
  // The first lookup is a miss, and later ones have a client.
  ASSERT_TRUE(start_exists(store, 2, batch_of({"a"})));
  ASSERT_TRUE(ends.wait_quiet(2));
  EXPECT_EQ(ends.status(2), ItemStatus::kUnavailable);
  ASSERT_TRUE(eventually([&] { return store.counters().usable; }));
  ASSERT_TRUE(start_exists(store, 3, batch_of({"a"})));
  ASSERT_TRUE(ends.wait_quiet(3));
  EXPECT_EQ(ends.status(3), ItemStatus::kMissing);
  EXPECT_EQ(script->attempts, 2);
  gate->open();
  EXPECT_TRUE(ends.wait_quiet(1));
}

// A scheduler's process moves nothing.
TEST(BlockingClose, NoClientIsMadeForTransfersThatNobodyMakes) {
  const auto script = std::make_shared<Script>();
  const auto gate = std::make_shared<Gate>();
  script->on_call = [gate](int client, Call, const ObjectBatch&, CallEnd&) {
    if (client == 0) gate->pass();
    return client == 0;
  };
  BlockingStoreOptions options = quick();
  options.stuck_after = kvprism::seconds(60);
  BlockingStore store(factory_of(script), options);
  Ends ends(store);
  ASSERT_TRUE(start_exists(store, 1, batch_of({"a"})));
  ASSERT_TRUE(gate->wait_for_visitor());
  EXPECT_EQ(store.close_index(kvprism::milliseconds(20)).unquiet, 1u);
  std::this_thread::sleep_for(milliseconds(100));
  EXPECT_EQ(script->attempts, 1);
  std::array<std::byte, 16> memory{};
  const Region region{memory.data(), memory.size(), -1};
  EXPECT_THROW(store.add_region(region), Error);
  ASSERT_TRUE(eventually([&] { return store.counters().usable; }));
  store.add_region(region);
  EXPECT_EQ(script->regions_of(1).size(), 1u);
  gate->open();
  EXPECT_TRUE(ends.wait_quiet(1));
}

}  // namespace
}  // namespace kvprism
