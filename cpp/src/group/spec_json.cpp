#include "group/spec_json.h"

#include <array>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "group/config_check.h"

namespace kvprism::detail {
namespace {

constexpr std::array<std::string_view, 12> kSpecKeys{
    "kind",           "block_size",           "page_size_padded",
    "sliding_window", "attention_chunk_size", "rswa_window",
    "sink_len",       "blocks_per_request",   "extra_retained_tokens",
    "bounded_replay", "replay_tokens",        "dcp_sharded"};
constexpr std::array<std::string_view, 11> kAttentionKeys{
    "num_kv_heads",   "total_num_kv_heads",  "head_size",    "head_size_v",
    "dtype",          "cache_dtype",         "compression",  "states_per_token",
    "num_head_slots", "state_content_bytes", "max_tp_shards"};
constexpr std::array<std::string_view, 7> kStateKeys{"shapes",
                                                     "dtypes",
                                                     "mamba_cache_mode",
                                                     "num_speculative_blocks",
                                                     "num_prefill_checkpoint_blocks",
                                                     "prefill_checkpoint_alignment",
                                                     "tp_replicated"};
constexpr std::array<std::string_view, 1> kRawKeys{"page_size_bytes"};

template <class Keys>
void add(std::vector<std::string_view>& all, const Keys& keys) {
  all.insert(all.end(), keys.begin(), keys.end());
}

class SpecReader {
 public:
  explicit SpecReader(ProblemList& problems) : problems_(problems) {}

  void parameters(JsonObject& object, CacheSpec& spec) {
    object.integer("block_size", spec.block_size, true);
    object.integer("page_size_padded", spec.page_size_padded, false, 1, kMaxBytes);
    object.integer("sliding_window", spec.sliding_window, false);
    object.integer("attention_chunk_size", spec.attention_chunk_size, false);
    object.integer("rswa_window", spec.rswa_window, false);
    object.integer("sink_len", spec.sink_len, false);
    object.integer("blocks_per_request", spec.blocks_per_request, false);
    object.integer("extra_retained_tokens", spec.extra_retained_tokens, false, 0);
    object.flag("bounded_replay", spec.bounded_replay);
    object.integer("replay_tokens", spec.replay_tokens, false, 0);
    object.flag("dcp_sharded", spec.dcp_sharded);
  }

  // The keys of the payload that was read.
  std::span<const std::string_view> payload(JsonObject& object, const SpecKind& kind,
                                            CacheSpec& spec) {
    switch (kind.payload.get()) {
      case PayloadKind::kAttention:
        spec.payload = read_attention(object, kind.latent);
        return kAttentionKeys;
      case PayloadKind::kState:
        spec.payload = read_state(object);
        return kStateKeys;
      case PayloadKind::kRaw:
        break;
    }
    RawPayload raw_bytes;
    object.integer("page_size_bytes", raw_bytes.page_size_bytes, true, 1, kMaxBytes);
    spec.payload = raw_bytes;
    return kRawKeys;
  }

 private:
  std::optional<DType> dtype(const std::string& name, const std::string& path) {
    const std::optional<DType> found = dtype_from_string(name);
    if (!found) {
      const std::vector<std::string_view> names = dtype_names();
      problems_.add(path, "\"" + name + "\"", one_of(names), suggest(name, names));
    }
    return found;
  }

  AttentionPayload read_attention(JsonObject& object, bool latent) {
    AttentionPayload payload;
    object.integer("num_kv_heads", payload.num_kv_heads, true);
    object.integer("total_num_kv_heads", payload.total_num_kv_heads, false, 0);
    object.integer("head_size", payload.head_size, true);
    payload.head_size_v = latent ? 0 : payload.head_size;
    object.integer("head_size_v", payload.head_size_v, false, 0);
    object.integer("compression", payload.compression, false);
    object.integer("states_per_token", payload.states_per_token, false);
    object.integer("num_head_slots", payload.num_head_slots, false);
    object.integer("state_content_bytes", payload.state_content_bytes, false, 1, kMaxBytes);
    object.integer("max_tp_shards", payload.max_tp_shards, false);
    object.text("cache_dtype", payload.cache_dtype, false, "a string");
    std::string name;
    const std::size_t before = problems_.problems().size();
    object.text("dtype", name, true, one_of(dtype_names()));
    payload.dtype =
        DType::kInt8;  // the smallest: no later rule complains about a size that is not known
    if (problems_.problems().size() == before)
      payload.dtype = dtype(name, object.at("dtype")).value_or(payload.dtype);
    return payload;
  }

