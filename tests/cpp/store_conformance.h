// What every object store must do, whatever is behind it. A test program instantiates the suite
// with its backends.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kvprism/base/error.h"
#include "kvprism/io/object_store.h"

namespace kvprism::test {

// One backend, connected. `now` is the backend's clock, `rest` lets some of its time pass.
struct StoreUnderTest {
  std::shared_ptr<ObjectStore> store;
  std::shared_ptr<ObjectIndex> index;
  std::function<Instant()> now;
  std::function<void()> rest;
  std::size_t queue_limit = 0;  // starts beyond it are refused when nothing is polled; 0: not known
  bool tells_duplicates = true;  // a put of a key that is there ends as kDuplicate, and not as kOk
  std::string key_prefix;        // unique, for pools that outlive a test
};

struct StoreFactory {
  std::string name;
  std::function<StoreUnderTest()> make;
};

inline std::string factory_name(const testing::TestParamInfo<StoreFactory>& info) {
  return info.param.name;
}

class StoreConformance : public testing::TestWithParam<StoreFactory> {
 protected:
  static constexpr std::size_t kBytes = 1 << 16;

  struct End {
    int outcomes = 0;
    int quiets = 0;
    std::vector<ItemResult> items;
    std::unique_ptr<ObjectBatch> batch;
  };

  void SetUp() override {
    test_ = GetParam().make();
    memory_ = std::shared_ptr<std::byte>(
        static_cast<std::byte*>(::operator new(kBytes, std::align_val_t{4096})),
        [](std::byte* base) { ::operator delete(base, std::align_val_t{4096}); });
    std::memset(memory_.get(), 0, kBytes);
    test_.store->add_region({memory_.get(), kBytes, -1});
  }
  void TearDown() override {
    test_.store->close_store(seconds(5));
    test_.index->close_index(seconds(5));
  }

  std::byte* at(std::size_t offset) { return memory_.get() + offset; }
  void fill(std::size_t offset, std::size_t bytes, unsigned seed) {
    for (std::size_t i = 0; i < bytes; ++i)
      at(offset)[i] = static_cast<std::byte>(seed * 31 + i * 7 + (i >> 8));
  }
  bool holds(std::size_t offset, std::size_t bytes, unsigned seed) {
    for (std::size_t i = 0; i < bytes; ++i) {
      if (at(offset)[i] != static_cast<std::byte>(seed * 31 + i * 7 + (i >> 8))) return false;
    }
    return true;
  }
  std::string key(const std::string& name) const {
    return test_.key_prefix + testing::UnitTest::GetInstance()->current_test_info()->name() + "-" +
           name;
  }

  static void add(ObjectBatch& batch, const std::string& key,
                  const std::vector<Segment>& segments) {
    batch.keys.append() = key;
    batch.segments.insert(batch.segments.end(), segments.begin(), segments.end());
    batch.ends.push_back(static_cast<std::uint32_t>(batch.segments.size()));
  }

  Instant far() { return test_.now() + seconds(60); }

  bool start_put(OpId op, std::unique_ptr<ObjectBatch>& batch) {
    return test_.store->start_put(op, batch, test_.now(), far());
  }
  bool start_get(OpId op, std::unique_ptr<ObjectBatch>& batch) {
    return test_.store->start_get(op, batch, test_.now(), far());
  }

  // Polls until `ops` are quiet, checking the order of both ends.
  void take(Completion& done) {
    End& end = ends_[static_cast<std::uint64_t>(done.op)];
    EXPECT_TRUE(done.outcome || done.quiet);
    if (done.outcome) {
      ++end.outcomes;
      end.items = done.items;
    }
    if (done.quiet) {
      EXPECT_EQ(end.outcomes, 1) << "quiet before outcome";
      ++end.quiets;
      end.batch = std::move(done.batch);
      EXPECT_NE(end.batch, nullptr) << "the batch comes back with quiet";
    }
    EXPECT_LE(end.outcomes, 1);
    EXPECT_LE(end.quiets, 1);
  }
  bool quiet(OpId op) { return ends_[static_cast<std::uint64_t>(op)].quiets != 0; }
  End& wait(OpId op) {
    for (int turn = 0; turn < 20'000 && !quiet(op); ++turn) {
      Completion done;
      bool moved = false;
      while (test_.store->poll_store(test_.now(), done)) {
        take(done);
        done = Completion();
        moved = true;
      }
      while (test_.index->poll_index(test_.now(), done)) {
        take(done);
        done = Completion();
        moved = true;
      }
      if (!moved) test_.rest();
    }
    EXPECT_TRUE(quiet(op));
    return ends_[static_cast<std::uint64_t>(op)];
  }

