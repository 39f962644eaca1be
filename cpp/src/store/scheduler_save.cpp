// Saves: what is ready, from where its bytes come, what to do when the store refuses them.
#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <optional>

#include "kvprism/base/log.h"
#include "store/scheduler_impl.h"

namespace kvprism {
namespace {

using detail::Offer;
using detail::Request;
using detail::Save;
using detail::state_mark;

}  // namespace

// Two states in one chunk cannot be told apart by it: both count as failed.
bool StoreScheduler::Impl::state_failed(std::uint64_t mark, const JobEvent& end) const {
  return std::any_of(end.failed.begin(), end.failed.end(), [&](const FailedChunk& chunk) {
    const std::uint32_t chunk_tokens = groups[raw(chunk.group)].chunk_tokens;
    const std::uint64_t first = state_mark(chunk.group, chunk.chunk * chunk_tokens);
    return first < mark && mark <= first + chunk_tokens;
  });
}

bool StoreScheduler::Impl::choose_chunks(const Request& request) {
  std::optional<std::uint32_t> retention = projection().retention_interval();
  // Where a prompt can be replayed from is not known without its length.
  if (request.prompt_tokens == 0) retention.reset();
  ReplayBoundaries boundaries;
  if (retention) {
    boundaries = replay_boundaries(request.prompt_tokens, step_tokens, has_drafts,
                                   projection().replay_tokens());
    // Whoever comes next may leave there too (W-C19). Hits with drafts end one step earlier.
    const std::uint32_t junction =
        request.junction - std::min(request.junction, has_drafts ? step_tokens : 0);
    if (junction != 0) boundaries.add(junction);
  }
  masks.clear();
  bool thinned = false;
  for (const HitGroup& group : groups) {
    masks.emplace_back(group, search.grid(), retention, boundaries);
    thinned |= !masks.back().all();
  }
  return retention && thinned;
}

// Whether a step of S tokens that somebody has stored holds nothing that is kept for this request
// alone.
bool StoreScheduler::Impl::is_known(const Request& request, std::uint32_t from, bool thinned,
                                    Instant now) const {
  if (!saved_prefixes.contains(tag_at(request, from), now)) return false;
  for (std::size_t g = 0; thinned && g < groups.size(); ++g) {
    if (masks[g].all()) continue;
    const std::uint32_t end = (from + step_tokens) / groups[g].chunk_tokens;
    for (std::uint32_t chunk = from / groups[g].chunk_tokens; chunk < end; ++chunk) {
      if (masks[g].keeps(chunk)) return false;
    }
  }
  return true;
}

// Adds the positional sources of `range` and returns up to where they are without a hole.
std::uint32_t StoreScheduler::Impl::add_sources(const Request& request, const TokenRange& range,
                                                const BlockRows& rows) {
  std::uint32_t reached = range.to;
  for (const StoreIndex index : indices<StoreIndex>(groups.size())) {
    const HitGroup& group = groups[raw(index)];
    const GroupId id = projection().group_id(index);
    for (std::uint32_t chunk = ranges[raw(index)].first; chunk < ranges[raw(index)].end; ++chunk) {
      if (!masks[raw(index)].keeps(chunk)) continue;
      if (usable_block(rows, id, chunk) && is_written(request, group, chunk)) {
        builder.add_chunk(index, chunk, group.chunk_tokens, rows[id][chunk]);
        continue;
      }
      // A window's table loses its oldest blocks in place (R05); of a prefix every chunk is needed.
      ++counters.sources_skipped;
      if (group.rule != HitRule::kPrefix) continue;
      reached = std::min(reached, aligned(chunk * group.chunk_tokens));
      break;  // what lies behind it is of no use (R50)
    }
  }
  return reached;
}

// What can fail comes first: a job whose blocks nobody has taken would give back others', and one
// that is in no plan would keep its own.
void StoreScheduler::Impl::start_save(Save save, bool references_held) {
  const auto blocks = builder.blocks();
  if (options.tell_changes) note_chunks(save);
  make_room_for_ends(blocks.size());
  if (!references_held) detail::make_room(acquired, blocks.size());
  builder.make_room();
  const RequestId id = save.request;
  const Instant now = save.planned_at;
  const std::uint32_t to = save.range.to;
  const JobId job =
      start_job(JobKind::kSave, id, blocks, detail::ledger_deadline(now, options.save_timeout),
                saves, std::move(save));
  if (!references_held) acquired.insert(acquired.end(), blocks.begin(), blocks.end());
  builder.finish(job, id, JobKind::kSave, options.save_timeout);
  flight.add(now, FlightKind::kSave, raw(id), raw(job), to);
  ++counters.saves;
}

void StoreScheduler::Impl::plan_offers(Instant now) {
  if (offers.empty()) return;
  if (now < backoff_until || !may_save() || holds_too_much()) {
    drop_offers();
    return;
  }
  begin_plan();
  // hash_at keeps the order in which the engine offered them.
  std::sort(offers.begin(), offers.end(), [](const Offer& a, const Offer& b) {
    return std::pair(a.generation, a.hash_at) < std::pair(b.generation, b.hash_at);
  });
  std::size_t first = 0;
  try {
    while (first < offers.size()) first = plan_offers_of(first, now);
  } catch (...) {
    offers.erase(offers.begin(), offers.begin() + static_cast<std::ptrdiff_t>(first));
    throw;
  }
  offers.clear();
  offer_hashes.clear();
}

// All of one request, as one job.
std::size_t StoreScheduler::Impl::plan_offers_of(std::size_t first, Instant now) {
  const auto building = builder.begin();
  Save save{offers[first].request, offers[first].generation, {}, now, false, {}, {}};
  std::size_t end = first;
  for (; end < offers.size() && offers[end].generation == save.generation; ++end) {
    const Offer& offer = offers[end];
    const std::uint32_t chunk_tokens = groups[raw(offer.group)].chunk_tokens;
    builder.add_marked(offer.group, offer.tokens, chunk_tokens,
                       (offer.tokens - 1) % chunk_tokens + 1, offer.block,
                       std::span(offer_hashes).subspan(offer.hash_at, hash_width));
    save.tags.push_back(state_mark(offer.group, offer.tokens));
  }
  start_save(std::move(save), true);
  return end;
}

// A full pool takes no states either (R50).
void StoreScheduler::Impl::drop_offers() {
  for (const Offer& offer : offers) drop(offer);
  offers.clear();
  offer_hashes.clear();
}

// Their hashes stay until the step ends.
void StoreScheduler::Impl::drop_offers(RequestId id, std::uint64_t generation) {
  std::erase_if(offers, [&](const Offer& offer) {
    if (offer.request != id || offer.generation != generation) return false;
    drop(offer);
    return true;
  });
  if (offers.empty()) offer_hashes.clear();
}

// It may be offered again.
void StoreScheduler::Impl::drop(const Offer& offer) {
  ++counters.saves_dropped;
  released.push_back(offer.block);
  if (Request* const request = find(offer.request, offer.generation)) {
    std::erase(request->handed_off, state_mark(offer.group, offer.tokens));
  }
}

// What every rank has stored whole needs no second save for a while.
void StoreScheduler::Impl::remember_saved(const Save& save, const JobEvent& end, Instant now) {
  if (end.whole || (save.range.empty() && !save.prompt_end)) return;
  if (purge.status.active()) return;  // it takes these away
  if (save.prompt_end) {
    if (!end.failed.empty()) return;
    for (const std::uint64_t tag : save.tags) saved_prefixes.add(tag, now);
    return;
  }
  unit_failed.assign(save.tags.size(), false);
  for (const FailedChunk& chunk : end.failed) {
    const std::uint32_t tokens = chunk.chunk * groups[raw(chunk.group)].chunk_tokens;
    const std::size_t unit = (tokens - save.range.from) / step_tokens;
    if (tokens >= save.range.from && unit < unit_failed.size()) unit_failed[unit] = true;
  }
  for (std::size_t unit = 0; unit < save.tags.size(); ++unit) {
    if (!unit_failed[unit]) saved_prefixes.add(save.tags[unit], now);
  }
}

// A store that refuses everything, for a reason that no back-off cures, must not go unnoticed
// (R04).
void StoreScheduler::Impl::warn_of_silence(const JobEvent& end) {
  constexpr std::uint64_t kSaves = 20;
  if (counters.saved_objects != 0 || ++fruitless_saves != kSaves) return;
  const auto last = end.failed.empty()
                        ? to_string(end.outcome)
                        : to_string(static_cast<ItemStatus>(end.failed.back().status));
  log(LogLevel::kWarning,
      fmt::format("{} saves have ended and the store has taken no object: the last failure is "
                  "\"{}\"",
                  kSaves, last));
}

void StoreScheduler::Impl::end_save(const JobEvent& end, Instant now) {
  const auto it = saves.find(raw(end.job));
  if (it == saves.end()) return;
  Save save = std::move(it->second);
  saves.erase(it);
  if (options.tell_changes) if_memory([&] { tell_stored(save, end, now); });
  counters.save_time.add(now - save.planned_at);
  counters.saved_objects += end.objects;
  counters.duplicate_objects += end.duplicates;
  counters.saved_bytes += end.bytes;
  counters.save_chunks_failed += end.failed.size();

  const bool refused =
      end.outcome == JobOutcome::kExpired ||
      std::any_of(end.failed.begin(), end.failed.end(), [](const FailedChunk& chunk) {
        const auto status = static_cast<ItemStatus>(chunk.status);
        return status == ItemStatus::kNoSpace || status == ItemStatus::kUnavailable ||
               status == ItemStatus::kTimedOut;
      });
  if (!refused) {
    if (end.objects > 0) refused_saves = 0;
  } else if (++refused_saves >= options.backoff_after) {
    refused_saves = 0;
    backoff_until = now + options.backoff;
  }

  if_memory([&] { warn_of_silence(end); });
  if_memory([&] { remember_saved(save, end, now); });
  Request* const request = find(save.request, save.generation);
  if (request == nullptr) return;
  if (save.prompt_end) {
    // It serves no longer prefix: what the store has refused of it is not made up for.
    if (end.gone) request->end_planned = 0;
    return;
  }
  if (save.range.empty()) {
    // A state that was not stored may be offered again.
    for (const std::uint64_t mark : save.tags) {
      if (end.whole || state_failed(mark, end)) std::erase(request->handed_off, mark);
    }
    return;
  }
  // The watermark stops at the first hole: what lies behind one is of no use to a prefix (R50).
  std::uint32_t hole = end.whole ? save.range.from : save.range.to;
  for (const FailedChunk& chunk : end.failed) {
    hole = std::min(hole, aligned(chunk.chunk * groups[raw(chunk.group)].chunk_tokens));
  }
  hole = std::max(hole, save.range.from);
  if (hole < save.range.to && hole < request->planned) {
    // Twice as far each time: a store that stays away must not be sent the whole context at each
    // step. What ends with a rank is computed anew, and the store has not refused it.
    if (!end.gone) {
      request->retry_above =
          std::max(request->retry_above, request->planned + (request->planned - hole));
    }
    request->planned = hole;
  }
}

StoreScheduler::Impl::SaveDue StoreScheduler::Impl::due(RequestId id, Instant now) {
  Request* const request = find(id);
  if (request == nullptr || !may_save() || !request->access.save || request->purged ||
      now < backoff_until) {
    return {};
  }
  const std::uint32_t to = aligned(computed(*request));
  const bool steps = to > request->planned && to > request->retry_above;
  const PromptEnd end = end_due(*request, steps ? to : request->planned, now);
  if (!steps && end.proof == 0) return {};
  if (holds_too_much()) {
    ++counters.saves_held_back;
    return {};
  }
  const bool retains = steps && projection().retention_interval().has_value();
  const bool thinned = retains && choose_chunks(*request);
  // Without its prompt's length a request keeps more than others have stored.
  const bool alone = retains && request->prompt_tokens == 0;
  while (steps && !alone && request->planned < to &&
         is_known(*request, request->planned, thinned, now)) {
    request->planned += step_tokens;
    ++counters.saves_known;
  }
  return {request, steps ? TokenRange{request->planned, to} : TokenRange{}, end};
}

TokenRange StoreScheduler::wants_save(RequestId id, Instant now) noexcept {
  Impl& s = *impl_;
  detail::RecordedCall call(s.recorder.get(), detail::RunCall::kWantsSave, now,
                            [&](detail::RunWriter w) { w.put(raw(id)); });
  const auto [request, steps, end] = s.due(id, now);
  TokenRange wanted = steps;
  if (end.proof != 0) {
    const std::uint32_t from = s.aligned(end.boundary);
    wanted = steps.empty() ? TokenRange{from, end.proof}
                           : TokenRange{std::min(steps.from, from), std::max(steps.to, end.proof)};
  }
  call.result(wanted.from, wanted.to);
  return wanted;
}

bool StoreScheduler::saves_paused(Instant now) const noexcept {
  const Impl& s = *impl_;
  return !s.may_save() || now < s.backoff_until || s.holds_too_much();
}

void StoreScheduler::save(RequestId id, const TokenRange& range, const BlockRows& rows,
                          Instant now) {
  Impl& s = *impl_;
  const detail::RecordedCall call(s.recorder.get(), detail::RunCall::kSave, now,
                                  [&](detail::RunWriter w) {
                                    w.put(raw(id));
                                    w.put(range.from);
                                    w.put(range.to);
                                    w.rows(rows);
                                  });
  auto [request, steps, end] = s.due(id, now);
  steps.to = std::min(steps.to, s.aligned(range.to));
  if (range.to < end.proof) end = {};
  if (steps.empty() && end.proof == 0) return;
  if (rows.size() != s.projection().num_groups()) {
    // Rows of a projection would name other groups' blocks.
    ++s.counters.tables_refused;
    return;
  }
  if (!steps.empty()) s.plan_steps(id, *request, steps, rows, now);
  if (end.proof != 0) s.plan_end(id, *request, end, rows, now);
}

void StoreScheduler::Impl::plan_steps(RequestId id, Request& request, const TokenRange& wanted,
                                      const BlockRows& rows, Instant now) {
  begin_plan();
  const auto building = builder.begin();
  ranges.clear();
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const std::uint32_t chunk_tokens = groups[g].chunk_tokens;
    ranges.push_back(save_rules[g] == SaveRule::kPositional
                         ? ChunkRange{wanted.from / chunk_tokens, wanted.to / chunk_tokens}
                         : ChunkRange{});
  }
  add_marks(request);
  choose_chunks(request);
  const std::uint64_t skipped_before = counters.sources_skipped;
  const std::uint32_t reached = add_sources(request, wanted, rows);
  if (!builder.runs().empty()) {
    Save save{id, request.generation, wanted, now, false, {}, {}};
    // Another request may need what this one left out.
    if (counters.sources_skipped == skipped_before) {
      save.tags.reserve((wanted.to - wanted.from) / step_tokens);
      for (std::uint32_t from = wanted.from; from < wanted.to; from += step_tokens)
        save.tags.push_back(tag_at(request, from));
    }
    start_save(std::move(save), false);
  }
  request.planned = reached;
  // As in end_save: what is missing may never come, and the range would grow with the context.
  if (reached < wanted.to) request.retry_above = wanted.to + (wanted.to - reached);
}

