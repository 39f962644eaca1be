// What must be true of the whole after every event, and in the end.
#include "sim/world_run.h"

#include <algorithm>

namespace kvprism::sim {
namespace {

constexpr std::uint32_t kDrainTurns = 5000;

}  // namespace

void WorldRun::check() {
  const std::string engine = life_.engine->check();
  if (!engine.empty()) {
    const std::size_t colon = engine.find(':');
    fail(engine.substr(0, colon), engine.substr(colon + 2));
  }
  if (!life_.judge->broken().empty()) fail(life_.judge->invariant(), life_.judge->broken());
  for (const auto& flight : life_.flights) {
    if (!flight->broken().empty()) fail("in flight", flight->broken());
  }
  check_purge();
  const std::string removals = life_.judge->check_removals();
  if (!removals.empty()) fail("mismatch", removals);
  const std::string references = life_.judge->check_references();
  if (!references.empty()) fail("references", references);
  version_ = pool_->for_each_new_object_since(
      version_, [&](std::string_view key, std::span<const std::byte> bytes) {
        const std::string wrong = objects_.check(key, bytes);
        if (!wrong.empty()) fail("object", wrong);
        life_.judge->stored_anew(key);
        if (life_.watch->took_away(key)) count(WorldFault::kObjectReplaced);
        if (!config_.erase_objects) return;
        if (keys_.size() < 128) keys_.emplace_back();
        keys_[random_.below(keys_.size())] = key;
      });
  changes_.clear();
  life_.scheduler->take_changes(changes_);
  count(WorldFault::kAnnounced, changes_.size());
  for (const StoreChange& change : changes_) life_.judge->told(change);
  if (!life_.judge->broken().empty()) fail(life_.judge->invariant(), life_.judge->broken());
  if (event_ % 128 == 0) verify();
}

// Nothing may be saved before it is done, so that whatever lies there then is older.
void WorldRun::check_purge() {
  if (!purging_ || life_.scheduler->purge_status().active()) return;
  purging_ = false;
  life_.judge->purge_done();
  count(WorldFault::kPurged);
  objects_.forget_stored();
  pool_->for_each_object([&](std::string_view key, std::span<const std::byte> bytes) {
    if (!landed_in_purge_) fail("purge", "an object is left: " + std::string(key));
    const std::string wrong = objects_.check(key, bytes);
    if (!wrong.empty()) fail("object", wrong);
  });
}

// The slow way to the same answer as the shadow's: everything believed, against the oracle.
void WorldRun::verify() {
  const VerifyResult all = life_.engine->verify_all();
  if (all.mismatched != 0) {
    fail("oracle", std::to_string(all.mismatched) + " of " + std::to_string(all.bytes) +
                       " believed bytes are wrong: " + all.first);
  }
}

bool WorldRun::drained() const {
  return life_.engine->idle() && life_.scheduler->tracked() == 0 && queue_.empty() &&
         channel_.empty() && ghosts_.empty() && !life_.scheduler->purge_status().active();
}

// No more work and no more faults: everything must come to its end.
void WorldRun::drain() {
  if (dead_) restart();
  life_.index->set_plan(FaultPlan{});
  for (const auto& injector : life_.injectors) injector->set_plan(FaultPlan{});
  for (std::uint32_t turn = 0; turn < kDrainTurns && result_.passed && !drained(); ++turn) {
    ++event_;
    now_ = now_ + milliseconds(2);
    life_.judge->set_now(now_);
    release_hung();
    step_event();
    pump_event();
    for (HeldReport& held : queue_) held.due = now_;
    deliver_event();
    take_finished();
    check();
  }
  if (!result_.passed) return;
  if (!drained()) {
    fail("drain", "never ends: " + life_.engine->describe() + ", " +
                      std::to_string(life_.scheduler->tracked()) + " tracked, " +
                      std::to_string(queue_.size()) + " reports");
    return;
  }
  verify();
  const std::string ended = life_.judge->check_ended();
  if (!ended.empty()) fail("drain", ended);
  for (const auto& worker : life_.workers) {
    const StoreWorkerCounters counters = worker->counters();
    if (counters.jobs_alive == 0 && counters.unquiet_calls == 0) continue;
    fail("drain", "a worker still knows " + std::to_string(counters.jobs_alive) + " jobs and " +
                      std::to_string(counters.unquiet_calls) + " calls that are not quiet");
  }
  const LedgerCounters ledger = life_.scheduler->counters().ledger;
  if (ledger.blocks_held != 0 || ledger.blocks_in_quarantine != 0) {
    fail("drain", "the ledger still holds " + std::to_string(ledger.blocks_held) + " blocks");
  }
  check_pool();
  for (const Completed& done : completed_) check_stored(done);
}

// What was right when it was stored has not changed since.
void WorldRun::check_pool() {
  pool_->for_each_object([&](std::string_view key, std::span<const std::byte> bytes) {
    const std::string wrong = objects_.check(key, bytes);
    if (!wrong.empty()) fail("object", "in the end, " + wrong);
  });
}

// What a finished request has computed must be there for whoever comes next.
void WorldRun::check_stored(const Completed& done) {
  TokenTrail trail(projection_->hash_block_size());
  trail.append(done.tokens);
  // Drafts that the last step accepts are told to nobody; with states there are none.
  const bool states =
      std::any_of(objects_.groups().begin(), objects_.groups().end(),
                  [](const GroupModel& group) { return group.kind == GroupModel::Kind::kState; });
  const std::uint32_t untold = states ? 0 : config_.engine.draft_tokens;
  const std::uint32_t computed = trail.size() - 1 - std::min(trail.size() - 1, untold);
  const bool drafts = model_drafts(objects_.groups());
  const std::uint32_t replay = model_replay(objects_.groups());
  const std::uint32_t behind = drafts ? step_tokens_ : 0;  // an object that proves the prefix
  const std::uint32_t steps = computed - computed % step_tokens_;
  const std::uint32_t last = steps - std::min(steps, behind);
  const auto retention = projection_->retention_interval();
  const auto before = [&](std::uint32_t tokens) {
    const std::uint32_t whole = tokens - tokens % step_tokens_;
    return whole - std::min(whole, behind);
  };
  // Where a prefill stops for its state.
  const std::uint32_t stop = drafts ? (done.prompt == 0 ? 0 : before(done.prompt)) : steps;
  check_stored(done, trail, last,
               {.windows = !retention, .states = last == stop && (!drafts || done.start < stop)});
  // A draft's prompt ends a unit behind it, where a window may have moved on.
  if (objects_.alignment() < step_tokens_) {
    const std::uint32_t end = model_checkpoint(done.prompt, objects_.alignment(), drafts, replay);
    // One that has found more does not stop there.
    check_stored(
        done, trail, end,
        {.windows = !drafts, .states = !drafts || done.start < end, .only_these = !drafts});
  }
  // Of a request that has started more than once it is not known here what it was looked up for.
  if (!retention || done.prompt == 0) return;
  if (done.junction != 0) count(WorldFault::kJunction);
  const Asked windows{.windows = true, .states = false};
  if (*retention != 0) check_stored(done, trail, last - last % *retention, windows);
  // Where the same prompt starts when it comes again, where it did if a token were enough to
  // compute, a longer one, and one that leaves it where this one left another.
  const std::uint32_t again = done.prompt - std::min(done.prompt, replay);
  for (const std::uint32_t end :
       {std::min(again - again % step_tokens_, drafts ? before(done.prompt) : UINT32_MAX),
        before(done.prompt - 1), drafts ? before(done.prompt) : 0, before(done.junction)}) {
    // Of one that has found more the window before it came from nowhere.
    if (end <= last && end >= done.start) check_stored(done, trail, end, windows);
  }
}

void WorldRun::check_stored(const Completed& done, const TokenTrail& trail, std::uint32_t end,
                            const Asked& asked) {
  if (end == 0) return;
  using Behind = ObjectJudge::Behind;
  const std::uint32_t known =
      asked.only_these ? end : trail.num_hashes() * projection_->hash_block_size();
  const std::uint32_t most = known / objects_.alignment() * objects_.alignment();
  for (const auto& missing : objects_.missing(trail, 0, end, most, Behind::kStored)) {
    const GroupModel& group = objects_.groups()[raw(missing.group)];
    const bool window = group.kind == GroupModel::Kind::kWindow;
    if (window && !asked.windows) continue;
    // Of a window of one token the engine's own cache keeps no block that could be saved again.
    if (window && group.window == 1 && (done.prompt == 0 || end <= done.start)) continue;
    // What was computed while a purge ran is in the engine's own cache only: whoever finds it there
    // neither has the window before it nor comes by its states.
    const bool state = group.kind == GroupModel::Kind::kState;
    if (config_.purges && ((window && end < done.found) || (state && end <= done.found))) continue;
    // Accepted drafts carry a request past the end of an attention chunk, whose blocks are gone
    // then.
    if (group.kind == GroupModel::Kind::kChunk && config_.engine.draft_tokens != 0) continue;
    // A hit at the end of such a chunk needs nothing of it.
    if (group.kind == GroupModel::Kind::kChunk && end < done.start) continue;
    // And past a window's end by as many, before the step that saves it.
    if (window && end > done.size &&
        missing.chunk < group.first_needed(end + config_.engine.draft_tokens)) {
      continue;
    }
    // Behind a step the block that proves a draft's window is gone before the next step is full.
    const bool behind = missing.chunk >= group.chunks(end);
    if (behind && group.kind != GroupModel::Kind::kFull && group.tokens < step_tokens_) continue;
    // A request that leaves before its next step never offers its last state, and long steps pass
    // states by.
    // One that begins with a hit inside the next block never comes by there.
    if (state && end < done.start) continue;
    if (state &&
        (!asked.states || config_.engine.offer_states_late || !config_.engine.aligned_steps))
      continue;
    // Nor are generated tokens whose blocks are gone before a step is full.
    if (group.gap_window != 0 && missing.chunk >= group.chunks(done.size)) continue;
    fail("not stored", "a request of " + std::to_string(trail.size() - 1) +
                           " computed tokens is not stored up to " + std::to_string(end) +
                           ": group " + std::to_string(raw(missing.group)) + ", chunk " +
                           std::to_string(missing.chunk) + " of request " +
                           std::to_string(raw(done.id)));
  }
}

}  // namespace kvprism::sim
