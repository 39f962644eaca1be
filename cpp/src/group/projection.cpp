#include "kvprism/group/projection.h"

#include <algorithm>
#include <string>
#include <unordered_map>
#include <utility>

#include "group/config_check.h"
#include "group/hash128.h"
#include "kvprism/base/log.h"

namespace kvprism {

struct Projection::Impl {
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
  std::uint32_t replay_tokens = 1;
  std::vector<DigestFact> facts;
  Digest digest;
};

namespace {

std::string yes_no(bool value) { return value ? "true" : "false"; }

std::string reason_not_stored(const ResolvedGroup& group) {
  if (!group.enable_kv_transfer) return "enable_kv_transfer is false";
  if (!group.traits.prefix_cacheable) return "kind " + group.spec.kind + " is not prefix-cacheable";
  return {};
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
  facts.push_back({path + "is_eagle_group", yes_no(group.is_eagle_group)});
}

// Two machines that agree on these facts agree on every plan.
constexpr std::string_view kDigestVersion = "1";

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
  impl->num_blocks = config.num_blocks;
  impl->kv_layout = config.kv_layout;
  impl->key_schema = config.key_schema;
  impl->key_namespace = config.key_namespace;
  impl->parallel = config.parallel;
  for (const GroupConfig& group : config.groups) {
    const GroupId id{static_cast<std::uint32_t>(impl->groups.size())};
    ResolvedGroup resolved{
        .id = id,
        .spec = group.spec,
        .traits = registry.traits_of(group.spec),
        .tokens_per_block = kvprism::tokens_per_block(group.spec, config.parallel, registry),
        .page_size_bytes = kvprism::page_size_bytes(group.spec),
        .layers = group.layers,
        .enable_kv_transfer = group.enable_kv_transfer,
        .is_eagle_group = group.is_eagle_group,
        .host_resident = group.host_resident,
        .role = group.role};
    auto* const attention = std::get_if<AttentionPayload>(&resolved.spec.payload);
    if (attention != nullptr && attention->total_num_kv_heads == 0) {
      // Wrong where ranks replicate heads, so it is said once (R34).
      attention->total_num_kv_heads = attention->num_kv_heads * config.parallel.tp;
      if (config.parallel.tp > 1) {
        log(LogLevel::kWarning, detail::group_path(raw(id)) + ".total_num_kv_heads is not given: " +
                                    std::to_string(attention->total_num_kv_heads) +
                                    " = num_kv_heads x tp is taken");
      }
    }
    impl->why_not_stored.push_back(reason_not_stored(resolved));
    impl->replay_tokens = std::max(impl->replay_tokens, resolved.traits.replay_tokens.get());
    impl->transfer_of.push_back(
        group.enable_kv_transfer ? std::optional(impl->transfer.push_back(id)) : std::nullopt);
    impl->store_of.push_back(detail::stored(group, resolved.traits)
                                 ? std::optional(impl->store.push_back(id))
                                 : std::nullopt);
    impl->groups.push_back(std::move(resolved));
  }
  const detail::BlockSizes sizes = detail::block_sizes(config, registry);
  impl->scheduler_block_size = *sizes.scheduler;
  impl->hash_block_size = sizes.hash;

  std::vector<DigestFact>& facts = impl->facts;
  facts.push_back({"digest_version", std::string(kDigestVersion)});
  facts.push_back({"num_groups", std::to_string(impl->groups.size())});
  for (const ResolvedGroup& group : impl->groups) add_group_facts(group, facts);
  facts.push_back({"scheduler_block_size", std::to_string(impl->scheduler_block_size)});
  facts.push_back({"hash_block_size", std::to_string(impl->hash_block_size)});
  facts.push_back({"partial_hits", yes_no(false)});
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
std::uint32_t Projection::replay_tokens() const noexcept { return impl_->replay_tokens; }

std::uint32_t Projection::max_hit(std::uint32_t prompt_tokens) const noexcept {
  if (prompt_tokens <= impl_->replay_tokens) return 0;
  const std::uint32_t usable = prompt_tokens - impl_->replay_tokens;
  return usable - usable % impl_->scheduler_block_size;
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
