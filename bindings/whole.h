// Whole numbers of Python. One that the native type cannot hold is an error that names it; a plain
// integer parameter would make it a TypeError about overloads.
#pragma once

#include <nanobind/nanobind.h>

#include <limits>
#include <string>

#include "kvprism/base/error.h"

namespace kvprism::bindings {

namespace nb = nanobind;

template <class T>
class Whole {
 public:
  // Throws Error (kInvalidArgument) with path `path` unless T can hold the number.
  T operator()(const char* path) const {
    if (wrong.is_valid()) fail(ErrorCode::kInvalidArgument, "argument", problem(path));
    return value;
  }
  // Adds the problem to `problems` instead, and goes on with 1.
  T operator()(const char* path, ProblemList& problems) const {
    if (!wrong.is_valid()) return value;
    Problem found = problem(path);
    problems.add(std::move(found.path), std::move(found.value), std::move(found.expected));
    return 1;
  }

  T value{};
  nb::object wrong;

 private:
  Problem problem(const char* path) const {
    std::string text = "a number of thousands of digits";
    if (PyObject* const shown = PyObject_Str(wrong.ptr())) {
      text = nb::steal<nb::str>(shown).c_str();
      if (text.size() > 40) text = text.substr(0, 37) + "...";
    } else {
      PyErr_Clear();
    }
    return {path,
            std::move(text),
            "a whole number from " + std::to_string(std::numeric_limits<T>::min()) + " to " +
                std::to_string(std::numeric_limits<T>::max()),
            {}};
  }
};

}  // namespace kvprism::bindings

namespace nanobind::detail {

template <class T>
struct type_caster<kvprism::bindings::Whole<T>> {
  NB_TYPE_CASTER(kvprism::bindings::Whole<T>, const_name("int"))

  bool from_python(handle source, std::uint8_t, cleanup_list*) noexcept {
    // True where a number belongs is a mistake: a percentage of it would be 1.
    if (PyIndex_Check(source.ptr()) == 0 || PyBool_Check(source.ptr())) return false;
    object number = steal(PyNumber_Index(source.ptr()));
    if (!number.is_valid()) {
      PyErr_Clear();
      return false;
    }
    if (try_cast<T>(number, value.value, false)) {
      value.wrong.reset();
    } else {
      value.wrong = std::move(number);
    }
    return true;
  }

  static handle from_cpp(const kvprism::bindings::Whole<T>& whole, rv_policy,
                         cleanup_list*) noexcept {
    return PyLong_FromUnsignedLongLong(static_cast<unsigned long long>(whole.value));
  }
};

}  // namespace nanobind::detail
