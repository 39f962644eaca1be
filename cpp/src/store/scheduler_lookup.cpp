// Questions to the index: asked once a step, answered later, late is a miss (decision 9).
#include "store/scheduler_impl.h"

namespace kvprism {
namespace {

using detail::kLookupKeysPerCall;
using detail::Lookup;
using detail::LookupState;
using detail::Request;

}  // namespace

void StoreScheduler::Impl::ask(RequestId id, Request& request, std::uint32_t local,
                               std::uint32_t probed, std::uint32_t max, Instant now) {
  Lookup& lookup = request.lookup;
  if (lookup.state != LookupState::kQueued) queued.push_back(id);
  lookup.state = LookupState::kQueued;
  lookup.serial = next_serial++;
  lookup.asked_local = local;
  lookup.probed = probed;
  lookup.max = max;
  lookup.hit = local;
  lookup.tails.clear();
  lookup.at = now;
}

void StoreScheduler::Impl::take_answers(Instant now) {
  desk.poll(now, answers);
  detail::make_room(second_rounds, answers.size());  // an answer is taken once
  for (detail::Answer& answer : answers) {
    Request* const request = find(answer.request);
    if (answer.failed) ++counters.lookups_failed;
    if (answer.asked) lookups_fail = answer.failed;
    const bool awaited = request != nullptr && request->lookup.serial == answer.serial &&
                         request->lookup.state == LookupState::kInFlight;
    // In another mode by now, or restricted, the store is not asked again: what is proven stands.
    const bool restricted = request != nullptr && !request->access.load;
    const bool open = answer.first_round != nullptr && may_load() && !restricted;
    if (!open)
      flight.add(now, FlightKind::kAnswered, raw(answer.request), answer.hit,
                 answer.failed ? 1 : 0);
    if (!awaited) continue;
    if (options.tell_changes) if_memory([&] { tell_gone(*request, answer); });
    request->lookup.hit = answer.hit;
    if (answer.shared > answer.hit) request->junction = answer.shared;
    if (answer.first_round == nullptr && answer.asked && !answer.failed)
      save_anew(answer.request, *request, answer);
    request->lookup.tails = std::move(answer.tails);
    if (open) {
      second_rounds.push_back(std::move(answer));
      continue;
    }
    request->lookup.state = LookupState::kDone;
    counters.lookup_time.add(now - request->lookup.at);
    request->lookup.at = now;
  }
  answers.clear();
  if (!second_rounds.empty()) ask_again(now);
}

// Whoever is told of nothing goes on without it: a second round would be asked for nobody.
void StoreScheduler::Impl::drop_question(RequestId id) noexcept {
  Request* const request = find(id);
  if (request == nullptr) return;
  LookupState& state = request->lookup.state;
  if (state == LookupState::kQueued || state == LookupState::kInFlight) state = LookupState::kNone;
}

// What first rounds have left open, at once: a step's wait is more than a call.
void StoreScheduler::Impl::ask_again(Instant now) {
  std::vector<detail::Answer> open;
  std::swap(open, second_rounds);
  for (std::size_t next = 0; next < open.size();) {
    questions.clear();
    std::uint64_t keys = 0;
    for (; next < open.size(); ++next) {
      keys += open[next].first_round->keys;
      if (keys > kLookupKeysPerCall && !questions.empty()) break;
      const Request& request = *find(open[next].request);
      const Lookup& lookup = request.lookup;
      questions.push_back({open[next].request, lookup.serial, lookup.asked_local, lookup.probed,
                           lookup.max, hashes_of(request), std::move(open[next].first_round)});
    }
    desk.ask(questions, {unloadable, unreached}, now, now + options.lookup_timeout, answers);
  }
  // Of calls that were refused.
  if (!answers.empty()) take_answers(now);
}

void StoreScheduler::Impl::forget_questions() {
  for (const RequestId id : queued) {
    Request* const request = find(id);
    if (request != nullptr && request->lookup.state == LookupState::kQueued)
      request->lookup.state = LookupState::kNone;
  }
  queued.clear();
}

// All of the step as one call.
void StoreScheduler::Impl::send_questions(Instant now) {
  if (!may_load()) return;
  questions.clear();
  std::size_t taken = 0;
  std::uint64_t keys = 0;
  for (; taken < queued.size(); ++taken) {
    const RequestId id = queued[taken];
    Request* const request = find(id);
    if (request == nullptr || request->lookup.state != LookupState::kQueued) continue;
    Lookup& lookup = request->lookup;
    keys += desk.most_keys(lookup.asked_local, lookup.probed);
    // The others ask in the next step: a call as large as all of them would be late for all, and
    // making its keys would hold up the step.
    if (keys > kLookupKeysPerCall && !questions.empty()) break;
    lookup.state = LookupState::kInFlight;
    lookup.at = now;
    flight.add(now, FlightKind::kAsked, raw(id), lookup.asked_local, lookup.max);
    questions.push_back(
        {id, lookup.serial, lookup.asked_local, lookup.probed, lookup.max, hashes_of(*request)});
  }
  queued.erase(queued.begin(), queued.begin() + static_cast<std::ptrdiff_t>(taken));
  desk.ask(questions, {unloadable, unreached}, now, now + options.lookup_timeout, answers);
  take_answers(now);
}

LookupResult StoreScheduler::lookup(RequestId id, std::uint32_t prompt_tokens,
                                    const HashList& hashes, std::uint32_t local_tokens,
                                    Instant now) {
  Impl& s = *impl_;
  detail::RecordedCall call(s.recorder.get(), detail::RunCall::kLookup, now,
                            [&](detail::RunWriter w) {
                              w.put(raw(id));
                              w.put(prompt_tokens);
                              w.put(local_tokens);
                              w.hashes(hashes);
                            });
  // Its end is saved also where nothing is loaded, and perhaps when a purge is over or the mode is
  // another one: nobody asks again.
  if ((s.fine || s.projection().retention_interval()) && s.options.saves)
    s.remember(id).prompt_tokens = prompt_tokens;
  if (!s.may_load()) return {};
  if (local_tokens % s.step_tokens != 0) {
    // An answer beyond a rounded hit would be misread as one beyond the engine's.
    ++s.counters.lookups_refused;
    return {};
  }
  const std::uint32_t known = std::min(prompt_tokens, s.named(hashes.end()));
  const std::uint32_t hashed = known - known % s.search.grid().alignment;
  const std::uint32_t max = std::min(s.projection().max_hit(prompt_tokens), hashed);
  const std::uint32_t local = local_tokens;
  // The engine's own cache covers all that may be used: no call (R79).
  if (max <= local) {
    s.drop_question(id);
    return {};
  }

  Request& request = s.remember(id);
  if (!s.take_hashes(request, hashes) || request.bypass || request.loading ||
      !request.access.load || now < s.offers_again) {
    s.drop_question(id);
    return {};
  }

  request.prompt_tokens = prompt_tokens;
  // Of a draft the object behind a hit must be there too.
  const std::uint32_t probed = s.has_drafts ? hashed : max;
  s.take_answers(now);
  Lookup& lookup = request.lookup;
  const bool stale =
      lookup.state == LookupState::kDone && now - lookup.at > s.options.lookup_fresh_for;
  if (lookup.state == LookupState::kNone || stale || local < lookup.asked_local ||
      max != lookup.max || probed != lookup.probed) {
    if (lookup.state == LookupState::kNone) ++s.counters.lookups;
    s.ask(id, request, local, probed, max, now);
  } else if (lookup.state == LookupState::kInFlight &&
             now - lookup.at >= s.options.lookup_timeout) {
    lookup.state = LookupState::kDone;  // late is a miss, but for what a first round has proven
    lookup.at = now;
    ++s.counters.lookups_late;
    s.lookups_fail = true;
  }
  lookup.engine_local = local;
  const bool pending = lookup.state != LookupState::kDone;
  const LookupResult found{pending, !pending && lookup.hit > local ? lookup.hit - local : 0};
  call.result(found.pending ? 1 : 0, found.external_tokens);
  return found;
}

}  // namespace kvprism
