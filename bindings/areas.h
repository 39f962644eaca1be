// One function a file: each adds the classes of its area to the module. Order matters only for
// default arguments.
#pragma once

#include <nanobind/nanobind.h>

namespace kvprism::bindings {

void bind_exit(nanobind::module_& module);     // gil_free.cpp: adds no name
void bind_log(nanobind::module_& module);      // log.cpp: take_log_lines, set_log_level
void bind_errors(nanobind::module_& module);   // errors.cpp: Error, its subclasses, Problem
void bind_spec(nanobind::module_& module);     // spec.cpp: SpecRegistry
void bind_group(nanobind::module_& module);    // group.cpp: CacheConfig, Projection, the typed ids
void bind_hash(nanobind::module_& module);     // hash.cpp: BlockHasher
void bind_hit(nanobind::module_& module);      // hit.cpp: HitSearch, HitGroup
void bind_key(nanobind::module_& module);      // key.cpp: KeySchema, RankPosition
void bind_layout(nanobind::module_& module);   // layout.cpp: CacheTensor, SegmentMap
void bind_store(nanobind::module_& module);    // store.cpp
void bind_backend(nanobind::module_& module);  // backend.cpp
void bind_sim(nanobind::module_& module);      // sim.cpp

}  // namespace kvprism::bindings
