// Removals: a purge of everything that is ours, and single objects that no save could replace.
#include <fmt/format.h>

#include <algorithm>
#include <tuple>

#include "kvprism/base/log.h"
#include "store/scheduler_impl.h"

namespace kvprism {

using detail::Load;
using detail::LookupState;
using detail::Request;

// Of a removal, for as long as somebody has a lease on the object or the index refuses.
constexpr std::uint32_t kMostTries = 4;

std::string_view to_string(PurgeState state) noexcept {
  switch (state) {
    case PurgeState::kNone:
      return "none";
    case PurgeState::kDraining:
      return "draining";
    case PurgeState::kRemoving:
      return "removing";
    case PurgeState::kWaiting:
      return "waiting";
    case PurgeState::kDone:
      break;
  }
  return "done";
}

void StoreScheduler::Impl::begin_purge(Instant now) {
  ++counters.purges;
  purge.status = {PurgeState::kDraining, 0, 0};
  purge.op = {};  // of an earlier pass, whose end says nothing about this purge
  purge.away = false;
  purge.held_up = false;
  purge.drained.reset();
  purge.lookups_told = false;
  std::erase_if(condemned, [](const detail::Condemned& one) { return one.again.has_value(); });
  announced.clear();
  drop_offers();
  take_back_stored();
  saved_prefixes.clear();
  for (auto& [id, request] : requests) {
    request.lookup.state = LookupState::kNone;
    // One that was preempted before holds nothing, whatever it had saved.
    request.purged |= request.accepted > 0 || request.load_to > 0 || request.loading;
    request.forget_saves();
  }
  queued.clear();
  event = {};
  event.whole = true;
  for (auto& [id, load] : loads) {
    load.overtaken = true;
    if (options.detach_quarantined_loads && !load.reported)
      end_load(JobId{id}, load, event, false, now);
  }
  flight.add(now, FlightKind::kPurge, static_cast<std::uint64_t>(purge.status.state), 0, 0);
  advance_purge(now);
}

void StoreScheduler::Impl::advance_purge(Instant now) {
  PurgeState& state = purge.status.state;
  if (state == PurgeState::kDraining) {
    // Also what is planned and not yet sent is in the ledger.
    if (ledger.size() != 0) {
      if (ledger.in_quarantine() != 0 && !purge.held_up) {
        purge.held_up = true;
        log(LogLevel::kWarning,
            fmt::format("a purge waits for {} jobs in quarantine, and the store is not used: it "
                        "goes on when the client that moves them is gone",
                        ledger.in_quarantine()));
      }
      return;
    }
    // A lookup that the store has yet to execute would renew leases.
    if (desk.unquiet_lookups() != 0) {
      if (!purge.drained) purge.drained = now;
      if (!purge.lookups_told && now >= *purge.drained + options.lookup_timeout) {
        purge.lookups_told = true;
        log(LogLevel::kWarning,
            fmt::format("a purge waits for {} lookups that do not return, and the store is not "
                        "used: it goes on when the client that asks them is gone",
                        desk.unquiet_lookups()));
      }
      return;
    }
    purge.quiet_since = now;
    start_purge_pass(now);
  } else if (state == PurgeState::kWaiting && now >= purge.next_pass) {
    start_purge_pass(now);
  }
}

void StoreScheduler::Impl::start_purge_pass(Instant now) {
  const auto op = desk.remove({true, false}, now, now + options.save_timeout,
                              [&](KeySlots& keys) { keys.append() = schema->prefix(); });
  if (op) {
    purge.op = *op;
    purge.began = now;
    purge.status.state = PurgeState::kRemoving;
    return;
  }
  ++counters.removals_failed;
  if (!purge.away) {
    log(LogLevel::kWarning,
        "the store's client does not take a purge (queue full, closed, or unable to remove): it is "
        "tried again, and the store is not used before it is done");
  }
  purge.away = true;
  purge.next_pass = now + options.backoff;
  purge.status.state = PurgeState::kWaiting;
}

void StoreScheduler::Impl::take_removed(Instant now) {
  while (desk.take_removed(removed)) {
    const bool of_purge = removed.op == purge.op && purge.status.state == PurgeState::kRemoving;
    std::uint64_t objects = 0;
    bool failed = false;
    for (const ItemResult& item : removed.items) {
      const bool gone = item.status == ItemStatus::kOk || item.status == ItemStatus::kMissing;
      if (item.status == ItemStatus::kOk) objects += item.bytes;
      if (!gone) ++counters.removals_failed;
      failed |= !gone;
    }
    flight.add(now, FlightKind::kRemoved, static_cast<std::uint64_t>(removed.op), objects,
               failed ? 1 : 0);
    if (!of_purge) {
      counters.objects_removed += objects;
      end_removal(now);
      continue;
    }
    counters.objects_purged += objects;
    purge.status.removed += objects;
    if (failed) {
      if (!purge.away) {
        log(LogLevel::kWarning,
            fmt::format("the store does not answer a purge (\"{}\"): it is tried again, and the "
                        "store is not used before it is done",
                        to_string(removed.items.front().status)));
      }
      purge.away = true;
      purge.next_pass = now + options.backoff;
      purge.status.state = PurgeState::kWaiting;
      continue;
    }
    ++purge.status.passes;
    const Instant settled = purge.quiet_since + options.purge_settle;
    if (purge.began < settled) {
      purge.next_pass = settled;
      purge.status.state = PurgeState::kWaiting;
      continue;
    }
    purge.status.state = PurgeState::kDone;
    flight.add(now, FlightKind::kPurge, static_cast<std::uint64_t>(PurgeState::kDone),
               purge.status.removed, purge.status.passes);
    log(LogLevel::kInfo, fmt::format("purged {} objects", purge.status.removed));
  }
}

// Of single objects. What a load has read, somebody has a lease on: for as long as it lasts the
// store keeps the object.
void StoreScheduler::Impl::end_removal(Instant now) {
  constexpr std::ptrdiff_t kMostPatient = 64;
  std::ptrdiff_t patient =
      std::count_if(condemned.begin(), condemned.end(),
                    [](const detail::Condemned& one) { return one.again.has_value(); });
  std::size_t item = 0;
  for (detail::Condemned& one : condemned) {
    if (one.again || one.op != removed.op) continue;
    const ItemStatus status =
        item < removed.items.size() ? removed.items[item].status : ItemStatus::kFailed;
    ++item;
    if (status == ItemStatus::kOk || status == ItemStatus::kMissing) {
      unloadable.forget(one.tag);
      forget_saved(one.saved);
    } else if (one.patient && status == ItemStatus::kInUse && one.tries < kMostTries &&
               patient < kMostPatient) {
      one.again = now + options.purge_settle;
      ++patient;
    }
  }
  std::erase_if(condemned,
                [&](const detail::Condemned& one) { return !one.again && one.op == removed.op; });
}

void StoreScheduler::Impl::remove_again(Instant now) {
  std::erase_if(condemned, [](const detail::Condemned& one) {
    return one.again.has_value() && one.tries >= kMostTries;  // the index refused the last one
  });
  for (detail::Condemned& one : condemned) {
    if (one.again || one.tries > 1) unloadable.add(one.tag, now);
    if (!one.again || now < *one.again) continue;
    ++one.tries;
    const auto op = desk.remove({false, false}, now, now + options.lookup_timeout,
                                [&](KeySlots& keys) { keys.append() = one.key; });
    if (op) {
      one.op = *op;
      one.again.reset();
    } else {
      one.again = now + options.purge_settle;
    }
  }
}

void StoreScheduler::Impl::note_mismatches(Load& load, Rank rank,
                                           std::span<const FailedChunk> failed) {
  for (const FailedChunk& chunk : failed) {
    const auto status = static_cast<ItemStatus>(chunk.status);
    if (status == ItemStatus::kChecksumMismatch || status == ItemStatus::kSizeMismatch)
      load.mismatches.emplace_back(rank, chunk);
  }
}

void StoreScheduler::Impl::sort_mismatches(Load& load) {
  const auto order = [](const std::pair<Rank, FailedChunk>& found) {
    const auto& [rank, chunk] = found;
    const bool damaged = static_cast<ItemStatus>(chunk.status) == ItemStatus::kChecksumMismatch;
    return std::tuple(raw(chunk.group), chunk.chunk, !damaged, raw(rank));
  };
  auto& found = load.mismatches;
  std::sort(found.begin(), found.end(),
            [&](const auto& a, const auto& b) { return order(a) < order(b); });
  found.erase(std::unique(found.begin(), found.end()), found.end());
}

detail::SavedTags StoreScheduler::Impl::saved_tags(const Request& request, std::uint32_t from) {
  detail::SavedTags tags{};
  const std::uint32_t unit = aligned(from);
  if ((unit + step_tokens) / hash_tokens <= hash_count(request)) tags[0] = tag_at(request, unit);
  const PromptEnd prompt = end_of(request);
  if (prompt.proof != 0 && prompt.proof / hash_tokens <= hash_count(request))
    tags[1] = end_tag(request, prompt);
  return tags;
}

void StoreScheduler::Impl::forget_saved(const detail::SavedTags& tags) {
  for (const std::uint64_t tag : tags) {
    if (tag != 0) saved_prefixes.forget(tag);
  }
}

void StoreScheduler::Impl::remove_mismatched(const Request& request, const Load& load,
                                             Instant now) {
  constexpr std::size_t kMostEvents = 16;  // the record shall still hold what led here
  std::size_t events = 0;
  std::vector<detail::Condemned> going;
  const auto remove = [&](ItemStatus status, bool leased) {
    going.clear();
    const auto fill = [&](KeySlots& keys) {
      for (const auto& [rank, chunk] : load.mismatches) {
        if (static_cast<ItemStatus>(chunk.status) != status) continue;
        if (events++ < kMostEvents)
          flight.add(now, FlightKind::kMismatch, raw(load.request), raw(chunk.group), chunk.chunk);
        const std::uint32_t first = chunk.chunk * groups[raw(chunk.group)].chunk_tokens;
        const std::uint32_t tokens = mark_of(chunk.group, chunk.chunk, load.hit, load.tails);
        if (tokens / hash_tokens > hash_count(request)) continue;
        const auto hash = hashes_of(request)[tokens / hash_tokens - 1];
        // The other ranks' are as they should be, and somebody may be reading them.
        const RankPosition reader = rank_position(rank, projection().parallel());
        schema->append_key(keys, chunk.group, schema->shard_of(chunk.group, reader), hash);
        going.push_back({{},
                         detail::RecentPrefixes::tag_of(hash, chunk.group),
                         saved_tags(request, first),
                         keys[keys.size() - 1],
                         !leased});
        forget_saved(going.back().saved);
      }
    };
    const auto op = desk.remove({false, leased}, now, now + options.lookup_timeout, fill);
    for (detail::Condemned& one : going) {
      if (!op) break;
      one.op = *op;
      condemned.push_back(std::move(one));
    }
  };
  if (load.mismatches.empty()) return;
  counters.mismatches += load.mismatches.size();
  // Whoever reads a damaged object must not believe it; one of another size may be right for
  // somebody, and is where keys do not say what gives an object its size.
  remove(ItemStatus::kChecksumMismatch, true);
  if (schema->name() != "vllm") remove(ItemStatus::kSizeMismatch, false);
  incident("an object was not what had been stored", now);
}

void StoreScheduler::purge(Instant now) {
  const detail::RecordedCall call(impl_->recorder.get(), detail::RunCall::kPurge, now,
                                  [](detail::RunWriter) {});
  impl_->begin_purge(now);
}
PurgeStatus StoreScheduler::purge_status() const noexcept { return impl_->purge.status; }

}  // namespace kvprism
