// Replaces operator new by one that fails where a test says. Weak: a program may have several of
// its tests.
#pragma once

#include <atomic>
#include <cstdlib>
#include <new>

// The replaced operators pair with each other; g++ 12 sees only one side of an inlined pair.
#pragma GCC diagnostic ignored "-Wmismatched-new-delete"

namespace kvprism::test {

inline std::atomic<bool> counting{false};
inline std::atomic<int> until_failure{0};  // allocations that still succeed
inline std::atomic<bool> for_good{false};  // all fail behind the first that does

// Allocations of a test's own store do not count.
class NotCounted {
 public:
  NotCounted() : before_(counting.exchange(false)) {}
  ~NotCounted() { counting = before_; }
  NotCounted(const NotCounted&) = delete;
  NotCounted& operator=(const NotCounted&) = delete;

 private:
  bool before_;
};

}  // namespace kvprism::test

[[gnu::weak]] void* operator new(std::size_t size) {
  using namespace kvprism::test;  // NOLINT(google-build-using-namespace): of a function
  if (counting) {
    const int left = until_failure--;
    if (left == 0 || (left < 0 && for_good)) throw std::bad_alloc();
  }
  if (void* const memory = std::malloc(size == 0 ? 1 : size)) return memory;
  throw std::bad_alloc();
}
[[gnu::weak]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::weak]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
