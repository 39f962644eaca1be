// Exceptions in the middle of a worker's turn: no job is told for what has not moved.
#include <map>
#include <new>

#include "failing_memory.h"
#include "worker_fixture.h"

namespace kvprism {
namespace {

using test::counting;
using test::for_good;
using test::kPage;
using test::NotCounted;
using test::ScriptedStore;
using test::until_failure;
using test::WorkerTest;

// The fixture's store, a start of which throws.
class ThrowingStore final : public ObjectStore {
 public:
  explicit ThrowingStore(std::shared_ptr<ScriptedStore> inner) : inner_(std::move(inner)) {}

  StoreCapabilities capabilities() const override { return inner_->capabilities(); }
  void add_region(const Region& region) override { inner_->add_region(region); }
  void remove_region(const Region& region) override { inner_->remove_region(region); }
  bool start_put(OpId op, std::unique_ptr<ObjectBatch>& batch, Instant now,
                 Instant deadline) override {
    const NotCounted pause;
    fail_if_due(batch);
    return inner_->start_put(op, batch, now, deadline);
  }
  bool start_get(OpId op, std::unique_ptr<ObjectBatch>& batch, Instant now,
                 Instant deadline) override {
    const NotCounted pause;
    fail_if_due(batch);
    return inner_->start_get(op, batch, now, deadline);
  }
  bool poll_store(Instant now, Completion& out) override {
    const NotCounted pause;
    return inner_->poll_store(now, out);
  }
  CloseReport close_store(Duration budget) override { return inner_->close_store(budget); }

  int starts_until_failure = -1;
  bool takes_the_batch = false;  // before it fails

 private:
  void fail_if_due(std::unique_ptr<ObjectBatch>& batch) {
    if (starts_until_failure < 0 || starts_until_failure-- != 0) return;
    if (takes_the_batch) taken_ = std::move(batch);
    throw std::bad_alloc();
  }

  std::shared_ptr<ScriptedStore> inner_;
  std::unique_ptr<ObjectBatch> taken_;
};

struct Ends {
  std::vector<JobOutcome> outcomes;
  std::vector<FailedChunk> failed;
  std::uint32_t objects = 0;
  int quiets = 0;
};

class ExceptionTest : public WorkerTest {
 protected:
  void build_throwing(const StoreWorkerOptions& options) {
    build(options);
    throwing = std::make_shared<ThrowingStore>(store);
    worker = std::make_unique<StoreWorker>(schema, map, throwing, options);
    ends.clear();
  }
  void collect() {
    WorkerReport told;
    while (worker->poll(told)) {
      for (const JobReport& job : told.jobs) {
        Ends& of = ends[raw(job.job)];
        if (job.outcome != JobOutcome::kNone) {
          of.outcomes.push_back(job.outcome);
          of.objects = job.objects;
          const auto failed = told.failed_of(job);
          of.failed.insert(of.failed.end(), failed.begin(), failed.end());
        }
        of.quiets += static_cast<int>(job.quiet);
      }
    }
  }

