// The few kinds of CBOR item that a block's message has, in their shortest form (RFC 8949 4.2.1).
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace kvprism::detail::cbor {

using Bytes = std::vector<std::uint8_t>;

enum class Major : std::uint8_t { kUnsigned = 0, kNegative = 1, kBytes = 2, kText = 3, kArray = 4 };

inline void head(Bytes& out, Major major, std::uint64_t value) {
  const auto top = static_cast<std::uint8_t>(static_cast<unsigned>(major) << 5);
  if (value < 24) {
    out.push_back(static_cast<std::uint8_t>(top | value));
    return;
  }
  // 24, 25, 26 and 27 say that 1, 2, 4 and 8 bytes follow.
  const unsigned log = value <= 0xff ? 0 : value <= 0xffff ? 1 : value <= 0xffffffff ? 2 : 3;
  out.push_back(static_cast<std::uint8_t>(top | (24 + log)));
  for (unsigned byte = 1u << log; byte-- > 0;)
    out.push_back(static_cast<std::uint8_t>(value >> (8 * byte)));
}

inline void array(Bytes& out, std::uint64_t items) { head(out, Major::kArray, items); }

inline void integer(Bytes& out, std::int64_t value) {
  if (value >= 0) return head(out, Major::kUnsigned, static_cast<std::uint64_t>(value));
  head(out, Major::kNegative, static_cast<std::uint64_t>(-(value + 1)));
}

inline void bytes(Bytes& out, std::span<const std::uint8_t> value) {
  head(out, Major::kBytes, value.size());
  out.insert(out.end(), value.begin(), value.end());
}

inline void text(Bytes& out, std::string_view value) {
  head(out, Major::kText, value.size());
  out.insert(out.end(), value.begin(), value.end());
}

inline void null(Bytes& out) { out.push_back(0xf6); }

}  // namespace kvprism::detail::cbor
