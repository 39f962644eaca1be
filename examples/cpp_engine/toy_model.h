// What an engine has and kvprism does not: a model, names for prefixes, and a pool of blocks. Every
// byte of a position follows from the tokens up to it, so that a wrong block is seen.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kvprism/base/ids.h"

namespace toy {

using Tokens = std::vector<std::uint32_t>;

constexpr std::uint32_t kBlock = 16;               // tokens
constexpr std::size_t kPosition = (8 + 8) * 2;     // bytes of one token: K and V, float16
constexpr std::size_t kPage = kBlock * kPosition;  // bytes of a block
constexpr std::uint32_t kHashWidth = 16;           // bytes

inline std::uint64_t mix(std::uint64_t state, std::uint64_t value) {
  state = (state ^ value) * 0x9E3779B97F4A7C15u;
  return state ^ (state >> 29);
}

// Visits each byte of the prompt's positions, with its place in memory and what it should be.
template <class Visit>
void for_each_byte(std::span<std::byte> memory, const Tokens& prompt,
                   const std::vector<kvprism::BlockId>& table, Visit visit) {
  std::uint64_t prefix = 1;
  for (std::uint32_t at = 0; at < prompt.size(); ++at) {
    prefix = mix(prefix, prompt[at]);
    const std::size_t block = static_cast<std::size_t>(raw(table[at / kBlock]));
    std::byte* const to = memory.data() + block * kPage + at % kBlock * kPosition;
    for (std::size_t i = 0; i < kPosition; ++i)
      visit(at, to[i], static_cast<std::byte>(mix(prefix, i) >> 17));
  }
}

// The kernel: fills positions [from, end).
inline void compute(std::span<std::byte> memory, const Tokens& prompt,
                    const std::vector<kvprism::BlockId>& table, std::uint32_t from,
                    std::uint32_t end) {
  for_each_byte(memory, prompt, table, [&](std::uint32_t at, std::byte& place, std::byte value) {
    if (at >= from && at < end) place = value;
  });
}

inline std::uint64_t count_wrong(std::span<std::byte> memory, const Tokens& prompt,
                                 const std::vector<kvprism::BlockId>& table) {
  std::uint64_t wrong = 0;
  for_each_byte(memory, prompt, table, [&](std::uint32_t, const std::byte& place, std::byte value) {
    wrong += place == value ? 0 : 1;
  });
  return wrong;
}

// A chain of hashes, one for each whole block. Real engines need a cryptographic one, such as
// kvprism::BlockHasher: two prefixes with one hash are one prefix to the store.
inline std::vector<std::uint8_t> hashes_of(const Tokens& prompt) {
  std::vector<std::uint8_t> out;
  std::uint64_t low = 1, high = 2;
  for (std::uint32_t at = 0; at < prompt.size(); ++at) {
    low = mix(low, prompt[at]);
    high = mix(high, low);
    if (at % kBlock != kBlock - 1) continue;
    for (const std::uint64_t half : {low, high}) {
      for (int shift = 0; shift < 64; shift += 8)
        out.push_back(static_cast<std::uint8_t>(half >> shift));
    }
  }
  return out;
}

// `prefix` tokens that all prompts share, and `own` ones.
inline Tokens prompt_of(std::uint32_t prefix, std::uint32_t own, std::uint32_t seed) {
  Tokens tokens;
  for (std::uint32_t at = 0; at < prefix; ++at) tokens.push_back(at * 7 + 3);
  for (std::uint32_t at = 0; at < own; ++at) tokens.push_back(seed * 1000 + at);
  return tokens;
}

// Blocks with references; a block without any is free. Block 0 is the null block.
class BlockPool {
 public:
  explicit BlockPool(std::int32_t blocks) : references_(static_cast<std::size_t>(blocks)) {
    for (std::int32_t id = blocks - 1; id > 0; --id) free_.push_back(kvprism::BlockId{id});
  }
  std::size_t num_free() const { return free_.size(); }
  kvprism::BlockId take() {  // there must be a free one
    const kvprism::BlockId block = free_.back();
    free_.pop_back();
    add_reference(block);
    return block;
  }
  void add_reference(kvprism::BlockId block) { ++references_[raw(block)]; }
  void drop_reference(kvprism::BlockId block) {
    if (--references_[raw(block)] == 0) free_.push_back(block);
  }

 private:
  std::vector<std::uint32_t> references_;
  std::vector<kvprism::BlockId> free_;
};

}  // namespace toy
