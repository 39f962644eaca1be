#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>

#include "kvprism/base/error.h"
#include "kvprism/base/log.h"
#include "kvprism/group/projection.h"
#include "kvprism/peer/validate_peer.h"
#include "kvprism/store/validate_store.h"

namespace kvprism {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

GroupConfig attention(std::uint32_t block_size) {
  GroupConfig group;
  group.spec.kind = "full_attention";
  group.spec.block_size = block_size;
  group.spec.payload = AttentionPayload{
      .num_kv_heads = 2, .head_size = 64, .head_size_v = 64, .dtype = DType::kBFloat16};
  return group;
}

GroupConfig ring(std::uint32_t capacity) {
  GroupConfig group = attention(capacity);
  group.spec.kind = "circular_buffer";
  return group;
}

GroupConfig mamba(std::uint32_t block_size, std::string mode = "align") {
  GroupConfig group;
  group.spec.kind = "mamba";
  group.spec.block_size = block_size;
  group.spec.payload = StatePayload{{{4, 32}}, {DType::kFloat32}, std::move(mode)};
  return group;
}

GroupConfig window(std::uint32_t block_size, std::uint32_t tokens) {
  GroupConfig group = attention(block_size);
  group.spec.kind = "sliding_window";
  group.spec.sliding_window = tokens;
  return group;
}

CacheConfig config_of(std::vector<GroupConfig> groups) {
  CacheConfig config;
  config.num_blocks = 64;
  config.groups = std::move(groups);
  for (std::size_t g = 0; g < config.groups.size(); ++g)
    config.groups[g].layers = {"layer." + std::to_string(g)};
  return config;
}

std::shared_ptr<const Projection> make(const CacheConfig& config) {
  return Projection::make(config, SpecRegistry::builtin());
}

std::vector<std::uint32_t> store_ids(const Projection& projection) {
  std::vector<std::uint32_t> ids;
  for (const StoreIndex s : indices<StoreIndex>(projection.num_store_groups()))
    ids.push_back(raw(projection.group_id(s)));
  return ids;
}

std::vector<std::uint32_t> transfer_ids(const Projection& projection) {
  std::vector<std::uint32_t> ids;
  for (const TransferIndex t : indices<TransferIndex>(projection.num_transfer_groups())) {
    ids.push_back(raw(projection.group_id(t)));
  }
  return ids;
}

std::string digest(const CacheConfig& config) { return to_hex(make(config)->digest()); }

std::vector<std::string> store_paths(const Projection& projection) {
  std::vector<std::string> paths;
  for (const Problem& problem : validate_store(projection)) paths.push_back(problem.path);
  return paths;
}

// R32: an index of one space is none of another, and an int is none at all.
template <class Index>
concept HasStoreIndex = requires(const Projection& p, Index index) { p.store_index(index); };
template <class Index>
concept HasTransferIndex = requires(const Projection& p, Index index) { p.transfer_index(index); };
template <class Index>
concept HasGroupId = requires(const Projection& p, Index index) { p.group_id(index); };
template <class Index>
concept HasReason = requires(const Projection& p, Index index) { p.why_not_stored(index); };
template <class Row, class Index>
concept Addresses = requires(Row row, Index index) { row[index]; };
template <class A, class B>
concept Compares = requires(A a, B b) { a == b; };

static_assert(HasStoreIndex<GroupId> && HasTransferIndex<GroupId> && HasReason<GroupId>);
static_assert(!HasStoreIndex<StoreIndex> && !HasStoreIndex<TransferIndex> && !HasStoreIndex<int>);
static_assert(!HasTransferIndex<TransferIndex> && !HasTransferIndex<StoreIndex> &&
              !HasReason<StoreIndex>);
static_assert(HasGroupId<StoreIndex> && HasGroupId<TransferIndex> && !HasGroupId<GroupId> &&
              !HasGroupId<int>);
static_assert(Addresses<IndexedSpan<StoreIndex, int>, StoreIndex>);
static_assert(!Addresses<IndexedSpan<StoreIndex, int>, GroupId> &&
              !Addresses<IndexedSpan<StoreIndex, int>, int>);
static_assert(Addresses<IndexedVector<GroupId, int>, GroupId>);
static_assert(!Addresses<IndexedVector<GroupId, int>, TransferIndex> &&
              !Addresses<IndexedVector<GroupId, int>, int>);
static_assert(Compares<StoreIndex, StoreIndex> && !Compares<StoreIndex, TransferIndex> &&
              !Compares<GroupId, int>);

// R01: the ring first, in the middle and last, with the capacities that are seen.
TEST(Projection, ARingTravelsAndIsNeverStored) {
  for (const std::uint32_t capacity : {4U, 6U, 8U}) {
    for (std::size_t at = 0; at < 3; ++at) {
      std::vector<GroupConfig> groups{attention(800), mamba(800)};
      groups.insert(groups.begin() + static_cast<std::ptrdiff_t>(at), ring(capacity));
      const auto projection = make(config_of(std::move(groups)));
      EXPECT_THAT(transfer_ids(*projection), ElementsAre(0, 1, 2));
      std::vector<std::uint32_t> expected{0, 1, 2};
      expected.erase(expected.begin() + static_cast<std::ptrdiff_t>(at));
      EXPECT_EQ(store_ids(*projection), expected);
      EXPECT_EQ(projection->scheduler_block_size(), 800U) << "scratch stays out of the lcm";
      EXPECT_EQ(projection->hash_block_size(), 800U) << "and out of the gcd";
      EXPECT_THAT(validate_store(*projection), IsEmpty());
      EXPECT_EQ(projection->why_not_stored(GroupId{static_cast<std::uint32_t>(at)}),
                "kind circular_buffer is not prefix-cacheable");
    }
  }
}

// R32: transfer {0,2,3,4}, store {0,3}.
TEST(Projection, RoundTripsBetweenIdsAndIndices) {
  std::vector<GroupConfig> groups{attention(16), attention(16), ring(8), mamba(16), ring(4)};
  groups[1].enable_kv_transfer = false;
  const auto projection = make(config_of(std::move(groups)));
  EXPECT_THAT(transfer_ids(*projection), ElementsAre(0, 2, 3, 4));
  EXPECT_THAT(store_ids(*projection), ElementsAre(0, 3));
  for (const StoreIndex s : indices<StoreIndex>(2))
    EXPECT_EQ(projection->store_index(projection->group_id(s)), s);
  for (const TransferIndex t : indices<TransferIndex>(4)) {
    EXPECT_EQ(projection->transfer_index(projection->group_id(t)), t);
  }
  EXPECT_EQ(projection->store_index(GroupId{1}), std::nullopt);
  EXPECT_EQ(projection->transfer_index(GroupId{1}), std::nullopt);
  EXPECT_EQ(projection->store_index(GroupId{99}), std::nullopt);
  EXPECT_EQ(projection->why_not_stored(GroupId{1}), "enable_kv_transfer is false");
  EXPECT_EQ(projection->why_not_stored(GroupId{0}), "");
}

// For any mix of groups: all >= transfer >= store, in order, and both maps are inverse.
TEST(Projection, HoldsItsInvariantsForAnyMixOfGroups) {
  std::mt19937 random(20240613);
  const auto any = [&](std::uint32_t below) {
    return static_cast<std::uint32_t>(random() % below);
  };
  for (int round = 0; round < 500; ++round) {
    std::vector<GroupConfig> groups;
    const std::uint32_t count = 1 + any(9);
    for (std::uint32_t g = 0; g < count; ++g) {
      const std::uint32_t sizes[] = {16, 32, 64};
      const std::uint32_t capacities[] = {4, 6, 8};
      switch (any(4)) {
        case 0:
          groups.push_back(attention(sizes[any(3)]));
          break;
        case 1:
          groups.push_back(ring(capacities[any(3)]));
          break;
        case 2:
          groups.push_back(mamba(sizes[any(3)]));
          break;
        default:
          groups.push_back(window(sizes[any(3)], 1 + any(100)));
      }
      groups.back().enable_kv_transfer = any(4) != 0;
    }
    const CacheConfig config = config_of(groups);
    const auto projection = make(config);
    ASSERT_EQ(projection->num_groups(), count);
    const std::vector<std::uint32_t> transfer = transfer_ids(*projection);
    const std::vector<std::uint32_t> store = store_ids(*projection);
    EXPECT_TRUE(std::is_sorted(transfer.begin(), transfer.end()));
    EXPECT_TRUE(std::is_sorted(store.begin(), store.end()));
    EXPECT_TRUE(std::includes(transfer.begin(), transfer.end(), store.begin(), store.end()));
    for (std::uint32_t g = 0; g < count; ++g) {
      const GroupId id{g};
      EXPECT_EQ(projection->group(id).id, id);
      const bool transferred = std::binary_search(transfer.begin(), transfer.end(), g);
      const bool is_stored = std::binary_search(store.begin(), store.end(), g);
      EXPECT_EQ(transferred, groups[g].enable_kv_transfer);
      EXPECT_EQ(is_stored,
                groups[g].enable_kv_transfer && groups[g].spec.kind != "circular_buffer");
      EXPECT_EQ(projection->transfer_index(id).has_value(), transferred);
      EXPECT_EQ(projection->store_index(id).has_value(), is_stored);
      EXPECT_EQ(projection->why_not_stored(id).empty(), is_stored);
      if (is_stored) {
        EXPECT_EQ(projection->group_id(*projection->store_index(id)), id);
        EXPECT_EQ(projection->scheduler_block_size() % projection->group(id).tokens_per_block, 0U);
        EXPECT_EQ(projection->group(id).tokens_per_block % projection->hash_block_size(), 0U);
      }
      if (transferred) {
        EXPECT_EQ(projection->group_id(*projection->transfer_index(id)), id);
      }
    }
    EXPECT_EQ(validate_store(*projection).empty(), !store.empty());
  }
}

TEST(Projection, TakesTheEnginesOwnSizesUnchecked) {
  CacheConfig config = config_of({attention(800), ring(6), mamba(800)});
  config.scheduler_block_size = 2400;
  EXPECT_EQ(make(config)->scheduler_block_size(), 2400U);
  EXPECT_EQ(make(config)->hash_block_size(), 800U);
  EXPECT_THAT(store_paths(*make(config)), IsEmpty());
  config.hash_block_size = 7;
  EXPECT_EQ(make(config)->hash_block_size(), 7U);
  EXPECT_THAT(store_paths(*make(config)),
              ElementsAre("scheduler_block_size", "groups[0].block_size", "groups[2].block_size"));
}

TEST(Projection, TakesAllGroupsWhenNoneIsStored) {
  const auto projection = make(config_of({ring(4), ring(6)}));
  EXPECT_EQ(projection->scheduler_block_size(), 12U);
  EXPECT_EQ(projection->hash_block_size(), 2U);
  EXPECT_EQ(store_paths(*projection), std::vector<std::string>{"groups"});
}

TEST(Projection, CountsContextRanksInBlockSizes) {
  CacheConfig config = config_of({attention(16), mamba(64)});
  config.parallel = {.tp = 4, .dcp = 2};
  const auto projection = make(config);
  EXPECT_EQ(projection->group(GroupId{0}).tokens_per_block, 32U);
  EXPECT_EQ(projection->scheduler_block_size(), 64U);
  EXPECT_EQ(projection->hash_block_size(), 32U);
}

TEST(Projection, RefusesALcmThatDoesNotFit) {
  CacheConfig config = config_of({attention(2147483647), attention(2147483646)});
  for (GroupConfig& group : config.groups)
    group.spec.payload = AttentionPayload{1, 0, 1, 0, DType::kInt8, 1};
  EXPECT_EQ(Projection::check(config, SpecRegistry::builtin()).size(), 1U);
  EXPECT_THROW(make(config), Error);
  config.scheduler_block_size = 2147483647;
  EXPECT_THAT(Projection::check(config, SpecRegistry::builtin()), IsEmpty());
}

TEST(Projection, RefusesAWindowSpreadOverContextRanks) {
  CacheConfig config = config_of({window(16, 100)});
  config.parallel = {.tp = 2, .dcp = 2};
  ASSERT_EQ(Projection::check(config, SpecRegistry::builtin()).size(), 1U);
  EXPECT_EQ(Projection::check(config, SpecRegistry::builtin())[0].path, "groups[0].kind");
}

// R13.
TEST(MaxHit, LeavesATokenToCompute) {
  const auto projection = make(config_of({attention(16)}));
  EXPECT_EQ(projection->max_hit(64), 48U);
  EXPECT_EQ(projection->max_hit(65), 64U);
  EXPECT_EQ(projection->max_hit(16), 0U);
  EXPECT_EQ(projection->max_hit(1), 0U);
  EXPECT_EQ(projection->max_hit(0), 0U);
}

// R14.
TEST(MaxHit, LeavesTheRebuildDistanceOfARing) {
  CacheConfig config = config_of({attention(800), ring(8), mamba(800)});
  EXPECT_EQ(make(config)->max_hit(1600), 800U);
  EXPECT_EQ(make(config)->max_hit(2401), 2400U);
  config.groups[1].spec.replay_tokens = 8;
  EXPECT_EQ(make(config)->replay_tokens(), 8U);
  EXPECT_EQ(make(config)->max_hit(2401), 1600U);
  EXPECT_EQ(make(config)->max_hit(2408), 2400U);
  EXPECT_EQ(make(config)->max_hit(7), 0U);
}

TEST(Digest, IgnoresWhatHonestRanksDisagreeOn) {
  const CacheConfig base = config_of({attention(800), ring(8), mamba(800)});
  CacheConfig other = base;
  other.groups[0].layers = {"elsewhere.0", "elsewhere.1"};
  other.num_blocks = 1000;
  other.groups[0].spec.payload = AttentionPayload{4, 8, 128, 128, DType::kFloat16, 1};
  other.groups[0].spec.page_size_padded = 2000000;
  other.groups[2].host_resident = true;
  // Only a scheduler acts on draft flags, and pipeline stages may see others (D13).
  other.groups[0].is_eagle_group = true;
  other.use_eagle = true;
  EXPECT_EQ(digest(base), digest(other));
}

TEST(Digest, ChangesWithEveryFact) {
  const CacheConfig base = config_of({attention(800), ring(8), mamba(800)});
  std::set<std::string> seen{digest(base)};
  const auto differs = [&](auto&& change) {
    CacheConfig config = base;
    change(config);
    return seen.insert(digest(config)).second;
  };
  EXPECT_TRUE(differs([](CacheConfig& c) { c.groups[0].spec.block_size = 1600; }));
  EXPECT_TRUE(differs([](CacheConfig& c) { c.groups[1].spec.block_size = 4; }));
  EXPECT_TRUE(differs([](CacheConfig& c) { c.groups[1].spec.replay_tokens = 8; }));
  EXPECT_TRUE(differs([](CacheConfig& c) { c.groups[1].enable_kv_transfer = false; }));
  EXPECT_TRUE(differs([](CacheConfig& c) { std::swap(c.groups[0], c.groups[1]); }));
  EXPECT_TRUE(differs([](CacheConfig& c) { c.groups.pop_back(); }));
  EXPECT_TRUE(differs([](CacheConfig& c) { c.groups[1].spec.kind = "full_attention"; }));
  EXPECT_TRUE(differs([](CacheConfig& c) {
    c.groups[0].spec.kind = "sliding_window";
    c.groups[0].spec.sliding_window = 10;
  }));
  EXPECT_TRUE(differs([](CacheConfig& c) {
    c.groups[0].spec.kind = "sliding_window";
    c.groups[0].spec.sliding_window = 11;
  }));
  EXPECT_TRUE(differs([](CacheConfig& c) { c.scheduler_block_size = 1600; }));
  EXPECT_TRUE(differs([](CacheConfig& c) { c.hash_block_size = 400; }));
  EXPECT_TRUE(differs([](CacheConfig& c) { c.cache_hit_alignment_tokens = 400; }));
  EXPECT_TRUE(differs([](CacheConfig& c) { c.prefix_cache_retention_interval = 0; }));
  EXPECT_TRUE(differs([](CacheConfig& c) { c.prefix_cache_retention_interval = 800; }));
  EXPECT_TRUE(differs([](CacheConfig& c) { c.model_total_kv_heads = 8; }));
  EXPECT_TRUE(differs([](CacheConfig& c) { c.key_namespace = "a"; }));
  EXPECT_TRUE(differs([](CacheConfig& c) { c.parallel.tp = 2; }));
  EXPECT_TRUE(differs([](CacheConfig& c) { c.parallel.pp = 2; }));
  EXPECT_TRUE(differs([](CacheConfig& c) { c.parallel.pcp = 2; }));
}

// Two builds on two machines must agree; a change here is a change of the protocol.
TEST(Digest, IsTheSameInEveryProcess) {
  EXPECT_EQ(digest(config_of({attention(800), ring(8), mamba(800)})),
            "11fc1220eda12de43b29803a5eab3240");
}

TEST(Digest, AMismatchIsATableWithTheRowMarked) {
  const CacheConfig base = config_of({attention(800), mamba(800)});
  CacheConfig other = base;
  other.groups[1].spec.block_size = 1600;
  other.groups.push_back(ring(8));
  other.groups.back().layers = {"r"};
  const std::string table =
      Projection::describe_mismatch(make(base)->digest_facts(), make(other)->digest_facts());
  EXPECT_THAT(table,
              AllOf(HasSubstr("-> groups[1].tokens_per_block"), HasSubstr("-> groups[2].kind"),
                    HasSubstr("(absent)"), HasSubstr("circular_buffer"),
                    HasSubstr("   groups[0].kind"), Not(HasSubstr("-> groups[0]"))));
}

// R34: the total is declared; the fallback is said aloud.
TEST(Projection, TakesHeadsTimesRanksOnlyWithAWarning) {
  static std::vector<std::string> lines;
  lines.clear();
  set_log_sink([](void*, LogLevel, std::string_view line) { lines.emplace_back(line); }, nullptr,
               LogLevel::kWarning);
  CacheConfig config = config_of({attention(16), attention(16)});
  config.parallel.tp = 8;
  std::get<AttentionPayload>(config.groups[1].spec.payload).total_num_kv_heads = 4;
  const auto projection = make(config);
  set_log_sink(nullptr, nullptr, LogLevel::kWarning);
  EXPECT_EQ(
      std::get<AttentionPayload>(projection->group(GroupId{0}).spec.payload).total_num_kv_heads,
      16U);
  EXPECT_EQ(
      std::get<AttentionPayload>(projection->group(GroupId{1}).spec.payload).total_num_kv_heads,
      4U);
  EXPECT_THAT(lines, ElementsAre(HasSubstr("groups[0].total_num_kv_heads")));
}

// R64: without a flag no group is a draft; one flag makes one.
TEST(Projection, DraftsAreDeclaredOnly) {
  CacheConfig config = config_of({attention(16), attention(16), mamba(16), attention(16)});
  for (const GroupId id : indices<GroupId>(4)) EXPECT_FALSE(make(config)->group(id).is_eagle_group);
  config.groups[3].is_eagle_group = true;
  for (const GroupId id : indices<GroupId>(4))
    EXPECT_EQ(make(config)->group(id).is_eagle_group, raw(id) == 3);
}

// Without a word of the engine each flag stands for itself; with it, the engine's own search is
// followed.
TEST(Projection, ResolvesDraftsAsTheEngineSearches) {
  CacheConfig config =
      config_of({attention(16), window(16, 64), ring(8), mamba(16), attention(16)});
  const auto drafts = [&] {
    std::vector<bool> flags;
    const auto projection = make(config);
    for (const GroupId id : indices<GroupId>(projection->num_groups()))
      flags.push_back(projection->group(id).is_eagle_group);
    return flags;
  };
  config.use_eagle = true;
  EXPECT_THAT(drafts(), ElementsAre(true, true, false, true, true)) << "nobody flagged: all stored";
  config.groups[2].is_eagle_group = true;
  EXPECT_THAT(drafts(), ElementsAre(true, true, false, true, true)) << "a ring is not searched";
  config.groups[4].is_eagle_group = true;
  EXPECT_THAT(drafts(), ElementsAre(true, false, false, false, true)) << "equal specs are one";
  config.use_eagle = false;
  EXPECT_THAT(drafts(), ElementsAre(false, false, false, false, false));
}

TEST(Projection, TakesTheEnginesHitAlignment) {
  CacheConfig config = config_of({attention(800), mamba(800)});
  EXPECT_EQ(make(config)->hit_alignment(), 800U);
  EXPECT_EQ(make(config)->retention_interval(), std::nullopt);
  config.hash_block_size = 16;
  config.cache_hit_alignment_tokens = 16;
  config.prefix_cache_retention_interval = 0;
  config.model_total_kv_heads = 8;
  EXPECT_EQ(make(config)->hit_alignment(), 16U);
  EXPECT_EQ(make(config)->retention_interval(), 0U);
  EXPECT_EQ(make(config)->model_total_kv_heads(), 8U);
  EXPECT_THAT(store_paths(*make(config)), IsEmpty());
}

LayerSpec member(CacheSpec spec, std::vector<std::string> layers) {
  return {std::move(spec), std::move(layers)};
}

GroupConfig uniform(std::vector<LayerSpec> members, std::vector<std::string> order = {}) {
  GroupConfig group;
  group.spec.kind = "uniform";
  group.members = std::move(members);
  group.layers = std::move(order);
  return group;
}

CacheConfig wrapped(std::vector<GroupConfig> groups) {
  CacheConfig config;
  config.num_blocks = 64;
  config.groups = std::move(groups);
  return config;
}

std::vector<Problem> problems_of(const CacheConfig& config) {
  return Projection::check(config, SpecRegistry::builtin());
}

CacheSpec heads(CacheSpec spec, std::uint32_t count) {
  std::get<AttentionPayload>(spec.payload).num_kv_heads = count;
  return spec;
}

TEST(Uniform, IsUnwrappedLayerByLayer) {
  const CacheSpec two = attention(16).spec;
  const CacheSpec four = heads(two, 4);
  const auto projection =
      make(wrapped({uniform({member(two, {"a", "c"}), member(four, {"b"})}, {"a", "b", "c"})}));
  const ResolvedGroup& group = projection->group(GroupId{0});
  EXPECT_EQ(group.spec.kind, "full_attention");
  EXPECT_THAT(group.layers, ElementsAre("a", "b", "c"));
  EXPECT_EQ(group.page_size_bytes, 8192U) << "of the first layer, as the scheduler knows it";
  EXPECT_EQ(page_size_bytes(group.layer_spec(1)), 16384U);
  EXPECT_EQ(group.object_bytes(), 8192U + 16384 + 8192);
  EXPECT_EQ(projection->num_store_groups(), 1U);
}

// The engine's scheduler sees the first inner spec where its workers see the wrapper.
TEST(Uniform, HasTheDigestOfItsFirstSpec) {
  const CacheSpec two = attention(16).spec;
  EXPECT_EQ(digest(wrapped({uniform({member(two, {"a"}), member(heads(two, 4), {"b"})})})),
            digest(config_of({attention(16)})));
}

TEST(Uniform, CombinesByAndAndMax) {
  CacheSpec cached = window(16, 64).spec;
  cached.kind = "sliding_window_mla";
  CacheSpec replayed = cached;
  replayed.bounded_replay = true;
  const auto projection = make(wrapped({uniform({member(cached, {"a"}), member(replayed, {"b"})}),
                                        uniform({member(attention(16).spec, {"c"})})}));
  const ResolvedGroup& group = projection->group(GroupId{0});
  EXPECT_FALSE(group.traits.prefix_cacheable);
  EXPECT_EQ(group.traits.hit, HitRule::kNever);
  EXPECT_EQ(group.traits.replay_tokens, 64U);
  EXPECT_EQ(projection->why_not_stored(GroupId{0}),
            "a member of its wrapper is not prefix-cacheable");
  EXPECT_THAT(store_ids(*projection), ElementsAre(1));
  EXPECT_EQ(projection->max_hit(64), 0U);
  EXPECT_EQ(projection->max_hit(81), 16U);
}

TEST(Uniform, RefusesMembersThatDisagreeInEveryFact) {
  const CacheSpec full = attention(16).spec;
  const std::vector<Problem> problems = problems_of(wrapped({uniform(
      {member(full, {"a"}), member(window(32, 64).spec, {"b"}), member(mamba(16).spec, {"c"})})}));
  std::vector<std::string> told;
  for (const Problem& problem : problems) told.push_back(problem.path + ": " + problem.value);
  EXPECT_THAT(told, ElementsAre("groups[0].members[1]: tokens per block 32",
                                "groups[0].members[1]: peer rule window",
                                "groups[0].members[1]: hit rule window(64)",
                                "groups[0].members[2]: peer rule state",
                                "groups[0].members[2]: hit rule last_state",
                                "groups[0].members[2]: save rule hand_off"));
  EXPECT_EQ(problems[0].expected, "tokens per block 16, as members[0] has");
}

TEST(Uniform, IsNothingBesideItsMembers) {
  CacheConfig config = wrapped({uniform({member(attention(16).spec, {"a"})})});
  config.groups[0].spec.block_size = 16;
  ASSERT_EQ(problems_of(config).size(), 1U);
  EXPECT_EQ(problems_of(config)[0].path, "groups[0]");
  config = config_of({attention(16)});
  config.groups[0].members = {member(attention(16).spec, {"b"})};
  ASSERT_FALSE(problems_of(config).empty());
  EXPECT_EQ(problems_of(config)[0].path, "groups[0].members");
}

// Latent caches are the same on every rank: their heads are not multiplied, and nobody is warned.
TEST(Projection, KnowsTheHeadsOfReplicatedCaches) {
  static std::vector<std::string> lines;
  lines.clear();
  set_log_sink([](void*, LogLevel, std::string_view line) { lines.emplace_back(line); }, nullptr,
               LogLevel::kWarning);
  CacheConfig config = config_of({attention(16), attention(16), mamba(16)});
  config.parallel.tp = 8;
  config.groups[0].spec.kind = "mla_attention";
  std::get<AttentionPayload>(config.groups[0].spec.payload).num_kv_heads = 1;
  std::get<AttentionPayload>(config.groups[1].spec.payload).max_tp_shards = 4;
  std::get<StatePayload>(config.groups[2].spec.payload).tp_replicated = true;
  const auto projection = make(config);
  set_log_sink(nullptr, nullptr, LogLevel::kWarning);
  const auto total = [&](std::uint32_t id) {
    return std::get<AttentionPayload>(projection->group(GroupId{id}).spec.payload)
        .total_num_kv_heads;
  };
  EXPECT_EQ(total(0), 1U);
  EXPECT_EQ(total(1), 8U);
  EXPECT_THAT(lines, IsEmpty());
  EXPECT_TRUE(projection->group(GroupId{0}).tp_replicated);
  EXPECT_FALSE(projection->group(GroupId{1}).tp_replicated);
  EXPECT_TRUE(projection->group(GroupId{2}).tp_replicated);
}

// R02: no wrapper hides a mode.
TEST(ValidateStore, FindsAModeInsideAWrapper) {
  const auto projection =
      make(wrapped({uniform({member(mamba(800).spec, {"a"}), member(mamba(800, "none").spec, {"b"}),
                             member(mamba(800, "all").spec, {"c"})})}));
  EXPECT_THAT(store_paths(*projection), ElementsAre("groups[0].members[1].mamba_cache_mode",
                                                    "groups[0].members[2].mamba_cache_mode"));
}

// V2.
TEST(ValidateStore, RefusesEncoderStates) {
  CacheConfig config = config_of({attention(16), attention(16)});
  config.groups[1].spec.kind = "cross_attention";
  EXPECT_THAT(store_paths(*make(config)), ElementsAre("groups[1].kind"));
  config.groups[1].enable_kv_transfer = false;
  EXPECT_THAT(store_paths(*make(config)), IsEmpty());
}

// HiSparse: block ids of the host's pool are not those of the device's.
TEST(ValidateStore, RefusesAPoolInHostMemory) {
  CacheConfig config = config_of({attention(16), mamba(16)});
  config.groups[1].host_resident = true;
  EXPECT_THAT(store_paths(*make(config)), ElementsAre("groups[1].host_resident"));
  config.groups[1].enable_kv_transfer = false;
  EXPECT_THAT(store_paths(*make(config)), IsEmpty());
}

// V4.
TEST(ValidateStore, RefusesSeveralGroupsOverPrefillContextRanks) {
  CacheConfig config = config_of({attention(16), ring(8), mamba(16)});
  config.parallel.pcp = 2;
  EXPECT_THAT(store_paths(*make(config)), ElementsAre("parallel.pcp"));
  config.groups.pop_back();
  EXPECT_THAT(store_paths(*make(config)), IsEmpty());
}

TEST(ValidateStore, TellsEveryProblemAtOnce) {
  CacheConfig config = config_of({attention(48), mamba(32, "none"), attention(16)});
  config.groups[2].spec.kind = "cross_attention";
  config.parallel.pcp = 2;
  config.scheduler_block_size = 64;
  config.hash_block_size = 24;
  EXPECT_THAT(
      store_paths(*make(config)),
      ElementsAre("scheduler_block_size", "parallel.pcp", "groups[2].kind", "groups[0].block_size",
                  "groups[1].mamba_cache_mode", "groups[1].block_size"));
}

TEST(ValidateStore, HitsInsideABlockNeedEveryGroup) {
  CacheConfig config = config_of({attention(64), mamba(64), window(64, 100)});
  config.hash_block_size = 16;
  config.cache_hit_alignment_tokens = 16;
  ASSERT_THAT(store_paths(*make(config)), ElementsAre("cache_hit_alignment_tokens"));
  EXPECT_THAT(validate_store(*make(config))[0].hint, HasSubstr("'sliding_window'"));
  config.groups[2] = window(16, 100);
  config.groups[2].layers = {"w"};
  EXPECT_THAT(store_paths(*make(config)), IsEmpty());
  config.cache_hit_alignment_tokens = 24;
  EXPECT_THAT(store_paths(*make(config)),
              ElementsAre("cache_hit_alignment_tokens", "cache_hit_alignment_tokens",
                          "cache_hit_alignment_tokens"));
  config.cache_hit_alignment_tokens = 16;
  std::get<AttentionPayload>(config.groups[0].spec.payload).compression = 32;
  config.groups[0].spec.block_size = 2;
  EXPECT_THAT(store_paths(*make(config)), ElementsAre("cache_hit_alignment_tokens"));
}

TEST(ValidatePeer, NeedsGroupsOfWhichSomethingTravels) {
  CacheConfig config = config_of({attention(16), ring(8), attention(16)});
  EXPECT_THAT(validate_peer(*make(config)), IsEmpty());
  config.groups[2].spec.kind = "encoder_only_attention";
  ASSERT_EQ(validate_peer(*make(config)).size(), 1U);
  EXPECT_EQ(validate_peer(*make(config))[0].path, "groups[2].enable_kv_transfer");
  for (GroupConfig& group : config.groups) group.enable_kv_transfer = false;
  ASSERT_EQ(validate_peer(*make(config)).size(), 1U);
  EXPECT_EQ(validate_peer(*make(config))[0].path, "groups");
}

// Copies of the device that the engine keeps for itself.
TEST(Projection, SparseReplicasAreDeclaredAndNeverStored) {
  GroupConfig hot;
  hot.spec.kind = "hisparse_hot";
  hot.spec.block_size = 64;
  hot.spec.blocks_per_request = 4;
  hot.spec.payload = RawPayload{4096};
  hot.enable_kv_transfer = false;
  GroupConfig resident = hot;
  resident.spec.kind = "hisparse_resident";
  resident.spec.blocks_per_request.reset();
  GroupConfig source = attention(64);
  source.host_resident = true;
  source.role = "hisparse_source";
  const auto projection = make(config_of({source, resident, hot}));
  EXPECT_THAT(transfer_ids(*projection), ElementsAre(0));
  EXPECT_THAT(store_ids(*projection), ElementsAre(0));
}

// R02.
TEST(ValidateStore, TakesTheModeFromTheSpecAlone) {
  CacheConfig config = config_of({ring(8), mamba(800), mamba(1600)});
  EXPECT_THAT(validate_store(*make(config)), IsEmpty());
  config.groups[1] = mamba(800, "none");
  config.groups[1].layers = {"m"};
  const std::vector<Problem> problems = validate_store(*make(config));
  ASSERT_EQ(problems.size(), 1U);
  EXPECT_EQ(problems[0].path, "groups[1].mamba_cache_mode");
  EXPECT_EQ(problems[0].value, "none");
  EXPECT_EQ(problems[0].expected, "align");
}

// R03: pairs that divide one way and not the other never touch a scratch group.
TEST(ValidateStore, LeavesScratchAlone) {
  for (const std::uint32_t hash : {16U, 2304U}) {
    CacheConfig config = config_of({attention(2304), ring(4)});
    config.hash_block_size = hash;
    EXPECT_THAT(validate_store(*make(config)), IsEmpty());
  }
}

TEST(ValidateStore, TellsWhatTheEnginesSizesBreak) {
  CacheConfig config = config_of({attention(32), attention(48)});
  config.scheduler_block_size = 64;
  EXPECT_THAT(store_paths(*make(config)), ElementsAre("groups[1].block_size"));
}

}  // namespace
}  // namespace kvprism
