// Pipeline stages that hold unequal parts of the groups, and none of some.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "kvprism/backend/memory_store.h"
#include "kvprism/store/store_scheduler.h"
#include "kvprism/store/store_worker.h"
#include "store_fixtures.h"

namespace kvprism {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::UnorderedElementsAre;

constexpr std::uint32_t kBlocks = 16;
constexpr std::uint64_t kPage = 128;  // of attention: 16 tokens of 8 bytes
constexpr GroupId kStates{2};
constexpr RequestId kRequest{5};

// Full attention on both stages, a window on the second alone, states on the first alone.
CacheConfig config_of(std::uint32_t stage, bool told) {
  CacheConfig config;
  config.num_blocks = kBlocks;
  config.parallel.pp = 2;
  const std::string at = std::to_string(stage);
  config.groups = {test::full_group(16, "full." + at), test::window_group(16, 17),
                   test::mamba_group(16)};
  config.groups[1].layers.clear();
  config.groups[2].layers.clear();
  if (stage == 0) config.groups[2].layers = {"state.a", "state.b"};
  if (stage == 1) config.groups[1].layers = {"window.a", "window.b", "window.c"};
  if (told) {
    config.groups[1].pipeline_stages = {1};
    config.groups[2].pipeline_stages = {0};
  }
  return config;
}

std::shared_ptr<const Projection> projection_of(const CacheConfig& config) {
  return Projection::make(config, SpecRegistry::builtin());
}

std::shared_ptr<const KeySchema> vllm_schema_of(std::shared_ptr<const Projection> projection) {
  KeyFacts facts;
  facts.model = "m";
  facts.hash_algorithm = "test";
  return KeySchema::vllm(std::move(projection), facts);
}

// One rank: its memory, a row of blocks for each layer.
struct Stage {
  Stage(const CacheConfig& config, std::uint32_t number, const std::shared_ptr<MemoryPool>& pool)
      : projection(projection_of(config)), memory(4 * kBlocks * kPage) {
    std::vector<CacheTensor> tensors;
    for (const GroupId id : indices<GroupId>(3)) {
      for (const std::string& layer : projection->group(id).layers) {
        CacheTensor tensor;
        tensor.base = memory.data();
        tensor.bytes = memory.size();
        tensor.layers = {layer};
        tensor.block_stride = projection->group(id).page_size_bytes;
        tensor.offset = tensors.size() * kBlocks * kPage;
        tensors.push_back(tensor);
      }
    }
    map = SegmentMap::make(projection, tensors);
    StoreWorkerOptions options;
    options.rank = Rank{number};
    worker = std::make_unique<StoreWorker>(test::make_schema(projection), map,
                                           std::make_shared<MemoryStore>(pool), options);
  }

  void fill(std::uint8_t seed) {
    for (std::size_t i = 0; i < memory.size(); ++i)
      memory[i] = static_cast<std::byte>(seed + i * 7 + i / 251);
  }
  std::string block(std::uint32_t group, std::int32_t id) const {
    std::vector<Segment> segments;
    map->append_segments(GroupId{group}, BlockId{id}, segments);
    std::string bytes;
    for (const Segment& segment : segments)
      bytes.append(reinterpret_cast<const char*>(segment.base), segment.length);
    return bytes;
  }

  std::shared_ptr<const Projection> projection;
  std::vector<std::byte> memory;
  std::shared_ptr<const SegmentMap> map;
  std::unique_ptr<StoreWorker> worker;
};

// An engine of two stages: a scheduler that is told of them, and workers that know only themselves,
// as vLLM's do, or are told as well.
struct TwoStages {
  TwoStages(const std::shared_ptr<MemoryPool>& pool, std::uint64_t epoch,
            bool scheduler_told = true, bool workers_told = false) {
    for (const std::uint32_t stage : {0u, 1u})
      stages.push_back(std::make_unique<Stage>(config_of(stage, workers_told), stage, pool));
    StoreSchedulerOptions options;
    options.epoch = epoch;
    schema = test::make_schema(projection_of(config_of(0, scheduler_told)));
    scheduler =
        std::make_unique<StoreScheduler>(schema, std::make_shared<MemoryStore>(pool), options);
  }

  // A step, on every rank to its end.
  void step() {
    const StepPlan& plan = scheduler->end_step(now);
    for (const auto& stage : stages) {
      EXPECT_EQ(stage->worker->submit(plan.view(), ReadyToken::host()).refusal, "");
      while (stage->worker->pump(now)) {
      }
      WorkerReport report;
      while (stage->worker->poll(report)) {
        reports.push_back(report);
        scheduler->report(report, now);
      }
    }
    scheduler->end_step(now);
  }

