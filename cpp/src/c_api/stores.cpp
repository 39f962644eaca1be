// Stores of the C interface.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "c_api/guard.h"
#include "c_api/handles.h"
#include "kvprism/backend/blocking_store.h"
#include "kvprism/backend/clock.h"
#include "kvprism/backend/mooncake_client.h"

using namespace kvprism;         // NOLINT(google-build-using-namespace): functions outside of any
using namespace kvprism::c_api;  // NOLINT(google-build-using-namespace)

namespace {

template <class Number, class Member>
void set_unless_0(Number given, Member& member) {
  if (given != 0) member = Member{given};
}

UnknownBuild to_unknown_build(std::int32_t given, ProblemList& problems) {
  if (given != 0 && given != 1)
    problems.add("unknown_build", std::to_string(given), "0 (refuse) or 1 (probe)");
  return given == 1 ? UnknownBuild::kProbe : UnknownBuild::kRefuse;
}

BlockingStoreOptions to_blocking(const kvprism_mooncake_options& given) {
  BlockingStoreOptions options;
  options.setup_timeout = Duration{given.setup_timeout_ns};
  set_unless_0(given.stuck_after_ns, options.stuck_after);
  set_unless_0(given.region_timeout_ns, options.region_timeout);
  set_unless_0(given.probe_interval_ns, options.probe_interval);
  set_unless_0(given.first_retry_ns, options.first_retry);
  set_unless_0(given.max_retry_ns, options.max_retry);
  set_unless_0(given.close_budget_ns, options.close_budget);
  set_unless_0(given.queue_limit, options.queue_limit);
  set_unless_0(given.max_retired, options.max_retired);
  set_unless_0(given.max_attempts, options.max_attempts);
  return options;
}

}  // namespace

kvprism_status kvprism_memory_pool_options_init(kvprism_memory_pool_options* options,
                                                size_t struct_size, kvprism_error** error) {
  const MemoryPoolOptions defaults;
  return init(
      "kvprism_memory_pool_options_init", options, struct_size,
      kvprism_memory_pool_options{
          .struct_size = 0, .capacity_bytes = defaults.capacity_bytes, .evict = defaults.evict},
      error);
}

kvprism_status kvprism_memory_pool_new(const kvprism_memory_pool_options* options,
                                       kvprism_memory_pool** pool, kvprism_error** error) {
  return guarded(error, [&] {
    Arguments arguments("kvprism_memory_pool_new");
    if (options != nullptr) arguments.need_struct(options, "options");
    arguments.need(pool, "pool");
    arguments.check();
    MemoryPoolOptions wanted;
    if (options != nullptr) {
      wanted.capacity_bytes = options->capacity_bytes;
      wanted.evict = options->evict;
    }
    *pool = new kvprism_memory_pool{std::make_shared<MemoryPool>(wanted)};
  });
}

kvprism_status kvprism_memory_pool_counters(const kvprism_memory_pool* pool,
                                            kvprism_counter_visitor visitor, void* context,
                                            kvprism_error** error) {
  return guarded(error, [&] {
    Arguments arguments("kvprism_memory_pool_counters");
    arguments.need(pool, "pool");
    arguments.need(reinterpret_cast<const void*>(visitor), "visitor");
    arguments.check();
    const MemoryPoolCounters c = pool->shared->counters();
    visitor(context, "objects", c.objects);
    visitor(context, "unfinished", c.unfinished);
    visitor(context, "bytes", c.bytes);
    visitor(context, "stored", c.stored);
    visitor(context, "evicted", c.evicted);
    visitor(context, "refused", c.refused);
  });
}

void kvprism_memory_pool_free(kvprism_memory_pool* pool) { delete pool; }

kvprism_status kvprism_memory_store_new(const kvprism_memory_pool* pool, kvprism_store** store,
                                        kvprism_error** error) {
  return guarded(error, [&] {
    Arguments arguments("kvprism_memory_store_new");
    arguments.need(pool, "pool");
    arguments.need(store, "store");
    arguments.check();
    auto made = std::make_unique<kvprism_store>();
    // Two clients, because the two sides may be used by two threads.
    made->store = std::make_shared<MemoryStore>(pool->shared);
    made->index = std::make_shared<MemoryStore>(pool->shared);
    *store = made.release();
  });
}

