// A member that has no default: leaving it out does not compile, also inside an aggregate
// (decision 1).
#pragma once

#include <utility>

namespace kvprism {

// struct Traits { Declared<bool> cacheable; Declared<int> replay; };
// Traits{true, 0} compiles; Traits{true} and Traits{} do not.
template <class T>
class Declared {
 public:
  constexpr Declared(T value) : value_(std::move(value)) {}  // NOLINT(google-explicit-constructor)

  constexpr const T& get() const noexcept { return value_; }
  constexpr operator const T&() const noexcept { return value_; }  // NOLINT
  constexpr const T* operator->() const noexcept { return &value_; }

  friend constexpr bool operator==(const Declared& a, const Declared& b) {
    return a.value_ == b.value_;
  }
  // Without it `traits.hit == HitRule::kNever` is ambiguous between two conversions.
  template <class U>
  friend constexpr bool operator==(const Declared& a, const U& b) {
    return a.value_ == b;
  }

 private:
  T value_;
};

}  // namespace kvprism