  std::shared_ptr<ThrowingStore> throwing;
  std::map<std::uint64_t, Ends> ends;
};

TEST_F(ExceptionTest, AStartThatThrowsIsNoCompleteLoad) {
  for (const int before : {0, 1}) {  // calls that start
    StoreWorkerOptions options;
    options.max_segments_per_call = 1;
    build_throwing(options);
    ASSERT_TRUE(worker->submit(simple(JobKind::kLoad, 2).view(), ReadyToken::host()).accepted);
    throwing->starts_until_failure = before;
    EXPECT_THROW(worker->pump(now), std::bad_alloc);
    for (int turn = 0; turn < 3; ++turn) {
      worker->pump(now);
      if (!store->gets.empty()) store->end_get();
    }
    collect();
    EXPECT_EQ(ends[1].outcomes, std::vector<JobOutcome>{JobOutcome::kFailed}) << before;
    EXPECT_TRUE(ends[1].failed.empty()) << "nobody can say which chunk it was";
    EXPECT_EQ(ends[1].quiets, 1);
    EXPECT_EQ(worker->counters().jobs_alive, 0u);
    EXPECT_EQ(worker->counters().bytes_in_flight, 0u);
  }
}

// Quiet is never assumed.
TEST_F(ExceptionTest, AStartThatThrowsWithTheBatchMayHaveBegun) {
  build_throwing({});
  ASSERT_TRUE(worker->submit(simple(JobKind::kLoad, 2).view(), ReadyToken::host()).accepted);
  throwing->starts_until_failure = 0;
  throwing->takes_the_batch = true;
  EXPECT_THROW(worker->pump(now), std::bad_alloc);
  worker->pump(now + seconds(10));
  collect();
  EXPECT_EQ(ends[1].outcomes, std::vector<JobOutcome>{JobOutcome::kExpired});
  EXPECT_EQ(ends[1].failed.size(), 2u);
  EXPECT_EQ(ends[1].quiets, 0);
  EXPECT_EQ(worker->counters().bytes_in_flight, 2 * kPage);
  // The store says so after all.
  Completion late;
  late.op = OpId{1};
  late.outcome = late.quiet = true;
  late.items.assign(2, ItemResult{ItemStatus::kOk, kPage});
  store->store_ends.push_back(std::move(late));
  worker->pump(now + seconds(11));
  collect();
  EXPECT_EQ(ends[1].outcomes.size(), 1u);
  EXPECT_EQ(ends[1].quiets, 1);
  EXPECT_EQ(worker->counters().jobs_alive, 0u);
}

// Each allocation of a submit fails, of the first plan or of a later one: its jobs run all or not
// at all, and each has its ends once, told at once or when the scheduler asks.
TEST_F(ExceptionTest, WhicheverAllocationOfASubmitFailsEachJobIsToldOnce) {
  for (const auto& [first, alone] :
       {std::pair(true, true), {true, false}, {false, true}, {false, false}}) {
    for_good = !alone;
    int failures = 0;
    for (int allowed = 0;; ++allowed) {
      ASSERT_LT(allowed, 2000);
      build_throwing({});
      if (!first) {
        ASSERT_TRUE(
            worker->submit(simple(JobKind::kSave, 1, 1).view(), ReadyToken::host()).accepted);
      }
      StepPlan plan = plan_of({{JobId{2}, RequestId{7}, JobKind::kLoad, 0, 1, 0, seconds(10)},
                               {JobId{3}, RequestId{8}, JobKind::kSave, 1, 1, 0, seconds(10)},
                               {JobId{4}, RequestId{9}, JobKind::kLoad, 2, 1, 0, seconds(10)}},
                              {{StoreIndex{0}, 0, 1, 0, 0, 16},
                               {StoreIndex{0}, 0, 1, 1, 1, 16},
                               {StoreIndex{0}, 0, 1, 2, 2, 16}},
                              {1, 2, 3});
      plan.mark_tokens = {16, 16, 16};
      until_failure = allowed;
      bool accepted = false;
      counting = true;
      try {
        accepted = worker->submit(plan.view(), ReadyToken::host()).accepted;
      } catch (const std::bad_alloc&) {
        EXPECT_FALSE(alone) << "a refusal could be told";
      }
      counting = false;
      const bool done = until_failure >= 0;
      if (!done) ++failures;
      const bool again = worker->submit(plan.view(), ReadyToken::host()).accepted;
      EXPECT_FALSE(accepted && again) << "a step comes once";
      accepted |= again;
      for (int turn = 0; turn < 3; ++turn) {
        worker->pump(now);
        while (!store->gets.empty()) store->end_get();
        while (!store->puts.empty()) store->end_put();
      }
      collect();
      StepPlan question = plan_of({}, {}, {});
      for (const std::uint64_t id : {2, 3, 4}) {
        if (accepted) {
          EXPECT_EQ(ends[id].outcomes, std::vector<JobOutcome>{JobOutcome::kOk});
        }
        if (ends[id].quiets == 0) question.asked.push_back(JobId{id});
      }
      ASSERT_TRUE(worker->submit(question.view(), ReadyToken::host()).accepted);
      collect();
      for (const std::uint64_t id : {2, 3, 4}) {
        EXPECT_EQ(ends[id].quiets, 1) << "job " << id << " after " << allowed;
        EXPECT_EQ(ends[id].outcomes.size(), 1u) << "job " << id << " after " << allowed;
      }
      EXPECT_EQ(worker->counters().jobs_alive, 0u) << allowed;
      EXPECT_EQ(worker->counters().jobs, (first ? 0u : 1u) + (accepted ? 3u : 0u)) << allowed;
      if (done) break;
    }
    EXPECT_GT(failures, 5);
  }
  for_good = false;
}

// Each allocation of a worker's turns fails once: every job still has each end once, and counts as
// moved only what has moved.
TEST_F(ExceptionTest, WhicheverAllocationFailsNothingIsToldThatHasNotMoved) {
  StoreWorkerOptions options;
  options.max_segments_per_call = 2;
  int failures = 0;
  for (int allowed = 0;; ++allowed) {
    ASSERT_LT(allowed, 2000);
    build_throwing(options);
    ASSERT_TRUE(worker->submit(simple(JobKind::kLoad, 5, 1).view(), ReadyToken::host()).accepted);
    ASSERT_TRUE(worker->submit(simple(JobKind::kSave, 3, 2).view(), ReadyToken::host()).accepted);
    ASSERT_TRUE(worker->submit(simple(JobKind::kLoad, 2, 3).view(), ReadyToken::host()).accepted);
    until_failure = allowed;
    int thrown = 0;
    bool missing = true;  // of the first call to load, the second chunk
    for (int turn = 0; turn < 20; ++turn) {
      counting = true;
      try {
        worker->pump(now + (turn < 15 ? Duration{} : seconds(11)));
      } catch (const std::bad_alloc&) {
        ++thrown;
      }
      counting = false;
      // Not in the order of their starts, and one without being quiet.
      if (store->gets.size() > 1) std::swap(store->gets.front(), store->gets.back());
      if (!store->gets.empty()) {
        const bool both = store->gets.front().batch->ends.size() == 2;
        missing&& both ? store->end_get({{1, ItemStatus::kMissing}}, false) : store->end_get();
        missing &= !both;
      }
      if (!store->puts.empty()) store->end_put();
      if (turn % 3 == 2 && !store->unquiet.empty()) store->become_quiet();
    }
    counting = false;
    collect();
    if (thrown == 0) {
      EXPECT_GT(failures, 10) << "of allocations";
      EXPECT_EQ(ends[1].outcomes.size() + ends[3].outcomes.size(), 2u);
      EXPECT_EQ(ends[1].failed.size() + ends[3].failed.size(), 1u);
      EXPECT_EQ(ends[2].outcomes, std::vector<JobOutcome>{JobOutcome::kOk});
      break;
    }
    EXPECT_EQ(thrown, 1);
    failures += thrown;
    const std::map<std::uint64_t, std::uint32_t> chunks{{1, 5}, {2, 3}, {3, 2}};
    for (const auto& [job, planned] : chunks) {
      const Ends& of = ends[job];
      ASSERT_EQ(of.outcomes.size(), 1u) << "job " << job << " after " << allowed;
      EXPECT_EQ(of.quiets, 1) << "job " << job << " after " << allowed;
      if (of.outcomes[0] == JobOutcome::kFailed) continue;
      EXPECT_EQ(of.objects + of.failed.size(), planned) << "job " << job << " after " << allowed;
    }
    EXPECT_EQ(worker->counters().jobs_alive, 0u) << allowed;
    EXPECT_EQ(worker->counters().bytes_in_flight, 0u) << allowed;
    EXPECT_EQ(worker->counters().unquiet_calls, 0u) << allowed;
  }
}

}  // namespace
}  // namespace kvprism
