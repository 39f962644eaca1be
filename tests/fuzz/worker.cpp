// Any bytes as a plan for a worker whose store never answers: no call touches other memory than the
// cache's, and a plan that was taken has each of its jobs told once.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "kvprism/spec/spec_registry.h"
#include "kvprism/store/store_worker.h"

namespace {

using namespace kvprism;  // NOLINT(google-build-using-namespace): a program

constexpr std::uint32_t kBlocks = 16;

void need(bool right) {
  if (!right) std::abort();
}

// Two stored groups, one with hits inside its blocks, and a ring between them.
struct Cache {
  Cache() {
    CacheConfig config;
    config.num_blocks = kBlocks;
    config.scheduler_block_size = 8;
    config.hash_block_size = 4;
    config.cache_hit_alignment_tokens = 4;
    for (const char* kind : {"full_attention", "circular_buffer", "sliding_window"}) {
      GroupConfig group;
      group.spec.kind = kind;
      group.spec.block_size = 8;
      if (group.spec.kind == "sliding_window") group.spec.sliding_window = 16;
      group.spec.payload = AttentionPayload{1, 0, 4, 4, DType::kInt8, 1};
      group.layers = {kind};
      config.groups.push_back(group);
    }
    const auto projection = Projection::make(config, SpecRegistry::builtin());
    schema = KeySchema::kvprism(projection, {.model = "fuzz", .hash_algorithm = "fuzz"});
    const std::uint64_t page = projection->group(GroupId{0}).page_size_bytes;
    memory.resize(3 * kBlocks * page);
    std::vector<CacheTensor> tensors(3);
    for (std::size_t t = 0; t < tensors.size(); ++t) {
      tensors[t].base = memory.data();
      tensors[t].bytes = memory.size();
      tensors[t].layers = config.groups[t].layers;
      tensors[t].layer_stride = kBlocks * page;
      tensors[t].block_stride = page;
      tensors[t].offset = t * kBlocks * page;
    }
    map = SegmentMap::make(projection, tensors);
  }
  std::shared_ptr<const KeySchema> schema;
  std::vector<std::byte> memory;
  std::shared_ptr<const SegmentMap> map;
};

const Cache& cache() {
  static const Cache one;
  return one;
}

class SilentStore final : public ObjectStore {
 public:
  StoreCapabilities capabilities() const override { return {"silent", 0, 0, false}; }
  void add_region(const Region&) override {}
  void remove_region(const Region&) override {}
  bool start_put(OpId, std::unique_ptr<ObjectBatch>& batch, Instant, Instant) override {
    return take(batch);
  }
  bool start_get(OpId, std::unique_ptr<ObjectBatch>& batch, Instant, Instant) override {
    return take(batch);
  }
  bool poll_store(Instant, Completion&) override { return false; }
  CloseReport close_store(Duration) override { return {}; }

 private:
  bool take(std::unique_ptr<ObjectBatch>& batch) {
    const auto first = reinterpret_cast<std::uintptr_t>(cache().memory.data());
    need(batch->keys.size() != 0 && batch->ends.size() == batch->keys.size());
    need(batch->ends.back() == batch->segments.size());
    for (const Segment& segment : batch->segments) {
      const auto base = reinterpret_cast<std::uintptr_t>(segment.base);
      need(base >= first && segment.length != 0 &&
           base + segment.length <= first + cache().memory.size());
    }
    taken_.push_back(std::move(batch));
    return true;
  }
  std::vector<std::unique_ptr<ObjectBatch>> taken_;
};

std::size_t outcomes_of(StoreWorker& worker) {
  std::size_t outcomes = 0;
  WorkerReport report;
  while (worker.poll(report)) {
    for (const JobReport& job : report.jobs) {
      outcomes += job.outcome == JobOutcome::kNone ? 0 : 1;
      need(report.failed_of(job).size() == job.num_failed);
    }
  }
  return outcomes;
}

StoreWorker make_worker() {
  return StoreWorker(cache().schema, cache().map, std::make_shared<SilentStore>(), {});
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  std::vector<std::uint64_t> aligned(size / 8 + 1);
  if (size > 0) std::memcpy(aligned.data(), data, size);
  const std::span<const std::byte> bytes(reinterpret_cast<const std::byte*>(aligned.data()), size);
  // As it comes: of another cache, most often. Damage that came first keeps the plan out.
  StoreWorker other = make_worker();
  if (!other.submit(bytes, ReadyToken::host()).accepted) {
    const std::size_t told = outcomes_of(other);
    need(!other.submit(bytes, ReadyToken::host()).accepted);
    need(!other.pump({}));
    // It remembers so many.
    if (told <= 64) need(outcomes_of(other) == 0);
  }
  try {
    StepPlanView plan = decode_plan(bytes);
    plan.digest = cache().schema->plan_digest();
    StoreWorker worker = make_worker();
    const bool accepted = worker.submit(plan, ReadyToken::host()).accepted;
    worker.pump({});
    need(!worker.submit(plan, ReadyToken::host()).accepted);
    worker.close({}, {});
    if (accepted) need(outcomes_of(worker) == plan.jobs.size() + worker.counters().jobs_unknown);
  } catch (const Error&) {
  }
  return 0;
}