  StatePayload read_state(JsonObject& object) {
    StatePayload payload;
    object.text("mamba_cache_mode", payload.cache_mode, true, "one of none, align, all");
    object.integer("num_speculative_blocks", payload.num_speculative_blocks, false, 0);
    object.integer("num_prefill_checkpoint_blocks", payload.num_prefill_checkpoint_blocks, false,
                   0);
    object.integer("prefill_checkpoint_alignment", payload.prefill_checkpoint_alignment, false);
    object.flag("tp_replicated", payload.tp_replicated);
    const json* const shapes = object.list("shapes", "a list of shapes", true);
    if (shapes != nullptr) {
      for (std::size_t i = 0; i < shapes->size(); ++i) {
        payload.shapes.push_back(read_shape(object, (*shapes)[i], indexed(object.at("shapes"), i)));
      }
    }
    std::vector<std::string> names;
    object.texts("dtypes", names, true, "a list of dtype names");
    for (std::size_t i = 0; i < names.size(); ++i) {
      payload.dtypes.push_back(
          dtype(names[i], indexed(object.at("dtypes"), i)).value_or(DType::kInt8));
    }
    if (shapes == nullptr) payload.dtypes.clear();  // their number is no second problem
    return payload;
  }

  std::vector<std::uint32_t> read_shape(JsonObject& object, const json& value,
                                        const std::string& path) {
    std::vector<std::uint32_t> shape;
    if (!value.is_array()) {
      problems_.add(path, spell(value), "a list of positive integers");
      return shape;
    }
    for (std::size_t i = 0; i < value.size(); ++i) {
      const auto extent =
          object.count(value[i], indexed(path, i), "a positive integer", 1, kMaxInt);
      shape.push_back(static_cast<std::uint32_t>(extent.value_or(1)));
    }
    return shape;
  }

  ProblemList& problems_;
};

ordered_json payload_json(const AttentionPayload& payload) {
  return {{"num_kv_heads", payload.num_kv_heads},
          {"total_num_kv_heads", payload.total_num_kv_heads},
          {"head_size", payload.head_size},
          {"head_size_v", payload.head_size_v},
          {"dtype", to_string(payload.dtype)},
          {"cache_dtype", payload.cache_dtype},
          {"compression", payload.compression},
          {"states_per_token", payload.states_per_token},
          {"num_head_slots", or_null(payload.num_head_slots)},
          {"state_content_bytes", or_null(payload.state_content_bytes)},
          {"max_tp_shards", or_null(payload.max_tp_shards)}};
}

ordered_json payload_json(const StatePayload& payload) {
  ordered_json dtypes = ordered_json::array();
  for (const DType dtype : payload.dtypes) dtypes.push_back(to_string(dtype));
  return {{"mamba_cache_mode", payload.cache_mode},
          {"shapes", payload.shapes},
          {"dtypes", std::move(dtypes)},
          {"num_speculative_blocks", payload.num_speculative_blocks},
          {"num_prefill_checkpoint_blocks", payload.num_prefill_checkpoint_blocks},
          {"prefill_checkpoint_alignment", or_null(payload.prefill_checkpoint_alignment)},
          {"tp_replicated", payload.tp_replicated}};
}

ordered_json payload_json(const RawPayload& payload) {
  return {{"page_size_bytes", payload.page_size_bytes}};
}

}  // namespace

void read_spec(JsonObject& object, const SpecRegistry& registry,
               std::span<const std::string_view> around, ProblemList& problems, CacheSpec& spec) {
  SpecReader reader(problems);
  reader.parameters(object, spec);
  std::vector<std::string_view> known(around.begin(), around.end());
  add(known, kSpecKeys);
  std::vector<std::string_view> everywhere = known;
  add(everywhere, kAttentionKeys);
  add(everywhere, kStateKeys);
  add(everywhere, kRawKeys);
  const SpecKind* const kind = registry.find(spec.kind);
  if (kind == nullptr) {
    object.refuse_others(everywhere);
    return;
  }
  add(known, reader.payload(object, *kind, spec));
  object.refuse_foreign(spec.kind, known, everywhere);
}

ordered_json spec_json(const CacheSpec& spec) {
  ordered_json object{{"kind", spec.kind}, {"block_size", spec.block_size}};
  object.update(
      std::visit([](const auto& payload) { return payload_json(payload); }, spec.payload));
  object["page_size_padded"] = or_null(spec.page_size_padded);
  object["sliding_window"] = or_null(spec.sliding_window);
  object["attention_chunk_size"] = or_null(spec.attention_chunk_size);
  object["rswa_window"] = or_null(spec.rswa_window);
  object["sink_len"] = or_null(spec.sink_len);
  object["blocks_per_request"] = or_null(spec.blocks_per_request);
  object["extra_retained_tokens"] = spec.extra_retained_tokens;
  object["bounded_replay"] = spec.bounded_replay;
  object["replay_tokens"] = or_null(spec.replay_tokens);
  object["dcp_sharded"] = or_null(spec.dcp_sharded);
  return object;
}

}  // namespace kvprism::detail
