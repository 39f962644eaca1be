#include "kvprism/store/validate_store.h"

#include <string>
#include <variant>

namespace kvprism {
namespace {

std::string tokens(std::uint32_t count) { return std::to_string(count) + " tokens"; }

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
  for (const StoreIndex index : indices<StoreIndex>(projection.num_store_groups())) {
    const ResolvedGroup& group = projection.group(index);
    const std::string path = "groups[" + std::to_string(raw(group.id)) + "]";
    const auto* const state = std::get_if<StatePayload>(&group.spec.payload);
    if (state != nullptr && state->cache_mode != "align") {
      problems.add(path + ".mamba_cache_mode", state->cache_mode, "align",
                   "only states committed at block boundaries can be used again");
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
