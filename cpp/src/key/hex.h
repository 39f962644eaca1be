// Bytes as lower-case hex digits, sixteen at a time where the processor can.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace kvprism::detail {

inline constexpr std::array<char, 512> kHexPairs = [] {
  constexpr std::string_view digits = "0123456789abcdef";
  std::array<char, 512> pairs{};
  for (std::size_t byte = 0; byte < 256; ++byte) {
    pairs[2 * byte] = digits[byte >> 4];
    pairs[2 * byte + 1] = digits[byte & 15];
  }
  return pairs;
}();

// Writes 2 * bytes.size() characters to `out`.
inline void write_hex(std::span<const std::uint8_t> bytes, char* out) noexcept {
  std::size_t i = 0;
#if defined(__SSE2__)
  const __m128i low = _mm_set1_epi8(0x0f);
  const __m128i nine = _mm_set1_epi8(9);
  const __m128i zero = _mm_set1_epi8('0');
  const __m128i letters = _mm_set1_epi8('a' - '0' - 10);  // what a digit above 9 adds
  const auto digits = [&](__m128i nibbles) {
    return _mm_add_epi8(_mm_add_epi8(nibbles, zero),
                        _mm_and_si128(_mm_cmpgt_epi8(nibbles, nine), letters));
  };
  for (; i + 16 <= bytes.size(); i += 16) {
    const __m128i in = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes.data() + i));
    const __m128i high_digits = digits(_mm_and_si128(_mm_srli_epi16(in, 4), low));
    const __m128i low_digits = digits(_mm_and_si128(in, low));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 2 * i),
                     _mm_unpacklo_epi8(high_digits, low_digits));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 2 * i + 16),
                     _mm_unpackhi_epi8(high_digits, low_digits));
  }
#endif
  for (; i < bytes.size(); ++i)
    std::memcpy(out + 2 * i, kHexPairs.data() + 2 * std::size_t{bytes[i]}, 2);
}

}  // namespace kvprism::detail
