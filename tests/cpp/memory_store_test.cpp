#include "kvprism/backend/memory_store.h"

#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <string>
#include <vector>

#include "kvprism/base/error.h"

namespace kvprism {
namespace {

class MemoryStoreTest : public testing::Test {
 protected:
  using S = std::vector<ItemStatus>;

  std::shared_ptr<MemoryStore> client(const MemoryStoreOptions& options = {}) {
    auto store = std::make_shared<MemoryStore>(pool_, options);
    store->add_region({memory_.data(), memory_.size(), -1});
    return store;
  }
  std::unique_ptr<ObjectBatch> batch(const std::vector<std::string>& keys, std::size_t bytes,
                                     std::size_t offset = 0) {
    auto made = std::make_unique<ObjectBatch>();
    for (const std::string& key : keys) {
      made->keys.append() = key;
      made->segments.push_back({memory_.data() + offset, bytes});
      made->ends.push_back(static_cast<std::uint32_t>(made->segments.size()));
      offset += bytes;
    }
    return made;
  }
  static S take(MemoryStore& store, Instant now) {
    Completion done;
    if (!store.poll_store(now, done)) return {};
    S statuses;
    for (const ItemResult& item : done.items) statuses.push_back(item.status);
    return statuses;
  }
  S put(MemoryStore& store, const std::vector<std::string>& keys, std::size_t bytes,
        Instant now = {}) {
    auto items = batch(keys, bytes);
    EXPECT_TRUE(store.start_put(OpId{1}, items, now, now + seconds(1)));
    return take(store, now + seconds(1));
  }
  S get(MemoryStore& store, const std::vector<std::string>& keys, std::size_t bytes,
        Instant now = {}) {
    auto items = batch(keys, bytes, 2048);
    EXPECT_TRUE(store.start_get(OpId{1}, items, now, now + seconds(1)));
    return take(store, now + seconds(1));
  }
  S exists(MemoryStore& store, const std::vector<std::string>& keys, Instant now = {}) {
    auto items = std::make_unique<ObjectBatch>();
    for (const std::string& key : keys) items->keys.append() = key;
    EXPECT_TRUE(store.start_exists(OpId{1}, items, now, now + seconds(1)));
    Completion done;
    EXPECT_TRUE(store.poll_index(now, done));
    S statuses;
    for (const ItemResult& item : done.items) statuses.push_back(item.status);
    return statuses;
  }

  void use_pool(const MemoryPoolOptions& options) { pool_ = std::make_shared<MemoryPool>(options); }

