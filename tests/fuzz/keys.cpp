// Any texts for namespace, model, revision and quantisation of two deployments: their keys name
// what they should, and a purge of one finds all of its own keys and none of the other's.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <optional>
#include <regex>
#include <string>
#include <string_view>
#include <vector>

#include "backend/mooncake_status.h"
#include "kvprism/base/error.h"
#include "kvprism/group/projection.h"
#include "kvprism/key/key_schema.h"
#include "kvprism/spec/spec_registry.h"

namespace {

using namespace kvprism;  // NOLINT(google-build-using-namespace)

constexpr std::size_t kMostText = 96;  // std::regex recurses once for each byte

// Takes texts that end with a zero byte; what is missing is empty.
class Texts {
 public:
  Texts(const std::uint8_t* data, std::size_t size) : rest_(data, data + size) {}
  std::string next() {
    const auto end = std::find(rest_.begin(), rest_.end(), std::uint8_t{0});
    std::string text(rest_.begin(), end);
    rest_.erase(rest_.begin(), end == rest_.end() ? end : end + 1);
    return text.substr(0, kMostText);
  }
  std::uint8_t byte() {
    if (rest_.empty()) return 0;
    const std::uint8_t value = rest_.front();
    rest_.erase(rest_.begin());
    return value;
  }

 private:
  std::vector<std::uint8_t> rest_;
};

struct Deployment {
  CacheConfig config;
  KeyFacts facts;

  bool operator==(const Deployment& other) const {
    return config.key_namespace == other.config.key_namespace && facts == other.facts;
  }
};

Deployment read(Texts& texts) {
  Deployment out;
  out.config.key_namespace = texts.next();
  out.facts.model = texts.next();
  out.facts.model_revision = texts.next();
  out.facts.kv_quantization = texts.next();
  out.facts.hash_algorithm = "sha256";
  out.config.num_blocks = 8;
  for (const char* layer : {"a", "b"}) {
    GroupConfig group;
    group.spec.kind = "full_attention";
    group.spec.block_size = 16;
    AttentionPayload payload;
    payload.num_kv_heads = 1;
    payload.head_size = 4;
    payload.head_size_v = 4;
    payload.dtype = DType::kInt8;
    group.spec.payload = payload;
    group.layers = {layer};
    out.config.groups.push_back(group);
  }
  return out;
}

std::shared_ptr<const KeySchema> make(Deployment& deployment, const std::string& name) {
  static const SpecRegistry registry = SpecRegistry::builtin();
  deployment.config.key_schema = name;
  try {
    return KeySchema::make(Projection::make(deployment.config, registry), deployment.facts);
  } catch (const Error&) {
    return nullptr;
  }
}

// Of both groups, for two hashes of different widths.
std::vector<std::string> keys_of(const KeySchema& schema, std::uint8_t first, std::uint8_t last) {
  KeySlots slots;
  for (const StoreIndex group : indices<StoreIndex>(schema.projection().num_store_groups())) {
    for (const std::size_t width : {kMinHashWidth, kMaxHashWidth}) {
      std::vector<std::uint8_t> hash(width, first);
      schema.append_key(slots, group, {}, hash);
      hash.back() = static_cast<std::uint8_t>(first == last ? last + 1 : last);
      schema.append_key(slots, group, {}, hash);
    }
  }
  return slots.strings();
}

void need(bool holds) {
  if (!holds) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Texts texts(data, size);
  Deployment one = read(texts);
  Deployment other = read(texts);
  const std::uint8_t first = texts.byte();
  const std::uint8_t last = texts.byte();
  for (const std::string name : {"kvprism", "vllm"}) {
    const auto schema = make(one, name);
    if (!schema) continue;
    std::vector<std::string> keys = keys_of(*schema, first, last);
    const std::regex purge(detail::mooncake_prefix_pattern(schema->prefix()));
    for (const std::string& key : keys) {
      need(key.starts_with(schema->prefix()));
      need(std::regex_search(key, purge));
    }
    // A namespace is one component, whatever is in it.
    if (name == "kvprism") need(std::count(keys[0].begin(), keys[0].end(), '/') == 5);
    std::sort(keys.begin(), keys.end());
    need(std::adjacent_find(keys.begin(), keys.end()) == keys.end());

    // Schema vllm takes namespace and model as they are: there they may spell alike.
    const auto foreign = name == "kvprism" ? make(other, name) : nullptr;
    if (!foreign) continue;
    for (const std::string& key : keys_of(*foreign, first, last)) {
      need(key.starts_with(schema->prefix()) == (one == other));
      need(std::regex_search(key, purge) == (one == other));
    }
  }
  return 0;
}
