// A whole engine around kvprism: block tables, chunked prefill, saving, a restart, loading. It has
// one thread for its steps, and kvprism's own thread moves the bytes. Its model is in toy_model.h.
//
//   engine                        stores in this process's memory
//   engine HOST:PORT [PROTOCOL]   stores in Mooncake, whose master listens there
#include <algorithm>
#include <cstdio>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "kvprism/backend/blocking_store.h"
#include "kvprism/backend/clock.h"
#include "kvprism/backend/memory_store.h"
#include "kvprism/backend/mooncake_client.h"
#include "kvprism/backend/pump_thread.h"
#include "kvprism/base/error.h"
#include "kvprism/checked/checked_scheduler.h"
#include "kvprism/spec/spec_registry.h"
#include "kvprism/store/store_worker.h"
#include "toy_model.h"

namespace {

using namespace kvprism;  // NOLINT(google-build-using-namespace): an example of the whole namespace
using toy::kBlock, toy::kPage, toy::Tokens;
using Memory = std::vector<std::byte>;

constexpr std::uint32_t kBlocks = 64, kChunk = 48;  // of the pool; tokens of a step
constexpr const char* kConfig =
    R"({"num_blocks": 64, "groups": [{"kind": "full_attention", "layers": ["l0"],
  "block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": "float16"}]})";

// Store is MemoryStore or BlockingStore: the engine is the same.
template <class Store>
class Engine {
 public:
  explicit Engine(std::shared_ptr<Store> store) : store_(std::move(store)) {
    const SpecRegistry registry = SpecRegistry::builtin();
    const auto groups = Projection::make(cache_config_from_json(kConfig, registry), registry);
    const auto schema =
        KeySchema::kvprism(groups, {.model = "example", .hash_algorithm = "example-mix"});
    const CacheTensor tensor{
        .base = memory_->data(), .bytes = memory_->size(), .layers = {"l0"}, .block_stride = kPage};
    std::random_device random;
    const std::uint64_t epoch = std::uint64_t{random()} << 32 | random() | 1u;
    scheduler_ =
        std::make_unique<EngineScheduler>(schema, store_, StoreSchedulerOptions{.epoch = epoch});
    worker_ = std::make_shared<StoreWorker>(schema, SegmentMap::make(groups, {tensor}), store_,
                                            StoreWorkerOptions{});
    pump_ = std::make_unique<PumpThread>(worker_, store_);
  }
  ~Engine() { end(); }

  // Serves one prompt; returns how many of its tokens came from the store.
  std::uint32_t serve(RequestId request, const Tokens& prompt) {
    const auto tokens = static_cast<std::uint32_t>(prompt.size());
    const std::vector<std::uint8_t> bytes = toy::hashes_of(prompt);
    const HashList hashes{bytes.data(), tokens / kBlock, toy::kHashWidth};
    LookupResult found;  // a real engine asks once a step and serves others meanwhile
    while ((found = scheduler_->lookup(request, tokens, hashes, 0, monotonic_now())).pending)
      step();

    std::vector<BlockId> table;
    for (std::uint32_t at = 0; at < tokens; at += kBlock) {
      while (pool_.num_free() == 0) step();  // what a job holds comes back
      table.push_back(pool_.take());
    }
    const std::span<const BlockId> row(table);
    const BlockRows rows(std::span(&row, 1));  // one row for each group
    std::uint32_t computed = 0;
    if (scheduler_->allocated(request, found.external_tokens, rows, monotonic_now())) {
      std::vector<LoadEnd> ends;
      for (; ends.empty(); scheduler_->take_load_ends(ends)) step();
      computed = ends[0].valid_tokens;  // what failed is computed again
    }
    const std::uint32_t loaded = computed;
    while (computed < tokens) {
      const std::uint32_t end = std::min(computed + kChunk, tokens);
      toy::compute(*memory_, prompt, table, computed, end);
      computed = end;
      scheduler_->advanced(request, computed, hashes);
      const TokenRange ready = scheduler_->wants_save(request, monotonic_now());
      if (!ready.empty()) scheduler_->save(request, ready, rows, monotonic_now());
      step();
    }
    wrong += toy::count_wrong(*memory_, prompt, table);
    scheduler_->finished(request, FinishReason::kCompleted);
    for (const BlockId block : table) pool_.drop_reference(block);  // jobs hold their own
    return loaded;
  }

