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
  kOpaque,  // bytes that only the engine reads; sizes count bytes (R15)
};

KVPRISM_API std::uint32_t size_of(DType dtype) noexcept;  // bytes of one element
// PyTorch's name without its module, e.g. "bfloat16", "float8_e4m3fn".
KVPRISM_API std::string_view to_string(DType dtype) noexcept;
KVPRISM_API std::optional<DType> dtype_from_string(std::string_view name) noexcept;
KVPRISM_API std::vector<std::string_view> dtype_names();

// Keys and values, position by position.
struct AttentionPayload {
  std::uint32_t num_kv_heads = 0;        // on this rank
  std::uint32_t total_num_kv_heads = 0;  // of the whole model; 0: derived, see Projection (R34)
  std::uint32_t head_size = 0;           // elements of a key
  std::uint32_t head_size_v = 0;         // elements of a value; 0 for latent attention
  DType dtype = DType::kFloat16;
  std::uint32_t compression = 1;       // tokens that one stored position stands for (R26)
  std::uint32_t states_per_token = 1;  // stored positions of one token; 1 unless compression is 1
  // Where the engine packs: rows of a position when not one a KV head, and bytes of one row when
  // not (head_size + head_size_v) elements.
  std::optional<std::uint32_t> num_head_slots = std::nullopt;
  std::optional<std::uint64_t> state_content_bytes = std::nullopt;
  // Distinct shards over the tensor ranks; ranks beyond hold replicas. Absent: not known.
  std::optional<std::uint32_t> max_tp_shards = std::nullopt;
  // The engine's name of how elements are quantised or packed, e.g. "fp8_ds_mla". Part of every
  // key.
  std::string cache_dtype = "";

  bool operator==(const AttentionPayload&) const = default;
};

// A recurrent state per block: no positions inside.
struct StatePayload {
  std::vector<std::vector<std::uint32_t>> shapes;  // one shape per state tensor
  std::vector<DType> dtypes;                       // as many as shapes
  std::string cache_mode;                    // "none", "align" or "all" (vLLM: mamba_cache_mode)
  std::uint32_t num_speculative_blocks = 0;  // beside the running state, per request
  std::uint32_t num_prefill_checkpoint_blocks = 0;                           // likewise
  std::optional<std::uint32_t> prefill_checkpoint_alignment = std::nullopt;  // tokens
  bool tp_replicated = false;  // every tensor rank holds the whole state

  bool operator==(const StatePayload&) const = default;
};

// Opaque bytes of a kind that an engine added.
struct RawPayload {
  std::uint64_t page_size_bytes = 0;

  bool operator==(const RawPayload&) const = default;
};

// Which optional parameters belong to which kind is the kind's to say (SpecKind::needs, allows).
// Ownership: value. Threads: value.
struct CacheSpec {
  std::string kind;  // a name in the SpecRegistry, e.g. "full_attention"
  // Stored positions per block and rank: tokens, unless compressed; the capacity of a ring.
  std::uint32_t block_size = 0;
  std::optional<std::uint32_t> sliding_window;    // tokens
  std::optional<std::uint64_t> page_size_padded;  // bytes, at least the unpadded page
  std::variant<AttentionPayload, StatePayload, RawPayload> payload;
  // Tokens that rebuild the cache after a hit, for kinds that allow it (R14). 0: the engine goes
  // back behind the end of a hit by itself, as vLLM does for a bounded replay.
  std::optional<std::uint32_t> replay_tokens;
  std::optional<std::uint32_t> attention_chunk_size;  // tokens
  std::optional<std::uint32_t> rswa_window;           // generated tokens that stay
  std::optional<std::uint32_t> sink_len;              // tokens, whole blocks without DCP
  std::optional<std::uint32_t> blocks_per_request;    // of a table that does not grow
  // Tokens below a window that must be there too: draft models look further back.
  std::uint32_t extra_retained_tokens = 0;
  // The window is computed again after a hit instead of being cached.
  bool bounded_replay = false;
  // Whether decode context ranks share the positions; absent: as the kind says.
  std::optional<bool> dcp_sharded;

  bool operator==(const CacheSpec&) const = default;
};

// Axes of one layer's block: heads x positions x bytes. A state and raw bytes are one row.
struct PageAxes {
  std::uint64_t heads = 1;
  std::uint64_t positions = 1;
  std::uint64_t content_bytes = 0;

  bool operator==(const PageAxes&) const = default;
};
KVPRISM_API PageAxes page_axes(const CacheSpec& spec);

// Bytes of one block of one layer without padding: the product of its axes. Saturates at 2^64 - 1,
// which SpecRegistry::check() refuses.
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
  // Whether decode context ranks run over the prefill context ranks first (the order of vLLM's
  // process groups); else they are neighbouring tensor ranks.
  bool dcp_over_pcp() const noexcept {
    return dcp == pcp || std::uint64_t{dcp} == std::uint64_t{tp} * pcp;
  }
};

// Whether decode context ranks share the positions of a block: the spec's word, else its kind's.
// Throws Error on an unknown kind.
KVPRISM_API bool dcp_sharded(const CacheSpec& spec, const SpecRegistry& registry);

// Tokens that one block id stands for: block_size x compression / states_per_token x (dcp if
// dcp_sharded). Nobody multiplies by hand (R26). Throws Error on an unknown kind, when the product
// does not fit and when states_per_token does not divide block_size.
KVPRISM_API std::uint32_t tokens_per_block(const CacheSpec& spec, const ParallelSizes& parallel,
                                           const SpecRegistry& registry);

}  // namespace kvprism
