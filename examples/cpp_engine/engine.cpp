// A whole engine around kvprism in one page: block tables, chunked prefill, saving, a restart,
// loading. It has one thread for its steps, and kvprism's own thread moves the bytes.
//
//   engine                        stores in this process's memory
//   engine HOST:PORT [PROTOCOL]   stores in Mooncake, whose master listens there
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kvprism/backend/blocking_store.h"
#include "kvprism/backend/clock.h"
#include "kvprism/backend/memory_store.h"
#include "kvprism/backend/mooncake_client.h"
#include "kvprism/backend/pump_thread.h"
#include "kvprism/base/error.h"
#include "kvprism/checked/checked_scheduler.h"
#include "kvprism/group/cache_config.h"
#include "kvprism/group/projection.h"
#include "kvprism/key/key_schema.h"
#include "kvprism/layout/segment_map.h"
#include "kvprism/spec/spec_registry.h"
#include "kvprism/store/store_scheduler.h"
#include "kvprism/store/store_worker.h"

namespace {

using namespace kvprism;  // NOLINT(google-build-using-namespace): an example of the whole namespace

constexpr std::uint32_t kBlock = 16, kBlocks = 64, kChunk = 48;  // tokens, blocks, tokens a step
constexpr std::size_t kPage = kBlock * (8 + 8) * 2;              // bytes of a block
constexpr const char* kConfig =
    R"({"num_blocks": 64, "groups": [{"kind": "full_attention", "layers": ["l0"],
  "block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": "float16"}]})";

using Tokens = std::vector<std::uint32_t>;

// What both sides of a connection look like, whatever is behind it.
struct Connection {
  std::shared_ptr<ObjectStore> store;
  std::shared_ptr<ObjectIndex> index;
};

Connection connect(const std::shared_ptr<MemoryPool>& pool, int argc, char** argv) {
  if (argc < 2) {
    const auto memory = std::make_shared<MemoryStore>(pool);
    return {memory, memory};
  }
  MooncakeOptions options;
  options.master = argv[1];
  if (argc > 2) options.protocol = argv[2];
  const auto mooncake = std::make_shared<BlockingStore>(mooncake_client_factory(options));
  return {mooncake, mooncake};
}

// An engine needs one 64-bit mix for its "model"; the prefix decides, as in a real one.
std::uint64_t mix(std::uint64_t state, std::uint64_t value) {
  state = (state ^ value) * 0x9E3779B97F4A7C15u;
  return state ^ (state >> 29);
}

class Engine {
 public:
  explicit Engine(Connection connection) : memory_(kBlocks * kPage), free_(kBlocks - 1) {
    for (std::uint32_t i = 0; i < free_.size(); ++i) free_[i] = BlockId(kBlocks - 1 - i);
    references_.resize(kBlocks);
    const SpecRegistry registry = SpecRegistry::builtin();
    const auto groups = Projection::make(cache_config_from_json(kConfig, registry), registry);
    KeyFacts facts;
    facts.model = "example";
    facts.hash_algorithm = "example-mix";
    const auto schema = KeySchema::kvprism(groups, facts);
    CacheTensor tensor;
    tensor.base = memory_.data();
    tensor.bytes = memory_.size();
    tensor.layers = {"l0"};
    tensor.block_stride = kPage;
    scheduler_ = std::make_unique<EngineScheduler>(
        schema, connection.index, StoreSchedulerOptions{.epoch = std::random_device{}() | 1u});
    worker_ = std::make_shared<StoreWorker>(schema, SegmentMap::make(groups, {tensor}),
                                            connection.store, StoreWorkerOptions{});
    pump_ = std::make_unique<PumpThread>(worker_, connection.store);
    connection_ = std::move(connection);
  }

  // Serves one prompt; returns how many of its tokens came from the store.
  std::uint32_t serve(std::uint64_t number, const Tokens& prompt) {
    const RequestId request{number};
    const auto tokens = static_cast<std::uint32_t>(prompt.size());
    const std::vector<std::uint8_t> hashes = hash(prompt);
    const HashList list{hashes.data(), tokens / kBlock, 16};
    LookupResult found;  // a real engine asks once a step and serves others meanwhile
    while ((found = scheduler_->lookup(request, tokens, list, 0, monotonic_now())).pending) step();

    std::vector<BlockId> table;
    for (std::uint32_t at = 0; at < tokens; at += kBlock) table.push_back(take_block());
    std::uint32_t computed = 0;
    if (scheduler_->allocated(request, found.external_tokens, rows(table), monotonic_now())) {
      std::vector<LoadEnd> ends;
      while (ends.empty()) {
        step();
        scheduler_->take_load_ends(ends);
      }
      computed = ends[0].valid_tokens;  // what failed is computed again
    }
    const std::uint32_t loaded = computed;
    while (computed < tokens) {
      const std::uint32_t end = std::min(computed + kChunk, tokens);
      compute(prompt, table, computed, end);
      computed = end;
      scheduler_->advanced(request, computed, list);
      const TokenRange ready = scheduler_->wants_save(request, monotonic_now());
      if (!ready.empty()) scheduler_->save(request, ready, rows(table), monotonic_now());
      step();
    }
    wrong_ += count_wrong(prompt, table);
    scheduler_->finished(request, FinishReason::kCompleted);
    for (const BlockId block : table) drop_block(block);  // jobs hold references of their own
    return loaded;
  }

  // Waits until nothing uses a block any more, then ends.
  void close() {
    while (scheduler_->has_pending_work()) step();
    pump_->stop(seconds(5));
    connection_.index->close_index(seconds(5));
    connection_.store->close_store(seconds(5));
  }
  std::uint64_t wrong() const { return wrong_; }
  std::uint64_t free_blocks() const { return free_.size(); }

