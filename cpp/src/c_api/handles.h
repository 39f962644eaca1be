// What stands behind the C interface's handles: shared objects, so that they are freed in any
// order.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "kvprism/backend/blocking_store.h"
#include "kvprism/backend/flight_file.h"
#include "kvprism/backend/memory_store.h"
#include "kvprism/backend/pump_thread.h"
#include "kvprism/backend/run_file.h"
#include "kvprism/checked/checked_scheduler.h"
#include "kvprism/group/projection.h"
#include "kvprism/io/object_store.h"
#include "kvprism/key/key_schema.h"
#include "kvprism/kvprism.h"
#include "kvprism/layout/segment_map.h"
#include "kvprism/store/store_worker.h"
#include "kvprism/wire/worker_report.h"

struct kvprism_projection {
  std::shared_ptr<const kvprism::Projection> shared;
};

struct kvprism_key_schema {
  std::shared_ptr<const kvprism::KeySchema> shared;
};

struct kvprism_segment_map {
  std::shared_ptr<const kvprism::SegmentMap> shared;
};

struct kvprism_memory_pool {
  std::shared_ptr<kvprism::MemoryPool> shared;
};

namespace kvprism::c_api {

// A handle with threads or connections behind it: a forked child has neither.
struct OfOneProcess {
  pid_t owner = getpid();
};

}  // namespace kvprism::c_api

struct kvprism_store : kvprism::c_api::OfOneProcess {
  std::shared_ptr<kvprism::ObjectStore> store;
  std::shared_ptr<kvprism::ObjectIndex> index;
  std::shared_ptr<kvprism::BlockingStore> connection;  // both of them; null: a memory store
};

struct kvprism_scheduler : kvprism::c_api::OfOneProcess {
  std::unique_ptr<kvprism::RunFile> recording;  // null: none; outlives the schedulers, as the next
  std::unique_ptr<kvprism::FlightFile> flight;
  std::unique_ptr<kvprism::StoreScheduler> plain;
  std::unique_ptr<kvprism::CheckedScheduler> checked;  // one of the two
  // Memory that calls give out or fill again.
  std::vector<std::span<const kvprism::BlockId>> rows;
  std::vector<std::byte> plan;
  std::vector<std::uint64_t> incoming;  // a report at an address that suits its decoder
  std::vector<kvprism::LoadEnd> ends;
  std::size_t next_end = 0;
  bool ends_overdue = false;  // some of them have been there for a whole step
  std::vector<kvprism_failed_block> failed;
  std::vector<kvprism::StoreChange> changes;
  std::size_t next_change = 0;
  std::vector<kvprism::BlockId> acquired;
  std::vector<kvprism::BlockId> released;

  template <class Call>
  decltype(auto) call(Call&& body) {
    return checked ? body(*checked) : body(*plain);
  }
  template <class Call>
  decltype(auto) call(Call&& body) const {
    return checked ? body(std::as_const(*checked)) : body(std::as_const(*plain));
  }
  const kvprism::StoreScheduler& base() const { return checked ? *checked : *plain; }
  // Taken from the scheduler, and not yet given to the engine.
  std::size_t ends_left() const { return ends.size() - next_end; }
  std::size_t changes_left() const { return changes.size() - next_change; }
};

struct kvprism_worker : kvprism::c_api::OfOneProcess {
  std::shared_ptr<kvprism::StoreWorker> worker;
  std::unique_ptr<kvprism::PumpThread> pump;  // null: the engine pumps
  std::shared_ptr<kvprism::ObjectStore> store;
  kvprism::WorkerReport report;
  std::vector<std::byte> one;      // a report
  std::vector<std::byte> encoded;  // those of one poll, one behind the other
  std::uint64_t seen = 0;          // moves of the pump before the last poll
};

namespace kvprism::c_api {

// `count` bytes at an address that suits a decoder: as they lie, or copied into `aligned`.
std::span<const std::byte> aligned_bytes(const void* data, std::size_t count,
                                         std::vector<std::uint64_t>& aligned);

}  // namespace kvprism::c_api
