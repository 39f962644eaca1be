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
    const auto overlap =
        coincide(rows, cluster) ? repeated_group(rows, cluster) : sweep(rows, cluster, num_blocks);
    if (overlap) return overlap;
    begin = end;
  }
  return std::nullopt;
}

}  // namespace kvprism::detail
