#include "sim_engine.h"

#include <algorithm>
#include <cstring>

#include "kvprism/backend/clock.h"
#include "kvprism/base/error.h"

namespace kvprism::bindings {
namespace {

constexpr std::size_t kLoads = 0;
constexpr std::size_t kSaves = 1;
// Between two looks at a store that is at work.
constexpr Duration kNap{100'000};

}  // namespace

void JobMeter::begin(std::size_t side) {
  if (open_[side]++ == 0) since_[side] = monotonic_now();
}

void JobMeter::end(std::size_t side) {
  if (--open_[side] == 0)
    totals_[side].busy = totals_[side].busy + (monotonic_now() - since_[side]);
}

void JobMeter::planned(const StepPlan& plan) {
  for (const JobRecord& job : plan.jobs) {
    const std::size_t side = job.kind == JobKind::kLoad ? kLoads : kSaves;
    side_of_.emplace(raw(job.id), side);
    if (side == kLoads) {
      begin(kLoads);
    } else {
      ++fenced_;
    }
  }
}

bool JobMeter::fence_fired() {
  const bool any = fenced_ > 0;
  for (; fenced_ > 0; --fenced_) begin(kSaves);
  return any;
}

bool JobMeter::hold_report(const WorkerReport& report) {
  for (const JobReport& job : report.jobs) {
    const auto found = side_of_.find(raw(job.job));
    if (found == side_of_.end()) continue;
    Total& total = totals_[found->second];
    total.bytes += job.bytes;
    total.objects += job.objects;
    total.duplicates += job.duplicates;
    total.failed_chunks += job.num_failed;
    if (job.quiet == 0) continue;
    end(found->second);
    side_of_.erase(found);
  }
  return false;
}

BoundEngine::BoundEngine(std::shared_ptr<BoundScheduler> scheduler,
                         std::shared_ptr<BoundWorker> worker, std::shared_ptr<BoundMemory> memory,
                         const sim::EngineOptions& options)
    : scheduler_(std::move(scheduler)), worker_(std::move(worker)), memory_(std::move(memory)) {
  const auto whole = memory_->memory.whole();
  const auto inside = [&](const Region& region) {
    return region.base >= whole.data() &&
           region.base + region.length <= whole.data() + whole.size();
  };
  const std::vector<Region>& regions = worker_->map()->regions();
  if (!std::all_of(regions.begin(), regions.end(), inside)) {
    fail(ErrorCode::kInvalidArgument, "simulated engine",
         {"memory", "another memory", "the memory behind the worker's segment map", {}});
  }
  const std::shared_ptr<StoreScheduler> shared = scheduler_->shared();
  const std::shared_ptr<StoreWorker> adopted = worker_->adopt();
  // The memory is shared with the Python object, so the engine gets an alias of it.
  std::vector<sim::EngineRank> ranks{{adopted, {memory_, &memory_->memory}}};
  sim::EngineOptions own = options;
  own.pump_workers = false;
  engine_ =
      std::make_unique<sim::Engine>(memory_->projection, shared, std::move(ranks), own, &meter_);
}

BoundEngine::~BoundEngine() {
  const GilFree released(GilFree::WhenExiting::kKeepGil);
  close({});
}

sim::Engine& BoundEngine::get() {
  if (closed_ || scheduler_->closed()) {
    fail(ErrorCode::kClosed, "simulated engine", {"state", "closed", "an open engine", {}});
  }
  return *engine_;
}

bool BoundEngine::step() {
  sim::Engine& engine = get();
  const std::uint64_t jobs = engine.stats().jobs_loaded;
  const bool computed = engine.begin_step(monotonic_now());
  // Loads go ahead while the step is computed.
  if (engine.stats().jobs_loaded != jobs) worker_->thread().notify();
  engine.finish_step(monotonic_now());
  if (meter_.fence_fired()) worker_->thread().notify();
  return engine.pump(monotonic_now()) || computed;
}

bool BoundEngine::run(Duration longest) {
  const Instant until = monotonic_now() + longest;
  while (!get().idle()) {
    const std::uint64_t seen = worker_->thread().moves();
    if (!step()) worker_->thread().wait_moved(seen, kNap);
    if (monotonic_now() >= until) return get().idle();
  }
  return true;
}

CloseReport BoundEngine::close(Duration budget) {
  if (closed_) return {};
  closed_ = true;
  CloseReport report = worker_->close_adopted(budget);
  scheduler_->close(budget);
  return report;
}

RingDetector::RingDetector(const Projection& projection) : seen_(std::size_t{1} << 22) {
  for (const sim::GroupModel& group : sim::model_groups(projection)) {
    if (group.kind == sim::GroupModel::Kind::kRing) rings_.push_back(group);
  }
}

void RingDetector::add(std::span<const std::uint32_t> tokens) {
  std::vector<std::byte> page;
  for (const sim::GroupModel& ring : rings_) {
    // One slot is enough: only the beginning of each head's run is kept.
    sim::PageShape shape = ring.shapes[0];
    shape.positions = 1;
    page.resize(shape.bytes());
    sim::Prefix prefix = sim::kEmptyPrefix;
    for (std::uint32_t at = 0; at < tokens.size(); ++at) {
      prefix = sim::extend(prefix, at, tokens[at]);
      for (std::uint32_t layer = 0; layer < ring.layers(); ++layer) {
        sim::write_position(shape, layer, 0, prefix, page.data());
        for (std::uint32_t head = 0; head < shape.heads; ++head) {
          std::uint64_t word = 0;
          std::memcpy(&word, page.data() + std::size_t{head} * shape.content,
                      std::min<std::size_t>(8, shape.content));
          seen_[slot(word)] = true;
          words_.insert(word);
        }
      }
    }
  }
}

std::uint64_t RingDetector::count(std::span<const std::byte> bytes) const noexcept {
  std::uint64_t found = 0;
  for (std::size_t at = 0; at + 8 <= bytes.size(); at += 8) {
    std::uint64_t word;
    std::memcpy(&word, bytes.data() + at, 8);
    if (seen_[slot(word)] && words_.contains(word)) ++found;
  }
  return found;
}

}  // namespace kvprism::bindings
