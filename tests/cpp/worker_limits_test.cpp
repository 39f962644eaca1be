// The limit on bytes in flight, and what is counted by group.
#include "kvprism/backend/fault_injection.h"
#include "kvprism/backend/memory_store.h"
#include "worker_fixture.h"

namespace kvprism {
namespace {

using test::kPage;
using test::WorkerTest;
using ::testing::ElementsAre;

TEST_F(WorkerTest, PutsWaitForWhatIsInFlightAndGetsDoNot) {
  StoreWorkerOptions options;
  options.max_bytes_in_flight = 3 * kPage;
  build(options);
  worker->submit(simple(JobKind::kSave, 5, 1).view(), ReadyToken::host());
  worker->pump(now);
  ASSERT_EQ(store->puts.size(), 1u);
  EXPECT_EQ(store->puts[0].keys().size(), 3u);
  EXPECT_EQ(worker->counters().bytes_in_flight, 3 * kPage);
  EXPECT_EQ(worker->counters().saves_held_up, 1u);
  worker->submit(simple(JobKind::kLoad, 4, 2).view(), ReadyToken::host());
  worker->pump(now);
  ASSERT_EQ(store->gets.size(), 1u) << "a load waits for no save";
  EXPECT_EQ(store->gets[0].keys().size(), 4u);
  EXPECT_EQ(worker->counters().bytes_in_flight, 7 * kPage);
  store->end_put({}, false);
  worker->pump(now);
  EXPECT_TRUE(store->puts.empty()) << "native code may still read what has an outcome";
  EXPECT_EQ(worker->counters().saves_held_up, 1u) << "one wait, however often it was looked at";
  store->end_get();
  worker->pump(now);
  ASSERT_EQ(store->puts.size(), 1u) << "what has ended and is not quiet holds up no last put";
  EXPECT_EQ(store->puts[0].keys().size(), 1u);
  EXPECT_EQ(worker->counters().bytes_in_flight, 4 * kPage);
  store->become_quiet();
  worker->pump(now);
  ASSERT_EQ(store->puts.size(), 2u);
  EXPECT_EQ(store->puts[1].keys().size(), 1u);
  store->end_put();
  store->end_put();
  worker->pump(now);
  EXPECT_EQ(worker->counters().bytes_in_flight, 0u);
  EXPECT_EQ(worker->counters().saves_held_up, 2u) << "once behind the load, once behind the put";
  EXPECT_EQ(worker->counters().bytes_stored, 5 * kPage);

  // Both at once: saves have what loads leave.
  worker->submit(simple(JobKind::kSave, 5, 3).view(), ReadyToken::host());
  worker->submit(simple(JobKind::kLoad, 2, 4).view(), ReadyToken::host());
  worker->pump(now);
  ASSERT_EQ(store->gets.size(), 1u);
  EXPECT_EQ(store->gets[0].keys().size(), 2u);
  ASSERT_EQ(store->puts.size(), 1u);
  EXPECT_EQ(store->puts[0].keys().size(), 1u);
}

TEST_F(WorkerTest, AnObjectBeyondTheLimitOfBytesGoesAlone) {
  StoreWorkerOptions options;
  options.max_bytes_in_flight = kPage / 2;
  build(options);
  worker->submit(simple(JobKind::kSave, 2).view(), ReadyToken::host());
  worker->pump(now);
  ASSERT_EQ(store->puts.size(), 1u);
  EXPECT_EQ(store->puts[0].keys().size(), 1u);
  store->end_put();
  worker->pump(now);
  ASSERT_EQ(store->puts.size(), 1u);
  store->end_put();
  worker->pump(now);
  EXPECT_EQ(report().jobs[0].objects, 2u);
}

TEST_F(WorkerTest, ASaveThatWaitsTooLongForBytesExpires) {
  StoreWorkerOptions options;
  options.max_bytes_in_flight = kPage;
  build(options);
  worker->submit(simple(JobKind::kLoad, 1, 1).view(), ReadyToken::host());
  worker->pump(now);
  worker->submit(simple(JobKind::kSave, 2, 2).view(), ReadyToken::host());
  worker->pump(now + seconds(1));
  worker->pump(now + seconds(9));
  EXPECT_TRUE(store->puts.empty());
  store->end_get();
  worker->pump(now + seconds(9));
  report();
  store->end_put();
  worker->submit(simple(JobKind::kLoad, 1, 3).view(), ReadyToken::host());
  worker->pump(now + seconds(11));
  const WorkerReport told = report();
  ASSERT_EQ(told.jobs.size(), 1u);
  EXPECT_EQ(told.jobs[0], (JobReport{JobId{2}, JobOutcome::kExpired, 1, 0, 1, 1, 0, kPage}));
  EXPECT_THAT(told.failed,
              ElementsAre(FailedChunk{StoreIndex{0}, 1,
                                      static_cast<std::uint32_t>(ItemStatus::kTimedOut)}));
}

TEST_F(WorkerTest, UnquietPutsOfAnInjectedFaultHoldUpNeitherTheLastPutNorALoad) {
  const auto memory_store = std::make_shared<MemoryStore>(std::make_shared<MemoryPool>());
  FaultPlan late;
  late[FaultKind::kLandLate] = 10'000;
  late.late = seconds(3);
  const auto faulty = std::make_shared<FaultInjector>(memory_store, nullptr, late);
  StoreWorkerOptions options;
  options.max_bytes_in_flight = 2 * kPage;
  worker = std::make_unique<StoreWorker>(schema, map, faulty, options);
  worker->submit(simple(JobKind::kSave, 2, 1).view(), ReadyToken::host());
  while (worker->pump(now)) {
  }
  ASSERT_EQ(report().jobs[0].outcome, JobOutcome::kPartial);
  ASSERT_EQ(worker->counters().unquiet_calls, 1u) << "told as failed, and still read";
  faulty->set_plan({});
  worker->submit(simple(JobKind::kSave, 1, 2).view(), ReadyToken::host());
  worker->submit(simple(JobKind::kLoad, 1, 3).view(), ReadyToken::host());
  while (worker->pump(now)) {
  }
  EXPECT_EQ(worker->counters().gets, 1u) << "what it asks for has not landed yet";
  EXPECT_EQ(worker->counters().puts, 2u) << "no call is open that could make room";
  EXPECT_EQ(worker->counters().bytes_in_flight, 2 * kPage);
  EXPECT_EQ(worker->counters().unquiet_calls, 1u);
  const WorkerReport told = report();
  ASSERT_EQ(told.jobs.size(), 2u);
  EXPECT_EQ(told.jobs[0], (JobReport{JobId{3}, JobOutcome::kPartial, 1, 0, 1, 0, 0, 0}));
  EXPECT_EQ(told.jobs[1].job, JobId{2});
  EXPECT_EQ(told.jobs[1].outcome, JobOutcome::kOk);
  now = now + seconds(4);
  while (worker->pump(now)) {
  }
  EXPECT_EQ(worker->counters().puts, 2u);
  EXPECT_EQ(worker->counters().bytes_in_flight, 0u);
  EXPECT_EQ(worker->counters().jobs_alive, 0u);
  EXPECT_EQ(worker->counters().saves_held_up, 1u);
}

TEST_F(WorkerTest, WhatMovesIsCountedByGroup) {
  const auto two_groups = [&](JobKind kind, std::uint64_t id) {
    return plan_of({{JobId{id}, RequestId{7}, kind, 0, 2, 0, seconds(10)}},
                   {{StoreIndex{0}, 4, 2, 0, 0, 16}, {StoreIndex{1}, 4, 1, 2, 0, 16}}, {9, 3, 5});
  };
  worker->submit(two_groups(JobKind::kSave, 1).view(), ReadyToken::host());
  worker->pump(now);
  store->end_put({{1, ItemStatus::kDuplicate}, {2, ItemStatus::kNoSpace}});
  worker->pump(now + milliseconds(3));
  worker->submit(two_groups(JobKind::kLoad, 2).view(), ReadyToken::host());
  worker->pump(now + milliseconds(3));
  store->end_get({{0, ItemStatus::kMissing}, {1, ItemStatus::kTimedOut}});
  worker->pump(now + milliseconds(10));
  const std::vector<StoreGroupCounters> groups = worker->group_counters();
  ASSERT_EQ(groups.size(), 3u);
  EXPECT_EQ(groups[0].stored_objects, 2u);
  EXPECT_EQ(groups[0].stored_bytes, kPage) << "a duplicate moves no bytes";
  EXPECT_EQ(groups[0].loaded_objects, 0u);
  EXPECT_EQ(groups[0].missed_objects, 1u);
  EXPECT_EQ(groups[0].missed_bytes, kPage);
  EXPECT_EQ(groups[0].failed_objects, 1u);
  EXPECT_EQ(groups[2].stored_objects, 0u);
  EXPECT_EQ(groups[2].failed_objects, 1u);
  EXPECT_EQ(groups[2].loaded_objects, 1u);
  EXPECT_EQ(groups[2].loaded_bytes, kPage);
  for (const std::size_t stored : {0, 2}) {
    EXPECT_EQ(groups[stored].put_time.count, 1u) << "once for a call";
    EXPECT_EQ(groups[stored].put_time.sum_us, 3'000u);
    EXPECT_EQ(groups[stored].get_time.count, 1u);
    EXPECT_EQ(groups[stored].get_time.sum_us, 7'000u);
  }
  EXPECT_EQ(groups[1].stored_objects + groups[1].loaded_objects + groups[1].put_time.count, 0u)
      << "a ring is never stored";
}

}  // namespace
}  // namespace kvprism
