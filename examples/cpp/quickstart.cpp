// Saves three blocks of a request, forgets them, and loads them back for another request of the
// same prefix.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <numeric>
#include <span>
#include <vector>

#include "kvprism/backend/memory_store.h"
#include "kvprism/group/cache_config.h"
#include "kvprism/group/projection.h"
#include "kvprism/key/key_schema.h"
#include "kvprism/layout/segment_map.h"
#include "kvprism/spec/spec_registry.h"
#include "kvprism/store/store_scheduler.h"
#include "kvprism/store/store_worker.h"

using namespace kvprism;  // NOLINT(google-build-using-namespace): an example of the whole namespace

namespace {

constexpr const char* kConfig =
    R"({"num_blocks": 8, "groups": [{"kind": "full_attention", "layers": ["l0"],
  "block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": "float16"}]})";
constexpr std::size_t kPage = 16 * (8 + 8) * 2;  // bytes of a block

// A step's jobs from the plan to the report. Nothing is computing here, so that the bytes are there
// when submit is called; an engine with a device gives its event instead of ReadyToken::host(). It
// also follows take_acquired and take_released: see ../cpp_engine/engine.cpp.
void run_jobs(StoreScheduler& scheduler, StoreWorker& worker, Instant now) {
  const StepPlan& plan = scheduler.end_step(now);
  if (!plan.empty()) worker.submit(plan.view(), ReadyToken::host());
  while (worker.pump(now)) {
  }
  WorkerReport report;
  while (worker.poll(report)) scheduler.report(report, now);
}

}  // namespace

int main() {
  Instant now;  // the caller's clock
  // A real engine's hashes; here three of 16 bytes.
  std::vector<std::uint8_t> hash_bytes(3 * 16);
  std::iota(hash_bytes.begin(), hash_bytes.end(), std::uint8_t{1});
  const HashList hashes{hash_bytes.data(), 3, 16};
  std::vector<std::byte> memory(8 * kPage);
  std::memset(memory.data() + kPage, 0xaa, 3 * kPage);  // request 1 has computed 48 tokens
  const CacheTensor tensor{
      .base = memory.data(), .bytes = memory.size(), .layers = {"l0"}, .block_stride = kPage};
  WorkerReport report;

  // [readme]
  const SpecRegistry registry = SpecRegistry::builtin();
  const auto projection = Projection::make(cache_config_from_json(kConfig, registry), registry);
  const auto schema =
      KeySchema::kvprism(projection, {.model = "my-model", .hash_algorithm = "sha256_cbor"});
  const auto map = SegmentMap::make(projection, {tensor});
  const auto store = std::make_shared<MemoryStore>(std::make_shared<MemoryPool>());
  StoreScheduler scheduler(schema, store, {.epoch = 0x5eed});
  StoreWorker worker(schema, map, store, {});

  const std::vector<BlockId> blocks{BlockId{1}, BlockId{2}, BlockId{3}};  // of request 1
  const std::vector<std::span<const BlockId>> rows{blocks};               // one row a group
  scheduler.advanced(RequestId{1}, 48, hashes);
  scheduler.save(RequestId{1}, scheduler.wants_save(RequestId{1}, now), BlockRows(rows), now);
  worker.submit(scheduler.end_step(now).view(), ReadyToken::host());  // the bytes are there
  while (worker.pump(now)) continue;  // a PumpThread does this for an engine
  while (worker.poll(report)) scheduler.report(report, now);
  // [readme]

  // Another request with the same prefix, whose blocks are 5, 6 and 7.
  scheduler.lookup(RequestId{2}, 49, hashes, 0, now);  // pending: the step sends the question
  run_jobs(scheduler, worker, now);
  const LookupResult hit = scheduler.lookup(RequestId{2}, 49, hashes, 0, now);
  const std::vector<BlockId> others{BlockId{5}, BlockId{6}, BlockId{7}};
  const std::vector<std::span<const BlockId>> other_rows{others};
  scheduler.allocated(RequestId{2}, hit.external_tokens, BlockRows(other_rows), now);
  run_jobs(scheduler, worker, now);
  std::vector<LoadEnd> ends;
  scheduler.take_load_ends(ends);

  const bool same = std::memcmp(memory.data() + kPage, memory.data() + 5 * kPage, 3 * kPage) == 0;
  const bool whole = ends.size() == 1 && ends[0].complete;
  std::printf("%u tokens offered, load %s, bytes %s\n", hit.external_tokens,
              whole ? "complete" : "failed", same ? "equal" : "different");
  return hit.external_tokens == 48 && whole && same ? 0 : 1;
}
