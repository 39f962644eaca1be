#include "kvprism/key/key_schema.h"

#include <cassert>
#include <cstring>
#include <utility>
#include <variant>

#include "group/hash128.h"
#include "group/utf8.h"
#include "key/hex.h"
#include "kvprism/base/error.h"

namespace kvprism {

struct KeySchema::Impl {
  std::shared_ptr<const Projection> projection;
  ParallelSizes parallel;
  std::vector<DigestFact> facts;
  std::string fingerprint;
  std::vector<RankPosition> shards;
  // Everything before the hash, by store group and rank.
  std::vector<std::string> prefixes;
};

namespace {

constexpr std::string_view kSchemaVersion = "1";

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

// Of the first layer's spec: what the engine's scheduler and every rank know alike of a wrapper.
void add_group_facts(const ResolvedGroup& group, StoreIndex index, std::vector<DigestFact>& facts) {
  const std::string path = "store_groups[" + std::to_string(raw(index)) + "].";
  const auto add = [&](std::string_view name, std::string value) {
    facts.push_back({path + std::string(name), std::move(value)});
  };
  const auto add_optional = [&](std::string_view name, const auto& value) {
    add(name, value ? std::to_string(*value) : "none");
  };
  const CacheSpec& spec = group.spec;
  add("kind", spec.kind);
  add("block_size", std::to_string(spec.block_size));
  add("tokens_per_block", std::to_string(group.tokens_per_block));
  add("page_size_bytes", std::to_string(group.page_size_bytes));
  add_optional("sliding_window", spec.sliding_window);
  add_optional("attention_chunk_size", spec.attention_chunk_size);
  add_optional("rswa_window", spec.rswa_window);
  add_optional("sink_len", spec.sink_len);
  add("is_eagle_group", group.is_eagle_group ? "true" : "false");
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
  for (const StoreIndex index : indices<StoreIndex>(projection.num_store_groups())) {
    add_group_facts(projection.group(index), index, facts);
  }
  return facts;
}

void check(const Projection& projection, const KeyFacts& facts) {
  ProblemList problems;
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
      {"hash_algorithm", &facts.hash_algorithm}};
  for (const auto& [name, text] : texts) {
    if (const auto at = detail::invalid_utf8(*text)) {
      problems.add(std::string(name), "byte " + std::to_string(*at), "UTF-8 text");
    }
  }
  if (!facts.hash_is_stable) {
    problems.add("hash_is_stable", "false", "hashes that are equal in every process",
                 "choose sha256_cbor, or set PYTHONHASHSEED to the same value everywhere");
  }
  problems.throw_if_any(ErrorCode::kInvalidConfig, "key schema");
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
  return {
      .tp = tp, .pp = above / parallel.pcp, .pcp = above % parallel.pcp, .dcp = tp % parallel.dcp};
}

std::shared_ptr<const KeySchema> KeySchema::kvprism(std::shared_ptr<const Projection> projection,
                                                    const KeyFacts& facts) {
  check(*projection, facts);
  auto impl = std::make_unique<Impl>();
  impl->parallel = projection->parallel();
  impl->facts = facts_of(*projection, facts);
  impl->fingerprint = to_hex(detail::hash128(detail::canonical_text(impl->facts)));
  const std::uint32_t world = impl->parallel.world();
  for (std::uint32_t rank = 0; rank < world; ++rank) {
    impl->shards.push_back(rank_position(Rank{rank}, impl->parallel));
  }
  const std::string start =
      "kvp1/" + escaped(projection->key_namespace()) + "/" + impl->fingerprint + "/";
  for (std::size_t group = 0; group < projection->num_store_groups(); ++group) {
    for (const RankPosition& shard : impl->shards) {
      impl->prefixes.push_back(start + position_text(shard) + "/" + std::to_string(group) + "/");
    }
  }
  impl->projection = std::move(projection);
  return std::shared_ptr<const KeySchema>(new KeySchema(std::move(impl)));
}

KeySchema::KeySchema(std::unique_ptr<const Impl> impl) : impl_(std::move(impl)) {}
KeySchema::~KeySchema() = default;

const Projection& KeySchema::projection() const noexcept { return *impl_->projection; }
std::string_view KeySchema::name() const noexcept { return "kvprism"; }
const std::string& KeySchema::fingerprint() const noexcept { return impl_->fingerprint; }
const std::vector<DigestFact>& KeySchema::facts() const noexcept { return impl_->facts; }

std::span<const RankPosition> KeySchema::shards(StoreIndex) const noexcept { return impl_->shards; }
RankPosition KeySchema::shard_of(StoreIndex, const RankPosition& rank) const noexcept {
  return rank;
}

void KeySchema::append_key(KeySlots& slots, StoreIndex group, const RankPosition& shard,
                           std::span<const std::uint8_t> hash) const {
  const ParallelSizes& sizes = impl_->parallel;
  if (hash.size() < kMinHashWidth || hash.size() > kMaxHashWidth) refuse_hash(hash.size());
  const std::size_t rank = (std::size_t{shard.pp} * sizes.pcp + shard.pcp) * sizes.tp + shard.tp;
  if (rank >= impl_->shards.size() || impl_->shards[rank] != shard) refuse_shard(shard);
  assert(raw(group) < impl_->projection->num_store_groups());
  const std::string& prefix = impl_->prefixes[raw(group) * impl_->shards.size() + rank];

  std::string& key = slots.append();
  key.resize(prefix.size() + 2 * hash.size());
  std::memcpy(key.data(), prefix.data(), prefix.size());
  detail::write_hex(hash, key.data() + prefix.size());
}

}  // namespace kvprism