 private:
  // Once in every step of an engine, after its kernels were queued.
  void step() {
    const StepPlan& plan = scheduler_->end_step(monotonic_now());
    if (!plan.empty()) {
      worker_->submit(plan.view(), ReadyToken::host());
      pump_->notify();
    }
    follow_references();
    const std::uint64_t seen = pump_->moves();
    WorkerReport report;
    if (worker_->poll(report)) {
      scheduler_->report(report, monotonic_now());
    } else {
      pump_->wait_moved(seen, milliseconds(1));
    }
    follow_references();
  }

  void follow_references() {
    std::vector<BlockId> blocks;
    scheduler_->take_acquired(blocks);
    for (const BlockId block : blocks) ++references_[raw(block)];
    blocks.clear();
    scheduler_->take_released(blocks);
    for (const BlockId block : blocks) drop_block(block);
  }
  BlockId take_block() {
    while (free_.empty()) step();
    const BlockId block = free_.back();
    free_.pop_back();
    references_[raw(block)] = 1;
    return block;
  }
  void drop_block(BlockId block) {
    if (--references_[raw(block)] == 0) free_.push_back(block);
  }
  BlockRows rows(const std::vector<BlockId>& table) {
    row_ = table;
    return BlockRows(std::span<const std::span<const BlockId>>(&row_, 1));
  }

  // The "kernel": every byte of a position follows from the prefix that ends there.
  static std::byte content(std::uint64_t prefix, std::size_t byte) {
    return static_cast<std::byte>(mix(prefix, byte) >> 17);
  }
  template <class Visit>
  void for_each_byte(const Tokens& prompt, const std::vector<BlockId>& table, Visit visit) {
    constexpr std::size_t kPosition = kPage / kBlock;
    std::uint64_t prefix = 1;
    for (std::uint32_t at = 0; at < prompt.size(); ++at) {
      prefix = mix(prefix, prompt[at]);
      std::byte* const to =
          memory_.data() + raw(table[at / kBlock]) * kPage + at % kBlock * kPosition;
      for (std::size_t byte = 0; byte < kPosition; ++byte)
        visit(at, to[byte], content(prefix, byte));
    }
  }
  void compute(const Tokens& prompt, const std::vector<BlockId>& table, std::uint32_t from,
               std::uint32_t end) {
    for_each_byte(prompt, table, [&](std::uint32_t at, std::byte& place, std::byte value) {
      if (at >= from && at < end) place = value;
    });
  }
  std::uint64_t count_wrong(const Tokens& prompt, const std::vector<BlockId>& table) {
    std::uint64_t wrong = 0;
    for_each_byte(prompt, table, [&](std::uint32_t, const std::byte& place, std::byte value) {
      wrong += place == value ? 0 : 1;
    });
    return wrong;
  }
  // A chain of 16-byte hashes, one for each whole block. Real engines need a cryptographic hash:
  // two prefixes with one hash are one prefix to the store.
  static std::vector<std::uint8_t> hash(const Tokens& prompt) {
    std::vector<std::uint8_t> out;
    std::uint64_t low = 1, high = 2;
    for (std::uint32_t at = 0; at < prompt.size(); ++at) {
      low = mix(low, prompt[at]);
      high = mix(high, low);
      if (at % kBlock != kBlock - 1) continue;
      for (int shift = 0; shift < 64; shift += 8)
        out.push_back(static_cast<std::uint8_t>(low >> shift));
      for (int shift = 0; shift < 64; shift += 8)
        out.push_back(static_cast<std::uint8_t>(high >> shift));
    }
    return out;
  }

  Connection connection_;
  std::vector<std::byte> memory_;
  std::vector<BlockId> free_;  // block 0 is the null block
  std::vector<std::uint32_t> references_;
  std::span<const BlockId> row_;
  std::unique_ptr<EngineScheduler> scheduler_;
  std::shared_ptr<StoreWorker> worker_;
  std::unique_ptr<PumpThread> pump_;
  std::uint64_t wrong_ = 0;
};

Tokens prompt_of(std::uint32_t prefix, std::uint32_t own, std::uint32_t seed) {
  Tokens tokens;
  for (std::uint32_t at = 0; at < prefix; ++at) tokens.push_back(at * 7 + 3);
  for (std::uint32_t at = 0; at < own; ++at) tokens.push_back(seed * 1000 + at);
  return tokens;
}

}  // namespace

int main(int argc, char** argv) try {
  const auto pool = std::make_shared<MemoryPool>();
  std::uint64_t wrong = 0;
  std::vector<std::uint32_t> loaded;
  for (int life = 0; life < 2; ++life) {  // the second engine starts with an empty cache
    Engine engine(connect(pool, argc, argv));
    for (std::uint32_t number = 1; number <= 3; ++number) {
      loaded.push_back(engine.serve(number, prompt_of(160, 40, number)));
    }
    engine.close();
    wrong += engine.wrong();
    if (engine.free_blocks() != kBlocks - 1) wrong += 1'000'000;
  }
  std::printf("tokens from the store:");
  for (const std::uint32_t tokens : loaded) std::printf(" %u", tokens);
  std::printf("\n%llu bytes wrong\n", static_cast<unsigned long long>(wrong));
  // The second engine finds all whole blocks of every prompt.
  return wrong == 0 && std::vector(loaded.end() - 3, loaded.end()) ==
                           std::vector<std::uint32_t>{192, 192, 192}
             ? 0
             : 1;
} catch (const kvprism::Error& error) {
  std::fprintf(stderr, "engine: %s\n", error.what());
  return 2;
}
