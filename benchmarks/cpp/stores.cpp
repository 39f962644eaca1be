#include "stores.h"

#include <cstdlib>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kvprism/backend/blocking_store.h"
#include "kvprism/backend/clock.h"
#include "kvprism/backend/memory_store.h"
#include "kvprism/backend/mooncake_client.h"
#include "kvprism/group/projection.h"
#include "kvprism/key/key_schema.h"
#include "kvprism/layout/segment_map.h"
#include "kvprism/spec/spec_registry.h"
#include "kvprism/store/store_worker.h"
#include "native.h"

namespace kvprism::bench {
namespace {

constexpr std::uint32_t kBlocks = 64;     // of a job
constexpr std::size_t kPage = 64 * 1024;  // bytes of an object
constexpr std::size_t kHash = 32;

[[noreturn]] void stop(const char* what) {
  std::fprintf(stderr, "core_bench: %s\n", what);
  std::exit(1);
}

// What both arms share: memory, keys, and the plan of a job that moves all blocks.
class Setting {
 public:
  explicit Setting(const char* model) : memory_((kBlocks + 1) * kPage), copy_(memory_.size()) {
    const SpecRegistry registry = SpecRegistry::builtin();
    projection_ = Projection::make(
        cache_config_from_json(R"({"num_blocks": 65, "groups": [{"kind": "full_attention",
    "layers": ["l0"], "block_size": 16, "num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16"}]})",
                               registry),
        registry);
    KeyFacts facts;
    facts.model = model;
    facts.hash_algorithm = "sha256_cbor";
    schema_ = KeySchema::kvprism(projection_, facts);
    CacheTensor tensor;
    tensor.base = memory_.data();
    tensor.bytes = memory_.size();
    tensor.layers = {"l0"};
    tensor.block_stride = kPage;
    map_ = SegmentMap::make(projection_, {tensor});
    plan_.digest = schema_->plan_digest();
    plan_.epoch = 1;
    plan_.hash_width = kHash;
    plan_.runs = {{StoreIndex{0}, 0, kBlocks, 0, 0, 16}};
    plan_.mark_hashes.resize(kBlocks * kHash);
    for (std::uint32_t i = 0; i < kBlocks; ++i) {
      plan_.ids.push_back(BlockId{static_cast<std::int32_t>(i + 1)});
      plan_.mark_tokens.push_back(16 * (i + 1));
    }
  }

  const std::shared_ptr<const KeySchema>& schema() const { return schema_; }
  const std::shared_ptr<const SegmentMap>& map() const { return map_; }

  // The hash of chunk `i` of prefix `number`.
  static void write_hash(std::uint64_t number, std::uint32_t i, std::uint8_t* out) {
    std::memset(out, 0, kHash);
    std::memcpy(out, &number, sizeof number);
    std::memcpy(out + sizeof number, &i, sizeof i);
  }
  const StepPlan& plan(JobKind kind, std::uint64_t number) {
    ++plan_.step;
    plan_.jobs = {{JobId{plan_.step}, RequestId{1}, kind, 0, 1, 0, seconds(60)}};
    for (std::uint32_t i = 0; i < kBlocks; ++i)
      write_hash(number, i, plan_.mark_hashes.data() + i * kHash);
    return plan_;
  }
  std::unique_ptr<ObjectBatch> batch(std::uint64_t number) const {
    auto made = std::make_unique<ObjectBatch>();
    std::uint8_t hash[kHash];
    for (std::uint32_t i = 0; i < kBlocks; ++i) {
      write_hash(number, i, hash);
      schema_->append_key(made->keys, StoreIndex{0}, {}, hash);
      map_->append_segments(StoreIndex{0}, BlockId{static_cast<std::int32_t>(i + 1)},
                            made->segments);
      made->ends.push_back(static_cast<std::uint32_t>(made->segments.size()));
    }
    return made;
  }
  void copy_all() {
    std::memcpy(copy_.data(), memory_.data() + kPage, kBlocks * kPage);
    keep(copy_.data());
  }

 private:
  std::vector<std::byte> memory_;
  std::vector<std::byte> copy_;
  std::shared_ptr<const Projection> projection_;
  std::shared_ptr<const KeySchema> schema_;
  std::shared_ptr<const SegmentMap> map_;
  StepPlan plan_;
};

// One job from plan to quiet. `wait` is called when nothing moved.
template <class Wait>
void run_job(StoreWorker& worker, const StepPlan& plan, const Wait& wait) {
  if (!worker.submit(plan.view(), ReadyToken::host()).accepted) stop("a plan was refused");
  static thread_local WorkerReport report;
  for (bool quiet = false; !quiet;) {
    if (!worker.pump(monotonic_now())) wait();
    if (!worker.poll(report)) continue;
    for (const JobReport& job : report.jobs) {
      if (job.outcome != JobOutcome::kNone && job.objects != kBlocks)
        stop("a job did not move all");
      quiet |= job.quiet != 0;
    }
  }
}

void check_all(std::span<const ItemResult> items) {
  for (const ItemResult& item : items) {
    if (!stored(item.status)) stop(to_string(item.status).data());
  }
}

constexpr double kItems = kBlocks;
constexpr const char* kItem = "object of 64 KiB";

}  // namespace

