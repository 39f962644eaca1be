// Which objects of each group are there: the only thing a hit search sees besides the rules.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kvprism/base/ids.h"

namespace kvprism {

// One flag per (store group, unit). Unit u of a group is the object of the prefix of (u+1)*U
// tokens, U the group's HitGroup::unit_tokens: its chunks, unless hits may end inside a block.
// Ownership: value; reset() keeps the capacity. Threads: one at a time.
class Presence {
 public:
  // Every flag false.
  void reset(std::size_t groups) {
    if (rows_.size() != groups) rows_.resize(groups);
    for (auto& row : rows_) row.clear();
  }
  void set_units(StoreIndex group, std::uint32_t units) { rows_[raw(group)].assign(units, 0); }
  void mark(StoreIndex group, std::uint32_t unit) { rows_[raw(group)][unit] = 1; }

  bool has(StoreIndex group, std::uint32_t unit) const noexcept {
    const auto& row = rows_[raw(group)];
    return unit < row.size() && row[unit] != 0;
  }
  std::uint32_t units(StoreIndex group) const noexcept {
    return static_cast<std::uint32_t>(rows_[raw(group)].size());
  }
  std::span<const std::uint8_t> row(StoreIndex group) const noexcept { return rows_[raw(group)]; }

 private:
  std::vector<std::vector<std::uint8_t>> rows_;
};

}  // namespace kvprism
