// The low-level functions: they need no provider, so that linking them statically adds 30 KB
// instead of 4 MB, and a short message costs a quarter of what EVP takes.
#define OPENSSL_SUPPRESS_DEPRECATED

#include "hash/sha256.h"

#include <openssl/sha.h>

namespace kvprism::detail {

static_assert(kSha256Bytes == SHA256_DIGEST_LENGTH);

void sha256(const void* data, std::size_t size, std::uint8_t* out) noexcept {
  SHA256_CTX context;
  SHA256_Init(&context);
  SHA256_Update(&context, data, size);
  SHA256_Final(out, &context);
}

}  // namespace kvprism::detail
