#include "kvprism/store/validate_store.h"

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

namespace kvprism {
namespace {

constexpr std::string_view kCrossAttention = "cross_attention";

std::string tokens(std::uint32_t count) { return std::to_string(count) + " tokens"; }

std::string group_path(GroupId id) { return "groups[" + std::to_string(raw(id)) + "]"; }

// Each member's own mode, so that no wrapper hides one (R02).
void check_modes(const ResolvedGroup& group, ProblemList& problems) {
  for (std::size_t s = 0; s < group.specs.size(); ++s) {
    const auto* const state = std::get_if<StatePayload>(&group.specs[s].payload);
    if (state == nullptr || state->cache_mode == "align") continue;
    std::string path = group_path(group.id);
    if (group.specs.size() > 1) path += ".members[" + std::to_string(s) + "]";
    problems.add(path + ".mamba_cache_mode", state->cache_mode, "align",
                 "only states committed at block boundaries can be used again");
  }
}

// Hits inside a block need every group's help: to look up finely, or to have blocks of one hash.
void check_alignment(const Projection& projection, ProblemList& problems) {
  const std::uint32_t alignment = projection.hit_alignment();
  const std::uint32_t scheduler = projection.scheduler_block_size();
  const std::uint32_t hash = projection.hash_block_size();
  if (alignment == scheduler) return;
  const auto refuse = [&](std::string expected, std::string hint) {
    problems.add("cache_hit_alignment_tokens", tokens(alignment), std::move(expected),
                 std::move(hint));
  };
  if (alignment % hash != 0)
    refuse("a multiple of hash_block_size, " + tokens(hash), "hits end on hash units");
  if (scheduler % alignment != 0)
    refuse("a divisor of scheduler_block_size, " + tokens(scheduler), {});
  for (const StoreIndex index : indices<StoreIndex>(projection.num_store_groups())) {
    const ResolvedGroup& group = projection.group(index);
    if (!group.traits.fine_grained_lookup && alignment % group.tokens_per_block != 0) {
      refuse("a multiple of the " + tokens(group.tokens_per_block) + " of a block of " +
                 group_path(group.id),
             "a hit cannot end inside a block of kind '" + group.spec.kind + "'");
    }
    for (const CacheSpec& spec : group.specs) {
      const auto* const attention = std::get_if<AttentionPayload>(&spec.payload);
      if (attention == nullptr || alignment % attention->compression == 0) continue;
      refuse("a multiple of the compression of " + group_path(group.id) + ", " +
                 tokens(attention->compression),
             "a hit cannot end inside a stored position");
    }
  }
}

}  // namespace

std::vector<Problem> validate_store(const Projection& projection) {
  ProblemList problems;
  if (projection.num_store_groups() == 0) {
    std::string reasons;
    for (const GroupId id : indices<GroupId>(projection.num_groups())) {
      if (!reasons.empty()) reasons += "; ";
      reasons +=
          "group " + std::to_string(raw(id)) + ": " + std::string(projection.why_not_stored(id));
    }
    problems.add("groups", "none is storable",
                 "at least one group that is transferable and prefix-cacheable", reasons);
  }
  const std::uint32_t scheduler = projection.scheduler_block_size();
  const std::uint32_t hash = projection.hash_block_size();
  if (scheduler % hash != 0) {
    problems.add("scheduler_block_size", tokens(scheduler),
                 "a multiple of hash_block_size, " + tokens(hash), "hits end on hash units");
  }
  if (projection.num_store_groups() > 1 && projection.parallel().pcp > 1) {
    problems.add("parallel.pcp", std::to_string(projection.parallel().pcp),
                 "1 with more than one storable group",
                 "how prefill context ranks share blocks of several groups is not defined");
  }
  check_alignment(projection, problems);
  for (const GroupId id : indices<GroupId>(projection.num_groups())) {
    const ResolvedGroup& group = projection.group(id);
    const bool encoder = std::any_of(group.specs.begin(), group.specs.end(),
                                     [](const auto& spec) { return spec.kind == kCrossAttention; });
    if (encoder && group.enable_kv_transfer) {
      problems.add(group_path(id) + ".kind", std::string(kCrossAttention),
                   "no encoder states beside a store",
                   "they do not follow from the tokens of a prefix");
    }
  }
  for (const StoreIndex index : indices<StoreIndex>(projection.num_store_groups())) {
    const ResolvedGroup& group = projection.group(index);
    check_modes(group, problems);
    const std::string path = group_path(group.id);
    // Its ids count the blocks of another pool, and would name other groups' blocks here.
    if (group.host_resident) {
      problems.add(path + ".host_resident", "true", "false for a storable group",
                   "a pool of its own in host memory is not supported; set enable_kv_transfer to "
                   "false to leave the group out");
    }
    if (group.tokens_per_block % hash != 0) {
      problems.add(path + ".block_size", tokens(group.tokens_per_block),
                   "a multiple of hash_block_size, " + tokens(hash),
                   "a chunk is named by its last hash");
    }
    if (scheduler % group.tokens_per_block != 0) {
      problems.add(path + ".block_size", tokens(group.tokens_per_block),
                   "a divisor of scheduler_block_size, " + tokens(scheduler),
                   "hits end on whole blocks");
    }
  }
  return problems.problems();
}

}  // namespace kvprism
