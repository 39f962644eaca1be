#include "kvprism/group/projection.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <unordered_map>
#include <utility>

#include "group/config_check.h"
#include "group/hash128.h"
#include "group/unwrap.h"
#include "kvprism/base/log.h"

namespace kvprism {

struct Projection::Impl {
  CacheConfig config;
  std::uint32_t num_blocks = 0;
  std::string kv_layout;
  std::string key_schema;
  std::string key_namespace;
  ParallelSizes parallel;
  IndexedVector<GroupId, ResolvedGroup> groups;
  IndexedVector<TransferIndex, GroupId> transfer;
  IndexedVector<StoreIndex, GroupId> store;
  IndexedVector<GroupId, std::optional<TransferIndex>> transfer_of;
  IndexedVector<GroupId, std::optional<StoreIndex>> store_of;
  IndexedVector<GroupId, std::string> why_not_stored;
  std::uint32_t scheduler_block_size = 0;
  std::uint32_t hash_block_size = 0;
  std::uint32_t hit_alignment = 0;
  std::optional<std::uint32_t> retention_interval;
  std::optional<std::uint32_t> model_total_kv_heads;
  std::uint32_t replay_tokens = 1;
  std::vector<DigestFact> facts;
  Digest digest;
};

namespace {

std::string yes_no(bool value) { return value ? "true" : "false"; }

std::string reason_not_stored(const ResolvedGroup& group) {
  if (!group.enable_kv_transfer) return "enable_kv_transfer is false";
  if (group.traits.prefix_cacheable) return {};
  if (group.specs.size() > 1) return "a member of its wrapper is not prefix-cacheable";
  if (group.spec.bounded_replay) return "kind " + group.spec.kind + " is replayed after a hit";
  return "kind " + group.spec.kind + " is not prefix-cacheable";
}

void add_group_facts(const ResolvedGroup& group, std::vector<DigestFact>& facts) {
  const std::string path = detail::group_path(raw(group.id)) + ".";
  const SpecTraits& traits = group.traits;
  std::string hit(to_string(traits.hit));
  if (traits.window != 0U) hit.append("(").append(std::to_string(traits.window.get())).append(")");
  facts.push_back({path + "kind", group.spec.kind});
  facts.push_back({path + "tokens_per_block", std::to_string(group.tokens_per_block)});
  facts.push_back({path + "prefix_cacheable", yes_no(traits.prefix_cacheable)});
  facts.push_back({path + "enable_kv_transfer", yes_no(group.enable_kv_transfer)});
  facts.push_back({path + "replay_tokens", std::to_string(traits.replay_tokens.get())});
  facts.push_back({path + "hit", std::move(hit)});
  facts.push_back({path + "save", std::string(to_string(traits.save))});
  facts.push_back({path + "peer", std::string(to_string(traits.peer))});
  facts.push_back({path + "fine_grained_lookup", yes_no(traits.fine_grained_lookup)});
}

// Two machines that agree on these facts agree on every plan.
constexpr std::string_view kDigestVersion = "3";

std::string or_none(const std::optional<std::uint32_t>& value) {
  return value ? std::to_string(*value) : "none";
}

// Fills in the heads of the whole model. Heads times ranks is wrong where ranks replicate heads and
// nobody says so: it is said once (R34).
void fill_total_heads(CacheSpec& spec, const ParallelSizes& parallel, const SpecRegistry& registry,
                      const std::string& path) {
  auto* const attention = std::get_if<AttentionPayload>(&spec.payload);
  if (attention == nullptr || attention->total_num_kv_heads != 0) return;
  const bool latent = registry.at(spec.kind).latent;
  const std::uint32_t shards = attention->max_tp_shards
                                   ? std::min(*attention->max_tp_shards, parallel.tp)
                                   : (latent ? 1 : parallel.tp);
  attention->total_num_kv_heads = attention->num_kv_heads * shards;
  if (parallel.tp == 1 || latent || attention->max_tp_shards) return;
  log(LogLevel::kWarning,
      path + ".total_num_kv_heads is not given: " + std::to_string(attention->total_num_kv_heads) +
          " = num_kv_heads x tp is taken");
}

bool replicated(const CacheSpec& spec, const SpecRegistry& registry) {
  const auto* const state = std::get_if<StatePayload>(&spec.payload);
  return state != nullptr ? state->tp_replicated : registry.at(spec.kind).latent.get();
}

// Absent: every stage.
std::vector<std::uint32_t> stages_of(const GroupConfig& group, std::uint32_t pp) {
  std::vector<std::uint32_t> stages(pp);
  std::iota(stages.begin(), stages.end(), 0U);
  if (group.pipeline_stages) stages = *group.pipeline_stages;
  std::sort(stages.begin(), stages.end());
  return stages;
}

ResolvedGroup resolve(const GroupConfig& group, GroupId id, const CacheConfig& config,
                      const SpecRegistry& registry) {
  detail::Unwrapped plain = detail::unwrap(group);
  for (std::size_t s = 0; s < plain.specs.size(); ++s) {
    std::string path = detail::group_path(raw(id));
    if (!group.members.empty()) path += ".members[" + std::to_string(s) + "]";
    fill_total_heads(plain.specs[s], config.parallel, registry, path);
  }
  const CacheSpec& first = plain.specs[plain.layers.empty() ? 0 : plain.spec_of_layer[0]];
  return {.id = id,
          .spec = first,
          .traits = detail::combined_traits(plain.specs, registry),
          .tokens_per_block = kvprism::tokens_per_block(first, config.parallel, registry),
          .page_size_bytes = kvprism::page_size_bytes(first),
          .layers = std::move(plain.layers),
          .stages = stages_of(group, config.parallel.pp),
          .enable_kv_transfer = group.enable_kv_transfer,
          .is_eagle_group = group.is_eagle_group,
          .host_resident = group.host_resident,
          .role = group.role,
          .tp_replicated =
              std::all_of(plain.specs.begin(), plain.specs.end(),
                          [&](const CacheSpec& spec) { return replicated(spec, registry); }),
          .specs = std::move(plain.specs),
          .spec_of_layer = std::move(plain.spec_of_layer),
          .whole_pages = config.key_schema == "vllm"};
}

// Which groups lose their last block to the draft model. When the engine drops blocks and no stored
// group says that it holds draft layers, each of them might; groups of equal specs are searched as
// one, so one flag counts for all of them (vLLM: find_longest_cache_hit).
void resolve_drafts(std::optional<bool> use_eagle, IndexedVector<GroupId, ResolvedGroup>& groups) {
  if (!use_eagle) return;
  const auto stored = [](const ResolvedGroup& group) {
    return group.enable_kv_transfer && group.traits.prefix_cacheable;
  };
  const bool any = std::any_of(groups.begin(), groups.end(), [&](const ResolvedGroup& group) {
    return stored(group) && group.is_eagle_group;
  });
  std::vector<bool> drops;
  for (const ResolvedGroup& group : groups) {
    drops.push_back(*use_eagle && stored(group) &&
                    (!any || std::any_of(groups.begin(), groups.end(), [&](const ResolvedGroup& g) {
                      return stored(g) && g.is_eagle_group && g.spec == group.spec;
                    })));
  }
  for (const GroupId id : indices<GroupId>(groups.size()))
    groups[id].is_eagle_group = drops[raw(id)];
}

}  // namespace

std::string to_hex(const Digest& digest) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  text.reserve(digest.bytes.size() * 2);
  for (const std::uint8_t byte : digest.bytes) {
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

std::uint64_t ResolvedGroup::moved_bytes(std::size_t layer) const {
  const CacheSpec& layer_spec = this->layer_spec(layer);
  return whole_pages ? kvprism::page_size_bytes(layer_spec) : unpadded_page_bytes(layer_spec);
}

std::uint64_t ResolvedGroup::object_bytes() const {
  std::uint64_t bytes = 0;
  for (std::size_t layer = 0; layer < layers.size(); ++layer) bytes += moved_bytes(layer);
  return bytes;
}

std::vector<Problem> Projection::check(const CacheConfig& config, const SpecRegistry& registry) {
  ProblemList problems;
  detail::check_config(config, registry, problems);
  return problems.problems();
}

std::shared_ptr<const Projection> Projection::make(const CacheConfig& config,
                                                   const SpecRegistry& registry) {
  ProblemList problems;
  detail::check_config(config, registry, problems);
  problems.throw_if_any(ErrorCode::kInvalidConfig, "cache config");

  auto impl = std::make_unique<Impl>();
  impl->config = config;
  impl->num_blocks = config.num_blocks;
  impl->kv_layout = config.kv_layout;
  impl->key_schema = config.key_schema;
  impl->key_namespace = config.key_namespace;
  impl->parallel = config.parallel;
  for (const GroupConfig& group : config.groups) {
    const GroupId id{static_cast<std::uint32_t>(impl->groups.size())};
    ResolvedGroup resolved = resolve(group, id, config, registry);
    impl->why_not_stored.push_back(reason_not_stored(resolved));
    impl->replay_tokens = std::max(impl->replay_tokens, resolved.traits.replay_tokens.get());
    impl->transfer_of.push_back(
        group.enable_kv_transfer ? std::optional(impl->transfer.push_back(id)) : std::nullopt);
    impl->store_of.push_back(detail::stored(group, resolved.traits)
                                 ? std::optional(impl->store.push_back(id))
                                 : std::nullopt);
    impl->groups.push_back(std::move(resolved));
  }
  resolve_drafts(config.use_eagle, impl->groups);
  const detail::BlockSizes sizes = detail::block_sizes(config, registry);
  impl->scheduler_block_size = *sizes.scheduler;
  impl->hash_block_size = sizes.hash;
  impl->hit_alignment = config.cache_hit_alignment_tokens.value_or(*sizes.scheduler);
  impl->retention_interval = config.prefix_cache_retention_interval;
  impl->model_total_kv_heads = config.model_total_kv_heads;

  std::vector<DigestFact>& facts = impl->facts;
  facts.push_back({"digest_version", std::string(kDigestVersion)});
  facts.push_back({"num_groups", std::to_string(impl->groups.size())});
  for (const ResolvedGroup& group : impl->groups) add_group_facts(group, facts);
  facts.push_back({"scheduler_block_size", std::to_string(impl->scheduler_block_size)});
  facts.push_back({"hash_block_size", std::to_string(impl->hash_block_size)});
  facts.push_back({"hit_alignment", std::to_string(impl->hit_alignment)});
  facts.push_back({"partial_hits", yes_no(impl->hit_alignment < impl->scheduler_block_size)});
  facts.push_back({"retention_interval", or_none(config.prefix_cache_retention_interval)});
  facts.push_back({"model_total_kv_heads", or_none(config.model_total_kv_heads)});
  facts.push_back({"key_schema", config.key_schema});
  facts.push_back({"namespace", config.key_namespace});
  facts.push_back({"parallel.tp", std::to_string(config.parallel.tp)});
  facts.push_back({"parallel.pp", std::to_string(config.parallel.pp)});
  facts.push_back({"parallel.pcp", std::to_string(config.parallel.pcp)});
  facts.push_back({"parallel.dcp", std::to_string(config.parallel.dcp)});
  impl->digest = detail::hash128(detail::canonical_text(facts));
  return std::shared_ptr<const Projection>(new Projection(std::move(impl)));
}

Projection::Projection(std::unique_ptr<const Impl> impl) : impl_(std::move(impl)) {}
Projection::~Projection() = default;

const CacheConfig& Projection::config() const noexcept { return impl_->config; }
std::size_t Projection::num_groups() const noexcept { return impl_->groups.size(); }
std::size_t Projection::num_transfer_groups() const noexcept { return impl_->transfer.size(); }
std::size_t Projection::num_store_groups() const noexcept { return impl_->store.size(); }
std::uint32_t Projection::num_blocks() const noexcept { return impl_->num_blocks; }
const std::string& Projection::kv_layout() const noexcept { return impl_->kv_layout; }
const std::string& Projection::key_schema() const noexcept { return impl_->key_schema; }
const std::string& Projection::key_namespace() const noexcept { return impl_->key_namespace; }
const ParallelSizes& Projection::parallel() const noexcept { return impl_->parallel; }

const ResolvedGroup& Projection::group(GroupId id) const noexcept { return impl_->groups[id]; }
GroupId Projection::group_id(StoreIndex index) const noexcept { return impl_->store[index]; }
GroupId Projection::group_id(TransferIndex index) const noexcept { return impl_->transfer[index]; }

std::optional<StoreIndex> Projection::store_index(GroupId id) const noexcept {
  return impl_->store_of.contains(id) ? impl_->store_of[id] : std::nullopt;
}

std::optional<TransferIndex> Projection::transfer_index(GroupId id) const noexcept {
  return impl_->transfer_of.contains(id) ? impl_->transfer_of[id] : std::nullopt;
}

std::string_view Projection::why_not_stored(GroupId id) const noexcept {
  return impl_->why_not_stored[id];
}

std::uint32_t Projection::scheduler_block_size() const noexcept {
  return impl_->scheduler_block_size;
}
std::uint32_t Projection::hash_block_size() const noexcept { return impl_->hash_block_size; }
std::uint32_t Projection::hit_alignment() const noexcept { return impl_->hit_alignment; }
std::optional<std::uint32_t> Projection::retention_interval() const noexcept {
  return impl_->retention_interval;
}
std::optional<std::uint32_t> Projection::model_total_kv_heads() const noexcept {
  return impl_->model_total_kv_heads;
}
std::uint32_t Projection::replay_tokens() const noexcept { return impl_->replay_tokens; }

std::uint32_t Projection::max_hit(std::uint32_t prompt_tokens) const noexcept {
  if (prompt_tokens <= impl_->replay_tokens) return 0;
  const std::uint32_t usable = prompt_tokens - impl_->replay_tokens;
  return usable - usable % impl_->hit_alignment;
}

const Digest& Projection::digest() const noexcept { return impl_->digest; }
const std::vector<DigestFact>& Projection::digest_facts() const noexcept { return impl_->facts; }

std::string Projection::describe_mismatch(const std::vector<DigestFact>& ours,
                                          const std::vector<DigestFact>& theirs) {
  struct Row {
    const std::string* name;
    const std::string* ours;
    const std::string* theirs;
  };
  static const std::string kAbsent = "(absent)";
  std::vector<Row> rows;
  std::unordered_map<std::string_view, std::size_t> row_of;
  for (const DigestFact& fact : ours) {
    row_of.emplace(fact.name, rows.size());
    rows.push_back({&fact.name, &fact.value, &kAbsent});
  }
  for (const DigestFact& fact : theirs) {
    if (const auto found = row_of.find(fact.name); found != row_of.end()) {
      rows[found->second].theirs = &fact.value;
    } else {
      rows.push_back({&fact.name, &kAbsent, &fact.value});
    }
  }
  std::size_t name_width = 4;
  std::size_t ours_width = 4;
  for (const Row& row : rows) {
    name_width = std::max(name_width, row.name->size());
    ours_width = std::max(ours_width, row.ours->size());
  }
  const auto line = [&](std::string_view mark, const std::string& name, const std::string& left,
                        const std::string& right) {
    std::string text(mark);
    text += name + std::string(name_width - name.size() + 2, ' ');
    text += left + std::string(ours_width - left.size() + 2, ' ');
    return text + right + "\n";
  };
  std::string table = line("   ", "fact", "ours", "theirs");
  for (const Row& row : rows) {
    table += line(*row.ours == *row.theirs ? "   " : "-> ", *row.name, *row.ours, *row.theirs);
  }
  return table;
}

}  // namespace kvprism
