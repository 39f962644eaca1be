#include "counters.h"
#include "text.h"

#include <string>

namespace kvprism::bindings {

namespace {

nb::dict sum_of(const DurationHistogram& times) {
  nb::dict out;
  out["count"] = times.count;
  out["sum_us"] = times.sum_us;
  return out;
}

}  // namespace

nb::dict to_dict(const DurationHistogram& times) {
  nb::dict out = sum_of(times);
  for (std::size_t i = 0; i < times.counts.size(); ++i) {
    const std::string bound = i < DurationHistogram::kBoundsUs.size()
                                  ? std::to_string(DurationHistogram::kBoundsUs[i])
                                  : "inf";
    out[nb::str(("up_to_us_" + bound).c_str())] = times.counts[i];
  }
  return out;
}

nb::dict to_dict(const StoreSchedulerCounters& c) {
  nb::dict ledger;
  ledger["started"] = c.ledger.started;
  ledger["outcomes"] = c.ledger.outcomes;
  ledger["quiets"] = c.ledger.quiets;
  ledger["expired"] = c.ledger.expired;
  ledger["quarantined"] = c.ledger.quarantined;
  ledger["late_notices"] = c.ledger.late_notices;
  ledger["duplicate_notices"] = c.ledger.duplicate_notices;
  ledger["unknown_notices"] = c.ledger.unknown_notices;
  ledger["asked"] = c.ledger.asked;
  ledger["alive"] = c.ledger.alive;
  ledger["blocks_held"] = c.ledger.blocks_held;
  ledger["blocks_in_quarantine"] = c.ledger.blocks_in_quarantine;
  nb::dict out;
  out["lookups"] = c.lookups;
  out["lookup_calls"] = c.lookup_calls;
  out["lookup_keys"] = c.lookup_keys;
  out["lookups_late"] = c.lookups_late;
  out["lookups_failed"] = c.lookups_failed;
  out["hit_tokens"] = c.hit_tokens;
  out["loaded_tokens"] = c.loaded_tokens;
  out["loads"] = c.loads;
  out["loads_failed"] = c.loads_failed;
  out["load_races"] = c.load_races;
  out["saves"] = c.saves;
  out["saved_objects"] = c.saved_objects;
  out["duplicate_objects"] = c.duplicate_objects;
  out["saved_bytes"] = c.saved_bytes;
  out["loaded_objects"] = c.loaded_objects;
  out["loaded_bytes"] = c.loaded_bytes;
  out["save_chunks_failed"] = c.save_chunks_failed;
  out["saves_dropped"] = c.saves_dropped;
  out["saves_held_back"] = c.saves_held_back;
  out["saves_known"] = c.saves_known;
  out["hashes_refused"] = c.hashes_refused;
  out["requests_replaced"] = c.requests_replaced;
  out["tables_refused"] = c.tables_refused;
  out["lookups_refused"] = c.lookups_refused;
  out["offers_refused"] = c.offers_refused;
  out["sources_skipped"] = c.sources_skipped;
  out["reports_foreign"] = c.reports_foreign;
  out["reports_malformed"] = c.reports_malformed;
  out["chunks_avoided"] = c.chunks_avoided;
  out["mismatches"] = c.mismatches;
  out["objects_removed"] = c.objects_removed;
  out["removals_failed"] = c.removals_failed;
  out["health"] = c.health;
  out["incidents"] = c.incidents;
  out["lookup_time"] = sum_of(c.lookup_time);
  out["load_time"] = sum_of(c.load_time);
  out["save_time"] = sum_of(c.save_time);
  out["purges"] = c.purges;
  out["objects_purged"] = c.objects_purged;
  out["changes_dropped"] = c.changes_dropped;
  out["bypasses"] = c.bypasses;
  out["offers_paused"] = c.offers_paused;
  out["ledger"] = ledger;
  return out;
}

nb::dict to_dict(const StoreWorkerCounters& c) {
  nb::dict out;
  out["plans"] = c.plans;
  out["plans_refused"] = c.plans_refused;
  out["plans_repeated"] = c.plans_repeated;
  out["jobs"] = c.jobs;
  out["jobs_unknown"] = c.jobs_unknown;
  out["gets"] = c.gets;
  out["puts"] = c.puts;
  out["segments"] = c.segments;
  out["bytes_stored"] = c.bytes_stored;
  out["bytes_fetched"] = c.bytes_fetched;
  out["jobs_alive"] = c.jobs_alive;
  out["unquiet_calls"] = c.unquiet_calls;
  out["bytes_in_flight"] = c.bytes_in_flight;
  out["saves_held_up"] = c.saves_held_up;
  out["pump_errors"] = c.pump_errors;
  return out;
}

nb::dict to_dict(const StoreGroupCounters& c) {
  nb::dict out;
  out["stored_objects"] = c.stored_objects;
  out["stored_bytes"] = c.stored_bytes;
  out["loaded_objects"] = c.loaded_objects;
  out["loaded_bytes"] = c.loaded_bytes;
  out["missed_objects"] = c.missed_objects;
  out["missed_bytes"] = c.missed_bytes;
  out["failed_objects"] = c.failed_objects;
  out["get_time"] = sum_of(c.get_time);
  out["put_time"] = sum_of(c.put_time);
  return out;
}

}  // namespace kvprism::bindings
