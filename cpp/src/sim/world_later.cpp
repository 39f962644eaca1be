// Ranks that die or lag, plans and reports that are lost, restrictions that come late. Their draws
// are their own.
#include "sim/world_run.h"

#include <array>

namespace kvprism::sim {
namespace {

constexpr std::uint64_t kDeadFor = 50;  // events, at most

}  // namespace

void WorldRun::later_event() {
  if (dead_ && event_ >= dead_until_) restart();
  if (config_.later.ranks_die && !dead_ && life_.workers.size() > 1 &&
      later_random_.chance(1, 200)) {
    rank_dies();
  }
  if (config_.purges && !purging_ && again_random_.chance(1, 250)) purge_event();
  if (config_.replaces_ranks && again_random_.chance(1, 150)) replace_rank();
}

// Native code of its process goes with it: nothing of it lands any more.
void WorldRun::rank_dies() {
  dead_ = static_cast<std::uint32_t>(later_random_.below(life_.workers.size()));
  dead_until_ = event_ + static_cast<std::uint32_t>(later_random_.between(1, kDeadFor));
  trace("rank " + std::to_string(*dead_) + " dies");
  count(WorldFault::kRankGone);
  life_.judge->rank_died(*dead_);
  tell_rank_gone();
}

// Also of the jobs that a step has planned since.
void WorldRun::tell_rank_gone() {
  if (!dead_) return;
  life_.judge->rank_gone(*dead_, now_);
  life_.engine->rank_gone(Rank{*dead_}, now_);
}

// What has been computed is gone on that rank, and so are the saves in flight.
void WorldRun::replace_rank() {
  if (life_.engine->step_in_flight()) return;
  const auto rank = static_cast<std::uint32_t>(again_random_.below(life_.workers.size()));
  trace("rank " + std::to_string(rank) + " is replaced");
  count(WorldFault::kRankReplaced);
  life_.judge->rank_died(rank);
  life_.judge->rank_gone(rank, now_);
  graveyard_.push_back(life_.memories[rank]);
  life_.engine->replace_rank(Rank{rank}, start_rank(rank, again_random_.next()), now_);
  life_.judge->rank_replaced(rank);
  completed_.clear();
}

// A step is scheduled, and nothing of it is saved or sent.
void WorldRun::in_a_step() {
  if (config_.later.restrict_late) restrict_late();
  // The loads that it has begun are nobody's yet.
  if (dead_ && later_random_.chance(1, 2)) tell_rank_gone();
}

void WorldRun::restrict_late() {
  if (draining() || !later_random_.chance(1, 12)) return;
  count(WorldFault::kRestrictedLate);
  if (live_.empty() || later_random_.chance(1, 4)) {
    static constexpr std::array kModes{StoreMode::kOff, StoreMode::kReadOnly,
                                       StoreMode::kWriteOnly};
    set_mode(kModes[later_random_.below(kModes.size())]);
    return;
  }
  // Whoever waits for an answer may have a second question.
  RequestId request = live_[later_random_.below(live_.size())];
  if (later_random_.chance(1, 2)) request = life_.judge->asking_request().value_or(request);
  RequestAccess access = life_.judge->access(request);
  const bool load = later_random_.chance(1, 2);
  (load ? access.load : access.save) = false;
  trace("request " + std::to_string(raw(request)) + " may no longer " + (load ? "load" : "save"));
  life_.scheduler->restrict(request, access);
  life_.judge->restrict(request, access);
}

bool WorldRun::loses_report() {
  if (!config_.later.lose_reports || draining() || !later_random_.chance(1, 30)) return false;
  trace("a report is lost");
  count(WorldFault::kReportLost);
  return true;
}

// Ranks, as bits, that do not move this time; one at least does.
std::uint32_t WorldRun::draw_still() {
  const std::uint64_t ranks = life_.workers.size();
  if (!config_.later.lag || draining() || ranks < 2 || !later_random_.chance(1, 2)) return 0;
  count(WorldFault::kLag);
  const std::uint32_t all = (1u << ranks) - 1;
  return static_cast<std::uint32_t>(1 + later_random_.below(all - 1));
}

}  // namespace kvprism::sim
