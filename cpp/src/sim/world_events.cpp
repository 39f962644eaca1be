// What happens in the world, one thing at a time.
#include "sim/world_run.h"

#include <algorithm>
#include <utility>

namespace kvprism::sim {

// One thing happens.
void WorldRun::event() {
  now_ = now_ + Duration{static_cast<std::int64_t>(random_.below(600'000))};
  life_.judge->set_now(now_);
  later_event();
  if (mode_ != StoreMode::kReadWrite && random_.chance(1, 40)) set_mode(StoreMode::kReadWrite);
  const std::uint64_t roll = random_.below(1000);
  if (roll < 380) {
    step_event();
  } else if (roll < 640) {
    pump_event();
  } else if (roll < 800) {
    deliver_event();
  } else if (roll < 930) {
    submit_event();
  } else if (roll < 945) {
    abort_event();
  } else if (roll < 955) {
    trace("hung operations go on");
    release_hung();
  } else if (roll < 965) {
    object_event();
  } else if (roll < 975) {
    now_ = now_ + milliseconds(static_cast<std::int64_t>(random_.between(10, 200)));
    life_.judge->set_now(now_);
    count(WorldFault::kTimeJump);
    trace("time jumps");
  } else if (roll < 998) {
    noise_event();
  } else if (config_.restarts && !(config_.clean && purging_)) {
    restart();  // a purge that is cut off may have removed anything
  }
  take_finished();
}

void WorldRun::release_hung() {
  for (const auto& injector : life_.injectors) injector->release_hung();
}

void WorldRun::step_event() {
  const std::uint64_t ranks = life_.workers.size();
  if (config_.later.lose_plans && !draining() && later_random_.chance(1, 25))
    life_.judge->lose_plan(static_cast<std::uint32_t>(later_random_.below(ranks)));
  if (life_.engine->step_in_flight()) {
    trace("finish step");
    life_.engine->finish_step(now_);
  } else {
    trace("begin step");
    life_.engine->begin_step(now_);
  }
  tell_rank_gone();
}

void WorldRun::pump_event() {
  trace("pump");
  if (life_.engine->step_in_flight()) count(WorldFault::kLateToken);
  life_.judge->hold_still(draw_still());
  life_.engine->pump(now_);
  move_ghosts();
  for (WorkerReport& report : channel_) {
    if (loses_report()) continue;
    const auto within = [&](std::uint64_t ms) {
      return now_ + Duration{static_cast<std::int64_t>(random_.below(ms * 1'000'000))};
    };
    const Instant due = within(random_.chance(1, 4) ? 40 : 8);
    queue_.push_back({report, due});
    if (random_.chance(1, 8)) {
      // At once, or when it is long forgotten.
      count(WorldFault::kReportDuplicated);
      queue_.push_back({std::move(report), random_.chance(1, 2) ? due : within(60)});
    }
  }
  channel_.clear();
}

void WorldRun::deliver_event() {
  trace("deliver");
  bytes_.clear();
  for (std::size_t i = 0; i < queue_.size();) {
    if (queue_[i].due > now_ && config_.reorder_reports) {
      ++i;
      continue;
    }
    if (queue_[i].due > now_) break;
    if (i > 0) count(WorldFault::kReportDelayed);
    const WorkerReport report = std::move(queue_[i].report);
    queue_.erase(queue_.begin() + static_cast<std::ptrdiff_t>(i));
    if (random_.chance(1, 20)) stale_.push_back(report);
    life_.judge->delivered(report, now_);
    encode(report, encoded_);
    bytes_.insert(bytes_.end(), encoded_.begin(), encoded_.end());
  }
  while (stale_.size() > 4) stale_.pop_front();
  if (!bytes_.empty()) life_.engine->deliver(bytes_, now_);
  follow_damage();
}

// Calls of engines that have ended.
void WorldRun::move_ghosts() {
  Completion done;
  for (Ghost& ghost : ghosts_) {
    while (ghost.calls->poll_store(now_, done)) {
      if (done.quiet) count(WorldFault::kLandedAfterEnd);
      landed_in_purge_ = true;
      done = Completion();
    }
  }
  std::erase_if(ghosts_, [](const Ghost& ghost) { return ghost.calls->unquiet() == 0; });
}

bool WorldRun::leaving(RequestId request) const {
  return std::find(leaving_.begin(), leaving_.end(), request) != leaving_.end();
}

void WorldRun::submit_event() {
  if (life_.engine->unfinished() >= config_.max_requests) {
    step_event();
    return;
  }
  RequestId id{next_request_++};
  if (!past_.empty() && random_.chance(1, 3)) {
    const RequestId past = past_[random_.below(past_.size())];
    if (!leaving(past) && std::find(live_.begin(), live_.end(), past) == live_.end()) {
      count(WorldFault::kIdReused);
      id = past;
    }
  }
  submit(id);
}

void WorldRun::submit(RequestId id) {
  Request request;
  request.id = id;
  const auto& base = !turns_.empty() && random_.chance(1, 3)
                         ? turns_[random_.below(turns_.size())]
                         : families_[random_.below(families_.size())];
  const std::size_t longest = std::min<std::size_t>(base.size(), config_.max_prompt);
  const std::size_t kept = random_.chance(1, 2) ? longest : random_.below(longest + 1);
  request.prompt.assign(base.begin(), base.begin() + static_cast<std::ptrdiff_t>(kept));
  const std::uint64_t more = random_.below(1 + config_.max_prompt - kept);
  for (std::uint64_t i = 0; i < std::min<std::uint64_t>(more, 24); ++i) {
    request.prompt.push_back(token());
  }
  if (request.prompt.empty()) request.prompt.push_back(token());
  submit(std::move(request));
}

// Somebody asks for what has just been found damaged.
void WorldRun::follow_damage() {
  const auto found = prompts_.find(raw(life_.judge->take_finder()));
  if (found == prompts_.end() || found->second.empty() ||
      life_.engine->unfinished() >= config_.max_requests || event_ > options_.events) {
    return;
  }
  Request request;
  request.id = RequestId{next_request_++};
  request.prompt = found->second;
  request.prompt.push_back(token());
  submit(std::move(request));
}

void WorldRun::submit(Request request) {
  request.max_new_tokens = static_cast<std::uint32_t>(random_.between(1, config_.max_new_tokens));
  trace("submit request " + std::to_string(raw(request.id)) + " of " +
        std::to_string(request.prompt.size()) + " tokens");
  live_.push_back(request.id);
  if (!config_.clean && random_.chance(1, 8)) {
    const std::uint64_t allowed = random_.below(3);
    request.access = {.load = allowed == 1, .save = allowed == 2};
    count(WorldFault::kRestricted);
  }
  life_.judge->restrict(request.id, request.access);
  prompts_[raw(request.id)] = request.prompt;
  life_.engine->submit(std::move(request));
}

void WorldRun::abort_event() {
  if (live_.empty()) return;
  RequestId request = live_[random_.below(live_.size())];
  const auto loading = std::find_if(live_.begin(), live_.end(),
                                    [&](RequestId live) { return life_.judge->loading(live); });
  if (loading != live_.end() && random_.chance(1, 2)) request = *loading;
  trace("abort request " + std::to_string(raw(request)));
  count(WorldFault::kAbort);
  const bool while_loading = life_.judge->loading(request);
  if (while_loading) count(WorldFault::kAbortLoading);
  std::erase(live_, request);
  leaving_.push_back(request);
  life_.engine->abort(request);
  take_finished();
  // Its load goes on, and ends for a request that is another one by then.
  if (while_loading && !leaving(request) && random_.chance(1, 2)) {
    count(WorldFault::kIdReused);
    submit(request);
  }
}

void WorldRun::object_event() {
  if (!config_.erase_objects || config_.clean || keys_.empty()) return;
  const std::string& key = keys_[random_.below(keys_.size())];
  trace("object " + key + " goes");
  if (!pool_->erase(key)) return;
  if (random_.chance(1, 2)) {
    count(WorldFault::kErased);
  } else {
    count(WorldFault::kUnfinished);
    pool_->add_unfinished(key, 64, now_);
  }
}

void WorldRun::take_finished() {
  finished_.clear();
  life_.engine->take_finished(finished_);
  for (FinishedRequest& request : finished_) {
    std::erase(live_, request.id);
    std::erase(leaving_, request.id);
    const std::uint32_t junction = life_.judge->junction(request.id);
    const bool sound = life_.judge->sound(request.id);
    life_.judge->forget(request.id);
    if (request.rejected) continue;
    // Their jobs may still be running.
    past_.push_back(request.id);
    if (past_.size() > 3) past_.pop_front();
    std::vector<std::uint32_t> tokens = std::move(prompts_[raw(request.id)]);
    tokens.insert(tokens.end(), request.output.begin(), request.output.end());
    if (request.aborted) continue;
    // One that was preempted has started again somewhere else; and longer, where nothing is left of
    // its first start.
    const bool again = request.preemptions != 0;
    const bool unknown = again && (config_.purges || config_.replaces_ranks);
    const std::uint32_t first = request.local_hit_tokens + request.external_hit_tokens;
    if (config_.clean && sound)
      completed_.push_back({request.id, tokens, unknown ? 0 : request.prompt_tokens,
                            request.prompt_tokens, again ? request.found_tokens : first,
                            again ? 0 : junction, request.found_tokens});
    if (turns_.size() < 16) turns_.emplace_back();
    turns_[random_.below(turns_.size())] = std::move(tokens);
  }
}

}  // namespace kvprism::sim
