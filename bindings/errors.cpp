#include "errors.h"

#include <nanobind/operators.h>

#include <array>
#include <cstddef>

#include "areas.h"
#include "text.h"

namespace kvprism::bindings {

namespace nb = nanobind;

namespace {

struct ErrorClass {
  ErrorCode code;
  const char* name;
  const char* doc;
  PyObject** builtin;
};

// A built-in base beside kvprism.Error, so that code which knows nothing of kvprism can tell them
// apart.
const std::array<ErrorClass, 8>& error_classes() {
  static const std::array<ErrorClass, 8> classes{{
      {ErrorCode::kInvalidConfig, "ConfigError",
       "A configuration value is malformed or contradicts another.", &PyExc_ValueError},
      {ErrorCode::kInvalidArgument, "ArgumentError", "A call's argument is outside its contract.",
       &PyExc_ValueError},
      {ErrorCode::kNotFound, "NotFoundError", "A file, library, device or symbol is missing.",
       &PyExc_LookupError},
      {ErrorCode::kMismatch, "MismatchError",
       "Two sides disagree (digest, epoch, layout, version).", &PyExc_ValueError},
      {ErrorCode::kUnsupported, "UnsupportedError",
       "Valid, but this build or backend cannot do it.", &PyExc_NotImplementedError},
      {ErrorCode::kUnavailable, "UnavailableError", "A service does not answer.",
       &PyExc_ConnectionError},
      {ErrorCode::kTimedOut, "TimedOutError", "A bound was reached.", &PyExc_TimeoutError},
      {ErrorCode::kClosed, "ClosedError", "Used after close(), or in a forked child.",
       &PyExc_ValueError},
  }};
  return classes;
}

// Strong references that live as long as the process: the translator may run while the module goes
// away.
std::array<PyObject*, 8> python_classes{};

void raise(const Error& error) {
  const auto at = static_cast<std::size_t>(error.code());
  PyObject* const type = at < python_classes.size() ? python_classes[at] : PyExc_RuntimeError;
  nb::object instance = nb::borrow(type)(to_text(error.what()));
  instance.attr("_code") = nb::str(to_string(error.code()).data(), to_string(error.code()).size());
  instance.attr("_problems") = to_python(error.problems());
  PyErr_SetObject(type, instance.ptr());
}

void translate(const std::exception_ptr& pending, void*) {
  try {
    std::rethrow_exception(pending);
  } catch (const Error& error) {
    try {
      raise(error);
    } catch (nb::python_error& failure) {
      failure.restore();
    }
  }
}

void add_property(nb::handle type, const char* name, nb::object getter) {
  type.attr(name) = nb::handle(reinterpret_cast<PyObject*>(&PyProperty_Type))(getter);
}

}  // namespace

nb::str to_text(std::string_view text) {
  return nb::steal<nb::str>(
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace"));
}

nb::list to_python(const std::vector<Problem>& problems) {
  nb::list list;
  for (const Problem& problem : problems) list.append(nb::cast(problem));
  return list;
}

void bind_errors(nb::module_& module) {
  nb::class_<Problem>(
      module, "Problem",
      "One thing that is wrong: where, what was found, what was expected, what to do.")
      .def_prop_ro(
          "path", [](const Problem& p) { return to_text(p.path); },
          "Where, e.g. ``groups[1].block_size``.")
      .def_prop_ro(
          "value", [](const Problem& p) { return to_text(p.value); },
          "The value as given; may be empty.")
      .def_prop_ro(
          "expected", [](const Problem& p) { return to_text(p.expected); },
          "What would have been right.")
      .def_prop_ro(
          "hint", [](const Problem& p) { return to_text(p.hint); }, "What to do; may be empty.")
      .def(nb::self == nb::self, nb::sig("def __eq__(self, other: object, /) -> bool"))
      .def("__hash__",
           [](const Problem& p) {
             return nb::hash(nb::make_tuple(to_text(p.path), to_text(p.value)));
           })
      .def("__repr__", [](const Problem& p) {
        return nb::str("Problem(path={!r}, value={!r}, expected={!r}, hint={!r})")
            .format(to_text(p.path), to_text(p.value), to_text(p.expected), to_text(p.hint));
      });

  // Made here rather than by nb::exception, which knows one base.
  const auto make = [&](const char* name, const char* doc, nb::handle bases) {
    const std::string full = nb::cast<std::string>(module.attr("__name__")) + "." + name;
    nb::object type = nb::steal(PyErr_NewExceptionWithDoc(full.c_str(), doc, bases.ptr(), nullptr));
    if (!type.is_valid()) throw nb::python_error();
    module.attr(name) = type;
    return type;
  };
  const nb::object base = make("Error",
                               "Set-up or configuration failed. ``code`` is a stable word, "
                               "``problems`` every Problem of the input at once.",
                               PyExc_Exception);
  add_property(
      base, "code",
      nb::cpp_function([](nb::handle self) { return nb::getattr(self, "_code", nb::str("")); },
                       nb::is_method(), nb::sig("def code(self) -> str"),
                       "Stable lower-case word, e.g. ``invalid_config``."));
  add_property(
      base, "problems",
      nb::cpp_function([](nb::handle self) { return nb::getattr(self, "_problems", nb::list()); },
                       nb::is_method(), nb::sig("def problems(self) -> list[Problem]"),
                       "Every problem of the input."));
  for (const ErrorClass& row : error_classes()) {
    nb::object type = make(row.name, row.doc, nb::make_tuple(base, nb::borrow(*row.builtin)));
    python_classes[static_cast<std::size_t>(row.code)] = type.release().ptr();
  }
  nb::register_exception_translator(translate);
}

}  // namespace kvprism::bindings
