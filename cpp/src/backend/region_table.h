// Which memory a store may touch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kvprism/layout/segment.h"

namespace kvprism::detail {

// Disjoint regions, sorted by address. Threads: one writer, no reader meanwhile.
class RegionTable {
 public:
  enum class Fit { kNew, kEqual, kOverlap };

  Fit fit(const Region& region) const noexcept {
    const auto at = after(region.base);
    if (at != regions_.begin()) {
      const Region& before = *(at - 1);
      if (before == region) return Fit::kEqual;
      if (end(before) > address(region.base)) return Fit::kOverlap;
    }
    if (at != regions_.end() && address(at->base) < end(region)) return Fit::kOverlap;
    return Fit::kNew;
  }

  void insert(const Region& region) { regions_.insert(after(region.base), region); }

  bool erase(const Region& region) noexcept {
    const auto at = std::find(regions_.begin(), regions_.end(), region);
    if (at == regions_.end()) return false;
    regions_.erase(at);
    return true;
  }

  // The region in which the whole segment lies; null when there is none.
  const Region* find(const Segment& segment) const noexcept {
    const auto at = after(segment.base);
    if (at == regions_.begin()) return nullptr;
    const Region& region = *(at - 1);
    const std::uintptr_t offset = address(segment.base) - address(region.base);
    if (offset > region.length || segment.length > region.length - offset) return nullptr;
    return &region;
  }
  bool covers(const Segment& segment) const noexcept { return find(segment) != nullptr; }

  const std::vector<Region>& regions() const noexcept { return regions_; }

 private:
  static std::uintptr_t address(const std::byte* base) noexcept {
    return reinterpret_cast<std::uintptr_t>(base);
  }
  static std::uintptr_t end(const Region& region) noexcept {
    return address(region.base) + region.length;
  }
  // The first region that begins behind `base`.
  std::vector<Region>::const_iterator after(const std::byte* base) const noexcept {
    return std::upper_bound(regions_.begin(), regions_.end(), base,
                            [](const std::byte* at, const Region& region) {
                              return address(at) < address(region.base);
                            });
  }

  std::vector<Region> regions_;
};

}  // namespace kvprism::detail
