#include "kvprism/hit/hit_search.h"

#include <algorithm>
#include <span>
#include <utility>

namespace kvprism {

// The flags of a family: an object counts when every member has it.
class HitSearch::Rows {
 public:
  Rows(const Presence& presence, const std::vector<StoreIndex>& members) noexcept
      : presence_(presence),
        first_(presence.row(members.front())),
        others_(std::span(members).subspan(1)) {}

  bool has(std::uint32_t unit) const noexcept {
    if (unit >= first_.size() || first_[unit] == 0) return false;
    for (const StoreIndex other : others_) {
      if (!presence_.has(other, unit)) return false;
    }
    return true;
  }

 private:
  const Presence& presence_;
  std::span<const std::uint8_t> first_;
  std::span<const StoreIndex> others_;
};

HitSearch::HitSearch(std::vector<HitGroup> groups, const HitGrid& grid)
    : groups_(std::move(groups)), grid_(grid) {
  for (const StoreIndex index : indices<StoreIndex>(groups_.size())) {
    const HitGroup& group = groups_[raw(index)];
    const auto same = std::find_if(families_.begin(), families_.end(), [&](const Family& family) {
      return family.rule.family == group.family;
    });
    if (same == families_.end()) {
      families_.push_back({group, {index}});
    } else {
      same->members.push_back(index);
      same->rule.draft |= group.draft;
    }
  }
  // What is saved and looked up of a member must be what the search of its family asks for.
  for (const Family& family : families_) {
    for (const StoreIndex member : family.members) groups_[raw(member)].draft = family.rule.draft;
  }
  const auto order = [](const Family& family) {
    return std::pair(family.rule.rule != HitRule::kPrefix, family.members.front());
  };
  std::sort(families_.begin(), families_.end(),
            [&](const Family& a, const Family& b) { return order(a) < order(b); });
}

HitSearch::HitSearch(const Projection& projection)
    : HitSearch(hit_groups(projection), hit_grid(projection)) {}

std::uint32_t HitSearch::find(const Presence& presence, std::uint32_t local,
                              std::uint32_t max_tokens) noexcept {
  return search(presence, local, max_tokens, true);
}

std::uint32_t HitSearch::find_below(const Presence& presence, std::uint32_t local,
                                    std::uint32_t probed, std::uint32_t limit) noexcept {
  const std::uint32_t hit = find(presence, local, probed);
  return hit <= limit ? hit : find(presence, local, limit);
}

std::uint32_t HitSearch::find_loaded(const Presence& presence, std::uint32_t local,
                                     std::uint32_t hit) noexcept {
  return search(presence, local, hit, false);
}

std::uint32_t HitSearch::shared_prefix(const Presence& presence, std::uint32_t local,
                                       std::uint32_t max_tokens) const noexcept {
  std::uint32_t shared = max_tokens;
  bool any = false;
  for (const Family& family : families_) {
    if (family.rule.rule != HitRule::kPrefix) continue;
    any = true;
    shared = std::min(shared, longest(family, presence, local, shared, false));
  }
  return any ? shared - shared % grid_.step : 0;
}

std::uint32_t HitSearch::search(const Presence& presence, std::uint32_t local,
                                std::uint32_t max_tokens, bool drafts) noexcept {
  std::uint32_t hit = aligned(max_tokens);
  if (families_.empty() || hit <= local) return local;
  for (Family& family : families_) family.proven = false;
  for (bool first = true;; first = false) {
    std::uint32_t reached = hit;
    for (Family& family : families_) {
      const HitGroup& rule = family.rule;
      // What holds for a prefix holds for every shorter one.
      if (rule.rule == HitRule::kPrefix && !first) continue;
      const bool drop = drafts && rule.draft && !family.proven && rule.rule != HitRule::kLastState;
      std::uint32_t bound = reached;
      // The extra object lies beyond the hit. A single family has no other that could shorten its
      // hit, and keeps to the bound (as the reference does).
      if (drop && families_.size() > 1) {
        bound += rule.fine() ? grid_.alignment : rule.chunk_tokens;
      }
      const std::uint32_t found = longest(family, presence, local, bound, drop);
      if (drafts && rule.draft && !family.proven) {
        family.proven = true;
      } else if (found < reached) {
        // A shorter hit needs its own extra objects.
        for (Family& other : families_) other.proven = false;
      }
      reached = std::min(reached, found);
    }
    if (reached <= local) return local;
    if (reached >= hit) return hit;
    hit = reached;
  }
}

std::uint32_t HitSearch::longest(const Family& family, const Presence& presence,
                                 std::uint32_t local, std::uint32_t bound,
                                 bool drop) const noexcept {
  const Rows rows(presence, family.members);
  switch (family.rule.rule) {
    case HitRule::kPrefix:
      return longest_prefix(family.rule, rows, local, bound, drop);
    case HitRule::kWindow:
      return longest_window(family.rule, rows, local, bound, drop);
    case HitRule::kChunk:
      return longest_chunk(family.rule, rows, local, bound, drop);
    case HitRule::kLastState:
      return longest_state(family.rule, rows, local, bound);
    case HitRule::kNever:
      break;
  }
  return 0;
}

std::uint32_t HitSearch::longest_prefix(const HitGroup& rule, const Rows& rows, std::uint32_t local,
                                        std::uint32_t bound, bool drop) const noexcept {
  const std::uint32_t units = rule.chunk_tokens / rule.unit_tokens;  // of a chunk
  const std::uint32_t end = bound / rule.chunk_tokens;
  std::uint32_t chunk = local / rule.chunk_tokens;
  while (chunk < end && rows.has((chunk + 1) * units - 1)) ++chunk;
  std::uint32_t reached = chunk * rule.chunk_tokens;
  if (rule.fine()) {
    // The longest object inside the first chunk that has no whole one.
    const std::uint32_t first = chunk * units;
    std::uint32_t unit = std::min(first + units - 1, bound / rule.unit_tokens);
    while (unit > first && !rows.has(unit - 1)) --unit;
    if (unit > first) reached = unit * rule.unit_tokens;
  }
  if (drop) reached -= std::min({reached, grid_.alignment, rule.chunk_tokens});
  return aligned(reached);
}

std::uint32_t HitSearch::longest_window(const HitGroup& rule, const Rows& rows, std::uint32_t local,
                                        std::uint32_t bound, bool drop) const noexcept {
  const std::uint32_t dropped = drop ? 1 : 0;
  const std::uint32_t need = window_chunks(rule) + dropped;
  const std::uint32_t local_end = local / rule.chunk_tokens;
  std::uint32_t run = 0;
  std::uint32_t chunk = bound / rule.chunk_tokens;
  bool complete = false;
  while (!complete && chunk > local_end) {
    --chunk;
    if (!rows.has(chunk)) {
      run = 0;
      continue;
    }
    // A run ends where a hit may end.
    const std::uint32_t end = (chunk + 1 - dropped) * rule.chunk_tokens;
    if (run == 0 && end % grid_.alignment != 0) continue;
    ++run;
    complete = run >= need;
  }
  // What is missing of the run is in the engine's own cache.
  complete |= run > 0 && local_end > 0;
  if (run == 0) return 0;
  std::uint32_t reached = (chunk + run) * rule.chunk_tokens;
  // A run that reaches token 0 needs no more chunks.
  if (!complete) reached = aligned(reached);
  if (drop) reached = aligned(reached - std::min(reached, rule.chunk_tokens));
  return reached;
}

std::uint32_t HitSearch::longest_chunk(const HitGroup& rule, const Rows& rows, std::uint32_t local,
                                       std::uint32_t bound, bool drop) const noexcept {
  const auto start_of = [&](std::uint32_t tokens) {
    return (tokens - tokens % rule.window) / rule.chunk_tokens;
  };
  bool take_off = drop;
  for (;;) {
    const std::uint32_t end = bound / rule.chunk_tokens;
    std::uint32_t chunk = std::max(start_of(bound), local / rule.chunk_tokens);
    while (chunk < end && rows.has(chunk)) ++chunk;
    std::uint32_t reached = chunk * rule.chunk_tokens;
    if (take_off) reached -= std::min(reached, rule.chunk_tokens);
    take_off = false;
    reached = aligned(reached);
    // A prefix that ends in an earlier attention chunk needs other blocks than those looked at.
    if (reached <= local || reached == bound || start_of(reached) >= start_of(bound)) {
      return reached;
    }
    bound = reached;
  }
}

std::uint32_t HitSearch::longest_state(const HitGroup& rule, const Rows& rows, std::uint32_t local,
                                       std::uint32_t bound) const noexcept {
  for (std::uint32_t unit = bound / rule.unit_tokens; unit > 0; --unit) {
    const std::uint32_t tokens = unit * rule.unit_tokens;
    if (tokens <= local) break;
    if (tokens % grid_.alignment == 0 && rows.has(unit - 1)) return tokens;
  }
  return 0;
}

std::uint32_t HitSearch::tail_tokens(StoreIndex group, const Presence& presence,
                                     std::uint32_t hit) const noexcept {
  const HitGroup& rule = groups_[raw(group)];
  if (hit == 0 || needed_chunks(rule, hit).empty()) return 0;
  const std::uint32_t units = rule.chunk_tokens / rule.unit_tokens;
  const std::uint32_t chunk = (hit - 1) / rule.chunk_tokens;
  std::uint32_t unit = (hit + rule.unit_tokens - 1) / rule.unit_tokens;
  while (unit < (chunk + 1) * units && !presence.has(group, unit - 1)) ++unit;
  return unit * rule.unit_tokens;
}

}  // namespace kvprism
