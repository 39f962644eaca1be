// KVPRISM_API marks what libkvprism exports. The library is compiled with hidden visibility, so a
// public function, or a public class with out-of-line members, needs the macro to be linkable.
#pragma once

#if defined(__GNUC__) || defined(__clang__)
#define KVPRISM_API __attribute__((visibility("default")))
#else
#define KVPRISM_API
#endif
