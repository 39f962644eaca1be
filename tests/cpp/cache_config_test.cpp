#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "kvprism/base/error.h"
#include "kvprism/group/cache_config.h"

namespace kvprism {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::UnorderedElementsAre;

// Full attention, a ring and an align-mode state: the shape of R01.
constexpr const char* kHybrid = R"({
  "num_blocks": 16, "kv_layout": "LBHNC", "parallel": {"tp": 1, "pp": 1, "pcp": 1, "dcp": 1},
  "scheduler_block_size": null, "hash_block_size": null,
  "groups": [
    {"kind": "full_attention", "layers": ["f0"], "block_size": 800, "num_kv_heads": 2, "head_size": 64,
     "dtype": "bfloat16"},
    {"kind": "circular_buffer", "layers": ["r0"], "block_size": 8, "num_kv_heads": 2, "head_size": 64,
     "dtype": "bfloat16"},
    {"kind": "mamba", "layers": ["m0"], "block_size": 800, "mamba_cache_mode": "align", "shapes": [[4, 32]],
     "dtypes": ["float32"]}]})";

CacheConfig read(std::string_view json) {
  return cache_config_from_json(json, SpecRegistry::builtin());
}

Error error_of(std::string_view json) {
  try {
    read(json);
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "accepted: " << json;
  return Error(ErrorCode::kClosed, "", {});
}

std::vector<std::string> paths_of(std::string_view json) {
  std::vector<std::string> paths;
  const Error error = error_of(json);
  for (const Problem& problem : error.problems()) paths.push_back(problem.path);
  return paths;
}

// A config with one attention group, whose members are `extra` and what `extra` does not give.
std::string one_group(const std::string& group, const std::string& top = R"("num_blocks": 4)") {
  return "{" + top + R"(, "groups": [{)" + group + "}]}";
}
constexpr const char* kAttention =
    R"("kind": "full_attention", "layers": ["a"], "block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": "float16")";

TEST(CacheConfigJson, ReadsTheHybridExample) {
  const CacheConfig config = read(kHybrid);
  EXPECT_EQ(config.num_blocks, 16U);
  EXPECT_FALSE(config.scheduler_block_size);
  ASSERT_EQ(config.groups.size(), 3U);
  const auto& attention = std::get<AttentionPayload>(config.groups[0].spec.payload);
  EXPECT_EQ(attention.head_size_v, 64U) << "defaults to head_size";
  EXPECT_EQ(attention.dtype, DType::kBFloat16);
  const auto& state = std::get<StatePayload>(config.groups[2].spec.payload);
  EXPECT_EQ(state.cache_mode, "align");
  EXPECT_EQ(state.shapes, (std::vector<std::vector<std::uint32_t>>{{4, 32}}));
  EXPECT_TRUE(config.groups[1].enable_kv_transfer);
  EXPECT_EQ(config.groups[1].role, "default");
}

TEST(CacheConfigJson, WritesWhatItReads) {
  CacheConfig config = read(kHybrid);
  config.scheduler_block_size = 1600;
  config.hash_block_size = 400;
  config.key_namespace = "tenant \"ä\"/1";
  config.parallel = {.tp = 4, .pp = 2, .pcp = 3, .dcp = 2};
  config.groups[0].is_eagle_group = true;
  config.groups[0].spec.page_size_padded = 900000;
  std::get<AttentionPayload>(config.groups[0].spec.payload) = {2, 8, 64, 0, DType::kFloat8E4M3, 4};
  config.groups[1].spec.replay_tokens = 8;
  config.groups[1].enable_kv_transfer = false;
  config.groups[2].host_resident = true;
  config.groups[2].role = "hisparse_source";
  EXPECT_EQ(read(to_json(config)), config);
}

TEST(CacheConfigJson, WritesWindowsAndRawKinds) {
  const SpecRegistry registry = SpecRegistry::builtin().with(
      SpecKind{"blob", PayloadKind::kRaw, ParameterSet{}, ParameterSet{}, false, false,
               [](const CacheSpec&) {
                 return SpecTraits{
                     true, HitRule::kPrefix, 0, SaveRule::kPositional, PeerRule::kSuffix, 0, false};
               }});
  CacheConfig config = read(kHybrid);
  config.groups[0].spec.kind = "sliding_window";
  config.groups[0].spec.sliding_window = 100;
  config.groups[1].spec.kind = "blob";
  config.groups[1].spec.payload = RawPayload{4096};
  EXPECT_EQ(cache_config_from_json(to_json(config), registry), config);
}

TEST(CacheConfigJson, WritesEveryParameterAndPayload) {
  CacheConfig config = read(kHybrid);
  config.cache_hit_alignment_tokens = 100;
  config.prefix_cache_retention_interval = 0;
  config.use_eagle = true;
  config.model_total_kv_heads = 8;
  auto& attention = std::get<AttentionPayload>(config.groups[0].spec.payload);
  attention.states_per_token = 2;
  attention.num_head_slots = 3;
  attention.state_content_bytes = 100;
  attention.max_tp_shards = 2;
  attention.cache_dtype = "fp8_ds_mla";
  config.groups[0].spec.dcp_sharded = false;
  auto& state = std::get<StatePayload>(config.groups[2].spec.payload);
  state.num_speculative_blocks = 2;
  state.num_prefill_checkpoint_blocks = 1;
  state.prefill_checkpoint_alignment = 64;
  state.tp_replicated = true;
  EXPECT_EQ(read(to_json(config)), config);
}

TEST(CacheConfigJson, WritesTheParametersOfEveryKind) {
  CacheConfig config = read(kHybrid);
  config.groups.erase(config.groups.begin() + 1, config.groups.end());
  const auto add = [&](std::string kind, auto&& change) {
    config.groups.push_back(config.groups[0]);
    GroupConfig& group = config.groups.back();
    group.spec.kind = std::move(kind);
    group.layers = {"layer." + std::to_string(config.groups.size())};
    change(group.spec);
  };
  add("rswa", [](CacheSpec& spec) { spec.rswa_window = 128; });
  add("sink_full_attention", [](CacheSpec& spec) { spec.sink_len = 1600; });
  add("chunked_local_attention", [](CacheSpec& spec) { spec.attention_chunk_size = 8192; });
  add("sliding_window_mla", [](CacheSpec& spec) {
    spec.sliding_window = 128;
    spec.extra_retained_tokens = 2;
    spec.bounded_replay = true;
  });
  add("hisparse_hot", [](CacheSpec& spec) {
    spec.payload = RawPayload{4096};
    spec.blocks_per_request = 7;
  });
  EXPECT_EQ(read(to_json(config)), config);
}

// A latent cache has no value half unless it says so.
TEST(CacheConfigJson, ALatentKindHasNoValuesByDefault) {
  std::string text = one_group(kAttention);
  text.replace(text.find("full_attention"), 14, "mla_attention");
  const CacheConfig config = read(text);
  EXPECT_EQ(std::get<AttentionPayload>(config.groups[0].spec.payload).head_size_v, 0U);
}

std::string uniform(const std::string& members, const std::string& extra = "") {
  return R"({"num_blocks": 4, "groups": [{"kind": "uniform", )" + extra + R"("members": [)" +
         members + "]}]}";
}
std::string member(const std::string& layers, const std::string& heads = "2") {
  return R"({"kind": "full_attention", "layers": [)" + layers +
         R"(], "block_size": 16, "head_size": 64, "dtype": "float16", "num_kv_heads": )" + heads +
         "}";
}

TEST(CacheConfigJson, ReadsAndWritesAWrapper) {
  const CacheConfig config = read(uniform(member(R"("a", "c")") + "," + member(R"("b")", "4"),
                                          R"("layers": ["a", "b", "c"], )"));
  const GroupConfig& group = config.groups[0];
  EXPECT_EQ(group.spec.kind, "uniform");
  EXPECT_THAT(group.layers, ElementsAre("a", "b", "c"));
  ASSERT_EQ(group.members.size(), 2U);
  EXPECT_EQ(std::get<AttentionPayload>(group.members[1].spec.payload).num_kv_heads, 4U);
  EXPECT_THAT(group.members[1].layers, ElementsAre("b"));
  EXPECT_EQ(read(to_json(config)), config);
}

TEST(CacheConfigJson, TellsEveryProblemInsideAWrapper) {
  EXPECT_THAT(paths_of(uniform(member(R"("a")", "0") + R"(, 3, {"kind": "mambo"})")),
              UnorderedElementsAre("groups[0].members[0].num_kv_heads", "groups[0].members[1]",
                                   "groups[0].members[2].kind", "groups[0].members[2].layers",
                                   "groups[0].members[2].block_size"));
  EXPECT_THAT(paths_of(uniform("")), ElementsAre("groups[0].members"));
  EXPECT_THAT(paths_of(uniform(member(R"("a")"), R"("block_size": 16, )")),
              ElementsAre("groups[0].block_size"));
  EXPECT_THAT(paths_of(uniform(member(R"("a", "b")"), R"("layers": ["a", "c"], )")),
              ElementsAre("groups[0].layers", "groups[0].layers"));
  EXPECT_THAT(paths_of(uniform(member(R"("a")") + "," + member(R"("a")"))),
              ElementsAre("groups[0].members[1].layers[0]"));
  EXPECT_THAT(paths_of(one_group(kAttention + std::string(R"(, "members": [])"))),
              ElementsAre("groups[0].members"));
}

TEST(CacheConfigJson, UnknownKeysAreErrorsWithASuggestion) {
  const Error error = error_of(one_group(kAttention + std::string(R"(, "blok_size": 3)"),
                                         R"("num_block": 2, "num_blocks": 4)"));
  EXPECT_THAT(error.what(),
              AllOf(HasSubstr("groups[0].blok_size"), HasSubstr("did you mean 'block_size'?"),
                    HasSubstr("num_block = 2"), HasSubstr("did you mean 'num_blocks'?")));
}

TEST(CacheConfigJson, AKeyOfAnotherKindIsAnError) {
  const Error error =
      error_of(one_group(kAttention + std::string(R"(, "mamba_cache_mode": "align")")));
  EXPECT_THAT(error.what(), HasSubstr("groups[0].mamba_cache_mode = \"align\": expected no such "
                                      "key for kind 'full_attention'"));
}

TEST(CacheConfigJson, TellsEveryProblemAtOnceAndEachOnce) {
  EXPECT_THAT(
      paths_of(R"({"num_blocks": -1, "kv_layout": 7, "parallel": {"tp": 0, "xp": 1}, "groups": [
      {"kind": "full_attention", "layers": ["a", "a"], "block_size": -8, "head_size": 64.0, "dtype": "bf16"},
      {"kind": "mamba", "layers": [], "block_size": 8, "shapes": [[0], 3], "dtypes": ["float32", 1]},
      {"layers": "b", "block_size": "16"},
      5]})"),
      UnorderedElementsAre("num_blocks", "kv_layout", "parallel.tp", "parallel.xp",
                           "groups[0].block_size", "groups[0].num_kv_heads", "groups[0].head_size",
                           "groups[0].dtype", "groups[0].layers[1]", "groups[1].mamba_cache_mode",
                           "groups[1].shapes[0][0]", "groups[1].shapes[1]", "groups[1].dtypes[1]",
                           "groups[1].layers", "groups[2].kind", "groups[2].layers",
                           "groups[2].block_size", "groups[3]"));
}

