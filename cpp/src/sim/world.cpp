#include "kvprism/sim/world.h"

#include <algorithm>
#include <array>
#include <utility>
#include <variant>

#include "sim/world_run.h"

namespace kvprism::sim {
namespace {

KeyFacts facts(const Projection& projection) {
  KeyFacts facts;
  facts.model = "simulated";
  facts.hash_algorithm = "sim_chain";
  if (projection.parallel().pp > 1) facts.pipeline_split = "uneven";
  return facts;
}

// Its layers count from the whole model's first one.
std::vector<GroupModel> model_stage(const Projection& projection, const StageConfig& stage) {
  std::vector<GroupModel> groups = model_groups(projection);
  for (GroupModel& group : groups) {
    for (PageShape& shape : group.shapes) shape.first_layer = stage.first_layers[raw(group.id)];
  }
  return groups;
}

ObjectJudge judge_of(const Projection& whole, const WorldConfig& config) {
  std::vector<std::vector<GroupModel>> stages;
  for (const StageConfig& stage : config.stages) {
    stages.push_back(model_stage(*Projection::make(stage.cache, world_registry()), stage));
  }
  std::vector<GroupModel> groups = model_groups(whole);
  const std::uint32_t step = model_step(groups);
  return {std::move(groups), std::move(stages),
          WorldShape{config.cache.parallel.tp, config.cache.parallel.dcp, config.cache.parallel.pcp,
                     whole.hit_alignment(), step, whole.kv_layout(),
                     config.cache.key_schema == "vllm"}};
}

}  // namespace

WorldRun::WorldRun(const WorldOptions& options)
    : options_(options),
      config_(make_world_config(options.seed, options.without)),
      random_(options.seed ^ 0x776f726c64ull),
      later_random_(options.seed ^ 0x6c617465ull),
      again_random_(options.seed ^ 0x616761696eull),
      projection_(Projection::make(config_.cache, world_registry())),
      schema_(KeySchema::make(projection_, facts(*projection_))),
      pool_(std::make_shared<MemoryPool>(config_.pool)),
      objects_(judge_of(*projection_, config_)),
      step_tokens_(model_step(objects_.groups())) {
  for (const StageConfig& stage : config_.stages) {
    stages_.push_back(
        KeySchema::make(Projection::make(stage.cache, world_registry()), facts(*projection_)));
  }
  if (options.silent_corrupt) config_.faults[FaultKind::kSilentCorrupt] = 1000;
  fit_prompts();
  for (std::uint32_t family = 0; family < config_.families; ++family) {
    families_.emplace_back();
    for (std::uint32_t i = 0; i < config_.max_prompt; ++i) families_.back().push_back(token());
  }
  result_.config = config_.describe();
  result_.totals.clean_worlds = config_.clean ? 1 : 0;
  if (config_.stages.size() > 1) count(WorldFault::kStages);
  if (objects_.bare_stages()) count(WorldFault::kBareStages);
  if (config_.cache.key_schema == "vllm") count(WorldFault::kVllmKeys);
  count_features();
}

// What of the rarer arrangements this world has.
void WorldRun::count_features() {
  const ParallelSizes& parallel = config_.cache.parallel;
  WorldTotals& totals = result_.totals;
  for (std::size_t i = 0; i < kArrangements.size(); ++i) {
    const bool here =
        kArrangements[i].ranks == parallel.tp && kArrangements[i].stages == parallel.pp;
    if (here) ++totals.arrangements[i];
  }
  if (parallel.pcp > 1) count(WorldFault::kPrefillRanks);
  if (parallel.dcp > 1) count(WorldFault::kContextRanks);
  if (projection_->hit_alignment() < step_tokens_) count(WorldFault::kPartialHits);
  std::array<bool, kNumWorldFaults> has{};
  const auto note = [&](WorldFault feature, bool here) {
    has[static_cast<std::size_t>(feature)] |= here;
  };
  for (const StoreIndex index : indices<StoreIndex>(projection_->num_store_groups())) {
    const ResolvedGroup& group = projection_->group(index);
    note(WorldFault::kWrapper, group.specs.size() > 1);
    note(WorldFault::kReplicas, parallel.dcp == 1 && schema_->replicas(index) > 1);
    note(WorldFault::kShortWindows, group.spec.sliding_window == 1);
    note(WorldFault::kPadded, group.spec.page_size_padded.has_value());
    note(WorldFault::kUnshared, parallel.dcp > 1 && group.spec.dcp_sharded == false);
    note(WorldFault::kExtraStates, objects_.stored_group(raw(index)).extra != 0);
    const auto* const payload = std::get_if<AttentionPayload>(&group.spec.payload);
    if (payload == nullptr) continue;
    note(WorldFault::kCompressed, payload->compression > 1);
    note(WorldFault::kDoubled, payload->states_per_token > 1);
    note(WorldFault::kPacked, payload->num_head_slots.has_value());
  }
  for (std::size_t i = 0; i < has.size(); ++i) {
    if (has[i]) count(static_cast<WorldFault>(i));
  }
}

WorldResult WorldRun::run() {
  if (projection_->scheduler_block_size() != step_tokens_) {
    fail("S", "S is " + std::to_string(projection_->scheduler_block_size()) + ", should be " +
                  std::to_string(step_tokens_));
    return std::move(result_);
  }
  start_life();
  while (result_.passed && event_ < options_.events) {
    ++event_;
    event();
    check();
  }
  if (result_.passed) drain();
  if (result_.passed) end_life(true);
  result_.totals.events = event_;
  result_.totals.objects_checked = objects_.checked();
  const auto layout = std::find(kLayouts.begin(), kLayouts.end(), projection_->kv_layout());
  for (std::size_t kind = 0; kind < kStoredKinds; ++kind) {
    result_.totals.checked[kind][static_cast<std::size_t>(layout - kLayouts.begin())] =
        objects_.checked_kinds()[kind];
  }
  count(WorldFault::kEvicted, pool_->counters().evicted);
  count(WorldFault::kPoolFull, pool_->counters().refused);
  return std::move(result_);
}

// A request may take about two thirds of the pool.
void WorldRun::fit_prompts() {
  const auto blocks = [&](std::uint32_t tokens) {
    std::uint32_t total = 0;
    for (const GroupModel& group : objects_.groups()) {
      const std::uint32_t all = tokens / group.tokens + 1;
      if (group.kind == GroupModel::Kind::kFull) total += all;
      if (group.kind == GroupModel::Kind::kWindow || group.kind == GroupModel::Kind::kChunk) {
        total += std::min(all, (group.window + config_.engine.token_budget) / group.tokens + 2);
      }
      if (group.kind == GroupModel::Kind::kState) total += (group.fine ? 3 : 2) + group.extra;
      if (group.kind == GroupModel::Kind::kRing) total += 1;
    }
    return total;
  };
  while (config_.max_prompt > 2 * step_tokens_ &&
         blocks(config_.max_prompt + config_.max_new_tokens) > config_.cache.num_blocks * 2 / 3) {
    config_.max_prompt -= 2;
  }
}

void WorldRun::trace(const std::string& line) {
  if (!tracing()) return;
  result_.trace.push_back("#" + std::to_string(event_) + " at " + std::to_string(now_.ns / 1000) +
                          " us: " + line + " [" + life_.engine->describe() + "]");
  life_.judge->set_trace(&result_.trace);
}

void WorldRun::fail(std::string invariant, std::string what) {
  if (!result_.passed) return;
  result_.passed = false;
  result_.failed_at = event_;
  result_.invariant = std::move(invariant);
  result_.failure = std::move(what);
}

WorldResult run_world(const WorldOptions& options) { return WorldRun(options).run(); }

}  // namespace kvprism::sim
