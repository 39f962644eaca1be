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
                      std::uint32_t state, Prefix prefix) noexcept {
  const std::uint64_t place = (static_cast<std::uint64_t>(shape.prefill_rank) << 60) |
                              (static_cast<std::uint64_t>(shape.group) << 40) |
                              (static_cast<std::uint64_t>(shape.first_layer + layer) << 20) |
                              (shape.first_head + head + 1);
  return scramble(static_cast<std::uint64_t>(prefix) ^ (place * 0xff51afd7ed558ccdull) ^
                  (std::uint64_t{state} << 32));
}

}  // namespace

PageView dense_view(const PageShape& shape, std::byte* page) noexcept {
  const std::uint64_t head = std::uint64_t{shape.positions} * shape.content;
  return {page, head, shape.content, shape.positions, head * shape.heads};
}

void write_position(const PageShape& shape, std::uint32_t layer, std::uint32_t slot, Prefix prefix,
                    const PageView& page) noexcept {
  const std::uint32_t state =
      (slot * shape.context_ranks + shape.context_rank) % shape.states_per_token;
  for (std::uint32_t head = 0; head < shape.heads; ++head) {
    write_run(seed_of(shape, layer, head, state, prefix), page.at(head, slot), shape.content);
  }
}

void write_position(const PageShape& shape, std::uint32_t layer, std::uint32_t slot, Prefix prefix,
                    std::byte* page) noexcept {
  write_position(shape, layer, slot, prefix, dense_view(shape, page));
}

void write_state(const PageShape& shape, std::uint32_t layer, Prefix prefix,
                 std::byte* page) noexcept {
  write_run(seed_of(shape, layer, 0, 0, prefix), page, shape.content);
}

void write_tokens(const PageShape& shape, std::uint32_t layer, std::uint32_t from,
                  std::span<const Prefix> prefixes, const PageView& page) noexcept {
  for (std::uint32_t slot = 0; slot < shape.positions; ++slot) {
    const std::uint32_t token = shape.last_token(slot);
    if (token < from || token - from >= prefixes.size()) continue;
    write_position(shape, layer, slot, prefixes[token - from], page);
  }
}

void copy_page(const PageShape& shape, const PageView& from, const PageView& to) noexcept {
  for (std::uint32_t head = 0; head < shape.heads; ++head) {
    for (std::uint32_t slot = 0; slot < shape.positions; ++slot) {
      std::memcpy(to.at(head, slot), from.at(head, slot), shape.content);
    }
  }
}

}  // namespace kvprism::sim
