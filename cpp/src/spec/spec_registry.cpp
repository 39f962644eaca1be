#include "kvprism/spec/spec_registry.h"

#include <limits>
#include <utility>
#include <variant>

#include "spec/checked_math.h"

namespace kvprism {

struct SpecRegistry::Table {
  std::vector<SpecKind> kinds;
};

namespace {

SpecTraits full_attention_traits(const CacheSpec&) {
  return {.prefix_cacheable = true,
          .hit = HitRule::kPrefix,
          .window = 0,
          .save = SaveRule::kPositional,
          .peer = PeerRule::kSuffix,
          .replay_tokens = 0,
          .fine_grained_lookup = true};
}

SpecTraits sliding_window_traits(const CacheSpec& spec) {
  return {.prefix_cacheable = true,
          .hit = HitRule::kWindow,
          .window = spec.sliding_window.value_or(0),
          .save = SaveRule::kPositional,
          .peer = PeerRule::kWindow,
          .replay_tokens = 0,
          .fine_grained_lookup = false};
}

// Cacheable in every mode; that a store needs "align" is a rule of the store
// (store/validate_store.h).
SpecTraits mamba_traits(const CacheSpec&) {
  return {.prefix_cacheable = true,
          .hit = HitRule::kLastState,
          .window = 0,
          .save = SaveRule::kHandOff,
          .peer = PeerRule::kState,
          .replay_tokens = 0,
          .fine_grained_lookup = true};
}

// Scratch of one request: it travels to a decode instance whole and never enters a store (R01,
// R14).
SpecTraits circular_buffer_traits(const CacheSpec& spec) {
  return {.prefix_cacheable = false,
          .hit = HitRule::kNever,
          .window = 0,
          .save = SaveRule::kNever,
          .peer = PeerRule::kWhole,
          .replay_tokens = spec.replay_tokens.value_or(0),
          .fine_grained_lookup = false};
}

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
    window(kind);
    if (payload_of(spec_) != kind.payload.get()) {
      add("kind", spec_.kind, "a group with " + std::string(payload_word(kind.payload)),
          "the group has " + std::string(payload_word(payload_of(spec_))));
      return;
    }
    std::visit([this](const auto& payload) { this->payload(payload); }, spec_.payload);
    page();
    if (spec_.block_size != 0) traits(kind);
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

  void window(const SpecKind& kind) {
    if (kind.needs_sliding_window) {
      if (!spec_.sliding_window) {
        add("sliding_window", {}, "a positive integer of tokens",
            "kind '" + spec_.kind + "' needs it");
      } else {
        positive("sliding_window", *spec_.sliding_window);
      }
    } else if (spec_.sliding_window) {
      add("sliding_window", std::to_string(*spec_.sliding_window),
          "no window for kind '" + spec_.kind + "'",
          "leave it out, or choose a kind with a window");
    }
  }

  void payload(const AttentionPayload& attention) {
    positive("num_kv_heads", attention.num_kv_heads);
    positive("head_size", attention.head_size);
    positive("compression", attention.compression);
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
      add("page_size_bytes",
          unpadded == detail::kSaturated ? "more than 2^64" : std::to_string(unpadded),
          "at most 2^40 bytes for one block of one layer");
    } else if (spec_.page_size_padded && *spec_.page_size_padded < unpadded) {
      add("page_size_padded", std::to_string(*spec_.page_size_padded),
          "at least the unpadded page, " + std::to_string(unpadded) + " bytes");
    } else if (spec_.page_size_padded && *spec_.page_size_padded > kMaxPageBytes) {
      add("page_size_padded", std::to_string(*spec_.page_size_padded), "at most 2^40 bytes");
    }
  }

  void traits(const SpecKind& kind) {
    const SpecTraits traits = kind.traits(spec_);
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
    if (windowed && traits.window == 0U && !kind.needs_sliding_window) {
      add("kind", spec_.kind, "a window of at least 1 token for its hit rule");
    } else if (!windowed && traits.window != 0U) {
      add("kind", spec_.kind, "window 0 for hit rule " + std::string(to_string(traits.hit)));
    }
  }

  const CacheSpec& spec_;
  std::string_view path_;
  ProblemList& problems_;
};

std::string join(const std::vector<std::string_view>& words) {
  std::string text;
  for (const std::string_view word : words) {
    if (!text.empty()) text += ", ";
    text += word;
  }
  return text;
}

Problem unknown_kind(const SpecRegistry& registry, std::string_view kind, std::string path) {
  const std::vector<std::string_view> names = registry.names();
  return {std::move(path), std::string(kind), "one of the known kinds: " + join(names),
          suggest(kind, names)};
}

}  // namespace

SpecRegistry::SpecRegistry(std::shared_ptr<const Table> table) : table_(std::move(table)) {}

SpecRegistry SpecRegistry::builtin() {
  auto table = std::make_shared<Table>();
  table->kinds.push_back(
      {"full_attention", PayloadKind::kAttention, false, true, full_attention_traits});
  table->kinds.push_back(
      {"sliding_window", PayloadKind::kAttention, true, true, sliding_window_traits});
  table->kinds.push_back({"mamba", PayloadKind::kState, false, false, mamba_traits});
  table->kinds.push_back(
      {"circular_buffer", PayloadKind::kAttention, false, false, circular_buffer_traits});
  return SpecRegistry(std::move(table));
}

SpecRegistry SpecRegistry::with(SpecKind kind) const {
  ProblemList problems;
  if (kind.name.empty()) {
    problems.add("name", "''", "a name that is not empty");
  } else if (find(kind.name) != nullptr) {
    problems.add("name", kind.name, "a name that is not taken", "taken: " + join(names()));
  }
  if (!kind.traits) problems.add("traits", "empty", "a function from a spec to its traits");
  problems.throw_if_any(ErrorCode::kInvalidArgument, "spec kind");
  auto table = std::make_shared<Table>(*table_);
  table->kinds.push_back(std::move(kind));
  return SpecRegistry(std::move(table));
}

const SpecKind* SpecRegistry::find(std::string_view name) const noexcept {
  for (const SpecKind& kind : table_->kinds) {
    if (kind.name == name) return &kind;
  }
  return nullptr;
}

const SpecKind& SpecRegistry::at(std::string_view name) const {
  const SpecKind* const kind = find(name);
  if (kind == nullptr) fail(ErrorCode::kInvalidConfig, "spec", unknown_kind(*this, name, "kind"));
  return *kind;
}

std::vector<std::string_view> SpecRegistry::names() const {
  std::vector<std::string_view> names;
  names.reserve(table_->kinds.size());
  for (const SpecKind& kind : table_->kinds) names.push_back(kind.name);
  return names;
}

void SpecRegistry::check(const CacheSpec& spec, std::string_view path,
                         ProblemList& problems) const {
  const SpecKind* const kind = find(spec.kind);
  if (kind == nullptr) {
    problems.append(
        {unknown_kind(*this, spec.kind, path.empty() ? "kind" : std::string(path) + ".kind")});
    return;
  }
  Checker(spec, path, problems).check(*kind);
}

SpecTraits SpecRegistry::traits_of(const CacheSpec& spec) const {
  return at(spec.kind).traits(spec);
}

}  // namespace kvprism
