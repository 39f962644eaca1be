// Counters of the store path as Python's dicts, by name.
#pragma once

#include <nanobind/nanobind.h>

#include "kvprism/run/duration_histogram.h"
#include "kvprism/store/store_scheduler.h"
#include "kvprism/store/store_worker.h"

namespace kvprism::bindings {

namespace nb = nanobind;

// With the counts by duration; within other counters only count and sum stand.
nb::dict to_dict(const DurationHistogram& times);
nb::dict to_dict(const StoreSchedulerCounters& counters);
nb::dict to_dict(const StoreWorkerCounters& counters);
nb::dict to_dict(const StoreGroupCounters& counters);

}  // namespace kvprism::bindings
