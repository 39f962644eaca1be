// What an engine or a network does that it should not, and purges.
#include "sim/world_run.h"

#include <array>

namespace kvprism::sim {

void WorldRun::noise_event() {
  StoreScheduler& scheduler = *life_.scheduler;
  switch (random_.below(8)) {
    case 7:
      if (!config_.clean) mode_event();
      break;
    case 6:
      if (!config_.clean) purge_event();
      break;
    case 0: {
      trace("calls for an unknown request");
      count(WorldFault::kUnknownRequest);
      const RequestId unknown{1'000'000 + random_.below(100)};
      scheduler.finished(unknown, FinishReason::kAborted);
      scheduler.preempted(unknown);
      scheduler.boundary(unknown, GroupId{0}, BlockId{1}, step_tokens_);
      if (!scheduler.wants_save(unknown, now_).empty())
        fail("unknown request", "it wants to be saved");
      break;
    }
    case 1:
      if (live_.empty()) break;
      trace("a state is offered in the null block");
      count(WorldFault::kNullOffer);
      for (const GroupModel& group : objects_.groups()) {
        scheduler.boundary(live_[random_.below(live_.size())], group.id, kNullBlock, step_tokens_);
      }
      break;
    case 2:
      // A purge takes what has tokens for older than itself, also where there are none.
      if (live_.empty() || life_.engine->step_in_flight() || config_.purges) break;
      trace("accepted tokens shrink");
      count(WorldFault::kShrunk);
      scheduler.advanced(live_[random_.below(live_.size())],
                         static_cast<std::uint32_t>(random_.below(4)), HashList{});
      break;
    case 3: {
      trace("garbage instead of a report");
      count(WorldFault::kReportGarbage);
      std::vector<std::byte> garbage(8 * random_.below(12));
      for (std::byte& byte : garbage) byte = static_cast<std::byte>(random_.next());
      scheduler.report(std::span<const std::byte>(garbage), now_);
      break;
    }
    case 4: {
      if (stale_.empty()) break;
      const WorkerReport& old = stale_[random_.below(stale_.size())];
      trace("an old report again");
      count(old.epoch == life_.epoch ? WorldFault::kReportDuplicated : WorldFault::kReportForeign);
      encode(old, encoded_);
      life_.engine->deliver(encoded_, now_);
      break;
    }
    default:
      foreign_plan();
      break;
  }
}

void WorldRun::purge_event() {
  trace("purge");
  count(WorldFault::kPurge);
  life_.judge->purged();
  life_.engine->purge(now_);
  purging_ = true;
  landed_in_purge_ = false;
  if (!config_.clean) return;
  count(WorldFault::kCleanPurge);
  // As an engine does whose weights have changed: nothing rests on what was computed before.
  life_.engine->empty_cache();
  completed_.clear();
}

void WorldRun::mode_event() {
  static constexpr std::array kModes{StoreMode::kOff, StoreMode::kReadOnly, StoreMode::kWriteOnly};
  set_mode(kModes[random_.below(kModes.size())]);
}

void WorldRun::set_mode(StoreMode mode) {
  trace("mode " + std::string(to_string(mode)));
  count(WorldFault::kModeChanged);
  mode_ = mode;
  life_.scheduler->set_mode(mode);
  life_.judge->set_mode(mode);
}

// A plan that is not the next one of this worker's scheduler must be refused, whatever is wrong.
void WorldRun::foreign_plan() {
  const auto rank = static_cast<std::uint32_t>(random_.below(life_.workers.size()));
  if (rank == dead_) return;  // it may not have had the latest one
  trace("a foreign plan");
  count(WorldFault::kPlanForeign);
  const std::uint32_t chunk_tokens = projection_->group(StoreIndex{0}).tokens_per_block;
  StepPlan plan;
  plan.digest = schema_->plan_digest();
  plan.epoch = life_.epoch;
  plan.step = UINT64_MAX;
  plan.hash_width = sizeof(BlockHash);
  plan.jobs.push_back({JobId{(std::uint64_t{1} << 60) + random_.below(1000)}, RequestId{1},
                       JobKind::kLoad, 0, 1, 0, seconds(1)});
  plan.runs.push_back({StoreIndex{0}, 0, 1, 0, 0, chunk_tokens});
  plan.ids.push_back(BlockId{1});
  plan.mark_tokens.push_back(chunk_tokens);
  plan.mark_hashes.assign(sizeof(BlockHash), 7);
  static constexpr std::array<const char*, 7> kWhat{
      "another digest", "an unknown block",      "the null block", "an unknown group",
      "a shifted mark", "a partly filled chunk", "another epoch"};
  // The epoch is known only once a first plan has come; it may have been lost.
  const std::uint64_t wrong = random_.below(life_.judge->had_job(rank) ? kWhat.size() : 6);
  if (wrong == 0) plan.digest.bytes[random_.below(plan.digest.bytes.size())] ^= 1;
  if (wrong == 1) plan.ids[0] = BlockId{static_cast<std::int32_t>(projection_->num_blocks())};
  if (wrong == 2) plan.ids[0] = kNullBlock;
  if (wrong == 3) {
    const auto groups = static_cast<std::uint32_t>(projection_->num_store_groups());
    plan.runs[0].group = StoreIndex{groups};
  }
  if (wrong == 4) plan.mark_tokens[0] += chunk_tokens;
  if (wrong == 5) --plan.runs[0].valid_tokens_last;
  if (wrong == 6) plan.epoch ^= 2;
  StoreWorker& worker = *life_.workers[rank];
  const SubmitResult answer = worker.submit(plan.view(), ReadyToken::host());
  if (answer.accepted) {
    fail("foreign plan", std::string("a worker takes a plan with ") + kWhat[wrong]);
  } else if (answer.refusal.empty()) {
    fail("foreign plan", "a worker refuses a plan without a reason");
  }
  const auto& last = life_.judge->last_plan();
  if (last.empty()) return;
  count(WorldFault::kPlanRepeated);
  if (worker.submit(last, ReadyToken::host()).accepted) {
    fail("foreign plan", "a worker takes a plan twice");
  }
}

}  // namespace kvprism::sim
