// Whether the tests run under ThreadSanitizer, which cannot follow a fork with threads.
#pragma once

namespace kvprism::test {

#if defined(__SANITIZE_THREAD__)
inline constexpr bool kThreadSanitizer = true;
#else
inline constexpr bool kThreadSanitizer = false;
#endif

}  // namespace kvprism::test
