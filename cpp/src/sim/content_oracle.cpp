#include "kvprism/sim/content_oracle.h"

#include <cstring>

namespace kvprism::sim {
namespace {

// Eight bytes per step: the word's place is mixed with what the run of bytes stands for.
void write_run(std::uint64_t seed, std::byte* out, std::size_t bytes) noexcept {
  std::size_t at = 0;
  std::uint64_t counter = seed;
  for (; at + 8 <= bytes; at += 8) {
    counter += 0x9e3779b97f4a7c15ull;
    const std::uint64_t word = (counter ^ (counter >> 32)) * 0xd6e8feb86659fd93ull;
    std::memcpy(out + at, &word, 8);
  }
  if (at < bytes) {
    counter += 0x9e3779b97f4a7c15ull;
    const std::uint64_t word = (counter ^ (counter >> 32)) * 0xd6e8feb86659fd93ull;
    std::memcpy(out + at, &word, bytes - at);
  }
}

std::uint64_t seed_of(const PageShape& shape, std::uint32_t layer, std::uint32_t head,
                      Prefix prefix) noexcept {
  const std::uint64_t place = (static_cast<std::uint64_t>(shape.group) << 40) |
                              (static_cast<std::uint64_t>(layer) << 20) |
                              (shape.first_head + head + 1);
  return scramble(static_cast<std::uint64_t>(prefix) ^ (place * 0xff51afd7ed558ccdull));
}

}  // namespace

void write_position(const PageShape& shape, std::uint32_t layer, std::uint32_t slot, Prefix prefix,
                    std::byte* page) noexcept {
  for (std::uint32_t head = 0; head < shape.heads; ++head) {
    std::byte* const out =
        page + (static_cast<std::size_t>(head) * shape.positions + slot) * shape.content;
    write_run(seed_of(shape, layer, head, prefix), out, shape.content);
  }
}

void write_state(const PageShape& shape, std::uint32_t layer, Prefix prefix,
                 std::byte* page) noexcept {
  write_run(seed_of(shape, layer, 0, prefix), page, shape.content);
}

void write_positions(const PageShape& shape, std::uint32_t layer, std::uint32_t from,
                     std::span<const Prefix> prefixes, std::byte* page) noexcept {
  for (std::size_t i = 0; i < prefixes.size(); ++i) {
    write_position(shape, layer, from + static_cast<std::uint32_t>(i), prefixes[i], page);
  }
}

}  // namespace kvprism::sim
