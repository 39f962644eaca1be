#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "kvprism/wire/step_plan.h"
#include "kvprism/wire/worker_report.h"

namespace kvprism {
namespace {

using ::testing::HasSubstr;

StepPlan small_plan() {
  StepPlan plan;
  plan.digest.bytes.fill(0xd1);
  plan.epoch = 77;
  plan.step = 5;
  plan.hash_width = 16;
  plan.jobs = {{JobId{1}, RequestId{9}, JobKind::kSave, 0, 2, 0, seconds(60)},
               {JobId{2}, RequestId{8}, JobKind::kLoad, 2, 1, 0, seconds(20)}};
  plan.runs = {{StoreIndex{0}, 3, 2, 0, 0, 16},
               {StoreIndex{1}, 4, 1, 2, 1, 16},
               {StoreIndex{0}, 0, 1, 3, 2, 16}};
  plan.ids = {BlockId{4}, BlockId{5}, BlockId{31}, BlockId{7}};
  plan.mark_tokens = {64, 80, 16};
  plan.mark_hashes.assign(48, 0xab);
  return plan;
}

std::string refusal(std::span<const std::byte> bytes) {
  try {
    (void)decode_plan(bytes);
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

TEST(StepPlan, SurvivesTheWire) {
  const StepPlan plan = small_plan();
  std::vector<std::byte> bytes;
  encode(plan.view(), bytes);
  const StepPlanView view = decode_plan(bytes);
  EXPECT_EQ(view.digest, plan.digest);
  EXPECT_EQ(view.epoch, 77u);
  EXPECT_EQ(view.step, 5u);
  EXPECT_TRUE(std::equal(view.jobs.begin(), view.jobs.end(), plan.jobs.begin(), plan.jobs.end()));
  EXPECT_TRUE(std::equal(view.runs.begin(), view.runs.end(), plan.runs.begin(), plan.runs.end()));
  EXPECT_TRUE(std::equal(view.ids.begin(), view.ids.end(), plan.ids.begin(), plan.ids.end()));
  EXPECT_EQ(view.mark_tokens[1], 80u);
  EXPECT_EQ(view.mark_hash(2).size(), 16u);
  std::vector<std::byte> again;
  encode(view, again);
  EXPECT_EQ(again, bytes);
}

TEST(StepPlan, QuestionsAboutEarlierJobsSurviveTheWire) {
  StepPlan plan;
  plan.epoch = 77;
  plan.step = 5;
  EXPECT_TRUE(plan.empty());
  plan.asked = {JobId{3}, JobId{9}};
  EXPECT_FALSE(plan.empty());
  std::vector<std::byte> bytes;
  encode(plan.view(), bytes);
  const StepPlanView view = decode_plan(bytes);
  EXPECT_TRUE(view.jobs.empty());
  EXPECT_TRUE(
      std::equal(view.asked.begin(), view.asked.end(), plan.asked.begin(), plan.asked.end()));
  for (std::size_t length = 0; length < bytes.size(); ++length) {
    EXPECT_NE(refusal(std::span(bytes).first(length)), "") << length;
  }
  plan.clear();
  EXPECT_TRUE(plan.empty());
}

TEST(StepPlan, IsReadWhereItLies) {
  std::vector<std::byte> bytes;
  encode(small_plan().view(), bytes);
  const StepPlanView view = decode_plan(bytes);
  EXPECT_GE(reinterpret_cast<const std::byte*>(view.ids.data()), bytes.data());
  EXPECT_LT(reinterpret_cast<const std::byte*>(view.ids.data()), bytes.data() + bytes.size());
}

TEST(StepPlan, EveryTruncationIsRefused) {
  std::vector<std::byte> bytes;
  encode(small_plan().view(), bytes);
  for (std::size_t length = 0; length < bytes.size(); ++length) {
    EXPECT_NE(refusal(std::span(bytes).first(length)), "") << length;
  }
  bytes.resize(bytes.size() + 8);
  EXPECT_THAT(refusal(bytes), HasSubstr("step plan: bytes = "));
}

TEST(StepPlan, NamesWhatItRefuses) {
  std::vector<std::byte> good;
  encode(small_plan().view(), good);
  const auto with = [&](std::size_t at, std::uint32_t value) {
    std::vector<std::byte> bad = good;
    std::memcpy(bad.data() + at, &value, 4);
    return refusal(bad);
  };
  EXPECT_THAT(with(0, 1), HasSubstr("magic = 1: expected"));
  EXPECT_THAT(with(4, 2), HasSubstr("version = 2: expected 1"));
  EXPECT_THAT(with(4, 0x00020001), HasSubstr("flags = 2: expected 0 or 1"));
  EXPECT_THAT(with(4, 0x00010001), HasSubstr("the arrays that the header counts"));
  const std::size_t jobs = 72;
  EXPECT_THAT(with(jobs + sizeof(JobRecord), 1), HasSubstr("jobs[1].id = 1: expected more than 1"));
  EXPECT_THAT(with(jobs + 16, 3), HasSubstr("jobs[0].kind = 3: expected 1 (save) or 2 (load)"));
  EXPECT_THAT(with(jobs + 24, 9),
              HasSubstr("jobs[0].first_run + num_runs = 9: expected at most 3 runs"));
  const std::size_t runs = jobs + 2 * sizeof(JobRecord);
  EXPECT_THAT(with(runs + 8, 0), HasSubstr("runs[0].count = 0: expected at least 1 chunk"));
  EXPECT_THAT(with(runs + 8, 5), HasSubstr("runs[0].first_id + count = 5: expected at most 4 ids"));
  EXPECT_THAT(with(runs + 16, 2),
              HasSubstr("runs[0].first_mark + count = 4: expected at most 3 marks"));
  const std::size_t ids = runs + 3 * sizeof(RunRecord);
  EXPECT_THAT(with(ids + 4, 0), HasSubstr("ids[1] = 0: expected a block id of 1 or more"));
  EXPECT_THAT(with(ids + 4, 0xffffffff), HasSubstr("ids[1] = -1"));
}

TEST(StepPlan, CountsThatOverflowAreRefused) {
  std::vector<std::byte> good;
  encode(small_plan().view(), good);
  for (std::size_t at = 48; at < 72; at += 4) {
    for (const std::uint32_t value : {0xffffffffu, 0x80000000u, 0x7fffffffu}) {
      std::vector<std::byte> bad = good;
      std::memcpy(bad.data() + at, &value, 4);
      EXPECT_NE(refusal(bad), "") << at;
    }
  }
}

TEST(StepPlan, OutlineNamesTheJobsOfARefusedPlan) {
  std::vector<std::byte> bytes;
  encode(small_plan().view(), bytes);
  const PlanOutline whole = outline_of(std::span(bytes).first(bytes.size() - 1));
  EXPECT_EQ(whole.epoch, 77u);
  EXPECT_EQ(whole.jobs, (std::vector<JobId>{JobId{1}, JobId{2}}));
  EXPECT_EQ(outline_of(std::span(bytes).first(72 + 41)).jobs, (std::vector<JobId>{JobId{1}}));
  EXPECT_TRUE(outline_of(std::span(bytes).first(71)).jobs.empty());
}

TEST(StepPlan, OutlineCanBeReadFromLaterVersions) {
  // Nobody may wait for jobs of a plan that another version wrote: the ids are where they always
  // are, in records that may have grown.
  std::vector<std::byte> bytes;
  encode(small_plan().view(), bytes);
  bytes[4] = std::byte{9};  // version
  EXPECT_NE(refusal(bytes), "");
  EXPECT_EQ(outline_of(bytes).epoch, 77u);
  EXPECT_EQ(outline_of(bytes).jobs, (std::vector<JobId>{JobId{1}, JobId{2}}));

  const std::uint32_t wider = 48;
  std::memcpy(bytes.data() + 68, &wider, 4);
  bytes.insert(bytes.begin() + 72 + 40, 8, std::byte{0xee});
  EXPECT_EQ(outline_of(bytes).jobs, (std::vector<JobId>{JobId{1}, JobId{2}}));

  const std::uint32_t narrower = 7;
  std::memcpy(bytes.data() + 68, &narrower, 4);
  EXPECT_TRUE(outline_of(bytes).jobs.empty());
}

TEST(StepPlan, RandomDamageNeverReachesOutside) {
  std::vector<std::byte> good;
  encode(small_plan().view(), good);
  std::mt19937 random(3);
  int accepted = 0;
  for (int round = 0; round < 20000; ++round) {
    std::vector<std::byte> bad = good;
    for (std::uint32_t flips = 1 + random() % 3; flips > 0; --flips) {
      bad[random() % bad.size()] = static_cast<std::byte>(random());
    }
    try {
      const StepPlanView view = decode_plan(bad);
      ++accepted;
      for (const JobRecord& job : view.jobs) {
        for (const RunRecord& run : view.runs.subspan(job.first_run, job.num_runs)) {
          EXPECT_EQ(view.ids.subspan(run.first_id, run.count).size(), run.count);
          EXPECT_EQ(view.mark_hash(run.first_mark + run.count - 1).size(), view.hash_width);
        }
      }
    } catch (const Error&) {
    }
  }
  EXPECT_GT(accepted, 1000) << "damage to hashes and ids alone cannot be seen";
}

TEST(WorkerReport, SeveralRanksAreConcatenated) {
  WorkerReport first;
  first.rank = Rank{0};
  first.epoch = 5;
  first.jobs = {{JobId{3}, JobOutcome::kPartial, 1, 0, 1, 4, 1, 4096}};
  first.failed = {{StoreIndex{1}, 7, 2}};
  WorkerReport second;
  second.rank = Rank{1};
  second.epoch = 5;
  second.jobs = {{JobId{3}, JobOutcome::kOk, 0, 0, 0, 5, 0, 4096}};
  std::vector<std::byte> bytes;
  std::vector<std::byte> more;
  encode(first, bytes);
  encode(second, more);
  bytes.insert(bytes.end(), more.begin(), more.end());
  std::span<const std::byte> rest = bytes;
  WorkerReport out;
  decode_report(rest, out);
  EXPECT_EQ(out, first);
  decode_report(rest, out);
  EXPECT_EQ(out, second);
  EXPECT_TRUE(rest.empty());
}

TEST(WorkerReport, EveryTruncationIsRefused) {
  WorkerReport report;
  report.jobs = {{JobId{3}, JobOutcome::kPartial, 1, 0, 1, 4, 1, 4096}};
  report.failed = {{StoreIndex{1}, 7, 2}};
  std::vector<std::byte> bytes;
  encode(report, bytes);
  WorkerReport out;
  for (std::size_t length = 0; length < bytes.size(); ++length) {
    std::span<const std::byte> rest = std::span(bytes).first(length);
    EXPECT_THROW(decode_report(rest, out), Error) << length;
  }
  std::uint32_t outcome = 6;
  std::memcpy(bytes.data() + 32 + 8, &outcome, 4);
  std::span<const std::byte> rest = bytes;
  try {
    decode_report(rest, out);
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("worker report: jobs[0].outcome = 6: expected 0 to 5"));
  }
}

}  // namespace
}  // namespace kvprism
