// The late write, with real processes: the storage process stops in the middle of loads and goes on
// after every deadline. Mooncake then writes into memory whose load has long failed; such memory
// must never be called quiet.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>
#include <vector>

#include "mooncake_fixture.h"

namespace kvprism::test {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr std::size_t kObject = 1 << 20;
constexpr std::size_t kObjectsPerLoad = 16;
constexpr std::size_t kLoads = 4;
constexpr std::size_t kSmallObjects = 1000;
constexpr std::size_t kSmall = 8192;
constexpr std::byte kUntouched{0x5A};
constexpr std::byte kReused{0xC3};

class LateWrite : public MooncakeTest {
 protected:
  struct Load {
    OpId op{};
    std::size_t offset = 0;  // of its destination
    bool had_outcome = false;
    bool was_quiet = false;
    std::size_t bytes_at_outcome = 0;  // that differed from kUntouched
    std::size_t bytes_at_quiet = 0;
  };

  void prepare(int stuck_after_seconds) {
    master_ = std::make_unique<MooncakeMaster>(site_packages_,
                                               std::vector<std::string>{"-client_ttl=600"});
    storage_ = &master_->add_storage(256 << 20);
    BlockingStoreOptions store_options;
    store_options.stuck_after = seconds(stuck_after_seconds);
    store_options.close_budget = seconds(10);
    store_ = std::make_unique<BlockingStore>(mooncake_client_factory(options(*master_, 0)),
                                             store_options);
    store_->add_region(sources_.region());
    store_->add_region(targets_.region());
    run_ = std::make_unique<Operations>(*store_);
    for (std::size_t i = 0; i < kLoads * kObjectsPerLoad; ++i) {
      sources_.fill(i * kObject, kObject, static_cast<std::uint32_t>(i + 1));
    }
    std::vector<Item> items;
    for (std::size_t i = 0; i < kLoads * kObjectsPerLoad; ++i) {
      items.push_back({"big-" + std::to_string(i), {{sources_.at(i * kObject), kObject}}});
    }
    for (std::size_t i = 0; i < kSmallObjects; ++i) {
      items.push_back({"small-" + std::to_string(i), {{sources_.at(i * kSmall), kSmall}}});
    }
    const auto statuses = run_->put(items);
    ASSERT_EQ(std::count(statuses.begin(), statuses.end(), ItemStatus::kOk),
              static_cast<std::ptrdiff_t>(items.size()));
    std::memset(targets_.at(0), static_cast<int>(kUntouched), targets_.size());
  }

  void start_load() {
    const std::size_t number = loads_.size();
    std::vector<Item> items;
    for (std::size_t i = 0; i < kObjectsPerLoad; ++i) {
      const std::size_t object = number * kObjectsPerLoad + i;
      items.push_back(
          {"big-" + std::to_string(object), {{targets_.at(object * kObject), kObject}}});
    }
    loads_.push_back(
        {run_->start_get(items), number * kObjectsPerLoad * kObject, false, false, 0, 0});
  }

  std::size_t count_other_than(std::size_t offset, std::byte value) const {
    const std::byte* begin = targets_.at(offset);
    return kObjectsPerLoad * kObject -
           static_cast<std::size_t>(std::count(begin, begin + kObjectsPerLoad * kObject, value));
  }

  // What an engine does: it looks at outcomes, and uses memory again as soon as it is quiet.
  void look() {
    run_->drain();
    for (Load& load : loads_) {
      if (!load.had_outcome && run_->has_outcome(load.op)) {
        load.had_outcome = true;
        load.bytes_at_outcome = count_other_than(load.offset, kUntouched);
      }
      if (!load.was_quiet && run_->is_quiet(load.op)) {
        load.was_quiet = true;
        load.bytes_at_quiet = count_other_than(load.offset, kUntouched);
        std::memset(targets_.at(load.offset), static_cast<int>(kReused), kObjectsPerLoad * kObject);
      }
    }
  }
  void check_reused_memory() const {
    for (const Load& load : loads_) {
      if (load.was_quiet) {
        EXPECT_EQ(count_other_than(load.offset, kReused), 0u)
            << "memory changed after it was quiet, load at " << load.offset;
      }
    }
  }
  template <class Condition>
  bool look_until(Condition condition, std::chrono::seconds limit) {
    const auto end = Clock::now() + limit;
    for (look(); !condition(); look()) {
      if (Clock::now() > end) return false;
      store_->wait_for_completion(kvprism::milliseconds(10));
    }
    return true;
  }
  void look_for(milliseconds time) {
    const auto end = Clock::now() + time;
    while (Clock::now() < end) {
      look();
      store_->wait_for_completion(kvprism::milliseconds(10));
    }
  }

