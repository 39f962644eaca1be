// The names of objects. One enumerator makes them for save, lookup and load (decision 3).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kvprism/base/export.h"
#include "kvprism/base/ids.h"
#include "kvprism/group/projection.h"
#include "kvprism/key/key_slots.h"

namespace kvprism {

// Bytes of a block hash: shorter ones collide (R39).
inline constexpr std::uint32_t kMinHashWidth = 16;
inline constexpr std::uint32_t kMaxHashWidth = 64;

// Block hashes of a request at granularity h: hash i stands for tokens [0, (i+1)*h). Opaque bytes
// of the engine, all of one width. Holds those from `first` on. Null data with a count is refused
// wherever hashes are taken.
// Ownership: a view.
struct HashList {
  const std::uint8_t* data = nullptr;
  std::uint32_t count = 0;
  std::uint32_t width = 0;  // bytes
  std::uint32_t first = 0;  // index of the hash at `data`

  std::uint32_t end() const noexcept { return first + count; }
  // False: there is nothing to read, or more than 32 bits can count.
  bool readable() const noexcept { return count == 0 || (data != nullptr && end() > first); }
  // `at` counts from the request's first hash, and is in [first, end()).
  std::span<const std::uint8_t> operator[](std::uint32_t at) const noexcept {
    return {data + static_cast<std::size_t>(at - first) * width, width};
  }
};

// What gives the bytes their meaning, beside the projection (R35). Each of them changes every key.
struct KeyFacts {
  std::string model{};  // name or path; not empty
  // Weights version; may be empty. Into it belongs whatever else changes bytes and no field here
  // or in the config says: a draft model's name and weights, and with context ranks which tokens
  // each of them holds (how many consecutive ones lie on a rank).
  std::string model_revision{};
  std::string kv_quantization{};  // e.g. "none", "fp8_per_tensor"
  std::string hash_algorithm{};   // e.g. "sha256_cbor"; not empty
  // Which of the model's layers each pipeline stage holds, e.g. "0-15,15-31": all stages, alike on
  // all ranks; pipeline_split_of() makes one. Not empty with parallel.pp > 1 in schema `kvprism`;
  // else without effect. Nothing else in a key tells the layers of several stages apart.
  std::string pipeline_split{};
  bool hash_is_stable = true;  // false when processes hash alike tokens differently: refused (R38)

  bool operator==(const KeyFacts&) const = default;
};

// Which of the ranks' shards a key names. A rank's own position in the parallel arrangement.
struct RankPosition {
  std::uint32_t tp = 0;
  std::uint32_t pp = 0;
  std::uint32_t pcp = 0;
  std::uint32_t dcp = 0;

  bool operator==(const RankPosition&) const = default;
};

// Position of a rank: tensor ranks next to each other, then prefill context, then pipeline (the
// order of vLLM's process groups). Decode context reuses these: where it is as large as prefill
// context, or as both, dcp = (tp x pcp size + pcp) mod dcp size, else tp mod dcp size.
// `rank` must be below parallel.world().
KVPRISM_API RankPosition rank_position(Rank rank, const ParallelSizes& parallel) noexcept;

// A KeyFacts::pipeline_split for engines that know the layers of every stage: equal texts mean the
// same layers of stored groups on each stage, by name, order and spec, every member of a wrapper
// included. `stages`: each stage's projection, in the order of pipeline ranks, on every rank.
// Throws Error (kInvalidArgument) on null, and where there are not as many as parallel.pp.
KVPRISM_API std::string pipeline_split_of(
    std::span<const std::shared_ptr<const Projection>> stages);

// Schema `kvprism`:
//
//   kvp1/<namespace>/<fingerprint, 32 hex>/<tp>.<pp>.<pcp>.<dcp>/<store index>/<hash, hex>
//
// In a namespace letters, digits and '.', '_', '-', '@' are themselves, every other byte is %XX:
// one path component, and no two namespaces alike; empty is "-", and "-" is "%2D". Neighbouring
// tensor ranks with equal bytes (latent kinds, states that all hold, one head a rank of a model
// with fewer heads than ranks; never with dcp) share one tp, and each stores its part of the chunks
// (R58).
//
// Schema `vllm`, byte for byte that of vLLM's built-in connector (store_connector 3.1-3.3):
//
//   [<namespace>@]<model>@tp_rank:<tp>@pcp<pcp>@dcp<dcp>@pp_rank:<pp>@group:<group>@<hash>
//
// with the namespace as it is, the last path component of the model, the store index and the hash
// in hex. Ranks that hold the same bytes share one tp, and <pp> is rank / tp mod pp, as the
// reference counts. Such a key says nothing of dtype, layout, sizes, revision or which tokens a
// context rank holds: its chooser vouches that all users of the pool agree.
//
// Ownership: shares immutable state. Threads: const calls from any thread.
class KVPRISM_API KeySchema : public std::enable_shared_from_this<KeySchema> {
 public:
  // Throws Error (kInvalidConfig) with all problems: nothing to store, an empty model or hash
  // algorithm, text that is not UTF-8, hash_is_stable false (R38), several pipeline stages without
  // a pipeline_split.
  static std::shared_ptr<const KeySchema> kvprism(std::shared_ptr<const Projection> projection,
                                                  const KeyFacts& facts);

