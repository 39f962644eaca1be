#include "kvprism/store/store_worker.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "kvprism/backend/fault_injection.h"
#include "kvprism/backend/memory_store.h"
#include "kvprism/base/log.h"
#include "store_fixtures.h"

namespace kvprism {
namespace {

using test::Hashes;
using test::ScriptedStore;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr std::uint64_t kEpoch = 99;
constexpr std::uint64_t kPage = 128;  // 16 tokens of 8 bytes

// Fires when the test says so.
class Switch final : public ReadySource {
 public:
  ReadyState state = ReadyState::kPending;
  ReadyState query() noexcept override { return state; }
};

KeyFacts vllm_facts() {
  KeyFacts facts;
  facts.model = "m";
  facts.hash_algorithm = "test";
  return facts;
}

class WorkerTest : public ::testing::Test {
 protected:
  WorkerTest() { build(); }

  void build(StoreWorkerOptions options = {}) {
    worker.reset();
    store = std::make_shared<ScriptedStore>();
    projection = test::make_projection(
        {test::full_group(16), test::ring_group(8), test::full_group(16, "second")});
    schema = test::make_schema(projection);
    memory.assign(3 * 64 * kPage, std::byte{0});
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
    worker = std::make_unique<StoreWorker>(schema, map, store, options);
  }

  StepPlan plan_of(std::vector<JobRecord> jobs, std::vector<RunRecord> runs,
                   std::vector<std::int32_t> ids) {
    StepPlan plan;
    plan.digest = schema->plan_digest();
    plan.epoch = kEpoch;
    plan.step = ++last_step;
    plan.hash_width = Hashes::kWidth;
    plan.jobs = std::move(jobs);
    plan.runs = std::move(runs);
    for (const std::int32_t id : ids) plan.ids.push_back(BlockId{id});
    const auto marks = static_cast<std::uint32_t>(plan.ids.size());
    plan.mark_tokens.resize(marks);
    for (RunRecord& run : plan.runs) {
      run.valid_tokens_last = 16;
      for (std::uint32_t i = 0; i < run.count && run.first_mark + i < marks; ++i) {
        plan.mark_tokens[run.first_mark + i] = 16 * (run.first_chunk + i + 1);
      }
    }
    plan.mark_hashes = Hashes(marks, 1).bytes;
    return plan;
  }
  // One job over `count` chunks of the first group in blocks 1, 2, ...
  StepPlan simple(JobKind kind, std::uint32_t count, std::uint64_t id = 1) {
    std::vector<std::int32_t> ids;
    for (std::uint32_t i = 0; i < count; ++i) ids.push_back(static_cast<std::int32_t>(1 + i));
    return plan_of({{JobId{id}, RequestId{7}, kind, 0, 1, 0, seconds(10)}},
                   {{StoreIndex{0}, 0, count, 0, 0, 16}}, ids);
  }
  WorkerReport report() {
    WorkerReport out;
    worker->poll(out);
    return out;
  }

