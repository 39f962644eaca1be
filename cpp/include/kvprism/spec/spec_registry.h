// The known kinds of cache. A registry is a value: adding a kind makes a new one, and nothing
// global changes.
#pragma once

#include <functional>
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

// No member but the name has a default: leaving one out does not compile.
struct SpecKind {
  std::string name;
  Declared<PayloadKind> payload;
  Declared<bool> needs_sliding_window;  // `sliding_window` must be given; else it must not
  Declared<bool> dcp_sharded;           // decode context parallelism spreads its positions
  // Traits of one spec of this kind. Total: never throws.
  std::function<SpecTraits(const CacheSpec&)> traits;
};

// Ownership: shares an immutable table. Threads: immutable.
class KVPRISM_API SpecRegistry {
 public:
  // full_attention, sliding_window, mamba, circular_buffer.
  static SpecRegistry builtin();

  // This registry and one more kind. Throws Error (kInvalidArgument) when the name is empty or
  // taken, or when there is no traits function.
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
