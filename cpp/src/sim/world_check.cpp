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
  check_purge();
  // Of one whose request has just been aborted the scheduler knows no key.
  if (life_.judge->mismatches() >= 4 && life_.scheduler->counters().mismatches == 0)
    fail("mismatch", "a damaged object is left in its place");
  const std::string references = life_.judge->check_references();
  if (!references.empty()) fail("references", references);
  version_ = pool_->for_each_new_object_since(
      version_, [&](std::string_view key, std::span<const std::byte> bytes) {
        const std::string wrong = objects_.check(key, bytes);
        if (!wrong.empty()) fail("object", wrong);
        if (!config_.erase_objects) return;
        if (keys_.size() < 128) keys_.emplace_back();
        keys_[random_.below(keys_.size())] = key;
      });
  if (event_ % 128 == 0) verify();
}

// Nothing may be saved before it is done, so that whatever lies there then is older.
void WorldRun::check_purge() {
  if (!purging_ || life_.scheduler->purge_status().active()) return;
  purging_ = false;
  count(WorldFault::kPurged);
  objects_.forget_stored();
  pool_->for_each_object([&](std::string_view key, std::span<const std::byte>) {
    fail("purge", "an object is left: " + std::string(key));
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
         channel_.empty() && !life_.scheduler->purge_status().active();
}

// No more work and no more faults: everything must come to its end.
void WorldRun::drain() {
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
  for (const Completed& done : completed_) check_stored(done);
}

void WorldRun::check_stored(const Completed& done) {
  TokenTrail trail(projection_->hash_block_size());
  trail.append(done.tokens);
  const std::uint32_t computed = trail.size() - 1;
  const bool partial = objects_.alignment() < step_tokens_;
  for (const std::uint32_t end :
       {computed - computed % step_tokens_,
        partial ? model_checkpoint(done.prompt, objects_.alignment()) : 0}) {
    const auto missing = objects_.missing(trail, 0, end, end);
    if (!missing) continue;
    // A request that leaves before its next step never offers its last state, and long steps
    // pass states by.
    const GroupModel& group = objects_.groups()[raw(missing->group)];
    const bool state = group.kind == GroupModel::Kind::kState;
    // Nor are generated tokens whose blocks are gone before a step is full.
    if (group.gap_window != 0 && missing->chunk >= group.chunks(done.size)) continue;
    if (state && (config_.engine.offer_states_late || !config_.engine.aligned_steps)) continue;
    fail("not stored",
         "a request of " + std::to_string(computed) + " computed tokens is not stored up to " +
             std::to_string(end) + ": group " + std::to_string(raw(missing->group)) + ", chunk " +
             std::to_string(missing->chunk) + " of request " + std::to_string(raw(done.id)));
  }
}

}  // namespace kvprism::sim
