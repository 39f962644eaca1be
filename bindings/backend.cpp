// Stores: this process's memory, Mooncake, and a wrapper that injects faults.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <filesystem>
#include <limits>
#include <optional>
#include <string>
#include <system_error>
#include <tuple>
#include <utility>
#include <vector>

#include "areas.h"
#include "errors.h"
#include "handles.h"
#include "kvprism/backend/blocking_store.h"
#include "kvprism/backend/fault_injection.h"
#include "kvprism/backend/memory_store.h"
#include "kvprism/backend/mooncake_client.h"
#include "kvprism/backend/rdma_facts.h"
#include "kvprism/base/error.h"
#include "locked_store.h"
#include "text.h"
#include "whole.h"

namespace kvprism::bindings {
namespace {

using namespace nb::literals;

Counters to_counters(const BlockingStoreCounters& c) {
  return {{"put_calls", c.put_calls},
          {"put_items", c.put_items},
          {"put_bytes", c.put_bytes},
          {"get_calls", c.get_calls},
          {"get_items", c.get_items},
          {"get_bytes", c.get_bytes},
          {"exists_calls", c.exists_calls},
          {"exists_items", c.exists_items},
          {"remove_calls", c.remove_calls},
          {"queue_full", c.queue_full},
          {"circuit_open", c.circuit_open},
          {"probes", c.probes},
          {"expired", c.expired},
          {"late_calls", c.late_calls},
          {"stuck_calls", c.stuck_calls},
          {"unquiet_calls", c.unquiet_calls},
          {"failed_attempts", c.failed_attempts},
          {"replacements", c.replacements},
          {"unquiet_now", c.unquiet_now},
          {"retired_now", c.retired_now},
          {"usable", c.usable ? 1u : 0u}};
}

Counters to_counters(const MemoryPoolCounters& c) {
  return {{"objects", c.objects}, {"unfinished", c.unfinished}, {"bytes", c.bytes},
          {"stored", c.stored},   {"evicted", c.evicted},       {"refused", c.refused}};
}

// Two clients, because the two sides may be used by two threads.
std::shared_ptr<StoreHandle> memory_store(std::shared_ptr<MemoryPool> pool, double latency_seconds,
                                          const Whole<std::uint32_t>& max_segments_per_call,
                                          const Whole<std::uint64_t>& max_bytes_per_call) {
  if (!pool) pool = std::make_shared<MemoryPool>();
  MemoryStoreOptions options;
  ProblemList problems;
  options.latency = to_duration(latency_seconds, "latency_seconds", problems);
  options.max_segments_per_call = max_segments_per_call("max_segments_per_call", problems);
  options.max_bytes_per_call = max_bytes_per_call("max_bytes_per_call", problems);
  problems.throw_if_any(ErrorCode::kInvalidConfig, "memory store");
  auto handle = std::make_shared<StoreHandle>(std::make_shared<MemoryStore>(pool, options),
                                              std::make_shared<MemoryStore>(pool, options));
  handle->counters = [pool] { return to_counters(pool->counters()); };
  return handle;
}

// Where this interpreter imports from: a distribution that it finds is found.
std::vector<std::string> site_packages() {
  std::vector<std::string> folders;
  std::error_code unknown;
  const std::string here = std::filesystem::current_path(unknown).string();
  const nb::object path = nb::module_::import_("sys").attr("path");
  for (const nb::handle entry : path) {
    if (!nb::isinstance<nb::str>(entry)) continue;
    std::string folder = nb::cast<std::string>(entry);
    std::error_code error;
    // Not the working directory, where anybody's library may lie.
    const bool usable = std::filesystem::path(folder).is_absolute() &&
                        std::filesystem::is_directory(folder, error) && folder != here;
    if (usable && std::find(folders.begin(), folders.end(), folder) == folders.end())
      folders.push_back(folder);
  }
  return folders;
}

UnknownBuild unknown_build(const std::string& word, ProblemList& problems) {
  if (word == "probe") return UnknownBuild::kProbe;
  const std::string_view words[] = {"refuse", "probe"};
  if (word != "refuse")
    problems.add("unknown_build", word, "\"refuse\" or \"probe\"", suggest(word, words));
  return UnknownBuild::kRefuse;
}

std::shared_ptr<StoreHandle> mooncake_store(
    std::string master, std::string local_hostname, std::string metadata_server,
    std::string protocol, std::vector<std::string> rdma_devices,
    const Whole<std::int64_t>& global_segment_size, const Whole<std::int64_t>& local_buffer_size,
    const Whole<std::uint32_t>& max_slices_per_call, const Whole<std::uint64_t>& max_bytes_per_call,
    double connect_timeout_seconds, std::string library,
    std::optional<std::vector<std::string>> packages, std::string python_library,
    const std::string& unknown, const std::map<std::string, std::string>& environment,
    std::optional<std::string> rdma_device_folder, double setup_timeout_seconds,
    const Whole<std::uint64_t>& max_region_bytes) {
  ProblemList problems;
  MooncakeOptions options;
  options.master = std::move(master);
  options.local_hostname = std::move(local_hostname);
  options.metadata_server = std::move(metadata_server);
  options.protocol = std::move(protocol);
  options.rdma_devices = std::move(rdma_devices);
  options.global_segment_size = global_segment_size("global_segment_size", problems);
  options.local_buffer_size = local_buffer_size("local_buffer_size", problems);
  options.max_slices_per_call = max_slices_per_call("max_slices_per_call", problems);
  options.max_bytes_per_call = max_bytes_per_call("max_bytes_per_call", problems);
  options.max_region_bytes = max_region_bytes("max_region_bytes", problems);
  options.connect_timeout =
      to_duration(connect_timeout_seconds, "connect_timeout_seconds", problems);
  options.library = std::move(library);
  options.site_packages = packages ? std::move(*packages) : site_packages();
  options.python_library = std::move(python_library);
  options.unknown_build = unknown_build(unknown, problems);
  options.environment.assign(environment.begin(), environment.end());
  if (rdma_device_folder) options.rdma_device_folder = std::move(*rdma_device_folder);
  BlockingStoreOptions blocking;
  blocking.setup_timeout = to_duration(setup_timeout_seconds, "setup_timeout_seconds", problems);
  problems.append(validate_mooncake_options(options));
  problems.throw_if_any(ErrorCode::kInvalidConfig, "mooncake options");

  const GilFree released;
  const std::shared_ptr<BlockingStore> store(
      new BlockingStore(mooncake_client_factory(std::move(options)), blocking), DeleteWithoutGil());
  auto handle = std::make_shared<StoreHandle>(store, store);
  handle->counters = [store] { return to_counters(store->counters()); };
  return handle;
}

// A kind as a Python keyword.
std::string fault_name(FaultKind kind) {
  std::string name(to_string(kind));
  std::replace(name.begin(), name.end(), ' ', '_');
  return name;
}

FaultPlan fault_plan(const Whole<std::uint64_t>& seed, double delay_seconds, double late_seconds,
                     double lookup_late_seconds, double region_delay_seconds,
                     const nb::kwargs& chances) {
  FaultPlan plan;
  ProblemList problems;
  plan.seed = seed("seed", problems);
  plan.delay = to_duration(delay_seconds, "delay_seconds", problems);
  plan.late = to_duration(late_seconds, "late_seconds", problems);
  plan.lookup_late = to_duration(lookup_late_seconds, "lookup_late_seconds", problems);
  plan.region_delay = to_duration(region_delay_seconds, "region_delay_seconds", problems);
  std::vector<std::string> words;
  for (std::size_t kind = 0; kind < kNumFaultKinds; ++kind)
    words.push_back(fault_name(static_cast<FaultKind>(kind)));
  const std::vector<std::string_view> names(words.begin(), words.end());
  for (const auto [key, value] : chances) {
    const auto name = nb::cast<std::string>(key);
    const auto at = std::find(names.begin(), names.end(), name);
    const std::string text = nb::repr(value).c_str();
    double chance = -1;
    if (at == names.end()) {
      problems.add(name, text, "a kind of fault", suggest(name, names));
    } else if (!nb::try_cast<double>(value, chance) || !(chance >= 0 && chance <= 1)) {
      problems.add(name, text, "a chance from 0 to 1");
    } else {
      plan[static_cast<FaultKind>(at - names.begin())] =
          static_cast<std::uint16_t>(chance * 10'000 + 0.5);
    }
  }
  problems.throw_if_any(ErrorCode::kInvalidArgument, "fault plan");
  return plan;
}

std::shared_ptr<StoreHandle> inject_faults(const std::shared_ptr<StoreHandle>& inner,
                                           const Whole<std::uint64_t>& seed, double delay_seconds,
                                           double late_seconds, double lookup_late_seconds,
                                           double region_delay_seconds, const nb::kwargs& chances) {
  const FaultPlan plan = fault_plan(seed, delay_seconds, late_seconds, lookup_late_seconds,
                                    region_delay_seconds, chances);
  const auto index = inner->take_index();
  std::shared_ptr<ObjectStore> store;
  try {
    store = inner->take_store();
  } catch (...) {
    inner->return_index();
    throw;
  }
  const std::shared_ptr<FaultInjector> injector(new FaultInjector(std::move(store), index, plan),
                                                DeleteWithoutGil());
  const auto locked = std::make_shared<LockedStore>(injector, injector);
  auto handle = std::make_shared<StoreHandle>(locked, locked);
  handle->counters = inner->counters;
  handle->faults = [injector, locked] {
    const auto lock = locked->lock();
    Counters table;
    for (const FaultCount& row : injector->table()) table[fault_name(row.kind)] = row.raised;
    return table;
  };
  handle->release_hung = [injector, locked] {
    const auto lock = locked->lock();
    injector->release_hung();
  };
  return handle;
}

std::vector<std::pair<std::string, std::size_t>> list_objects(const MemoryPool& pool) {
  std::vector<std::pair<std::string, std::size_t>> out;
  pool.for_each_object([&](std::string_view key, std::span<const std::byte> bytes) {
    out.emplace_back(key, bytes.size());
  });
  std::sort(out.begin(), out.end());
  return out;
}

std::optional<nb::bytes> read_object(const MemoryPool& pool, const std::string& key) {
  std::optional<nb::bytes> found;
  pool.for_each_object([&](std::string_view name, std::span<const std::byte> bytes) {
    if (name == key) found = nb::bytes(bytes.data(), bytes.size());
  });
  return found;
}

void bind_pool(nb::module_& m) {
  nb::class_<MemoryPool>(m, "MemoryPool",
                         "Objects in this process's memory; outlives the stores that use it.")
      .def(
          "__init__",
          [](MemoryPool* self, const Whole<std::uint64_t>& capacity_bytes, bool evict,
             double unfinished_for_seconds) {
            ProblemList problems;
            MemoryPoolOptions options;
            options.capacity_bytes = capacity_bytes("capacity_bytes", problems);
            options.evict = evict;
            options.unfinished_for =
                to_duration(unfinished_for_seconds, "unfinished_for_seconds", problems);
            problems.throw_if_any(ErrorCode::kInvalidConfig, "memory pool");
            new (self) MemoryPool(options);
          },
          nb::kw_only(), "capacity_bytes"_a = 0, "evict"_a = true,
          "unfinished_for_seconds"_a = 30.0,
          R"(Makes an empty pool.

Args:
    capacity_bytes: Most bytes of all objects; 0 for no limit.
    evict: Make room by dropping the least recently used object; otherwise a full pool refuses.
    unfinished_for_seconds: An object whose writer died may be written again after this.

Raises:
    ConfigError: A number is out of range.)")
      .def(
          "counters", [](const MemoryPool& p) { return to_counters(p.counters()); },
          "Counters by name.")
      .def("objects", &list_objects, R"(Every finished object.

Returns:
    Pairs of key and bytes, sorted by key.)")
      .def("read", &read_object, "key"_a, R"(The content of one object, for tests.

Args:
    key: Its name.

Returns:
    Its bytes, or None.)")
      .def(
          "contains", [](const MemoryPool& p, const std::string& key) { return p.contains(key); },
          "key"_a,
          R"(Whether there is a finished object; does not count as a use.

Args:
    key: Its name.

Returns:
    True when there is.)")
      .def(
          "erase", [](MemoryPool& p, const std::string& key) { return p.erase(key); }, "key"_a,
          R"(Drops one object.

Args:
    key: Its name.

Returns:
    True when there was one.)");
}

void bind_handle(nb::module_& m) {
  nb::class_<StoreHandle>(
      m, "ObjectStore",
      R"(A connection to a store, made by `memory_store`, `mooncake_store` or `inject_faults`.

One worker may use it to move objects, and one scheduler to look them up.)")
      .def_prop_ro(
          "name",
          [](const StoreHandle& h) {
            const GilFree released;
            return h.capabilities().name;
          },
          "What is behind it, with version and protocol.")
      .def(
          "counters",
          [](const StoreHandle& h) {
            const GilFree released;
            return h.counters ? h.counters() : Counters();
          },
          "Counters by name; of the pool for a memory store.")
      .def(
          "faults",
          [](const StoreHandle& h) {
            const GilFree released;
            return h.faults ? h.faults() : Counters();
          },
          "Faults raised so far by kind; empty unless made by `inject_faults`.")
      .def(
          "release_hung",
          [](const StoreHandle& h) {
            const GilFree released;
            if (h.release_hung) h.release_hung();
          },
          "Lets operations that an injected fault has hung run.")
      .def(
          "close",
          [](StoreHandle& h, double timeout_seconds) {
            const Duration budget = to_duration(timeout_seconds, "timeout_seconds");
            const GilFree released;
            return h.close(budget).unquiet;
          },
          "timeout_seconds"_a = 5.0,
          R"(Closes what no worker and no scheduler has taken; those close their own side.

Args:
    timeout_seconds: Longest wait.

Returns:
    Operations that did not end.

Raises:
    ArgumentError: The timeout is below 0.)");
}

// Device, number, state and whether it has a GID.
using PortTuple = std::tuple<std::string, std::string, std::string, bool>;

void bind_rdma(nb::module_& m) {
  constexpr auto kUnlimited = std::numeric_limits<std::uint64_t>::max();
  nb::class_<RdmaFacts>(m, "RdmaFacts",
                        "What there is for RDMA on a machine, and what of it Mooncake cannot use.")
      .def(
          "__init__",
          [](RdmaFacts* self, std::vector<std::string> devices, const std::vector<PortTuple>& ports,
             const std::optional<Whole<std::uint64_t>>& memory_lock_bytes, bool may_lock_memory,
             std::optional<std::string> forced_tcp) {
            RdmaFacts facts;
            facts.devices = std::move(devices);
            for (const auto& [device, number, state, addressed] : ports)
              facts.ports.push_back({device, number, state, addressed});
            if (memory_lock_bytes) facts.lock_limit = (*memory_lock_bytes)("memory_lock_bytes");
            facts.may_lock = may_lock_memory;
            facts.forced_tcp = std::move(forced_tcp);
            new (self) RdmaFacts(std::move(facts));
          },
          nb::kw_only(), "devices"_a = std::vector<std::string>(),
          "ports"_a = std::vector<PortTuple>(), "memory_lock_bytes"_a = nb::none(),
          "may_lock_memory"_a = false, "forced_tcp"_a = nb::none(), R"(Facts that are known.

Args:
    devices: Names of the devices.
    ports: Of each port the device, its number, its state ("ACTIVE", "DOWN") and whether it has a GID.
    memory_lock_bytes: How much a process may lock; None for no limit.
    may_lock_memory: The process may lock more than that.
    forced_tcp: What the environment has for MC_FORCE_TCP.)")
      .def_static(
          "read", [](std::string folder) { return read_rdma_facts(std::move(folder)); },
          "folder"_a = MooncakeOptions{}.rdma_device_folder, R"(Looks at this machine.

Args:
    folder: Where devices are listed.

Returns:
    What was found.)")
      .def_ro("folder", &RdmaFacts::folder, "Where devices are listed.")
      .def_ro("devices", &RdmaFacts::devices, "Names of the devices.")
      .def_prop_ro(
          "ports",
          [](const RdmaFacts& f) {
            std::vector<PortTuple> ports;
            for (const RdmaPort& port : f.ports)
              ports.emplace_back(port.device, port.number, port.state, port.addressed);
            return ports;
          },
          "Of each port the device, its number, its state and whether it has a GID.")
      .def_prop_ro(
          "memory_lock_bytes",
          [](const RdmaFacts& f) {
            return f.lock_limit == kUnlimited ? std::optional<std::uint64_t>()
                                              : std::optional(f.lock_limit);
          },
          "How much this process may lock; None for no limit.")
      .def_ro("may_lock_memory", &RdmaFacts::may_lock, "It may lock more than that.")
      .def_ro("forced_tcp", &RdmaFacts::forced_tcp, "MC_FORCE_TCP in the environment.")
      .def(
          "problems",
          [](const RdmaFacts& f, std::vector<std::string> devices,
             const Whole<std::uint64_t>& locked_bytes) {
            MooncakeOptions options;
            options.rdma_devices = std::move(devices);
            const std::uint64_t region = locked_bytes("locked_bytes");
            return to_python(check_rdma(options, {&region, 1}, f));
          },
          nb::kw_only(), "rdma_devices"_a = std::vector<std::string>(), "locked_bytes"_a = 0,
          nb::sig("def problems(self, *, rdma_devices: collections.abc.Sequence[str] = [], "
                  "locked_bytes: int = 0) -> list[Problem]"),
          R"(What would end the set-up of a store with protocol rdma.

Args:
    rdma_devices: Devices to be used; all when empty.
    locked_bytes: Bytes of cache, segment and buffer that each device must lock; 0 when not known.

Returns:
    Every problem.)");
}

void bind_mooncake(nb::module_& m) {
  nb::class_<MooncakeAbiRow>(m, "MooncakeBuild",
                             "A build of Mooncake whose binary interface is known.")
      .def_prop_ro(
          "distribution", [](const MooncakeAbiRow& r) { return r.distribution; },
          "Name of the package.")
      .def_prop_ro(
          "version", [](const MooncakeAbiRow& r) { return r.version; }, "Version of the package.")
      .def_prop_ro(
          "python_tag", [](const MooncakeAbiRow& r) { return r.python_tag; }, "Such as cp311.")
      .def_prop_ro(
          "library", [](const MooncakeAbiRow& r) { return r.library; },
          "Path inside site-packages.")
      .def_prop_ro(
          "build_id", [](const MooncakeAbiRow& r) { return r.build_id; },
          "Build id of the library, in hex.")
      .def_prop_ro(
          "exercised", [](const MooncakeAbiRow& r) { return r.exercised; },
          "True: it has moved bytes in our tests; False: only compared.")
      .def("__repr__", [](const MooncakeAbiRow& r) {
        return "MooncakeBuild(" + std::string(r.distribution) + " " + std::string(r.version) + " " +
               std::string(r.python_tag) + ")";
      });
  m.def(
      "known_mooncake_builds",
      [] {
        const auto rows = known_mooncake_builds();
        return std::vector<MooncakeAbiRow>(rows.begin(), rows.end());
      },
      "Every build of Mooncake that is used without asking.");
  m.def(
      "find_mooncake_library",
      [](std::string library, std::optional<std::vector<std::string>> packages) {
        MooncakeOptions options;
        options.library = std::move(library);
        options.site_packages = packages ? std::move(*packages) : site_packages();
        return find_mooncake_library(options);
      },
      "library"_a = "", "site_packages"_a = nb::none(), R"(Where Mooncake's store library is.

Args:
    library: Its path, when it is known.
    site_packages: Folders to search; those of this interpreter by default.

Returns:
    The path of the library.

Raises:
    NotFoundError: There is none; says where it looked.)");
  m.def("mooncake_store", &mooncake_store, nb::kw_only(), "master"_a,
        "local_hostname"_a = "127.0.0.1", "metadata_server"_a = "P2PHANDSHAKE",
        "protocol"_a = "tcp", "rdma_devices"_a = std::vector<std::string>(),
        "global_segment_size"_a = 0, "local_buffer_size"_a = 0, "max_slices_per_call"_a = 8192,
        "max_bytes_per_call"_a = 256u << 20, "connect_timeout_seconds"_a = 2.0, "library"_a = "",
        "site_packages"_a = nb::none(), "python_library"_a = "", "unknown_build"_a = "refuse",
        "environment"_a = std::map<std::string, std::string>(), "rdma_device_folder"_a = nb::none(),
        "setup_timeout_seconds"_a = 15.0, "max_region_bytes"_a = 0, R"(Connects to a Mooncake store.

Args:
    master: Address of mooncake_master, as host:port.
    local_hostname: Under which other clients reach this one.
    metadata_server: P2PHANDSHAKE, or a URL with a scheme.
    protocol: tcp or rdma.
    rdma_devices: For rdma only; Mooncake chooses when empty.
    global_segment_size: Bytes that this process gives to the pool; 0, or at least 16 MiB. They go with the client, also
        when it is replaced: lend with a store that nothing else uses.
    local_buffer_size: Bytes of Mooncake's staging buffer; 0, or at least 16 MiB.
    max_slices_per_call: Pieces of memory per native call, 1 to 8192; at most half of Mooncake's TCP queue to a peer.
    max_bytes_per_call: Bytes per call that a worker makes; 0 for no limit.
    connect_timeout_seconds: Bound for reaching the master's port.
    library: Path of Mooncake's store library; found by itself when empty.
    site_packages: Folders to search for it; those of this interpreter by default.
    python_library: Not needed inside Python.
    unknown_build: "refuse", or "probe" to try a build that is not known in a process of its own first.
    environment: Variables that Mooncake reads, set before its library is opened for the first time.
    rdma_device_folder: Where RDMA devices are listed.
    setup_timeout_seconds: Bound of the whole set-up.
    max_region_bytes: Memory is registered in pieces of at most so many bytes; 0 for 2 GiB with rdma and whole regions with tcp, else at least 1 MiB.

Returns:
    The store, connected.

Raises:
    ConfigError: Options are malformed; all problems at once.
    NotFoundError: The library, a symbol of it or an RDMA device is missing.
    UnsupportedError: The build is not known.
    UnavailableError: The master does not answer.
    TimedOutError: Set-up took longer than its bound.)");
}

}  // namespace

void bind_backend(nb::module_& m) {
  bind_pool(m);
  bind_handle(m);
  m.def("memory_store", &memory_store, "pool"_a = nb::none(), nb::kw_only(),
        "latency_seconds"_a = 0.0, "max_segments_per_call"_a = 0, "max_bytes_per_call"_a = 0,
        R"(Connects to a pool in this process.

Args:
    pool: Where the objects are; a new one by default.
    latency_seconds: Every operation takes this long.
    max_segments_per_call: Pieces of memory per call; 0 for no limit.
    max_bytes_per_call: Bytes per call; 0 for no limit.

Returns:
    The store.

Raises:
    ConfigError: A number is out of range.)");
  bind_mooncake(m);
  bind_rdma(m);
  m.def("inject_faults", &inject_faults, "store"_a, nb::kw_only(), "seed"_a = 1,
        "delay_seconds"_a = 0.02, "late_seconds"_a = 0.1, "lookup_late_seconds"_a = 1.0,
        "region_delay_seconds"_a = 0.0, "chances"_a,
        nb::sig(
            "def inject_faults(store: ObjectStore, *, seed: int = 1, delay_seconds: float = 0.02, "
            "late_seconds: float = 0.1, lookup_late_seconds: float = 1.0, "
            "region_delay_seconds: float = 0.0, **chances: float) -> ObjectStore"),
        R"(Wraps a store so that it misbehaves, for tests.

Args:
    store: A store that nobody uses yet; the wrapper takes it over.
    seed: Equal seeds and operations give equal faults.
    delay_seconds: Longest delay of `delay`.
    late_seconds: Longest time between outcome and the late end of `land_late` and `late_quiet`.
    lookup_late_seconds: Longest delay of `lookup_late`.
    region_delay_seconds: How much longer it takes to register memory.
    chances: Chance of each kind of fault per operation, from 0 to 1, such as fail_call=0.01.

Returns:
    The wrapper.

Raises:
    ArgumentError: An unknown kind of fault, or a chance outside 0 to 1.)");
}

}  // namespace kvprism::bindings
