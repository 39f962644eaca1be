#include "group/hash128.h"

#include <cstring>

#ifndef XXH_INLINE_ALL
#define XXH_INLINE_ALL
#endif
#include <xxhash.h>

namespace kvprism::detail {

Digest hash128(std::string_view text) {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits(text.data(), text.size()));
  Digest digest;
  static_assert(sizeof(canonical.digest) == sizeof(digest.bytes));
  std::memcpy(digest.bytes.data(), canonical.digest, digest.bytes.size());
  return digest;
}

std::string canonical_text(const std::vector<DigestFact>& facts) {
  std::string text;
  for (const DigestFact& fact : facts) {
    text += fact.name;
    text += '=';
    text += std::to_string(fact.value.size());
    text += ':';
    text += fact.value;
    text += '\n';
  }
  return text;
}

}  // namespace kvprism::detail