  bool idle() {
    std::vector<BlockId> released;
    scheduler->take_released(released);
    return !scheduler->has_pending_work();
  }

  std::uint32_t look_up(std::uint32_t prompt) {
    LookupResult found = scheduler->lookup(kRequest, prompt, hashes.list(), 0, now);
    scheduler->end_step(now);
    found = scheduler->lookup(kRequest, prompt, hashes.list(), 0, now);
    EXPECT_FALSE(found.pending);
    return found.external_tokens;
  }

  void save() {
    scheduler->advanced(kRequest, 48, hashes.list());
    scheduler->boundary(kRequest, kStates, BlockId{9}, 48);
    const TokenRange range = scheduler->wants_save(kRequest, now);
    EXPECT_EQ(range, (TokenRange{0, 48}));
    const test::Rows rows({{1, 2, 3}, {4, 5, 6}, {7, 8, 9}});
    scheduler->save(kRequest, range, rows.get(), now);
    step();
  }

  const test::Hashes hashes{4, 1};
  std::vector<std::unique_ptr<Stage>> stages;
  std::shared_ptr<const KeySchema> schema;
  std::unique_ptr<StoreScheduler> scheduler;
  std::vector<WorkerReport> reports;
  Instant now{seconds(1).ns};
};

// "<stage>/<store group>/<prefix in tokens>" of every object.
std::set<std::string> objects_of(const MemoryPool& pool, const TwoStages& engine) {
  std::set<std::string> names;
  pool.for_each_object([&](std::string_view key, std::span<const std::byte>) {
    for (const std::uint32_t stage : {0u, 1u}) {
      for (const std::uint32_t group : {0u, 1u, 2u}) {
        for (std::uint32_t at = 0; at < 4; ++at) {
          KeySlots keys;
          engine.schema->append_key(keys, StoreIndex{group}, {.pp = stage},
                                    engine.hashes.list()[at]);
          if (keys[0] == key)
            names.insert(std::to_string(stage) + "/" + std::to_string(group) + "/" +
                         std::to_string(16 * (at + 1)));
        }
      }
    }
  });
  return names;
}

class PipelineTest : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(WorkersTold, PipelineTest, ::testing::Bool());

TEST_P(PipelineTest, AGroupOfOneStageIsSavedFoundAndLoadedThere) {
  const auto pool = std::make_shared<MemoryPool>();
  TwoStages first(pool, 11, true, GetParam());
  first.stages[0]->fill(3);
  first.stages[1]->fill(90);
  first.save();
  // The window keeps what ends a prefix: 16 tokens before each.
  EXPECT_THAT(objects_of(*pool, first),
              UnorderedElementsAre("0/0/16", "0/0/32", "0/0/48", "1/0/16", "1/0/32", "1/0/48",
                                   "1/1/16", "1/1/32", "1/1/48", "0/2/48"));
  EXPECT_EQ(first.scheduler->counters().saved_objects, 10u);
  EXPECT_TRUE(first.idle());

  TwoStages second(pool, 12, true, GetParam());
  EXPECT_EQ(second.look_up(60), 48u);
  // Three prefixes of three groups: the full one on two stages, the others on one.
  EXPECT_EQ(second.scheduler->counters().lookup_keys, 3u * (2 + 1 + 1));
  const test::Rows rows({{10, 11, 12}, {0, 0, 13}, {0, 0, 14}});
  ASSERT_TRUE(second.scheduler->allocated(kRequest, 48, rows.get(), second.now).has_value());
  second.step();
  std::vector<LoadEnd> ends;
  second.scheduler->take_load_ends(ends);
  ASSERT_EQ(ends.size(), 1u);
  EXPECT_TRUE(ends[0].complete);
  EXPECT_EQ(ends[0].valid_tokens, 48u);
  for (const std::uint32_t stage : {0u, 1u}) {
    for (const std::int32_t chunk : {0, 1, 2}) {
      EXPECT_EQ(second.stages[stage]->block(0, 10 + chunk),
                first.stages[stage]->block(0, 1 + chunk))
          << "stage " << stage << " chunk " << chunk;
    }
  }
  EXPECT_EQ(second.stages[1]->block(1, 13), first.stages[1]->block(1, 6));
  EXPECT_EQ(second.stages[0]->block(2, 14), first.stages[0]->block(2, 9));
  EXPECT_EQ(second.stages[0]->block(1, 13), "") << "no layer, no bytes";
  // Nothing else of either memory has changed.
  std::size_t touched = 0;
  for (const auto& stage : second.stages) {
    for (const std::byte byte : stage->memory) touched += byte != std::byte{0} ? 1 : 0;
  }
  std::size_t loaded = 0;
  for (const WorkerReport& report : second.reports) {
    for (const JobReport& job : report.jobs) loaded += job.bytes;
  }
  EXPECT_EQ(loaded, 2 * 3 * kPage + 3 * kPage + 2 * 32);
  EXPECT_LE(touched, loaded);
}

TEST(Pipeline, ASchedulerThatDoesNotKnowItsStagesFindsNothing) {
  const auto pool = std::make_shared<MemoryPool>();
  TwoStages first(pool, 11);
  first.save();
  TwoStages second(pool, 12, false);
  EXPECT_EQ(second.look_up(60), 0u) << "it asks for objects that no stage stores";
}

TEST(Pipeline, AJobOfGroupsThatAStageDoesNotHoldEndsThereAtOnce) {
  const auto pool = std::make_shared<MemoryPool>();
  TwoStages engine(pool, 11);
  engine.scheduler->advanced(kRequest, 16, engine.hashes.list());
  engine.scheduler->boundary(kRequest, kStates, BlockId{9}, 16);
  engine.step();
  ASSERT_EQ(engine.reports.size(), 2u);
  ASSERT_EQ(engine.reports[0].jobs.size(), 1u);
  EXPECT_EQ(engine.reports[0].jobs[0].objects, 1u);
  ASSERT_EQ(engine.reports[1].jobs.size(), 1u);
  EXPECT_EQ(engine.reports[1].jobs[0].outcome, JobOutcome::kOk);
  EXPECT_EQ(engine.reports[1].jobs[0].objects, 0u);
  EXPECT_EQ(engine.reports[1].jobs[0].quiet, 1u);
  EXPECT_TRUE(engine.idle());
}

TEST(Pipeline, KeysAndDigestDoNotDependOnWhatAStageKnowsOfOthers) {
  const auto told = projection_of(config_of(0, true));
  const auto alone = projection_of(config_of(1, false));
  EXPECT_EQ(told->digest(), alone->digest());
  EXPECT_EQ(test::make_schema(told)->fingerprint(), test::make_schema(alone)->fingerprint());
  EXPECT_THAT(told->group(GroupId{1}).stages, ElementsAre(1));
  EXPECT_THAT(alone->group(GroupId{1}).stages, ElementsAre(0, 1));
  const auto schema = test::make_schema(told);
  ASSERT_EQ(schema->shards(StoreIndex{1}).size(), 1u);
  EXPECT_EQ(schema->shards(StoreIndex{1})[0], (RankPosition{.pp = 1}));
}

std::string refusal_of(const CacheConfig& config) {
  try {
    projection_of(config);
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

TEST(Pipeline, WrongStagesAreRefusedAllAtOnce) {
  CacheConfig config = config_of(0, true);
  config.groups[0].pipeline_stages = {1, 1};
  config.groups[1].pipeline_stages = {2};
  config.groups[2].pipeline_stages = std::vector<std::uint32_t>{};
  EXPECT_THAT(refusal_of(config),
              AllOf(HasSubstr("groups[0].pipeline_stages[1] = 1: expected a stage named once"),
                    HasSubstr("groups[1].pipeline_stages[0] = 2: expected below parallel.pp, 2"),
                    HasSubstr("groups[2].pipeline_stages = []: expected at least one stage")));
  config = config_of(0, false);
  config.parallel.pp = 1;
  EXPECT_THAT(refusal_of(config), HasSubstr("groups[1].layers = []: expected at least one layer"));
}

TEST(Pipeline, AWorkerRefusesAListThatContradictsItsLayers) {
  const auto pool = std::make_shared<MemoryPool>();
  CacheConfig config = config_of(0, true);
  config.groups[0].pipeline_stages = {1};
  config.groups[1].pipeline_stages = {0, 1};
  try {
    const Stage stage(config, 0, pool);
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(),
                AllOf(HasSubstr("groups[0].pipeline_stages = a list without 0: expected the stage "
                                "of rank 0, which holds layer full.0"),
                      HasSubstr("groups[1].layers = []: expected the layers that stage 0 holds"),
                      Not(HasSubstr("groups[2]"))));
  }
}

TEST(Pipeline, AWrapperMayHaveNoLayersOnAStage) {
  CacheConfig config = config_of(0, false);
  GroupConfig& group = config.groups[1];
  const CacheSpec spec = group.spec;
  group.members = {{spec, {}}, {spec, {}}};
  group.spec = {};
  group.spec.kind = "uniform";
  EXPECT_THAT(projection_of(config)->group(GroupId{1}).layers, IsEmpty());
  EXPECT_EQ(projection_of(config)->group(GroupId{1}).spec.kind, spec.kind);
  EXPECT_EQ(projection_of(config)->digest(), projection_of(config_of(0, false))->digest());
}

// The reference stores the rows of a block under every group's name on every stage.
TEST(Pipeline, SchemaVllmHasAnObjectOfEveryGroupOnEveryStage) {
  CacheConfig config = config_of(1, true);
  config.key_schema = "vllm";
  config.groups.pop_back();
  config.groups[0].layers = {};
  config.groups[1].layers = {"window"};
  config.groups[0].pipeline_stages = {0};
  const auto projection = projection_of(config);
  const auto schema = vllm_schema_of(projection);
  EXPECT_EQ(schema->shards(StoreIndex{0}).size(), 2u);

  std::vector<std::byte> memory(kBlocks * kPage);
  for (std::size_t i = 0; i < memory.size(); ++i) memory[i] = static_cast<std::byte>(i / kPage);
  CacheTensor tensor;
  tensor.base = memory.data();
  tensor.bytes = memory.size();
  tensor.layers = {"window"};
  tensor.block_stride = kPage;
  const auto pool = std::make_shared<MemoryPool>();
  StoreWorkerOptions options;
  options.rank = Rank{1};
  StoreWorker worker(schema, SegmentMap::make(projection, {tensor}),
                     std::make_shared<MemoryStore>(pool), options);
  StepPlan plan;
  plan.digest = schema->plan_digest();
  plan.epoch = 3;
  plan.step = 1;
  plan.hash_width = test::Hashes::kWidth;
  plan.jobs = {{JobId{1}, kRequest, JobKind::kSave, 0, 1, 0, seconds(10)}};
  plan.runs = {{StoreIndex{0}, 0, 1, 0, 0, 16}};
  plan.ids = {BlockId{6}};
  plan.mark_tokens = {16};
  plan.mark_hashes = test::Hashes(1, 1).bytes;
  const Instant now{seconds(1).ns};
  EXPECT_EQ(worker.submit(plan.view(), ReadyToken::host()).refusal, "");
  while (worker.pump(now)) {
  }
  std::vector<std::string> keys;
  pool->for_each_object([&](std::string_view key, std::span<const std::byte> bytes) {
    keys.emplace_back(key);
    EXPECT_EQ(bytes.size(), kPage);
    for (const std::byte byte : bytes) EXPECT_EQ(byte, std::byte{6});
  });
  ASSERT_EQ(keys.size(), 1u);
  EXPECT_THAT(keys[0], HasSubstr("@pp_rank:1@group:0@"));

  // Nobody here reads it: a load of it ends at once.
  plan.step = 2;
  plan.jobs = {{JobId{2}, kRequest, JobKind::kLoad, 0, 1, 0, seconds(10)}};
  EXPECT_EQ(worker.submit(plan.view(), ReadyToken::host()).refusal, "");
  while (worker.pump(now)) {
  }
  EXPECT_EQ(worker.counters().gets, 0u);
  WorkerReport report;
  ASSERT_TRUE(worker.poll(report));
  ASSERT_EQ(report.jobs.size(), 2u);
  EXPECT_EQ(report.jobs[1], (JobReport{JobId{2}, JobOutcome::kOk, 1, 0, 0, 0, 0, 0}));

  // The limit on bytes in flight holds for what is stored of the other group.
  options.max_bytes_in_flight = kPage;
  const auto slow = std::make_shared<test::ScriptedStore>();
  StoreWorker bounded(schema, SegmentMap::make(projection, {tensor}), slow, options);
  plan.jobs = {{JobId{1}, kRequest, JobKind::kSave, 0, 1, 0, seconds(10)}};
  plan.runs = {{StoreIndex{0}, 0, 2, 0, 0, 16}};
  plan.ids = {BlockId{6}, BlockId{7}};
  plan.mark_tokens = {16, 32};
  plan.mark_hashes = test::Hashes(2, 1).bytes;
  EXPECT_EQ(bounded.submit(plan.view(), ReadyToken::host()).refusal, "");
  bounded.pump(now);
  EXPECT_EQ(slow->puts.size(), 1u);
  EXPECT_EQ(bounded.counters().bytes_in_flight, kPage);
  slow->end_put();
  bounded.pump(now);
  slow->end_put();
  bounded.pump(now);
  EXPECT_EQ(bounded.counters().puts, 2u);

  config.groups[1].layers = {};
  config.groups[1].pipeline_stages = {0};
  const auto bare = projection_of(config);
  try {
    StoreWorker(vllm_schema_of(bare), SegmentMap::make(bare, {}),
                std::make_shared<MemoryStore>(pool), options);
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("no layer of a stored group on this rank"));
  }
}

}  // namespace
}  // namespace kvprism
