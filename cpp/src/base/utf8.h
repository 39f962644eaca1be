// Where a byte string stops being UTF-8 (RFC 3629: no overlong forms, no surrogates, at most
// U+10FFFF).
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace kvprism::detail {

inline std::optional<std::size_t> invalid_utf8(std::string_view text) noexcept {
  const auto byte = [&](std::size_t at) { return static_cast<std::uint8_t>(text[at]); };
  std::size_t at = 0;
  while (at < text.size()) {
    const std::uint8_t lead = byte(at);
    std::size_t more = 0;
    std::uint8_t low = 0x80;
    std::uint8_t high = 0xBF;
    if (lead < 0x80) {
      ++at;
      continue;
    } else if (lead >= 0xC2 && lead <= 0xDF) {
      more = 1;
    } else if (lead >= 0xE0 && lead <= 0xEF) {
      more = 2;
      if (lead == 0xE0) low = 0xA0;
      if (lead == 0xED) high = 0x9F;
    } else if (lead >= 0xF0 && lead <= 0xF4) {
      more = 3;
      if (lead == 0xF0) low = 0x90;
      if (lead == 0xF4) high = 0x8F;
    } else {
      return at;
    }
    if (text.size() - at <= more) return at;
    for (std::size_t i = 1; i <= more; ++i) {
      if (byte(at + i) < low || byte(at + i) > high) return at;
      low = 0x80;
      high = 0xBF;
    }
    at += more + 1;
  }
  return std::nullopt;
}

}  // namespace kvprism::detail