void StoreScheduler::boundary(RequestId id, GroupId group, BlockId block, std::uint32_t tokens) {
  Impl& s = *impl_;
  const detail::RecordedCall call(s.recorder.get(), detail::RunCall::kBoundary, s.last_step_at,
                                  [&](detail::RunWriter w) {
                                    w.put(raw(id));
                                    w.put(raw(group));
                                    w.put(raw(block));
                                    w.put(tokens);
                                  });
  Request* const request = s.find(id);
  const std::optional<StoreIndex> index = s.projection().store_index(group);
  if (!s.may_save() || !index) return;
  if (request != nullptr && (!request->access.save || request->purged)) return;
  const HitGroup& hit_group = s.groups[raw(*index)];
  const bool known = request != nullptr && tokens > 0 && tokens <= s.named(*request);
  const bool block_ok =
      raw(block) > 0 && static_cast<std::uint32_t>(raw(block)) < s.projection().num_blocks();
  // A state where no hit may end serves none.
  if (!known || !block_ok || s.save_rules[raw(*index)] != SaveRule::kHandOff ||
      tokens % s.search.grid().alignment != 0 || tokens % hit_group.unit_tokens != 0) {
    ++s.counters.offers_refused;
    return;
  }
  // An engine offers a state again when it computes it again, e.g. after a preemption.
  const std::uint64_t mark = state_mark(*index, tokens);
  auto& handed_off = request->handed_off;
  if (std::binary_search(handed_off.begin(), handed_off.end(), mark)) return;
  const auto hash = s.hashes_of(*request)[tokens / s.hash_tokens - 1];
  // What can fail comes first: an offer's block must have been taken.
  detail::make_room(handed_off, 1);
  detail::make_room(s.offers, 1);
  detail::make_room(s.offer_hashes, hash.size());
  detail::make_room(s.acquired, 1);
  s.make_room_for_ends(1);
  handed_off.insert(std::lower_bound(handed_off.begin(), handed_off.end(), mark), mark);
  s.offers.push_back({id, request->generation, *index, block, tokens, s.offer_hashes.size()});
  s.offer_hashes.insert(s.offer_hashes.end(), hash.begin(), hash.end());
  s.acquired.push_back(block);
}

}  // namespace kvprism
