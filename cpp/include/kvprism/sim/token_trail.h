// The tokens of one request with everything that follows from them: contents and block hashes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "kvprism/sim/content_oracle.h"

namespace kvprism::sim {

using BlockHash = std::array<std::uint8_t, 16>;

// Hash i is a chain over tokens [0, (i+1)*unit): what an engine's prefix cache would use.
class TokenTrail {
 public:
  explicit TokenTrail(std::uint32_t unit) noexcept : unit_(unit) {}

  void append(std::uint32_t token) {
    const auto position = static_cast<std::uint32_t>(tokens_.size());
    tokens_.push_back(token);
    last_ = extend(last_, position, token);
    prefixes_.push_back(last_);
    chain_[0] = scramble(chain_[0] ^ (token + 0x632be59bd9b4e019ull));
    chain_[1] = (chain_[1] ^ token) * 0x100000001b3ull + chain_[0];
    if (tokens_.size() % unit_ != 0) return;
    BlockHash hash;
    std::memcpy(hash.data(), chain_.data(), hash.size());
    hashes_.push_back(hash);
  }
  void append(std::span<const std::uint32_t> tokens) {
    tokens_.reserve(tokens_.size() + tokens.size());
    prefixes_.reserve(prefixes_.size() + tokens.size());
    for (const std::uint32_t token : tokens) append(token);
  }

  std::uint32_t size() const noexcept { return static_cast<std::uint32_t>(tokens_.size()); }
  std::span<const std::uint32_t> tokens() const noexcept { return tokens_; }
  // The prefix that ends with the token at `position`.
  Prefix prefix_at(std::uint32_t position) const noexcept { return prefixes_[position]; }
  std::span<const Prefix> prefixes(std::uint32_t from, std::uint32_t to) const noexcept {
    return std::span<const Prefix>(prefixes_).subspan(from, to - from);
  }
  Prefix last() const noexcept { return last_; }

  std::uint32_t num_hashes() const noexcept { return static_cast<std::uint32_t>(hashes_.size()); }
  std::span<const BlockHash> hashes() const noexcept { return hashes_; }
  // The hash of a prefix whose length is a multiple of the unit.
  const BlockHash& hash_of(std::uint32_t tokens) const noexcept {
    return hashes_[tokens / unit_ - 1];
  }

 private:
  std::uint32_t unit_;
  std::vector<std::uint32_t> tokens_;
  std::vector<Prefix> prefixes_;
  std::vector<BlockHash> hashes_;
  std::array<std::uint64_t, 2> chain_{0x243f6a8885a308d3ull, 0xcbf29ce484222325ull};
  Prefix last_ = kEmptyPrefix;
};

}  // namespace kvprism::sim
