// GroupId, TransferIndex and StoreIndex as distinct Python classes: passing one where another is
// due is a TypeError (R32).
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

#include "kvprism/base/ids.h"

namespace kvprism::bindings {

// An id behind a Python class of its own. Bound functions take and give the box, never an int.
template <class Id>
struct Boxed {
  Id id;
};

using PyGroupId = Boxed<GroupId>;
using PyTransferIndex = Boxed<TransferIndex>;
using PyStoreIndex = Boxed<StoreIndex>;

template <class Id>
Boxed<Id> box(Id id) noexcept {
  return {id};
}

// Throws nanobind::index_error unless `id` is below `size`.
template <class Id>
Id checked(const Boxed<Id>& id, std::size_t size, const char* space) {
  if (raw(id.id) >= size) {
    PyErr_Format(PyExc_IndexError, "%s %u is out of range: there are %zu", space,
                 static_cast<unsigned>(raw(id.id)), size);
    throw nanobind::python_error();
  }
  return id.id;
}

}  // namespace kvprism::bindings
