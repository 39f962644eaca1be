// What the Mooncake client asks of a library whose answers the test decides.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "backend/exit_guard.h"
#include "backend/mooncake_native.h"

namespace kvprism {
namespace {

// The master and the storage die in turns that no process can be made to take.
struct Native {
  static inline std::atomic<int> gets = 0;
  static inline std::atomic<int> sizes = 0;
  static inline std::deque<std::int64_t> size_answers;
  static inline bool fills = false;
  static inline bool moves = false;
  static inline std::atomic<bool> registering = false;
  static inline std::chrono::milliseconds registration{0};
  // Slices inside native calls, and the most that there ever were.
  static inline std::mutex mutex;
  static inline std::size_t slices = 0;
  static inline std::size_t most_slices = 0;
  static inline std::atomic<bool> hold = false;

  static std::vector<int> move(const mooncake::Strings& keys,
                               const mooncake::LengthLists& lengths) {
    std::size_t own = 0;
    std::vector<int> codes;
    for (std::size_t i = 0; i < keys.size(); ++i) {
      own += lengths[i].size();
      codes.push_back(std::accumulate(lengths[i].begin(), lengths[i].end(), 0));
    }
    const auto add = [](std::size_t more, std::size_t less) {
      const std::lock_guard lock(mutex);
      slices += more;
      slices -= less;
      most_slices = std::max(most_slices, slices);
    };
    add(own, 0);
    do {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    } while (hold);
    add(0, own);
    return codes;
  }

  // As Mooncake: the buffers of a call's last item with a key are those of all items with it.
  static std::vector<int> fill(const mooncake::Strings& keys, const mooncake::BufferLists& buffers,
                               const mooncake::LengthLists& lengths) {
    std::map<std::string, std::size_t> by_key;
    for (std::size_t i = 0; i < keys.size(); ++i) by_key[keys[i]] = i;
    for (const auto& [key, at] : by_key) std::memset(buffers[at][0], 1, lengths[at][0]);
    std::vector<int> codes;
    for (const auto& of_item : lengths) codes.push_back(static_cast<int>(of_item[0]));
    return codes;
  }

  static mooncake::Library library() {
    gets = 0;
    sizes = 0;
    fills = moves = false;
    hold = false;
    slices = most_slices = 0;
    size_answers.clear();
    mooncake::Library library;
    library.tcp_queue = mooncake::kTcpQueue;
    library.store.create = [] {
      return std::shared_ptr<mooncake::NativeClient>(
          reinterpret_cast<mooncake::NativeClient*>(new int),
          [](mooncake::NativeClient* client) { delete reinterpret_cast<int*>(client); });
    };
    library.store.setup_real =
        [](mooncake::NativeClient*, const std::string&, const std::string&, std::size_t,
           std::size_t, const std::string&, const std::string&, const std::string&,
           const std::shared_ptr<mooncake::NativeEngine>&, const std::string&, bool,
           const std::string&, const std::string&, bool, int) { return 0; };
    library.store.register_buffer = [](mooncake::NativeClient*, void*, std::size_t) {
      registering = true;
      std::this_thread::sleep_for(registration);
      return 0;
    };
    library.store.batch_get_into_multi_buffers =
        [](mooncake::NativeClient*, const mooncake::Strings& keys,
           const mooncake::BufferLists& buffers, const mooncake::LengthLists& lengths, bool) {
          ++gets;
          if (moves) return move(keys, lengths);
          if (fills) return fill(keys, buffers, lengths);
          return std::vector<int>(keys.size(), mooncake::kTransferFailed);
        };
    library.store.batch_put_from_multi_buffers =
        [](mooncake::NativeClient*, const mooncake::Strings& keys, const mooncake::BufferLists&,
           const mooncake::LengthLists& lengths, const mooncake::ReplicateConfig&) {
          std::vector<int> codes = move(keys, lengths);
          std::fill(codes.begin(), codes.end(), mooncake::kOk);
          return codes;
        };
    library.store.get_size = [](mooncake::NativeClient*, const std::string&) {
      ++sizes;
      const std::int64_t answer = size_answers.front();
      if (size_answers.size() > 1) size_answers.pop_front();
      return answer;
    };
    library.store.tear_down_all = [](mooncake::NativeClient*) { return 0; };
    return library;
  }
};

constexpr std::size_t kItems = 8;

struct Got {
  CallEnd end;
  std::vector<ItemStatus> statuses;
};

Got get_all(BlockingClient& client, std::array<std::byte, 64>& memory,
            std::size_t different = kItems) {
  ObjectBatch batch;
  for (std::size_t i = 0; i < kItems; ++i) {
    batch.keys.append() = "key" + std::to_string(i % different);
    batch.segments.push_back({memory.data() + 8 * i, 8});
    batch.ends.push_back(static_cast<std::uint32_t>(i + 1));
  }
  std::vector<ItemResult> results(kItems);
  Got got;
  got.end = client.get(batch, results);
  for (const ItemResult& result : results) got.statuses.push_back(result.status);
  return got;
}

class NativeCalls : public testing::Test {
 protected:
  NativeCalls() {
    options_.master = "127.0.0.1:1";  // nobody listens
    client_ = detail::make_mooncake_client(
        library_, options_, std::make_shared<detail::Knock>(HostPort{"127.0.0.1", 1}));
    client_->register_region({memory_.data(), memory_.size(), -1});
  }

