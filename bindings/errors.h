// Problems as Python objects.
#pragma once

#include <nanobind/nanobind.h>

#include <vector>

#include "kvprism/base/error.h"

namespace kvprism::bindings {

// A list of kvprism.Problem.
nanobind::list to_python(const std::vector<Problem>& problems);

// Text that a config brought along may be cut anywhere: bytes that are not UTF-8 become U+FFFD.
nanobind::str to_text(std::string_view text);

}  // namespace kvprism::bindings
