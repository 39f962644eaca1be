// The six physical orders of layer (L), block (B), head (H), position (N) and content (C),
// outermost first (vLLM: KVCacheLayout).
#pragma once

#include <array>
#include <optional>
#include <string_view>

namespace kvprism::detail {

struct LayoutOrder {
  std::string_view name;
  bool block_outermost;         // a row of layers per block; else a row of blocks per layer
  bool head_inside_page;        // one page of a layer is one run of bytes
  bool heads_before_positions;  // within a page
  bool heads_before_layers;     // within a block
};

inline constexpr std::array<LayoutOrder, 6> kLayouts{{
    {"LBHNC", false, true, true, false},
    {"LBNHC", false, true, false, false},
    {"LHBNC", false, false, true, false},
    {"BLHNC", true, true, true, false},
    {"BLNHC", true, true, false, false},
    {"BHLNC", true, false, true, true},
}};

constexpr std::optional<LayoutOrder> layout_of(std::string_view name) noexcept {
  for (const LayoutOrder& layout : kLayouts) {
    if (layout.name == name) return layout;
  }
  return std::nullopt;
}

}  // namespace kvprism::detail