  void wait_for_oldest(const std::vector<OpId>& ops) {
    for (const OpId op : ops) {
      if (quiet(op)) continue;
      wait(op);
      return;
    }
    FAIL() << "refused although nothing is in flight";
  }

  OpId next() { return OpId{next_op_++}; }
  std::vector<ItemStatus> statuses(const End& end) {
    std::vector<ItemStatus> all;
    for (const ItemResult& item : end.items) all.push_back(item.status);
    return all;
  }
  std::vector<ItemStatus> put(
      const std::vector<std::pair<std::string, std::vector<Segment>>>& items) {
    auto batch = std::make_unique<ObjectBatch>();
    for (const auto& [name, segments] : items) add(*batch, name, segments);
    const OpId op = next();
    EXPECT_TRUE(start_put(op, batch));
    EXPECT_EQ(batch, nullptr);
    return statuses(wait(op));
  }
  std::vector<ItemStatus> get(
      const std::vector<std::pair<std::string, std::vector<Segment>>>& items) {
    auto batch = std::make_unique<ObjectBatch>();
    for (const auto& [name, segments] : items) add(*batch, name, segments);
    const OpId op = next();
    EXPECT_TRUE(start_get(op, batch));
    return statuses(wait(op));
  }
  std::vector<ItemStatus> exists(const std::vector<std::string>& keys) {
    auto batch = std::make_unique<ObjectBatch>();
    for (const std::string& name : keys) batch->keys.append() = name;
    const OpId op = next();
    EXPECT_TRUE(test_.index->start_exists(op, batch, test_.now(), far()));
    return statuses(wait(op));
  }

  std::vector<ItemResult> remove(const std::vector<std::string>& keys, const Removal& removal) {
    auto batch = std::make_unique<ObjectBatch>();
    for (const std::string& name : keys) batch->keys.append() = name;
    const OpId op = next();
    EXPECT_TRUE(test_.index->start_remove(op, batch, removal, test_.now(), far()));
    return wait(op).items;
  }

