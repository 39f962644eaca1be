#include "kvprism/key/key_schema.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <numeric>
#include <utility>
#include <variant>

#include "base/utf8.h"
#include "group/hash128.h"
#include "key/group_facts.h"
#include "key/hex.h"
#include "kvprism/base/error.h"

namespace kvprism {

struct KeySchema::Impl {
  struct Group {
    std::uint32_t replicas = 1;
    std::uint32_t tp_shards = 1;
    std::vector<RankPosition> shards;     // those that hold the group
    std::vector<RankPosition> positions;  // of all ranks
    std::vector<std::string> prefixes;    // everything before the hash, by position

    void add(const RankPosition& at, std::string prefix, bool held) {
      positions.push_back(at);
      prefixes.push_back(std::move(prefix));
      if (held) shards.push_back(at);
    }
  };

  [[gnu::always_inline]] inline const std::string& checked_prefix(StoreIndex group,
                                                                  const RankPosition& shard,
                                                                  std::size_t hash_width) const;

  std::string_view name;
  std::shared_ptr<const Projection> projection;
  std::uint32_t pcp = 1;
  std::vector<DigestFact> facts;
  std::string fingerprint;
  std::string prefix;
  KeyFacts given;
  IndexedVector<StoreIndex, Group> groups;
};

namespace {

constexpr std::string_view kSchemaVersion = "2";

std::string escaped(std::string_view name) {
  if (name.empty()) return "-";
  if (name == "-") return "%2D";
  std::string text;
  for (const char c : name) {
    const bool plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                       c == '.' || c == '_' || c == '-' || c == '@';
    if (plain) {
      text += c;
    } else {
      constexpr std::string_view digits = "0123456789ABCDEF";
      const auto byte = static_cast<unsigned char>(c);
      text += '%';
      text += digits[byte >> 4];
      text += digits[byte & 15];
    }
  }
  return text;
}

std::string shape_text(const StatePayload& state) {
  std::string text;
  for (std::size_t i = 0; i < state.shapes.size(); ++i) {
    if (i != 0) text += "; ";
    text += std::string(to_string(state.dtypes[i])) + "[";
    for (std::size_t j = 0; j < state.shapes[i].size(); ++j) {
      if (j != 0) text += ",";
      text += std::to_string(state.shapes[i][j]);
    }
    text += "]";
  }
  return text;
}

std::string store_path(StoreIndex index) {
  return "store_groups[" + std::to_string(raw(index)) + "].";
}

void add_spec_facts(const CacheSpec& spec, std::uint32_t tokens_per_block, const std::string& path,
                    std::vector<DigestFact>& facts) {
  const auto add = [&](std::string_view name, std::string value) {
    facts.push_back({path + std::string(name), std::move(value)});
  };
  const auto add_optional = [&](std::string_view name, const auto& value) {
    add(name, value ? std::to_string(*value) : "none");
  };
  add("kind", spec.kind);
  add("block_size", std::to_string(spec.block_size));
  add("tokens_per_block", std::to_string(tokens_per_block));
  add("page_size_bytes", std::to_string(page_size_bytes(spec)));
  // Only where it differs: objects were whole pages once.
  if (unpadded_page_bytes(spec) != page_size_bytes(spec))
    add("moved_bytes", std::to_string(unpadded_page_bytes(spec)));
  add_optional("sliding_window", spec.sliding_window);
  add_optional("attention_chunk_size", spec.attention_chunk_size);
  add_optional("rswa_window", spec.rswa_window);
  add_optional("sink_len", spec.sink_len);
  if (const auto* attention = std::get_if<AttentionPayload>(&spec.payload)) {
    add("dtype", std::string(to_string(attention->dtype)));
    add("cache_dtype", attention->cache_dtype);
    add("num_kv_heads", std::to_string(attention->num_kv_heads));
    add("total_num_kv_heads", std::to_string(attention->total_num_kv_heads));
    add("head_size", std::to_string(attention->head_size));
    add("head_size_v", std::to_string(attention->head_size_v));
    add("compression", std::to_string(attention->compression));
    add("states_per_token", std::to_string(attention->states_per_token));
    add_optional("num_head_slots", attention->num_head_slots);
    add_optional("state_content_bytes", attention->state_content_bytes);
  } else if (const auto* state = std::get_if<StatePayload>(&spec.payload)) {
    add("states", shape_text(*state));
    add("mamba_cache_mode", state->cache_mode);
    add("tp_replicated", state->tp_replicated ? "true" : "false");
  }
}

}  // namespace

std::vector<DigestFact> detail::stored_group_facts(const Projection& projection) {
  std::vector<DigestFact> facts;
  // Of the first layer: what every rank, whatever its stage, knows alike of a wrapper.
  for (const StoreIndex index : indices<StoreIndex>(projection.num_store_groups())) {
    const ResolvedGroup& group = projection.group(index);
    add_spec_facts(group.spec, group.tokens_per_block, store_path(index), facts);
  }
  return facts;
}

namespace {

// Tensor ranks that hold the same bytes of one layer for certain: not where ranks hold several of a
// model's heads each, since nobody says which.
std::uint32_t certain_replicas(const CacheSpec& spec, bool alike, std::uint32_t tp) {
  if (const auto* const state = std::get_if<StatePayload>(&spec.payload))
    return state->tp_replicated ? tp : 1;
  const auto* const attention = std::get_if<AttentionPayload>(&spec.payload);
  if (attention == nullptr) return alike ? tp : 1;
  const std::uint32_t total = attention->total_num_kv_heads;
  if (attention->num_kv_heads == total) return tp;
  return attention->num_kv_heads == 1 && total != 0 && tp % total == 0 ? tp / total : 1;
}

}  // namespace

std::uint32_t detail::shared_replicas(const ResolvedGroup& group, const ParallelSizes& parallel) {
  if (parallel.dcp > 1) return 1;  // they hold other tokens
  std::uint32_t replicas = parallel.tp;
  for (const CacheSpec& spec : group.specs)
    replicas = std::gcd(replicas, certain_replicas(spec, group.tp_replicated, parallel.tp));
  return replicas;
}

namespace {

// Of layers of a wrapper that differ from its first one, and where they lie in an object.
void add_member_facts(const ResolvedGroup& group, StoreIndex index,
                      std::vector<DigestFact>& facts) {
  std::vector<const CacheSpec*> seen{&group.spec};
  std::string order;
  for (std::size_t layer = 0; layer < group.layers.size(); ++layer) {
    const CacheSpec& spec = group.layer_spec(layer);
    const auto found = std::find_if(seen.begin(), seen.end(),
                                    [&](const CacheSpec* other) { return *other == spec; });
    const auto member = static_cast<std::size_t>(found - seen.begin());
    if (found == seen.end()) {
      seen.push_back(&spec);
      add_spec_facts(spec, group.tokens_per_block,
                     store_path(index) + "members[" + std::to_string(member) + "].", facts);
    }
    order += (layer == 0 ? "" : ",") + std::to_string(member);
  }
  if (seen.size() > 1) facts.push_back({store_path(index) + "members", std::move(order)});
}

// An object holds the layers of a group one behind the other, so their order gives bytes a meaning.
std::string layers_text(const ResolvedGroup& group) {
  std::vector<DigestFact> names;
  for (const std::string& layer : group.layers) names.push_back({"layer", layer});
  return std::to_string(names.size()) + ", " +
         to_hex(detail::hash128(detail::canonical_text(names)));
}

void add_layer_facts(const Projection& projection, std::vector<DigestFact>& facts) {
  for (const StoreIndex index : indices<StoreIndex>(projection.num_store_groups())) {
    facts.push_back({store_path(index) + "layers", layers_text(projection.group(index))});
    add_member_facts(projection.group(index), index, facts);
  }
}

std::vector<DigestFact> facts_of(const Projection& projection, const KeyFacts& key) {
  std::vector<DigestFact> facts{
      {"key_version", std::string(kSchemaVersion)},
      {"model", key.model},
      {"model_revision", key.model_revision},
      {"kv_quantization", key.kv_quantization},
      {"hash_algorithm", key.hash_algorithm},
      {"hash_block_size", std::to_string(projection.hash_block_size())},
      {"kv_layout", projection.kv_layout()},
      {"namespace", projection.key_namespace()},
      {"parallel.tp", std::to_string(projection.parallel().tp)},
      {"parallel.pp", std::to_string(projection.parallel().pp)},
      {"parallel.pcp", std::to_string(projection.parallel().pcp)},
      {"parallel.dcp", std::to_string(projection.parallel().dcp)},
      {"num_store_groups", std::to_string(projection.num_store_groups())}};
  if (projection.parallel().pp > 1) facts.push_back({"pipeline_split", key.pipeline_split});
  const std::vector<DigestFact> groups = detail::stored_group_facts(projection);
  facts.insert(facts.end(), groups.begin(), groups.end());
  // Whoever counts otherwise looks for other shards.
  for (const StoreIndex index : indices<StoreIndex>(projection.num_store_groups())) {
    facts.push_back(
        {store_path(index) + "replicas",
         std::to_string(detail::shared_replicas(projection.group(index), projection.parallel()))});
  }
  // Stages hold different layers, and neither knows those of another.
  if (projection.parallel().pp == 1) add_layer_facts(projection, facts);
  return facts;
}

void check(const Projection& projection, const KeyFacts& facts, std::string_view schema,
           ProblemList& problems) {
  if (projection.key_schema() != schema) {
    problems.add("key_schema", projection.key_schema(), std::string(schema),
                 "the digest that plans carry covers the config's key_schema");
  }
  if (projection.num_store_groups() == 0) {
    problems.add("groups", "none is storable", "at least one group to store");
  }
  if (facts.model.empty()) problems.add("model", "''", "the model's name or path");
  if (facts.hash_algorithm.empty())
    problems.add("hash_algorithm", "''", "the name of the engine's block hash");
  const std::pair<std::string_view, const std::string*> texts[] = {
      {"model", &facts.model},
      {"model_revision", &facts.model_revision},
      {"kv_quantization", &facts.kv_quantization},
      {"hash_algorithm", &facts.hash_algorithm},
      {"pipeline_split", &facts.pipeline_split}};
  for (const auto& [name, text] : texts) {
    if (const auto at = detail::invalid_utf8(*text)) {
      problems.add(std::string(name), "byte " + std::to_string(*at), "UTF-8 text");
    }
  }
  if (!facts.hash_is_stable) {
    problems.add("hash_is_stable", "false", "hashes that are equal in every process",
                 "choose sha256_cbor, or set PYTHONHASHSEED to the same value everywhere");
  }
}

void need(const std::shared_ptr<const Projection>& projection) {
  if (!projection) {
    fail(ErrorCode::kInvalidArgument, "key schema", {"projection", "null", "a projection", {}});
  }
}

// The last component of a path or name, as the reference takes it.
std::string base_name(std::string_view model) {
  while (model.ends_with('/')) model.remove_suffix(1);
  return std::string(model.substr(model.rfind('/') + 1));
}

// Tensor ranks that hold the same bytes of one layer.
std::uint32_t true_replicas(const CacheSpec& spec, const ParallelSizes& parallel) {
  const auto* const attention = std::get_if<AttentionPayload>(&spec.payload);
  if (attention == nullptr || attention->total_num_kv_heads == 0) return 1;
  const std::uint64_t copies = std::uint64_t{attention->num_kv_heads} * parallel.tp;
  return static_cast<std::uint32_t>(
      std::max<std::uint64_t>(1, copies / attention->total_num_kv_heads));
}

// Ranks that share a key in the reference, which counts the heads of the whole model.
std::uint32_t vllm_replicas(const Projection& projection, StoreIndex index, ProblemList& problems) {
  const ResolvedGroup& group = projection.group(index);
  const ParallelSizes& parallel = projection.parallel();
  const bool states = std::any_of(group.specs.begin(), group.specs.end(), [](const CacheSpec& s) {
    return std::holds_alternative<StatePayload>(s.payload);
  });
  if (parallel.dcp > 1 || parallel.tp == 1 || states) return 1;
  if (group.tp_replicated) return parallel.tp;
  const std::optional<std::uint32_t> heads = projection.model_total_kv_heads();
  if (!heads) {
    const std::vector<Problem>& told = problems.problems();
    const bool new_to_it = std::none_of(told.begin(), told.end(), [](const Problem& problem) {
      return problem.path == "model_total_kv_heads";
    });
    if (new_to_it) {
      problems.add("model_total_kv_heads", "null", "the model's KV heads as the engine counts them",
                   "key schema vllm derives from it which ranks share a key");
    }
    return 1;
  }
  const std::uint32_t replicas = std::max(1u, parallel.tp / *heads);
  for (const CacheSpec& spec : group.specs) {
    const std::uint32_t same = true_replicas(spec, parallel);
    if (same % replicas == 0) continue;
    problems.add("groups[" + std::to_string(raw(group.id)) + "].total_num_kv_heads",
                 std::to_string(std::get<AttentionPayload>(spec.payload).total_num_kv_heads),
                 "heads that " + std::to_string(replicas) +
                     " neighbouring tensor ranks hold alike, as model_total_kv_heads " +
                     std::to_string(*heads) + " says",
                 "the reference would store different heads under one key; choose schema kvprism");
  }
  return replicas;
}

// The pipeline rank in a key of the reference: it counts ranks as if no context ranks stood between
// the stages (store_connector 3.1).
std::uint32_t vllm_stage(std::uint32_t rank, const ParallelSizes& parallel) {
  return rank / parallel.tp % parallel.pp;
}

// Where that count gives two stages one key, or a lookup asks for keys that no rank stores.
void check_vllm_ranks(const ParallelSizes& parallel, ProblemList& problems) {
  if (std::gcd(parallel.pp, parallel.pcp) > 1) {
    problems.add("parallel.pp", std::to_string(parallel.pp),
                 "no common divisor with pcp, " + std::to_string(parallel.pcp),
                 "the reference would store different stages under one key; choose schema kvprism");
  }
  if (parallel.pcp > 1 && parallel.dcp > 1) {
    problems.add(
        "parallel.dcp", std::to_string(parallel.dcp), "1 with pcp, " + std::to_string(parallel.pcp),
        "the reference looks up other context ranks than it stores; choose schema kvprism");
  }
}

std::string position_text(const RankPosition& at) {
  return std::to_string(at.tp) + "." + std::to_string(at.pp) + "." + std::to_string(at.pcp) + "." +
         std::to_string(at.dcp);
}

[[noreturn, gnu::cold]] void refuse_hash(std::size_t bytes) {
  fail(ErrorCode::kInvalidArgument, "key",
       {"hash", std::to_string(bytes) + " bytes", "16 to 64 bytes",
        "shorter hashes of different prefixes collide"});
}

[[noreturn, gnu::cold]] void refuse_shard(const RankPosition& shard) {
  fail(ErrorCode::kInvalidArgument, "key",
       {"shard", position_text(shard), "the position of a rank", {}});
}

}  // namespace

RankPosition rank_position(Rank rank, const ParallelSizes& parallel) noexcept {
  assert(raw(rank) < parallel.world());
  const std::uint32_t tp = raw(rank) % parallel.tp;
  const std::uint32_t above = raw(rank) / parallel.tp;
  const std::uint32_t pcp = above % parallel.pcp;
  const std::uint32_t reused = parallel.dcp_over_pcp() ? tp * parallel.pcp + pcp : tp;
  return {.tp = tp, .pp = above / parallel.pcp, .pcp = pcp, .dcp = reused % parallel.dcp};
}

std::string pipeline_split_of(std::span<const std::shared_ptr<const Projection>> stages) {
  std::vector<DigestFact> facts;
  for (std::size_t stage = 0; stage < stages.size(); ++stage) {
    const std::string path = "stages[" + std::to_string(stage) + "]";
    if (!stages[stage]) {
      fail(ErrorCode::kInvalidArgument, "pipeline split", {path, "null", "a projection", {}});
    }
    const Projection& projection = *stages[stage];
    if (projection.parallel().pp != stages.size()) {
      fail(ErrorCode::kInvalidArgument, "pipeline split",
           {path + ".parallel.pp",
            std::to_string(projection.parallel().pp),
            std::to_string(stages.size()) + ", the number of stages",
            {}});
    }
    std::vector<DigestFact> own = detail::stored_group_facts(projection);
    add_layer_facts(projection, own);
    for (DigestFact& fact : own) facts.push_back({path + "." + fact.name, std::move(fact.value)});
  }
  if (stages.empty()) {
    fail(ErrorCode::kInvalidArgument, "pipeline split",
         {"stages", "none", "a projection for each pipeline rank", {}});
  }
  return std::to_string(stages.size()) + " stages, " +
         to_hex(detail::hash128(detail::canonical_text(facts)));
}

std::shared_ptr<const KeySchema> KeySchema::kvprism(std::shared_ptr<const Projection> projection,
                                                    const KeyFacts& facts) {
  need(projection);
  ProblemList problems;
  check(*projection, facts, "kvprism", problems);
  const std::uint32_t stages = projection->parallel().pp;
  if (stages > 1 && facts.pipeline_split.empty()) {
    problems.add("pipeline_split", "''",
                 "the layers of each of the " + std::to_string(stages) + " pipeline stages",
                 "two deployments that split a model differently would share keys");
  }
  problems.throw_if_any(ErrorCode::kInvalidConfig, "key schema");
  auto impl = std::make_unique<Impl>();
  impl->name = "kvprism";
  impl->given = facts;
  impl->facts = facts_of(*projection, facts);
  impl->fingerprint = to_hex(detail::hash128(detail::canonical_text(impl->facts)));
  const ParallelSizes& parallel = projection->parallel();
  impl->pcp = parallel.pcp;
  const std::string start =
      "kvp1/" + escaped(projection->key_namespace()) + "/" + impl->fingerprint + "/";
  impl->prefix = start;
  for (const StoreIndex index : indices<StoreIndex>(projection->num_store_groups())) {
    const std::vector<std::uint32_t>& stages = projection->group(index).stages;
    Impl::Group group;
    group.replicas = detail::shared_replicas(projection->group(index), parallel);
    group.tp_shards = parallel.tp / group.replicas;
    for (std::uint32_t rank = 0; rank < parallel.world(); ++rank) {
      const RankPosition shard = rank_position(Rank{rank}, parallel);
      if (shard.tp >= group.tp_shards) continue;
      group.add(shard, start + position_text(shard) + "/" + std::to_string(raw(index)) + "/",
                std::binary_search(stages.begin(), stages.end(), shard.pp));
    }
    impl->groups.push_back(std::move(group));
  }
  impl->projection = std::move(projection);
  return std::shared_ptr<const KeySchema>(new KeySchema(std::move(impl)));
}

std::shared_ptr<const KeySchema> KeySchema::vllm(std::shared_ptr<const Projection> projection,
                                                 const KeyFacts& facts) {
  need(projection);
  ProblemList problems;
  check(*projection, facts, "vllm", problems);
  check_vllm_ranks(projection->parallel(), problems);
  auto impl = std::make_unique<Impl>();
  impl->name = "vllm";
  impl->given = facts;
  const ParallelSizes& parallel = projection->parallel();
  impl->pcp = parallel.pcp;
  const std::string model = base_name(facts.model);
  if (model.empty() && !facts.model.empty()) {
    problems.add("model", facts.model, "a name or path with a last component");
  }
  const std::string& tenant = projection->key_namespace();
  const std::string start = (tenant.empty() ? "" : tenant + "@") + model;
  impl->prefix = start + "@tp_rank:";
  impl->facts = {{"model", model}, {"namespace", tenant}};
  for (const StoreIndex index : indices<StoreIndex>(projection->num_store_groups())) {
    Impl::Group group;
    group.replicas = vllm_replicas(*projection, index, problems);
    group.tp_shards = parallel.tp / group.replicas;
    impl->facts.push_back({"store_groups[" + std::to_string(raw(index)) + "].replicas",
                           std::to_string(group.replicas)});
    for (std::uint32_t rank = 0; rank < parallel.world(); ++rank) {
      RankPosition shard = rank_position(Rank{rank}, parallel);
      if (shard.tp >= group.tp_shards) continue;
      // The reference has an object of every group on every stage.
      group.add(shard,
                start + "@tp_rank:" + std::to_string(shard.tp) + "@pcp" +
                    std::to_string(shard.pcp) + "@dcp" + std::to_string(shard.dcp) +
                    "@pp_rank:" + std::to_string(vllm_stage(rank, parallel)) +
                    "@group:" + std::to_string(raw(index)) + "@",
                true);
    }
    impl->groups.push_back(std::move(group));
  }
  problems.throw_if_any(ErrorCode::kInvalidConfig, "key schema");
  impl->projection = std::move(projection);
  return std::shared_ptr<const KeySchema>(new KeySchema(std::move(impl)));
}

std::shared_ptr<const KeySchema> KeySchema::make(std::shared_ptr<const Projection> projection,
                                                 const KeyFacts& facts) {
  need(projection);
  return projection->key_schema() == "vllm" ? vllm(std::move(projection), facts)
                                            : kvprism(std::move(projection), facts);
}

KeySchema::KeySchema(std::unique_ptr<const Impl> impl) : impl_(std::move(impl)) {}
KeySchema::~KeySchema() = default;

const Projection& KeySchema::projection() const noexcept { return *impl_->projection; }
std::string_view KeySchema::name() const noexcept { return impl_->name; }
const std::string& KeySchema::fingerprint() const noexcept { return impl_->fingerprint; }
const KeyFacts& KeySchema::key_facts() const noexcept { return impl_->given; }
const std::string& KeySchema::prefix() const noexcept { return impl_->prefix; }
const std::vector<DigestFact>& KeySchema::facts() const noexcept { return impl_->facts; }

Digest KeySchema::plan_digest() const {
  std::vector<DigestFact> all{{"projection", to_hex(projection().digest())}};
  all.insert(all.end(), facts().begin(), facts().end());
  return detail::hash128(detail::canonical_text(all));
}

std::span<const RankPosition> KeySchema::shards(StoreIndex group) const noexcept {
  return impl_->groups[group].shards;
}
RankPosition KeySchema::shard_of(StoreIndex group, const RankPosition& rank) const noexcept {
  RankPosition shard = rank;
  shard.tp /= impl_->groups[group].replicas;
  return shard;
}
std::uint32_t KeySchema::replicas(StoreIndex group) const noexcept {
  return impl_->groups[group].replicas;
}
bool KeySchema::stores(StoreIndex group, const RankPosition& rank,
                       std::uint32_t chunk) const noexcept {
  // The phase turns with the group, so that the load is spread (as the reference does).
  const std::uint32_t replicas = impl_->groups[group].replicas;
  return chunk % replicas == (rank.tp + raw(group)) % replicas;
}

// Here and not in the class, whose functions may be replaced from outside and are not inlined.
const std::string& KeySchema::Impl::checked_prefix(StoreIndex group, const RankPosition& shard,
                                                   std::size_t hash_width) const {
  if (hash_width < kMinHashWidth || hash_width > kMaxHashWidth) refuse_hash(hash_width);
  assert(raw(group) < groups.size());
  const Group& keys = groups[group];
  const std::size_t at = (std::size_t{shard.pp} * pcp + shard.pcp) * keys.tp_shards + shard.tp;
  if (at >= keys.positions.size() || keys.positions[at] != shard) refuse_shard(shard);
  return keys.prefixes[at];
}

void KeySchema::append_key(KeySlots& slots, StoreIndex group, const RankPosition& shard,
                           std::span<const std::uint8_t> hash) const {
  const std::string& prefix = impl_->checked_prefix(group, shard, hash.size());
  std::string& key = slots.append();
  key.resize(prefix.size() + 2 * hash.size());
  std::memcpy(key.data(), prefix.data(), prefix.size());
  detail::write_hex(hash, key.data() + prefix.size());
}

void KeySchema::append_keys_later(KeySlots& slots, StoreIndex group, const RankPosition& shard,
                                  const HashList& hashes, std::uint32_t first, std::uint32_t step,
                                  std::uint32_t count) const {
  const std::string& prefix = impl_->checked_prefix(group, shard, hashes.width);
  if (count == 0) return;
  slots.append_later(prefix, hashes[first].data(), hashes.width, std::size_t{step} * hashes.width,
                     count);
}

}  // namespace kvprism
