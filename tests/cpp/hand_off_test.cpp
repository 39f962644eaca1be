// States that the engine hands to the store scheduler, when it does so more than once or at a bad
// time.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "kvprism/store/store_scheduler.h"
#include "store_fixtures.h"

namespace kvprism {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr RequestId kRequest{41};
constexpr GroupId kState{1};

class HandOffTest : public testing::Test {
 protected:
  HandOffTest() {
    const auto projection = test::make_projection({test::full_group(16), test::mamba_group(16)});
    StoreSchedulerOptions options;
    options.epoch = 7;
    options.backoff_after = 1;
    options.backoff = seconds(5);
    scheduler_.reset();
    scheduler_ = std::make_unique<StoreScheduler>(test::make_schema(projection), store_, options);
    scheduler_->advanced(kRequest, 48, hashes_.list());
  }

  std::vector<JobId> offer(BlockId block, std::uint32_t tokens) {
    scheduler_->boundary(kRequest, kState, block, tokens);
    std::vector<JobId> jobs;
    for (const JobRecord& job : scheduler_->end_step(now_).jobs) jobs.push_back(job.id);
    return jobs;
  }
  void end(JobId job, JobOutcome outcome, std::vector<FailedChunk> failed = {}) {
    WorkerReport report;
    report.epoch = 7;
    JobReport entry;
    entry.job = job;
    entry.outcome = outcome;
    entry.quiet = 1;
    entry.num_failed = static_cast<std::uint32_t>(failed.size());
    report.jobs = {entry};
    report.failed = std::move(failed);
    scheduler_->report(report, now_);
  }
  static FailedChunk failed(std::uint32_t chunk, ItemStatus status) {
    return {StoreIndex{1}, chunk, static_cast<std::uint32_t>(status)};
  }
  std::vector<BlockId> acquired() {
    std::vector<BlockId> blocks;
    scheduler_->take_acquired(blocks);
    return blocks;
  }
  std::vector<BlockId> released() {
    std::vector<BlockId> blocks;
    scheduler_->take_released(blocks);
    return blocks;
  }

  const test::Hashes hashes_{4, 1};
  std::shared_ptr<test::ScriptedStore> store_ = std::make_shared<test::ScriptedStore>();
  std::unique_ptr<StoreScheduler> scheduler_;
  Instant now_{seconds(1).ns};
};

TEST_F(HandOffTest, ARepeatedOfferIsNotSavedAgain) {
  const auto jobs = offer(BlockId{5}, 32);
  ASSERT_EQ(jobs.size(), 1U);
  EXPECT_THAT(acquired(), ElementsAre(BlockId{5}));
  scheduler_->preempted(kRequest);
  EXPECT_THAT(offer(BlockId{9}, 32), IsEmpty()) << "while the first save is running";
  end(jobs[0], JobOutcome::kOk);
  EXPECT_THAT(offer(BlockId{9}, 32), IsEmpty()) << "and afterwards";
  EXPECT_THAT(acquired(), IsEmpty());
  EXPECT_EQ(offer(BlockId{9}, 16).size(), 1U) << "another state is another matter";
}

TEST_F(HandOffTest, AFailedStateMayBeOfferedAgain) {
  auto jobs = offer(BlockId{5}, 32);
  end(jobs.at(0), JobOutcome::kPartial, {failed(1, ItemStatus::kFailed)});
  jobs = offer(BlockId{6}, 32);
  ASSERT_EQ(jobs.size(), 1U);
  end(jobs[0], JobOutcome::kCancelled);
  EXPECT_EQ(offer(BlockId{7}, 32).size(), 1U);
}

// It was preempted before, and computes the state again behind the purge.
TEST_F(HandOffTest, AStateThatAPurgeHasTakenAwayIsSavedAgain) {
  end(offer(BlockId{5}, 16).at(0), JobOutcome::kOk);
  scheduler_->preempted(kRequest);
  scheduler_->purge(now_);
  for (const Duration wait : {seconds(0), seconds(12)}) {
    now_ = now_ + wait;
    scheduler_->end_step(now_);
    store_->end_removal({ItemStatus::kOk, 1});
    scheduler_->end_step(now_);
  }
  ASSERT_EQ(scheduler_->purge_status().state, PurgeState::kDone);
  scheduler_->advanced(kRequest, 48, {});
  EXPECT_EQ(offer(BlockId{6}, 16).size(), 1u);
}

TEST_F(HandOffTest, AStateThatALookupNoLongerFindsIsSavedAgain) {
  end(offer(BlockId{5}, 16).at(0), JobOutcome::kOk);
  end(offer(BlockId{5}, 48).at(0), JobOutcome::kOk);
  scheduler_->preempted(kRequest);
  ASSERT_TRUE(scheduler_->lookup(kRequest, 65, hashes_.list(), 0, now_).pending);
  scheduler_->end_step(now_);
  // Of attention all is there, of states the one at 16 tokens.
  std::vector<ItemStatus> items(8, ItemStatus::kOk);
  for (const std::size_t state : {5u, 6u, 7u}) items[state] = ItemStatus::kMissing;
  ASSERT_EQ(store_->lookups.front().keys().size(), items.size());
  store_->end_lookup(items);
  ASSERT_EQ(scheduler_->lookup(kRequest, 65, hashes_.list(), 0, now_).external_tokens, 16u);
  scheduler_->advanced(kRequest, 48, {});
  EXPECT_THAT(offer(BlockId{6}, 16), IsEmpty());
  EXPECT_EQ(offer(BlockId{6}, 48).size(), 1u);
}

TEST_F(HandOffTest, AnotherRequestOfTheIdStartsAfresh) {
  EXPECT_EQ(offer(BlockId{5}, 32).size(), 1U);
  scheduler_->finished(kRequest, FinishReason::kCompleted);
  scheduler_->advanced(kRequest, 48, hashes_.list());
  EXPECT_EQ(offer(BlockId{6}, 32).size(), 1U);
}

TEST_F(HandOffTest, NoStateGoesToAFullPool) {
  auto jobs = offer(BlockId{5}, 16);
  end(jobs.at(0), JobOutcome::kPartial, {failed(0, ItemStatus::kNoSpace)});
  acquired();
  released();
  EXPECT_THAT(offer(BlockId{6}, 32), IsEmpty());
  EXPECT_EQ(acquired(), released()) << "its reference is given back at once";
  EXPECT_EQ(scheduler_->counters().saves_dropped, 1U);
  now_ = now_ + seconds(5);
  EXPECT_EQ(offer(BlockId{6}, 32).size(), 1U);
}

}  // namespace
}  // namespace kvprism
