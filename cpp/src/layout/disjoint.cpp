#include "layout/disjoint.h"

#include <algorithm>
#include <numeric>
#include <span>

namespace kvprism::detail {
namespace {

struct Page {
  std::uint64_t begin;
  std::uint32_t row;
  std::uint32_t block;
};

bool coincide(const std::vector<PageRow>& rows, std::span<const std::size_t> cluster) {
  return std::all_of(cluster.begin(), cluster.end(), [&](std::size_t row) {
    return rows[row].first == rows[cluster[0]].first && rows[row].stride == rows[cluster[0]].stride;
  });
}

// Coinciding rows overlap id by id; that is wrong only within a group.
std::optional<Overlap> repeated_group(const std::vector<PageRow>& rows,
                                      std::span<const std::size_t> cluster) {
  for (std::size_t i = 0; i < cluster.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      if (rows[cluster[i]].group == rows[cluster[j]].group)
        return Overlap{cluster[j], 0, cluster[i], 0};
    }
  }
  return std::nullopt;
}

bool one_stride(const std::vector<PageRow>& rows, std::span<const std::size_t> cluster) {
  return std::all_of(cluster.begin(), cluster.end(),
                     [&](std::size_t row) { return rows[row].stride == rows[cluster[0]].stride; });
}

std::int64_t floor_div(std::int64_t a, std::int64_t b) { return a / b - (a % b < 0 ? 1 : 0); }

// Rows of one stride repeat alike: a pair overlaps at fixed distances of ids, whatever the ids.
std::optional<Overlap> periodic(const std::vector<PageRow>& rows,
                                std::span<const std::size_t> cluster, std::uint32_t num_blocks) {
  const auto stride = static_cast<std::int64_t>(rows[cluster[0]].stride);
  const std::int64_t furthest = std::int64_t{num_blocks} - 1;
  std::optional<Overlap> first;
  std::uint64_t first_at = 0;
  for (std::size_t j = 0; j < cluster.size(); ++j) {
    const PageRow& b = rows[cluster[j]];
    for (std::size_t i = 0; i < j; ++i) {
      const PageRow& a = rows[cluster[i]];
      const auto delta = static_cast<std::int64_t>(b.first - a.first);  // rows are sorted
      // Page x of a and page y of b overlap when x - y is in [low, high].
      const std::int64_t low =
          std::max(-furthest, floor_div(delta - static_cast<std::int64_t>(a.page), stride) + 1);
      const std::int64_t high =
          std::min(furthest, floor_div(delta + static_cast<std::int64_t>(b.page) - 1, stride));
      for (std::int64_t distance = low; distance <= high; ++distance) {
        if (distance == 0 && a.group != b.group) continue;
        const auto x = static_cast<std::uint32_t>(std::max<std::int64_t>(distance, 0));
        const auto y = static_cast<std::uint32_t>(std::max<std::int64_t>(-distance, 0));
        const std::uint64_t at = std::max(a.first + x * a.stride, b.first + y * b.stride);
        if (first && first_at <= at) continue;
        first = Overlap{cluster[i], x, cluster[j], y};
        first_at = at;
      }
    }
  }
  return first;
}

std::optional<Overlap> sweep(const std::vector<PageRow>& rows, std::span<const std::size_t> cluster,
                             std::uint32_t num_blocks) {
  std::vector<Page> pages;
  pages.reserve(cluster.size() * num_blocks);
  for (const std::size_t row : cluster) {
    for (std::uint32_t block = 0; block < num_blocks; ++block) {
      pages.push_back(
          {rows[row].first + block * rows[row].stride, static_cast<std::uint32_t>(row), block});
    }
  }
  std::sort(pages.begin(), pages.end(),
            [](const Page& a, const Page& b) { return a.begin < b.begin; });
  // At most one page a group while everything is well: the sweep stops at the first that is not.
  std::vector<Page> open;
  for (const Page& page : pages) {
    std::erase_if(
        open, [&](const Page& other) { return other.begin + rows[other.row].page <= page.begin; });
    for (const Page& other : open) {
      if (other.block != page.block || rows[other.row].group == rows[page.row].group) {
        return Overlap{other.row, other.block, page.row, page.block};
      }
    }
    open.push_back(page);
  }
  return std::nullopt;
}

}  // namespace

std::optional<Overlap> find_overlap(const std::vector<PageRow>& rows, std::uint32_t num_blocks) {
  const auto end_of = [&](const PageRow& row) {
    return row.first + (num_blocks - 1) * row.stride + row.page;
  };
  std::vector<std::size_t> order(rows.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(),
            [&](std::size_t a, std::size_t b) { return rows[a].first < rows[b].first; });
  std::size_t begin = 0;
  while (begin < order.size()) {
    std::uint64_t reach = end_of(rows[order[begin]]);
    std::size_t end = begin + 1;
    while (end < order.size() && rows[order[end]].first < reach) {
      reach = std::max(reach, end_of(rows[order[end]]));
      ++end;
    }
    const std::span<const std::size_t> cluster(order.data() + begin, end - begin);
    const auto overlap = coincide(rows, cluster)     ? repeated_group(rows, cluster)
                         : one_stride(rows, cluster) ? periodic(rows, cluster, num_blocks)
                                                     : sweep(rows, cluster, num_blocks);
    if (overlap) return overlap;
    begin = end;
  }
  return std::nullopt;
}

}  // namespace kvprism::detail