  // The client that took over, with the storage process alive again.
  void thousand_exact_loads() {
    for (std::size_t i = 0; i < kSmallObjects; ++i) {
      const std::size_t offset = kLoads * kObjectsPerLoad * kObject + i % 64 * kSmall;
      std::memset(targets_.at(offset), 0, kSmall);
      const auto statuses =
          run_->get({{"small-" + std::to_string(i), {{targets_.at(offset), kSmall}}}});
      ASSERT_EQ(statuses, std::vector{ItemStatus::kOk}) << i;
      ASSERT_EQ(std::memcmp(targets_.at(offset), sources_.at(i * kSmall), kSmall), 0) << i;
    }
  }

  const Memory sources_{kLoads * kObjectsPerLoad * kObject};
  const Memory targets_{kLoads * kObjectsPerLoad * kObject + 64 * kSmall};
  std::unique_ptr<MooncakeMaster> master_;
  Process* storage_ = nullptr;
  std::unique_ptr<BlockingStore> store_;
  std::unique_ptr<Operations> run_;
  std::vector<Load> loads_;
};

// The storage process comes back after our deadline and before Mooncake's: the bytes land in a load
// that has failed.
TEST_F(LateWrite, AfterOurDeadline) {
  ASSERT_NO_FATAL_FAILURE(prepare(1));
  storage_->signal(SIGSTOP);
  start_load();
  ASSERT_TRUE(look_until([&] { return loads_[0].had_outcome; }, std::chrono::seconds(10)));
  EXPECT_EQ(run_->items(loads_[0].op)[0].status, ItemStatus::kTimedOut);
  ASSERT_TRUE(look_until([&] { return store_->counters().usable; }, std::chrono::seconds(10)));
  EXPECT_EQ(store_->counters().replacements, 1u);
  look_for(milliseconds(1500));
  EXPECT_FALSE(loads_[0].was_quiet);
  EXPECT_EQ(store_->counters().unquiet_now, 1u);

  storage_->signal(SIGCONT);
  ASSERT_TRUE(look_until([&] { return loads_[0].was_quiet; }, std::chrono::seconds(20)));
  EXPECT_GT(loads_[0].bytes_at_quiet, loads_[0].bytes_at_outcome) << "no late write was provoked";
  ASSERT_NO_FATAL_FAILURE(thousand_exact_loads());
  look_for(milliseconds(1000));
  check_reused_memory();
  EXPECT_EQ(store_->counters().unquiet_now, 0u);
  EXPECT_EQ(store_->counters().retired_now, 0u);
}

// The storage process stays away longer than Mooncake waits (60 s). The first load's call gives up,
// and its client is torn down, before the bytes could come; the second one's bytes land while its
// call still waits.
TEST_F(LateWrite, AfterEveryDeadline) {
  ASSERT_NO_FATAL_FAILURE(prepare(3));
  const auto stopped = Clock::now();
  storage_->signal(SIGSTOP);
  for (std::size_t i = 0; i < 2; ++i) {
    start_load();
    ASSERT_TRUE(look_until([&] { return loads_[i].had_outcome && store_->counters().usable; },
                           std::chrono::seconds(20)));
    EXPECT_EQ(run_->items(loads_[i].op)[0].status, ItemStatus::kTimedOut);
  }
  EXPECT_EQ(store_->counters().replacements, 2u);
  ASSERT_TRUE(look_until([&] { return loads_[0].was_quiet; }, std::chrono::seconds(80)));
  EXPECT_GT(Clock::now() - stopped, std::chrono::seconds(50))
      << "Mooncake's wait has become shorter";
  EXPECT_FALSE(loads_[1].was_quiet);
  storage_->signal(SIGCONT);
  ASSERT_TRUE(look_until([&] { return loads_[1].was_quiet; }, std::chrono::seconds(20)));
  EXPECT_GT(loads_[1].bytes_at_quiet, loads_[1].bytes_at_outcome) << "no late write was provoked";
  ASSERT_NO_FATAL_FAILURE(thousand_exact_loads());
  look_for(milliseconds(1000));
  check_reused_memory();
  EXPECT_EQ(store_->counters().unquiet_now, 0u);
}

}  // namespace
}  // namespace kvprism::test

int main(int argc, char** argv) {
  kvprism::test::enter_private_network();
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
