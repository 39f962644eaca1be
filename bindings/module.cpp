#include <nanobind/nanobind.h>

#include "areas.h"
#include "kvprism/base/version.h"

namespace nb = nanobind;

NB_MODULE(_core, module) {
  using namespace kvprism::bindings;
  module.doc() = "Native core of kvprism. Import the package kvprism instead.";
  module.attr("version") = KVPRISM_VERSION_STRING;
  bind_exit(module);
  bind_errors(module);
  bind_log(module);
  bind_spec(module);
  bind_group(module);
  bind_hash(module);
  bind_hit(module);
  bind_key(module);
  bind_layout(module);
  bind_backend(module);
  bind_store(module);
  bind_sim(module);
}