TEST(CacheConfigJson, NumbersMustBePositiveIntegersInRange) {
  for (const char* const bad : {"0", "-8", "16.0", "1.6e1", "\"16\"", "true", "null", "[16]", "{}",
                                "2147483648", "99999999999999999999999"}) {
    const std::string json =
        R"({"num_blocks": )" + std::string(bad) +
        R"(, "groups": [{"kind": "full_attention", "layers": ["a"], "block_size": 16,
                                 "num_kv_heads": 2, "head_size": 64, "dtype": "float16"}]})";
    EXPECT_THAT(paths_of(json), ElementsAre("num_blocks")) << bad;
  }
}

TEST(CacheConfigJson, UnknownKindListsTheKnownOnes) {
  const Error error =
      error_of(one_group(R"("kind": "mambo", "layers": ["a"], "block_size": 16, "shapes": [[1]])"));
  EXPECT_THAT(error.what(), AllOf(HasSubstr("full_attention, mla_attention, hidden_state, rswa, "),
                                  HasSubstr("did you mean 'mamba'?")));
}

TEST(CacheConfigJson, ALayerBelongsToOneGroup) {
  const std::string json =
      R"({"num_blocks": 4, "groups": [{)" + std::string(kAttention) + "}, {" + kAttention + "}]}";
  EXPECT_THAT(error_of(json).what(), AllOf(HasSubstr("groups[1].layers[0] = a"),
                                           HasSubstr("also at groups[0].layers[0]")));
}

