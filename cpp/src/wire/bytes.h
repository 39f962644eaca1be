// Reading and writing fixed-width records in a byte buffer, bounds first.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "kvprism/base/error.h"

namespace kvprism::detail {

static_assert(std::endian::native == std::endian::little,
              "the wire format is the memory of a little-endian machine");

constexpr std::size_t padded8(std::size_t bytes) noexcept { return (bytes + 7) & ~std::size_t{7}; }

// Appends an array at an 8-byte boundary.
template <class T>
void append_array(std::vector<std::byte>& out, std::span<const T> items) {
  static_assert(std::is_trivially_copyable_v<T>);
  const std::size_t at = out.size();
  out.resize(at + padded8(items.size_bytes()));
  if (!items.empty()) std::memcpy(out.data() + at, items.data(), items.size_bytes());
}

// Takes an array of `count` records off the front; false when the bytes do not suffice.
template <class T>
bool take_array(std::span<const std::byte>& bytes, std::uint64_t count,
                std::span<const T>& items) noexcept {
  static_assert(std::is_trivially_copyable_v<T> && alignof(T) <= 8);
  if (count > bytes.size() / sizeof(T)) return false;
  const std::size_t length = static_cast<std::size_t>(count) * sizeof(T);
  if (padded8(length) > bytes.size()) return false;
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-reinterpret-cast): the records are implicit-lifetime
  // types
  items = {reinterpret_cast<const T*>(bytes.data()), static_cast<std::size_t>(count)};
  bytes = bytes.subspan(padded8(length));
  return true;
}

// The same into a vector: reports come in frames of transports that align nothing.
template <class T>
bool copy_array(std::span<const std::byte>& bytes, std::uint64_t count, std::vector<T>& items) {
  static_assert(std::is_trivially_copyable_v<T>);
  if (count > bytes.size() / sizeof(T)) return false;
  const std::size_t length = static_cast<std::size_t>(count) * sizeof(T);
  if (padded8(length) > bytes.size()) return false;
  items.resize(static_cast<std::size_t>(count));
  if (length != 0) std::memcpy(items.data(), bytes.data(), length);
  bytes = bytes.subspan(padded8(length));
  return true;
}

[[noreturn]] inline void refuse(ErrorCode code, std::string_view subject, std::string path,
                                std::uint64_t value, std::string expected) {
  fail(code, subject, {std::move(path), std::to_string(value), std::move(expected), {}});
}

}  // namespace kvprism::detail