  // Throws Error (kInvalidConfig) with all problems: those above, and where the reference's own
  // keys are wrong: one for ranks of different heads (W-C8) or stages (pp, pcp not coprime), or pcp
  // with dcp; or no `model_total_kv_heads` where it decides. StoreWorker refuses wrong objects.
  static std::shared_ptr<const KeySchema> vllm(std::shared_ptr<const Projection> projection,
                                               const KeyFacts& facts);

  // The one that the projection's key_schema() names.
  static std::shared_ptr<const KeySchema> make(std::shared_ptr<const Projection> projection,
                                               const KeyFacts& facts);

  ~KeySchema();
  KeySchema(const KeySchema&) = delete;
  KeySchema& operator=(const KeySchema&) = delete;

  const Projection& projection() const noexcept;
  std::string_view name() const noexcept;           // "kvprism" or "vllm"
  const std::string& fingerprint() const noexcept;  // 32 hex digits; empty for schema `vllm`
  // What it was made from.
  const KeyFacts& key_facts() const noexcept;
  // What every key begins with, and no key of another namespace or model.
  const std::string& prefix() const noexcept;
  // What a key depends on beside ranks, group and hash.
  const std::vector<DigestFact>& facts() const noexcept;

  // What plans carry: the projection's digest and facts() in one, so that a worker of other keys
  // refuses them. Equal on every rank.
  Digest plan_digest() const;

  // Positions whose shards must all exist for a group's chunk to count as present, in rank order:
  // those of the stages that hold layers of the group. Of schema `vllm` all, because the reference
  // stores objects of every group on every stage (store_connector 3.3).
  std::span<const RankPosition> shards(StoreIndex group) const noexcept;
  // The position under which `rank` stores the group: itself, or the one that it shares with its
  // replicas.
  RankPosition shard_of(StoreIndex group, const RankPosition& rank) const noexcept;
  // Tensor ranks that share one shard, at least 1.
  std::uint32_t replicas(StoreIndex group) const noexcept;
  // Whether `rank` is the one of its replicas that stores a chunk. Every rank loads every chunk.
  bool stores(StoreIndex group, const RankPosition& rank, std::uint32_t chunk) const noexcept;

  // Appends one key. No allocation once the slot has its capacity. `hash` has the width of the
  // request's HashList. Throws Error (kInvalidArgument) and appends nothing when the hash is not 16
  // to 64 bytes wide (R39), or when `shard` is the position of no rank.
  void append_key(KeySlots& slots, StoreIndex group, const RankPosition& shard,
                  std::span<const std::uint8_t> hash) const;

  // As append_key, of `count` hashes of `hashes`: `first` and every `step`th after it. Whoever
  // reads the slots first makes the keys.
  void append_keys_later(KeySlots& slots, StoreIndex group, const RankPosition& shard,
                         const HashList& hashes, std::uint32_t first, std::uint32_t step,
                         std::uint32_t count) const;

 private:
  struct Impl;
  explicit KeySchema(std::unique_ptr<const Impl> impl);
  std::unique_ptr<const Impl> impl_;
};

}  // namespace kvprism
