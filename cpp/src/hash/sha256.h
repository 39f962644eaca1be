// SHA-256 of OpenSSL's libcrypto.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvprism::detail {

inline constexpr std::size_t kSha256Bytes = 32;

void sha256(const void* data, std::size_t size, std::uint8_t* out) noexcept;

}  // namespace kvprism::detail
