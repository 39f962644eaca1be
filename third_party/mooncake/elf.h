// Reads identifying facts of a shared library from its file, without loading it.
#pragma once

#include <string>

namespace kvprism::mooncake {

// The GNU build-id of a 64-bit ELF file in lower-case hex; empty when it has none or is no such
// file.
std::string read_build_id(const std::string& path);

// SHA-256 of a file in lower-case hex; empty when it cannot be read.
std::string hash_file(const std::string& path);

}  // namespace kvprism::mooncake
