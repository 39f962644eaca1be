#include "spec/spec_check.h"

#include <exception>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>

#include "spec/checked_math.h"

namespace kvprism::detail {
namespace {

std::string_view payload_word(PayloadKind payload) {
  switch (payload) {
    case PayloadKind::kAttention:
      return "attention sizes (num_kv_heads, head_size, dtype)";
    case PayloadKind::kState:
      return "state tensors (shapes, dtypes, mamba_cache_mode)";
    case PayloadKind::kRaw:
      return "raw bytes (page_size_bytes)";
  }
  return "unknown";
}

PayloadKind payload_of(const CacheSpec& spec) {
  return static_cast<PayloadKind>(spec.payload.index());
}

static_assert(
    std::is_same_v<std::variant_alternative_t<static_cast<std::size_t>(PayloadKind::kState),
                                              decltype(CacheSpec::payload)>,
                   StatePayload>);

// Larger pages than this are a slip of the pen, and would overflow sums over layers and blocks.
constexpr std::uint64_t kMaxPageBytes = std::uint64_t{1} << 40;

class Checker {
 public:
  Checker(const CacheSpec& spec, std::string_view path, ProblemList& problems)
      : spec_(spec), path_(path), problems_(problems) {}

  void check(const SpecKind& kind) {
    positive("block_size", spec_.block_size);
    const bool parameters_hold = parameters(kind);
    if (payload_of(spec_) != kind.payload.get()) {
      add("kind", spec_.kind, "a group with " + std::string(payload_word(kind.payload)),
          "the group has " + std::string(payload_word(payload_of(spec_))));
      return;
    }
    std::visit([this](const auto& payload) { this->payload(payload); }, spec_.payload);
    page();
    if (spec_.block_size != 0 && parameters_hold) traits(kind);
  }

 private:
  void add(std::string_view key, std::string value, std::string expected, std::string hint = {}) {
    problems_.add(at(key), std::move(value), std::move(expected), std::move(hint));
  }

  std::string at(std::string_view key) const {
    return path_.empty() ? std::string(key) : std::string(path_) + "." + std::string(key);
  }

  bool positive(std::string_view key, std::uint64_t value) {
    if (value > 0) return true;
    add(key, "0", "a positive integer");
    return false;
  }

  template <class T>
  bool parameter(const SpecKind& kind, SpecParameter which, std::string_view key,
                 std::string_view unit, const std::optional<T>& value) {
    const bool needed = kind.needs->has(which);
    if (!value) {
      if (!needed) return true;
      add(key, {}, "a positive integer of " + std::string(unit),
          "kind '" + spec_.kind + "' needs it");
      return false;
    }
    if (needed || kind.allows->has(which)) return positive(key, *value);
    return no_use(key, std::to_string(*value));
  }

  bool no_use(std::string_view key, std::string value) {
    add(key, std::move(value), "no " + std::string(key) + " for kind '" + spec_.kind + "'",
        "leave it out, or choose a kind that has it");
    return false;
  }

  // True when the parameters suit the kind, so that its traits mean something.
  bool parameters(const SpecKind& kind) {
    using P = SpecParameter;
    bool good = true;
    const auto check = [&](P which, std::string_view key, std::string_view unit,
                           const std::optional<std::uint32_t>& value) {
      if (!parameter(kind, which, key, unit, value)) good = false;
    };
    check(P::kSlidingWindow, "sliding_window", "tokens", spec_.sliding_window);
    check(P::kAttentionChunk, "attention_chunk_size", "tokens", spec_.attention_chunk_size);
    check(P::kRswaWindow, "rswa_window", "tokens", spec_.rswa_window);
    check(P::kSinkLength, "sink_len", "tokens", spec_.sink_len);
    check(P::kBlocksPerRequest, "blocks_per_request", "blocks", spec_.blocks_per_request);
    if (spec_.extra_retained_tokens != 0 && !kind.allows->has(P::kExtraRetained))
      good = no_use("extra_retained_tokens", std::to_string(spec_.extra_retained_tokens));
    if (spec_.bounded_replay && !kind.allows->has(P::kBoundedReplay))
      good = no_use("bounded_replay", "true");
    return good;
  }

  // A sink is whole blocks of tokens (vLLM: SinkFullAttentionManager); a position may stand for
  // several of them, or be one of several.
  void sink(const AttentionPayload& attention) {
    if (!spec_.sink_len || attention.compression == 0 || attention.states_per_token == 0) return;
    const std::uint64_t tokens =
        std::uint64_t{spec_.block_size} / attention.states_per_token * attention.compression;
    if (tokens == 0 || *spec_.sink_len % tokens == 0) return;
    add("sink_len", std::to_string(*spec_.sink_len),
        "a multiple of the " + std::to_string(tokens) + " tokens of a block");
  }

  void payload(const AttentionPayload& attention) {
    positive("num_kv_heads", attention.num_kv_heads);
    positive("head_size", attention.head_size);
    positive("compression", attention.compression);
    if (positive("states_per_token", attention.states_per_token) &&
        attention.states_per_token > 1) {
      const std::string states = std::to_string(attention.states_per_token);
      if (attention.compression > 1) {
        add("states_per_token", states, "1, since compression is more than 1");
      } else if (spec_.block_size % attention.states_per_token != 0) {
        add("states_per_token", states,
            "a divisor of block_size, " + std::to_string(spec_.block_size));
      }
    }
    sink(attention);
    if (attention.num_head_slots) positive("num_head_slots", *attention.num_head_slots);
    if (attention.state_content_bytes)
      positive("state_content_bytes", *attention.state_content_bytes);
    if (attention.max_tp_shards) positive("max_tp_shards", *attention.max_tp_shards);
    if (attention.total_num_kv_heads != 0 &&
        attention.total_num_kv_heads < attention.num_kv_heads) {
      add("total_num_kv_heads", std::to_string(attention.total_num_kv_heads),
          "at least num_kv_heads, " + std::to_string(attention.num_kv_heads));
    }
  }

