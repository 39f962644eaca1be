// StoreScheduler, StoreWorker and what passes between them.
#include <nanobind/nanobind.h>

#include "areas.h"
#include "handles.h"

namespace kvprism::bindings {

void bind_store(nb::module_& m) {
  bind_store_plan(m);
  bind_store_scheduler(m);
  bind_store_worker(m);
  bind_store_loads(m);
}

}  // namespace kvprism::bindings
