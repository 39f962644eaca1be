// Counters of the C interface: every member of the C++ structs under its name, those of the ledger
// behind "ledger.".
#include <string>
#include <vector>

#include "c_api/guard.h"
#include "c_api/handles.h"

using namespace kvprism;         // NOLINT(google-build-using-namespace): functions outside of any
using namespace kvprism::c_api;  // NOLINT(google-build-using-namespace)

kvprism_status kvprism_scheduler_counters(const kvprism_scheduler* scheduler,
                                          kvprism_counter_visitor visitor, void* context,
                                          kvprism_error** error) {
  return guarded(error, [&] {
    Arguments arguments("kvprism_scheduler_counters");
    arguments.need(scheduler, "scheduler");
    arguments.need(reinterpret_cast<const void*>(visitor), "visitor");
    arguments.check();
    const StoreSchedulerCounters c = scheduler->base().counters();
    visitor(context, "lookups", c.lookups);
    visitor(context, "lookup_calls", c.lookup_calls);
    visitor(context, "lookup_keys", c.lookup_keys);
    visitor(context, "lookups_refused", c.lookups_refused);
    visitor(context, "lookups_late", c.lookups_late);
    visitor(context, "lookups_failed", c.lookups_failed);
    visitor(context, "hit_tokens", c.hit_tokens);
    visitor(context, "loaded_tokens", c.loaded_tokens);
    visitor(context, "loads", c.loads);
    visitor(context, "loads_failed", c.loads_failed);
    visitor(context, "load_races", c.load_races);
    visitor(context, "saves", c.saves);
    visitor(context, "saved_objects", c.saved_objects);
    visitor(context, "duplicate_objects", c.duplicate_objects);
    visitor(context, "saved_bytes", c.saved_bytes);
    visitor(context, "loaded_objects", c.loaded_objects);
    visitor(context, "loaded_bytes", c.loaded_bytes);
    visitor(context, "save_chunks_failed", c.save_chunks_failed);
    visitor(context, "saves_dropped", c.saves_dropped);
    visitor(context, "saves_held_back", c.saves_held_back);
    visitor(context, "saves_known", c.saves_known);
    visitor(context, "hashes_refused", c.hashes_refused);
    visitor(context, "requests_replaced", c.requests_replaced);
    visitor(context, "tables_refused", c.tables_refused);
    visitor(context, "offers_refused", c.offers_refused);
    visitor(context, "sources_skipped", c.sources_skipped);
    visitor(context, "reports_foreign", c.reports_foreign);
    visitor(context, "reports_malformed", c.reports_malformed);
    visitor(context, "chunks_avoided", c.chunks_avoided);
    visitor(context, "mismatches", c.mismatches);
    visitor(context, "objects_removed", c.objects_removed);
    visitor(context, "removals_failed", c.removals_failed);
    visitor(context, "health", c.health);
    visitor(context, "incidents", c.incidents);
    visitor(context, "lookup_time.count", c.lookup_time.count);
    visitor(context, "lookup_time.sum_us", c.lookup_time.sum_us);
    visitor(context, "load_time.count", c.load_time.count);
    visitor(context, "load_time.sum_us", c.load_time.sum_us);
    visitor(context, "save_time.count", c.save_time.count);
    visitor(context, "save_time.sum_us", c.save_time.sum_us);
    visitor(context, "purges", c.purges);
    visitor(context, "objects_purged", c.objects_purged);
    visitor(context, "changes_dropped", c.changes_dropped);
    visitor(context, "bypasses", c.bypasses);
    visitor(context, "offers_paused", c.offers_paused);
    const LedgerCounters& l = c.ledger;
    visitor(context, "ledger.started", l.started);
    visitor(context, "ledger.outcomes", l.outcomes);
    visitor(context, "ledger.quiets", l.quiets);
    visitor(context, "ledger.expired", l.expired);
    visitor(context, "ledger.quarantined", l.quarantined);
    visitor(context, "ledger.late_notices", l.late_notices);
    visitor(context, "ledger.duplicate_notices", l.duplicate_notices);
    visitor(context, "ledger.unknown_notices", l.unknown_notices);
    visitor(context, "ledger.asked", l.asked);
    visitor(context, "ledger.alive", l.alive);
    visitor(context, "ledger.blocks_held", l.blocks_held);
    visitor(context, "ledger.blocks_in_quarantine", l.blocks_in_quarantine);
  });
}