  void payload(const StatePayload& state) {
    if (state.shapes.empty()) add("shapes", "[]", "at least one shape");
    for (std::size_t i = 0; i < state.shapes.size(); ++i) {
      const std::string name = "shapes[" + std::to_string(i) + "]";
      if (state.shapes[i].empty()) add(name, "[]", "at least one extent");
      for (std::size_t j = 0; j < state.shapes[i].size(); ++j) {
        positive(name + "[" + std::to_string(j) + "]", state.shapes[i][j]);
      }
    }
    if (state.dtypes.size() != state.shapes.size()) {
      add("dtypes", std::to_string(state.dtypes.size()) + " entries",
          "as many as shapes, " + std::to_string(state.shapes.size()));
    }
    if (state.prefill_checkpoint_alignment)
      positive("prefill_checkpoint_alignment", *state.prefill_checkpoint_alignment);
    static constexpr std::string_view kModes[] = {"none", "align", "all"};
    for (const std::string_view mode : kModes) {
      if (state.cache_mode == mode) return;
    }
    add("mamba_cache_mode", state.cache_mode, "one of none, align, all",
        suggest(state.cache_mode, kModes));
  }

  void payload(const RawPayload& raw_bytes) {
    positive("page_size_bytes", raw_bytes.page_size_bytes);
  }

  void page() {
    const std::uint64_t unpadded = unpadded_page_bytes(spec_);
    if (unpadded > kMaxPageBytes) {
      add("page_size_bytes", unpadded == kSaturated ? "more than 2^64" : std::to_string(unpadded),
          "at most 2^40 bytes for one block of one layer");
    } else if (spec_.page_size_padded && *spec_.page_size_padded < unpadded) {
      add("page_size_padded", std::to_string(*spec_.page_size_padded),
          "at least the unpadded page, " + std::to_string(unpadded) + " bytes");
    } else if (spec_.page_size_padded && *spec_.page_size_padded > kMaxPageBytes) {
      add("page_size_padded", std::to_string(*spec_.page_size_padded), "at most 2^40 bytes");
    }
  }

  // An engine's own function: whatever it throws is told as a problem of its kind.
  std::optional<SpecTraits> ask_traits(const SpecKind& kind) {
    std::string thrown;
    try {
      return kind.traits(spec_);
    } catch (const std::exception& error) {
      thrown = error.what();
    } catch (...) {
      thrown = "an unknown exception";
    }
    add("kind", spec_.kind, "a traits function that never throws", "it has thrown: " + thrown);
    return std::nullopt;
  }

  // True when `rule` is one of its enumeration, whose words the last one ends.
  template <class Rule>
  bool known_rule(const char* what, Rule rule, Rule last) {
    if (rule <= last) return true;
    add("kind", spec_.kind,
        std::string("a ") + what + " rule of 0 to " + std::to_string(static_cast<unsigned>(last)),
        std::string(what) + " is " + std::to_string(static_cast<unsigned>(rule)));
    return false;
  }

  void traits(const SpecKind& kind) {
    const std::optional<SpecTraits> asked = ask_traits(kind);
    if (!asked) return;
    const SpecTraits& traits = *asked;
    const bool known_hit = known_rule("hit", traits.hit.get(), HitRule::kNever);
    const bool known_save = known_rule("save", traits.save.get(), SaveRule::kNever);
    const bool known_peer = known_rule("peer", traits.peer.get(), PeerRule::kNone);
    if (!known_hit || !known_save || !known_peer) return;
    if (spec_.replay_tokens && traits.replay_tokens.get() != *spec_.replay_tokens) {
      add("replay_tokens", std::to_string(*spec_.replay_tokens),
          "no rebuild distance for kind '" + spec_.kind + "'",
          "leave it out: only kinds of scratch that is recomputed after a hit take one");
    }
    // A kind that may be stored and never hits would store for ever without any effect (R04).
    const bool hits = traits.hit != HitRule::kNever;
    const bool saves = traits.save != SaveRule::kNever;
    if (traits.prefix_cacheable.get() != hits || traits.prefix_cacheable.get() != saves) {
      add("kind", spec_.kind,
          "traits that agree: prefix_cacheable exactly when neither the hit nor the save rule is "
          "never",
          std::string("prefix_cacheable ") + (traits.prefix_cacheable ? "true" : "false") +
              ", hit " + std::string(to_string(traits.hit)) + ", save " +
              std::string(to_string(traits.save)));
    }
    const bool windowed = traits.hit == HitRule::kWindow || traits.hit == HitRule::kChunk;
    if (windowed && traits.window == 0U) {
      add("kind", spec_.kind, "a window of at least 1 token for its hit rule");
    } else if (!windowed && traits.window != 0U) {
      add("kind", spec_.kind, "window 0 for hit rule " + std::string(to_string(traits.hit)));
    }
    // Windows and attention chunks are searched by whole blocks.
    const bool inside = traits.hit == HitRule::kPrefix || traits.hit == HitRule::kLastState;
    if (traits.fine_grained_lookup && !inside) {
      add("kind", spec_.kind,
          "fine_grained_lookup false for hit rule " + std::string(to_string(traits.hit)),
          "hits end inside a block only where the hit rule is prefix or last_state");
    }
  }

  const CacheSpec& spec_;
  std::string_view path_;
  ProblemList& problems_;
};

}  // namespace

void check_spec(const CacheSpec& spec, const SpecKind& kind, std::string_view path,
                ProblemList& problems) {
  Checker(spec, path, problems).check(kind);
}

}  // namespace kvprism::detail