TEST(CacheConfigJson, AKeyGivenTwiceIsAnError) {
  EXPECT_THAT(paths_of(one_group(kAttention + std::string(R"(, "block_size": 32)"))),
              ElementsAre("groups[0].block_size"));
  EXPECT_THAT(paths_of(one_group(kAttention, R"("num_blocks": 4, "num_blocks": 4)")),
              ElementsAre("num_blocks"));
}

TEST(CacheConfigJson, RefusesParallelSizesThatCannotBe) {
  EXPECT_THAT(
      paths_of(one_group(kAttention, R"("num_blocks": 4, "parallel": {"tp": 4, "dcp": 3})")),
      ElementsAre("parallel.dcp"));
  EXPECT_THAT(
      paths_of(one_group(kAttention, R"("num_blocks": 4, "parallel": {"tp": 4096, "pp": 4096})")),
      ElementsAre("parallel"));
  EXPECT_THAT(paths_of(one_group(kAttention, R"("num_blocks": 4, "parallel": [1])")),
              ElementsAre("parallel"));
}

TEST(CacheConfigJson, RefusesNamesThatAreUnknown) {
  EXPECT_THAT(error_of(one_group(kAttention, R"("num_blocks": 4, "kv_layout": "LBNHD")")).what(),
              AllOf(HasSubstr("kv_layout = LBNHD"), HasSubstr("LBHNC")));
  EXPECT_THAT(paths_of(one_group(kAttention, R"("num_blocks": 4, "key_schema": "other")")),
              ElementsAre("key_schema"));
  EXPECT_THAT(paths_of(one_group(
                  kAttention, R"("num_blocks": 4, "namespace": ")" + std::string(129, 'n') + "\"")),
              ElementsAre("namespace"));
}

