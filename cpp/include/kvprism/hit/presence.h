// Which chunks of each group are usable: the only thing a hit search sees besides the rules.
#pragma once

#include <cstdint>
#include <vector>

#include "kvprism/base/ids.h"

namespace kvprism {

// One flag per (store group, chunk). Chunk c of a group covers tokens [c*B, (c+1)*B), B its tokens
// per block. Ownership: value; reset() keeps the capacity. Threads: one at a time.
class Presence {
 public:
  // Every flag false.
  void reset(std::size_t groups) {
    if (rows_.size() != groups) rows_.resize(groups);
    for (auto& row : rows_) row.clear();
  }
  void set_chunks(StoreIndex group, std::uint32_t chunks) { rows_[raw(group)].assign(chunks, 0); }
  void mark(StoreIndex group, std::uint32_t chunk) { rows_[raw(group)][chunk] = 1; }

  bool has(StoreIndex group, std::uint32_t chunk) const noexcept {
    const auto& row = rows_[raw(group)];
    return chunk < row.size() && row[chunk] != 0;
  }
  std::uint32_t chunks(StoreIndex group) const noexcept {
    return static_cast<std::uint32_t>(rows_[raw(group)].size());
  }

 private:
  std::vector<std::vector<std::uint8_t>> rows_;
};

}  // namespace kvprism
