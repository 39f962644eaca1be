#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <optional>
#include <string>
#include <string_view>

#include "areas.h"
#include "kvprism/base/error.h"
#include "kvprism/spec/spec_registry.h"
#include "text.h"
#include "whole.h"

namespace kvprism::bindings {

namespace nb = nanobind;
using namespace nb::literals;

namespace {

constexpr std::array kHitRules{HitRule::kPrefix, HitRule::kWindow, HitRule::kChunk,
                               HitRule::kLastState, HitRule::kNever};
constexpr std::array kSaveRules{SaveRule::kPositional, SaveRule::kHandOff, SaveRule::kNever};
constexpr std::array kPeerRules{PeerRule::kSuffix, PeerRule::kWindow, PeerRule::kState,
                                PeerRule::kWhole, PeerRule::kNone};
constexpr std::array kPayloads{PayloadKind::kAttention, PayloadKind::kState, PayloadKind::kRaw};

std::string_view word_of(PayloadKind payload) {
  switch (payload) {
    case PayloadKind::kAttention:
      return "attention";
    case PayloadKind::kState:
      return "state";
    case PayloadKind::kRaw:
      return "raw";
  }
  return "unknown";
}
template <class Rule>
std::string_view word_of(Rule rule) {
  return to_string(rule);
}

// The rule that `word` names; adds a problem and gives the last rule when none does.
template <class Rule, std::size_t N>
Rule parse(std::string_view word, const std::array<Rule, N>& rules, const char* argument,
           ProblemList& problems) {
  std::vector<std::string_view> words;
  std::string listed;
  for (const Rule rule : rules) {
    words.push_back(word_of(rule));
    if (words.back() == word) return rule;
    listed += (listed.empty() ? "one of " : ", ") + std::string(words.back());
  }
  problems.add(argument, std::string(word), listed, suggest(word, words));
  return rules.back();
}

SpecRegistry with_kind(const SpecRegistry& registry, std::string name, std::string_view payload,
                       bool dcp_sharded, bool latent, bool prefix_cacheable, std::string_view hit,
                       const std::optional<Whole<std::uint32_t>>& window_tokens,
                       std::string_view save, std::string_view peer,
                       const Whole<std::uint32_t>& replay, bool fine_grained_lookup) {
  ProblemList problems;
  std::optional<std::uint32_t> window;
  if (window_tokens) window = (*window_tokens)("window", problems);
  const std::uint32_t replay_tokens = replay("replay_tokens", problems);
  const PayloadKind payload_kind = parse(payload, kPayloads, "payload", problems);
  const HitRule hit_rule = parse(hit, kHitRules, "hit", problems);
  const SaveRule save_rule = parse(save, kSaveRules, "save", problems);
  const PeerRule peer_rule = parse(peer, kPeerRules, "peer", problems);
  const bool windowed = hit_rule == HitRule::kWindow || hit_rule == HitRule::kChunk;
  const bool readable = !window_tokens || !window_tokens->wrong.is_valid();
  if (readable && window && windowed != (*window != 0)) {
    problems.add("window", std::to_string(*window),
                 windowed ? "a positive integer, or None to take each group's own"
                          : "0 for hit rule " + std::string(to_string(hit_rule)));
  } else if (!window && !windowed) {
    problems.add("window", "None", "0 for hit rule " + std::string(to_string(hit_rule)));
  }
  problems.throw_if_any(ErrorCode::kInvalidArgument, "spec kind");
  const bool chunked = hit_rule == HitRule::kChunk;
  const ParameterSet none{};
  const ParameterSet own = chunked ? ParameterSet{SpecParameter::kAttentionChunk}
                                   : ParameterSet{SpecParameter::kSlidingWindow};
  // Constants only: no call from here ever reaches Python.
  return registry.with(
      {.name = std::move(name),
       .payload = payload_kind,
       .needs = window ? none : own,
       .allows = none,
       .dcp_sharded = dcp_sharded,
       .latent = latent,
       .traits = [=](const CacheSpec& spec) {
         const auto& of_group = chunked ? spec.attention_chunk_size : spec.sliding_window;
         return SpecTraits{.prefix_cacheable = prefix_cacheable,
                           .hit = hit_rule,
                           .window = window ? *window : of_group.value_or(0),
                           .save = save_rule,
                           .peer = peer_rule,
                           .replay_tokens = spec.replay_tokens.value_or(replay_tokens),
                           .fine_grained_lookup = fine_grained_lookup};
       }});
}

}  // namespace

void bind_spec(nb::module_& module) {
  nb::class_<SpecRegistry>(module, "SpecRegistry",
                           "The known kinds of cache. A value: adding a kind makes a new registry.")
      .def_static("builtin", &SpecRegistry::builtin,
                  "The registry of the kinds that docs/configuration.md lists.")
      .def(
          "with_kind", &with_kind, nb::kw_only(), "name"_a, "payload"_a, "dcp_sharded"_a,
          "latent"_a, "prefix_cacheable"_a, "hit"_a, "window"_a.none(), "save"_a, "peer"_a,
          "replay_tokens"_a, "fine_grained_lookup"_a,
          R"(This registry and one more kind. Nothing has a default: leaving out an argument is a TypeError.

Args:
    name: What a group's ``kind`` says; not taken yet.
    payload: What a group of it declares: ``attention`` sizes, ``state`` tensors or ``raw`` bytes.
    dcp_sharded: Whether decode context parallelism spreads its positions.
    latent: Whether it keeps one vector a position, the same on every tensor rank (MLA).
    prefix_cacheable: Whether it may enter a hash-addressed store.
    hit: Objects that make a prefix usable: ``prefix``, ``window``, ``chunk``, ``last_state`` or ``never``.
    window: Tokens of a ``window`` or ``chunk`` rule, else 0; None takes each group's own ``sliding_window`` or
        ``attention_chunk_size``.
    save: Where saved bytes come from: ``positional``, ``hand_off`` or ``never``.
    peer: What travels from prefill to decode: ``suffix``, ``window``, ``state``, ``whole`` or ``none``.
    replay_tokens: Tokens recomputed after a hit before the cache is whole again; a group may give its own.
    fine_grained_lookup: Whether hits may end inside a block.

Raises:
    ArgumentError: A word is unknown, the name is empty or taken, or the window does not suit the hit rule.)")
      .def("names", &SpecRegistry::names, "Names of all kinds, built-in ones first.")
      .def(
          "__contains__",
          [](const SpecRegistry& r, std::string_view name) { return r.find(name) != nullptr; },
          "name"_a)
      .def("__repr__", [](const SpecRegistry& r) {
        nb::list names;
        for (const std::string_view name : r.names())
          names.append(nb::str(name.data(), name.size()));
        return nb::str("SpecRegistry({})").format(nb::str(", ").attr("join")(names));
      });
}

}  // namespace kvprism::bindings
