#include "group/config_check.h"

#include <limits>
#include <map>
#include <numeric>
#include <set>
#include <utility>

#include "base/utf8.h"
#include "group/unwrap.h"

namespace kvprism::detail {
namespace {

// Everything that counts tokens or blocks fits a signed 32-bit number, as block ids do.
constexpr std::uint64_t kMaxCount = std::numeric_limits<std::int32_t>::max();
// Keys carry the namespace, and backends bound the length of a key.
constexpr std::size_t kMaxNamespaceBytes = 128;
constexpr std::uint64_t kMaxWorld = 16384;

void check_one_of(std::string path, const std::string& value,
                  const std::vector<std::string_view>& known, ProblemList& problems) {
  for (const std::string_view word : known) {
    if (value == word) return;
  }
  problems.add(std::move(path), value.empty() ? "''" : value, one_of(known), suggest(value, known));
}

void check_parallel(const ParallelSizes& parallel, ProblemList& problems) {
  const std::pair<std::string_view, std::uint32_t> sizes[] = {
      {"tp", parallel.tp}, {"pp", parallel.pp}, {"pcp", parallel.pcp}, {"dcp", parallel.dcp}};
  bool positive = true;
  for (const auto& [name, size] : sizes) {
    if (size != 0) continue;
    problems.add("parallel." + std::string(name), "0", "a positive integer");
    positive = false;
  }
  if (!positive) return;
  std::uint64_t world = 1;
  for (const std::uint32_t size : {parallel.tp, parallel.pp, parallel.pcp}) {
    world = world > kMaxWorld ? world : world * size;
  }
  if (world > kMaxWorld) {
    problems.add("parallel", "tp x pp x pcp", "at most " + std::to_string(kMaxWorld) + " ranks");
  }
  if (parallel.tp % parallel.dcp != 0 && !parallel.dcp_over_pcp()) {
    const std::string over =
        parallel.pcp == 1 ? "" : ", or pcp, " + std::to_string(parallel.pcp) + ", or tp x pcp";
    problems.add("parallel.dcp", std::to_string(parallel.dcp),
                 "a divisor of tp, " + std::to_string(parallel.tp) + over,
                 "decode context parallelism reuses the ranks of the others");
  }
}

void check_blocks(const CacheConfig& config, ProblemList& problems) {
  if (config.num_blocks == 0) {
    problems.add("num_blocks", "0", "a positive integer");
  } else if (config.num_blocks == 1) {
    problems.add("num_blocks", "1", "at least 2", "block 0 is the null block and holds nothing");
  } else if (config.num_blocks > kMaxCount) {
    problems.add("num_blocks", std::to_string(config.num_blocks), "at most 2147483647");
  }
  const std::pair<std::string_view, std::optional<std::uint32_t>> sizes[] = {
      {"scheduler_block_size", config.scheduler_block_size},
      {"hash_block_size", config.hash_block_size},
      {"cache_hit_alignment_tokens", config.cache_hit_alignment_tokens}};
  for (const auto& [name, size] : sizes) {
    if (!size) continue;
    if (*size == 0)
      problems.add(std::string(name), "0", "a positive integer",
                   "leave it out to have it computed");
    if (*size > kMaxCount)
      problems.add(std::string(name), std::to_string(*size), "at most 2147483647");
  }
}

void check_counts(const CacheConfig& config, ProblemList& problems) {
  if (config.prefix_cache_retention_interval.value_or(0) > kMaxCount) {
    problems.add("prefix_cache_retention_interval",
                 std::to_string(*config.prefix_cache_retention_interval), "at most 2147483647");
  }
  const std::uint32_t heads = config.model_total_kv_heads.value_or(1);
  if (heads == 0 || heads > kMaxCount) {
    problems.add("model_total_kv_heads", std::to_string(heads),
                 heads == 0 ? "a positive integer" : "at most 2147483647");
  }
}

void check_namespace(const std::string& name, ProblemList& problems) {
  if (const auto at = invalid_utf8(name)) {
    problems.add("namespace", "byte " + std::to_string(*at) + " is not UTF-8", "valid UTF-8");
  } else if (name.size() > kMaxNamespaceBytes) {
    problems.add("namespace", std::to_string(name.size()) + " bytes",
                 "at most " + std::to_string(kMaxNamespaceBytes) + " bytes");
  }
}

// Adds nothing but `path`'s own problems; true when the spec can be resolved.
bool check_spec(const CacheSpec& spec, const std::string& path, const CacheConfig& config,
                const SpecRegistry& registry, ProblemList& problems) {
  ProblemList own;
  registry.check(spec, path, own);
  if (own.empty() && config.parallel.dcp != 0) {
    if (config.parallel.dcp > 1 && dcp_sharded(spec, registry) &&
        (spec.sliding_window || registry.traits_of(spec).hit == HitRule::kWindow)) {
      own.add(path + ".kind", spec.kind, "a kind without a window, or parallel.dcp of 1",
              "a window cannot be spread over decode context ranks");
    }
    const auto* const attention = std::get_if<AttentionPayload>(&spec.payload);
    if (attention != nullptr &&
        std::uint64_t{attention->num_kv_heads} * config.parallel.tp > kMaxCount) {
      own.add(path + ".num_kv_heads", std::to_string(attention->num_kv_heads),
              "a product with parallel.tp of at most 2147483647");
    }
    try {
      tokens_per_block(spec, config.parallel, registry);
    } catch (const Error& error) {
      for (const Problem& problem : error.problems()) {
        own.add(path + "." + problem.path, problem.value, problem.expected, problem.hint);
      }
    }
  }
  problems.append(own.problems());
  return own.empty();
}

bool check_group(const GroupConfig& group, const std::string& path, const CacheConfig& config,
                 const SpecRegistry& registry, ProblemList& problems) {
  ProblemList wrapper;
  check_wrapper(group, path, wrapper);
  problems.append(wrapper.problems());
  if (group.members.empty() && group.spec.kind != kUniformKind)
    return check_spec(group.spec, path, config, registry, problems) && wrapper.empty();
  bool resolvable = wrapper.empty();
  for (std::size_t m = 0; m < group.members.size(); ++m) {
    const std::string at = path + ".members[" + std::to_string(m) + "]";
    if (!check_spec(group.members[m].spec, at, config, registry, problems)) resolvable = false;
  }
  if (!resolvable) return false;
  ProblemList disagreements;
  check_agreement(group, path, config.parallel, registry, disagreements);
  problems.append(disagreements.problems());
  return disagreements.empty();
}

// Layer names are unique over all groups: a layer's bytes belong to one spec.
class LayerNames {
 public:
  // With several pipeline stages this one may hold no layer of a group.
  LayerNames(const ParallelSizes& parallel, ProblemList& problems)
      : may_be_empty_(parallel.pp > 1), problems_(problems) {}

