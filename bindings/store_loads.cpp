// RankLoads.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <vector>

#include "handles.h"
#include "kvprism/store/rank_loads.h"

namespace kvprism::bindings {

using namespace nb::literals;

void bind_store_loads(nb::module_& m) {
  nb::class_<RankLoadEnd>(m, "RankLoadEnd",
                          "The end of one load on one rank: its blocks are quiet there.")
      .def_prop_ro(
          "job", [](const RankLoadEnd& e) { return raw(e.job); }, "The job of the plan.")
      .def_prop_ro(
          "request", [](const RankLoadEnd& e) { return raw(e.request); }, "The request it was for.")
      .def_ro("complete", &RankLoadEnd::complete, "Everything of this rank has arrived.")
      .def_prop_ro(
          "failed_blocks",
          [](const RankLoadEnd& e) {
            std::vector<std::int32_t> ids;
            for (const BlockId id : e.failed) ids.push_back(raw(id));
            return ids;
          },
          "Ids of blocks that do not hold what they should.");

  nb::class_<RankLoads>(m, "RankLoads",
                        R"(What the loads of one rank have come to.

For engines that hear of loads from their workers: the ends are made of the rank's own reports, without a way through
the scheduler's process. One call at a time.)")
      .def(nb::init<>(), "Knows of no loads yet.")
      .def(
          "expect",
          [](RankLoads& loads, nb::handle data) {
            const EncodedBytes encoded(data, "plan");
            loads.expect(decode_plan(encoded.bytes()));
          },
          "plan"_a, nb::sig("def expect(self, plan: bytes | bytearray | memoryview) -> None"),
          R"(Takes in the loads of a plan, once the worker has taken it and before its next poll.

Args:
    plan: An encoded plan.

Raises:
    Error: The bytes are no plan of this version.)")
      .def(
          "take",
          [](RankLoads& loads, nb::handle data) {
            const EncodedBytes encoded(data, "reports");
            std::vector<RankLoadEnd> ends;
            loads.take(encoded.bytes(), ends);
            return ends;
          },
          "reports"_a,
          nb::sig("def take(self, reports: bytes | bytearray | memoryview) -> list[RankLoadEnd]"),
          R"(Reads what `StoreWorker.poll` gave.

Args:
    reports: One or several reports, one behind the other.

Returns:
    The loads that are over; each appears once.

Raises:
    Error: The bytes are no report of this version.)")
      .def(
          "abandon",
          [](RankLoads& loads, std::uint64_t job) {
            std::vector<RankLoadEnd> ends;
            loads.abandon(JobId{job}, ends);
            return ends;
          },
          "job"_a, R"(Ends a load before it is quiet, with every block failed.

Args:
    job: Of a load in quarantine, whose blocks the scheduler keeps.

Returns:
    Its end, or an empty list when the load is not known.)")
      .def("__len__", &RankLoads::size, "Loads in flight.");
}

}  // namespace kvprism::bindings