  const mooncake::Library library_ = Native::library();
  MooncakeOptions options_;
  std::array<std::byte, 64> memory_{};
  std::unique_ptr<BlockingClient> client_;
};

// A process that exits with status 3 while memory is registered for so long.
[[noreturn]] void exit_while_registering(BlockingClient& client, std::chrono::milliseconds length) {
  detail::end_native_calls_at_exit();
  std::atexit([] { std::fputs("a handler", stderr); });
  Native::registering = false;
  Native::registration = length;
  static std::array<std::byte, 8> memory;
  std::thread([&] { client.register_region({memory.data(), memory.size(), -1}); }).detach();
  while (!Native::registering) std::this_thread::yield();
  std::exit(3);
}

using NativeCallsDeathTest = NativeCalls;

TEST_F(NativeCallsDeathTest, AnExitWaitsForACallThatReturns) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(exit_while_registering(*client_, std::chrono::milliseconds(300)),
              testing::ExitedWithCode(3), "a handler");
}

// What handlers destroy is still used.
TEST_F(NativeCallsDeathTest, AnExitLeavesHandlersOutForACallThatDoesNotReturn) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto began = std::chrono::steady_clock::now();
  EXPECT_EXIT(exit_while_registering(*client_, std::chrono::minutes(10)),
              testing::ExitedWithCode(3), testing::Not(testing::HasSubstr("a handler")));
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::minutes(1));
}

// Each question to a dead master takes seconds, and the call is not quiet before it returns.
TEST_F(NativeCalls, ADeadMasterIsAskedForOneSize) {
  Native::size_answers = {mooncake::kRpcFailed};
  const Got got = get_all(*client_, memory_);
  EXPECT_EQ(Native::sizes, 1);
  EXPECT_FALSE(got.end.quiet);
  EXPECT_TRUE(got.end.unreachable);
  EXPECT_EQ(got.statuses, std::vector<ItemStatus>(kItems, ItemStatus::kFailed));
  // What the size has told holds for the next call: nothing native is called.
  EXPECT_EQ(get_all(*client_, memory_).statuses,
            std::vector<ItemStatus>(kItems, ItemStatus::kUnavailable));
  EXPECT_EQ(Native::gets, 1);
}

TEST_F(NativeCalls, SizesAreAskedForAsLongAsTheyExplainTheFailure) {
  Native::size_answers = {9, 7, 8};  // the third is what was expected
  const Got got = get_all(*client_, memory_);
  EXPECT_EQ(Native::sizes, 3);
  EXPECT_FALSE(got.end.quiet);
  EXPECT_FALSE(got.end.unreachable);
  std::vector<ItemStatus> expected(kItems, ItemStatus::kFailed);
  expected[0] = expected[1] = ItemStatus::kSizeMismatch;
  EXPECT_EQ(got.statuses, expected);
}

