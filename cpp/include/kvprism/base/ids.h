// Strong index and identifier types: an index of one space never converts to another (R32).
#pragma once

#include <cassert>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

namespace kvprism {

// Position of a group in the engine's list of all KV cache groups.
enum class GroupId : std::uint32_t {};
// Position of a group in the transfer projection.
enum class TransferIndex : std::uint32_t {};
// Position of a group in the store projection.
enum class StoreIndex : std::uint32_t {};
// Physical block in the engine's pool. Id 0 is the null block: never a source, never a destination.
enum class BlockId : std::int32_t {};
// Chosen by the engine; unique among live requests.
enum class RequestId : std::uint64_t {};
// Chosen by a scheduler; never reused within its epoch.
enum class JobId : std::uint64_t {};
// Worker rank, 0-based, dense.
enum class Rank : std::uint32_t {};

inline constexpr BlockId kNullBlock{0};

template <class Id>
  requires std::is_enum_v<Id>
constexpr std::underlying_type_t<Id> raw(Id id) noexcept {
  return static_cast<std::underlying_type_t<Id>>(id);
}

// A span that only its own index type can address.
// Ownership: none, a view. Threads: as the viewed memory.
template <class Index, class T>
class IndexedSpan {
 public:
  constexpr IndexedSpan() noexcept = default;
  constexpr explicit IndexedSpan(std::span<T> items) noexcept : items_(items) {}

  constexpr T& operator[](Index index) const noexcept {
    assert(raw(index) < items_.size());
    return items_[raw(index)];
  }
  constexpr std::size_t size() const noexcept { return items_.size(); }
  constexpr bool empty() const noexcept { return items_.empty(); }
  constexpr bool contains(Index index) const noexcept { return raw(index) < items_.size(); }
  constexpr auto begin() const noexcept { return items_.begin(); }
  constexpr auto end() const noexcept { return items_.end(); }
  constexpr std::span<T> items() const noexcept { return items_; }

 private:
  std::span<T> items_;
};

// A vector that only its own index type can address.
template <class Index, class T>
class IndexedVector {
 public:
  IndexedVector() = default;
  explicit IndexedVector(std::size_t size, const T& value = T()) : items_(size, value) {}
  explicit IndexedVector(std::vector<T> items) : items_(std::move(items)) {}

  T& operator[](Index index) noexcept {
    assert(raw(index) < items_.size());
    return items_[raw(index)];
  }
  const T& operator[](Index index) const noexcept {
    assert(raw(index) < items_.size());
    return items_[raw(index)];
  }
  std::size_t size() const noexcept { return items_.size(); }
  bool empty() const noexcept { return items_.empty(); }
  bool contains(Index index) const noexcept { return raw(index) < items_.size(); }
  Index push_back(T value) {
    items_.push_back(std::move(value));
    return Index{static_cast<std::underlying_type_t<Index>>(items_.size() - 1)};
  }
  void assign(std::size_t size, const T& value) { items_.assign(size, value); }
  void resize(std::size_t size) { items_.resize(size); }
  auto begin() noexcept { return items_.begin(); }
  auto end() noexcept { return items_.end(); }
  auto begin() const noexcept { return items_.begin(); }
  auto end() const noexcept { return items_.end(); }
  IndexedSpan<Index, const T> span() const noexcept {
    return IndexedSpan<Index, const T>(std::span<const T>(items_));
  }
  std::vector<T>& items() noexcept { return items_; }
  const std::vector<T>& items() const noexcept { return items_; }

 private:
  std::vector<T> items_;
};

// Every index of a space of `size` items, in order: for (StoreIndex s : indices<StoreIndex>(n)).
template <class Index>
class IndexRange {
 public:
  class Iterator {
   public:
    constexpr explicit Iterator(std::underlying_type_t<Index> at) noexcept : at_(at) {}
    constexpr Index operator*() const noexcept { return Index{at_}; }
    constexpr Iterator& operator++() noexcept {
      ++at_;
      return *this;
    }
    constexpr bool operator==(const Iterator&) const noexcept = default;

   private:
    std::underlying_type_t<Index> at_;
  };
  constexpr explicit IndexRange(std::size_t size) noexcept
      : size_(static_cast<std::underlying_type_t<Index>>(size)) {}
  constexpr Iterator begin() const noexcept { return Iterator(0); }
  constexpr Iterator end() const noexcept { return Iterator(size_); }

 private:
  std::underlying_type_t<Index> size_;
};

template <class Index>
constexpr IndexRange<Index> indices(std::size_t size) noexcept {
  return IndexRange<Index>(size);
}

}  // namespace kvprism