  void check(const std::vector<std::string>& layers, const std::string& path) {
    if (layers.empty() && !may_be_empty_) {
      problems_.add(path, "[]", "at least one layer name",
                    "only with several pipeline stages (parallel.pp) one may hold none");
    }
    for (std::size_t i = 0; i < layers.size(); ++i) {
      const std::string at = path + "[" + std::to_string(i) + "]";
      if (layers[i].empty()) {
        problems_.add(at, "''", "a layer name that is not empty");
        continue;
      }
      const auto [first, is_new] = seen_.emplace(layers[i], at);
      if (!is_new)
        problems_.add(at, layers[i], "a layer name used once", "also at " + first->second);
    }
  }

 private:
  bool may_be_empty_;
  ProblemList& problems_;
  std::map<std::string_view, std::string> seen_;
};

void check_stages(const GroupConfig& group, const std::string& path, std::uint32_t pp,
                  ProblemList& problems) {
  if (!group.pipeline_stages) return;
  const std::string at = path + ".pipeline_stages";
  if (group.pipeline_stages->empty())
    problems.add(at, "[]", "at least one stage", "leave it out where every stage holds layers");
  std::set<std::uint32_t> seen;
  for (std::size_t i = 0; i < group.pipeline_stages->size(); ++i) {
    const std::uint32_t stage = (*group.pipeline_stages)[i];
    const std::string here = at + "[" + std::to_string(i) + "]";
    if (stage >= pp) {
      problems.add(here, std::to_string(stage), "below parallel.pp, " + std::to_string(pp));
    } else if (!seen.insert(stage).second) {
      problems.add(here, std::to_string(stage), "a stage named once");
    }
  }
}

void check_layers(const CacheConfig& config, ProblemList& problems) {
  LayerNames names(config.parallel, problems);
  for (std::size_t g = 0; g < config.groups.size(); ++g) {
    const GroupConfig& group = config.groups[g];
    const std::string path = group_path(g);
    if (group.spec.kind != kUniformKind) names.check(group.layers, path + ".layers");
    for (std::size_t m = 0; m < group.members.size(); ++m) {
      names.check(group.members[m].layers, path + ".members[" + std::to_string(m) + "].layers");
    }
    LayerNames order(config.parallel, problems);
    if (group.spec.kind == kUniformKind && !group.layers.empty())
      order.check(group.layers, path + ".layers");
  }
}

}  // namespace

std::vector<std::string_view> layout_names() {
  return {"LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"};
}

std::vector<std::string_view> key_schema_names() { return {"kvprism", "vllm"}; }

std::string one_of(const std::vector<std::string_view>& words) {
  std::string text = "one of ";
  if (words.size() == 1) text.clear();
  for (std::size_t i = 0; i < words.size(); ++i) {
    if (i != 0) text += ", ";
    text += words[i];
  }
  return text;
}

std::string group_path(std::size_t index) { return "groups[" + std::to_string(index) + "]"; }

void check_config(const CacheConfig& config, const SpecRegistry& registry, ProblemList& problems) {
  check_blocks(config, problems);
  check_counts(config, problems);
  check_parallel(config.parallel, problems);
  check_one_of("kv_layout", config.kv_layout, layout_names(), problems);
  check_one_of("key_schema", config.key_schema, key_schema_names(), problems);
  check_namespace(config.key_namespace, problems);
  if (config.groups.empty()) problems.add("groups", "[]", "at least one group");
  bool resolvable = !config.groups.empty();
  for (std::size_t g = 0; g < config.groups.size(); ++g) {
    const std::string path = group_path(g);
    if (!check_group(config.groups[g], path, config, registry, problems)) resolvable = false;
    check_stages(config.groups[g], path, config.parallel.pp, problems);
    if (config.groups[g].role.empty()) {
      problems.add(path + ".role", "''", "a role that is not empty", "leave it out for 'default'");
    }
  }
  check_layers(config, problems);
  if (resolvable && !block_sizes(config, registry).scheduler) {
    problems.add("groups", "block sizes", "a least common multiple of at most 2147483647 tokens",
                 "give scheduler_block_size, or block sizes that divide one another");
  }
}

bool stored(const GroupConfig& group, const SpecTraits& traits) noexcept {
  return group.enable_kv_transfer && traits.prefix_cacheable;
}

BlockSizes block_sizes(const CacheConfig& config, const SpecRegistry& registry) {
  std::vector<std::uint32_t> of_store;
  std::vector<std::uint32_t> of_all;
  for (const GroupConfig& group : config.groups) {
    const std::vector<CacheSpec> specs = unwrap(group).specs;
    const std::uint32_t tokens = tokens_per_block(specs[0], config.parallel, registry);
    of_all.push_back(tokens);
    if (stored(group, combined_traits(specs, registry))) of_store.push_back(tokens);
  }
  // Scratch would only coarsen S and refine h; without a store group there is nothing else to take.
  const std::vector<std::uint32_t>& tokens = of_store.empty() ? of_all : of_store;
  std::uint64_t multiple = 1;
  std::uint32_t divisor = 0;
  for (const std::uint32_t each : tokens) {
    if (multiple <= kMaxCount) multiple = std::lcm(multiple, std::uint64_t{each});
    divisor = std::gcd(divisor, each);
  }
  BlockSizes sizes{config.scheduler_block_size, config.hash_block_size.value_or(divisor)};
  if (!sizes.scheduler && multiple <= kMaxCount)
    sizes.scheduler = static_cast<std::uint32_t>(multiple);
  return sizes;
}

}  // namespace kvprism::detail