// What is told as loaded must be there, whatever a plan asks for twice.
TEST_F(NativeCalls, AKeyIsInACallOnce) {
  Native::fills = true;
  const Got got = get_all(*client_, memory_, 3);
  EXPECT_EQ(got.statuses, std::vector<ItemStatus>(kItems, ItemStatus::kOk));
  std::array<std::byte, 64> all{};
  all.fill(std::byte{1});
  EXPECT_EQ(memory_, all);
  EXPECT_EQ(Native::gets, 3);  // of 3, 3 and 2 items
}

// Objects of so many pieces of one byte.
ObjectBatch of_pieces(std::array<std::byte, 64>& memory, const std::vector<std::size_t>& pieces) {
  ObjectBatch batch;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    batch.keys.append() = "key" + std::to_string(i);
    for (std::size_t piece = 0; piece < pieces[i]; ++piece)
      batch.segments.push_back({memory.data() + piece % 64, 1});
    batch.ends.push_back(static_cast<std::uint32_t>(batch.segments.size()));
  }
  return batch;
}

// More of them hang for a minute in Mooncake's TCP transport.
TEST_F(NativeCalls, PutsAndGetsTogetherFitIntoTheQueue) {
  Native::moves = true;
  const std::vector<std::size_t> pieces = {700, 300, 1024, 512, 513, 1, 900, 500, 600, 200};
  const ObjectBatch batch = of_pieces(memory_, pieces);
  const auto run = [&](auto call) {
    for (int round = 0; round < 10; ++round) {
      std::vector<ItemResult> results(pieces.size());
      const CallEnd end = call(results);
      EXPECT_TRUE(end.quiet);
      for (const ItemResult& result : results) EXPECT_EQ(result.status, ItemStatus::kOk);
    }
  };
  std::thread puts([&] { run([&](auto& results) { return client_->put(batch, results); }); });
  run([&](auto& results) { return client_->get(batch, results); });
  puts.join();
  EXPECT_LE(Native::most_slices, mooncake::kTcpQueue);
  EXPECT_EQ(Native::slices, 0u);
}

TEST_F(NativeCalls, ALargeObjectDoesNotWaitWithoutABoundForTheOtherKind) {
  Native::moves = true;
  Native::hold = true;
  const ObjectBatch small = of_pieces(memory_, {512});
  const ObjectBatch large = of_pieces(memory_, {800, 900, 10});
  std::vector<ItemResult> got(1);
  std::thread gets([&] { client_->get(small, got); });
  while (Native::gets == 0) std::this_thread::yield();
  std::vector<ItemResult> put(3);
  const auto began = std::chrono::steady_clock::now();
  const CallEnd end = client_->put(large, put);
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(30));
  EXPECT_TRUE(end.quiet) << "nothing was started";
  EXPECT_FALSE(end.broken);
  for (const ItemResult& result : put) EXPECT_EQ(result.status, ItemStatus::kUnavailable);
  Native::hold = false;
  gets.join();
  EXPECT_EQ(got[0].status, ItemStatus::kOk);
  EXPECT_TRUE(client_->put(large, put).quiet);
  for (const ItemResult& result : put) EXPECT_EQ(result.status, ItemStatus::kOk);
}

TEST_F(NativeCalls, ObjectsOfOtherSizesLeaveACallQuiet) {
  Native::size_answers = {9};
  const Got got = get_all(*client_, memory_);
  EXPECT_EQ(Native::sizes, static_cast<int>(kItems));
  EXPECT_TRUE(got.end.quiet);
  EXPECT_EQ(got.statuses, std::vector<ItemStatus>(kItems, ItemStatus::kSizeMismatch));
}

}  // namespace
}  // namespace kvprism
