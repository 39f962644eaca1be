#include "kvprism/backend/fault_injection.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "kvprism/backend/memory_store.h"

namespace kvprism {
namespace {

constexpr std::size_t kItems = 4;
constexpr std::size_t kBytes = 32;

struct Ends {
  std::optional<Instant> outcome;
  std::optional<Instant> quiet;
  std::vector<ItemStatus> statuses;
};

// One kind of fault, certain to come.
class FaultTest : public testing::Test {
 protected:
  void use(FaultKind kind) {
    FaultPlan plan;
    plan[kind] = 10'000;
    plan.delay = milliseconds(20);
    plan.late = milliseconds(100);
    plan.lookup_late = milliseconds(1000);
    const auto store = std::make_shared<MemoryStore>(pool_);
    faulty_ = std::make_unique<FaultInjector>(store, store, plan);
    faulty_->add_region({memory_.data(), memory_.size(), -1});
    kind_ = kind;
  }
  static std::byte content(std::size_t item, std::size_t at) {
    return static_cast<std::byte>(item * 50 + at);
  }
  static std::string key(std::size_t item) { return "k" + std::to_string(item); }
  std::byte* slot(std::size_t item) { return memory_.data() + item * kBytes; }

  std::unique_ptr<ObjectBatch> batch() {
    auto made = std::make_unique<ObjectBatch>();
    for (std::size_t i = 0; i < kItems; ++i) {
      made->keys.append() = key(i);
      made->segments.push_back({slot(i), kBytes / 2});
      made->segments.push_back({slot(i) + kBytes / 2, kBytes / 2});
      made->ends.push_back(static_cast<std::uint32_t>(made->segments.size()));
    }
    return made;
  }
  void fill() {
    for (std::size_t i = 0; i < kItems; ++i) {
      for (std::size_t b = 0; b < kBytes; ++b) slot(i)[b] = content(i, b);
    }
  }
  void wipe() { memory_.fill(std::byte{0}); }
  bool right(std::size_t item) {
    for (std::size_t b = 0; b < kBytes; ++b) {
      if (slot(item)[b] != content(item, b)) return false;
    }
    return true;
  }
  void store_all() {
    fill();
    MemoryStore clean(pool_);
    clean.add_region({memory_.data(), memory_.size(), -1});
    auto items = batch();
    ASSERT_TRUE(clean.start_put(OpId{1}, items, Instant{0}, Instant{1}));
    Completion done;
    ASSERT_TRUE(clean.poll_store(Instant{0}, done));
    wipe();
  }

  // Polls every millisecond for two seconds.
  Ends run(bool put, bool release = false) {
    auto items = batch();
    started_ = put ? faulty_->start_put(OpId{7}, items, Instant{0}, far_)
                   : faulty_->start_get(OpId{7}, items, Instant{0}, far_);
    if (!started_) {
      EXPECT_NE(items, nullptr);
      return {};
    }
    return watch(release);
  }
  Ends watch(bool release) {
    Ends ends;
    for (std::int64_t ms = 0; ms < 2000; ++ms) {
      const Instant now{milliseconds(ms).ns};
      if (release && ms == 1000) faulty_->release_hung();
      Completion done;
      while (faulty_->poll_store(now, done)) {
        EXPECT_EQ(done.op, OpId{7});
        if (done.outcome) {
          EXPECT_FALSE(ends.outcome);
          ends.outcome = now;
          for (const ItemResult& item : done.items) ends.statuses.push_back(item.status);
          at_outcome_ = memory_;
        }
        if (done.quiet) {
          EXPECT_TRUE(ends.outcome);
          EXPECT_FALSE(ends.quiet);
          ends.quiet = now;
          EXPECT_NE(done.batch, nullptr);
          if (done.batch) {
            EXPECT_EQ(done.batch->keys.size(), kItems);
          }
        }
        done = Completion();
      }
    }
    if (ends.outcome) {
      EXPECT_EQ(ends.statuses.size(), kItems);
    }
    return ends;
  }
  std::uint64_t raised() {
    for (const FaultCount& row : faulty_->table()) {
      if (row.kind == kind_) return row.raised;
    }
    return 0;
  }
  std::size_t stored() { return pool_->counters().objects; }

