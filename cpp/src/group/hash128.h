// XXH3-128 over named facts: the one hash of digests, key fingerprints and layout fingerprints.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "kvprism/group/projection.h"

namespace kvprism::detail {

// Canonical (big-endian) bytes, equal on every machine.
Digest hash128(std::string_view text);

// "name=<length of value>:value\n" for each fact in order: two lists never spell alike.
std::string canonical_text(const std::vector<DigestFact>& facts);

}  // namespace kvprism::detail