  std::shared_ptr<ScriptedStore> store;
  std::shared_ptr<const Projection> projection;
  std::shared_ptr<const KeySchema> schema;
  std::vector<std::byte> memory;
  std::shared_ptr<const SegmentMap> map;
  std::unique_ptr<StoreWorker> worker;
  Instant now{seconds(1).ns};
  std::uint64_t last_step = 0;
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
  EXPECT_EQ(told.epoch, kEpoch);
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

TEST_F(WorkerTest, RefusesForeignPlansAndSaysWhy) {
  StepPlan plan = simple(JobKind::kSave, 1);
  plan.digest.bytes[0] ^= 1;
  SubmitResult result = worker->submit(plan.view(), ReadyToken::host());
  EXPECT_FALSE(result.accepted);
  EXPECT_THAT(result.refusal, HasSubstr("digest = " + to_hex(plan.digest) + ": expected " +
                                        to_hex(schema->plan_digest())));
  WorkerReport told = report();
  EXPECT_EQ(told.jobs[0], (JobReport{JobId{1}, JobOutcome::kFailed, 1, 0, 0, 0, 0, 0}));

  worker->submit(simple(JobKind::kSave, 1, 2).view(), ReadyToken::host());
  plan = simple(JobKind::kSave, 1, 3);
  plan.epoch = kEpoch + 1;
  result = worker->submit(plan.view(), ReadyToken::host());
  EXPECT_THAT(result.refusal, HasSubstr("epoch = 100: expected 99"));
  told = report();
  EXPECT_EQ(told.epoch, kEpoch + 1) << "the report goes to the scheduler that sent it";
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

// Its digest is the same: stages may differ in what a block holds.
TEST_F(WorkerTest, AMapOfOtherBytesThanTheKeysTellIsRefused) {
  std::vector<GroupConfig> groups = {test::full_group(16), test::ring_group(8),
                                     test::full_group(16, "second")};
  std::get<AttentionPayload>(groups[0].spec.payload).dtype = DType::kBFloat16;
  const auto keys = test::make_schema(test::make_projection(std::move(groups)));
  ASSERT_EQ(keys->projection().digest(), projection->digest());
  worker.reset();
  try {
    const StoreWorker refused(keys, map, store, {});
    FAIL() << "accepted";
  } catch (const Error& error) {
    ASSERT_EQ(error.problems().size(), 1u);
    EXPECT_EQ(error.problems()[0].path, "schema.projection");
    EXPECT_THAT(error.problems()[0].hint, HasSubstr("store_groups[0].dtype"));
    EXPECT_THAT(error.problems()[0].hint, HasSubstr("bfloat16"));
  }
}

TEST_F(WorkerTest, ADamagedCopyOfARunningPlanEndsNothing) {
  const StepPlan plan = simple(JobKind::kLoad, 1);
  worker->submit(plan.view(), ReadyToken::host());
  worker->pump(now);
  std::vector<std::byte> bytes;
  encode(plan.view(), bytes);
  bytes.resize(bytes.size() - 8);
  EXPECT_FALSE(worker->submit(std::span<const std::byte>(bytes), ReadyToken::host()).accepted);
  StepPlan foreign = plan;
  foreign.digest.bytes[0] ^= 1;
  EXPECT_FALSE(worker->submit(foreign.view(), ReadyToken::host()).accepted);
  WorkerReport nothing;
  EXPECT_FALSE(worker->poll(nothing)) << "its bytes still move";
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

TEST_F(WorkerTest, ARankOutsideTheArrangementIsRefused) {
  StoreWorkerOptions options;
  options.rank = Rank{1};
  try {
    build(options);
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("rank = 1: expected below 1, tp x pp x pcp"));
  }
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

TEST_F(WorkerTest, RegistrationIsAllOrNothing) {
  // R59
  auto failing = std::make_shared<ScriptedStore>();
  failing->fail_region_at = 0;
  EXPECT_THROW(StoreWorker(schema, map, failing, {}), Error);
  EXPECT_THAT(failing->regions, IsEmpty());

  // The second of two allocations cannot be registered: the first goes back.
  std::vector<std::byte> second(64 * kPage);
  std::vector<CacheTensor> tensors(3);
  const char* layers[] = {"full", "ring", "second"};
  for (std::size_t t = 0; t < 3; ++t) {
    std::vector<std::byte>& home = t == 2 ? second : memory;
    tensors[t].base = home.data();
    tensors[t].bytes = home.size();
    tensors[t].layers = {layers[t]};
    tensors[t].layer_stride = 64 * kPage;
    tensors[t].block_stride = kPage;
    tensors[t].offset = t == 2 ? 0 : t * 64 * kPage;
  }
  const auto two = SegmentMap::make(projection, tensors);
  ASSERT_EQ(two->regions().size(), 2u);
  failing = std::make_shared<ScriptedStore>();
  failing->fail_region_at = 1;
  EXPECT_THROW(StoreWorker(schema, two, failing, {}), Error);
  EXPECT_THAT(failing->regions, IsEmpty());
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

TEST_F(WorkerTest, SchemaVllmIsRefusedWhereObjectsWouldDiffer) {
  CacheConfig config;
  config.num_blocks = 64;
  config.key_schema = "vllm";
  config.groups = {test::full_group(16), test::full_group(16, "second")};
  projection = Projection::make(config, SpecRegistry::builtin());
  schema = KeySchema::vllm(projection, vllm_facts());
  CacheTensor tensor;
  tensor.base = memory.data();
  tensor.bytes = 2 * 64 * kPage;
  tensor.layers = {"full"};
  tensor.layer_stride = 64 * kPage;
  tensor.block_stride = 2 * kPage;
  CacheTensor other = tensor;
  other.layers = {"second"};
  other.offset = kPage;
  map = SegmentMap::make(projection, {tensor, other});
  worker.reset();
  try {
    StoreWorker refused(schema, map, store, {});
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("groups[1] = layers at other places"));
    EXPECT_THAT(error.what(), HasSubstr("block_stride = more than a page"));
  }
}

// W-C1: it is the strides that are wrong, not the name.
TEST_F(WorkerTest, SchemaVllmIsRefusedWhereTheReferenceStoresWrongBytes) {
  worker.reset();
  CacheConfig config;
  config.num_blocks = 64;
  config.key_schema = "vllm";
  config.kv_layout = "BHLNC";
  const auto refusal = [&](std::uint32_t heads, std::uint32_t layers) -> std::string {
    config.groups = {test::full_group(16)};
    std::get<AttentionPayload>(config.groups[0].spec.payload).num_kv_heads = heads;
    CacheTensor tensor;
    config.groups[0].layers.clear();
    for (std::uint32_t l = 0; l < layers; ++l)
      config.groups[0].layers.push_back("l" + std::to_string(l));
    tensor.layers = config.groups[0].layers;
    tensor.layer_stride = kPage;
    tensor.head_stride = layers * kPage;
    tensor.block_stride = std::uint64_t{heads} * layers * kPage;
    memory.resize(config.num_blocks * tensor.block_stride);
    tensor.base = memory.data();
    tensor.bytes = memory.size();
    projection = Projection::make(config, SpecRegistry::builtin());
    map = SegmentMap::make(projection, {tensor});
    try {
      StoreWorker accepted(KeySchema::vllm(projection, vllm_facts()), map,
                           std::make_shared<ScriptedStore>(), {});
    } catch (const Error& error) {
      return error.what();
    }
    return {};
  };
  EXPECT_THAT(refusal(2, 2), HasSubstr("groups[0] = several layers and heads in layout BHLNC"));
  EXPECT_EQ(refusal(2, 1), "");
  EXPECT_EQ(refusal(1, 2), "");
  config.num_blocks = 2;
  EXPECT_THAT(refusal(1, 1), HasSubstr("num_blocks = 2: expected at least 3"));
  config.num_blocks = 3;
  EXPECT_EQ(refusal(1, 1), "");
}

TEST_F(WorkerTest, SchemaVllmTakesGroupsThatOverlayEachOther) {
  CacheConfig config;
  config.num_blocks = 64;
  config.key_schema = "vllm";
  config.groups = {test::full_group(16), test::window_group(16, 20)};
  projection = Projection::make(config, SpecRegistry::builtin());
  schema = KeySchema::vllm(projection, vllm_facts());
  CacheTensor tensor;
  tensor.base = memory.data();
  tensor.bytes = 64 * kPage;
  tensor.layers = {"full"};
  tensor.layer_stride = 64 * kPage;
  tensor.block_stride = kPage;
  CacheTensor other = tensor;
  other.layers = {"window"};
  map = SegmentMap::make(projection, {tensor, other});
  worker.reset();
  EXPECT_NO_THROW(StoreWorker(schema, map, store, {}));
}

TEST_F(WorkerTest, AStoreHasOneWorkerAtATime) {
  build();
  try {
    StoreWorker second(schema, map, store, {});
    FAIL() << "two workers would take each other's completions";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(),
                 "store worker: store = in use: expected an object store of its own (completions "
                 "go to whoever polls; destroy its user first, or connect again)");
  }
  const StepPlan plan = simple(JobKind::kSave, 1, 1);
  worker->submit(plan.view(), ReadyToken::host());
  worker->pump(now);
  ASSERT_EQ(store->puts.size(), 1u);
  const OpId left = store->puts[0].op;
  worker.reset();
  worker = std::make_unique<StoreWorker>(schema, map, store, StoreWorkerOptions{});
  worker->submit(plan.view(), ReadyToken::host());
  worker->pump(now);
  ASSERT_EQ(store->puts.size(), 2u);
  EXPECT_NE(store->puts[1].op, left) << "its end would be taken for the new one's";
}

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

TEST_F(WorkerTest, ALimitThatLoadsAloneFillIsWarnedOf) {
  std::vector<std::string> lines;
  set_log_sink(
      [](void* context, LogLevel, std::string_view line) {
        static_cast<std::vector<std::string>*>(context)->emplace_back(line);
      },
      &lines, LogLevel::kWarning);
  StoreWorkerOptions options;
  options.max_bytes_per_call = 2 * kPage;
  options.max_bytes_in_flight = 8 * kPage + 4;
  build(options);
  EXPECT_THAT(lines, IsEmpty()) << "room for a put, if a small one";
  options.max_bytes_in_flight = 8 * kPage;
  build(options);
  EXPECT_THAT(lines, ElementsAre("max_bytes_in_flight 1024 is no more than 4 loads of 256 bytes: "
                                 "while loads keep coming, saves wait and expire"));
  options.max_bytes_in_flight = 0;
  build(options);
  EXPECT_EQ(lines.size(), 1u);
  set_log_sink(nullptr, nullptr, LogLevel::kOff);
}

TEST_F(WorkerTest, ObjectsThatNoCallOfTheStoreTakesAreRefused) {
  GroupConfig three = test::full_group(16);
  three.layers = {"a", "b", "c"};
  const auto wide = test::make_projection({test::full_group(16), three});
  std::vector<CacheTensor> tensors(4);
  const char* layers[] = {"full", "a", "b", "c"};
  std::vector<std::byte> bytes(4 * 64 * kPage);
  for (std::size_t t = 0; t < 4; ++t) {
    tensors[t].base = bytes.data();
    tensors[t].bytes = bytes.size();
    tensors[t].layers = {layers[t]};
    tensors[t].block_stride = kPage;
    tensors[t].offset = t * 64 * kPage;
  }
  const auto places = SegmentMap::make(wide, tensors);
  const auto with_limit = [&](std::uint32_t segments) {
    MemoryStoreOptions limits;
    limits.max_segments_per_call = segments;
    return std::make_shared<MemoryStore>(std::make_shared<MemoryPool>(), limits);
  };
  StoreWorker(test::make_schema(wide), places, with_limit(3), {});
  try {
    StoreWorker(test::make_schema(wide), places, with_limit(2), {});
    FAIL() << "accepted";
  } catch (const Error& error) {
    ASSERT_EQ(error.problems().size(), 1u);
    EXPECT_EQ(error.problems()[0].path, "groups[1]");
    EXPECT_EQ(error.problems()[0].value, "3 segments in a block");
    EXPECT_EQ(error.problems()[0].expected, "at most 2, what the store takes in a call");
  }
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
