// Plans that a worker refuses, and what becomes of their jobs.
#include "worker_fixture.h"

namespace kvprism {
namespace {

using test::kWorkerEpoch;
using test::WorkerTest;
using ::testing::HasSubstr;

TEST_F(WorkerTest, RefusesForeignPlansAndSaysWhy) {
  StepPlan plan = simple(JobKind::kSave, 1);
  plan.digest.bytes[0] ^= 1;
  SubmitResult result = worker->submit(plan.view(), ReadyToken::host());
  EXPECT_FALSE(result.accepted);
  EXPECT_FALSE(result.repeated);
  EXPECT_THAT(result.refusal, HasSubstr("digest = " + to_hex(plan.digest) + ": expected " +
                                        to_hex(schema->plan_digest())));
  WorkerReport told = report();
  EXPECT_EQ(told.jobs[0], (JobReport{JobId{1}, JobOutcome::kFailed, 1, 0, 0, 0, 0, 0}));

  worker->submit(simple(JobKind::kSave, 1, 2).view(), ReadyToken::host());
  plan = simple(JobKind::kSave, 1, 3);
  plan.epoch = kWorkerEpoch + 1;
  result = worker->submit(plan.view(), ReadyToken::host());
  EXPECT_THAT(result.refusal, HasSubstr("epoch = 100: expected 99"));
  told = report();
  EXPECT_EQ(told.epoch, kWorkerEpoch + 1) << "the report goes to the scheduler that sent it";
  EXPECT_EQ(told.jobs[0].job, JobId{3});

  plan = simple(JobKind::kSave, 1, 4);
  plan.ids[0] = BlockId{64};
  EXPECT_THAT(worker->submit(plan.view(), ReadyToken::host()).refusal,
              HasSubstr("ids[0] = 64: expected a block id below 64"));
  plan = simple(JobKind::kSave, 1, 5);
  plan.runs[0].group = StoreIndex{2};
  EXPECT_THAT(worker->submit(plan.view(), ReadyToken::host()).refusal,
              HasSubstr("runs[0].group = 2: expected a store index below 2"));
  plan = simple(JobKind::kSave, 1, 6);
  plan.runs[0].count = 2;
  EXPECT_THAT(worker->submit(plan.view(), ReadyToken::host()).refusal,
              HasSubstr("runs[0].first_id + count = 2"));

  std::vector<std::byte> bytes;
  encode(simple(JobKind::kSave, 1, 8).view(), bytes);
  bytes.resize(bytes.size() - 8);
  result = worker->submit(std::span<const std::byte>(bytes), ReadyToken::host());
  EXPECT_THAT(result.refusal, HasSubstr("step plan: bytes = "));
  EXPECT_EQ(worker->counters().plans_refused, 6u);
  worker->pump(now);
  EXPECT_EQ(store->puts.size(), 1u) << "only the good plan moves bytes";
}

TEST_F(WorkerTest, APlanRunsOnce) {
  // A repeated message must neither move bytes into blocks that were given back nor end live jobs.
  const StepPlan plan = simple(JobKind::kLoad, 1);
  EXPECT_TRUE(worker->submit(plan.view(), ReadyToken::host()).accepted);
  worker->pump(now);
  const SubmitResult again = worker->submit(plan.view(), ReadyToken::host());
  EXPECT_FALSE(again.accepted);
  EXPECT_TRUE(again.repeated);
  EXPECT_EQ(again.refusal,
            "step plan: step = 1: expected more than 1 (this plan or a later one was taken)");
  WorkerReport nothing;
  EXPECT_FALSE(worker->poll(nothing)) << "the job is still running";
  worker->pump(now);
  EXPECT_EQ(store->gets.size(), 1u);
  store->end_get();
  worker->pump(now);
  EXPECT_EQ(report().jobs[0].outcome, JobOutcome::kOk);
  EXPECT_FALSE(worker->submit(plan.view(), ReadyToken::host()).accepted);
  worker->pump(now);
  EXPECT_TRUE(store->gets.empty());
  EXPECT_EQ(worker->counters().plans_repeated, 2u);
}

// A report may be lost with the step that carried it (W-C25): the scheduler asks, and gets an end.
TEST_F(WorkerTest, AJobThatIsNotKnownIsToldAsFailedAndQuiet) {
  const auto ask = [&](std::vector<JobId> jobs) {
    StepPlan question = plan_of({}, {}, {});
    question.asked = std::move(jobs);
    EXPECT_TRUE(worker->submit(question.view(), ReadyToken::host()).accepted);
    return report().jobs;
  };
  EXPECT_TRUE(ask({JobId{4}}).empty()) << "an earlier worker may have had it";
  ASSERT_TRUE(worker->submit(simple(JobKind::kLoad, 1, 5).view(), ReadyToken::host()).accepted);
  worker->pump(now);
  EXPECT_TRUE(ask({JobId{5}}).empty()) << "it moves, and tells its end itself";
  store->end_get();
  worker->pump(now);
  const std::vector<JobReport> lost = report().jobs;
  ASSERT_EQ(lost.size(), 1u);
  EXPECT_EQ(lost[0].outcome, JobOutcome::kOk);

  const std::vector<JobReport> answers = ask({JobId{4}, JobId{5}, JobId{6}});
  EXPECT_EQ(answers, (std::vector<JobReport>{{JobId{5}, JobOutcome::kFailed, 1, 0, 0, 0, 0, 0},
                                             {JobId{6}, JobOutcome::kFailed, 1, 0, 0, 0, 0, 0}}))
      << "6 was in a plan that was lost, and comes no more";
  EXPECT_EQ(worker->counters().jobs_unknown, 2u);
  EXPECT_TRUE(store->gets.empty()) << "nothing is moved again";
}

// Whatever ends, in whatever order: of what moves nothing is told. Ids need not rise from plan to
// plan.
TEST_F(WorkerTest, OfJobsThatEndTogetherTheOthersAreStillKnown) {
  const std::vector<std::uint64_t> ids{4, 9, 7};
  for (std::size_t moving = 0; moving < ids.size(); ++moving) {
    build();
    for (const std::uint64_t id : ids) {
      ASSERT_TRUE(
          worker->submit(simple(JobKind::kLoad, 1, id).view(), ReadyToken::host()).accepted);
    }
    worker->pump(now);
    ASSERT_EQ(store->gets.size(), 3u);
    std::swap(store->gets[moving], store->gets.back());
    store->end_get();
    store->end_get();
    worker->pump(now);
    EXPECT_EQ(report().jobs.size(), 2u);
    EXPECT_EQ(worker->counters().jobs_alive, 1u);
    StepPlan question = plan_of({}, {}, {});
    question.asked = {JobId{4}, JobId{7}, JobId{9}};
    EXPECT_TRUE(worker->submit(question.view(), ReadyToken::host()).accepted);
    std::vector<std::uint64_t> over;
    for (const JobReport& job : report().jobs) over.push_back(raw(job.job));
    EXPECT_THAT(over, ::testing::SizeIs(2));
    EXPECT_THAT(over, ::testing::Not(::testing::Contains(ids[moving])));
    store->end_get();
    worker->pump(now);
    EXPECT_EQ(report().jobs.size(), 1u);
    EXPECT_EQ(worker->counters().jobs_alive, 0u);
  }
}

// No other worker can have had its first plan, so that one may be lost as well.
TEST_F(WorkerTest, TheOnlyWorkerAnswersForItsFirstPlan) {
  build({.only = true});
  StepPlan question = plan_of({}, {}, {});
  question.asked = {JobId{4}};
  EXPECT_TRUE(worker->submit(question.view(), ReadyToken::host()).accepted);
  EXPECT_EQ(report().jobs,
            (std::vector<JobReport>{{JobId{4}, JobOutcome::kFailed, 1, 0, 0, 0, 0, 0}}));
  ASSERT_TRUE(worker->submit(simple(JobKind::kLoad, 1, 5).view(), ReadyToken::host()).accepted);
  question.step = ++last_step;
  question.asked = {JobId{3}, JobId{5}};
  EXPECT_TRUE(worker->submit(question.view(), ReadyToken::host()).accepted);
  EXPECT_EQ(report().jobs,
            (std::vector<JobReport>{{JobId{3}, JobOutcome::kFailed, 1, 0, 0, 0, 0, 0}}))
      << "5 moves";
}

TEST_F(WorkerTest, RefusesPlansOfOtherKeys) {
  StepPlan plan = simple(JobKind::kSave, 1);
  KeyFacts other = schema->key_facts();
  other.model = "another model";
  plan.digest = KeySchema::kvprism(projection, other)->plan_digest();
  const SubmitResult result = worker->submit(plan.view(), ReadyToken::host());
  EXPECT_FALSE(result.accepted);
  EXPECT_THAT(result.refusal, HasSubstr("different cache configurations or key facts"));
  worker->pump(now);
  EXPECT_TRUE(store->puts.empty());
}

TEST_F(WorkerTest, ADamagedCopyOfARunningPlanEndsNothing) {
  const StepPlan plan = simple(JobKind::kLoad, 1);
  worker->submit(plan.view(), ReadyToken::host());
  worker->pump(now);
  std::vector<std::byte> bytes;
  encode(plan.view(), bytes);
  bytes.resize(bytes.size() - 8);
  const SubmitResult damaged =
      worker->submit(std::span<const std::byte>(bytes), ReadyToken::host());
  EXPECT_FALSE(damaged.accepted);
  EXPECT_TRUE(damaged.repeated);
  StepPlan foreign = plan;
  foreign.digest.bytes[0] ^= 1;
  EXPECT_TRUE(worker->submit(foreign.view(), ReadyToken::host()).repeated);
  WorkerReport nothing;
  EXPECT_FALSE(worker->poll(nothing)) << "its bytes still move";
}

// The damaged copy has told its jobs as over, so their blocks may serve others by now.
TEST_F(WorkerTest, APlanWhoseDamagedCopyCameFirstIsRefused) {
  StepPlan plan =
      plan_of({{JobId{5}, RequestId{7}, JobKind::kLoad, 0, 1, 0, seconds(10)},
               {JobId{6}, RequestId{8}, JobKind::kLoad, 1, 1, 0, seconds(10)}},
              {{StoreIndex{0}, 0, 1, 0, 0, 16}, {StoreIndex{0}, 0, 1, 1, 1, 16}}, {1, 2});
  plan.mark_tokens = {16, 16};
  for (const bool first : {true, false}) {  // the plan that binds the worker, and a later one
    std::vector<std::byte> bytes;
    encode(plan.view(), bytes);
    std::vector<std::byte> damaged(bytes.begin(), bytes.end() - 8);
    EXPECT_FALSE(worker->submit(std::span<const std::byte>(damaged), ReadyToken::host()).accepted);
    const std::vector<JobReport> told = report().jobs;
    ASSERT_EQ(told.size(), 2u);
    EXPECT_EQ(told[0], (JobReport{plan.jobs[0].id, JobOutcome::kFailed, 1, 0, 0, 0, 0, 0}));

    const SubmitResult whole =
        worker->submit(std::span<const std::byte>(bytes), ReadyToken::host());
    EXPECT_FALSE(whole.accepted);
    EXPECT_EQ(whole.refusal, "step plan: jobs[0].id = " + std::to_string(raw(plan.jobs[0].id)) +
                                 ": expected a job that has not ended (a damaged copy of the plan "
                                 "was refused, and its blocks were given back)");
    worker->pump(now);
    EXPECT_TRUE(store->gets.empty());
    WorkerReport nothing;
    EXPECT_FALSE(worker->poll(nothing)) << "they were told before";
    if (!first) break;
    ASSERT_TRUE(worker->submit(simple(JobKind::kSave, 1, 9).view(), ReadyToken::host()).accepted);
    plan.jobs[0].id = JobId{10};
    plan.jobs[1].id = JobId{11};
    plan.step = ++last_step;
  }
  // What a damaged copy did not name has ended with it.
  plan.jobs[0].id = JobId{20};
  plan.step = ++last_step;
  EXPECT_FALSE(worker->submit(plan.view(), ReadyToken::host()).accepted);
  EXPECT_EQ(report().jobs,
            (std::vector<JobReport>{{JobId{20}, JobOutcome::kFailed, 1, 0, 0, 0, 0, 0}}));
  EXPECT_EQ(worker->counters().plans_refused, 5u);
  EXPECT_EQ(worker->counters().plans, 1u);
}

TEST_F(WorkerTest, AShiftedMarkIsRefused) {
  StepPlan plan = simple(JobKind::kSave, 2);
  plan.mark_tokens[1] += 16;
  EXPECT_THAT(worker->submit(plan.view(), ReadyToken::host()).refusal,
              HasSubstr("runs[0].marks[1] = 48 tokens: expected 32 tokens"));
  plan = simple(JobKind::kSave, 2);
  plan.runs[0].valid_tokens_last = 7;
  EXPECT_THAT(worker->submit(plan.view(), ReadyToken::host()).refusal,
              HasSubstr("runs[0].valid_tokens_last = 7: expected 16"));
  plan = simple(JobKind::kSave, 2);
  plan.jobs[0].timeout = {};
  EXPECT_THAT(worker->submit(plan.view(), ReadyToken::host()).refusal,
              HasSubstr("jobs[0].timeout = 0 ns"));
}

TEST_F(WorkerTest, AFullInboxRefusesThePlan) {
  StoreWorkerOptions options;
  options.max_queued_jobs = 1;
  build(options);
  EXPECT_TRUE(worker->submit(simple(JobKind::kSave, 1, 1).view(), ReadyToken::host()).accepted);
  const StepPlan plan = simple(JobKind::kSave, 1, 2);
  const SubmitResult second = worker->submit(plan.view(), ReadyToken::host());
  EXPECT_FALSE(second.accepted);
  EXPECT_THAT(second.refusal, HasSubstr("jobs = 1 beside 1 queued: expected at most 1 together"));
  EXPECT_EQ(report().jobs[0].job, JobId{2});
  worker->pump(now);
  EXPECT_FALSE(worker->submit(plan.view(), ReadyToken::host()).accepted)
      << "its blocks went back with the refusal";
}

}  // namespace
}  // namespace kvprism
