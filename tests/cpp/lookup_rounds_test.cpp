// Where hits may end inside a block a lookup asks in two rounds, and answers what asking for
// everything would.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "kvprism/hit/hit_search.h"
#include "kvprism/store/store_scheduler.h"
#include "store_fixtures.h"

namespace kvprism {
namespace {

constexpr RequestId kRequest{3};

CacheConfig fine_config(std::vector<GroupConfig> groups, std::uint32_t step, std::uint32_t unit) {
  CacheConfig config;
  config.num_blocks = 64;
  config.scheduler_block_size = step;
  config.hash_block_size = unit;
  config.cache_hit_alignment_tokens = unit;
  config.groups = std::move(groups);
  return config;
}

// A scheduler, and a store that answers at once.
struct Engine {
  Engine(const CacheConfig& config, std::uint32_t units)
      : projection(Projection::make(config, SpecRegistry::builtin())),
        schema(test::make_schema(projection)),
        search(*projection),
        hashes(units, 1) {
    forget();
  }

  void forget() {
    store = std::make_shared<test::ScriptedStore>();
    StoreSchedulerOptions options;
    options.epoch = 7;
    scheduler = std::make_unique<StoreScheduler>(schema, store, options);
    asked.clear();
  }

  std::string key(StoreIndex group, std::uint32_t tokens, RankPosition rank = {}) const {
    KeySlots keys;
    schema->append_key(keys, group, rank,
                       hashes.list()[tokens / projection->hash_block_size() - 1]);
    return keys[0];
  }
  // On every shard.
  void store_at(StoreIndex group, std::uint32_t tokens) {
    for (const RankPosition& shard : schema->shards(group)) {
      KeySlots keys;
      schema->append_key(keys, group, shard,
                         hashes.list()[tokens / projection->hash_block_size() - 1]);
      store->present[keys[0]] = 1;
    }
  }
  void store_up_to(StoreIndex group, std::uint32_t step, std::uint32_t tokens) {
    for (std::uint32_t at = step; at <= tokens; at += step) store->present[key(group, at)] = 1;
  }

  // The whole hit.
  std::uint32_t look_up(std::uint32_t prompt, std::uint32_t local) {
    const HashList known{hashes.bytes.data(), prompt / projection->hash_block_size(),
                         test::Hashes::kWidth};
    LookupResult found = scheduler->lookup(kRequest, prompt, known, local, now);
    for (int step = 0; found.pending && step < 4; ++step) {
      scheduler->end_step(now);
      while (!store->lookups.empty()) {
        for (const std::string& name : store->lookups.front().keys())
          EXPECT_TRUE(asked.insert(name).second) << "asked for twice";
        store->answer_lookup();
      }
      found = scheduler->lookup(kRequest, prompt, known, local, now);
    }
    EXPECT_FALSE(found.pending);
    return local + found.external_tokens;
  }

