// The scheduler of the C interface.
#include <algorithm>
#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "c_api/guard.h"
#include "c_api/handles.h"

using namespace kvprism;         // NOLINT(google-build-using-namespace): functions outside of any
using namespace kvprism::c_api;  // NOLINT(google-build-using-namespace)

namespace {

HashList to_hashes(const kvprism_hashes* hashes) {
  if (hashes == nullptr) return {};
  return {hashes->data, hashes->count, hashes->width, hashes->first};
}

void need_hashes(Arguments& arguments, const kvprism_hashes* hashes) {
  if (hashes == nullptr) return;
  arguments.need_array(hashes->data, hashes->count, "hashes.data", "hashes.count", kMostHashes);
  if (hashes->first > kMostHashes - std::min<std::size_t>(hashes->count, kMostHashes)) {
    arguments.wrong("hashes.first", std::to_string(hashes->first),
                    "at most " + std::to_string(kMostHashes) + " hashes before and in the list");
  }
  if (hashes->count != 0 && (hashes->width < kMinHashWidth || hashes->width > kMaxHashWidth)) {
    arguments.wrong("hashes.width", std::to_string(hashes->width), hash_widths());
  }
}

void need_rows(Arguments& arguments, const kvprism_scheduler* scheduler, const kvprism_blocks* rows,
               std::size_t count) {
  if (count != 0) arguments.need(rows, "rows");
  if (scheduler != nullptr && count > scheduler->base().projection().num_groups()) {
    // Nothing of them is read: the array may be shorter.
    return arguments.wrong(
        "num_rows", std::to_string(count),
        std::to_string(scheduler->base().projection().num_groups()) + ", a row for every group");
  }
  for (std::size_t i = 0; rows != nullptr && i < count; ++i) {
    if (rows[i].count == 0 || (rows[i].ids != nullptr && rows[i].count <= kMostBlocks)) continue;
    const std::string path = "rows[" + std::to_string(i) + "]";
    arguments.need_array(rows[i].ids, rows[i].count, (path + ".ids").c_str(),
                         (path + ".count").c_str(), kMostBlocks);
  }
}

// A block id is a 32-bit integer with a name: the caller's arrays are read where they lie.
static_assert(sizeof(BlockId) == sizeof(std::int32_t));

BlockRows to_rows(kvprism_scheduler& scheduler, const kvprism_blocks* rows, std::size_t count) {
  scheduler.rows.clear();
  for (std::size_t i = 0; i < count; ++i) {
    scheduler.rows.emplace_back(reinterpret_cast<const BlockId*>(rows[i].ids), rows[i].count);
  }
  return BlockRows(scheduler.rows);
}

kvprism_blocks give_blocks(const std::vector<BlockId>& blocks) {
  return {reinterpret_cast<const std::int32_t*>(blocks.data()), blocks.size()};
}

// What the handle keeps back the checked scheduler takes for given.
void check_ends_taken(const kvprism_scheduler& scheduler) {
  if (!scheduler.checked || !scheduler.ends_overdue || scheduler.ends_left() == 0) return;
  fail(ErrorCode::kInvalidArgument, "scheduler call",
       {"end_step",
        std::to_string(scheduler.ends_left()) + " load ends not taken",
        "kvprism_scheduler_take_load_end in every step until it finds none: their requests wait "
        "for them",
        {}});
}

StoreSchedulerOptions to_options(const kvprism_scheduler_options& given) {
  StoreSchedulerOptions options;
  options.epoch = given.epoch;
  options.ranks = given.ranks;
  options.loads = given.loads;
  options.saves = given.saves;
  options.detach_quarantined_loads = given.detach_quarantined_loads;
  options.lookup_timeout = Duration{given.lookup_timeout_ns};
  options.lookup_fresh_for = Duration{given.lookup_fresh_for_ns};
  options.load_timeout = Duration{given.load_timeout_ns};
  options.save_timeout = Duration{given.save_timeout_ns};
  options.quarantine_after = Duration{given.quarantine_after_ns};
  options.backoff = Duration{given.backoff_ns};
  options.saved_fresh_for = Duration{given.saved_fresh_for_ns};
  options.avoid_failed_for = Duration{given.avoid_failed_for_ns};
  options.purge_settle = Duration{given.purge_settle_ns};
  options.healthy_after = Duration{given.healthy_after_ns};
  options.tell_changes = given.tell_changes;
  options.backoff_after = given.backoff_after;
  options.max_held_percent = given.max_held_percent;
  return options;
}

}  // namespace

