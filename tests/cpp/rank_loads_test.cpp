#include "kvprism/store/rank_loads.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kvprism/base/error.h"

namespace kvprism {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr std::uint64_t kEpoch = 99;

// Job 1 loads chunks 2..4 of group 0 into blocks 10, 11, 12 and chunk 4 of group 1 into block 20;
// job 2 saves block 30.
StepPlan two_jobs() {
  StepPlan plan;
  plan.epoch = kEpoch;
  plan.step = 1;
  plan.jobs = {{JobId{1}, RequestId{7}, JobKind::kLoad, 0, 2, 0, seconds(10)},
               {JobId{2}, RequestId{8}, JobKind::kSave, 2, 1, 0, seconds(10)}};
  plan.runs = {{StoreIndex{0}, 2, 3, 0, 0, 16},
               {StoreIndex{1}, 4, 1, 3, 2, 16},
               {StoreIndex{0}, 0, 1, 4, 0, 16}};
  for (const std::int32_t id : {10, 11, 12, 20, 30}) plan.ids.push_back(BlockId{id});
  return plan;
}

struct Told {
  std::uint64_t job = 1;
  JobOutcome outcome = JobOutcome::kOk;
  bool quiet = true;
  std::vector<FailedChunk> failed = {};
  std::uint64_t epoch = kEpoch;
};

std::vector<std::byte> bytes_of(const std::vector<Told>& all) {
  std::vector<std::byte> out;
  for (const Told& told : all) {
    WorkerReport report;
    report.epoch = told.epoch;
    report.failed = told.failed;
    JobReport& job = report.jobs.emplace_back();
    job.job = JobId{told.job};
    job.outcome = told.outcome;
    job.quiet = told.quiet ? 1 : 0;
    job.num_failed = static_cast<std::uint32_t>(told.failed.size());
    std::vector<std::byte> one;
    encode(report, one);
    out.insert(out.end(), one.begin(), one.end());
  }
  return out;
}

class RankLoadsTest : public ::testing::Test {
 protected:
  RankLoadsTest() { loads.expect(two_jobs().view()); }
  std::vector<RankLoadEnd> take(const std::vector<Told>& told) {
    std::vector<RankLoadEnd> ends;
    loads.take(bytes_of(told), ends);
    return ends;
  }
  RankLoads loads;
};

TEST_F(RankLoadsTest, OnlyLoadsAreRemembered) {
  EXPECT_EQ(loads.size(), 1u);
  EXPECT_THAT(take({{.job = 2}}), IsEmpty());
}

TEST_F(RankLoadsTest, ALoadEndsOnceItIsQuiet) {
  EXPECT_THAT(take({{.quiet = false}}), IsEmpty());
  EXPECT_THAT(take({{.outcome = JobOutcome::kNone}}),
              ElementsAre(RankLoadEnd{JobId{1}, RequestId{7}, true, {}}));
  EXPECT_EQ(loads.size(), 0u);
  EXPECT_THAT(take({{}}), IsEmpty()) << "a repeated report";
}

TEST_F(RankLoadsTest, FailedChunksAreNamedByTheirBlocks) {
  EXPECT_THAT(take({{.outcome = JobOutcome::kPartial,
                     .failed = {{StoreIndex{1}, 4, 1}, {StoreIndex{0}, 3, 1}}}}),
              ElementsAre(RankLoadEnd{JobId{1}, RequestId{7}, false, {BlockId{11}, BlockId{20}}}));
}

TEST_F(RankLoadsTest, AFailureAsAWholeNamesEveryBlock) {
  const std::vector all{BlockId{10}, BlockId{11}, BlockId{12}, BlockId{20}};
  EXPECT_THAT(take({{.outcome = JobOutcome::kFailed}}),
              ElementsAre(RankLoadEnd{JobId{1}, RequestId{7}, false, all}));
  loads.expect(two_jobs().view());
  EXPECT_THAT(take({{.outcome = JobOutcome::kNone}}),
              ElementsAre(RankLoadEnd{JobId{1}, RequestId{7}, false, all}))
      << "quiet without an outcome";
}

TEST_F(RankLoadsTest, ALoadInQuarantineCanBeGivenUp) {
  EXPECT_THAT(take({{.outcome = JobOutcome::kExpired, .quiet = false}}), IsEmpty());
  std::vector<RankLoadEnd> ends;
  EXPECT_TRUE(loads.abandon(JobId{1}, ends));
  ASSERT_EQ(ends.size(), 1u);
  EXPECT_FALSE(ends[0].complete);
  EXPECT_EQ(ends[0].failed.size(), 4u);
  EXPECT_FALSE(loads.abandon(JobId{1}, ends));
  EXPECT_THAT(take({{}}), IsEmpty()) << "its late quiet";
}

TEST_F(RankLoadsTest, ReportsOfAnotherEpochAreSkipped) {
  EXPECT_THAT(take({{.epoch = 3}, {}}), ElementsAre(RankLoadEnd{JobId{1}, RequestId{7}, true, {}}));
}

TEST_F(RankLoadsTest, AnotherSchedulerStartsAfresh) {
  StepPlan plan = two_jobs();
  plan.epoch = 5;
  plan.jobs[0].request = RequestId{70};
  loads.expect(plan.view());
  EXPECT_EQ(loads.size(), 1u);
  EXPECT_THAT(take({{}}), IsEmpty());
  EXPECT_THAT(take({{.epoch = 5}}), ElementsAre(RankLoadEnd{JobId{1}, RequestId{70}, true, {}}));
}

TEST_F(RankLoadsTest, ARepeatedPlanChangesNothing) {
  loads.expect(two_jobs().view());
  EXPECT_EQ(take({{}}).size(), 1u);
}

TEST_F(RankLoadsTest, BytesThatAreNoReportAreRefused) {
  std::vector<RankLoadEnd> ends;
  const std::vector<std::byte> rubbish(64, std::byte{1});
  EXPECT_THROW(loads.take(rubbish, ends), Error);
}

}  // namespace
}  // namespace kvprism
