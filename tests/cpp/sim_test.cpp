// The parts of the simulated world, each by itself.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "kvprism/backend/memory_store.h"
#include "kvprism/base/error.h"
#include "kvprism/sim/block_pool.h"
#include "kvprism/sim/content_oracle.h"
#include "kvprism/sim/engine.h"
#include "kvprism/sim/prefix_cache.h"
#include "kvprism/sim/sim_memory.h"
#include "kvprism/sim/token_trail.h"
#include "kvprism/sim/world.h"

namespace kvprism::sim {
namespace {

std::vector<std::uint32_t> tokens(std::uint32_t count, std::uint32_t seed = 1) {
  std::vector<std::uint32_t> made;
  for (std::uint32_t i = 0; i < count; ++i) made.push_back(seed * 7919 + i * 31);
  return made;
}

TEST(ContentOracle, DependsOnEveryTokenBefore) {
  TokenTrail one(4);
  TokenTrail other(4);
  auto list = tokens(12);
  one.append(list);
  list[0] ^= 1;
  other.append(list);
  for (std::uint32_t at = 0; at < 12; ++at) EXPECT_NE(one.prefix_at(at), other.prefix_at(at));
}

TEST(ContentOracle, DependsOnThePosition) {
  EXPECT_NE(extend(kEmptyPrefix, 0, 5), extend(kEmptyPrefix, 1, 5));
}

TEST(ContentOracle, EveryPlaceHasItsOwnBytes) {
  const PageShape shape{PageKind::kPositions, 1, 0, 2, 4, 11};
  const auto page = [&](const PageShape& of, std::uint32_t layer, std::uint32_t token) {
    std::vector<std::byte> bytes(of.bytes(), std::byte{0});
    write_position(of, layer, 2, extend(kEmptyPrefix, 0, token), bytes.data());
    return bytes;
  };
  const auto base = page(shape, 0, 1);
  EXPECT_EQ(base, page(shape, 0, 1));
  EXPECT_NE(base, page(shape, 1, 1));
  EXPECT_NE(base, page(shape, 0, 2));
  PageShape other = shape;
  other.group = 2;
  EXPECT_NE(base, page(other, 0, 1));
  other = shape;
  other.first_head = 2;  // another rank
  EXPECT_NE(base, page(other, 0, 1));
  // Two heads, one slot of eleven bytes each; the rest is untouched.
  const std::size_t head = 4 * 11;
  EXPECT_NE(std::memcmp(base.data() + 2 * 11, base.data() + head + 2 * 11, 11), 0);
  for (std::size_t i = 0; i < base.size(); ++i) {
    const std::size_t slot = i % head / 11;
    if (slot != 2) {
      EXPECT_EQ(base[i], std::byte{0});
    }
  }
}

TEST(TokenTrail, HashesStandForPrefixes) {
  TokenTrail one(4);
  TokenTrail two(4);
  one.append(tokens(10));
  two.append(tokens(8));
  two.append(99);
  EXPECT_EQ(one.num_hashes(), 2U);
  EXPECT_EQ(one.hash_of(8), two.hash_of(8));
  EXPECT_NE(one.hash_of(4), one.hash_of(8));
}

CacheConfig small_config() {
  CacheConfig config;
  config.num_blocks = 40;
  AttentionPayload attention;
  attention.num_kv_heads = 2;
  attention.head_size = 3;
  attention.head_size_v = 2;
  attention.dtype = DType::kInt8;
  GroupConfig ring;
  ring.spec.kind = "circular_buffer";
  ring.spec.block_size = 4;
  ring.spec.payload = attention;
  ring.layers = {"r0"};
  GroupConfig full;
  full.spec.kind = "full_attention";
  full.spec.block_size = 8;
  full.spec.payload = attention;
  full.layers = {"f0", "f1"};
  GroupConfig state;
  state.spec.kind = "mamba";
  state.spec.block_size = 16;
  StatePayload payload;
  payload.shapes = {{3, 5}};
  payload.dtypes = {DType::kFloat32};
  payload.cache_mode = "align";
  state.spec.payload = payload;
  state.layers = {"m0", "m1", "m2"};
  GroupConfig window;
  window.spec.kind = "sliding_window";
  window.spec.block_size = 8;
  window.spec.sliding_window = 12;
  window.spec.payload = attention;
  window.layers = {"w0"};
  config.groups = {ring, full, state, window};
  return config;
}

TEST(SimMemory, ShadowNoticesEveryByte) {
  const auto projection = Projection::make(small_config(), SpecRegistry::builtin());
  SimMemory memory(*projection, {.guard_bytes = 8, .shadow = true});
  EXPECT_EQ(memory.first_difference(), "");
  for (std::size_t at = 0; at < memory.whole().size(); at += 97) {
    memory.whole()[at] ^= std::byte{1};
    EXPECT_NE(memory.first_difference(), "");
    memory.whole()[at] ^= std::byte{1};
  }
  memory.whole()[0] ^= std::byte{1};
  EXPECT_EQ(memory.first_difference(), "byte 0: guard is 9c, should be 9d");
}

class SimMemoryTest : public testing::TestWithParam<const char*> {
 protected:
  SimMemoryTest() {
    CacheConfig config = small_config();
    config.kv_layout = GetParam();
    projection = Projection::make(config, SpecRegistry::builtin());
  }
  std::shared_ptr<const Projection> projection;
};
INSTANTIATE_TEST_SUITE_P(Layouts, SimMemoryTest,
                         testing::Values("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"));

TEST_P(SimMemoryTest, OpenPagesMayChangeAndNothingElse) {
  SimMemory memory(*projection, {.guard_bytes = 8, .shadow = true});
  const GroupId full{1};
  const BlockId block{7};
  memory.open(full, block);
  memory.page(full, 1, block).base[3] = std::byte{1};
  EXPECT_EQ(memory.first_difference(), "");
  memory.page(full, 1, block).base[memory.page_bytes(full)] = std::byte{1};
  EXPECT_NE(memory.first_difference(), "") << "behind the page";
  memory.page(full, 1, block).base[memory.page_bytes(full)] =
      memory.shadow_page(full, 1, block).base[memory.page_bytes(full)];
  memory.close(full, block);
  EXPECT_EQ(memory.first_difference(), "") << "the shadow takes over what arrived";
  memory.page(full, 1, block).base[3] = std::byte{2};
  EXPECT_NE(memory.first_difference().find("layer 1"), std::string::npos);
  EXPECT_NE(memory.first_difference().find("block 7"), std::string::npos);
  EXPECT_NE(memory.first_difference().find("byte 3 is 02, should be 01"), std::string::npos);
}

TEST_P(SimMemoryTest, TensorsPassTheProofs) {
  const SimMemory memory(*projection, {});
  const auto map = SegmentMap::make(projection, memory.tensors());
  EXPECT_EQ(map->regions().size(), 1U);
  EXPECT_EQ(map->object_bytes(GroupId{1}), 2 * memory.page_bytes(GroupId{1}));
}

TEST(BlockPool, FreedBlocksComeBackAtOnce) {
  BlockPool pool(4);
  const BlockId a = pool.take();
  const BlockId b = pool.take();
  pool.reference(a);
  EXPECT_FALSE(pool.release(a, false));
  EXPECT_TRUE(pool.release(a, false));
  EXPECT_EQ(pool.take(), a);
  EXPECT_NE(a, b);
  EXPECT_NE(a, kNullBlock);
  pool.take();
  EXPECT_EQ(pool.take(), kNullBlock);
}

TEST(BlockPool, CachedBlocksGoInTheOrderOfTheirRelease) {
  BlockPool pool(4);
  const BlockId a = pool.take();
  const BlockId b = pool.take();
  EXPECT_TRUE(pool.release(b, true));
  EXPECT_TRUE(pool.release(a, true));
  EXPECT_EQ(pool.available(), 3U);
  EXPECT_EQ(pool.free(), 1U);
  pool.reference(b);
  EXPECT_EQ(pool.oldest_cached(), a);
  pool.drop_cached(a);
  EXPECT_EQ(pool.state(a), BlockPool::State::kFree);
  EXPECT_EQ(pool.oldest_cached(), kNullBlock);
}

TEST(GroupModel, NeededChunks) {
  const auto projection = Projection::make(small_config(), SpecRegistry::builtin());
  const auto groups = model_groups(*projection);
  EXPECT_EQ(model_step(groups), 16U);
  const GroupModel& window = groups[3];
  // The token at 32 attends to 21..32.
  EXPECT_EQ(window.first_needed(32), 2U);
  EXPECT_EQ(window.first_needed(8), 0U);
  EXPECT_EQ(groups[2].first_needed(32), 1U);
  EXPECT_EQ(groups[1].first_needed(32), 0U);
}

TEST(GroupModel, AWindowKeepsWhatDraftsRetain) {
  CacheConfig config = small_config();
  config.groups[3].spec.extra_retained_tokens = 4;
  const auto projection = Projection::make(config, SpecRegistry::builtin());
  EXPECT_EQ(model_groups(*projection)[3].window, *config.groups[3].spec.sliding_window + 4);
}

TEST(GroupModel, FamiliesShareTheirDrafts) {
  CacheConfig config = small_config();
  GroupConfig twin = config.groups[1];
  twin.layers = {"t0"};
  twin.is_eagle_group = true;
  config.groups.push_back(twin);
  const auto groups = model_groups(*Projection::make(config, SpecRegistry::builtin()));
  EXPECT_EQ(groups[4].family, 1U);
  EXPECT_TRUE(groups[1].draft && groups[4].draft);
  EXPECT_FALSE(groups[2].draft || groups[3].draft);
  EXPECT_TRUE(model_drafts(groups));
  EXPECT_EQ(model_checkpoint(33, 8, false, 1), 32U);
  EXPECT_EQ(model_checkpoint(32, 8, false, 1), 24U);
  EXPECT_EQ(model_checkpoint(33, 8, false, 2), 24U);
  EXPECT_EQ(model_checkpoint(32, 8, true, 1), 24U) << "one unit is computed anew in any case";
  EXPECT_EQ(model_checkpoint(32, 8, true, 9), 16U);
  EXPECT_EQ(model_checkpoint(5, 8, true, 9), 0U);
}

TEST(GroupModel, ReplicasHoldTheSameHeads) {
  CacheConfig config = small_config();
  config.parallel.tp = 4;
  std::get<AttentionPayload>(config.groups[1].spec.payload).total_num_kv_heads = 4;
  const auto groups = model_groups(*Projection::make(config, SpecRegistry::builtin()));
  EXPECT_EQ(groups[1].replicas, 2U);
  EXPECT_EQ(groups[1].shape(0, 1).first_head, 0U);
  EXPECT_EQ(groups[1].shape(0, 2).first_head, 2U);
  EXPECT_EQ(groups[3].replicas, 1U);
  EXPECT_EQ(groups[3].shape(0, 3).first_head, 6U);
}

TEST(SimMemory, AStageHoldsTheModelsLaterLayers) {
  CacheConfig stage = small_config();
  stage.groups[1].layers = {"f1"};
  const SimMemory memory(*Projection::make(stage, SpecRegistry::builtin()),
                         {.guard_bytes = 8, .shadow = false, .first_layers = {0, 1, 0, 0}});
  const PageShape later = memory.page_shape(GroupId{1}, 0);
  EXPECT_EQ(later.first_layer, 1U);
  PageShape whole = later;
  whole.first_layer = 0;
  std::vector<std::byte> in_stage(later.bytes());
  std::vector<std::byte> in_model(later.bytes());
  write_position(later, 0, 2, extend(kEmptyPrefix, 0, 7), in_stage.data());
  write_position(whole, 1, 2, extend(kEmptyPrefix, 0, 7), in_model.data());
  EXPECT_EQ(in_stage, in_model);
}

TEST(GroupModel, WhatTheWorldCannotModelIsRefused) {
  const auto code_of = [](const CacheConfig& config) {
    const auto projection = Projection::make(config, SpecRegistry::builtin());
    try {
      model_groups(*projection);
    } catch (const Error& error) {
      return error.code();
    }
    return ErrorCode::kClosed;
  };
  CacheConfig encoder = small_config();
  encoder.groups[0].spec.kind = "encoder_only_attention";
  EXPECT_EQ(code_of(encoder), ErrorCode::kUnsupported);
}

TEST(GroupModel, PackedPagesHaveTheRowsThatTheEngineSays) {
  CacheConfig packed = small_config();
  auto& payload = std::get<AttentionPayload>(packed.groups[1].spec.payload);
  payload.num_head_slots = 3;
  payload.state_content_bytes = 7;
  const auto groups = model_groups(*Projection::make(packed, SpecRegistry::builtin()));
  EXPECT_EQ(groups[1].shapes[0].heads, 3U);
  EXPECT_EQ(groups[1].shapes[0].content, 7U);
  EXPECT_EQ(groups[1].shapes[0].bytes(), groups[1].page_bytes[0]);
}

TEST(GroupModel, WindowsThatAreNotSharedHoldEveryToken) {
  CacheConfig config = small_config();
  config.parallel.tp = config.parallel.dcp = 2;
  config.groups[3].spec.dcp_sharded = false;
  const auto groups = model_groups(*Projection::make(config, SpecRegistry::builtin()));
  EXPECT_EQ(groups[1].tokens, 16U);
  EXPECT_EQ(groups[1].shape(0, 1).context_rank, 1U);
  EXPECT_EQ(groups[3].tokens, 8U);
  EXPECT_EQ(groups[3].shape(0, 1).context_rank, 0U);
  EXPECT_EQ(groups[3].shape(0, 1).first_head, 2U);
}

TEST(ContentOracle, PrefillContextRanksHaveBytesOfTheirOwn) {
  const auto groups = model_groups(*Projection::make(small_config(), SpecRegistry::builtin()));
  std::vector<std::vector<std::byte>> pages;
  for (const std::uint32_t rank : {0U, 1U}) {
    const PageShape shape = groups[1].shape(0, 0, rank);
    pages.emplace_back(shape.bytes());
    write_position(shape, 0, 2, extend(kEmptyPrefix, 0, 7), pages.back().data());
  }
  EXPECT_NE(pages[0], pages[1]);
}

TEST(PageShape, PositionsStandForTokens) {
  PageShape shape{PageKind::kPositions, 1, 0, 1, 4, 8};
  EXPECT_EQ(shape.tokens(), 4U);
  EXPECT_EQ(shape.last_token(3), 3U);
  shape.compression = 4;
  EXPECT_EQ(shape.tokens(), 16U);
  EXPECT_EQ(shape.last_token(0), 3U);
  shape.compression = 1;
  shape.states_per_token = 2;
  EXPECT_EQ(shape.tokens(), 2U);
  EXPECT_EQ(shape.last_token(3), 1U);
  shape.states_per_token = 1;
  shape.context_ranks = 2;
  shape.context_rank = 1;
  EXPECT_EQ(shape.tokens(), 8U);
  EXPECT_EQ(shape.last_token(1), 3U) << "ranks take positions in turns";
}

// An engine with its own store client over a pool.
struct Deployment {
  explicit Deployment(const std::shared_ptr<MemoryPool>& pool, EngineOptions options = {}) {
    projection = Projection::make(small_config(), SpecRegistry::builtin());
    memory = std::make_shared<SimMemory>(*projection, SimMemoryOptions{16, true});
    KeyFacts facts;
    facts.model = "test";
    facts.hash_algorithm = "sim";
    const auto schema = KeySchema::kvprism(projection, facts);
    const auto store = std::make_shared<MemoryStore>(pool);
    StoreSchedulerOptions scheduler_options;
    scheduler_options.epoch = 5;
    scheduler = std::make_shared<StoreScheduler>(schema, store, scheduler_options);
    worker = std::make_shared<StoreWorker>(schema, SegmentMap::make(projection, memory->tensors()),
                                           store, StoreWorkerOptions{});
    engine = std::make_unique<Engine>(projection, scheduler,
                                      std::vector<EngineRank>{{worker, memory}}, options);
  }
  void run() {
    for (int turn = 0; turn < 500 && !engine->idle(); ++turn) {
      now = now + milliseconds(1);
      engine->step(now);
      ASSERT_EQ(engine->check(), "");
      ASSERT_EQ(engine->verify_all().mismatched, 0U);
    }
    EXPECT_TRUE(engine->idle()) << engine->describe();
  }