void memory_store(Pairs& pairs) {
  // Four prefixes in turn in a pool for two, so that each save finds its objects gone.
  constexpr std::uint64_t kPrefixes = 4;
  MemoryPoolOptions small;
  small.capacity_bytes = 2 * kBlocks * kPage;
  const auto nothing = [] {};

  Setting setting("bench");
  const auto ours_store = std::make_shared<MemoryStore>(std::make_shared<MemoryPool>(small));
  StoreWorker worker(setting.schema(), setting.map(), ours_store, {});
  std::uint64_t next = 0;
  const Work save = [&](std::uint64_t n) {
    for (; n > 0; --n) run_job(worker, setting.plan(JobKind::kSave, next++ % kPrefixes), nothing);
  };

  MemoryStore bare(std::make_shared<MemoryPool>(small));
  for (const Region& region : setting.map()->regions()) bare.add_region(region);
  std::vector<std::unique_ptr<ObjectBatch>> batches;
  for (std::uint64_t number = 0; number < kPrefixes; ++number)
    batches.push_back(setting.batch(number));
  std::uint64_t op = 0;
  Completion done;
  const auto call = [&](MemoryStore& store, std::unique_ptr<ObjectBatch>& batch, bool put) {
    const Instant now = monotonic_now();
    const OpId id{++op};
    const bool started = put ? store.start_put(id, batch, now, now + seconds(60))
                             : store.start_get(id, batch, now, now + seconds(60));
    if (!started || !store.poll_store(now, done) || !done.quiet) stop("a call was not done");
    check_all(done.items);
    batch = std::move(done.batch);
  };
  std::uint64_t at = 0;
  const Work put = [&](std::uint64_t n) {
    for (; n > 0; --n) call(bare, batches[at++ % kPrefixes], true);
  };
  const Work copy = [&](std::uint64_t n) {
    for (; n > 0; --n) setting.copy_all();
  };
  pairs.compare("save to memory", kItem, kItems, save, "bare put of a prebuilt batch", put);
  pairs.compare("save to memory", kItem, kItems, save, "memcpy of the same bytes", copy);

  // Loads find what is there.
  const auto full = std::make_shared<MemoryPool>();
  const auto load_store = std::make_shared<MemoryStore>(full);
  StoreWorker loader(setting.schema(), setting.map(), load_store, {});
  run_job(loader, setting.plan(JobKind::kSave, 0), nothing);
  MemoryStore bare_get(full);
  for (const Region& region : setting.map()->regions()) bare_get.add_region(region);
  const Work load = [&](std::uint64_t n) {
    for (; n > 0; --n) run_job(loader, setting.plan(JobKind::kLoad, 0), nothing);
  };
  const Work get = [&](std::uint64_t n) {
    for (; n > 0; --n) call(bare_get, batches[0], false);
  };
  pairs.compare("load from memory", kItem, kItems, load, "bare get of a prebuilt batch", get);
  pairs.compare("load from memory", kItem, kItems, load, "memcpy of the same bytes", copy);
}

void mooncake_store(Pairs& pairs, const std::string& master) {
  MooncakeOptions options;
  options.master = master;
  Setting setting("bench-mooncake");
  const auto store = std::make_shared<BlockingStore>(mooncake_client_factory(options));
  StoreWorker worker(setting.schema(), setting.map(), store, {});
  const auto wait = [&] { store->wait_for_completion(milliseconds(1)); };
  NativeStore bare(options, setting.map()->regions());

  // Each save has keys of its own; every sample is one job, as the pool must hold them all.
  std::uint64_t next = 1, at = 0;
  std::vector<NativeBatch> batches;
  for (int i = 0; i < pairs.floor_samples(); ++i)
    batches.emplace_back(*setting.batch((1ull << 32) + static_cast<std::uint64_t>(i)));
  const Work save = [&](std::uint64_t n) {
    for (; n > 0; --n) run_job(worker, setting.plan(JobKind::kSave, next++), wait);
  };
  const Work put = [&](std::uint64_t n) {
    for (; n > 0; --n) bare.put(batches.at(at++));
  };
  const Work copy = [&](std::uint64_t n) {
    for (; n > 0; --n) setting.copy_all();
  };
  save(1);
  pairs.compare("save to Mooncake", kItem, kItems, save, "Mooncake's put of a prebuilt batch", put,
                1);
  pairs.compare("save to Mooncake", kItem, kItems, save, "memcpy of the same bytes", copy, 1);

  const NativeBatch known(*setting.batch(1));
  run_job(worker, setting.plan(JobKind::kSave, 1), wait);  // long runs fill the pool and evict it
  const Work load = [&](std::uint64_t n) {
    for (; n > 0; --n) run_job(worker, setting.plan(JobKind::kLoad, 1), wait);
  };
  const Work get = [&](std::uint64_t n) {
    for (; n > 0; --n) bare.get(known);
  };
  pairs.compare("load from Mooncake", kItem, kItems, load, "Mooncake's get of a prebuilt batch",
                get);
  pairs.compare("load from Mooncake", kItem, kItems, load, "memcpy of the same bytes", copy);

  worker.close(monotonic_now(), seconds(5));
  store->close_index(seconds(5));
  store->close_store(seconds(5));
}

}  // namespace kvprism::bench
