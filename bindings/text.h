// Text of Python as UTF-8, in place of nanobind/stl/string.h and string_view.h, for which a lone
// surrogate is no str at all. Those of file names are the bytes that they stand for (PEP 383);
// others end up as bytes that are not UTF-8, which the core refuses under the argument's name.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace nanobind::detail {

// The text of `source` at `text`, and what keeps it in `kept`; false when it is no str.
inline bool text_of(handle source, std::string_view& text, object& kept) noexcept {
  if (!PyUnicode_Check(source.ptr())) return false;
  Py_ssize_t size = 0;
  if (const char* const utf8 = PyUnicode_AsUTF8AndSize(source.ptr(), &size)) {
    text = {utf8, static_cast<std::size_t>(size)};
    return true;
  }
  for (const char* const errors : {"surrogateescape", "surrogatepass"}) {
    PyErr_Clear();
    kept = steal(PyUnicode_AsEncodedString(source.ptr(), "utf-8", errors));
    char* bytes = nullptr;
    if (kept.is_valid() && PyBytes_AsStringAndSize(kept.ptr(), &bytes, &size) == 0) {
      text = {bytes, static_cast<std::size_t>(size)};
      return true;
    }
  }
  PyErr_Clear();
  return false;
}

inline handle to_str(std::string_view text) noexcept {
  return PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "surrogateescape");
}

template <>
struct type_caster<std::string> {
  NB_TYPE_CASTER(std::string, const_name("str"))

  bool from_python(handle source, std::uint32_t, cleanup_list*) noexcept {
    std::string_view text;
    object kept;
    if (!text_of(source, text, kept)) return false;
    value = text;
    return true;
  }
  static handle from_cpp(const std::string& text, rv_policy, cleanup_list*) noexcept {
    return to_str(text);
  }
};

template <>
struct type_caster<std::string_view> {
  NB_TYPE_CASTER(std::string_view, const_name("str"))

  bool from_python(handle source, std::uint32_t, cleanup_list*) noexcept {
    return text_of(source, value, kept_);
  }
  static handle from_cpp(std::string_view text, rv_policy, cleanup_list*) noexcept {
    return to_str(text);
  }

 private:
  object kept_;
};

}  // namespace nanobind::detail