  const Instant far_{seconds(100).ns};
  std::shared_ptr<MemoryPool> pool_ = std::make_shared<MemoryPool>();
  std::array<std::byte, kItems * kBytes> memory_{};
  std::array<std::byte, kItems * kBytes> at_outcome_{};
  std::unique_ptr<FaultInjector> faulty_;
  FaultKind kind_{};
  bool started_ = false;
};

TEST_F(FaultTest, EveryKindHasAName) {
  std::set<std::string> names;
  for (std::size_t i = 0; i < kNumFaultKinds; ++i) {
    names.emplace(to_string(static_cast<FaultKind>(i)));
  }
  EXPECT_EQ(names.size(), kNumFaultKinds);
  EXPECT_FALSE(names.contains("unknown"));
}

TEST_F(FaultTest, FailedCallDoesNothing) {
  use(FaultKind::kFailCall);
  fill();
  const Ends ends = run(true);
  EXPECT_EQ(ends.statuses, std::vector(kItems, ItemStatus::kFailed));
  EXPECT_TRUE(ends.quiet);
  EXPECT_EQ(stored(), 0U);
  EXPECT_EQ(raised(), 1U);
}

// For each item: either it is `bad` and nothing was done, or it is done.
#define EXPECT_SOME(bad)                                                           \
  EXPECT_GT(std::count(ends.statuses.begin(), ends.statuses.end(), bad), 0);       \
  for (std::size_t i = 0; i < kItems; ++i) {                                       \
    EXPECT_TRUE(ends.statuses[i] == (bad) || ends.statuses[i] == ItemStatus::kOk); \
  }                                                                                \
  EXPECT_EQ(raised(), 1U)

TEST_F(FaultTest, FailedItemsOfAPut) {
  use(FaultKind::kFailItems);
  fill();
  const Ends ends = run(true);
  EXPECT_SOME(ItemStatus::kFailed);
  for (std::size_t i = 0; i < kItems; ++i) {
    EXPECT_EQ(pool_->contains(key(i)), ends.statuses[i] == ItemStatus::kOk);
  }
}

TEST_F(FaultTest, WithheldItemsOfAGet) {
  for (const auto& [kind, status] : {std::pair(FaultKind::kFailItems, ItemStatus::kFailed),
                                     std::pair(FaultKind::kVanished, ItemStatus::kMissing),
                                     std::pair(FaultKind::kNotReady, ItemStatus::kNotReady)}) {
    use(kind);
    store_all();
    const Ends ends = run(false);
    EXPECT_SOME(status);
    for (std::size_t i = 0; i < kItems; ++i) {
      EXPECT_EQ(right(i), ends.statuses[i] == ItemStatus::kOk);
    }
  }
}

TEST_F(FaultTest, NoSpace) {
  use(FaultKind::kNoSpace);
  fill();
  const Ends ends = run(true);
  EXPECT_SOME(ItemStatus::kNoSpace);
}

TEST_F(FaultTest, DuplicatesAreInTheStore) {
  use(FaultKind::kDuplicate);
  fill();
  const Ends ends = run(true);
  EXPECT_EQ(ends.statuses, std::vector(kItems, ItemStatus::kDuplicate));
  EXPECT_EQ(stored(), kItems);
}

TEST_F(FaultTest, Unavailable) {
  use(FaultKind::kUnavailable);
  store_all();
  EXPECT_EQ(run(false).statuses, std::vector(kItems, ItemStatus::kUnavailable));
}

TEST_F(FaultTest, DelayIsBounded) {
  use(FaultKind::kDelay);
  store_all();
  const Ends ends = run(false);
  EXPECT_GT(*ends.outcome, Instant{0});
  EXPECT_LE(*ends.outcome, Instant{milliseconds(21).ns});
  EXPECT_TRUE(right(0) && right(3));
}

TEST_F(FaultTest, TruncatedItemFails) {
  use(FaultKind::kTruncate);
  store_all();
  const Ends ends = run(false);
  EXPECT_SOME(ItemStatus::kFailed);
  for (std::size_t i = 0; i < kItems; ++i) {
    EXPECT_EQ(right(i), ends.statuses[i] == ItemStatus::kOk);
    EXPECT_EQ(slot(i)[0], content(i, 0)) << "a part arrives";
  }
}

TEST_F(FaultTest, CorruptItemIsTold) {
  use(FaultKind::kCorrupt);
  store_all();
  const Ends ends = run(false);
  EXPECT_SOME(ItemStatus::kChecksumMismatch);
  for (std::size_t i = 0; i < kItems; ++i) {
    EXPECT_EQ(right(i), ends.statuses[i] == ItemStatus::kOk);
  }
}

TEST_F(FaultTest, SilentlyCorruptItemIsNot) {
  use(FaultKind::kSilentCorrupt);
  store_all();
  EXPECT_EQ(run(false).statuses, std::vector(kItems, ItemStatus::kOk));
  std::size_t wrong = 0;
  for (std::size_t i = 0; i < kItems; ++i) wrong += right(i) ? 0 : 1;
  EXPECT_EQ(wrong, 1U);
}

TEST_F(FaultTest, LostLeaseSpoils) {
  use(FaultKind::kLeaseLost);
  store_all();
  const Ends ends = run(false);
  EXPECT_SOME(ItemStatus::kLeaseLost);
  for (std::size_t i = 0; i < kItems; ++i) {
    EXPECT_EQ(right(i), ends.statuses[i] == ItemStatus::kOk);
  }
}

TEST_F(FaultTest, HangsUntilItIsReleased) {
  use(FaultKind::kHang);
  store_all();
  const Ends ends = run(false, true);
  EXPECT_EQ(*ends.outcome, Instant{milliseconds(1000).ns});
  EXPECT_EQ(ends.quiet, ends.outcome);
  EXPECT_TRUE(right(0));
  EXPECT_EQ(faulty_->hung(), 0U);
}

TEST_F(FaultTest, HangsPastClose) {
  use(FaultKind::kHang);
  store_all();
  auto items = batch();
  ASSERT_TRUE(faulty_->start_get(OpId{7}, items, Instant{0}, far_));
  EXPECT_EQ(faulty_->hung(), 1U);
  const CloseReport report = faulty_->close_store(seconds(1));
  EXPECT_EQ(report.unquiet, 1U);
  EXPECT_EQ(report.ops, std::vector<OpId>{OpId{7}});
  // As of a real store that is closed again: it is still not quiet.
  EXPECT_EQ(faulty_->close_store(seconds(1)).ops, std::vector<OpId>{OpId{7}});
  const Ends ends = watch(true);
  EXPECT_EQ(ends.statuses, std::vector(kItems, ItemStatus::kCancelled));
  EXPECT_FALSE(ends.quiet);
  EXPECT_FALSE(right(0));
}

TEST_F(FaultTest, FailsNowAndLandsLater) {
  use(FaultKind::kLandLate);
  store_all();
  const Ends ends = run(false);
  EXPECT_EQ(*ends.outcome, Instant{0});
  EXPECT_EQ(ends.statuses, std::vector(kItems, ItemStatus::kTimedOut));
  EXPECT_EQ(at_outcome_[1], std::byte{0}) << "nothing has arrived when it is told as failed";
  EXPECT_GT(*ends.quiet, *ends.outcome);
  EXPECT_LE(*ends.quiet, Instant{milliseconds(101).ns});
  EXPECT_TRUE(right(0)) << "and everything has when it is quiet";
}

TEST_F(FaultTest, LatePutReadsItsSourcesLate) {
  use(FaultKind::kLandLate);
  fill();
  auto items = batch();
  ASSERT_TRUE(faulty_->start_put(OpId{7}, items, Instant{0}, far_));
  memory_.fill(std::byte{0xee});
  watch(false);
  pool_->for_each_object([](std::string_view, std::span<const std::byte> bytes) {
    EXPECT_EQ(bytes[0], std::byte{0xee});
  });
  EXPECT_EQ(stored(), kItems);
}

TEST_F(FaultTest, LateQuietWritesOnceMore) {
  use(FaultKind::kLateQuiet);
  store_all();
  auto items = batch();
  ASSERT_TRUE(faulty_->start_get(OpId{7}, items, Instant{0}, far_));
  Completion done;
  ASSERT_TRUE(faulty_->poll_store(Instant{0}, done));
  EXPECT_TRUE(done.outcome);
  EXPECT_FALSE(done.quiet);
  EXPECT_TRUE(right(2));
  wipe();  // a destination that is reused too early is overwritten
  ASSERT_TRUE(faulty_->poll_store(Instant{milliseconds(101).ns}, done));
  EXPECT_FALSE(done.outcome);
  EXPECT_TRUE(done.quiet);
  EXPECT_TRUE(right(2));
}

TEST_F(FaultTest, AnAnswerIsLostThoughEverythingIsStored) {
  use(FaultKind::kLostAnswer);
  fill();
  const Ends ends = run(true);
  EXPECT_EQ(ends.statuses, std::vector(kItems, ItemStatus::kFailed));
  EXPECT_EQ(ends.outcome, ends.quiet);
  EXPECT_EQ(stored(), kItems);
}

TEST_F(FaultTest, SourcesAreReadOnceMoreBeforeAPutIsQuiet) {
  use(FaultKind::kReadLate);
  std::vector<std::pair<std::string, std::byte>> read;  // with the first byte
  faulty_->set_late_read([&](std::string_view key, std::span<const std::byte> bytes) {
    EXPECT_EQ(bytes.size(), kBytes);
    read.emplace_back(key, bytes[0]);
  });
  fill();
  auto items = batch();
  ASSERT_TRUE(faulty_->start_put(OpId{7}, items, Instant{0}, far_));
  Completion done;
  ASSERT_TRUE(faulty_->poll_store(Instant{0}, done));
  EXPECT_TRUE(done.outcome);
  EXPECT_FALSE(done.quiet);
  EXPECT_EQ(done.items[0].status, ItemStatus::kOk);
  slot(1)[0] = std::byte{0xee};
  EXPECT_TRUE(read.empty());
  ASSERT_TRUE(faulty_->poll_store(Instant{milliseconds(101).ns}, done));
  EXPECT_TRUE(done.quiet);
  ASSERT_EQ(read.size(), kItems);
  EXPECT_EQ(read[0], std::pair(key(0), content(0, 0)));
  EXPECT_EQ(read[1], std::pair(key(1), std::byte{0xee}));
}

TEST_F(FaultTest, ALostClientsCallsLandLater) {
  use(FaultKind::kDelay);
  fill();
  auto items = batch();
  ASSERT_TRUE(faulty_->start_put(OpId{7}, items, Instant{0}, far_));
  FaultPlan plan;
  plan[FaultKind::kClientLost] = 10'000;
  faulty_->set_plan(plan);
  items = batch();
  ASSERT_TRUE(faulty_->start_put(OpId{8}, items, Instant{0}, far_));
  faulty_->set_plan(FaultPlan{});
  items = batch();
  ASSERT_TRUE(faulty_->start_get(OpId{9}, items, Instant{0}, far_));
  Completion done;
  ASSERT_TRUE(faulty_->poll_store(Instant{0}, done));
  EXPECT_EQ(done.op, OpId{7});
  EXPECT_EQ(done.items[0].status, ItemStatus::kTimedOut);
  EXPECT_FALSE(done.quiet);
  for (const OpId op : {OpId{8}, OpId{9}}) {
    ASSERT_TRUE(faulty_->poll_store(Instant{0}, done));
    EXPECT_EQ(done.op, op) << "there is no client";
    EXPECT_EQ(done.items[0].status, ItemStatus::kUnavailable);
    EXPECT_TRUE(done.quiet);
  }
  EXPECT_EQ(stored(), 0U);
  EXPECT_EQ(faulty_->unquiet(), 1U);
  ASSERT_TRUE(faulty_->poll_store(Instant{milliseconds(101).ns}, done));
  EXPECT_EQ(done.op, OpId{7});
  EXPECT_FALSE(done.outcome);
  EXPECT_TRUE(done.quiet);
  EXPECT_EQ(stored(), kItems);
  EXPECT_EQ(faulty_->unquiet(), 0U);
  EXPECT_EQ(faulty_->table()[static_cast<std::size_t>(FaultKind::kClientLost)].raised, 1U);
  items = batch();
  ASSERT_TRUE(faulty_->start_get(OpId{10}, items, Instant{milliseconds(101).ns}, far_));
  ASSERT_TRUE(faulty_->poll_store(Instant{milliseconds(101).ns}, done));
  EXPECT_EQ(done.items[0].status, ItemStatus::kOk) << "with a new client";
}

TEST_F(FaultTest, ARemovalThatWasRefusedIsDoneLater) {
  use(FaultKind::kRemoveLate);
  store_all();
  auto items = std::make_unique<ObjectBatch>();
  items->keys.append() = key(0);
  ASSERT_TRUE(faulty_->start_remove(OpId{3}, items, Removal{}, Instant{0}, far_));
  Completion done;
  ASSERT_TRUE(faulty_->poll_index(Instant{0}, done));
  EXPECT_EQ(done.items[0].status, ItemStatus::kUnavailable);
  EXPECT_FALSE(done.quiet);
  EXPECT_EQ(stored(), kItems);
  ASSERT_TRUE(faulty_->poll_index(Instant{milliseconds(101).ns}, done));
  EXPECT_TRUE(done.quiet);
  EXPECT_EQ(stored(), kItems - 1);
}

TEST_F(FaultTest, WhatIsNotQuietLandsAfterTheClose) {
  FaultPlan plan;
  plan.lands_after_close = true;
  plan.seed = 1;
  const auto store =
      std::make_shared<MemoryStore>(pool_, MemoryStoreOptions{.latency = milliseconds(5)});
  FaultInjector faulty(store, nullptr, plan);
  faulty.add_region({memory_.data(), memory_.size(), -1});
  fill();
  auto items = batch();
  ASSERT_TRUE(faulty.start_put(OpId{7}, items, Instant{0}, far_));
  const CloseReport closed = faulty.close_store(seconds(1));
  EXPECT_EQ(closed.ops, std::vector{OpId{7}});
  EXPECT_EQ(faulty.close_store(seconds(1)).ops, std::vector{OpId{7}});
  Completion done;
  ASSERT_TRUE(faulty.poll_store(Instant{0}, done));
  EXPECT_EQ(done.items[0].status, ItemStatus::kCancelled);
  EXPECT_FALSE(done.quiet);
  items = batch();
  EXPECT_FALSE(faulty.start_put(OpId{8}, items, Instant{0}, far_));
  EXPECT_EQ(stored(), 0U);
  ASSERT_TRUE(faulty.poll_store(Instant{milliseconds(5).ns}, done));
  EXPECT_TRUE(done.quiet);
  EXPECT_EQ(stored(), kItems);
  EXPECT_EQ(faulty.close_store(seconds(1)).unquiet, 0U);
}

TEST_F(FaultTest, RefusedStartsLeaveTheBatch) {
  use(FaultKind::kRefuse);
  run(true);
  EXPECT_FALSE(started_);
  run(false);
  EXPECT_FALSE(started_);
  EXPECT_EQ(raised(), 2U);
}

TEST_F(FaultTest, Lookups) {
  const auto ask = [&](Instant now) {
    auto items = std::make_unique<ObjectBatch>();
    items->keys.append() = key(0);
    return faulty_->start_exists(OpId{1}, items, now, far_);
  };
  store_all();
  Completion done;
  use(FaultKind::kLookupFailed);
  ASSERT_TRUE(ask(Instant{0}));
  ASSERT_TRUE(faulty_->poll_index(Instant{0}, done));
  EXPECT_EQ(done.items[0].status, ItemStatus::kUnavailable);

  use(FaultKind::kLookupLate);
  ASSERT_TRUE(ask(Instant{0}));
  EXPECT_FALSE(faulty_->poll_index(Instant{0}, done));
  ASSERT_TRUE(faulty_->poll_index(Instant{milliseconds(1001).ns}, done));
  EXPECT_EQ(done.items[0].status, ItemStatus::kOk);

  use(FaultKind::kLookupRefused);
  EXPECT_FALSE(ask(Instant{0}));
  EXPECT_EQ(raised(), 1U);
}

TEST_F(FaultTest, OneSeedOneStory) {
  FaultPlan plan;
  for (std::size_t i = 0; i < kNumFaultKinds; ++i) plan.chance[i] = 400;
  const auto story = [&](std::uint64_t seed) {
    plan.seed = seed;
    const auto store = std::make_shared<MemoryStore>(std::make_shared<MemoryPool>());
    FaultInjector faulty(store, store, plan);
    faulty.add_region({memory_.data(), memory_.size(), -1});
    std::vector<int> events;
    for (std::uint64_t op = 0; op < 200; ++op) {
      auto items = batch();
      const Instant now{milliseconds(static_cast<std::int64_t>(op)).ns};
      events.push_back(op % 2 == 0 ? faulty.start_put(OpId{op}, items, now, far_)
                                   : faulty.start_get(OpId{op}, items, now, far_));
      Completion done;
      while (faulty.poll_store(now, done)) {
        events.push_back(static_cast<int>(done.op));
        for (const ItemResult& item : done.items) events.push_back(static_cast<int>(item.status));
        done = Completion();
      }
    }
    return events;
  };
  EXPECT_EQ(story(5), story(5));
  EXPECT_NE(story(5), story(6));
}

}  // namespace
}  // namespace kvprism
