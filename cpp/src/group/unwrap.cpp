#include "group/unwrap.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string_view>

namespace kvprism::detail {
namespace {

// What members must have alike to share a block table, as a table of names and values.
std::vector<std::pair<std::string_view, std::string>> shared_facts(const CacheSpec& spec,
                                                                   const ParallelSizes& parallel,
                                                                   const SpecRegistry& registry) {
  const SpecTraits traits = registry.traits_of(spec);
  std::vector<std::pair<std::string_view, std::string>> facts{
      {"tokens per block", std::to_string(tokens_per_block(spec, parallel, registry))},
      {"peer rule", std::string(to_string(traits.peer))}};
  // A member that is not cacheable keeps the others out of the store: their rules do not matter.
  if (traits.prefix_cacheable) {
    std::string hit(to_string(traits.hit));
    if (traits.window != 0U) hit += "(" + std::to_string(traits.window.get()) + ")";
    facts.emplace_back("hit rule", std::move(hit));
    facts.emplace_back("save rule", std::string(to_string(traits.save)));
  }
  return facts;
}

}  // namespace

Unwrapped unwrap(const GroupConfig& group) {
  Unwrapped plain;
  if (group.members.empty()) {
    plain.layers = group.layers;
    plain.specs = {group.spec};
    plain.spec_of_layer.assign(group.layers.size(), 0);
    return plain;
  }
  std::map<std::string_view, std::uint32_t> spec_of;
  for (const LayerSpec& member : group.members) {
    for (const std::string& layer : member.layers) {
      spec_of.emplace(layer, static_cast<std::uint32_t>(plain.specs.size()));
      if (group.layers.empty()) plain.layers.push_back(layer);
    }
    plain.specs.push_back(member.spec);
  }
  if (!group.layers.empty()) plain.layers = group.layers;
  for (const std::string& layer : plain.layers) {
    const auto found = spec_of.find(layer);
    plain.spec_of_layer.push_back(found == spec_of.end() ? 0 : found->second);
  }
  return plain;
}

void check_wrapper(const GroupConfig& group, const std::string& path, ProblemList& problems) {
  if (group.spec.kind != kUniformKind) {
    if (!group.members.empty()) {
      problems.add(path + ".members", "a list of " + std::to_string(group.members.size()),
                   "none for kind '" + group.spec.kind + "'",
                   "only kind 'uniform' wraps other specs");
    }
    return;
  }
  if (group.members.empty())
    problems.add(path + ".members", "[]", "at least one spec with its layers");
  CacheSpec bare;
  bare.kind = kUniformKind;
  if (group.spec != bare) {
    problems.add(path, "a spec of its own", "nothing but members for kind 'uniform'",
                 "sizes and parameters belong to the members");
  }
  std::set<std::string_view> of_members;
  for (const LayerSpec& member : group.members)
    of_members.insert(member.layers.begin(), member.layers.end());
  if (group.layers.empty()) return;
  const std::set<std::string_view> named(group.layers.begin(), group.layers.end());
  for (const std::string_view layer : of_members) {
    if (!named.contains(layer))
      problems.add(path + ".layers", {}, "the layer " + std::string(layer) + " of a member",
                   "leave layers out to take the members' order");
  }
  for (const std::string_view layer : named) {
    if (!of_members.contains(layer))
      problems.add(path + ".layers", std::string(layer), "a layer of a member");
  }
}

void check_agreement(const GroupConfig& group, const std::string& path,
                     const ParallelSizes& parallel, const SpecRegistry& registry,
                     ProblemList& problems) {
  struct First {
    std::size_t member;
    std::string value;
  };
  std::map<std::string_view, First> firsts;
  for (std::size_t m = 0; m < group.members.size(); ++m) {
    for (auto& [name, value] : shared_facts(group.members[m].spec, parallel, registry)) {
      const auto [first, is_new] = firsts.emplace(name, First{m, value});
      if (is_new || first->second.value == value) continue;
      const std::string at = path + ".members[" + std::to_string(m) + "]";
      problems.add(at, std::string(name) + " " + value,
                   std::string(name) + " " + first->second.value + ", as members[" +
                       std::to_string(first->second.member) + "] has",
                   "layers that need different blocks belong to different groups");
    }
  }
}

SpecTraits combined_traits(const std::vector<CacheSpec>& specs, const SpecRegistry& registry) {
  SpecTraits all = registry.traits_of(specs[0]);
  for (std::size_t s = 1; s < specs.size(); ++s) {
    const SpecTraits each = registry.traits_of(specs[s]);
    const std::uint32_t replay = std::max(all.replay_tokens.get(), each.replay_tokens.get());
    const bool fine = all.fine_grained_lookup && each.fine_grained_lookup;
    if (all.prefix_cacheable && !each.prefix_cacheable) all = each;
    all.replay_tokens = replay;
    all.fine_grained_lookup = fine;
  }
  return all;
}

}  // namespace kvprism::detail