  std::array<std::byte, 4096> memory_{};
  std::shared_ptr<MemoryPool> pool_ = std::make_shared<MemoryPool>();
};

TEST_F(MemoryStoreTest, ClientsShareThePool) {
  memory_[3] = std::byte{7};
  EXPECT_EQ(put(*client(), {"a"}, 64), S{ItemStatus::kOk});
  const auto other = client();
  EXPECT_EQ(get(*other, {"a"}, 64), S{ItemStatus::kOk});
  EXPECT_EQ(memory_[2048 + 3], std::byte{7});
  EXPECT_TRUE(pool_->contains("a"));
  EXPECT_EQ(pool_->counters().objects, 1U);
  EXPECT_EQ(pool_->counters().bytes, 64U);
}

TEST_F(MemoryStoreTest, LeastRecentlyUsedGoesFirst) {
  use_pool({.capacity_bytes = 192});
  const auto store = client();
  EXPECT_EQ(put(*store, {"a", "b", "c"}, 64), S(3, ItemStatus::kOk));
  EXPECT_EQ(get(*store, {"a"}, 64), S{ItemStatus::kOk});
  EXPECT_EQ(put(*store, {"d"}, 64), S{ItemStatus::kOk});
  EXPECT_EQ(exists(*store, {"a", "b", "c", "d"}),
            (S{ItemStatus::kOk, ItemStatus::kMissing, ItemStatus::kOk, ItemStatus::kOk}));
  EXPECT_EQ(pool_->counters().evicted, 1U);
}

TEST_F(MemoryStoreTest, FullWithoutEviction) {
  use_pool({.capacity_bytes = 640, .evict = false});
  const auto store = client();
  std::vector<std::string> keys;
  for (int i = 0; i < 25; ++i) keys.push_back(std::to_string(i));
  const S statuses = put(*store, keys, 64);
  for (int i = 0; i < 25; ++i) {
    EXPECT_EQ(statuses[static_cast<std::size_t>(i)],
              i < 10 ? ItemStatus::kOk : ItemStatus::kNoSpace);
  }
  EXPECT_EQ(pool_->counters().refused, 15U);
  EXPECT_TRUE(pool_->erase("3"));
  EXPECT_EQ(put(*store, {"10"}, 64), S{ItemStatus::kOk});
}

TEST_F(MemoryStoreTest, LargerThanThePool) {
  use_pool({.capacity_bytes = 100});
  EXPECT_EQ(put(*client(), {"a"}, 101), S{ItemStatus::kNoSpace});
  EXPECT_EQ(pool_->counters().bytes, 0U);
}

TEST_F(MemoryStoreTest, VirtualTime) {
  const auto store = client({.latency = milliseconds(2), .latency_per_kib = milliseconds(1)});
  auto items = batch({"a"}, 2048);
  ASSERT_TRUE(store->start_put(OpId{1}, items, Instant{0}, Instant{INT64_MAX}));
  EXPECT_EQ(take(*store, Instant{milliseconds(4).ns - 1}), S{});
  EXPECT_EQ(exists(*client(), {"a"}), S{ItemStatus::kNotReady});
  EXPECT_EQ(take(*store, Instant{milliseconds(4).ns}), S{ItemStatus::kOk});
  EXPECT_EQ(exists(*client(), {"a"}), S{ItemStatus::kOk});
}

TEST_F(MemoryStoreTest, SourcesAreReadWhenItIsDone) {
  const auto store = client({.latency = milliseconds(1)});
  auto items = batch({"a"}, 8);
  ASSERT_TRUE(store->start_put(OpId{1}, items, Instant{0}, Instant{INT64_MAX}));
  memory_[0] = std::byte{9};  // a source that is given up too early shows in the object
  take(*store, Instant{milliseconds(1).ns});
  EXPECT_EQ(get(*client(), {"a"}, 8), S{ItemStatus::kOk});
  EXPECT_EQ(memory_[2048], std::byte{9});
}

TEST_F(MemoryStoreTest, LeaseOver) {
  EXPECT_EQ(put(*client(), {"a"}, 64), S{ItemStatus::kOk});
  const auto slow = client({.latency = milliseconds(150), .lease = milliseconds(100)});
  EXPECT_EQ(get(*slow, {"a"}, 64), S{ItemStatus::kLeaseLost});
  EXPECT_NE(memory_[2048], std::byte{0}) << "the bytes are those of another object by then";
}

TEST_F(MemoryStoreTest, UnfinishedUntilItsWriterIsGivenUp) {
  const auto store = client();
  pool_->add_unfinished("a", 64, Instant{0});
  EXPECT_EQ(exists(*store, {"a"}), S{ItemStatus::kNotReady});
  EXPECT_EQ(put(*store, {"a"}, 64), S{ItemStatus::kDuplicate});
  EXPECT_EQ(get(*store, {"a"}, 64), S{ItemStatus::kNotReady});
  const Instant later{seconds(31).ns};
  EXPECT_EQ(put(*store, {"a"}, 64, later), S{ItemStatus::kOk});
  EXPECT_EQ(get(*store, {"a"}, 64, later), S{ItemStatus::kOk});
}

TEST_F(MemoryStoreTest, WriterThatClosesLeavesItUnfinished) {
  const auto store = client({.latency = milliseconds(5)});
  auto items = batch({"a"}, 64);
  ASSERT_TRUE(store->start_put(OpId{1}, items, Instant{0}, Instant{INT64_MAX}));
  EXPECT_EQ(store->close_store(milliseconds(1)).unquiet, 0U);
  EXPECT_EQ(take(*store, Instant{0}), S{ItemStatus::kCancelled});
  EXPECT_EQ(exists(*client(), {"a"}), S{ItemStatus::kNotReady});
  EXPECT_EQ(pool_->counters().unfinished, 1U);
}

TEST_F(MemoryStoreTest, NewObjectsOnceEach) {
  const auto store = client();
  put(*store, {"a", "b"}, 8);
  std::vector<std::string> seen;
  const auto visit = [&](std::string_view key, std::span<const std::byte> bytes) {
    seen.emplace_back(key);
    EXPECT_EQ(bytes.size(), 8U);
  };
  std::uint64_t version = pool_->for_each_new_object_since(0, visit);
  EXPECT_EQ(seen, (std::vector<std::string>{"a", "b"}));
  put(*store, {"b", "c"}, 8);
  pool_->erase("a");
  seen.clear();
  version = pool_->for_each_new_object_since(version, visit);
  EXPECT_EQ(seen, std::vector<std::string>{"c"});
  seen.clear();
  pool_->for_each_object(visit);
  EXPECT_EQ(seen, (std::vector<std::string>{"b", "c"}));
}

TEST_F(MemoryStoreTest, CallLimits) {
  const auto store = client({.max_segments_per_call = 2, .max_bytes_per_call = 100});
  EXPECT_EQ(put(*store, {"a", "b", "c"}, 8),
            (S{ItemStatus::kOk, ItemStatus::kOk, ItemStatus::kInvalid}));
  EXPECT_EQ(put(*store, {"d", "e"}, 60), (S{ItemStatus::kOk, ItemStatus::kInvalid}));
  EXPECT_EQ(store->capabilities().max_segments_per_call, 2U);
}

TEST(MemoryStoreSetUp, NeedsAPool) {
  try {
    MemoryStore(nullptr);
    FAIL() << "null was taken";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_NE(std::string(error.what()).find("pool = null: expected a pool"), std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace kvprism
