#include "c_api/kinds.h"

#include <array>
#include <string>
#include <string_view>
#include <utility>

using namespace kvprism;         // NOLINT(google-build-using-namespace): functions outside of any
using namespace kvprism::c_api;  // NOLINT(google-build-using-namespace)

namespace kvprism::c_api {
namespace {

template <class Rule, std::size_t N>
using Words = std::array<std::pair<std::string_view, Rule>, N>;

constexpr Words<PayloadKind, 3> kPayloads{{{"attention", PayloadKind::kAttention},
                                           {"state", PayloadKind::kState},
                                           {"raw", PayloadKind::kRaw}}};

template <class Rule, std::size_t N>
Words<Rule, N> named(const std::array<Rule, N>& rules) {
  Words<Rule, N> words;
  for (std::size_t i = 0; i < N; ++i) words[i] = {to_string(rules[i]), rules[i]};
  return words;
}

// Adds a problem, and gives the last rule, when no word fits.
template <class Rule, std::size_t N>
Rule rule_of(Arguments& arguments, const char* given, const Words<Rule, N>& words,
             const std::string& path) {
  std::string listed;
  for (const auto& [word, rule] : words) {
    if (given != nullptr && given == word) return rule;
    listed.append(listed.empty() ? "one of " : ", ").append(word);
  }
  arguments.wrong(path, given == nullptr ? "null" : given, listed);
  return words.back().second;
}

bool flag_of(Arguments& arguments, std::uint32_t given, const std::string& path) {
  if (given > 1) {
    arguments.wrong(path, given == KVPRISM_UNDECLARED ? "undeclared" : std::to_string(given),
                    "0 or 1");
  }
  return given == 1;
}

SpecKind kind_of(Arguments& arguments, const kvprism_kind& given, const std::string& path) {
  const auto payload = rule_of(arguments, given.payload, kPayloads, path + ".payload");
  const auto hit = rule_of(arguments, given.hit,
                           named(std::array{HitRule::kPrefix, HitRule::kWindow, HitRule::kChunk,
                                            HitRule::kLastState, HitRule::kNever}),
                           path + ".hit");
  const auto save =
      rule_of(arguments, given.save,
              named(std::array{SaveRule::kPositional, SaveRule::kHandOff, SaveRule::kNever}),
              path + ".save");
  const auto peer = rule_of(arguments, given.peer,
                            named(std::array{PeerRule::kSuffix, PeerRule::kWindow, PeerRule::kState,
                                             PeerRule::kWhole, PeerRule::kNone}),
                            path + ".peer");
  const bool dcp_sharded = flag_of(arguments, given.dcp_sharded, path + ".dcp_sharded");
  const bool latent = flag_of(arguments, given.latent, path + ".latent");
  const bool cacheable = flag_of(arguments, given.prefix_cacheable, path + ".prefix_cacheable");
  const bool fine = flag_of(arguments, given.fine_grained_lookup, path + ".fine_grained_lookup");
  if (given.replay_tokens == KVPRISM_UNDECLARED)
    arguments.wrong(path + ".replay_tokens", "undeclared", "a number of tokens");
  const bool windowed = hit == HitRule::kWindow || hit == HitRule::kChunk;
  if (given.window == KVPRISM_UNDECLARED || windowed != (given.window != 0)) {
    arguments.wrong(path + ".window",
                    given.window == KVPRISM_UNDECLARED   ? "undeclared"
                    : given.window == KVPRISM_OWN_WINDOW ? "KVPRISM_OWN_WINDOW"
                                                         : std::to_string(given.window),
                    windowed ? "a number of tokens above 0, or KVPRISM_OWN_WINDOW"
                             : "0, as the hit rule has no window");
  }
  const bool chunked = hit == HitRule::kChunk;
  const bool own = windowed && given.window == KVPRISM_OWN_WINDOW;
  const ParameterSet none{};
  return {
      .name = text(given.name),
      .payload = payload,
      .needs = !own      ? none
               : chunked ? ParameterSet{SpecParameter::kAttentionChunk}
                         : ParameterSet{SpecParameter::kSlidingWindow},
      .allows = none,
      .dcp_sharded = dcp_sharded,
      .latent = latent,
      .traits = [=, window = given.window, replay = given.replay_tokens](const CacheSpec& spec) {
        const auto& of_group = chunked ? spec.attention_chunk_size : spec.sliding_window;
        return SpecTraits{.prefix_cacheable = cacheable,
                          .hit = hit,
                          .window = own ? of_group.value_or(0) : window,
                          .save = save,
                          .peer = peer,
                          .replay_tokens = spec.replay_tokens.value_or(replay),
                          .fine_grained_lookup = fine};
      }};
}

}  // namespace

SpecRegistry registry_with(Arguments& arguments, const kvprism_kind* kinds, std::size_t count) {
  SpecRegistry registry = SpecRegistry::builtin();
  for (std::size_t i = 0; i < count; ++i) {
    const std::string path = "kinds[" + std::to_string(i) + "]";
    arguments.need_size<kvprism_kind>(kinds[i].struct_size, path + ".struct_size");
    // Of another size the rest would be read from the wrong places.
    arguments.check();
    SpecKind kind = kind_of(arguments, kinds[i], path);
    try {
      registry = registry.with(std::move(kind));
    } catch (const Error& error) {
      for (const Problem& problem : error.problems())
        arguments.wrong(path + "." + problem.path, problem.value, problem.expected);
    }
  }
  arguments.check();
  return registry;
}

}  // namespace kvprism::c_api

kvprism_status kvprism_kind_init(kvprism_kind* kind, size_t struct_size, kvprism_error** error) {
  kvprism_kind undeclared{};
  undeclared.dcp_sharded = KVPRISM_UNDECLARED;
  undeclared.latent = KVPRISM_UNDECLARED;
  undeclared.prefix_cacheable = KVPRISM_UNDECLARED;
  undeclared.fine_grained_lookup = KVPRISM_UNDECLARED;
  undeclared.window = KVPRISM_UNDECLARED;
  undeclared.replay_tokens = KVPRISM_UNDECLARED;
  return init("kvprism_kind_init", kind, struct_size, undeclared, error);
}
