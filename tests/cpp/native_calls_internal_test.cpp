// What the Mooncake client asks of a library whose answers the test decides.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

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
#include <string>
#include <thread>
#include <vector>

#include "backend/exit_guard.h"
#include "backend/mooncake_native.h"

namespace kvprism {
namespace {

// The master and the storage die in turns that no process can be made to take.
struct Native {
  static inline int gets = 0;
  static inline int sizes = 0;
  static inline std::deque<std::int64_t> size_answers;
  static inline bool fills = false;
  static inline std::atomic<bool> registering = false;
  static inline std::chrono::milliseconds registration{0};

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
    gets = sizes = 0;
    fills = false;
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
          if (fills) return fill(keys, buffers, lengths);
          return std::vector<int>(keys.size(), mooncake::kTransferFailed);
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

TEST_F(NativeCalls, ObjectsOfOtherSizesLeaveACallQuiet) {
  Native::size_answers = {9};
  const Got got = get_all(*client_, memory_);
  EXPECT_EQ(Native::sizes, static_cast<int>(kItems));
  EXPECT_TRUE(got.end.quiet);
  EXPECT_EQ(got.statuses, std::vector<ItemStatus>(kItems, ItemStatus::kSizeMismatch));
}

}  // namespace
}  // namespace kvprism
