#include "sim/world_config.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <utility>
#include <variant>

#include "kvprism/base/error.h"
#include "kvprism/group/projection.h"
#include "kvprism/sim/world.h"
#include "sim/world_stages.h"

namespace kvprism::sim {
namespace {

using detail::SeededRandom;

template <class T, std::size_t N>
T pick(SeededRandom& random, const std::array<T, N>& of) {
  return of[random.below(N)];
}

AttentionPayload attention(SeededRandom& random) {
  AttentionPayload payload;
  payload.num_kv_heads = static_cast<std::uint32_t>(random.between(1, 2));
  payload.head_size = static_cast<std::uint32_t>(random.between(1, 3));
  payload.head_size_v = static_cast<std::uint32_t>(random.between(0, 2));
  payload.dtype = pick(random, std::array{DType::kFloat16, DType::kInt8, DType::kFloat32});
  return payload;
}

// Of a kind, with the layout's letters still open.
CacheSpec spec_of(SeededRandom& random, const std::string& kind, std::uint32_t block_size) {
  CacheSpec spec;
  spec.kind = kind;
  spec.block_size = block_size;
  if (kind == "mamba") {
    StatePayload state;
    state.shapes = {{static_cast<std::uint32_t>(random.between(1, 4)), 3},
                    {static_cast<std::uint32_t>(random.between(2, 9))}};
    state.dtypes = {DType::kFloat32, DType::kBFloat16};
    state.cache_mode = "align";
    spec.payload = state;
    return spec;
  }
  AttentionPayload payload = attention(random);
  if (kind == "mla_attention" || kind == "hidden_state" || kind == "sliding_window_mla") {
    payload.num_kv_heads = 1;
    payload.head_size_v = 0;
  }
  spec.payload = payload;
  if (kind.starts_with("sliding_window"))
    spec.sliding_window = static_cast<std::uint32_t>(random.between(2, 3 * block_size));
  if (kind == "chunked_local_attention") {
    spec.attention_chunk_size = block_size * static_cast<std::uint32_t>(random.between(1, 4));
    if (random.chance(1, 4)) *spec.attention_chunk_size += block_size / 2;
  }
  if (kind == "rswa") spec.rswa_window = static_cast<std::uint32_t>(random.between(2, 20));
  if (kind == "sink_full_attention") spec.sink_len = block_size;
  if (kind == "circular_buffer" && random.chance(1, 2))
    spec.replay_tokens = static_cast<std::uint32_t>(random.between(1, block_size));
  return spec;
}

GroupConfig group(SeededRandom& random, const std::string& kind, std::uint32_t block_size,
                  std::size_t number) {
  GroupConfig config;
  config.spec = spec_of(random, kind, block_size);
  for (std::uint64_t layer = random.between(1, 3); layer > 0; --layer) {
    config.layers.push_back(kind.substr(0, 1) + std::to_string(number) + "." +
                            std::to_string(layer));
  }
  if (kind == "circular_buffer") config.enable_kv_transfer = random.chance(2, 3);
  return config;
}

// Layers of two page sizes that share their blocks.
void wrap(SeededRandom& random, GroupConfig& group) {
  CacheSpec other = group.spec;
  std::get<AttentionPayload>(other.payload).head_size +=
      static_cast<std::uint32_t>(random.between(0, 2));
  group.members = {{group.spec, group.layers}, {other, {group.layers[0] + "w"}}};
  group.layers.push_back(group.layers[0] + "w");
  group.spec = {};
  group.spec.kind = "uniform";
}

bool is_scratch(const GroupConfig& group) { return group.spec.kind == "circular_buffer"; }

const CacheSpec& first_spec(const GroupConfig& group) {
  return group.members.empty() ? group.spec : group.members[0].spec;
}

template <class Change>
void change_specs(GroupConfig& group, Change change) {
  if (group.members.empty()) change(group.spec);
  for (LayerSpec& member : group.members) change(member.spec);
}

std::uint32_t block_tokens(const GroupConfig& group, const CacheConfig& config) {
  return tokens_per_block(first_spec(group), config.parallel, world_registry());
}

// Hits inside blocks, where the groups allow it: of windows a block may not be larger than a hash,
// and no stored position may be cut.
void allow_partial_hits(SeededRandom& random, CacheConfig& config) {
  std::uint32_t unit = 0;
  std::uint32_t compression = 1;
  for (const GroupConfig& group : config.groups) {
    if (is_scratch(group)) continue;
    unit = std::gcd(unit, block_tokens(group, config));
    if (const auto* payload = std::get_if<AttentionPayload>(&first_spec(group).payload))
      compression = std::lcm(compression, payload->compression);
  }
  if (unit % (2 * compression) == 0 && random.chance(1, 2)) unit /= 2;
  if (unit % compression != 0 || unit < 2 || unit % config.parallel.dcp != 0) return;
  for (GroupConfig& group : config.groups) {
    const std::string& kind = first_spec(group).kind;
    if (!kind.starts_with("sliding_window") && kind != "chunked_local_attention") continue;
    const std::uint32_t window = static_cast<std::uint32_t>(random.between(2, 3 * unit));
    const std::uint32_t chunk = unit * static_cast<std::uint32_t>(random.between(1, 4));
    change_specs(group, [&](CacheSpec& spec) {
      auto& payload = std::get<AttentionPayload>(spec.payload);
      payload.compression = payload.states_per_token = 1;
      spec.page_size_padded.reset();
      spec.block_size = unit / config.parallel.dcp;
      if (spec.sliding_window) spec.sliding_window = window;
      if (spec.attention_chunk_size) spec.attention_chunk_size = chunk;
    });
  }
  config.hash_block_size = unit;
  config.cache_hit_alignment_tokens = unit;
}

// What makes tokens and stored positions two things, and pages longer than their content.
void reshape(SeededRandom& random, CacheConfig& config) {
  const bool splits_heads = config.kv_layout == "LHBNC" || config.kv_layout == "BHLNC";
  for (GroupConfig& group : config.groups) {
    if (is_scratch(group) || first_spec(group).kind == "mamba") continue;
    if (random.chance(1, 6) && group.members.empty()) wrap(random, group);
    const std::uint64_t roll = random.below(6);
    change_specs(group, [&](CacheSpec& spec) {
      auto& payload = std::get<AttentionPayload>(spec.payload);
      if (roll == 0 && spec.block_size % 2 == 0) {
        payload.compression = 2;
        spec.block_size /= 2;
      } else if (roll == 1) {
        payload.states_per_token = 2;
        spec.block_size *= 2;
      } else if (roll == 2 && !splits_heads) {
        spec.page_size_padded = unpadded_page_bytes(spec) + 5;
      }
    });
  }
}

// Tensor ranks that hold the same heads or states.
void replicate(SeededRandom& random, CacheConfig& config) {
  const std::uint32_t heads = config.parallel.tp / pick(random, std::array{1u, 2u, 2u});
  for (GroupConfig& group : config.groups) {
    if (is_scratch(group) || random.chance(1, 3)) continue;
    change_specs(group, [&](CacheSpec& spec) {
      if (auto* const state = std::get_if<StatePayload>(&spec.payload)) state->tp_replicated = true;
      auto* const attention = std::get_if<AttentionPayload>(&spec.payload);
      if (attention == nullptr || spec.page_size_padded) return;
      attention->num_kv_heads = 1;
      attention->total_num_kv_heads = std::max(1u, heads);
    });
  }
}

// Windows beside groups whose tokens decode context ranks share; attention chunks may be either,
// but where hits end inside blocks theirs hold one hash.
void share_tokens(SeededRandom random, CacheConfig& config) {
  const bool fine = config.hash_block_size.has_value();
  const bool fits = config.hash_block_size.value_or(2) % 2 == 0;
  if (config.parallel.tp == 1 || config.parallel.dcp > 1 || !fits || random.chance(1, 2)) return;
  bool windows = false;
  for (GroupConfig& group : config.groups) {
    const std::string kind = first_spec(group).kind;
    const bool window = kind.starts_with("sliding_window");
    windows |= window;
    const bool apart = kind == "chunked_local_attention" && (random.chance(1, 2) || fine);
    if (window || apart) change_specs(group, [](CacheSpec& spec) { spec.dcp_sharded = false; });
  }
  if (windows) config.parallel.dcp = 2;
}

// Rows and bytes that the engine says, where they do not follow from heads and elements.
void pack(SeededRandom random, CacheConfig& config) {
  for (GroupConfig& group : config.groups) {
    const auto rows = static_cast<std::uint32_t>(random.between(1, 3));
    const std::uint64_t bytes = random.between(1, 9);
    if (is_scratch(group) || !random.chance(1, 6)) continue;
    change_specs(group, [&](CacheSpec& spec) {
      auto* const payload = std::get_if<AttentionPayload>(&spec.payload);
      if (payload == nullptr || spec.page_size_padded) return;
      payload->num_head_slots = rows;
      payload->state_content_bytes = bytes;
    });
  }
}

// A kind that the engine has added, in the place of full attention.
void add_engine_kind(SeededRandom random, CacheConfig& config) {
  for (GroupConfig& group : config.groups) {
    const bool takes_place = random.chance(1, 5);
    const std::uint64_t bytes = random.between(1, 8);
    const bool alone = group.members.empty() && group.spec.kind == "full_attention";
    if (!takes_place || !alone || config.parallel.dcp > 1) continue;
    const std::uint32_t tokens = block_tokens(group, config);
    group.spec = {};
    group.spec.kind = "engine_prefix";
    group.spec.block_size = tokens;
    group.spec.payload = RawPayload{bytes * tokens};
  }
}

// Blocks of a state's table that hold no state of the prefix.
void add_extra_states(SeededRandom random, CacheConfig& config) {
  for (GroupConfig& group : config.groups) {
    auto* const state = std::get_if<StatePayload>(&group.spec.payload);
    if (state == nullptr || !random.chance(1, 3)) continue;
    state->num_speculative_blocks = static_cast<std::uint32_t>(random.between(1, 2));
    state->num_prefill_checkpoint_blocks = static_cast<std::uint32_t>(random.below(2));
  }
}

// Each of which has blocks of its own; only one stored group may be spread so.
void add_prefill_ranks(SeededRandom random, CacheConfig& config) {
  const auto stored = std::count_if(config.groups.begin(), config.groups.end(),
                                    [](const GroupConfig& group) { return !is_scratch(group); });
  if (stored == 1 && config.parallel.world() <= 2 && random.chance(1, 3)) config.parallel.pcp = 2;
}

using Kinds = std::vector<std::pair<std::string, std::uint32_t>>;

Kinds kinds_of(SeededRandom& random, std::uint32_t small, std::uint32_t large) {
  const std::uint32_t ring = static_cast<std::uint32_t>(random.between(3, 9));
  const auto size = [&] { return random.chance(1, 2) ? small : large; };
  switch (random.below(12)) {
    case 0:
    case 1:
      return {{"full_attention", size()}, {"circular_buffer", ring}, {"mamba", size()}};
    case 2:
      return {{"full_attention", size()}, {"sliding_window", size()}};
    case 3:
      return {{"full_attention", size()},
              {"circular_buffer", ring},
              {"sliding_window", size()},
              {"mamba", size()}};
    case 4:
      return {{"full_attention", size()}, {"circular_buffer", ring}};
    case 5:
      return {{"full_attention", small}, {"full_attention", large}, {"circular_buffer", ring}};
    case 6:
      return {{"sliding_window", size()}, {"circular_buffer", ring}, {"sliding_window", size()}};
    case 7:
      return {{"circular_buffer", ring},
              {"mamba", small},
              {"full_attention", size()},
              {"mamba", large}};
    default:
      break;
  }
  static constexpr std::array kAny{
      "mla_attention",       "hidden_state",   "rswa",
      "sink_full_attention", "full_attention", "chunked_local_attention",
      "sliding_window_mla",  "sliding_window", "mamba"};
  Kinds kinds{{"circular_buffer", ring}};
  for (std::uint64_t count = random.between(1, 3); count > 0; --count)
    kinds.emplace_back(pick(random, kAny), size());
  return kinds;
}

CacheConfig cache_config(SeededRandom& random) {
  struct Sizes {
    std::uint32_t small;
    std::uint32_t large;
  };
  const Sizes sizes = pick(random, std::array{Sizes{4, 8}, Sizes{8, 8}, Sizes{8, 16}, Sizes{4, 16},
                                              Sizes{6, 12}, Sizes{16, 32}});
  CacheConfig config;
  config.kv_layout = pick(
      random, std::array<std::string, 6>{"LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"});
  Kinds kinds = kinds_of(random, sizes.small, sizes.large);
  for (std::size_t i = kinds.size(); i > 1; --i) std::swap(kinds[i - 1], kinds[random.below(i)]);
  for (std::size_t i = 0; i < kinds.size(); ++i)
    config.groups.push_back(group(random, kinds[i].first, kinds[i].second, i));
  config.num_blocks = static_cast<std::uint32_t>(random.between(24, 64));
  config.parallel.tp = pick(random, std::array{1u, 1u, 1u, 2u, 2u, 4u});
  if (random.chance(1, 2)) reshape(random, config);
  const bool windows = std::any_of(config.groups.begin(), config.groups.end(), [](const auto& g) {
    return first_spec(g).sliding_window.has_value();
  });
  if (config.parallel.tp > 1 && !windows && random.chance(1, 3)) config.parallel.dcp = 2;
  if (random.chance(1, 2)) allow_partial_hits(random, config);
  if (config.parallel.tp > 1 && random.chance(1, 2)) replicate(random, config);
  config.key_namespace = random.chance(1, 2) ? "" : "tenant-" + std::to_string(random.below(9));
  return config;
}

// A cache that the reference's connector stores soundly: stored groups of one shape that overlay
// each other layer by layer, without a gap.
CacheConfig vllm_config(SeededRandom& random) {
  CacheConfig config;
  config.key_schema = "vllm";
  config.kv_layout =
      pick(random, std::array<std::string, 5>{"LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC"});
  config.num_blocks = static_cast<std::uint32_t>(random.between(24, 64));
  config.parallel.tp = pick(random, std::array{1u, 2u, 2u, 4u});
  const bool latent = random.chance(1, 3);
  const std::uint32_t heads = latent ? 1 : pick(random, std::array{1u, 2u, 4u});
  config.model_total_kv_heads = heads;
  const std::uint32_t block = pick(random, std::array{4u, 8u, 16u});
  AttentionPayload payload;
  payload.num_kv_heads = std::max(1u, heads / config.parallel.tp);
  payload.total_num_kv_heads = heads;
  payload.head_size = 2;
  payload.head_size_v = latent ? 0 : static_cast<std::uint32_t>(2 * random.below(2));
  payload.dtype = pick(random, std::array{DType::kFloat16, DType::kInt8, DType::kFloat32});
  const std::uint64_t layers = random.between(2, 3);
  const auto add = [&](const std::string& kind) {
    GroupConfig& group = config.groups.emplace_back();
    group.spec.kind = kind;
    group.spec.block_size = block;
    group.spec.payload = payload;
    if (kind.starts_with("sliding_window"))
      group.spec.sliding_window = static_cast<std::uint32_t>(random.between(2, 3 * block));
    if (kind == "circular_buffer")
      group.spec.block_size = static_cast<std::uint32_t>(random.between(3, block));
    const std::string name = kind.substr(0, 1) + std::to_string(config.groups.size()) + ".";
    for (std::uint64_t layer = 0; layer < layers; ++layer)
      group.layers.push_back(name + std::to_string(layer));
  };
  for (std::uint64_t more = random.between(1, 2); more > 0; --more)
    add(latent ? "mla_attention" : "full_attention");
  for (std::uint64_t more = random.below(3); more > 0; --more)
    add(latent ? "sliding_window_mla" : "sliding_window");
  if (random.chance(1, 2)) add("circular_buffer");
  for (std::size_t i = config.groups.size(); i > 1; --i)
    std::swap(config.groups[i - 1], config.groups[random.below(i)]);
  config.key_namespace = random.chance(1, 2) ? "" : "tenant-" + std::to_string(random.below(9));
  return config;
}

// What some engines tell of the whole cache: drafts, retention, stages.
void add_engine_facts(SeededRandom& random, CacheConfig& config) {
  if (random.chance(1, 4)) {
    for (GroupConfig& group : config.groups) group.is_eagle_group = random.chance(1, 2);
    if (random.chance(1, 3)) config.use_eagle = random.chance(3, 4);
  }
  if (random.chance(1, 3)) {
    const std::uint32_t step = Projection::make(config, world_registry())->scheduler_block_size();
    config.prefix_cache_retention_interval = static_cast<std::uint32_t>(random.below(4)) * step;
  }
  if (config.parallel.tp == 1) config.parallel.pp = pick(random, std::array{1u, 1u, 1u, 2u, 3u});
  if (config.parallel.tp == 2) config.parallel.pp = pick(random, std::array{1u, 1u, 2u});
}

// Where windows end is decided by what others have stored too: met more often. A draw of its own
// leaves all others as they are.
void retain_windows(SeededRandom random, CacheConfig& config) {
  const auto has = [&](std::string_view kind) {
    return std::any_of(config.groups.begin(), config.groups.end(),
                       [&](const GroupConfig& group) { return first_spec(group).kind == kind; });
  };
  if (has("sliding_window") && has("full_attention") && random.chance(1, 2))
    config.prefix_cache_retention_interval = 0;
}

// A token that attends to nothing before it.
void narrow_windows(SeededRandom random, CacheConfig& config) {
  for (GroupConfig& group : config.groups) {
    const bool narrow = random.chance(1, 6);
    if (!narrow || !first_spec(group).sliding_window) continue;
    change_specs(group, [](CacheSpec& spec) { spec.sliding_window = 1; });
  }
}

// Two groups of one spec, one of which holds a draft's layers, and nobody has said whether the
// engine drops blocks: what the flag asks for, it asks for of both.
void flag_a_twin(SeededRandom random, CacheConfig& config) {
  if (!random.chance(1, 6) || config.parallel.pcp > 1) return;
  const auto window =
      std::find_if(config.groups.begin(), config.groups.end(), [](const GroupConfig& group) {
        return group.members.empty() && group.spec.sliding_window.has_value();
      });
  if (window == config.groups.end()) return;
  GroupConfig twin = *window;
  for (std::string& layer : twin.layers) layer += "t";
  const bool first = random.chance(1, 2);
  window->is_eagle_group = first;
  twin.is_eagle_group = !first;
  config.groups.push_back(std::move(twin));
  config.use_eagle.reset();
}

// A window keeps as much longer as drafts may be accepted at once.
void allow_drafts(SeededRandom& random, WorldConfig& config) {
  if (!random.chance(1, 3)) return;
  config.engine.draft_tokens = static_cast<std::uint32_t>(random.between(1, 3));
  for (GroupConfig& group : config.cache.groups) {
    if (!first_spec(group).sliding_window) continue;
    change_specs(group,
                 [&](CacheSpec& spec) { spec.extra_retained_tokens = config.engine.draft_tokens; });
  }
}

// A few kinds of fault at a time, so that each of them meets an otherwise working house as well.
FaultPlan fault_plan(SeededRandom& random) {
  FaultPlan plan;
  plan.seed = random.next();
  plan.delay = milliseconds(static_cast<std::int64_t>(random.between(1, 30)));
  plan.late = milliseconds(static_cast<std::int64_t>(random.between(5, 150)));
  plan.lookup_late = milliseconds(static_cast<std::int64_t>(random.between(5, 80)));
  const bool everything = random.chance(1, 4);
  for (std::size_t i = 0; i <= static_cast<std::size_t>(FaultKind::kRemoveFailed); ++i) {
    if (static_cast<FaultKind>(i) == FaultKind::kSilentCorrupt) continue;
    if (everything || random.chance(1, 4)) {
      plan.chance[i] = static_cast<std::uint16_t>(random.between(30, everything ? 200 : 1000));
    }
  }
  // Removals are rare.
  std::uint16_t& removals = plan[FaultKind::kRemoveFailed];
  removals = static_cast<std::uint16_t>(removals * 5);
  return plan;
}

void add_later_faults(SeededRandom random, WorldConfig& config) {
  const auto chance = [&](std::uint64_t from, std::uint64_t to) {
    return static_cast<std::uint16_t>(random.chance(1, 4) ? random.between(from, to) : 0);
  };
  config.faults[FaultKind::kLostAnswer] = chance(30, 1000);
  config.faults[FaultKind::kReadLate] = chance(30, 2000);
  config.faults[FaultKind::kRemoveLate] = chance(1000, 5000);
  config.faults[FaultKind::kClientLost] = chance(20, 150);
  config.faults.lands_after_close = random.chance(1, 2);
  LaterFaults& later = config.later;
  later.lag = random.chance(1, 3);
  later.lose_reports = random.chance(1, 4);
  later.lose_plans = random.chance(1, 4);
  later.ranks_die = random.chance(1, 4);
  later.restrict_late = random.chance(1, 4);
  config.engine.resume_at_once = random.chance(1, 4);
  config.worker.only = random.chance(1, 2);
}

// So that a mistake can be shown to need one kind of fault. All draws stay as they are.
void leave_out(std::string_view kind, WorldConfig& config) {
  if (kind.empty()) return;
  for (std::size_t i = 0; i < kNumFaultKinds; ++i) {
    if (to_string(static_cast<FaultKind>(i)) != kind) continue;
    config.faults.chance[i] = 0;
    return;
  }
  LaterFaults& later = config.later;
  const std::pair<WorldFault, bool*> others[] = {
      {WorldFault::kLag, &later.lag},
      {WorldFault::kReportLost, &later.lose_reports},
      {WorldFault::kPlanLost, &later.lose_plans},
      {WorldFault::kRankGone, &later.ranks_die},
      {WorldFault::kRestrictedLate, &later.restrict_late}};
  for (const auto& [fault, wanted] : others) {
    if (to_string(fault) != kind) continue;
    *wanted = false;
    return;
  }
  fail(ErrorCode::kInvalidArgument, "simulated world",
       {"without", std::string(kind), "a kind of fault that can be left out", {}});
}

std::string dashes(bool value, const std::string& word) { return value ? ", " + word : ""; }

}  // namespace

const SpecRegistry& world_registry() {
  static const SpecRegistry registry = SpecRegistry::builtin().with({
      .name = "engine_prefix",
      .payload = PayloadKind::kRaw,
      .needs = ParameterSet{},
      .allows = ParameterSet{},
      .dcp_sharded = false,
      .latent = true,
      .traits = [](const CacheSpec&) -> SpecTraits {
        return {.prefix_cacheable = true,
                .hit = HitRule::kPrefix,
                .window = 0,
                .save = SaveRule::kPositional,
                .peer = PeerRule::kSuffix,
                .replay_tokens = 0,
                .fine_grained_lookup = true};
      },
  });
  return registry;
}

WorldConfig make_world_config(std::uint64_t seed, std::string_view without) {
  SeededRandom random(seed * 0x9e3779b97f4a7c15ull + 0x5eed);
  WorldConfig config;
  config.cache = random.chance(1, 8) ? vllm_config(random) : cache_config(random);
  const bool ours = config.cache.key_schema != "vllm";
  if (ours) {
    share_tokens(SeededRandom(seed ^ 0x7368617265ull), config.cache);
    pack(SeededRandom(seed ^ 0x7061636bull), config.cache);
    add_engine_kind(SeededRandom(seed ^ 0x6b696e64ull), config.cache);
    add_extra_states(SeededRandom(seed ^ 0x7374617465ull), config.cache);
  }
  add_engine_facts(random, config.cache);
  if (ours) add_prefill_ranks(SeededRandom(seed ^ 0x706370ull), config.cache);
  retain_windows(SeededRandom(seed ^ 0x77696e646f77ull), config.cache);
  narrow_windows(SeededRandom(seed ^ 0x6e6172726f77ull), config.cache);
  if (ours) flag_a_twin(SeededRandom(seed ^ 0x7477696eull), config.cache);
  allow_drafts(random, config);
  config.stages = cut_into_stages(random, config.cache);
  config.clean = random.chance(1, 4);

  config.engine.local_cache = random.chance(1, 2);
  config.engine.token_budget = static_cast<std::uint32_t>(random.between(8, 72));
  config.engine.max_running = static_cast<std::uint32_t>(random.between(1, 5));
  config.engine.keep_blocks_of_aborted_loads = random.chance(1, 2);
  config.engine.offer_states_late = random.chance(1, 3);
  config.engine.aligned_steps = random.chance(3, 4);

  StoreSchedulerOptions& scheduler = config.scheduler;
  scheduler.tell_changes = random.chance(1, 2);
  scheduler.lookup_timeout = milliseconds(static_cast<std::int64_t>(random.between(5, 60)));
  scheduler.lookup_fresh_for = milliseconds(static_cast<std::int64_t>(random.between(10, 200)));
  scheduler.load_timeout = milliseconds(static_cast<std::int64_t>(random.between(15, 200)));
  scheduler.save_timeout = milliseconds(static_cast<std::int64_t>(random.between(20, 150)));
  scheduler.quarantine_after = milliseconds(static_cast<std::int64_t>(random.between(5, 100)));
  scheduler.detach_quarantined_loads = random.chance(1, 2);
  scheduler.saved_fresh_for = milliseconds(static_cast<std::int64_t>(random.between(1, 400)));
  scheduler.purge_settle = milliseconds(static_cast<std::int64_t>(random.between(1, 40)));
  scheduler.backoff = milliseconds(static_cast<std::int64_t>(random.between(5, 60)));
  scheduler.avoid_failed_for = milliseconds(static_cast<std::int64_t>(random.between(1, 300)));
  if (random.chance(1, 4))
    scheduler.max_held_percent = static_cast<std::uint32_t>(random.between(1, 50));

  StoreWorkerOptions& worker = config.worker;
  worker.max_segments_per_call = static_cast<std::uint32_t>(random.between(1, 24));
  worker.max_bytes_per_call = random.between(64, 4096);
  worker.max_gets_in_flight = static_cast<std::uint32_t>(random.between(1, 4));
  worker.max_puts_in_flight = static_cast<std::uint32_t>(random.between(1, 3));
  if (random.chance(1, 3)) worker.max_bytes_in_flight = random.between(64, 8192);

  config.store.latency = Duration{static_cast<std::int64_t>(random.below(3'000'000))};
  config.store.latency_per_kib = Duration{static_cast<std::int64_t>(random.below(2'000'000))};
  config.pool.unfinished_for = milliseconds(200);
  config.faults = fault_plan(random);
  config.hold_reports = random.chance(2, 3);
  config.reorder_reports = random.chance(1, 3);
  config.erase_objects = random.chance(1, 3);
  if (random.chance(1, 3)) {
    config.pool.capacity_bytes = random.between(8'000, 80'000);
    config.pool.evict = random.chance(1, 2);
  }
  if (random.chance(1, 8))
    config.store.lease = Duration{static_cast<std::int64_t>(random.between(1'000'000, 6'000'000))};
  config.memory.guard_bytes = static_cast<std::uint32_t>(8 * random.between(1, 3));
  config.memory.shadow = true;
  config.memory.split_tensors = random.chance(1, 3);
  config.memory.kernel_blocks = random.chance(1, 3);
  if (config.cache.key_schema == "vllm") {
    config.memory.guard_bytes = 0;
    config.memory.split_tensors = config.memory.kernel_blocks = false;
  }
  config.max_requests = static_cast<std::uint32_t>(random.between(2, 8));
  config.max_prompt = static_cast<std::uint32_t>(random.between(40, 140));
  config.max_new_tokens = static_cast<std::uint32_t>(random.between(1, 30));
  config.families = static_cast<std::uint32_t>(random.between(1, 4));

  add_later_faults(SeededRandom(seed ^ 0x6c61746572ull), config);

  if (config.clean) {
    SeededRandom interrupted(seed ^ 0x616761696eull);
    config.purges = interrupted.chance(1, 3);
    config.replaces_ranks = interrupted.chance(1, 3);
    // Nothing may be lost here, so no bound may pass either.
    config.faults = FaultPlan{};
    config.later = {.lag = config.later.lag};
    config.pool = MemoryPoolOptions{};
    config.pool.unfinished_for = {};  // what a restart cut off may be written again
    config.store.lease = {};
    config.erase_objects = false;
    scheduler.lookup_timeout = scheduler.load_timeout = scheduler.save_timeout = seconds(3600);
    scheduler.quarantine_after = scheduler.lookup_fresh_for = seconds(3600);
    scheduler.saved_fresh_for = seconds(3600);
    scheduler.max_held_percent = 100;
  }
  leave_out(without, config);
  return config;
}

std::string WorldConfig::describe() const {
  std::string text =
      std::to_string(cache.num_blocks) + " blocks" +
      (cache.parallel.tp > 1 ? ", " + std::to_string(cache.parallel.tp) + " ranks" : "") +
      (cache.parallel.pp > 1 ? ", " + std::to_string(cache.parallel.pp) + " stages" : "") +
      (cache.parallel.pcp > 1 ? ", 2 prefill ranks" : "") +
      (cache.parallel.dcp > 1 ? " that share tokens:" : ":");
  text += " " + cache.kv_layout;
  for (const GroupConfig& group : cache.groups) {
    const CacheSpec& spec = first_spec(group);
    text += group.members.empty() ? " " : " uniform ";
    text += spec.kind + "(" + std::to_string(spec.block_size);
    if (const auto* payload = std::get_if<AttentionPayload>(&spec.payload)) {
      if (payload->compression > 1) text += " compressed";
      if (payload->states_per_token > 1) text += " doubled";
      if (payload->num_head_slots) text += " packed";
    }
    if (cache.parallel.dcp > 1 && spec.dcp_sharded == false) text += " not shared";
    if (spec.page_size_padded) text += " padded";
    if (spec.sliding_window) text += " window " + std::to_string(*spec.sliding_window);
    if (spec.attention_chunk_size) text += " chunk " + std::to_string(*spec.attention_chunk_size);
    if (spec.rswa_window) text += " window " + std::to_string(*spec.rswa_window);
    if (spec.replay_tokens) text += " replay " + std::to_string(*spec.replay_tokens);
    if (!group.enable_kv_transfer) text += " not transferred";
    if (group.is_eagle_group) text += " draft";
    for (const std::uint32_t stage : group.pipeline_stages.value_or(std::vector<std::uint32_t>{}))
      text += " stage " + std::to_string(stage);
    text += ")x" + std::to_string(group.layers.size());
  }
  if (cache.cache_hit_alignment_tokens) {
    text += "; hits in steps of " + std::to_string(*cache.cache_hit_alignment_tokens);
  }
  if (cache.use_eagle) text += *cache.use_eagle ? "; drafts" : "; no drafts";
  if (cache.prefix_cache_retention_interval)
    text += "; retention " + std::to_string(*cache.prefix_cache_retention_interval);
  if (engine.draft_tokens != 0) text += "; proposes " + std::to_string(engine.draft_tokens);
  text += "; budget " + std::to_string(engine.token_budget) + ", running " +
          std::to_string(engine.max_running);
  if (worker.max_bytes_in_flight != 0)
    text += ", " + std::to_string(worker.max_bytes_in_flight) + " bytes in flight";
  text += dashes(worker.only, "only workers");
  if (scheduler.max_held_percent < 100)
    text += ", jobs hold " + std::to_string(scheduler.max_held_percent) + "%";
  text += dashes(memory.split_tensors, "split tensors") +
          dashes(memory.kernel_blocks, "kernel blocks") +
          dashes(engine.local_cache, "local cache") + dashes(scheduler.tell_changes, "events") +
          dashes(cache.key_schema == "vllm", "keys of vllm") +
          dashes(engine.offer_states_late, "late offers") +
          dashes(!engine.aligned_steps, "steps end anywhere") +
          dashes(engine.keep_blocks_of_aborted_loads, "aborted loads keep blocks") +
          dashes(scheduler.detach_quarantined_loads, "detached loads") + dashes(clean, "clean") +
          dashes(purges, "purges") + dashes(replaces_ranks, "ranks replaced") +
          dashes(hold_reports, "held reports") + dashes(reorder_reports, "reordered reports") +
          dashes(engine.resume_at_once, "resumes at once") + dashes(later.lag, "ranks lag") +
          dashes(later.lose_reports, "lost reports") + dashes(later.lose_plans, "lost plans") +
          dashes(later.ranks_die, "ranks die") + dashes(later.restrict_late, "late restrictions") +
          dashes(faults.lands_after_close, "calls outlive their client");
  if (pool.capacity_bytes != 0) {
    text += ", pool of " + std::to_string(pool.capacity_bytes) +
            (pool.evict ? " bytes with eviction" : " bytes");
  }
  for (std::size_t i = 0; i < kNumFaultKinds; ++i) {
    if (faults.chance[i] == 0) continue;
    text += ", " + std::string(to_string(static_cast<FaultKind>(i))) + " " +
            std::to_string(faults.chance[i] / 100) + "%";
  }
  return text;
}

}  // namespace kvprism::sim
