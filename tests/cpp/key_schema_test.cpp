#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <set>
#include <string>

#include "kvprism/base/error.h"
#include "kvprism/key/key_schema.h"

namespace kvprism {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

struct Given {
  CacheConfig config;
  KeyFacts facts;
};

Given base() {
  Given setup;
  setup.config.num_blocks = 64;
  setup.config.parallel = {.tp = 2, .pp = 1, .pcp = 1, .dcp = 1};
  GroupConfig attention;
  attention.spec.kind = "full_attention";
  attention.spec.block_size = 16;
  attention.spec.payload = AttentionPayload{2, 4, 64, 64, DType::kBFloat16, 1};
  attention.layers = {"a"};
  GroupConfig ring = attention;
  ring.spec.kind = "circular_buffer";
  ring.spec.block_size = 8;
  ring.layers = {"r"};
  GroupConfig window = attention;
  window.spec.kind = "sliding_window";
  window.spec.sliding_window = 128;
  window.layers = {"w"};
  GroupConfig mamba;
  mamba.spec.kind = "mamba";
  mamba.spec.block_size = 32;
  mamba.spec.payload = StatePayload{{{4, 32}, {3}}, {DType::kFloat32, DType::kBFloat16}, "align"};
  mamba.layers = {"m"};
  setup.config.groups = {attention, ring, window, mamba};
  setup.facts = {.model = "org/model",
                 .model_revision = "a",
                 .kv_quantization = "none",
                 .hash_algorithm = "sha256_cbor"};
  return setup;
}

std::shared_ptr<const KeySchema> make(const Given& setup) {
  return KeySchema::kvprism(Projection::make(setup.config, SpecRegistry::builtin()), setup.facts);
}

std::vector<std::uint8_t> hash_of(std::uint8_t seed, std::size_t width = 32) {
  std::vector<std::uint8_t> hash(width);
  for (std::size_t i = 0; i < width; ++i) hash[i] = static_cast<std::uint8_t>(seed + i);
  return hash;
}

std::string key_of(const KeySchema& schema, StoreIndex group = StoreIndex{0},
                   RankPosition shard = {}, std::uint8_t seed = 0xF0) {
  KeySlots slots;
  schema.append_key(slots, group, shard, hash_of(seed));
  return slots[0];
}

std::string key_of(const Given& setup) { return key_of(*make(setup)); }

// The text of keys is a promise to every store that holds objects already.
TEST(KeySchema, SpellsTheSameKeyInEveryProcess) {
  EXPECT_EQ(key_of(*make(base()), StoreIndex{1}, {.tp = 1}),
            "kvp1/-/c320e224f821bb72319e697949a51da0/1.0.0.0/1/"
            "f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff000102030405060708090a0b0c0d0e0f");
}

// R35, R38: every fact changes every key.
TEST(KeySchema, EveryFactChangesTheKey) {
  const std::pair<const char*, std::function<void(Given&)>> changes[] = {
      {"nothing", [](Given&) {}},
      {"model", [](Given& s) { s.facts.model = "org/model2"; }},
      {"revision", [](Given& s) { s.facts.model_revision = "b"; }},
      {"quantization", [](Given& s) { s.facts.kv_quantization = "fp8_per_tensor"; }},
      {"hash algorithm", [](Given& s) { s.facts.hash_algorithm = "xxhash_cbor"; }},
      {"hash unit", [](Given& s) { s.config.hash_block_size = 8; }},
      {"layout", [](Given& s) { s.config.kv_layout = "BLHNC"; }},
      {"namespace", [](Given& s) { s.config.key_namespace = "a"; }},
      {"tp", [](Given& s) { s.config.parallel.tp = 4; }},
      {"pp",
       [](Given& s) {
         s.config.parallel.pp = 2;
         s.facts.pipeline_split = "0-2,2-4";
       }},
      {"another split",
       [](Given& s) {
         s.config.parallel.pp = 2;
         s.facts.pipeline_split = "0-1,1-4";
       }},
      {"pcp", [](Given& s) { s.config.parallel.pcp = 2; }},
      {"dtype",
       [](Given& s) { std::get<0>(s.config.groups[0].spec.payload).dtype = DType::kFloat8E4M3; }},
      {"dtype of equal size",
       [](Given& s) { std::get<0>(s.config.groups[0].spec.payload).dtype = DType::kFloat16; }},
      {"block size", [](Given& s) { s.config.groups[0].spec.block_size = 32; }},
      {"local heads",
       [](Given& s) { std::get<0>(s.config.groups[0].spec.payload).num_kv_heads = 4; }},
      {"total heads",
       [](Given& s) { std::get<0>(s.config.groups[0].spec.payload).total_num_kv_heads = 8; }},
      {"head size", [](Given& s) { std::get<0>(s.config.groups[0].spec.payload).head_size = 128; }},
      {"value size",
       [](Given& s) { std::get<0>(s.config.groups[0].spec.payload).head_size_v = 0; }},
      {"key and value sizes swapped",
       [](Given& s) {
         std::get<0>(s.config.groups[0].spec.payload).head_size = 32;
         std::get<0>(s.config.groups[0].spec.payload).head_size_v = 96;
       }},
      {"compression",
       [](Given& s) { std::get<0>(s.config.groups[0].spec.payload).compression = 2; }},
      {"states per token",
       [](Given& s) { std::get<0>(s.config.groups[0].spec.payload).states_per_token = 2; }},
      {"head slots",
       [](Given& s) { std::get<0>(s.config.groups[0].spec.payload).num_head_slots = 1; }},
      {"packed content",
       [](Given& s) { std::get<0>(s.config.groups[0].spec.payload).state_content_bytes = 255; }},
      {"packing of equal size",
       [](Given& s) { std::get<0>(s.config.groups[0].spec.payload).cache_dtype = "packed"; }},
      {"chunk",
       [](Given& s) {
         s.config.groups[0].spec.kind = "chunked_local_attention";
         s.config.groups[0].spec.attention_chunk_size = 64;
       }},
      {"another chunk",
       [](Given& s) {
         s.config.groups[0].spec.kind = "chunked_local_attention";
         s.config.groups[0].spec.attention_chunk_size = 128;
       }},
      {"sink",
       [](Given& s) {
         s.config.groups[0].spec.kind = "sink_full_attention";
         s.config.groups[0].spec.sink_len = 16;
       }},
      {"another sink",
       [](Given& s) {
         s.config.groups[0].spec.kind = "sink_full_attention";
         s.config.groups[0].spec.sink_len = 32;
       }},
      {"generated window",
       [](Given& s) {
         s.config.groups[0].spec.kind = "rswa";
         s.config.groups[0].spec.rswa_window = 32;
       }},
      {"another generated window",
       [](Given& s) {
         s.config.groups[0].spec.kind = "rswa";
         s.config.groups[0].spec.rswa_window = 64;
       }},
      {"kind alone", [](Given& s) { s.config.groups[0].spec.kind = "hidden_state"; }},
      {"state on every rank",
       [](Given& s) { std::get<1>(s.config.groups[3].spec.payload).tp_replicated = true; }},
      {"padding", [](Given& s) { s.config.groups[0].spec.page_size_padded = 10000; }},
      {"content of a padded page",
       [](Given& s) {
         s.config.groups[0].spec.page_size_padded = 10000;
         std::get<0>(s.config.groups[0].spec.payload).head_size = 32;
       }},
      {"window", [](Given& s) { s.config.groups[2].spec.sliding_window = 64; }},
      {"state shape",
       [](Given& s) { std::get<1>(s.config.groups[3].spec.payload).shapes = {{32, 4}, {3}}; }},
      {"state dtype",
       [](Given& s) {
         std::get<1>(s.config.groups[3].spec.payload).dtypes = {DType::kFloat32, DType::kFloat16};
       }},
      {"state mode",
       [](Given& s) { std::get<1>(s.config.groups[3].spec.payload).cache_mode = "all"; }},
      {"another group", [](Given& s) { s.config.groups.pop_back(); }},
      {"no window", [](Given& s) { s.config.groups.erase(s.config.groups.begin() + 2); }},
      {"dcp",
       [](Given& s) {
         s.config.groups.erase(s.config.groups.begin() + 2);
         s.config.parallel.dcp = 2;
       }},
      {"another name of a layer", [](Given& s) { s.config.groups[0].layers = {"a2"}; }},
      {"two layers", [](Given& s) { s.config.groups[0].layers = {"a", "b"}; }},
      {"two layers the other way round", [](Given& s) { s.config.groups[0].layers = {"b", "a"}; }},
      {"order", [](Given& s) { std::swap(s.config.groups[0], s.config.groups[3]); }},
  };
  std::set<std::string> seen;
  std::map<std::string, std::set<std::string>> values;
  for (const auto& [name, change] : changes) {
    Given setup = base();
    change(setup);
    EXPECT_TRUE(seen.insert(key_of(setup)).second) << name;
    EXPECT_EQ(key_of(setup), key_of(setup)) << name;
    const auto schema = make(setup);
    for (const DigestFact& fact : schema->facts()) {
      // By the field: which group it is of does not matter here.
      const std::size_t dot = fact.name.rfind("].");
      values[dot == std::string::npos ? fact.name : fact.name.substr(dot + 2)].insert(fact.value);
    }
  }
  for (const auto& [name, told] : values) {
    const std::size_t fewest = name == "key_version" ? 1 : 2;
    EXPECT_GE(told.size(), fewest) << "no row changes the fact " << name;
  }
}

// Stages of equal sizes may hold different layers.
TEST(KeySchema, SeveralStagesNeedASplit) {
  Given setup = base();
  setup.config.parallel.pp = 2;
  try {
    make(setup);
    FAIL() << "accepted";
  } catch (const Error& error) {
    ASSERT_EQ(error.problems().size(), 1u);
    EXPECT_EQ(error.problems()[0].path, "pipeline_split");
    EXPECT_EQ(error.problems()[0].value, "''");
    EXPECT_EQ(error.problems()[0].expected, "the layers of each of the 2 pipeline stages");
  }
  setup.facts.pipeline_split = "\xff";
  EXPECT_THROW(make(setup), Error);
}

// Pipeline stages may see other flags than the scheduler, and know nothing of each other.
TEST(KeySchema, DraftFlagsAndStagesLeaveTheKeysAlone) {
  Given one = base();
  one.config.parallel.pp = 2;
  one.facts.pipeline_split = "0-2,2-4";
  Given two = one;
  two.config.groups[0].is_eagle_group = true;
  two.config.use_eagle = true;
  two.config.groups[1].pipeline_stages = {1};
  EXPECT_EQ(key_of(one), key_of(two));
}

Given wrapped_base() {
  Given setup = base();
  GroupConfig& group = setup.config.groups[0];
  group.members = {{group.spec, {"a", "c"}}, {group.spec, {"b"}}};
  group.spec = CacheSpec{};
  group.spec.kind = kUniformKind;
  group.layers = {"a", "b", "c"};
  return setup;
}

TEST(KeySchema, EveryLayerOfAWrapperCounts) {
  Given plain = base();
  plain.config.groups[0].layers = {"a", "b", "c"};
  EXPECT_EQ(key_of(wrapped_base()), key_of(plain)) << "layers that are alike";
  const auto second = [](Given& s) -> AttentionPayload& {
    return std::get<AttentionPayload>(s.config.groups[0].members[1].spec.payload);
  };
  const std::pair<const char*, std::function<void(Given&)>> changes[] = {
      {"nothing", [](Given&) {}},
      {"dtype of equal size", [&](Given& s) { second(s).dtype = DType::kFloat16; }},
      {"packing of equal size", [&](Given& s) { second(s).cache_dtype = "packed"; }},
      {"sizes of key and value",
       [&](Given& s) {
         second(s).head_size = 32;
         second(s).head_size_v = 96;
       }},
      {"heads", [&](Given& s) { second(s).num_kv_heads = 4; }},
      {"kind",
       [](Given& s) {
         s.config.groups[0].members[1].spec.kind = "rswa";
         s.config.groups[0].members[1].spec.rswa_window = 32;
       }},
      {"order of layers",
       [&](Given& s) {
         second(s).dtype = DType::kFloat16;
         s.config.groups[0].layers = {"a", "c", "b"};
       }},
      {"another first layer",
       [&](Given& s) {
         second(s).dtype = DType::kFloat16;
         s.config.groups[0].layers = {"b", "a", "c"};
       }},
  };
  std::set<std::string> seen;
  for (const auto& [name, change] : changes) {
    Given setup = wrapped_base();
    change(setup);
    EXPECT_TRUE(seen.insert(key_of(setup)).second) << name;
  }
}

// Stages hold different layers of a wrapper, and store them under keys that all of them know.
TEST(KeySchema, OfAWrapperOverSeveralStagesTheFirstLayerCounts) {
  Given plain = base();
  plain.config.parallel.pp = 2;
  plain.facts.pipeline_split = "0-2,2-4";
  Given wrapped = wrapped_base();
  wrapped.config.parallel.pp = 2;
  wrapped.facts = plain.facts;
  std::get<AttentionPayload>(wrapped.config.groups[0].members[1].spec.payload).head_size = 128;
  EXPECT_EQ(key_of(plain), key_of(wrapped));
  wrapped.config.groups[0].layers = {"b", "a", "c"};
  EXPECT_NE(key_of(plain), key_of(wrapped));
}

std::shared_ptr<const Projection> projected(const Given& setup) {
  return Projection::make(setup.config, SpecRegistry::builtin());
}

// What several stages' keys do not know of layers, their split does.
TEST(KeySchema, ASplitOfStagesKnowsEveryLayer) {
  const auto stages_of = [](const std::function<void(Given&)>& change) {
    Given first = wrapped_base();
    first.config.parallel.pp = 2;
    Given second = first;
    for (GroupConfig& group : second.config.groups) {
      for (std::string& layer : group.layers) layer += "2";
      for (LayerSpec& member : group.members) {
        for (std::string& layer : member.layers) layer += "2";
      }
    }
    change(second);
    return std::vector{projected(first), projected(second)};
  };
  const auto split_of = [&](const std::function<void(Given&)>& change) {
    return pipeline_split_of(stages_of(change));
  };
  const auto member = [](Given& s) -> AttentionPayload& {
    return std::get<AttentionPayload>(s.config.groups[0].members[1].spec.payload);
  };
  const std::pair<const char*, std::function<void(Given&)>> changes[] = {
      {"nothing", [](Given&) {}},
      {"a member's dtype of equal size", [&](Given& s) { member(s).dtype = DType::kFloat16; }},
      {"layers the other way round",
       [](Given& s) { s.config.groups[0].layers = {"c2", "b2", "a2"}; }},
      {"another name", [](Given& s) { s.config.groups[2].layers = {"other"}; }},
      {"no layers of a group", [](Given& s) { s.config.groups[3].layers.clear(); }},
      {"a state's shape",
       [](Given& s) { std::get<1>(s.config.groups[3].spec.payload).shapes = {{32, 4}, {3}}; }},
  };
  std::set<std::string> seen;
  std::set<std::string> keys;
  for (const auto& [name, change] : changes) {
    const std::string split = split_of(change);
    EXPECT_THAT(split, StartsWith("2 stages, ")) << name;
    EXPECT_TRUE(seen.insert(split).second) << name;
    EXPECT_EQ(split, split_of(change)) << name;
    Given setup = wrapped_base();
    setup.config.parallel.pp = 2;
    setup.facts.pipeline_split = split;
    keys.insert(key_of(setup));
  }
  EXPECT_EQ(keys.size(), seen.size());
  auto stages = stages_of([](Given&) {});
  std::swap(stages[0], stages[1]);
  EXPECT_TRUE(seen.insert(pipeline_split_of(stages)).second) << "stages the other way round";
  EXPECT_EQ(split_of([](Given& s) { s.config.groups[1].layers = {"another ring"}; }),
            split_of([](Given&) {}))
      << "what is not stored";
}

TEST(KeySchema, ASplitNeedsEveryStage) {
  const auto problem_of = [](const std::vector<std::shared_ptr<const Projection>>& stages) {
    try {
      pipeline_split_of(stages);
    } catch (const Error& error) {
      return error.problems().at(0);
    }
    return Problem{};
  };
  Given setup = base();
  setup.config.parallel.pp = 2;
  const auto stage = projected(setup);
  EXPECT_EQ(problem_of({stage}),
            (Problem{"stages[0].parallel.pp", "2", "1, the number of stages", {}}));
  EXPECT_EQ(problem_of({stage, nullptr}), (Problem{"stages[1]", "null", "a projection", {}}));
  EXPECT_EQ(problem_of({}), (Problem{"stages", "none", "a projection for each pipeline rank", {}}));
}

// Facts never run into each other, whatever they hold.
TEST(KeySchema, FactsDoNotRunTogether) {
  Given one = base();
  one.facts.model = "m";
  one.facts.model_revision = "r\nkv_quantization=4:none";
  Given two = base();
  two.facts.model = "m\nmodel_revision=1:r";
  EXPECT_NE(key_of(one), key_of(two));
}

// What is not stored gives no stored byte its meaning.
TEST(KeySchema, ScratchDoesNotChangeTheKey) {
  Given setup = base();
  setup.config.groups[1].spec.block_size = 4;
  EXPECT_EQ(key_of(setup), key_of(base()));
  setup.config.groups.erase(setup.config.groups.begin() + 1);
  EXPECT_EQ(key_of(setup), key_of(base()));
  setup.config.num_blocks = 10;
  EXPECT_EQ(key_of(setup), key_of(base()));
}

TEST(KeySchema, EveryPartOfAKeyCounts) {
  Given setup = base();
  setup.config.parallel = {.tp = 2, .pp = 2, .pcp = 2, .dcp = 2};
  setup.facts.pipeline_split = "0-2,2-4";
  setup.config.groups.erase(setup.config.groups.begin() + 2);
  const auto schema = make(setup);
  std::set<std::string> seen;
  std::size_t count = 0;
  for (const StoreIndex group : indices<StoreIndex>(2)) {
    for (const RankPosition& shard : schema->shards(group)) {
      for (const std::uint8_t seed : {1, 2}) {
        EXPECT_TRUE(seen.insert(key_of(*schema, group, shard, seed)).second);
        ++count;
      }
    }
  }
  EXPECT_EQ(count, 2U * 8 * 2);
}

TEST(KeySchema, NamespacesAreOneComponentAndNeverSpellAlike) {
  const char* const names[] = {"",      "-",   "%2D",  "a",       "A",    "a/b", "a%2Fb",
                               "a%2fb", "a@b", "@",    "%",       "%%",   "/",   "//",
                               ".",     "..",  "ä",    "a\u0308", "日本", " ",   "a b",
                               "a\tb",  "a+b", "a\\b", "a\nb",    "--",   "_"};
  std::set<std::string> seen;
  for (const char* const name : names) {
    Given setup = base();
    setup.config.key_namespace = name;
    const std::string key = key_of(setup);
    const std::size_t end = key.find('/', 5);
    const std::string component = key.substr(5, end - 5);
    EXPECT_TRUE(seen.insert(component).second) << name;
    EXPECT_EQ(std::count(key.begin(), key.end(), '/'), 5) << key;
    EXPECT_EQ(component.find_first_not_of(
                  "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-@%"),
              std::string::npos)
        << component;
  }
  EXPECT_THAT(key_of(base()), StartsWith("kvp1/-/"));
  Given setup = base();
  setup.config.key_namespace = "team/ä@1";
  EXPECT_THAT(key_of(setup), StartsWith("kvp1/team%2F%C3%A4@1/"));
}

// R37: a scheduler that knows only the config and the workers build the same keys.
TEST(KeySchema, SchedulerAndWorkersAgree) {
  Given setup = base();
  setup.config.parallel = {.tp = 4, .pp = 2, .pcp = 2, .dcp = 2};
  setup.facts.pipeline_split = "0-2,2-4";
  setup.config.groups.erase(setup.config.groups.begin() + 2);
  const auto scheduler = make(setup);
  std::set<std::string> asked;
  for (const RankPosition& shard : scheduler->shards(StoreIndex{1})) {
    asked.insert(key_of(*scheduler, StoreIndex{1}, shard));
  }
  std::set<std::string> stored;
  for (std::uint32_t rank = 0; rank < setup.config.parallel.world(); ++rank) {
    Given own = setup;
    own.config.groups[0].layers = {"only on " + std::to_string(rank)};
    own.config.num_blocks = 100 + rank;
    const auto worker = make(own);
    const RankPosition position = rank_position(Rank{rank}, own.config.parallel);
    stored.insert(key_of(*worker, StoreIndex{1}, worker->shard_of(StoreIndex{1}, position)));
  }
  EXPECT_EQ(asked, stored);
  EXPECT_EQ(asked.size(), 16U);
}

// The form and the sharing of keys of vLLM's built-in connector.
Given vllm_base() {
  Given setup = base();
  setup.config.key_schema = "vllm";
  setup.config.model_total_kv_heads = 4;
  for (GroupConfig& group : setup.config.groups) {
    if (auto* const attention = std::get_if<AttentionPayload>(&group.spec.payload)) {
      attention->total_num_kv_heads = 4;
    }
  }
  return setup;
}
std::shared_ptr<const KeySchema> make_vllm(const Given& setup) {
  return KeySchema::vllm(Projection::make(setup.config, SpecRegistry::builtin()), setup.facts);
}

TEST(KeySchema, VllmSpellsTheKeysOfTheBuiltInConnector) {
  Given setup = vllm_base();
  setup.facts.model = "/models/org/model//";
  const auto schema = make_vllm(setup);
  EXPECT_EQ(schema->name(), "vllm");
  EXPECT_EQ(schema->fingerprint(), "");
  EXPECT_EQ(key_of(*schema, StoreIndex{1}, {.tp = 1, .pp = 0, .pcp = 0, .dcp = 0}, 0),
            "model@tp_rank:1@pcp0@dcp0@pp_rank:0@group:1@"
            "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f");
  setup.config.key_namespace = "a/b@c";
  EXPECT_THAT(key_of(*make_vllm(setup)), StartsWith("a/b@c@model@tp_rank:0@"));
}

TEST(KeySchema, VllmRanksWithEqualHeadsShareAKeyAndTheWorkOfStoring) {
  Given setup = vllm_base();
  setup.config.parallel = {.tp = 8, .pp = 2, .pcp = 1, .dcp = 1};
  setup.config.model_total_kv_heads = 2;
  for (GroupConfig& group : setup.config.groups) {
    if (auto* const attention = std::get_if<AttentionPayload>(&group.spec.payload)) {
      attention->num_kv_heads = 1;
      attention->total_num_kv_heads = 2;
    }
  }
  const auto schema = make_vllm(setup);
  const StoreIndex full{0};
  const StoreIndex window{1};
  const StoreIndex states{2};
  EXPECT_EQ(schema->replicas(full), 4u);
  EXPECT_EQ(schema->replicas(states), 1u) << "states are never shared";
  EXPECT_EQ(schema->shards(full).size(), 4u) << "two shards on each stage";
  EXPECT_EQ(schema->shards(states).size(), 16u);
  const RankPosition rank{.tp = 6, .pp = 1, .pcp = 0, .dcp = 0};
  EXPECT_EQ(schema->shard_of(full, rank), (RankPosition{.tp = 1, .pp = 1, .pcp = 0, .dcp = 0}));
  EXPECT_EQ(schema->shard_of(states, rank), rank);
  // Every chunk has one rank of each four; the phase turns with the group.
  for (std::uint32_t chunk = 0; chunk < 8; ++chunk) {
    EXPECT_EQ(schema->stores(full, rank, chunk), chunk % 4 == 2) << chunk;
    EXPECT_EQ(schema->stores(window, rank, chunk), chunk % 4 == 3) << chunk;
    EXPECT_TRUE(schema->stores(states, rank, chunk));
  }
}

TEST(KeySchema, RanksThatHoldTheSameBytesShareAKey) {
  Given setup = base();
  setup.config.parallel.tp = 8;
  auto& one_head = std::get<AttentionPayload>(setup.config.groups[0].spec.payload);
  one_head.num_kv_heads = 1;
  one_head.total_num_kv_heads = 2;
  // Two heads of four a rank: which, nobody says.
  std::get<AttentionPayload>(setup.config.groups[2].spec.payload).total_num_kv_heads = 4;
  const auto replicas = [&](std::uint32_t group) {
    return make(setup)->replicas(StoreIndex{group});
  };
  EXPECT_EQ(replicas(0), 4u);
  EXPECT_EQ(replicas(1), 1u);
  EXPECT_EQ(replicas(2), 1u) << "states, each rank its own";
  EXPECT_THAT(make(setup)->shards(StoreIndex{0}),
              testing::ElementsAre(RankPosition{.tp = 0}, RankPosition{.tp = 1}));
  EXPECT_EQ(make(setup)->shard_of(StoreIndex{0}, {.tp = 5}), (RankPosition{.tp = 1}));
  EXPECT_THAT(key_of(*make(setup), StoreIndex{0}, {.tp = 1}), HasSubstr("/1.0.0.0/0/"));

  std::get<StatePayload>(setup.config.groups[3].spec.payload).tp_replicated = true;
  EXPECT_EQ(replicas(2), 8u);
  one_head.total_num_kv_heads = 3;
  EXPECT_EQ(replicas(0), 1u) << "three heads are on eight ranks unevenly";
  one_head.total_num_kv_heads = 1;
  EXPECT_EQ(replicas(0), 8u);

  // Layers of a wrapper share what all of them share.
  GroupConfig& group = setup.config.groups[0];
  LayerSpec second{group.spec, {"b"}};
  std::get<AttentionPayload>(second.spec.payload).total_num_kv_heads = 2;
  group.members = {{group.spec, group.layers}, second};
  group.spec = CacheSpec{};
  group.spec.kind = kUniformKind;
  group.layers.clear();
  EXPECT_EQ(replicas(0), 4u);

  setup.config.groups[2].spec.kind = "full_attention";
  setup.config.groups[2].spec.sliding_window.reset();
  setup.config.groups.pop_back();
  setup.config.parallel.dcp = 2;
  EXPECT_EQ(replicas(0), 1u) << "the ranks hold other tokens";
}

std::string refusal(const Given& setup) {
  try {
    make_vllm(setup);
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

TEST(KeySchema, VllmIsRefusedWhereRanksWouldShareDifferentHeads) {
  Given setup = vllm_base();
  setup.config.parallel.tp = 8;
  setup.config.model_total_kv_heads = 2;
  for (const std::size_t group : {0u, 2u}) {
    auto& attention = std::get<AttentionPayload>(setup.config.groups[group].spec.payload);
    attention.num_kv_heads = 1;
    attention.total_num_kv_heads = group == 0 ? 8 : 2;
  }
  EXPECT_THAT(refusal(setup), HasSubstr("groups[0].total_num_kv_heads"));
  EXPECT_THAT(refusal(setup), HasSubstr("choose schema kvprism"));
  EXPECT_THAT(refusal(setup), testing::Not(HasSubstr("groups[2].total_num_kv_heads")));
  setup.config.model_total_kv_heads.reset();
  const std::string once = refusal(setup);
  const auto at = once.find("model_total_kv_heads = null: expected the model's KV heads");
  ASSERT_NE(at, std::string::npos) << once;
  EXPECT_EQ(once.find("model_total_kv_heads", at + 1), std::string::npos) << once;
}

TEST(KeySchema, VllmIsRefusedWhereTheReferenceMistakesStagesOrContextRanks) {
  Given setup = vllm_base();
  setup.config.groups.resize(1);
  setup.config.parallel = {.tp = 2, .pp = 2, .pcp = 2, .dcp = 2};
  const std::string both = refusal(setup);
  EXPECT_THAT(both, HasSubstr("parallel.pp = 2: expected no common divisor with pcp, 2"));
  EXPECT_THAT(both, HasSubstr("parallel.dcp = 2: expected 1 with pcp, 2"));
  setup.config.parallel = {.tp = 2, .pp = 4, .pcp = 2, .dcp = 1};
  EXPECT_THAT(refusal(setup), HasSubstr("parallel.pp = 4"));

  // With 3 stages each has a number of its own, if not its rank.
  setup.config.parallel = {.tp = 2, .pp = 3, .pcp = 2, .dcp = 1};
  const auto schema = make_vllm(setup);
  EXPECT_THAT(key_of(*schema, StoreIndex{0}, {.tp = 1, .pp = 1, .pcp = 1, .dcp = 0}),
              StartsWith("model@tp_rank:1@pcp1@dcp0@pp_rank:0@group:0@"));
  EXPECT_THAT(key_of(*schema, StoreIndex{0}, {.tp = 0, .pp = 2, .pcp = 0, .dcp = 0}),
              StartsWith("model@tp_rank:0@pcp0@dcp0@pp_rank:1@group:0@"));
}

TEST(KeySchema, TheConfigNamesTheSchema) {
  const Given setup = vllm_base();
  const auto projection = Projection::make(setup.config, SpecRegistry::builtin());
  EXPECT_EQ(KeySchema::make(projection, setup.facts)->name(), "vllm");
  EXPECT_THROW(KeySchema::kvprism(projection, setup.facts), Error);
  const auto ours = Projection::make(base().config, SpecRegistry::builtin());
  EXPECT_EQ(KeySchema::make(ours, setup.facts)->name(), "kvprism");
  EXPECT_THROW(KeySchema::vllm(ours, setup.facts), Error);
}

TEST(RankPositions, RunOverTensorThenContextThenPipeline) {
  const ParallelSizes parallel{.tp = 4, .pp = 2, .pcp = 3, .dcp = 2};
  EXPECT_EQ(rank_position(Rank{0}, parallel), (RankPosition{}));
  EXPECT_EQ(rank_position(Rank{3}, parallel), (RankPosition{.tp = 3, .dcp = 1}));
  EXPECT_EQ(rank_position(Rank{4}, parallel), (RankPosition{.pcp = 1}));
  EXPECT_EQ(rank_position(Rank{23}, parallel),
            (RankPosition{.tp = 3, .pp = 1, .pcp = 2, .dcp = 1}));
}

// As vLLM makes its process groups: over the prefill context ranks, then over the tensor ranks.
TEST(RankPositions, DecodeContextRunsOverPrefillContextWhereItIsAsLarge) {
  const ParallelSizes as_large{.tp = 2, .pp = 1, .pcp = 2, .dcp = 2};
  EXPECT_EQ(rank_position(Rank{1}, as_large), (RankPosition{.tp = 1}));
  EXPECT_EQ(rank_position(Rank{2}, as_large), (RankPosition{.pcp = 1, .dcp = 1}));
  const ParallelSizes both{.tp = 2, .pp = 2, .pcp = 2, .dcp = 4};
  EXPECT_EQ(rank_position(Rank{1}, both), (RankPosition{.tp = 1, .dcp = 2}));
  EXPECT_EQ(rank_position(Rank{2}, both), (RankPosition{.pcp = 1, .dcp = 1}));
  EXPECT_EQ(rank_position(Rank{7}, both), (RankPosition{.tp = 1, .pp = 1, .pcp = 1, .dcp = 3}));
}

TEST(KeySchema, AppendingAllocatesOnlyTheFirstTime) {
  const auto schema = make(base());
  KeySlots slots;
  const auto fill = [&](std::uint8_t seed) {
    for (int i = 0; i < 100; ++i)
      schema->append_key(slots, StoreIndex{0}, {.tp = 1}, hash_of(seed));
    std::set<const char*> memory;
    for (const std::string& key : slots.strings()) memory.insert(key.data());
    return memory;
  };
  const std::set<const char*> first = fill(7);
  const std::string key = slots[0];
  slots.clear();
  EXPECT_EQ(fill(8), first) << "the same memory";
  EXPECT_NE(slots[0], key);
}

TEST(KeySchema, AReusedSlotHoldsNothingOfItsFormerKey) {
  const auto schema = make(base());
  KeySlots slots;
  schema->append_key(slots, StoreIndex{0}, {}, hash_of(1, 64));
  slots.clear();
  schema->append_key(slots, StoreIndex{0}, {}, hash_of(1, 16));
  EXPECT_THAT(slots[0], testing::EndsWith("/0/0102030405060708090a0b0c0d0e0f10"));
}

TEST(KeySchema, KeysForLaterAreThoseOfNow) {
  const auto schema = make(base());
  std::vector<std::uint8_t> bytes(std::size_t{32} * 40);
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::uint8_t>(i * 37 >> 3);
  const HashList hashes{bytes.data(), 40, 32, 10};  // the first of them is the request's eleventh
  KeySlots now, later;
  for (int use = 0; use < 3; ++use) {
    now.clear();
    later.clear();
    const auto add = [&](std::uint32_t group, std::uint32_t tp, std::uint32_t first,
                         std::uint32_t step, std::uint32_t count) {
      const StoreIndex index{group};
      for (std::uint32_t i = 0; i < count; ++i)
        schema->append_key(now, index, {.tp = tp}, hashes[first + i * step]);
      schema->append_keys_later(later, index, {.tp = tp}, hashes, first, step, count);
      EXPECT_EQ(later.size(), now.size());
    };
    add(0, 0, 10, 1, 40);
    add(0, 0, 12, 1, 3);
    add(0, 1, 12, 4, 9);
    add(1, 1, 11, 2, 1);
    add(1, 1, 11, 2, 0);
    if (use == 1) {
      // One that is made at once stays behind those for later.
      now.append() = later.append() = "another";
      add(0, 0, 20, 7, 4);
    }
    if (use == 2) {
      EXPECT_EQ(later[7], now[7]);
    }
    EXPECT_EQ(later.strings(), now.strings());
    EXPECT_EQ(later.strings().size(), use == 1 ? 58u : 53u);
  }
  EXPECT_THROW(schema->append_keys_later(later, StoreIndex{0}, {.tp = 7}, hashes, 10, 1, 1), Error);
  EXPECT_THROW(
      schema->append_keys_later(later, StoreIndex{0}, {}, {bytes.data(), 40, 8, 0}, 0, 1, 1),
      Error);
}

// R39: a hash cut to 64 bits is refused.
TEST(KeySchema, RefusesHashesAndShardsOutsideTheContract) {
  const auto schema = make(base());
  KeySlots slots;
  for (const std::size_t width : {0U, 8U, 15U, 65U}) {
    EXPECT_THROW(schema->append_key(slots, StoreIndex{0}, {}, hash_of(1, width)), Error) << width;
  }
  const RankPosition nowhere[] = {
      {.tp = 2}, {.pp = 1}, {.pcp = 1}, {.dcp = 1}, {.tp = 0xFFFFFFFF, .pp = 0xFFFFFFFF}};
  for (const RankPosition& shard : nowhere) {
    EXPECT_THROW(schema->append_key(slots, StoreIndex{0}, shard, hash_of(1)), Error);
  }
  EXPECT_TRUE(slots.empty());
}

TEST(KeySchema, TellsEveryProblemOfTheFactsAtOnce) {
  Given setup = base();
  setup.config.groups.erase(setup.config.groups.begin() + 2, setup.config.groups.end());
  setup.config.groups.erase(setup.config.groups.begin());
  setup.facts = {.model_revision = "\xff", .hash_is_stable = false};
  try {
    make(setup);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.problems().size(), 5U);
    EXPECT_THAT(error.what(), HasSubstr("PYTHONHASHSEED"));
  }
}

TEST(KeySchema, ShowsWhatItsFingerprintCovers) {
  const auto schema = make(base());
  EXPECT_EQ(schema->name(), "kvprism");
  EXPECT_EQ(schema->fingerprint().size(), 32U);
  EXPECT_THAT(schema->facts(), testing::Contains(DigestFact{"store_groups[2].states",
                                                            "float32[4,32]; bfloat16[3]"}));
}

TEST(KeySchema, NeedsAProjection) {
  for (const auto& make : {&KeySchema::kvprism, &KeySchema::vllm, &KeySchema::make}) {
    try {
      make(nullptr, KeyFacts{});
      FAIL() << "null was taken";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      EXPECT_THAT(error.what(), HasSubstr("projection = null: expected a projection"));
    }
  }
}

}  // namespace
}  // namespace kvprism
