// What every byte of a simulated cache must be: a function of the tokens and the absolute position
// alone. It knows nothing of keys, hashes, hits, layouts or plans, so it can judge all of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace kvprism::sim {

// Stands for all tokens up to and including one position, and for that position.
enum class Prefix : std::uint64_t {};

inline constexpr Prefix kEmptyPrefix{0x6b767072'69736d31ull};

constexpr std::uint64_t scramble(std::uint64_t z) noexcept {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

constexpr Prefix extend(Prefix before, std::uint32_t position, std::uint32_t token) noexcept {
  const std::uint64_t own =
      (static_cast<std::uint64_t>(position) << 32 | token) + 0x9e3779b97f4a7c15ull;
  return Prefix{scramble(static_cast<std::uint64_t>(before) + scramble(own))};
}

// What a block holds that nobody has written to.
inline constexpr std::byte kPoison{0xe7};

// The token that a model generates after a prefix.
constexpr std::uint32_t next_token(Prefix prefix, std::uint32_t vocabulary) noexcept {
  return static_cast<std::uint32_t>(scramble(static_cast<std::uint64_t>(prefix) ^ 0x746f6b656eull) %
                                    vocabulary);
}

enum class PageKind : std::uint8_t {
  kPositions,  // keys and values, position by position
  kRing,       // the same, with position p in slot p modulo capacity
  kState,      // one state that sums up the whole prefix
};

// One group's page as a rank holds it: heads, then positions, then content.
struct PageShape {
  PageKind kind{};
  std::uint32_t group = 0;
  std::uint32_t first_head = 0;  // of all ranks' heads
  std::uint32_t heads = 1;
  std::uint32_t positions = 1;  // per block; the capacity of a ring; 1 for a state
  std::uint32_t content = 0;    // bytes per head and position; of the whole page for a state
  // A position stands for several tokens, or a token has several positions; ranks that share the
  // tokens take positions in turns.
  std::uint32_t compression = 1;
  std::uint32_t states_per_token = 1;
  std::uint32_t context_ranks = 1;
  std::uint32_t context_rank = 0;
  std::uint32_t first_layer = 0;   // of a pipeline stage: the group's layers before it
  std::uint32_t prefill_rank = 0;  // of prefill context ranks, each of which has bytes of its own

  std::uint64_t bytes() const noexcept { return std::uint64_t{heads} * positions * content; }
  std::uint32_t tokens() const noexcept {
    return positions * context_ranks / states_per_token * compression;
  }
  // Of a block of kPositions: the token of the block that completes the position.
  std::uint32_t last_token(std::uint32_t slot) const noexcept {
    return (slot * context_ranks + context_rank) / states_per_token * compression + compression - 1;
  }
};

// One layer's page of a block as it lies in memory: heads may be apart, and positions in groups.
struct PageView {
  std::byte* base = nullptr;
  std::uint64_t head_stride = 0;  // bytes
  std::uint64_t slot_stride = 0;  // bytes, within a group
  std::uint32_t group_slots = 1;  // positions of a group
  std::uint64_t group_stride = 0;

  std::byte* at(std::uint32_t head, std::uint32_t slot) const noexcept {
    return base + head * head_stride + slot / group_slots * group_stride +
           slot % group_slots * slot_stride;
  }
};

// Heads, then positions, then content, without gaps.
PageView dense_view(const PageShape& shape, std::byte* page) noexcept;

// Writes one position of one layer's page, all heads; layers count from the stage's first. `slot`
// is its place in the page.
void write_position(const PageShape& shape, std::uint32_t layer, std::uint32_t slot, Prefix prefix,
                    const PageView& page) noexcept;
void write_position(const PageShape& shape, std::uint32_t layer, std::uint32_t slot, Prefix prefix,
                    std::byte* page) noexcept;

// Writes one layer's whole state after a prefix.
void write_state(const PageShape& shape, std::uint32_t layer, Prefix prefix,
                 std::byte* page) noexcept;

// Writes what tokens [from, from + prefixes.size()) of a block of kPositions complete; prefixes[i]
// belongs to token from + i.
void write_tokens(const PageShape& shape, std::uint32_t layer, std::uint32_t from,
                  std::span<const Prefix> prefixes, const PageView& page) noexcept;

// Copies a page's content, without what may lie between it.
void copy_page(const PageShape& shape, const PageView& from, const PageView& to) noexcept;

}  // namespace kvprism::sim