  std::shared_ptr<const Projection> projection;
  std::shared_ptr<const KeySchema> schema;
  HitSearch search;
  test::Hashes hashes;
  std::shared_ptr<test::ScriptedStore> store;
  std::unique_ptr<StoreScheduler> scheduler;
  std::set<std::string> asked;
  Instant now{seconds(1).ns};
};

struct Odds {
  std::mt19937 numbers{20};
  std::uint32_t below(std::uint32_t end) { return end == 0 ? 0 : numbers() % end; }
  bool chance(std::uint32_t percent) { return below(100) < percent; }
};

// A stored prefix with holes, strays behind it, and few objects inside chunks. Returns those up to
// `probed`, behind which a lookup knows no hash.
Presence random_objects(Engine& engine, std::uint32_t tokens, std::uint32_t probed, Odds& odds) {
  Presence presence;
  const auto& groups = engine.search.groups();
  presence.reset(groups.size());
  const std::uint32_t stored = odds.below(tokens + 1);
  const std::uint32_t holes = odds.chance(50) ? 0 : odds.below(30);
  const std::uint32_t inside = odds.chance(50) ? 4 : odds.below(80);
  for (const StoreIndex index : indices<StoreIndex>(groups.size())) {
    const HitGroup& group = groups[raw(index)];
    presence.set_units(index, probed / group.unit_tokens);
    // Some groups have lost their older objects.
    const std::uint32_t from = odds.chance(20) ? odds.below(stored + 1) : 0;
    for (std::uint32_t unit = 0; unit < tokens / group.unit_tokens; ++unit) {
      const std::uint32_t end = (unit + 1) * group.unit_tokens;
      std::uint32_t percent = end > from && end <= stored ? 100 - holes : 5;
      if (end % group.chunk_tokens != 0) percent = percent * inside / 100;
      if (!odds.chance(percent)) continue;
      // One of several stages may have lost what the others hold: then it counts for nothing.
      bool whole = true;
      for (const RankPosition& rank : engine.schema->shards(index)) {
        const bool lost = engine.schema->shards(index).size() > 1 && odds.chance(3);
        if (!lost) engine.store->present[engine.key(index, end, rank)] = 1;
        whole &= !lost;
      }
      if (whole && end <= probed) presence.mark(index, unit);
    }
  }
  return presence;
}

// That what a plan loads is there, and holds what is needed of its chunk.
void expect_loads_exist(Engine& engine, std::uint32_t hit, std::uint32_t local) {
  std::vector<std::int32_t> blocks(63);
  std::iota(blocks.begin(), blocks.end(), 1);
  const test::Rows rows(std::vector(engine.projection->num_groups(), blocks));
  ASSERT_TRUE(engine.scheduler->allocated(kRequest, hit - local, rows.get(), engine.now));
  const StepPlan& plan = engine.scheduler->end_step(engine.now);
  for (const RunRecord& run : plan.runs) {
    const std::uint32_t chunk_tokens = engine.search.groups()[raw(run.group)].chunk_tokens;
    for (std::uint32_t i = 0; i < run.count; ++i) {
      const std::uint32_t mark = plan.mark_tokens[run.first_mark + i];
      for (const RankPosition& rank : engine.schema->shards(run.group)) {
        EXPECT_TRUE(engine.store->present.contains(engine.key(run.group, mark, rank)))
            << "group " << raw(run.group) << " at " << mark << " on stage " << rank.pp;
      }
      EXPECT_GE(mark, std::min(hit, (run.first_chunk + i + 1) * chunk_tokens));
    }
  }
}

TEST(LookupRounds, FindWhatAskingForEverythingWould) {
  GroupConfig wide = test::full_group(32, "wide");
  std::get<AttentionPayload>(wide.spec.payload).head_size = 8;
  const std::vector<CacheConfig> configs{
      fine_config({test::full_group(8), test::ring_group(6), test::mamba_group(16)}, 16, 4),
      fine_config({test::mamba_group(32), wide, test::full_group(8)}, 32, 4),
      fine_config({test::full_group(16), test::mamba_group(16), wide}, 32, 8),
      fine_config({test::mamba_group(16), test::full_group(8), test::window_group(4, 9)}, 16, 4),
      fine_config({test::full_group(16)}, 16, 2),
      fine_config({test::mamba_group(16)}, 16, 2)};
  constexpr std::uint32_t kTokens = 256;
  Odds odds;
  std::uint32_t hits = 0;
  std::uint32_t twice = 0;
  std::uint32_t inside = 0;
  std::uint32_t staged = 0;
  for (CacheConfig config : configs) {
    for (int flags = 0; flags < 6; ++flags) {
      // None, every group's and one group's draft layers.
      config.use_eagle = flags % 3 != 0;
      config.groups[0].is_eagle_group = flags % 3 == 2;
      // Two pipeline stages: the first group is on both, the others on one.
      const bool stages = flags >= 3;
      config.parallel.pp = stages ? 2 : 1;
      for (std::uint32_t g = 1; stages && g < config.groups.size(); ++g)
        config.groups[g].pipeline_stages = {g % 2};
      Engine engine(config, kTokens / *config.hash_block_size);
      const HitGrid& grid = engine.search.grid();
      bool drafts = false;
      for (const HitGroup& group : engine.search.groups()) drafts |= group.draft;
      for (int at = 0; at < 120; ++at) {
        engine.forget();
        const std::uint32_t prompt = 1 + odds.below(kTokens);
        const std::uint32_t hashed = prompt - prompt % grid.alignment;
        const std::uint32_t limit = std::min(engine.projection->max_hit(prompt), hashed);
        const std::uint32_t local =
            odds.chance(60) ? 0 : odds.below(limit / grid.step + 1) * grid.step;
        const std::uint32_t probed = drafts ? hashed : limit;
        const Presence objects = random_objects(engine, kTokens, probed, odds);
        const std::uint32_t wanted =
            limit <= local ? local : engine.search.find_below(objects, local, probed, limit);
        const std::uint32_t hit = engine.look_up(prompt, local);
        ASSERT_EQ(hit, wanted) << "prompt " << prompt << " local " << local << " flags " << flags;
        EXPECT_LE(engine.scheduler->counters().lookup_calls, 2u);
        twice += engine.scheduler->counters().lookup_calls == 2 ? 1 : 0;
        if (hit <= local) continue;
        ++hits;
        staged += stages ? 1 : 0;
        inside += hit % grid.step != 0 ? 1 : 0;
        expect_loads_exist(engine, hit, local);
      }
    }
  }
  // The cases say something.
  EXPECT_GT(hits, 1000u);
  EXPECT_GT(twice, 300u);
  EXPECT_GT(inside, 300u);
  EXPECT_GT(staged, 300u);
}

// An object behind the end of the hit, in the chunk where it ends, holds it.
TEST(LookupRounds, AskForObjectsBehindTheHitInItsLastChunk) {
  GroupConfig wide = test::full_group(32, "wide");
  std::get<AttentionPayload>(wide.spec.payload).head_size = 8;
  Engine engine(fine_config({test::mamba_group(32), wide, test::full_group(8)}, 32, 4), 33);
  for (const std::uint32_t at : {32u, 44u}) engine.store_at(StoreIndex{0}, at);
  for (const std::uint32_t at : {32u, 52u}) engine.store_at(StoreIndex{1}, at);
  for (const std::uint32_t at : {8u, 16u, 24u, 32u, 40u, 44u}) engine.store_at(StoreIndex{2}, at);
  EXPECT_EQ(engine.look_up(132, 0), 44u);
  EXPECT_EQ(engine.scheduler->counters().lookup_calls, 2u);
}

// Whole chunks of 800 tokens, hashes of 16: all places of a prompt of 100,000 tokens are 12,498.
class LongPrompt : public ::testing::Test {
 protected:
  static constexpr std::uint32_t kPrompt = 100'000;
  static constexpr StoreIndex kFull{0};
  static constexpr StoreIndex kState{1};
  // Of each group: 124 ends of chunks, and 49 places inside the first and the last chunk.
  static constexpr std::uint64_t kFirstRound = 2 * (124 + 2 * 49);