  using S = std::vector<ItemStatus>;
  StoreUnderTest test_;
  std::shared_ptr<std::byte> memory_;
  std::map<std::uint64_t, End> ends_;
  std::uint64_t next_op_ = 1;
};

TEST_P(StoreConformance, RoundTripOverSegments) {
  fill(0, 4096, 1);
  EXPECT_EQ(put({{key("a"), {{at(0), 1024}, {at(2048), 512}}}, {key("b"), {{at(1024), 1000}}}}),
            (S{ItemStatus::kOk, ItemStatus::kOk}));
  EXPECT_EQ(exists({key("a"), key("c"), key("b")}),
            (S{ItemStatus::kOk, ItemStatus::kMissing, ItemStatus::kOk}));
  // Other segments than at the put: an object is a run of bytes.
  EXPECT_EQ(get({{key("b"), {{at(8192), 1}, {at(8300), 999}}}, {key("a"), {{at(10240), 1536}}}}),
            (S{ItemStatus::kOk, ItemStatus::kOk}));
  EXPECT_EQ(std::memcmp(at(8192), at(1024), 1), 0);
  EXPECT_EQ(std::memcmp(at(8300), at(1025), 999), 0);
  EXPECT_EQ(std::memcmp(at(10240), at(0), 1024), 0);
  EXPECT_EQ(std::memcmp(at(10240 + 1024), at(2048), 512), 0);
  EXPECT_EQ(at(8193)[0], std::byte{0});
  EXPECT_EQ(at(8299)[0], std::byte{0});
  EXPECT_EQ(at(9299)[0], std::byte{0});
}

TEST_P(StoreConformance, BytesAreCounted) {
  fill(0, 1024, 1);
  auto batch = std::make_unique<ObjectBatch>();
  add(*batch, key("a"), {{at(0), 100}, {at(200), 50}});
  const OpId op = next();
  ASSERT_TRUE(start_put(op, batch));
  EXPECT_EQ(wait(op).items[0], (ItemResult{ItemStatus::kOk, 150}));
  batch = std::make_unique<ObjectBatch>();
  add(*batch, key("a"), {{at(4096), 150}});
  add(*batch, key("b"), {{at(8192), 150}});
  const OpId get_op = next();
  ASSERT_TRUE(start_get(get_op, batch));
  EXPECT_EQ(wait(get_op).items[0], (ItemResult{ItemStatus::kOk, 150}));
  EXPECT_EQ(wait(get_op).items[1].bytes, 0U);
}

TEST_P(StoreConformance, BatchComesBackUnchanged) {
  fill(0, 64, 1);
  auto batch = std::make_unique<ObjectBatch>();
  add(*batch, key("a"), {{at(0), 64}});
  const OpId op = next();
  ASSERT_TRUE(start_put(op, batch));
  EXPECT_EQ(batch, nullptr);
  const End& end = wait(op);
  ASSERT_EQ(end.batch->keys.size(), 1U);
  EXPECT_EQ(end.batch->keys[0], key("a"));
  EXPECT_EQ(end.batch->segments, (std::vector<Segment>{{at(0), 64}}));
  EXPECT_EQ(end.batch->ends, (std::vector<std::uint32_t>{1}));
}

TEST_P(StoreConformance, OldBytesStay) {
  fill(0, 512, 1);
  fill(512, 512, 2);
  EXPECT_EQ(put({{key("a"), {{at(0), 512}}}}), S{ItemStatus::kOk});
  EXPECT_EQ(
      put({{key("a"), {{at(512), 512}}}, {key("b"), {{at(512), 512}}}}),
      (S{test_.tells_duplicates ? ItemStatus::kDuplicate : ItemStatus::kOk, ItemStatus::kOk}));
  EXPECT_EQ(get({{key("a"), {{at(4096), 512}}}}), S{ItemStatus::kOk});
  EXPECT_TRUE(holds(4096, 512, 1));
}

TEST_P(StoreConformance, MissingBesidePresent) {
  fill(0, 512, 1);
  EXPECT_EQ(put({{key("a"), {{at(0), 512}}}}), S{ItemStatus::kOk});
  EXPECT_EQ(get({{key("x"), {{at(1024), 512}}},
                 {key("a"), {{at(2048), 512}}},
                 {key("y"), {{at(4096), 512}}}}),
            (S{ItemStatus::kMissing, ItemStatus::kOk, ItemStatus::kMissing}));
  EXPECT_TRUE(holds(2048, 512, 1));
}

TEST_P(StoreConformance, AnotherSizeIsNoSuccess) {
  fill(0, 512, 1);
  EXPECT_EQ(put({{key("a"), {{at(0), 512}}}}), S{ItemStatus::kOk});
  EXPECT_EQ(get({{key("a"), {{at(1024), 511}}}}), S{ItemStatus::kSizeMismatch});
  EXPECT_EQ(get({{key("a"), {{at(2048), 513}}}}), S{ItemStatus::kSizeMismatch});
  EXPECT_EQ(at(1024 + 511)[0], std::byte{0});
  EXPECT_EQ(at(2048 + 513)[0], std::byte{0});
}

TEST_P(StoreConformance, InvalidBesideValid) {
  std::vector<std::byte> foreign(64);
  fill(0, 512, 1);
  EXPECT_EQ(
      put({{"", {{at(0), 64}}},
           {key("none"), {}},
           {key("zero"), {{at(0), 64}, {at(64), 0}}},
           {key("foreign"), {{foreign.data(), 64}}},
           {key("edge"), {{at(kBytes - 63), 64}}},
           {key("before"), {{at(0) - 1, 64}}},
           {key("huge"), {{at(0), SIZE_MAX}}},
           {key("good"), {{at(0), 64}}}}),
      (S{ItemStatus::kInvalid, ItemStatus::kInvalid, ItemStatus::kInvalid, ItemStatus::kInvalid,
         ItemStatus::kInvalid, ItemStatus::kInvalid, ItemStatus::kInvalid, ItemStatus::kOk}));
  EXPECT_EQ(exists({key("foreign"), "", key("good"), key("edge")}),
            (S{ItemStatus::kMissing, ItemStatus::kInvalid, ItemStatus::kOk, ItemStatus::kMissing}));
  EXPECT_EQ(get({{key("good"), {{foreign.data(), 64}}}, {key("good"), {{at(1024), 64}}}}),
            (S{ItemStatus::kInvalid, ItemStatus::kOk}));
  EXPECT_TRUE(holds(1024, 64, 1));
  EXPECT_EQ(foreign, std::vector<std::byte>(64));
}

TEST_P(StoreConformance, AKeyThatIsAskedForTwiceFillsBothPlaces) {
  fill(0, 512, 1);
  put({{key("a"), {{at(0), 512}}}});
  EXPECT_EQ(get({{key("a"), {{at(4096), 512}}}, {key("a"), {{at(8192), 512}}}}),
            (S{ItemStatus::kOk, ItemStatus::kOk}));
  EXPECT_TRUE(holds(4096, 512, 1));
  EXPECT_TRUE(holds(8192, 512, 1));
}

TEST_P(StoreConformance, RemovedObjectsAreGoneAndOthersStay) {
  fill(0, 256, 1);
  put({{key("a"), {{at(0), 64}}}, {key("b"), {{at(64), 64}}}, {key("c"), {{at(128), 64}}}});
  EXPECT_EQ(remove({key("a"), key("none"), key("c")}, {}),
            (std::vector<ItemResult>{
                {ItemStatus::kOk, 1}, {ItemStatus::kMissing, 0}, {ItemStatus::kOk, 1}}));
  EXPECT_EQ(exists({key("a"), key("b"), key("c")}),
            (S{ItemStatus::kMissing, ItemStatus::kOk, ItemStatus::kMissing}));
  // What is gone can be put again, with other bytes and another size.
  fill(0, 256, 9);
  EXPECT_EQ(put({{key("a"), {{at(0), 96}}}}), (S{ItemStatus::kOk}));
  EXPECT_EQ(get({{key("a"), {{at(4096), 96}}}}), (S{ItemStatus::kOk}));
  EXPECT_TRUE(holds(4096, 96, 9));
}

TEST_P(StoreConformance, APrefixIsTextAndNotAPattern) {
  fill(0, 64, 1);
  const std::string mine = key("a.b+(c)[d]{e}|f$^*?\\@tp_rank:");
  const std::string others[] = {key("aXb+(c)[d]{e}|f$^*?\\@tp_rank:1"), "x" + mine + "1",
                                mine.substr(0, mine.size() - 1), key("a")};
  std::vector<std::pair<std::string, std::vector<Segment>>> items;
  for (const char* name : {"1", "2", "3"}) items.push_back({mine + name, {{at(0), 64}}});
  for (const std::string& name : others) items.push_back({name, {{at(0), 64}}});
  put(items);
  EXPECT_EQ(remove({mine}, {true, false}), (std::vector<ItemResult>{{ItemStatus::kOk, 3}}));
  EXPECT_EQ(exists({mine + "1", mine + "2", mine + "3"}),
            (S{ItemStatus::kMissing, ItemStatus::kMissing, ItemStatus::kMissing}));
  EXPECT_EQ(exists({others[0], others[1], others[2], others[3]}),
            (S{ItemStatus::kOk, ItemStatus::kOk, ItemStatus::kOk, ItemStatus::kOk}));
  EXPECT_EQ(remove({mine}, {true, false}), (std::vector<ItemResult>{{ItemStatus::kOk, 0}}));
}

TEST_P(StoreConformance, NoPrefixIsNotEverything) {
  fill(0, 64, 1);
  put({{key("a"), {{at(0), 64}}}});
  EXPECT_EQ(remove({""}, {true, true}), (std::vector<ItemResult>{{ItemStatus::kInvalid, 0}}));
  EXPECT_EQ(remove({""}, {}), (std::vector<ItemResult>{{ItemStatus::kInvalid, 0}}));
  EXPECT_EQ(exists({key("a")}), (S{ItemStatus::kOk}));
}

TEST_P(StoreConformance, EmptyBatch) {
  EXPECT_EQ(put({}), S{});
  EXPECT_EQ(get({}), S{});
  EXPECT_EQ(exists({}), S{});
}

TEST_P(StoreConformance, ManyOperationsAtOnce) {
  constexpr std::size_t kOps = 8;
  constexpr std::size_t kSize = 256;
  std::vector<OpId> ops;
  for (std::size_t i = 0; i < kOps; ++i) {
    fill(i * kSize, kSize, static_cast<unsigned>(i));
    auto batch = std::make_unique<ObjectBatch>();
    add(*batch, key(std::to_string(i)), {{at(i * kSize), kSize}});
    ops.push_back(next());
    while (!start_put(ops.back(), batch)) wait_for_oldest(ops);
  }
  for (const OpId op : ops) EXPECT_EQ(statuses(wait(op)), S{ItemStatus::kOk});
  ops.clear();
  for (std::size_t i = 0; i < kOps; ++i) {
    auto batch = std::make_unique<ObjectBatch>();
    add(*batch, key(std::to_string(i)), {{at(16384 + i * kSize), kSize}});
    ops.push_back(next());
    while (!start_get(ops.back(), batch)) wait_for_oldest(ops);
  }
  for (std::size_t i = 0; i < kOps; ++i) {
    EXPECT_EQ(statuses(wait(ops[i])), S{ItemStatus::kOk});
    EXPECT_TRUE(holds(16384 + i * kSize, kSize, static_cast<unsigned>(i)));
  }
}

TEST_P(StoreConformance, PastDeadlineTouchesNothing) {
  fill(0, 64, 1);
  test_.rest();
  auto batch = std::make_unique<ObjectBatch>();
  add(*batch, key("a"), {{at(0), 64}});
  const OpId op = next();
  const Instant now = test_.now();
  ASSERT_TRUE(test_.store->start_put(op, batch, now, Instant{now.ns - 1}));
  EXPECT_EQ(statuses(wait(op)), S{ItemStatus::kTimedOut});
  EXPECT_EQ(exists({key("a")}), S{ItemStatus::kMissing});
}

// For stores whose queue fills when nothing is polled.
class BoundedStoreConformance : public StoreConformance {};

TEST_P(BoundedStoreConformance, FullQueueLeavesTheBatchAlone) {
  ASSERT_GT(test_.queue_limit, 0u);
  fill(0, 64, 1);
  bool refused = false;
  std::vector<OpId> ops;
  for (std::size_t i = 0; i < test_.queue_limit * 4 && !refused; ++i) {
    auto batch = std::make_unique<ObjectBatch>();
    add(*batch, key(std::to_string(i)), {{at(0), 64}});
    const OpId op = next();
    if (start_put(op, batch)) {
      ops.push_back(op);
      continue;
    }
    refused = true;
    ASSERT_NE(batch, nullptr);
    EXPECT_EQ(batch->keys[0], key(std::to_string(i)));
    EXPECT_EQ(batch->ends.size(), 1U);
  }
  EXPECT_TRUE(refused);
  for (const OpId op : ops) wait(op);
  EXPECT_EQ(put({{key("later"), {{at(0), 64}}}}), S{ItemStatus::kOk});
}

TEST_P(StoreConformance, CloseDrainsAndThenRefuses) {
  fill(0, 64, 1);
  std::vector<OpId> ops;
  for (int i = 0; i < 3; ++i) {
    auto batch = std::make_unique<ObjectBatch>();
    add(*batch, key(std::to_string(i)), {{at(0), 64}});
    ops.push_back(next());
    ASSERT_TRUE(start_put(ops.back(), batch));
  }
  auto keys = std::make_unique<ObjectBatch>();
  keys->keys.append() = key("0");
  const OpId lookup = next();
  ASSERT_TRUE(test_.index->start_exists(lookup, keys, test_.now(), far()));
  EXPECT_EQ(test_.store->close_store(seconds(30)).unquiet, 0U);
  EXPECT_EQ(test_.index->close_index(seconds(30)).unquiet, 0U);
  for (const OpId op : ops) {
    const End& end = wait(op);
    ASSERT_EQ(end.items.size(), 1U);
    EXPECT_TRUE(end.items[0].status == ItemStatus::kOk ||
                end.items[0].status == ItemStatus::kCancelled);
  }
  EXPECT_EQ(wait(lookup).items.size(), 1U);

  auto batch = std::make_unique<ObjectBatch>();
  add(*batch, key("late"), {{at(0), 64}});
  EXPECT_FALSE(start_put(next(), batch));
  EXPECT_FALSE(start_get(next(), batch));
  ASSERT_NE(batch, nullptr);
  EXPECT_EQ(batch->keys.size(), 1U);
  keys = std::make_unique<ObjectBatch>();
  keys->keys.append() = key("0");
  EXPECT_FALSE(test_.index->start_exists(next(), keys, test_.now(), far()));
  ASSERT_NE(keys, nullptr);
  EXPECT_EQ(test_.store->close_store(seconds(1)).unquiet, 0U);
  EXPECT_EQ(test_.index->close_index(seconds(1)).unquiet, 0U);
}

TEST_P(StoreConformance, Regions) {
  test_.store->add_region({memory_.get(), kBytes, -1});  // again
  EXPECT_THROW(test_.store->add_region({at(4096), kBytes, -1}), Error);
  EXPECT_THROW(test_.store->add_region({nullptr, 64, -1}), Error);
  EXPECT_THROW(test_.store->add_region({at(0), 0, -1}), Error);
}

// A worker of a closed store would wait for loads that nothing starts.
TEST_P(StoreConformance, AClosedSideTakesNoMemory) {
  test_.store->close_store(seconds(5));
  try {
    test_.store->add_region({memory_.get(), kBytes / 2, -1});
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kClosed) << error.what();
  }
}

TEST_P(StoreConformance, CapabilitiesHaveAName) {
  EXPECT_FALSE(test_.store->capabilities().name.empty());
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(StoreConformance);

}  // namespace kvprism::test