kvprism_status kvprism_scheduler_options_init(kvprism_scheduler_options* options,
                                              size_t struct_size, kvprism_error** error) {
  const StoreSchedulerOptions defaults;
  return init(
      "kvprism_scheduler_options_init", options, struct_size,
      kvprism_scheduler_options{.struct_size = 0,
                                .epoch = defaults.epoch,
                                .ranks = defaults.ranks,
                                .loads = defaults.loads,
                                .saves = defaults.saves,
                                .detach_quarantined_loads = defaults.detach_quarantined_loads,
                                .checked = false,
                                .tell_changes = defaults.tell_changes,
                                .lookup_timeout_ns = defaults.lookup_timeout.ns,
                                .lookup_fresh_for_ns = defaults.lookup_fresh_for.ns,
                                .load_timeout_ns = defaults.load_timeout.ns,
                                .save_timeout_ns = defaults.save_timeout.ns,
                                .quarantine_after_ns = defaults.quarantine_after.ns,
                                .backoff_ns = defaults.backoff.ns,
                                .saved_fresh_for_ns = defaults.saved_fresh_for.ns,
                                .avoid_failed_for_ns = defaults.avoid_failed_for.ns,
                                .purge_settle_ns = defaults.purge_settle.ns,
                                .healthy_after_ns = defaults.healthy_after.ns,
                                .backoff_after = defaults.backoff_after,
                                .max_held_percent = defaults.max_held_percent,
                                .flight_record_path = "",
                                .record_to = ""},
      error);
}

kvprism_status kvprism_scheduler_new(const kvprism_key_schema* schema, kvprism_store* store,
                                     const kvprism_scheduler_options* options,
                                     kvprism_scheduler** scheduler, kvprism_error** error) {
  return guarded(error, [&] {
    Arguments arguments("kvprism_scheduler_new");
    arguments.need(schema, "schema");
    arguments.need(store, "store");
    arguments.need_struct(options, "options");
    arguments.need(scheduler, "scheduler");
    arguments.check();
    auto made = std::make_unique<kvprism_scheduler>();
    StoreSchedulerOptions wanted = to_options(*options);
    if (const std::string path = text(options->record_to); !path.empty()) {
      StoreScheduler::check(*schema->shared, wanted);
      made->recording = std::make_unique<RunFile>(path);
      wanted.record = made->recording->sink();
    }
    if (std::string path = text(options->flight_record_path); !path.empty()) {
      made->flight = std::make_unique<FlightFile>(std::move(path));
      wanted.flight = made->flight->sink();
    }
    if (options->checked) {
      made->checked = std::make_unique<CheckedScheduler>(schema->shared, store->index, wanted);
    } else {
      made->plain = std::make_unique<StoreScheduler>(schema->shared, store->index, wanted);
    }
    *scheduler = made.release();
  });
}

kvprism_status kvprism_scheduler_set_mode(kvprism_scheduler* scheduler, int32_t mode,
                                          kvprism_error** error) {
  return guarded(error, [&] {
    Arguments arguments("kvprism_scheduler_set_mode");
    arguments.need(scheduler, "scheduler");
    if (mode < 0 || mode > static_cast<int32_t>(StoreMode::kOff))
      arguments.wrong("mode", std::to_string(mode), "0 to 3");
    arguments.check();
    scheduler->call([&](auto& s) { s.set_mode(static_cast<StoreMode>(mode)); });
  });
}

kvprism_status kvprism_scheduler_purge(kvprism_scheduler* scheduler, int64_t now_ns,
                                       kvprism_error** error) {
  return guarded(error, [&] {
    Arguments arguments("kvprism_scheduler_purge");
    arguments.need(scheduler, "scheduler");
    arguments.check();
    scheduler->call([&](auto& s) { s.purge(Instant{now_ns}); });
  });
}

kvprism_status kvprism_scheduler_purge_status(const kvprism_scheduler* scheduler,
                                              const char** state, uint64_t* removed,
                                              kvprism_error** error) {
  return guarded(error, [&] {
    Arguments arguments("kvprism_scheduler_purge_status");
    arguments.need(scheduler, "scheduler");
    arguments.need(state, "state");
    arguments.need(removed, "removed");
    arguments.check();
    const PurgeStatus status = scheduler->base().purge_status();
    *state = to_string(status.state).data();  // a literal
    *removed = status.removed;
  });
}

kvprism_status kvprism_scheduler_restrict(kvprism_scheduler* scheduler, uint64_t request, bool load,
                                          bool save, kvprism_error** error) {
  return guarded(error, [&] {
    Arguments arguments("kvprism_scheduler_restrict");
    arguments.need(scheduler, "scheduler");
    arguments.check();
    scheduler->call([&](auto& s) { s.restrict(RequestId{request}, {.load = load, .save = save}); });
  });
}

