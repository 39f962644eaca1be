// What a worker moves, when, and what it tells of it.
#include <algorithm>

#include "worker_fixture.h"

namespace kvprism {
namespace {

using test::Hashes;
using test::kPage;
using test::kWorkerEpoch;
using test::ScriptedStore;
using test::vllm_facts;
using test::WorkerTest;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Fires when the test says so.
class Switch final : public ReadySource {
 public:
  ReadyState state = ReadyState::kPending;
  ReadyState query() noexcept override { return state; }
};

TEST_F(WorkerTest, MovesExactlyTheBytesOfThePlan) {
  const StepPlan plan =
      plan_of({{JobId{1}, RequestId{7}, JobKind::kSave, 0, 2, 0, seconds(10)}},
              {{StoreIndex{0}, 4, 2, 0, 0, 16}, {StoreIndex{1}, 4, 1, 2, 0, 16}}, {9, 3, 5});
  EXPECT_TRUE(worker->submit(plan.view(), ReadyToken::host()).accepted);
  EXPECT_TRUE(worker->pump(now));
  ASSERT_EQ(store->puts.size(), 1u);
  const ObjectBatch& batch = *store->puts[0].batch;
  EXPECT_THAT(batch.segments, ElementsAre(Segment{memory.data() + 9 * kPage, kPage},
                                          Segment{memory.data() + 3 * kPage, kPage},
                                          Segment{memory.data() + (2 * 64 + 5) * kPage, kPage}));
  EXPECT_THAT(batch.ends, ElementsAre(1, 2, 3));
  KeySlots expected;
  const Hashes hashes(3, 1);
  schema->append_key(expected, StoreIndex{0}, {}, hashes.list()[0]);
  schema->append_key(expected, StoreIndex{0}, {}, hashes.list()[1]);
  schema->append_key(expected, StoreIndex{1}, {}, hashes.list()[0]);
  EXPECT_EQ(batch.keys.strings(), expected.strings());
  store->end_put();
  worker->pump(now);
  const WorkerReport told = report();
  EXPECT_EQ(told.epoch, kWorkerEpoch);
  ASSERT_EQ(told.jobs.size(), 1u);
  EXPECT_EQ(told.jobs[0], (JobReport{JobId{1}, JobOutcome::kOk, 1, 0, 0, 3, 0, 3 * kPage}));
  EXPECT_EQ(worker->counters().jobs_alive, 0u);
  WorkerReport nothing;
  EXPECT_FALSE(worker->poll(nothing));
}

TEST_F(WorkerTest, ReadsNothingBeforeTheSourceIsReady) {
  // R12
  const auto ready = std::make_shared<Switch>();
  const StepPlan plan = simple(JobKind::kSave, 2);
  worker->submit(plan.view(), ReadyToken::source(ready));
  worker->pump(now);
  worker->pump(now + seconds(1));
  EXPECT_TRUE(store->puts.empty());
  ready->state = ReadyState::kReady;
  worker->pump(now + seconds(2));
  EXPECT_EQ(store->puts.size(), 1u);
}

TEST_F(WorkerTest, WritesNothingBeforeEarlierKernelsHaveWritten) {
  const auto ready = std::make_shared<Switch>();
  worker->submit(simple(JobKind::kLoad, 2).view(), ReadyToken::source(ready));
  worker->pump(now);
  worker->pump(now + milliseconds(100));
  EXPECT_TRUE(store->gets.empty());
  ready->state = ReadyState::kReady;
  worker->pump(now + milliseconds(200));
  EXPECT_EQ(store->gets.size(), 1u);
}

TEST_F(WorkerTest, ALoadWhoseEventIsBrokenNamesWhatIsMissing) {
  const auto ready = std::make_shared<Switch>();
  ready->state = ReadyState::kFailed;
  worker->submit(simple(JobKind::kLoad, 2).view(), ReadyToken::source(ready));
  worker->pump(now);
  const WorkerReport told = report();
  ASSERT_EQ(told.jobs.size(), 1u);
  EXPECT_EQ(told.jobs[0].outcome, JobOutcome::kPartial);
  EXPECT_EQ(told.jobs[0].num_failed, 2u);
  EXPECT_EQ(told.jobs[0].quiet, 1u);
  EXPECT_TRUE(store->gets.empty());
}

TEST_F(WorkerTest, ASourceThatNeverGetsReadyExpiresQuietly) {
  const auto ready = std::make_shared<Switch>();
  worker->submit(simple(JobKind::kSave, 2).view(), ReadyToken::source(ready));
  worker->pump(now);
  worker->pump(now + seconds(10));
  const WorkerReport told = report();
  ASSERT_EQ(told.jobs.size(), 1u);
  EXPECT_EQ(told.jobs[0].outcome, JobOutcome::kExpired);
  EXPECT_EQ(told.jobs[0].quiet, 1u) << "no call was made";
  EXPECT_EQ(told.failed.size(), 2u);
  ready->state = ReadyState::kReady;
  worker->pump(now + seconds(11));
  EXPECT_TRUE(store->puts.empty());
}

TEST_F(WorkerTest, ABrokenEventFailsTheSave) {
  const auto ready = std::make_shared<Switch>();
  ready->state = ReadyState::kFailed;
  worker->submit(simple(JobKind::kSave, 2).view(), ReadyToken::source(ready));
  worker->pump(now);
  const WorkerReport told = report();
  ASSERT_EQ(told.jobs.size(), 1u);
  EXPECT_EQ(told.jobs[0].outcome, JobOutcome::kPartial);
  EXPECT_EQ(told.jobs[0].num_failed, 2u);
  EXPECT_EQ(told.jobs[0].quiet, 1u);
}

TEST_F(WorkerTest, OutcomeAndQuietAreToldApart) {
  worker->submit(simple(JobKind::kLoad, 2).view(), ReadyToken::host());
  worker->pump(now);
  store->end_get({{1, ItemStatus::kFailed}}, false);
  worker->pump(now);
  WorkerReport told = report();
  ASSERT_EQ(told.jobs.size(), 1u);
  EXPECT_EQ(told.jobs[0].outcome, JobOutcome::kPartial);
  EXPECT_EQ(told.jobs[0].quiet, 0u);
  EXPECT_THAT(told.failed, ElementsAre(FailedChunk{
                               StoreIndex{0}, 1, static_cast<std::uint32_t>(ItemStatus::kFailed)}));
  EXPECT_EQ(worker->counters().unquiet_calls, 1u);
  EXPECT_EQ(worker->counters().jobs_alive, 1u);
  store->become_quiet();
  worker->pump(now);
  told = report();
  ASSERT_EQ(told.jobs.size(), 1u);
  EXPECT_EQ(told.jobs[0].outcome, JobOutcome::kNone);
  EXPECT_EQ(told.jobs[0].quiet, 1u);
  EXPECT_EQ(worker->counters().unquiet_calls, 0u);
  EXPECT_EQ(worker->counters().jobs_alive, 0u);
}

TEST_F(WorkerTest, WhatWasNotFetchedInTimeCountsAsFailed) {
  StoreWorkerOptions options;
  options.max_segments_per_call = 2;
  options.max_gets_in_flight = 2;
  build(options);
  worker->submit(simple(JobKind::kLoad, 7).view(), ReadyToken::host());
  worker->pump(now);
  ASSERT_EQ(store->gets.size(), 2u);
  store->end_get();
  worker->pump(now);
  ASSERT_EQ(store->gets.size(), 2u);
  worker->pump(now + seconds(10));
  WorkerReport told = report();
  ASSERT_EQ(told.jobs.size(), 1u);
  EXPECT_EQ(told.jobs[0].outcome, JobOutcome::kExpired);
  EXPECT_EQ(told.jobs[0].quiet, 0u);
  EXPECT_EQ(told.jobs[0].objects, 2u);
  std::vector<std::uint32_t> chunks;
  for (const FailedChunk& failed : told.failed) chunks.push_back(failed.chunk);
  EXPECT_THAT(chunks, ::testing::UnorderedElementsAre(2, 3, 4, 5, 6));
  store->end_get();
  store->end_get();
  worker->pump(now + seconds(11));
  told = report();
  ASSERT_EQ(told.jobs.size(), 1u);
  EXPECT_EQ(told.jobs[0], (JobReport{JobId{1}, JobOutcome::kNone, 1, 0, 0, 0, 0, 0}))
      << "late bytes do not count";
  EXPECT_TRUE(store->gets.empty()) << "nothing new is started for an expired job";
}

TEST_F(WorkerTest, CallsStaySmall) {
  StoreWorkerOptions options;
  options.max_segments_per_call = 3;
  options.max_puts_in_flight = 8;
  build(options);
  worker->submit(simple(JobKind::kSave, 8).view(), ReadyToken::host());
  worker->pump(now);
  ASSERT_EQ(store->puts.size(), 3u);
  EXPECT_EQ(store->puts[0].keys().size(), 3u);
  EXPECT_EQ(store->puts[2].keys().size(), 2u);

  options.max_segments_per_call = 512;
  options.max_bytes_per_call = kPage - 1;
  build(options);
  worker->submit(simple(JobKind::kSave, 2).view(), ReadyToken::host());
  worker->pump(now);
  ASSERT_EQ(store->puts.size(), 2u) << "a chunk larger than the limit is sent alone (R55)";
}

TEST_F(WorkerTest, SavesShareCallsAndLoadsDoNot) {
  for (std::uint64_t id = 1; id <= 3; ++id) {
    worker->submit(simple(JobKind::kSave, 1, id).view(), ReadyToken::host());
    worker->submit(simple(JobKind::kLoad, 1, 10 + id).view(), ReadyToken::host());
  }
  worker->pump(now);
  EXPECT_EQ(store->puts.size(), 1u);
  EXPECT_EQ(store->puts[0].keys().size(), 3u);
  EXPECT_EQ(store->gets.size(), 3u);
  store->end_put({{1, ItemStatus::kNoSpace}});
  worker->pump(now);
  const WorkerReport told = report();
  ASSERT_EQ(told.jobs.size(), 3u);
  EXPECT_EQ(told.jobs[0].outcome, JobOutcome::kOk);
  EXPECT_EQ(told.jobs[1].outcome, JobOutcome::kPartial);
  EXPECT_EQ(told.jobs[2].outcome, JobOutcome::kOk);
}

TEST_F(WorkerTest, DuplicatesAreSuccess) {
  // R47
  worker->submit(simple(JobKind::kSave, 2).view(), ReadyToken::host());
  worker->pump(now);
  store->end_put({{0, ItemStatus::kDuplicate}});
  worker->pump(now);
  const WorkerReport told = report();
  EXPECT_EQ(told.jobs[0].outcome, JobOutcome::kOk);
  EXPECT_EQ(told.jobs[0].objects, 2u);
  EXPECT_EQ(told.jobs[0].duplicates, 1u);
}

TEST_F(WorkerTest, AnObjectOfAnotherSizeIsNotTheObject) {
  // R47: an empty value read back is a failure.
  worker->submit(simple(JobKind::kLoad, 1).view(), ReadyToken::host());
  worker->pump(now);
  Completion end;
  end.op = store->gets[0].op;
  end.outcome = end.quiet = true;
  end.items = {{ItemStatus::kOk, 0}};
  store->store_ends.push_back(std::move(end));
  store->gets.clear();
  worker->pump(now);
  const WorkerReport told = report();
  EXPECT_EQ(told.jobs[0].outcome, JobOutcome::kPartial);
  EXPECT_EQ(told.failed[0].status, static_cast<std::uint32_t>(ItemStatus::kSizeMismatch));
}

TEST_F(WorkerTest, AFullQueueBelowIsTriedAgain) {
  store->refuse = true;
  worker->submit(simple(JobKind::kSave, 2).view(), ReadyToken::host());
  worker->pump(now);
  EXPECT_TRUE(store->puts.empty());
  store->refuse = false;
  worker->pump(now);
  ASSERT_EQ(store->puts.size(), 1u);
  EXPECT_EQ(store->puts[0].keys().size(), 2u) << "nothing is lost and nothing twice";
}

TEST_F(WorkerTest, ADeviceEventIsLetGoWhenItsJobIsDone) {
  const auto ready = std::make_shared<Switch>();
  ready->state = ReadyState::kReady;
  worker->submit(simple(JobKind::kSave, 1).view(), ReadyToken::source(ready));
  worker->pump(now);
  store->end_put();
  worker->pump(now);
  EXPECT_EQ(ready.use_count(), 1);
}

TEST_F(WorkerTest, CloseCancelsWhatHasNotStartedAndTellsWhatIsUnquiet) {
  StoreWorkerOptions options;
  options.max_segments_per_call = 1;
  options.max_gets_in_flight = 1;
  build(options);
  worker->submit(simple(JobKind::kLoad, 2, 1).view(), ReadyToken::host());
  worker->submit(simple(JobKind::kLoad, 1, 2).view(), ReadyToken::host());
  worker->pump(now);
  const CloseReport closed = worker->close(now, milliseconds(10));
  EXPECT_EQ(closed.unquiet, 1u);
  const WorkerReport told = report();
  ASSERT_EQ(told.jobs.size(), 2u);
  EXPECT_EQ(told.jobs[0].outcome, JobOutcome::kCancelled);
  EXPECT_EQ(told.jobs[0].quiet, 0u);
  EXPECT_EQ(told.jobs[1].quiet, 1u);
  EXPECT_THAT(worker->submit(simple(JobKind::kLoad, 1, 3).view(), ReadyToken::host()).refusal,
              HasSubstr("worker = closed"));
}

TEST_F(WorkerTest, RanksWithEqualBytesStoreTheirPartsAndLoadAll) {
  CacheConfig config;
  config.num_blocks = 64;
  config.parallel.tp = 2;
  config.key_schema = "vllm";
  config.model_total_kv_heads = 1;
  config.groups = {test::full_group(16)};
  std::get<AttentionPayload>(config.groups[0].spec.payload).total_num_kv_heads = 1;
  projection = Projection::make(config, SpecRegistry::builtin());
  schema = KeySchema::vllm(projection, vllm_facts());
  CacheTensor tensor;
  tensor.base = memory.data();
  tensor.bytes = 64 * kPage;
  tensor.layers = {"full"};
  tensor.layer_stride = 64 * kPage;
  tensor.block_stride = kPage;
  map = SegmentMap::make(projection, {tensor});
  const StepPlan saved = simple(JobKind::kSave, 5);
  const StepPlan loaded = simple(JobKind::kLoad, 5, 2);
  const StepPlan single = simple(JobKind::kSave, 1, 3);
  std::vector<std::string> stored;
  for (const std::uint32_t rank : {0u, 1u}) {
    StoreWorkerOptions options;
    options.rank = Rank{rank};
    worker.reset();
    store = std::make_shared<ScriptedStore>();
    worker.reset();
    worker = std::make_unique<StoreWorker>(schema, map, store, options);
    ASSERT_TRUE(worker->submit(saved.view(), ReadyToken::host()).accepted);
    worker->pump(now);
    ASSERT_EQ(store->puts.size(), 1u);
    const auto keys = store->puts.front().keys();
    EXPECT_EQ(keys.size(), rank == 0 ? 3u : 2u);
    EXPECT_EQ(store->puts.front().batch->segments[0].base, memory.data() + (1 + rank) * kPage);
    stored.insert(stored.end(), keys.begin(), keys.end());
    store->end_put();
    worker->pump(now);
    EXPECT_EQ(report().jobs[0].objects, keys.size());
    ASSERT_TRUE(worker->submit(loaded.view(), ReadyToken::host()).accepted);
    worker->pump(now);
    ASSERT_EQ(store->gets.size(), 1u);
    EXPECT_EQ(store->gets.front().keys().size(), 5u) << "one key for both ranks";
    store->end_get();
    worker->pump(now);
    report();
    // Chunk 0 is rank 0's: on the other rank the job ends without a call.
    ASSERT_TRUE(worker->submit(single.view(), ReadyToken::host()).accepted);
    worker->pump(now);
    EXPECT_EQ(store->puts.size(), rank == 0 ? 1u : 0u);
    if (rank == 0) store->end_put();
    worker->pump(now);
    const WorkerReport last = report();
    ASSERT_EQ(last.jobs.size(), 1u);
    EXPECT_EQ(last.jobs[0].outcome, JobOutcome::kOk);
    EXPECT_EQ(last.jobs[0].quiet, 1);
  }
  std::sort(stored.begin(), stored.end());
  EXPECT_EQ(std::unique(stored.begin(), stored.end()), stored.end()) << "no object twice";
  EXPECT_EQ(stored.size(), 5u);
}

TEST_F(WorkerTest, PartsOfABlockAreTakenWhereHitsMayEndInside) {
  CacheConfig config;
  config.num_blocks = 64;
  config.hash_block_size = 4;
  config.cache_hit_alignment_tokens = 4;
  config.groups = {test::full_group(16), test::ring_group(8), test::mamba_group(16, "second")};
  std::get<StatePayload>(config.groups[2].spec.payload).shapes = {{kPage}};
  projection = Projection::make(config, SpecRegistry::builtin());
  schema = test::make_schema(projection);
  std::vector<CacheTensor> tensors(3);
  const char* layers[] = {"full", "ring", "second"};
  for (std::size_t t = 0; t < 3; ++t) {
    tensors[t].base = memory.data();
    tensors[t].bytes = memory.size();
    tensors[t].layers = {layers[t]};
    tensors[t].layer_stride = 64 * kPage;
    tensors[t].block_stride = kPage;
    tensors[t].offset = t * 64 * kPage;
  }
  map = SegmentMap::make(projection, tensors);
  worker.reset();
  worker = std::make_unique<StoreWorker>(schema, map, store, StoreWorkerOptions{});
  const auto answer = [&](std::uint32_t group, std::uint32_t mark, std::uint32_t valid) {
    StepPlan plan = simple(JobKind::kLoad, 2, last_step + 1);
    plan.runs[0].group = StoreIndex{group};
    plan.runs[0].valid_tokens_last = valid;
    plan.mark_tokens[1] = mark;
    return worker->submit(plan.view(), ReadyToken::host()).refusal;
  };
  EXPECT_EQ(answer(0, 28, 12), "");
  EXPECT_EQ(answer(0, 28, 8), "") << "a hit that ends before the object does";
  EXPECT_EQ(answer(0, 32, 12), "");
  EXPECT_EQ(answer(1, 28, 12), "");
  EXPECT_THAT(answer(0, 30, 12), HasSubstr("runs[0].marks[1] = 30 tokens: expected 32 tokens"));
  EXPECT_THAT(answer(0, 16, 12), HasSubstr("runs[0].marks[1] = 16 tokens"));
  EXPECT_THAT(answer(0, 28, 16),
              HasSubstr("valid_tokens_last = 16: expected up to the 12 tokens of its mark, in "
                        "units of 4"));
  EXPECT_THAT(answer(0, 28, 9), HasSubstr("valid_tokens_last = 9"));
  EXPECT_THAT(answer(0, 28, 0), HasSubstr("valid_tokens_last = 0"));
  EXPECT_THAT(answer(1, 28, 8), HasSubstr("valid_tokens_last = 8")) << "a state is all or nothing";
}

}  // namespace
}  // namespace kvprism
