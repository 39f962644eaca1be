// Block hashes for engines that have none of their own, digest for digest those of vLLM
// (store_connector 3.4; vLLM: hash_block_tokens, generate_block_hash_extra_keys). Of the optional
// target kvprism::hash.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kvprism/base/export.h"

namespace kvprism {

// The algorithms whose input is canonical CBOR (RFC 8949 4.2.1), which every language can write.
// Those of vLLM's that hash a Python pickle are not offered.
enum class BlockHashAlgorithm : std::uint8_t {
  kSha256Cbor,  // SHA-256, 32 bytes
  kXxhashCbor,  // XXH3-128, 16 bytes: fast, but whoever knows the seed can make two prefixes
                // collide
};

KVPRISM_API std::string_view to_string(
    BlockHashAlgorithm algorithm) noexcept;  // "sha256_cbor", ...
KVPRISM_API std::optional<BlockHashAlgorithm> block_hash_algorithm_from_string(
    std::string_view name) noexcept;

struct LoraAdapter {
  std::string name;  // UTF-8
  std::string path;  // UTF-8

  bool operator==(const LoraAdapter&) const = default;
};

// An image, a sound or the like that stands in the place of some tokens.
struct MultimodalItem {
  std::string identifier;    // of its content; UTF-8
  std::uint32_t offset = 0;  // token of the request
  std::uint32_t length = 0;  // tokens, at least 1

  bool operator==(const MultimodalItem&) const = default;
};

// What a request's cache depends on beside its token ids.
// Ownership: a view of the embeddings, else a value.
struct HashExtras {
  std::optional<LoraAdapter> lora;
  std::vector<MultimodalItem> items;  // by rising offset, not overlapping
  std::string cache_salt;             // UTF-8; empty: none
  // Embeddings in place of token ids, from the request's first token on. Units behind their end
  // still differ from those of a request without any.
  std::span<const std::byte> prompt_embeds;
  std::size_t embed_bytes_per_token = 0;  // 0: none
};

struct BlockHasherOptions {
  BlockHashAlgorithm algorithm = BlockHashAlgorithm::kSha256Cbor;
  std::uint32_t hash_block_size = 0;  // h: tokens per hash
  // What the chain begins with. vLLM takes the environment's PYTHONHASHSEED. Absent: vLLM's own
  // constant for SHA-256; an error for XXH3, where vLLM draws a seed that no other process has
  // (R38).
  std::optional<std::string> seed = std::nullopt;
};

// Hash i = f(hash i-1, or none_hash(); the unit's token ids; its extras). Only whole units have
// one.
// Ownership: value; keeps its buffers, so that a call allocates only in the caller's vector.
// Threads: one at a time.
class KVPRISM_API BlockHasher {
 public:
  // Throws Error (kInvalidConfig) with all problems: hash_block_size 0, a seed that is missing or
  // not UTF-8.
  explicit BlockHasher(const BlockHasherOptions& options);

  BlockHashAlgorithm algorithm() const noexcept { return algorithm_; }
  std::uint32_t hash_block_size() const noexcept { return unit_; }
  std::uint32_t width() const noexcept { return width_; }  // bytes
  // The hash of the empty prefix.
  std::span<const std::uint8_t> none_hash() const noexcept {
    return std::span(none_hash_).first(width_);
  }

  // Appends the hashes of the whole units of `tokens`, which begin at token `first` of the request,
  // a multiple of hash_block_size. `parent` is the hash of the unit before, empty at token 0.
  // Throws Error (kInvalidArgument) with all problems and appends nothing: `first` inside a unit, a
  // parent of another width, items out of order or of length 0, text that is not UTF-8,
  // embeddings that end inside a row.
  void append(std::span<const std::uint32_t> tokens, std::uint32_t first,
              std::span<const std::uint8_t> parent, const HashExtras& extras,
              std::vector<std::uint8_t>& hashes);

  // The same for all tokens of a request: `hashes` holds the hashes of its first units, and gets
  // those that are missing.
  void extend(std::span<const std::uint32_t> tokens, const HashExtras& extras,
              std::vector<std::uint8_t>& hashes);

 private:
  void check(std::uint32_t first, std::span<const std::uint8_t> parent,
             const HashExtras& extras) const;
  void write_extras(std::uint32_t begin, const HashExtras& extras);
  void digest(std::uint8_t* out) const noexcept;

  BlockHashAlgorithm algorithm_;
  std::uint32_t unit_;
  std::uint32_t width_;
  std::array<std::uint8_t, 32> none_hash_{};
  std::vector<std::uint8_t> message_;  // of the unit in hand
};

}  // namespace kvprism