kvprism_status kvprism_scheduler_prompt(kvprism_scheduler* scheduler, uint64_t request,
                                        uint32_t prompt_tokens, kvprism_error** error) {
  return guarded(error, [&] {
    Arguments arguments("kvprism_scheduler_prompt");
    arguments.need(scheduler, "scheduler");
    arguments.check();
    scheduler->call([&](auto& s) { s.prompt(RequestId{request}, prompt_tokens); });
  });
}

kvprism_status kvprism_scheduler_lookup(kvprism_scheduler* scheduler, uint64_t request,
                                        uint32_t prompt_tokens, const kvprism_hashes* hashes,
                                        uint32_t local_tokens, int64_t now_ns, bool* pending,
                                        uint32_t* external_tokens, kvprism_error** error) {
  return guarded(error, [&] {
    Arguments arguments("kvprism_scheduler_lookup");
    arguments.need(scheduler, "scheduler");
    arguments.need(hashes, "hashes");
    need_hashes(arguments, hashes);
    arguments.need(pending, "pending");
    arguments.need(external_tokens, "external_tokens");
    arguments.check();
    const LookupResult result = scheduler->call([&](auto& s) {
      return s.lookup(RequestId{request}, prompt_tokens, to_hashes(hashes), local_tokens,
                      Instant{now_ns});
    });
    *pending = result.pending;
    *external_tokens = result.external_tokens;
  });
}

kvprism_status kvprism_scheduler_allocated(kvprism_scheduler* scheduler, uint64_t request,
                                           uint32_t external_tokens, const kvprism_blocks* rows,
                                           size_t num_rows, int64_t now_ns, uint64_t* job,
                                           kvprism_error** error) {
  return guarded(error, [&] {
    Arguments arguments("kvprism_scheduler_allocated");
    arguments.need(scheduler, "scheduler");
    need_rows(arguments, scheduler, rows, num_rows);
    arguments.need(job, "job");
    arguments.check();
    const BlockRows tables = to_rows(*scheduler, rows, num_rows);
    const std::optional<JobId> started = scheduler->call([&](auto& s) {
      return s.allocated(RequestId{request}, external_tokens, tables, Instant{now_ns});
    });
    *job = started ? raw(*started) : 0;
  });
}

kvprism_status kvprism_scheduler_advanced(kvprism_scheduler* scheduler, uint64_t request,
                                          uint32_t accepted_tokens, const kvprism_hashes* hashes,
                                          kvprism_error** error) {
  return guarded(error, [&] {
    Arguments arguments("kvprism_scheduler_advanced");
    arguments.need(scheduler, "scheduler");
    need_hashes(arguments, hashes);
    arguments.check();
    scheduler->call(
        [&](auto& s) { s.advanced(RequestId{request}, accepted_tokens, to_hashes(hashes)); });
  });
}

kvprism_status kvprism_scheduler_wants_save(kvprism_scheduler* scheduler, uint64_t request,
                                            int64_t now_ns, uint32_t* from, uint32_t* to,
                                            kvprism_error** error) {
  return guarded(error, [&] {
    Arguments arguments("kvprism_scheduler_wants_save");
    arguments.need(scheduler, "scheduler");
    arguments.need(from, "from");
    arguments.need(to, "to");
    arguments.check();
    const TokenRange range =
        scheduler->call([&](auto& s) { return s.wants_save(RequestId{request}, Instant{now_ns}); });
    *from = range.from;
    *to = range.empty() ? range.from : range.to;
  });
}

kvprism_status kvprism_scheduler_save(kvprism_scheduler* scheduler, uint64_t request, uint32_t from,
                                      uint32_t to, const kvprism_blocks* rows, size_t num_rows,
                                      int64_t now_ns, kvprism_error** error) {
  return guarded(error, [&] {
    Arguments arguments("kvprism_scheduler_save");
    arguments.need(scheduler, "scheduler");
    need_rows(arguments, scheduler, rows, num_rows);
    arguments.check();
    const BlockRows tables = to_rows(*scheduler, rows, num_rows);
    scheduler->call(
        [&](auto& s) { s.save(RequestId{request}, {from, to}, tables, Instant{now_ns}); });
  });
}

kvprism_status kvprism_scheduler_boundary(kvprism_scheduler* scheduler, uint64_t request,
                                          uint32_t group, int32_t block, uint32_t tokens,
                                          kvprism_error** error) {
  return guarded(error, [&] {
    Arguments arguments("kvprism_scheduler_boundary");
    arguments.need(scheduler, "scheduler");
    if (scheduler != nullptr && group >= scheduler->base().projection().num_groups()) {
      arguments.wrong("group", std::to_string(group),
                      "less than " + std::to_string(scheduler->base().projection().num_groups()) +
                          ", the number of groups");
    }
    arguments.check();
    scheduler->call(
        [&](auto& s) { s.boundary(RequestId{request}, GroupId{group}, BlockId{block}, tokens); });
  });
}

