#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>

#include "kvprism/base/error.h"
#include "kvprism/base/log.h"
#include "kvprism/group/projection.h"
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
  EXPECT_TRUE(differs([](CacheConfig& c) { c.groups[0].is_eagle_group = true; }));
  EXPECT_TRUE(differs([](CacheConfig& c) { c.groups[2].is_eagle_group = true; }));
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
  EXPECT_TRUE(differs([](CacheConfig& c) { c.key_namespace = "a"; }));
  EXPECT_TRUE(differs([](CacheConfig& c) { c.parallel.tp = 2; }));
  EXPECT_TRUE(differs([](CacheConfig& c) { c.parallel.pp = 2; }));
  EXPECT_TRUE(differs([](CacheConfig& c) { c.parallel.pcp = 2; }));
}

// Two builds on two machines must agree; a change here is a change of the protocol.
TEST(Digest, IsTheSameInEveryProcess) {
  EXPECT_EQ(digest(config_of({attention(800), ring(8), mamba(800)})),
            "aedf17134e6939d611a30114003a592d");
}

TEST(Digest, AMismatchIsATableWithTheRowMarked) {
  const CacheConfig base = config_of({attention(800), mamba(800)});
  CacheConfig other = base;
  other.groups[1].is_eagle_group = true;
  other.groups.push_back(ring(8));
  other.groups.back().layers = {"r"};
  const std::string table =
      Projection::describe_mismatch(make(base)->digest_facts(), make(other)->digest_facts());
  EXPECT_THAT(table, AllOf(HasSubstr("-> groups[1].is_eagle_group"), HasSubstr("-> groups[2].kind"),
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