TEST(CacheConfigJson, ABlockPoolNeedsMoreThanTheNullBlock) {
  EXPECT_THAT(paths_of(one_group(kAttention, R"("num_blocks": 1)")), ElementsAre("num_blocks"));
}

TEST(CacheConfigJson, TextThatIsNotJsonNamesLineAndColumn) {
  EXPECT_THAT(error_of("{\n  \"num_blocks\": 4,\n  oops\n}").what(), HasSubstr("line 3, column 3"));
  EXPECT_THAT(error_of("").what(), HasSubstr("line 1, column 1"));
  EXPECT_THAT(error_of("[]").what(), HasSubstr("an object with num_blocks and groups"));
  EXPECT_THAT(error_of("{\"num_blocks\": 1e999}").what(), HasSubstr("JSON text"));
  EXPECT_THAT(error_of("{\n \"namespace\": \"a\xff\"}").what(),
              AllOf(HasSubstr("line 2, column 17"), HasSubstr("UTF-8")));
  EXPECT_THAT(error_of("{\"num_blocks\": \xc3\xa9}").what(), HasSubstr("line 1, column"));
}

TEST(CacheConfigJson, SurvivesDeepNesting) {
  const std::string deep = std::string(200000, '[') + std::string(200000, ']');
  EXPECT_THAT(paths_of("{\"num_blocks\": " + deep + ", \"groups\": []}"),
              UnorderedElementsAre("num_blocks", "groups"));
}

class CacheConfigFile : public testing::Test {
 protected:
  void SetUp() override {
    directory_ =
        std::filesystem::temp_directory_path() / ("kvprism_config_" + std::to_string(::getpid()));
    std::filesystem::create_directories(directory_);
  }
  void TearDown() override { std::filesystem::remove_all(directory_); }

  std::string write(const std::string& text) const {
    const std::string path = (directory_ / "config.json").string();
    std::ofstream(path) << text;
    return path;
  }

  static Error error_of(const std::string& path) {
    try {
      cache_config_from_file(path, SpecRegistry::builtin());
    } catch (const Error& error) {
      return error;
    }
    ADD_FAILURE() << "accepted: " << path;
    return Error(ErrorCode::kClosed, "", {});
  }

  std::filesystem::path directory_;
};

TEST_F(CacheConfigFile, IsReadLikeTheText) {
  EXPECT_EQ(cache_config_from_file(write(kHybrid), SpecRegistry::builtin()), read(kHybrid));
}

TEST_F(CacheConfigFile, EveryErrorNamesThePath) {
  const std::string missing = (directory_ / "absent.json").string();
  EXPECT_EQ(error_of(missing).code(), ErrorCode::kNotFound);
  EXPECT_THAT(error_of(missing).what(), HasSubstr(missing));
  EXPECT_THAT(error_of(directory_.string()).what(),
              AllOf(HasSubstr(directory_.string()), HasSubstr("a directory")));
  const std::string broken = write("{");
  EXPECT_THAT(error_of(broken).what(), AllOf(HasSubstr(broken), HasSubstr("line 1, column 2")));
  const std::string empty = write("");
  EXPECT_THAT(error_of(empty).what(), HasSubstr(empty));
  EXPECT_EQ(error_of("").code(), ErrorCode::kNotFound);
}

TEST_F(CacheConfigFile, AnEndlessDeviceIsRefused) {
  EXPECT_THAT(error_of("/dev/zero").what(), HasSubstr("64 MiB"));
}

}  // namespace
}  // namespace kvprism