kvprism_status kvprism_mooncake_options_init(kvprism_mooncake_options* options, size_t struct_size,
                                             kvprism_error** error) {
  const MooncakeOptions mooncake;
  const BlockingStoreOptions blocking;
  return init("kvprism_mooncake_options_init", options, struct_size,
              kvprism_mooncake_options{.struct_size = 0,
                                       .master = "",
                                       .local_hostname = "127.0.0.1",
                                       .metadata_server = "P2PHANDSHAKE",
                                       .protocol = "tcp",
                                       .rdma_devices = nullptr,
                                       .num_rdma_devices = 0,
                                       .global_segment_size = mooncake.global_segment_size,
                                       .local_buffer_size = mooncake.local_buffer_size,
                                       .connect_timeout_ns = mooncake.connect_timeout.ns,
                                       .setup_timeout_ns = blocking.setup_timeout.ns,
                                       .library = "",
                                       .python_library = "",
                                       .max_region_bytes = mooncake.max_region_bytes,
                                       .max_bytes_per_call = mooncake.max_bytes_per_call,
                                       .max_slices_per_call = mooncake.max_slices_per_call,
                                       .unknown_build = 0,
                                       .stuck_after_ns = blocking.stuck_after.ns,
                                       .region_timeout_ns = blocking.region_timeout.ns,
                                       .probe_interval_ns = blocking.probe_interval.ns,
                                       .first_retry_ns = blocking.first_retry.ns,
                                       .max_retry_ns = blocking.max_retry.ns,
                                       .close_budget_ns = blocking.close_budget.ns,
                                       .queue_limit = blocking.queue_limit,
                                       .max_retired = blocking.max_retired,
                                       .max_attempts = blocking.max_attempts},
              error);
}

kvprism_status kvprism_mooncake_store_new(const kvprism_mooncake_options* options,
                                          kvprism_store** store, kvprism_error** error) {
  return guarded(error, [&] {
    Arguments arguments("kvprism_mooncake_store_new");
    arguments.need_struct(options, "options");
    arguments.need(store, "store");
    arguments.check();
    arguments.need_array(options->rdma_devices, options->num_rdma_devices, "options.rdma_devices",
                         "options.num_rdma_devices", kMostElements);
    arguments.check();
    MooncakeOptions mooncake;
    mooncake.master = text(options->master);
    mooncake.local_hostname = text(options->local_hostname);
    mooncake.metadata_server = text(options->metadata_server);
    mooncake.protocol = text(options->protocol);
    for (size_t i = 0; i < options->num_rdma_devices; ++i)
      mooncake.rdma_devices.push_back(text(options->rdma_devices[i]));
    mooncake.global_segment_size = options->global_segment_size;
    mooncake.local_buffer_size = options->local_buffer_size;
    mooncake.connect_timeout = Duration{options->connect_timeout_ns};
    mooncake.library = text(options->library);
    mooncake.python_library = text(options->python_library);
    set_unless_0(options->max_region_bytes, mooncake.max_region_bytes);
    set_unless_0(options->max_bytes_per_call, mooncake.max_bytes_per_call);
    set_unless_0(options->max_slices_per_call, mooncake.max_slices_per_call);
    ProblemList problems;
    mooncake.unknown_build = to_unknown_build(options->unknown_build, problems);
    const BlockingStoreOptions blocking = to_blocking(*options);
    problems.append(validate_mooncake_options(mooncake));
    problems.append(validate_blocking_store_options(blocking));
    problems.throw_if_any(ErrorCode::kInvalidConfig, "Mooncake options");
    auto made = std::make_unique<kvprism_store>();
    const auto connection =
        std::make_shared<BlockingStore>(mooncake_client_factory(std::move(mooncake)), blocking);
    made->store = connection;
    made->index = connection;
    made->connection = connection;
    *store = made.release();
  });
}

kvprism_status kvprism_store_name(const kvprism_store* store, char** name, kvprism_error** error) {
  return guarded(error, [&] {
    Arguments arguments("kvprism_store_name");
    arguments.need(store, "store");
    arguments.need(name, "name");
    arguments.check();
    *name = give(store->store->capabilities().name);
  });
}

kvprism_status kvprism_store_close(kvprism_store* store, int64_t budget_ns, uint64_t* unquiet,
                                   kvprism_error** error) {
  return guarded(error, [&] {
    Arguments arguments("kvprism_store_close");
    arguments.need(store, "store");
    arguments.need(unquiet, "unquiet");
    arguments.check();
    const Duration budget{std::max<std::int64_t>(budget_ns, 0)};
    const Instant begin = monotonic_now();
    const CloseReport lookups = store->index->close_index(budget);
    const Duration left = std::max(Duration{}, budget - (monotonic_now() - begin));
    *unquiet = lookups.unquiet + store->store->close_store(left).unquiet;
  });
}

void kvprism_store_free(kvprism_store* store) { delete store; }
