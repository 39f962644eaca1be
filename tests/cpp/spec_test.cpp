#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <stdexcept>

#include "kvprism/base/error.h"
#include "kvprism/spec/cache_spec.h"
#include "kvprism/spec/spec_registry.h"

namespace kvprism {
namespace {

using testing::ElementsAre;
using testing::ElementsAreArray;
using testing::HasSubstr;
using testing::IsEmpty;

CacheSpec attention(std::uint32_t block_size) {
  CacheSpec spec;
  spec.kind = "full_attention";
  spec.block_size = block_size;
  spec.payload = AttentionPayload{
      .num_kv_heads = 2, .head_size = 64, .head_size_v = 64, .dtype = DType::kBFloat16};
  return spec;
}

CacheSpec ring(std::uint32_t capacity) {
  CacheSpec spec = attention(capacity);
  spec.kind = "circular_buffer";
  return spec;
}

CacheSpec mamba(std::uint32_t block_size, std::string mode = "align") {
  CacheSpec spec;
  spec.kind = "mamba";
  spec.block_size = block_size;
  spec.payload =
      StatePayload{{{4, 32}, {3, 5}}, {DType::kFloat32, DType::kBFloat16}, std::move(mode)};
  return spec;
}

std::vector<Problem> problems_of(const CacheSpec& spec,
                                 const SpecRegistry& registry = SpecRegistry::builtin()) {
  ProblemList problems;
  registry.check(spec, "groups[0]", problems);
  return problems.problems();
}

std::vector<std::string> paths_of(const CacheSpec& spec) {
  std::vector<std::string> paths;
  for (const Problem& problem : problems_of(spec)) paths.push_back(problem.path);
  return paths;
}

template <class F>
Error error_of(F&& call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "nothing was thrown";
  return Error(ErrorCode::kClosed, "", {});
}

// R64: leaving out any member does not compile, not even inside an aggregate.
template <class T>
concept TakesAllTraits = requires {
  T{.prefix_cacheable = true,
    .hit = HitRule::kPrefix,
    .window = 0U,
    .save = SaveRule::kPositional,
    .peer = PeerRule::kSuffix,
    .replay_tokens = 0U,
    .fine_grained_lookup = true};
};
template <class T>
concept TakesTraitsWithoutTheFirst = requires {
  T{.hit = HitRule::kPrefix,
    .window = 0U,
    .save = SaveRule::kPositional,
    .peer = PeerRule::kSuffix,
    .replay_tokens = 0U,
    .fine_grained_lookup = true};
};
template <class T>
concept TakesTraitsWithoutReplay = requires {
  T{.prefix_cacheable = true,
    .hit = HitRule::kPrefix,
    .window = 0U,
    .save = SaveRule::kPositional,
    .peer = PeerRule::kSuffix,
    .fine_grained_lookup = true};
};
template <class T, class... Members>
concept Takes = requires(Members... members) { T{members...}; };

static_assert(TakesAllTraits<SpecTraits>);
static_assert(!TakesTraitsWithoutTheFirst<SpecTraits>);
static_assert(!TakesTraitsWithoutReplay<SpecTraits>);
static_assert(
    Takes<SpecTraits, bool, HitRule, std::uint32_t, SaveRule, PeerRule, std::uint32_t, bool>);
static_assert(!Takes<SpecTraits, bool, HitRule, std::uint32_t, SaveRule, PeerRule, std::uint32_t>);
static_assert(!Takes<SpecTraits, bool, HitRule, std::uint32_t, SaveRule, PeerRule>);
static_assert(!Takes<SpecTraits, bool, HitRule, std::uint32_t, SaveRule>);
static_assert(!Takes<SpecTraits, bool, HitRule, std::uint32_t>);
static_assert(!Takes<SpecTraits, bool, HitRule>);
static_assert(!Takes<SpecTraits, bool>);
static_assert(!Takes<SpecTraits>);
static_assert(Takes<SpecKind, std::string, PayloadKind, ParameterSet, ParameterSet, bool, bool>);
static_assert(!Takes<SpecKind, std::string, PayloadKind, ParameterSet, ParameterSet, bool>);
static_assert(!Takes<SpecKind, std::string, PayloadKind, ParameterSet, ParameterSet>);
static_assert(!Takes<SpecKind, std::string, PayloadKind, ParameterSet>);
static_assert(!Takes<SpecKind, std::string, PayloadKind>);
static_assert(!Takes<SpecKind, std::string>);

TEST(DTypes, NamesRoundTripAndHaveASize) {
  for (const std::string_view name : dtype_names()) {
    const auto dtype = dtype_from_string(name);
    ASSERT_TRUE(dtype) << name;
    EXPECT_EQ(to_string(*dtype), name);
    EXPECT_GT(size_of(*dtype), 0U) << name;
  }
  EXPECT_EQ(size_of(DType::kFloat8E4M3), 1U);
  EXPECT_EQ(size_of(DType::kInt64), 8U);
  EXPECT_FALSE(dtype_from_string("bf16"));
}

TEST(PageBytes, OfAttentionIsHeadsTimesPositionsTimesContent) {
  EXPECT_EQ(unpadded_page_bytes(attention(16)), 2U * 16 * (64 + 64) * 2);
  CacheSpec latent = attention(16);
  std::get<AttentionPayload>(latent.payload).head_size_v = 0;
  EXPECT_EQ(page_size_bytes(latent), 2U * 16 * 64 * 2);
}

TEST(PageBytes, OfStatesIsTheSumOverTensors) {
  EXPECT_EQ(unpadded_page_bytes(mamba(800)), 4U * 32 * 4 + 3 * 5 * 2);
}

TEST(PageBytes, PaddingCountsForTheEngineOnly) {
  CacheSpec spec = attention(16);
  spec.page_size_padded = 10000;
  EXPECT_EQ(page_size_bytes(spec), 10000U);
  EXPECT_EQ(unpadded_page_bytes(spec), 8192U);
}

// An engine that packs says how many rows a position has and how long one is.
TEST(PageBytes, FollowTheDeclaredPacking) {
  CacheSpec spec = attention(64);
  spec.kind = "mla_attention";
  auto& payload = std::get<AttentionPayload>(spec.payload);
  payload.num_kv_heads = 1;
  payload.state_content_bytes = 656;
  EXPECT_EQ(page_axes(spec), (PageAxes{1, 64, 656}));
  payload.num_head_slots = 2;
  EXPECT_EQ(unpadded_page_bytes(spec), 2U * 64 * 656);
  EXPECT_THAT(problems_of(spec), IsEmpty());
  payload.state_content_bytes = 0;
  payload.num_head_slots = 0;
  EXPECT_THAT(paths_of(spec),
              ElementsAre("groups[0].num_head_slots", "groups[0].state_content_bytes"));
  EXPECT_EQ(page_axes(mamba(800)), (PageAxes{1, 1, 542}));
}

// R15: a ring of integers and keys is bytes, and sizes count bytes.
TEST(PageBytes, OfOpaqueContentAreItsBytes) {
  CacheSpec spec = ring(8);
  spec.payload = AttentionPayload{
      .num_kv_heads = 1, .head_size = 8 + 128 * 2, .head_size_v = 0, .dtype = DType::kOpaque};
  EXPECT_THAT(problems_of(spec), IsEmpty());
  EXPECT_EQ(page_size_bytes(spec), 8U * (8 + 256));
}

TEST(PageBytes, SaturateInsteadOfWrapping) {
  CacheSpec spec = attention(0xFFFFFFFF);
  spec.payload = AttentionPayload{0xFFFFFFFF, 0, 0xFFFFFFFF, 0xFFFFFFFF, DType::kFloat32, 1};
  EXPECT_EQ(unpadded_page_bytes(spec), ~std::uint64_t{0});
  EXPECT_THAT(paths_of(spec), ElementsAre("groups[0].page_size_bytes"));
}

// R26: 128 stored positions, compressed by 4, spread over 2.
TEST(TokensPerBlock, CountsCompressionAndContextRanks) {
  const SpecRegistry registry = SpecRegistry::builtin();
  CacheSpec spec = attention(128);
  std::get<AttentionPayload>(spec.payload).compression = 4;
  EXPECT_EQ(3 * tokens_per_block(spec, {}, registry), 1536U);
  EXPECT_EQ(3 * tokens_per_block(spec, {.tp = 2, .dcp = 2}, registry), 3072U);
  std::get<AttentionPayload>(spec.payload).compression = 0;
  EXPECT_THAT(paths_of(spec), ElementsAre("groups[0].compression"));
}

TEST(TokensPerBlock, ContextRanksSpreadOnlyWhatIsSharded) {
  const SpecRegistry registry = SpecRegistry::builtin();
  const ParallelSizes parallel{.tp = 4, .dcp = 4};
  EXPECT_EQ(tokens_per_block(attention(16), parallel, registry), 64U);
  EXPECT_EQ(tokens_per_block(mamba(800), parallel, registry), 800U);
  EXPECT_EQ(tokens_per_block(ring(8), parallel, registry), 8U);
}

// A spec's own word on context ranks goes before its kind's.
TEST(TokensPerBlock, ASpecMaySayThatContextRanksDoNotShareIt) {
  const SpecRegistry registry = SpecRegistry::builtin();
  const ParallelSizes parallel{.tp = 4, .dcp = 4};
  CacheSpec spec = attention(16);
  spec.dcp_sharded = false;
  EXPECT_EQ(tokens_per_block(spec, parallel, registry), 16U);
  spec = ring(8);
  spec.dcp_sharded = true;
  EXPECT_EQ(tokens_per_block(spec, parallel, registry), 32U);
}

// Pooled encoder blocks keep several positions of one token.
TEST(TokensPerBlock, CountsSeveralStatesOfAToken) {
  const SpecRegistry registry = SpecRegistry::builtin();
  CacheSpec spec = attention(64);
  auto& payload = std::get<AttentionPayload>(spec.payload);
  payload.states_per_token = 4;
  EXPECT_THAT(problems_of(spec), IsEmpty());
  EXPECT_EQ(tokens_per_block(spec, {.tp = 2, .dcp = 2}, registry), 32U);
  EXPECT_EQ(unpadded_page_bytes(spec), 2U * 64 * 128 * 2);
  payload.states_per_token = 3;
  EXPECT_THAT(paths_of(spec), ElementsAre("groups[0].states_per_token"));
  EXPECT_EQ(error_of([&] { tokens_per_block(spec, {}, registry); }).code(),
            ErrorCode::kInvalidConfig);
  payload.states_per_token = 4;
  payload.compression = 2;
  EXPECT_THAT(paths_of(spec), ElementsAre("groups[0].states_per_token"));
}

TEST(TokensPerBlock, RefusesAProductThatDoesNotFit) {
  const Error error = error_of([] {
    tokens_per_block(attention(0x7FFFFFFF), {.tp = 2, .dcp = 2}, SpecRegistry::builtin());
  });
  EXPECT_EQ(error.code(), ErrorCode::kInvalidConfig);
}

CacheSpec of_kind(std::string kind) {
  CacheSpec spec = attention(16);
  spec.kind = std::move(kind);
  if (spec.kind == "mamba") return mamba(800);
  if (spec.kind == "rswa") spec.rswa_window = 128;
  if (spec.kind == "sink_full_attention") spec.sink_len = 32;
  if (spec.kind == "chunked_local_attention") spec.attention_chunk_size = 8192;
  if (spec.kind == "sliding_window" || spec.kind == "sliding_window_mla")
    spec.sliding_window = 1024;
  if (spec.kind == "hisparse_hot" || spec.kind == "hisparse_resident")
    spec.payload = RawPayload{4096};
  if (spec.kind == "hisparse_hot") spec.blocks_per_request = 4;
  return spec;
}

TEST(Traits, OfTheBuiltinKinds) {
  const SpecRegistry registry = SpecRegistry::builtin();
  const SpecTraits prefix{true, HitRule::kPrefix, 0, SaveRule::kPositional, PeerRule::kSuffix, 0,
                          true};
  const SpecTraits window{true, HitRule::kWindow, 1024, SaveRule::kPositional, PeerRule::kWindow, 0,
                          false};
  const SpecTraits chunk{true, HitRule::kChunk, 8192, SaveRule::kPositional, PeerRule::kWindow, 0,
                         false};
  const SpecTraits state{true, HitRule::kLastState, 0, SaveRule::kHandOff, PeerRule::kState, 0,
                         true};
  const SpecTraits whole{false, HitRule::kNever, 0, SaveRule::kNever, PeerRule::kWhole, 0, false};
  const SpecTraits none{false, HitRule::kNever, 0, SaveRule::kNever, PeerRule::kNone, 0, false};
  const std::pair<const char*, SpecTraits> expected[] = {
      {"full_attention", prefix},       {"mla_attention", prefix},
      {"hidden_state", prefix},         {"rswa", prefix},
      {"sink_full_attention", prefix},  {"chunked_local_attention", chunk},
      {"sliding_window", window},       {"sliding_window_mla", window},
      {"circular_buffer", whole},       {"mamba", state},
      {"encoder_only_attention", none}, {"cross_attention", whole},
      {"hisparse_hot", none},           {"hisparse_resident", none},
  };
  std::vector<std::string> names;
  for (const auto& [kind, traits] : expected) {
    names.emplace_back(kind);
    EXPECT_THAT(problems_of(of_kind(kind)), IsEmpty()) << kind;
    EXPECT_EQ(registry.traits_of(of_kind(kind)), traits) << kind;
  }
  EXPECT_THAT(registry.names(), ElementsAreArray(names));
}

// A draft model looks back further than the window: W - 1 + extra tokens must be there.
TEST(Traits, AWindowCoversWhatDraftsRetain) {
  for (const char* const kind : {"sliding_window", "sliding_window_mla"}) {
    CacheSpec spec = of_kind(kind);
    spec.extra_retained_tokens = 3;
    EXPECT_THAT(problems_of(spec), IsEmpty());
    EXPECT_EQ(SpecRegistry::builtin().traits_of(spec).window, 1027U);
  }
}

TEST(Traits, ABoundedReplayKeepsAWindowOutOfTheStore) {
  CacheSpec spec = of_kind("sliding_window_mla");
  spec.bounded_replay = true;
  EXPECT_THAT(problems_of(spec), IsEmpty());
  EXPECT_EQ(
      SpecRegistry::builtin().traits_of(spec),
      (SpecTraits{false, HitRule::kNever, 0, SaveRule::kNever, PeerRule::kWindow, 1024, false}));
  spec.replay_tokens = 0;  // of an engine that goes back by itself
  EXPECT_THAT(problems_of(spec), IsEmpty());
  EXPECT_EQ(SpecRegistry::builtin().traits_of(spec).replay_tokens, 0U);
  spec.replay_tokens.reset();
  spec.kind = "sliding_window";
  EXPECT_THAT(paths_of(spec), ElementsAre("groups[0].bounded_replay"));
}

TEST(Traits, ARingMayDeclareItsRebuildDistance) {
  CacheSpec spec = ring(8);
  spec.replay_tokens = 8;
  EXPECT_EQ(SpecRegistry::builtin().traits_of(spec).replay_tokens, 8U);
  EXPECT_THAT(problems_of(spec), IsEmpty());
  CacheSpec other = attention(16);
  other.replay_tokens = 8;
  EXPECT_THAT(paths_of(other), ElementsAre("groups[0].replay_tokens"));
}

TEST(Traits, CompareWithoutAmbiguity) {
  const SpecTraits traits = SpecRegistry::builtin().traits_of(ring(8));
  EXPECT_TRUE(traits.hit == HitRule::kNever);
  EXPECT_TRUE(traits.replay_tokens == 0U);
  EXPECT_FALSE(traits.prefix_cacheable);
}

TEST(Registry, UnknownKindListsTheKnownOnes) {
  CacheSpec spec = attention(16);
  spec.kind = "ful_attention";
  const Error error = error_of([&] { SpecRegistry::builtin().traits_of(spec); });
  EXPECT_EQ(error.code(), ErrorCode::kInvalidConfig);
  EXPECT_THAT(error.what(), HasSubstr("full_attention, mla_attention, hidden_state, rswa, "));
  EXPECT_THAT(error.what(), HasSubstr("did you mean 'full_attention'?"));
  EXPECT_THAT(paths_of(spec), ElementsAre("groups[0].kind"));
}

// R02: the mode is declared; sizes say nothing about it.
TEST(Registry, AcceptsEveryDeclaredModeAndNoOther) {
  for (const char* const mode : {"none", "align", "all"})
    EXPECT_THAT(problems_of(mamba(800, mode)), IsEmpty());
  EXPECT_THAT(problems_of(mamba(1600)), IsEmpty());
  const std::vector<Problem> problems = problems_of(mamba(800, "aligned"));
  ASSERT_EQ(problems.size(), 1U);
  EXPECT_EQ(problems[0].path, "groups[0].mamba_cache_mode");
  EXPECT_EQ(problems[0].hint, "did you mean 'align'?");
}

TEST(Registry, TellsEveryProblemOfASpecAtOnce) {
  CacheSpec spec = attention(0);
  spec.payload = AttentionPayload{};
  spec.page_size_padded = 4;
  EXPECT_THAT(paths_of(spec),
              ElementsAre("groups[0].block_size", "groups[0].num_kv_heads", "groups[0].head_size"));

  CacheSpec state = mamba(800);
  state.payload = StatePayload{{{4, 0}, {}}, {DType::kFloat32}, "align"};
  EXPECT_THAT(paths_of(state),
              ElementsAre("groups[0].shapes[0][1]", "groups[0].shapes[1]", "groups[0].dtypes"));
}

TEST(Registry, RefusesSizesThatContradictEachOther) {
  CacheSpec spec = attention(16);
  spec.page_size_padded = 8191;
  EXPECT_THAT(paths_of(spec), ElementsAre("groups[0].page_size_padded"));
  spec.page_size_padded = 8192;
  EXPECT_THAT(problems_of(spec), IsEmpty());
  std::get<AttentionPayload>(spec.payload).total_num_kv_heads = 1;
  EXPECT_THAT(paths_of(spec), ElementsAre("groups[0].total_num_kv_heads"));
}

TEST(Registry, RefusesAWindowThatIsMissingOrHasNoUse) {
  CacheSpec spec = attention(16);
  spec.sliding_window = 128;
  EXPECT_THAT(paths_of(spec), ElementsAre("groups[0].sliding_window"));
  spec.kind = "sliding_window";
  EXPECT_THAT(problems_of(spec), IsEmpty());
  spec.sliding_window = 0;
  EXPECT_THAT(paths_of(spec), ElementsAre("groups[0].sliding_window"));
  spec.sliding_window.reset();
  EXPECT_THAT(paths_of(spec), ElementsAre("groups[0].sliding_window"));
}

// Each parameter is needed by some kinds, allowed for others and refused for the rest.
TEST(Registry, RefusesParametersThatAreMissingOrHaveNoUse) {
  struct Row {
    const char* kind;
    std::string path;
    std::optional<std::uint32_t> CacheSpec::* member;
  };
  const Row rows[] = {
      {"sliding_window", "groups[0].sliding_window", &CacheSpec::sliding_window},
      {"sliding_window_mla", "groups[0].sliding_window", &CacheSpec::sliding_window},
      {"chunked_local_attention", "groups[0].attention_chunk_size",
       &CacheSpec::attention_chunk_size},
      {"rswa", "groups[0].rswa_window", &CacheSpec::rswa_window},
      {"sink_full_attention", "groups[0].sink_len", &CacheSpec::sink_len},
      {"hisparse_hot", "groups[0].blocks_per_request", &CacheSpec::blocks_per_request},
  };
  for (const Row& row : rows) {
    CacheSpec spec = of_kind(row.kind);
    (spec.*row.member).reset();
    ASSERT_EQ(problems_of(spec).size(), 1U) << row.kind;
    EXPECT_EQ(problems_of(spec)[0].path, row.path);
    EXPECT_EQ(problems_of(spec)[0].hint, "kind '" + std::string(row.kind) + "' needs it");
    spec.*row.member = 0;
    EXPECT_THAT(paths_of(spec), ElementsAre(row.path)) << row.kind;
    CacheSpec other = attention(16);
    other.*row.member = 32;
    EXPECT_THAT(paths_of(other), ElementsAre(row.path)) << row.kind;
  }
  CacheSpec other = attention(16);
  other.extra_retained_tokens = 1;
  other.bounded_replay = true;
  EXPECT_THAT(paths_of(other),
              ElementsAre("groups[0].extra_retained_tokens", "groups[0].bounded_replay"));
  CacheSpec sink = of_kind("sink_full_attention");
  sink.sink_len = 24;
  EXPECT_THAT(paths_of(sink), ElementsAre("groups[0].sink_len"));
}

// In tokens, whatever positions stand for (vLLM: SinkFullAttentionManager).
TEST(Registry, ASinkIsWholeBlocksOfTokens) {
  CacheSpec sink = of_kind("sink_full_attention");
  sink.block_size = 8;
  sink.sink_len = 24;
  EXPECT_THAT(paths_of(sink), ElementsAre());
  auto& payload = std::get<AttentionPayload>(sink.payload);
  payload.compression = 2;  // blocks of 16 tokens
  EXPECT_THAT(paths_of(sink), ElementsAre("groups[0].sink_len"));
  sink.sink_len = 32;
  EXPECT_THAT(paths_of(sink), ElementsAre());
  payload.compression = 1;
  payload.states_per_token = 2;  // of 4
  sink.sink_len = 12;
  EXPECT_THAT(paths_of(sink), ElementsAre());
  sink.sink_len = 6;
  EXPECT_THAT(paths_of(sink), ElementsAre("groups[0].sink_len"));
  ProblemList problems;
  SpecRegistry::builtin().check(sink, "groups[0]", problems);
  EXPECT_EQ(problems.problems().front().expected, "a multiple of the 4 tokens of a block");
}

TEST(Registry, RefusesThePayloadOfAnotherKind) {
  CacheSpec spec = mamba(800);
  spec.kind = "full_attention";
  EXPECT_THAT(paths_of(spec), ElementsAre("groups[0].kind"));
}

SpecKind tail_kind(SpecTraits traits) {
  return SpecKind{.name = "pool_tail",
                  .payload = PayloadKind::kRaw,
                  .needs = ParameterSet{},
                  .allows = ParameterSet{},
                  .dcp_sharded = false,
                  .latent = false,
                  .traits = [traits](const CacheSpec&) { return traits; }};
}

TEST(Registry, TakesAnotherKindAtRunTimeAsANewValue) {
  const SpecRegistry before = SpecRegistry::builtin();
  const SpecRegistry after = before.with(
      tail_kind({false, HitRule::kNever, 0, SaveRule::kNever, PeerRule::kWhole, 4, false}));
  EXPECT_EQ(before.find("pool_tail"), nullptr);
  ASSERT_NE(after.find("pool_tail"), nullptr);
  CacheSpec spec;
  spec.kind = "pool_tail";
  spec.block_size = 4;
  spec.payload = RawPayload{512};
  EXPECT_THAT(problems_of(spec, after), IsEmpty());
  EXPECT_EQ(page_size_bytes(spec), 512U);
  EXPECT_EQ(after.traits_of(spec).replay_tokens, 4U);
}

TEST(Registry, RefusesATakenOrEmptyNameAndAMissingFunction) {
  const SpecRegistry registry = SpecRegistry::builtin();
  SpecKind kind = *registry.find("mamba");
  EXPECT_EQ(error_of([&] { registry.with(kind); }).code(), ErrorCode::kInvalidArgument);
  kind.name = "uniform";
  EXPECT_THAT(error_of([&] { registry.with(kind); }).what(), HasSubstr("it is the wrapper's"));
  kind.name.clear();
  kind.traits = nullptr;
  EXPECT_EQ(error_of([&] { registry.with(kind); }).problems().size(), 2U);
}

TEST(Registry, RefusesRulesThatThereAreNot) {
  CacheSpec spec;
  spec.kind = "pool_tail";
  spec.block_size = 4;
  spec.payload = RawPayload{512};
  const SpecTraits good = SpecRegistry::builtin().traits_of(ring(8));
  SpecTraits bad = good;
  bad.hit = static_cast<HitRule>(99);
  bad.peer = static_cast<PeerRule>(5);
  const auto problems = problems_of(spec, SpecRegistry::builtin().with(tail_kind(bad)));
  ASSERT_EQ(problems.size(), 2U);
  EXPECT_EQ(problems[0],
            (Problem{"groups[0].kind", "pool_tail", "a hit rule of 0 to 4", "hit is 99"}));
  EXPECT_EQ(problems[1],
            (Problem{"groups[0].kind", "pool_tail", "a peer rule of 0 to 4", "peer is 5"}));
  SpecKind kind = tail_kind(good);
  kind.payload = static_cast<PayloadKind>(3);
  EXPECT_STREQ(error_of([&] { SpecRegistry::builtin().with(kind); }).what(),
               "spec kind: payload = 3: expected one of attention, state, raw");
}

TEST(Registry, ATraitsFunctionThatThrowsIsAProblemOfItsKind) {
  CacheSpec spec;
  spec.kind = "pool_tail";
  spec.block_size = 4;
  spec.payload = RawPayload{512};
  SpecKind kind = tail_kind(SpecRegistry::builtin().traits_of(ring(8)));
  kind.traits = [](const CacheSpec&) -> SpecTraits { throw std::runtime_error("no idea"); };
  const auto problems = problems_of(spec, SpecRegistry::builtin().with(kind));
  ASSERT_EQ(problems.size(), 1U);
  EXPECT_EQ(problems[0],
            (Problem{"groups[0].kind", "pool_tail", "a traits function that never throws",
                     "it has thrown: no idea"}));
}

TEST(Registry, RefusesANameThatIsNotText) {
  SpecKind kind = tail_kind(SpecRegistry::builtin().traits_of(ring(8)));
  kind.name = "ta\xff";
  EXPECT_STREQ(error_of([&] { SpecRegistry::builtin().with(kind); }).what(),
               "spec kind: name = byte 2: expected UTF-8 text");
}

// A kind that may be stored but never hits would store for ever without any effect (R04).
TEST(Registry, RefusesTraitsThatContradictEachOther) {
  CacheSpec spec;
  spec.kind = "pool_tail";
  spec.block_size = 4;
  spec.payload = RawPayload{512};
  const SpecTraits bad[] = {
      {true, HitRule::kNever, 0, SaveRule::kPositional, PeerRule::kNone, 0, false},
      {true, HitRule::kPrefix, 0, SaveRule::kNever, PeerRule::kNone, 0, false},
      {false, HitRule::kPrefix, 0, SaveRule::kPositional, PeerRule::kNone, 0, false},
      {true, HitRule::kWindow, 0, SaveRule::kPositional, PeerRule::kNone, 0, false},
      {true, HitRule::kPrefix, 7, SaveRule::kPositional, PeerRule::kNone, 0, false},
      {true, HitRule::kWindow, 7, SaveRule::kPositional, PeerRule::kNone, 0, true},
      {true, HitRule::kChunk, 8, SaveRule::kPositional, PeerRule::kNone, 0, true},
      {false, HitRule::kNever, 0, SaveRule::kNever, PeerRule::kNone, 0, true},
  };
  for (const SpecTraits& traits : bad) {
    EXPECT_EQ(problems_of(spec, SpecRegistry::builtin().with(tail_kind(traits))).size(), 1U);
  }
}

TEST(Registry, RefusesHitsInsideBlocksOfAWindow) {
  CacheSpec spec;
  spec.kind = "pool_tail";
  spec.block_size = 4;
  spec.payload = RawPayload{512};
  const SpecTraits window{true, HitRule::kWindow, 7, SaveRule::kPositional, PeerRule::kNone, 0,
                          true};
  const auto problems = problems_of(spec, SpecRegistry::builtin().with(tail_kind(window)));
  ASSERT_EQ(problems.size(), 1U);
  EXPECT_EQ(problems[0].path, "groups[0].kind");
  EXPECT_EQ(problems[0].value, "pool_tail");
  EXPECT_EQ(problems[0].expected, "fine_grained_lookup false for hit rule window");
}

}  // namespace
}  // namespace kvprism