kvprism_status kvprism_scheduler_preempted(kvprism_scheduler* scheduler, uint64_t request,
                                           kvprism_error** error) {
  return guarded(error, [&] {
    Arguments arguments("kvprism_scheduler_preempted");
    arguments.need(scheduler, "scheduler");
    arguments.check();
    scheduler->call([&](auto& s) { s.preempted(RequestId{request}); });
  });
}

kvprism_status kvprism_scheduler_finished(kvprism_scheduler* scheduler, uint64_t request,
                                          bool aborted, kvprism_error** error) {
  return guarded(error, [&] {
    Arguments arguments("kvprism_scheduler_finished");
    arguments.need(scheduler, "scheduler");
    arguments.check();
    scheduler->call([&](auto& s) {
      s.finished(RequestId{request}, aborted ? FinishReason::kAborted : FinishReason::kCompleted);
    });
  });
}

kvprism_status kvprism_scheduler_end_step(kvprism_scheduler* scheduler, int64_t now_ns,
                                          const void** plan, size_t* length,
                                          kvprism_error** error) {
  return guarded(error, [&] {
    Arguments arguments("kvprism_scheduler_end_step");
    arguments.need(scheduler, "scheduler");
    arguments.need(plan, "plan");
    arguments.need(length, "length");
    arguments.check();
    check_ends_taken(*scheduler);
    const StepPlan& made =
        scheduler->call([&](auto& s) -> const StepPlan& { return s.end_step(Instant{now_ns}); });
    scheduler->ends_overdue = scheduler->ends_left() != 0;
    scheduler->plan.clear();
    if (!made.empty()) encode(made.view(), scheduler->plan);
    *plan = scheduler->plan.data();
    *length = scheduler->plan.size();
  });
}

kvprism_status kvprism_scheduler_report(kvprism_scheduler* scheduler, const void* report,
                                        size_t length, int64_t now_ns, kvprism_error** error) {
  return guarded(error, [&] {
    Arguments arguments("kvprism_scheduler_report");
    arguments.need(scheduler, "scheduler");
    arguments.need_array(report, length, "report", "length", kMostMessage);
    arguments.check();
    const std::span<const std::byte> bytes = aligned_bytes(report, length, scheduler->incoming);
    if (!scheduler->call([&](auto& s) { return s.report(bytes, Instant{now_ns}); })) {
      fail(ErrorCode::kMismatch, "kvprism_scheduler_report",
           {"report", std::to_string(length) + " bytes, not all of which could be taken",
            "what kvprism_worker_poll gave, of this scheduler's workers",
            "counted as reports_malformed or reports_foreign"});
    }
  });
}

kvprism_status kvprism_scheduler_rank_gone(kvprism_scheduler* scheduler, uint32_t rank,
                                           int64_t now_ns, kvprism_error** error) {
  return guarded(error, [&] {
    Arguments arguments("kvprism_scheduler_rank_gone");
    arguments.need(scheduler, "scheduler");
    arguments.check();
    scheduler->call([&](auto& s) { s.rank_gone(Rank{rank}, Instant{now_ns}); });
  });
}

kvprism_status kvprism_scheduler_take_load_end(kvprism_scheduler* scheduler, kvprism_load_end* end,
                                               bool* found, kvprism_error** error) {
  return guarded(error, [&] {
    Arguments arguments("kvprism_scheduler_take_load_end");
    arguments.need(scheduler, "scheduler");
    arguments.need_struct(end, "end");
    arguments.need(found, "found");
    arguments.check();
    auto& ends = scheduler->ends;
    if (scheduler->ends_left() == 0) {
      ends.clear();
      scheduler->next_end = 0;
      scheduler->ends_overdue = false;
      scheduler->call([&](auto& s) { s.take_load_ends(ends); });
    }
    *found = scheduler->ends_left() != 0;
    if (!*found) return;
    const LoadEnd& next = ends[scheduler->next_end];
    scheduler->failed.clear();
    for (const FailedBlock& block : next.failed)
      scheduler->failed.push_back({raw(block.group), block.chunk, raw(block.block)});
    *end = {.struct_size = sizeof(*end),
            .request = raw(next.request),
            .job = raw(next.job),
            .valid_tokens = next.valid_tokens,
            .complete = next.complete,
            .blocks_quiet = next.blocks_quiet,
            .failed = scheduler->failed.data(),
            .num_failed = scheduler->failed.size()};
    ++scheduler->next_end;  // last: what fails before is asked for again
  });
}