  std::uint64_t calls() const { return engine.scheduler->counters().lookup_calls; }
  std::uint64_t keys() const { return engine.scheduler->counters().lookup_keys; }

  // Of a prompt whose states are stored half as far as its attention. Its first round is asked.
  HashList begin_first_round() {
    for (std::uint32_t at = 800; at <= 80'000; at += 800) {
      engine.store_at(kFull, at);
      if (at <= 40'000) engine.store_at(kState, at);
    }
    const HashList known{engine.hashes.bytes.data(), kPrompt / 16, test::Hashes::kWidth};
    EXPECT_TRUE(engine.scheduler->lookup(kRequest, kPrompt, known, 0, engine.now).pending);
    engine.scheduler->end_step(engine.now);
    return known;
  }

  Engine engine{fine_config({test::full_group(800), test::mamba_group(800)}, 800, 16),
                kPrompt / 16};
};

TEST_F(LongPrompt, IsNotAskedForAgainInAModeThatDoesNotLoad) {
  const HashList known = begin_first_round();
  engine.scheduler->set_mode(StoreMode::kOff);
  engine.store->answer_lookup();
  engine.scheduler->end_step(engine.now);
  EXPECT_EQ(calls(), 1u);
  EXPECT_TRUE(engine.store->lookups.empty());
  engine.scheduler->set_mode(StoreMode::kReadWrite);
  EXPECT_EQ(engine.scheduler->lookup(kRequest, kPrompt, known, 0, engine.now).external_tokens,
            40'000u)
      << "what the first round has proven";
}

TEST_F(LongPrompt, IsNotAskedForAgainOnceItMayNotLoad) {
  const HashList known = begin_first_round();
  engine.scheduler->restrict(kRequest, {.load = false});
  engine.store->answer_lookup();
  engine.scheduler->end_step(engine.now);
  EXPECT_EQ(calls(), 1u);
  EXPECT_TRUE(engine.store->lookups.empty());
  EXPECT_EQ(engine.scheduler->lookup(kRequest, kPrompt, known, 0, engine.now).external_tokens, 0u);
}

TEST_F(LongPrompt, IsNotAskedForAgainOnceItsEngineWasToldOfNothing) {
  const HashList known = begin_first_round();
  // Its prompt ends earlier, and the engine has all of it by now.
  EXPECT_FALSE(engine.scheduler->lookup(kRequest, 801, known, 800, engine.now).pending);
  engine.store->answer_lookup();
  engine.scheduler->end_step(engine.now);
  EXPECT_EQ(calls(), 1u);
  EXPECT_TRUE(engine.store->lookups.empty());
}

TEST_F(LongPrompt, ThatNobodyHasStoredIsOneCall) {
  EXPECT_EQ(engine.look_up(kPrompt, 0), 0u);
  EXPECT_EQ(calls(), 1u);
  EXPECT_EQ(keys(), kFirstRound);
}

TEST_F(LongPrompt, ThatIsStoredToItsEndIsOneCall) {
  engine.store_up_to(kFull, 800, 99'200);
  engine.store_up_to(kState, 800, 99'200);
  engine.store->present[engine.key(kFull, 99'984)] = 1;
  engine.store->present[engine.key(kState, 99'984)] = 1;
  EXPECT_EQ(engine.look_up(kPrompt, 0), 99'984u);
  EXPECT_EQ(calls(), 1u);
  EXPECT_EQ(keys(), kFirstRound);
}

TEST_F(LongPrompt, ThatLeavesAStoredOneAsksInsideTheChunkWhereItDoes) {
  engine.store_up_to(kFull, 800, 48'000);
  engine.store_up_to(kState, 800, 48'000);
  engine.store->present[engine.key(kFull, 48'320)] = 1;
  engine.store->present[engine.key(kState, 48'320)] = 1;
  EXPECT_EQ(engine.look_up(kPrompt, 0), 48'320u);
  EXPECT_EQ(calls(), 2u);
  EXPECT_EQ(keys(), kFirstRound + 2 * 49);
}

TEST_F(LongPrompt, WhoseStatesAreGoneAsksForThoseThatMayBeLeft) {
  engine.store_up_to(kFull, 800, 48'000);
  engine.store->present[engine.key(kState, 8'016)] = 1;
  EXPECT_EQ(engine.look_up(kPrompt, 0), 8'016u) << "inside a chunk that is there as a whole";
  EXPECT_EQ(calls(), 2u);
  // Of states all 49 places inside the chunks 1 to 60, of attention those of chunk 60.
  EXPECT_EQ(keys(), kFirstRound + 60 * 49 + 49);
}

TEST_F(LongPrompt, SecondRoundThatIsRefusedLeavesTheFirstOnesHit) {
  engine.store_up_to(kFull, 800, 48'000);
  engine.store_up_to(kState, 800, 1'600);
  const HashList known = engine.hashes.list();
  engine.scheduler->lookup(kRequest, kPrompt, known, 0, engine.now);
  engine.scheduler->end_step(engine.now);
  engine.store->answer_lookup();
  engine.store->refuse = true;
  const LookupResult found = engine.scheduler->lookup(kRequest, kPrompt, known, 0, engine.now);
  EXPECT_FALSE(found.pending);
  EXPECT_EQ(found.external_tokens, 1'600u);
  EXPECT_EQ(engine.scheduler->counters().lookups_failed, 1u);
}

TEST_F(LongPrompt, SecondRoundThatIsLateLeavesTheFirstOnesHit) {
  engine.store_up_to(kFull, 800, 48'000);
  engine.store_up_to(kState, 800, 1'600);
  const HashList known = engine.hashes.list();
  engine.scheduler->lookup(kRequest, kPrompt, known, 0, engine.now);
  engine.scheduler->end_step(engine.now);
  engine.store->answer_lookup();
  EXPECT_TRUE(engine.scheduler->lookup(kRequest, kPrompt, known, 0, engine.now).pending);
  ASSERT_EQ(calls(), 2u);
  engine.now = engine.now + StoreSchedulerOptions{}.lookup_timeout;
  const LookupResult found = engine.scheduler->lookup(kRequest, kPrompt, known, 0, engine.now);
  EXPECT_FALSE(found.pending);
  EXPECT_EQ(found.external_tokens, 1'600u);
  EXPECT_EQ(engine.scheduler->counters().lookups_late, 1u);
  expect_loads_exist(engine, 1'600, 0);
}

// Three groups of states on eight ranks: 49 places in each of 60 chunks are 70,560 keys.
class WideStates : public ::testing::Test {
 protected:
  static constexpr std::uint32_t kPrompt = 100'000;

  static CacheConfig config() {
    CacheConfig config = fine_config({test::full_group(800), test::mamba_group(800, "a"),
                                      test::mamba_group(800, "b"), test::mamba_group(800, "c")},
                                     800, 16);
    config.parallel.tp = 8;
    return config;
  }
  void store_states(std::uint32_t tokens) {
    for (const std::uint32_t state : {1u, 2u, 3u}) engine.store_at(StoreIndex{state}, tokens);
  }

  WideStates() {
    for (std::uint32_t at = 800; at <= 48'000; at += 800) engine.store_at(StoreIndex{0}, at);
  }

  Engine engine{config(), kPrompt / 16};
};

TEST_F(WideStates, AreAskedForInNoMoreKeysThanACallHas) {
  store_states(8'016);
  EXPECT_EQ(engine.look_up(kPrompt, 0), 8'016u);
  EXPECT_EQ(engine.scheduler->counters().lookup_calls, 2u);
  const std::uint64_t first = (4 * (124 + 2 * 49)) * 8;
  EXPECT_GT(engine.scheduler->counters().lookup_keys, first + (1u << 16) * 9 / 10);
  EXPECT_LE(engine.scheduler->counters().lookup_keys, first + (1u << 16));
}

TEST_F(WideStates, OfShortHitsAreNotAskedForThen) {
  store_states(1'616);
  store_states(800);
  EXPECT_EQ(engine.look_up(kPrompt, 0), 800u);
}

}  // namespace
}  // namespace kvprism