  // Waits until nothing uses a block any more, then ends.
  void close() {
    while (scheduler_->has_pending_work()) step();
    if (!end()) return;
    take_reports();
    if (pool_.num_free() != kBlocks - 1) wrong += 1'000'000;
  }

  std::uint64_t wrong = 0;  // bytes

 private:
  // False while native calls may still use the cache: its memory then stays until the process ends.
  bool end() {
    if (!pump_) return true;
    std::size_t unquiet = std::exchange(pump_, nullptr)->stop(seconds(5)).unquiet;
    unquiet += store_->close_index(seconds(5)).unquiet;
    unquiet += store_->close_store(seconds(5)).unquiet;
    if (unquiet == 0) return true;
    std::fprintf(stderr, "engine: %zu native calls go on: the cache's memory is kept\n", unquiet);
    new std::shared_ptr<Memory>(memory_);  // never freed
    return false;
  }

  // Once in every step. Its "kernels" have written already; an engine with a device gives an event.
  void step() {
    const StepPlan& plan = scheduler_->end_step(monotonic_now());
    if (!plan.empty()) {
      worker_->submit(plan.view(), ReadyToken::host());
      pump_->notify();
    }
    follow_references();
    pump_->wait_moved(pump_->moves(), milliseconds(1));  // where a real engine would compute
    take_reports();
  }

  void take_reports() {
    WorkerReport report;
    while (worker_->poll(report)) scheduler_->report(report, monotonic_now());
    follow_references();
  }

  void follow_references() {
    std::vector<BlockId> blocks;
    scheduler_->take_acquired(blocks);
    for (const BlockId block : blocks) pool_.add_reference(block);
    blocks.clear();
    scheduler_->take_released(blocks);
    for (const BlockId block : blocks) pool_.drop_reference(block);
  }

  std::shared_ptr<Memory> memory_ = std::make_shared<Memory>(kBlocks * kPage);
  std::shared_ptr<Store> store_;  // ends before the memory whose bytes it moves
  toy::BlockPool pool_{kBlocks};
  std::unique_ptr<EngineScheduler> scheduler_;
  std::shared_ptr<StoreWorker> worker_;
  std::unique_ptr<PumpThread> pump_;
};

// Two engines, one after the other. The second begins with an empty cache, and finds all whole
// blocks of every prompt in the store.
template <class Connect>
int run(Connect connect) {
  std::uint64_t wrong = 0;
  std::uint32_t loaded = 0;
  std::printf("tokens from the store:");
  for (int life = 0; life < 2; ++life) {
    Engine engine(connect());
    loaded = 0;
    for (std::uint32_t number = 1; number <= 3; ++number) {
      const std::uint32_t tokens = engine.serve(RequestId{number}, toy::prompt_of(160, 40, number));
      std::printf(" %u", tokens);
      loaded += tokens;
    }
    engine.close();
    wrong += engine.wrong;
  }
  std::printf("\n%llu bytes wrong\n", static_cast<unsigned long long>(wrong));
  return wrong == 0 && loaded == 3 * 192 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) try {
  const auto pool = std::make_shared<MemoryPool>();
  if (argc < 2) return run([&] { return std::make_shared<MemoryStore>(pool); });
  const MooncakeOptions options{.master = argv[1], .protocol = argc > 2 ? argv[2] : "tcp"};
  return run([&] { return std::make_shared<BlockingStore>(mooncake_client_factory(options)); });
} catch (const kvprism::Error& error) {
  std::fprintf(stderr, "engine: %s\n", error.what());
  return 2;
}