kvprism_status kvprism_scheduler_take_change(kvprism_scheduler* scheduler, kvprism_change* change,
                                             bool* found, kvprism_error** error) {
  return guarded(error, [&] {
    Arguments arguments("kvprism_scheduler_take_change");
    arguments.need(scheduler, "scheduler");
    arguments.need_struct(change, "change");
    arguments.need(found, "found");
    arguments.check();
    auto& changes = scheduler->changes;
    if (scheduler->changes_left() == 0) {
      changes.clear();
      scheduler->next_change = 0;
      scheduler->call([&](auto& s) { s.take_changes(changes); });
    }
    *found = scheduler->changes_left() != 0;
    if (!*found) return;
    const StoreChange& next = changes[scheduler->next_change++];
    *change = {.struct_size = sizeof(*change),
               .stored = next.stored,
               .request = raw(next.request),
               .group = raw(next.group),
               .chunk = next.chunk,
               .tokens = next.tokens,
               .hash = next.hash.data(),
               .parent = next.parent.empty() ? nullptr : next.parent.data(),
               .hash_bytes = next.hash.size(),
               .parent_bytes = next.parent.size()};
  });
}

kvprism_status kvprism_scheduler_health(const kvprism_scheduler* scheduler, kvprism_health* health,
                                        char** text, kvprism_error** error) {
  return guarded(error, [&] {
    Arguments arguments("kvprism_scheduler_health");
    arguments.need(scheduler, "scheduler");
    arguments.need_struct(health, "health");
    arguments.check();
    const StoreHealth found = scheduler->base().health();
    if (text != nullptr) *text = give(describe(found));
    health->state = static_cast<kvprism_health_state>(found.state);
    health->reasons = found.reasons;
  });
}

kvprism_status kvprism_scheduler_known_hashes(const kvprism_scheduler* scheduler, uint64_t request,
                                              uint32_t* count, kvprism_error** error) {
  return guarded(error, [&] {
    Arguments arguments("kvprism_scheduler_known_hashes");
    arguments.need(scheduler, "scheduler");
    arguments.need(count, "count");
    arguments.check();
    *count = scheduler->base().known_hashes(RequestId{request});
  });
}

kvprism_status kvprism_scheduler_take_acquired(kvprism_scheduler* scheduler, kvprism_blocks* blocks,
                                               kvprism_error** error) {
  return guarded(error, [&] {
    Arguments arguments("kvprism_scheduler_take_acquired");
    arguments.need(scheduler, "scheduler");
    arguments.need(blocks, "blocks");
    arguments.check();
    scheduler->acquired.clear();
    scheduler->call([&](auto& s) { s.take_acquired(scheduler->acquired); });
    *blocks = give_blocks(scheduler->acquired);
  });
}

kvprism_status kvprism_scheduler_take_released(kvprism_scheduler* scheduler, kvprism_blocks* blocks,
                                               kvprism_error** error) {
  return guarded(error, [&] {
    Arguments arguments("kvprism_scheduler_take_released");
    arguments.need(scheduler, "scheduler");
    arguments.need(blocks, "blocks");
    arguments.check();
    scheduler->released.clear();
    scheduler->call([&](auto& s) { s.take_released(scheduler->released); });
    *blocks = give_blocks(scheduler->released);
  });
}

kvprism_status kvprism_scheduler_saves_paused(const kvprism_scheduler* scheduler, int64_t now_ns,
                                              bool* paused, kvprism_error** error) {
  return guarded(error, [&] {
    Arguments arguments("kvprism_scheduler_saves_paused");
    arguments.need(scheduler, "scheduler");
    arguments.need(paused, "paused");
    arguments.check();
    *paused = scheduler->call([&](auto& s) { return s.saves_paused(Instant{now_ns}); });
  });
}

kvprism_status kvprism_scheduler_has_pending_work(const kvprism_scheduler* scheduler, bool* pending,
                                                  kvprism_error** error) {
  return guarded(error, [&] {
    Arguments arguments("kvprism_scheduler_has_pending_work");
    arguments.need(scheduler, "scheduler");
    arguments.need(pending, "pending");
    arguments.check();
    *pending = scheduler->ends_left() != 0 || scheduler->changes_left() != 0 ||
               scheduler->call([](auto& s) { return s.has_pending_work(); });
  });
}

void kvprism_scheduler_free(kvprism_scheduler* scheduler) { delete scheduler; }
