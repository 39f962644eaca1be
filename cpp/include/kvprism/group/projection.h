// The one object that splits the groups: all >= transfer >= store, each order-preserving
// (decision 2, R01, R32).
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kvprism/base/export.h"
#include "kvprism/base/ids.h"
#include "kvprism/group/cache_config.h"
#include "kvprism/spec/spec_traits.h"

namespace kvprism {

// Facts that every rank sees alike enter it; layers, heads, bytes and addresses do not (pipeline
// stages differ), nor do draft flags, which only a scheduler acts on.
struct Digest {
  std::array<std::uint8_t, 16> bytes{};
  bool operator==(const Digest&) const = default;
};
KVPRISM_API std::string to_hex(const Digest& digest);

// One group after resolution, without its wrapper. Specs have their total_num_kv_heads filled in
// (R34).
struct KVPRISM_API ResolvedGroup {
  GroupId id;
  CacheSpec spec;  // of the first layer, which is what the engine's scheduler knows of a wrapper;
                   // of the first member where this stage holds no layer
  SpecTraits traits;                  // of all layers together
  std::uint32_t tokens_per_block;     // with compression and DCP (R26)
  std::uint64_t page_size_bytes;      // of the first layer's block on this rank
  std::vector<std::string> layers;    // of this pipeline stage; may be empty
  std::vector<std::uint32_t> stages;  // pipeline stages that hold layers of it, ascending
  bool enable_kv_transfer;
  bool is_eagle_group;  // whether its last block is dropped from a hit, after resolution
  bool host_resident;
  std::string role;
  bool tp_replicated;                        // every tensor rank holds the same bytes
  std::vector<CacheSpec> specs;              // `spec` alone, or those inside a wrapper
  std::vector<std::uint32_t> spec_of_layer;  // index in `specs`
  bool whole_pages;  // objects have the padding of pages, as the reference's (key_schema "vllm")

  const CacheSpec& layer_spec(std::size_t layer) const noexcept {
    return specs[spec_of_layer[layer]];
  }
  // Bytes of one block of a layer that are moved: padding is not, since it holds what an earlier
  // owner of the block has left, of a ring perhaps, or of another tenant.
  std::uint64_t moved_bytes(std::size_t layer) const;
  // Of all layers on this rank.
  std::uint64_t object_bytes() const;
};

// One row of the table that a digest covers, for error messages: "groups[1].kind",
// "circular_buffer".
struct DigestFact {
  std::string name;
  std::string value;
  bool operator==(const DigestFact&) const = default;
};

// Ownership: share it as shared_ptr<const Projection>. Threads: immutable.
class KVPRISM_API Projection : public std::enable_shared_from_this<Projection> {
 public:
  // Throws Error (kInvalidConfig) with all problems.
  static std::shared_ptr<const Projection> make(const CacheConfig& config,
                                                const SpecRegistry& registry);

  // What is wrong with `config`, without throwing. What only forbids a store is told by
  // store/validate_store.h.
  static std::vector<Problem> check(const CacheConfig& config, const SpecRegistry& registry);

  ~Projection();
  Projection(const Projection&) = delete;
  Projection& operator=(const Projection&) = delete;

  // What it was made from.
  const CacheConfig& config() const noexcept;

  std::size_t num_groups() const noexcept;
  std::size_t num_transfer_groups() const noexcept;
  std::size_t num_store_groups() const noexcept;
  std::uint32_t num_blocks() const noexcept;
  const std::string& kv_layout() const noexcept;
  const std::string& key_schema() const noexcept;
  const std::string& key_namespace() const noexcept;
  const ParallelSizes& parallel() const noexcept;

  const ResolvedGroup& group(GroupId id) const noexcept;
  const ResolvedGroup& group(StoreIndex index) const noexcept { return group(group_id(index)); }
  const ResolvedGroup& group(TransferIndex index) const noexcept { return group(group_id(index)); }

  // Both directions of both projections; nullopt when the group is not in it: skip it, never shift.
  // An index given to group() and group_id() must be below the count of its space.
  GroupId group_id(StoreIndex index) const noexcept;
  GroupId group_id(TransferIndex index) const noexcept;
  std::optional<StoreIndex> store_index(GroupId id) const noexcept;
  std::optional<TransferIndex> transfer_index(GroupId id) const noexcept;

  // Why a group is not storable, one phrase; empty when it is.
  std::string_view why_not_stored(GroupId id) const noexcept;

  // S: granularity of hits and saves in tokens; the engine's own value when it gave one, else the
  // lcm over store groups.
  std::uint32_t scheduler_block_size() const noexcept;
  // h: tokens per hash; every store group's tokens per block is a multiple.
  std::uint32_t hash_block_size() const noexcept;
  // A: hits end on multiples of it; the engine's own value when it gave one, else S. Below S, hits
  // may end inside a block.
  std::uint32_t hit_alignment() const noexcept;
  // The engine's retention interval in tokens; nullopt: every prefix stays cached.
  std::optional<std::uint32_t> retention_interval() const noexcept;
  // KV heads of the model as the engine counts them, when it told.
  std::optional<std::uint32_t> model_total_kv_heads() const noexcept;
  // Tokens that must stay to be computed after a hit: the largest replay distance of any group, at
  // least 1 (R13, R14).
  std::uint32_t replay_tokens() const noexcept;
  // The longest hit a prompt of `tokens` may have: aligned down to A, leaving replay_tokens() to
  // compute.
  std::uint32_t max_hit(std::uint32_t prompt_tokens) const noexcept;

  const Digest& digest() const noexcept;
  const std::vector<DigestFact>& digest_facts() const noexcept;
  // A table of both sides with the differing rows marked by "->", for refusals.
  static std::string describe_mismatch(const std::vector<DigestFact>& ours,
                                       const std::vector<DigestFact>& theirs);

 private:
  struct Impl;
  explicit Projection(std::unique_ptr<const Impl> impl);
  std::unique_ptr<const Impl> impl_;
};

}  // namespace kvprism
