// Memory before it is needed: what may fail comes before anything has begun.
#pragma once

#include <cstddef>
#include <vector>

namespace kvprism::detail {

// So many more do not fail.
template <class T>
void make_room(std::vector<T>& items, std::size_t more) {
  const std::size_t wanted = items.size() + more;
  if (wanted > items.capacity()) items.reserve(2 * wanted);
}

}  // namespace kvprism::detail
