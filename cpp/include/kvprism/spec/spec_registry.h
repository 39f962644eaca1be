// The known kinds of cache. A registry is a value: adding a kind makes a new one, and nothing
// global changes.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "kvprism/base/error.h"
#include "kvprism/base/export.h"
#include "kvprism/spec/cache_spec.h"
#include "kvprism/spec/spec_traits.h"

namespace kvprism {

// Which payload a kind carries; a config with another one is refused.
enum class PayloadKind : std::uint8_t { kAttention, kState, kRaw };

// The optional members of a CacheSpec that only some kinds have.
enum class SpecParameter : std::uint8_t {
  kSlidingWindow,
  kAttentionChunk,
  kRswaWindow,
  kSinkLength,
  kBlocksPerRequest,
  kExtraRetained,
  kBoundedReplay,
};

class ParameterSet {
 public:
  constexpr ParameterSet(std::initializer_list<SpecParameter> parameters) {
    for (const SpecParameter each : parameters) bits_ |= bit(each);
  }
  constexpr bool has(SpecParameter parameter) const noexcept {
    return (bits_ & bit(parameter)) != 0;
  }

 private:
  static constexpr std::uint32_t bit(SpecParameter parameter) noexcept {
    return std::uint32_t{1} << static_cast<std::uint32_t>(parameter);
  }
  std::uint32_t bits_ = 0;
};

// A group of this kind is a wrapper around other specs: see group/cache_config.h. No kind may take
// its name.
inline constexpr std::string_view kUniformKind = "uniform";

// No member but the name has a default: leaving one out does not compile.
struct SpecKind {
  std::string name;
  Declared<PayloadKind> payload;
  Declared<ParameterSet> needs;   // must be given
  Declared<ParameterSet> allows;  // may be given; what neither set has must not
  Declared<bool> dcp_sharded;     // decode context ranks share its positions
  Declared<bool> latent;          // one vector a position, the same on every tensor rank (MLA)
  // Traits of one spec of this kind. Total: never throws.
  std::function<SpecTraits(const CacheSpec&)> traits;
};

// Ownership: shares an immutable table. Threads: immutable.
class KVPRISM_API SpecRegistry {
 public:
  // The kinds of vLLM 0.32, under its names where it has one (vLLM: KVCacheSpecKind):
  // full_attention, mla_attention, hidden_state, rswa, sink_full_attention,
  // chunked_local_attention, sliding_window, sliding_window_mla, circular_buffer, mamba,
  // encoder_only_attention, cross_attention, hisparse_hot, hisparse_resident.
  static SpecRegistry builtin();

  // This registry and one more kind. Throws Error (kInvalidArgument) when the name is empty,
  // taken, "uniform" or not UTF-8, the payload unknown, or when there is no traits function.
  SpecRegistry with(SpecKind kind) const;

  // Null when unknown.
  const SpecKind* find(std::string_view name) const noexcept;
  // Throws Error (kInvalidConfig) that lists the known kinds.
  const SpecKind& at(std::string_view name) const;
  std::vector<std::string_view> names() const;

  // Adds every problem of `spec` to `problems`, with paths below `path`: unknown kind, payload of
  // another kind, sizes of 0, traits that contradict each other. Nothing is inferred from sizes or
  // shapes (R02, R28).
  void check(const CacheSpec& spec, std::string_view path, ProblemList& problems) const;

  // Throws Error (kInvalidConfig) that lists the known kinds (R64).
  SpecTraits traits_of(const CacheSpec& spec) const;

 private:
  struct Table;
  explicit SpecRegistry(std::shared_ptr<const Table> table);
  std::shared_ptr<const Table> table_;
};

}  // namespace kvprism
