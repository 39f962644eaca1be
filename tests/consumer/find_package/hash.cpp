#include <cstdint>
#include <vector>

#include "kvprism/hash/block_hasher.h"

int main() {
  kvprism::BlockHasher hasher({.hash_block_size = 2});
  std::vector<std::uint8_t> hashes;
  hasher.extend(std::vector<std::uint32_t>{1, 2, 3, 4, 5}, {}, hashes);
  return hashes.size() == 2 * hasher.width() ? 0 : 1;
}
