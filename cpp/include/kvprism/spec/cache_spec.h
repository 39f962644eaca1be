// What one layer's cache looks like: the engine's KVCacheSpec as a value
// (vLLM: kv_cache_interface.py).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "kvprism/base/export.h"

namespace kvprism {

class SpecRegistry;

enum class DType : std::uint8_t {
  kFloat32,
  kFloat16,
  kBFloat16,
  kFloat8E4M3,
  kFloat8E5M2,
  kInt64,
  kInt32,
  kInt8,
  kUInt8,
};

KVPRISM_API std::uint32_t size_of(DType dtype) noexcept;  // bytes of one element
// PyTorch's name without its module, e.g. "bfloat16", "float8_e4m3fn".
KVPRISM_API std::string_view to_string(DType dtype) noexcept;
KVPRISM_API std::optional<DType> dtype_from_string(std::string_view name) noexcept;
KVPRISM_API std::vector<std::string_view> dtype_names();

// Keys and values, position by position.
struct AttentionPayload {
  std::uint32_t num_kv_heads = 0;        // on this rank
  std::uint32_t total_num_kv_heads = 0;  // of the whole model; 0: num_kv_heads times tp (R34)
  std::uint32_t head_size = 0;           // elements of a key
  std::uint32_t head_size_v = 0;         // elements of a value; 0 for latent attention
  DType dtype = DType::kFloat16;
  std::uint32_t compression = 1;  // tokens that one stored position stands for; at least 1 (R26)

  bool operator==(const AttentionPayload&) const = default;
};

// A recurrent state per block: no positions inside.
struct StatePayload {
  std::vector<std::vector<std::uint32_t>> shapes;  // one shape per state tensor
  std::vector<DType> dtypes;                       // as many as shapes
  std::string cache_mode;  // "none", "align" or "all" (vLLM: mamba_cache_mode)

  bool operator==(const StatePayload&) const = default;
};

// Opaque bytes of a kind that an engine added.
struct RawPayload {
  std::uint64_t page_size_bytes = 0;

  bool operator==(const RawPayload&) const = default;
};

// Ownership: value. Threads: value.
struct CacheSpec {
  std::string kind;  // a name in the SpecRegistry, e.g. "full_attention"
  // Stored positions per block and rank: tokens, unless compressed; the capacity of a ring.
  std::uint32_t block_size = 0;
  std::optional<std::uint32_t> sliding_window;    // tokens, for window kinds
  std::optional<std::uint64_t> page_size_padded;  // bytes, at least the unpadded page
  std::variant<AttentionPayload, StatePayload, RawPayload> payload;
  // Tokens that rebuild the cache after a hit, for kinds that allow it (R14).
  std::optional<std::uint32_t> replay_tokens;

  bool operator==(const CacheSpec&) const = default;
};

// Bytes of one block of one layer without padding: heads x positions x (head_size + head_size_v) x
// element, or the sum over the state tensors. Saturates at 2^64 - 1, which SpecRegistry::check()
// refuses.
KVPRISM_API std::uint64_t unpadded_page_bytes(const CacheSpec& spec);

// Bytes of one block of one layer as the engine lays it out (vLLM: page_size_bytes).
KVPRISM_API std::uint64_t page_size_bytes(const CacheSpec& spec);

// Sizes of the parallel arrangement, 1 where it is absent.
struct ParallelSizes {
  std::uint32_t tp = 1;   // tensor
  std::uint32_t pp = 1;   // pipeline
  std::uint32_t pcp = 1;  // prefill context
  std::uint32_t dcp = 1;  // decode context

  bool operator==(const ParallelSizes&) const = default;
  std::uint32_t world() const noexcept { return tp * pp * pcp; }
};

// Tokens that one block id stands for: block_size x compression x (dcp if the kind spreads its
// positions). Nobody multiplies by hand (R26). Throws Error on an unknown kind and when the product
// does not fit.
KVPRISM_API std::uint32_t tokens_per_block(const CacheSpec& spec, const ParallelSizes& parallel,
                                           const SpecRegistry& registry);

}  // namespace kvprism
