#include "kvprism/job/job_ledger.h"

#include <gtest/gtest.h>

namespace kvprism {
namespace {

JobReport told(JobId job, JobOutcome outcome, bool quiet) {
  JobReport report;
  report.job = job;
  report.outcome = outcome;
  report.quiet = quiet ? 1 : 0;
  report.objects = 1;
  report.bytes = 10;
  return report;
}

class LedgerTest : public ::testing::Test {
 protected:
  JobId start(std::uint32_t) {
    return ledger.start(JobKind::kSave, RequestId{1}, blocks, Instant{seconds(10).ns});
  }
  const std::vector<BlockId> blocks{BlockId{4}, BlockId{9}};
  JobLedger ledger{LedgerOptions{2, seconds(5)}};
  JobEvent event;
};

TEST_F(LedgerTest, BlocksAreHeldUntilEveryRankIsQuiet) {
  const JobId job = start(2);
  ledger.notice(Rank{0}, told(job, JobOutcome::kOk, true), {}, {});
  EXPECT_FALSE(ledger.take_outcome(event));
  ledger.notice(Rank{1}, told(job, JobOutcome::kOk, false), {}, {});
  ASSERT_TRUE(ledger.take_outcome(event));
  EXPECT_EQ(event.outcome, JobOutcome::kOk);
  EXPECT_EQ(event.bytes, 20u);
  EXPECT_TRUE(event.blocks.empty()) << "an outcome returns no block";
  EXPECT_FALSE(ledger.take_quiet(event)) << "rank 1 still moves bytes";
  EXPECT_EQ(ledger.counters().blocks_held, 2u);
  ledger.notice(Rank{1}, told(job, JobOutcome::kNone, true), {}, {});
  ASSERT_TRUE(ledger.take_quiet(event));
  EXPECT_EQ(event.blocks, blocks);
  EXPECT_EQ(ledger.size(), 0u);
  EXPECT_EQ(ledger.counters().blocks_held, 0u);
}

TEST_F(LedgerTest, OneFailingRankFailsTheJob) {
  const JobId job = start(2);
  ledger.notice(Rank{0}, told(job, JobOutcome::kOk, true), {}, {});
  const std::vector<FailedChunk> failed{
      {StoreIndex{1}, 5, 2}, {StoreIndex{0}, 3, 2}, {StoreIndex{1}, 5, 2}};
  ledger.notice(Rank{1}, told(job, JobOutcome::kPartial, true), failed, {});
  ASSERT_TRUE(ledger.take_outcome(event));
  EXPECT_EQ(event.outcome, JobOutcome::kPartial);
  EXPECT_FALSE(event.whole);
  EXPECT_EQ(event.failed, (std::vector<FailedChunk>{{StoreIndex{0}, 3, 2}, {StoreIndex{1}, 5, 2}}));
}

TEST_F(LedgerTest, WhatFailsAndNamesNoChunkFailsWhole) {
  const std::vector<FailedChunk> named{{StoreIndex{0}, 3, 2}};
  for (const JobOutcome outcome : {JobOutcome::kPartial, JobOutcome::kExpired}) {
    for (const bool names : {false, true}) {
      const JobId job = start(2);
      ledger.notice(Rank{0}, told(job, JobOutcome::kOk, true), {}, {});
      ledger.notice(Rank{1}, told(job, outcome, true),
                    names ? std::span<const FailedChunk>(named) : std::span<const FailedChunk>(),
                    {});
      ASSERT_TRUE(ledger.take_outcome(event));
      EXPECT_EQ(event.whole, !names);
    }
  }
}

TEST_F(LedgerTest, ASilentRankExpiresTheOutcomeButNeverTheBlocks) {
  const JobId job = start(2);
  ledger.notice(Rank{0}, told(job, JobOutcome::kOk, true), {}, {});
  ledger.advance(Instant{seconds(10).ns - 1});
  EXPECT_FALSE(ledger.take_outcome(event));
  ledger.advance(Instant{seconds(10).ns});
  ASSERT_TRUE(ledger.take_outcome(event));
  EXPECT_EQ(event.outcome, JobOutcome::kExpired);
  EXPECT_TRUE(event.whole);
  ledger.advance(Instant{seconds(15).ns});
  ASSERT_TRUE(ledger.take_quarantined(event));
  EXPECT_FALSE(ledger.take_quarantined(event)) << "told once";
  EXPECT_EQ(ledger.counters().blocks_in_quarantine, 2u);
  EXPECT_FALSE(ledger.take_quiet(event));
  ledger.notice(Rank{1}, told(job, JobOutcome::kOk, true), {}, Instant{seconds(99).ns});
  EXPECT_EQ(ledger.counters().late_notices, 1u);
  EXPECT_FALSE(ledger.take_outcome(event)) << "one outcome only";
  ASSERT_TRUE(ledger.take_quiet(event));
  EXPECT_TRUE(event.quarantined);
  EXPECT_EQ(event.blocks, blocks);
  EXPECT_EQ(ledger.counters().blocks_in_quarantine, 0u);
}

TEST_F(LedgerTest, RanksAreAskedAboutWhatIsNotQuietForLong) {
  JobLedger asking{LedgerOptions{2, seconds(100), seconds(3)}};
  const auto start_one = [&] {
    return asking.start(JobKind::kSave, RequestId{1}, blocks, Instant{seconds(10).ns});
  };
  const JobId lost = start_one();
  const JobId moving = start_one();
  const JobId done = start_one();
  for (const Rank rank : {Rank{0}, Rank{1}}) {
    asking.notice(rank, told(done, JobOutcome::kOk, true), {}, {});
    asking.notice(rank, told(moving, JobOutcome::kOk, false), {}, {});
  }
  std::vector<JobId> asked;
  asking.take_unquiet(Instant{seconds(3).ns - 1}, 64, asked);
  EXPECT_TRUE(asked.empty());
  asking.take_unquiet(Instant{seconds(3).ns}, 64, asked);
  EXPECT_EQ(asked, std::vector<JobId>{moving}) << "the other has no outcome yet, or is over";
  asked.clear();
  asking.advance(Instant{seconds(10).ns});
  asking.take_unquiet(Instant{seconds(13).ns}, 1, asked);
  EXPECT_EQ(asked, std::vector<JobId>{moving}) << "no more than the plan has room for";
  asking.take_unquiet(Instant{seconds(13).ns}, 64, asked);
  EXPECT_EQ(asked, (std::vector<JobId>{moving, lost})) << "each once in the interval";
  EXPECT_EQ(asking.counters().asked, 3u);
}

TEST_F(LedgerTest, ARankThatIsGoneHoldsNothing) {
  const JobId told_already = start(2);
  const JobId untold = start(2);
  ledger.notice(Rank{1}, told(told_already, JobOutcome::kOk, false), {}, {});
  ledger.notice(Rank{0}, told(told_already, JobOutcome::kOk, true), {}, {});
  ASSERT_TRUE(ledger.take_outcome(event));
  ledger.rank_gone(Rank{1}, {});
  ASSERT_TRUE(ledger.take_quiet(event));
  EXPECT_EQ(event.job, told_already);
  EXPECT_EQ(event.outcome, JobOutcome::kOk) << "what it has told holds";
  EXPECT_FALSE(event.gone);
  EXPECT_FALSE(ledger.take_outcome(event)) << "rank 0 may still move bytes of the other";
  ledger.notice(Rank{0}, told(untold, JobOutcome::kOk, true), {}, {});
  ASSERT_TRUE(ledger.take_outcome(event));
  EXPECT_EQ(event.outcome, JobOutcome::kFailed);
  EXPECT_TRUE(event.whole);
  EXPECT_TRUE(event.gone);
  ASSERT_TRUE(ledger.take_quiet(event));
  EXPECT_EQ(event.blocks, blocks);
  EXPECT_EQ(ledger.counters().duplicate_notices, 0u);
  const JobId later = start(2);
  ledger.notice(Rank{0}, told(later, JobOutcome::kOk, true), {}, {});
  EXPECT_FALSE(ledger.take_outcome(event)) << "a worker in its place may be moving bytes";
  ledger.rank_gone(Rank{2}, {});
  EXPECT_EQ(ledger.counters().unknown_notices, 1u);
}

TEST_F(LedgerTest, AJobThatNoRankHasGotEndsOnAll) {
  const JobId job = start(2);
  ledger.withdraw(job, {});
  ASSERT_TRUE(ledger.take_outcome(event));
  EXPECT_EQ(event.outcome, JobOutcome::kFailed);
  EXPECT_TRUE(event.whole && event.gone);
  ASSERT_TRUE(ledger.take_quiet(event));
  EXPECT_EQ(event.blocks, blocks);
  ledger.withdraw(job, {});
  EXPECT_FALSE(ledger.take_outcome(event));
  // One that a rank itself has told as failed is another matter.
  const JobId failed = start(2);
  for (const Rank rank : {Rank{0}, Rank{1}})
    ledger.notice(rank, told(failed, JobOutcome::kFailed, true), {}, {});
  ASSERT_TRUE(ledger.take_outcome(event));
  EXPECT_TRUE(event.whole);
  EXPECT_FALSE(event.gone);
}

TEST_F(LedgerTest, OddNoticesAreCountedAndHarmless) {
  const JobId job = start(2);
  ledger.notice(Rank{0}, told(JobId{99}, JobOutcome::kOk, true), {}, {});
  ledger.notice(Rank{2}, told(job, JobOutcome::kOk, true), {}, {});
  EXPECT_EQ(ledger.counters().unknown_notices, 2u);
  ledger.notice(Rank{0}, told(job, JobOutcome::kOk, true), {}, {});
  ledger.notice(Rank{0}, told(job, JobOutcome::kFailed, true), {}, {});
  EXPECT_EQ(ledger.counters().duplicate_notices, 2u);
  ledger.notice(Rank{1}, told(job, JobOutcome::kOk, true), {}, {});
  ASSERT_TRUE(ledger.take_outcome(event));
  EXPECT_EQ(event.outcome, JobOutcome::kOk);
  EXPECT_EQ(event.bytes, 20u) << "a duplicate adds nothing";
  ASSERT_TRUE(ledger.take_quiet(event));
  ledger.notice(Rank{0}, told(job, JobOutcome::kOk, true), {}, {});
  EXPECT_EQ(ledger.counters().unknown_notices, 3u);
  EXPECT_NE(start(2), job) << "ids are not used twice";
}

TEST_F(LedgerTest, QuietWaitsForTheOutcome) {
  const JobId job = start(2);
  for (const Rank rank : {Rank{0}, Rank{1}})
    ledger.notice(rank, told(job, JobOutcome::kNone, true), {}, {});
  EXPECT_FALSE(ledger.take_quiet(event));
  ledger.advance(Instant{seconds(10).ns});
  EXPECT_FALSE(ledger.take_quiet(event)) << "the outcome is told first";
  ASSERT_TRUE(ledger.take_outcome(event));
  ASSERT_TRUE(ledger.take_quiet(event));
  EXPECT_FALSE(event.quarantined);
}

}  // namespace
}  // namespace kvprism