  std::shared_ptr<const Projection> projection;
  std::shared_ptr<SimMemory> memory;
  std::shared_ptr<StoreScheduler> scheduler;
  std::shared_ptr<StoreWorker> worker;
  std::unique_ptr<Engine> engine;
  Instant now{seconds(1).ns};
};

TEST(Engine, SecondEngineLoadsWhatTheFirstStored) {
  const auto pool = std::make_shared<MemoryPool>();
  Deployment first(pool);
  first.engine->submit({RequestId{1}, tokens(70), 10});
  first.run();
  std::vector<FinishedRequest> before;
  first.engine->take_finished(before);
  ASSERT_EQ(before.size(), 1U);
  EXPECT_EQ(before[0].output.size(), 10U);
  EXPECT_EQ(before[0].external_hit_tokens, 0U);

  Deployment second(pool);
  second.engine->submit({RequestId{1}, tokens(70), 10});
  second.run();
  std::vector<FinishedRequest> after;
  second.engine->take_finished(after);
  ASSERT_EQ(after.size(), 1U);
  EXPECT_EQ(after[0].external_hit_tokens, 64U);
  EXPECT_EQ(after[0].output, before[0].output);
  const EngineStats& stats = second.engine->stats();
  EXPECT_EQ(stats.external_hit_tokens, 64U);
  EXPECT_EQ(stats.computed_tokens, 70 + 10 - 1 - 64U);
  EXPECT_GT(stats.bytes_verified, 0U);
  EXPECT_EQ(stats.bytes_mismatched, 0U);
  EXPECT_EQ(stats.groups[0].chunks_loaded, 0U) << "rings are never loaded";
  EXPECT_EQ(stats.groups[1].chunks_loaded, 8U);
  EXPECT_EQ(stats.groups[2].chunks_loaded, 1U);
  EXPECT_EQ(stats.groups[3].chunks_loaded, 2U);
}

TEST(Engine, LocalCacheComesFirst) {
  const auto pool = std::make_shared<MemoryPool>();
  Deployment one(pool);
  one.engine->submit({RequestId{1}, tokens(70), 1});
  one.run();
  one.engine->submit({RequestId{2}, tokens(70), 1});
  one.run();
  EXPECT_EQ(one.engine->stats().local_hit_tokens, 64U);
  EXPECT_EQ(one.engine->stats().external_hit_tokens, 0U);
}

TEST(Engine, WithoutLocalCacheTheStoreIsAsked) {
  const auto pool = std::make_shared<MemoryPool>();
  EngineOptions options;
  options.local_cache = false;
  Deployment one(pool, options);
  one.engine->submit({RequestId{1}, tokens(70), 1});
  one.run();
  one.engine->submit({RequestId{2}, tokens(70), 1});
  one.run();
  EXPECT_EQ(one.engine->stats().local_hit_tokens, 0U);
  EXPECT_EQ(one.engine->stats().external_hit_tokens, 64U);
}

TEST(Engine, RequestsThatNeverFitAreRejected) {
  Deployment one(std::make_shared<MemoryPool>());
  one.engine->submit({RequestId{1}, tokens(5000), 1});
  one.engine->submit({RequestId{2}, {}, 1});
  std::vector<FinishedRequest> finished;
  one.engine->take_finished(finished);
  ASSERT_EQ(finished.size(), 2U);
  EXPECT_TRUE(finished[0].rejected);
  EXPECT_TRUE(finished[1].rejected);
  EXPECT_TRUE(one.engine->idle());
}

TEST(Engine, AbortAtAnyPoint) {
  for (int at = 0; at < 12; ++at) {
    const auto pool = std::make_shared<MemoryPool>();
    Deployment first(pool);
    first.engine->submit({RequestId{1}, tokens(70), 4});
    first.run();
    Deployment second(pool);
    second.engine->submit({RequestId{1}, tokens(70), 4});
    for (int step = 0; step < at; ++step) {
      second.now = second.now + milliseconds(1);
      second.engine->step(second.now);
    }
    second.engine->abort(RequestId{1});
    second.engine->abort(RequestId{1});
    second.run();
    EXPECT_EQ(second.engine->unfinished(), 0U);
    EXPECT_EQ(second.scheduler->tracked(), 0U);
  }
}

TEST(Engine, RejectedDraftsLeaveNoTrace) {
  EngineOptions plain;
  EngineOptions drafting;
  drafting.draft_tokens = 3;
  std::vector<FinishedRequest> finished;
  for (const EngineOptions& options : {plain, drafting}) {
    Deployment one(std::make_shared<MemoryPool>(), options);
    one.engine->submit({RequestId{1}, tokens(40), 30});
    one.run();
    one.engine->take_finished(finished);
    EXPECT_EQ(one.engine->stats().rejected_tokens > 0, options.draft_tokens > 0);
  }
  ASSERT_EQ(finished.size(), 2U);
  EXPECT_EQ(finished[0].output, finished[1].output);
}

TEST(Engine, PreemptionUnderPressure) {
  EngineOptions options;
  options.token_budget = 32;
  Deployment one(std::make_shared<MemoryPool>(), options);
  for (std::uint32_t i = 1; i <= 6; ++i) one.engine->submit({RequestId{i}, tokens(40, i), 60});
  one.run();
  EXPECT_GT(one.engine->stats().preemptions, 0U);
  EXPECT_EQ(one.engine->stats().finished, 6U);
}

TEST(World, OneSeedOneStory) {
  WorldOptions options;
  options.seed = 12;
  options.events = 300;
  options.trace_from = 0;
  const WorldResult one = run_world(options);
  const WorldResult two = run_world(options);
  EXPECT_TRUE(one.passed) << one.failure;
  EXPECT_EQ(one.trace, two.trace);
  EXPECT_EQ(one.totals.computed_tokens, two.totals.computed_tokens);
  options.seed = 13;
  EXPECT_NE(run_world(options).trace, one.trace);
}

}  // namespace
}  // namespace kvprism::sim