kvprism_status kvprism_worker_counters(const kvprism_worker* worker,
                                       kvprism_counter_visitor visitor, void* context,
                                       kvprism_error** error) {
  return guarded(error, [&] {
    Arguments arguments("kvprism_worker_counters");
    arguments.need(worker, "worker");
    arguments.need(reinterpret_cast<const void*>(visitor), "visitor");
    arguments.check();
    const StoreWorkerCounters c = worker->worker->counters();
    visitor(context, "plans", c.plans);
    visitor(context, "plans_refused", c.plans_refused);
    visitor(context, "plans_repeated", c.plans_repeated);
    visitor(context, "jobs", c.jobs);
    visitor(context, "jobs_unknown", c.jobs_unknown);
    visitor(context, "gets", c.gets);
    visitor(context, "puts", c.puts);
    visitor(context, "segments", c.segments);
    visitor(context, "bytes_stored", c.bytes_stored);
    visitor(context, "bytes_fetched", c.bytes_fetched);
    visitor(context, "jobs_alive", c.jobs_alive);
    visitor(context, "unquiet_calls", c.unquiet_calls);
    visitor(context, "bytes_in_flight", c.bytes_in_flight);
    visitor(context, "saves_held_up", c.saves_held_up);
    visitor(context, "pump_errors", c.pump_errors);
  });
}

kvprism_status kvprism_worker_group_counters(const kvprism_worker* worker, uint32_t group,
                                             kvprism_counter_visitor visitor, void* context,
                                             kvprism_error** error) {
  return guarded(error, [&] {
    Arguments arguments("kvprism_worker_group_counters");
    arguments.need(worker, "worker");
    arguments.need(reinterpret_cast<const void*>(visitor), "visitor");
    arguments.check();
    const std::vector<StoreGroupCounters> groups = worker->worker->group_counters();
    if (group >= groups.size()) {
      arguments.wrong("group", std::to_string(group),
                      "below " + std::to_string(groups.size()) + ", the config's groups");
    }
    arguments.check();
    const StoreGroupCounters& c = groups[group];
    visitor(context, "stored_objects", c.stored_objects);
    visitor(context, "stored_bytes", c.stored_bytes);
    visitor(context, "loaded_objects", c.loaded_objects);
    visitor(context, "loaded_bytes", c.loaded_bytes);
    visitor(context, "missed_objects", c.missed_objects);
    visitor(context, "missed_bytes", c.missed_bytes);
    visitor(context, "failed_objects", c.failed_objects);
    visitor(context, "get_time.count", c.get_time.count);
    visitor(context, "get_time.sum_us", c.get_time.sum_us);
    visitor(context, "put_time.count", c.put_time.count);
    visitor(context, "put_time.sum_us", c.put_time.sum_us);
  });
}

kvprism_status kvprism_store_counters(const kvprism_store* store, kvprism_counter_visitor visitor,
                                      void* context, kvprism_error** error) {
  return guarded(error, [&] {
    Arguments arguments("kvprism_store_counters");
    arguments.need(store, "store");
    arguments.need(reinterpret_cast<const void*>(visitor), "visitor");
    arguments.check();
    if (!store->connection) return;
    const BlockingStoreCounters c = store->connection->counters();
    visitor(context, "put_calls", c.put_calls);
    visitor(context, "put_items", c.put_items);
    visitor(context, "put_bytes", c.put_bytes);
    visitor(context, "get_calls", c.get_calls);
    visitor(context, "get_items", c.get_items);
    visitor(context, "get_bytes", c.get_bytes);
    visitor(context, "exists_calls", c.exists_calls);
    visitor(context, "exists_items", c.exists_items);
    visitor(context, "remove_calls", c.remove_calls);
    visitor(context, "queue_full", c.queue_full);
    visitor(context, "circuit_open", c.circuit_open);
    visitor(context, "probes", c.probes);
    visitor(context, "expired", c.expired);
    visitor(context, "late_calls", c.late_calls);
    visitor(context, "stuck_calls", c.stuck_calls);
    visitor(context, "unquiet_calls", c.unquiet_calls);
    visitor(context, "failed_attempts", c.failed_attempts);
    visitor(context, "replacements", c.replacements);
    visitor(context, "unquiet_now", c.unquiet_now);
    visitor(context, "retired_now", c.retired_now);
    visitor(context, "usable", c.usable ? 1 : 0);
  });
}
