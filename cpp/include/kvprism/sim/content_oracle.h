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

  std::uint64_t bytes() const noexcept { return std::uint64_t{heads} * positions * content; }
};

// Writes one position of one layer's page, all heads. `slot` is its place in the page.
void write_position(const PageShape& shape, std::uint32_t layer, std::uint32_t slot, Prefix prefix,
                    std::byte* page) noexcept;

// Writes one layer's whole state after a prefix.
void write_state(const PageShape& shape, std::uint32_t layer, Prefix prefix,
                 std::byte* page) noexcept;

// Writes positions [from, from + prefixes.size()) of a block of kPositions; prefixes[i] belongs to
// position from + i.
void write_positions(const PageShape& shape, std::uint32_t layer, std::uint32_t from,
                     std::span<const Prefix> prefixes, std::byte* page) noexcept;

}  // namespace kvprism::sim
