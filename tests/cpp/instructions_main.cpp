// Fixed work for `valgrind --tool=callgrind`: what its functions cost in instructions is the same
// on every run.
#include <cstdint>
#include <cstdio>
#include <memory>
#include <span>
#include <vector>

#include "kvprism/hit/hit_search.h"
#include "kvprism/layout/segment_map.h"
#include "kvprism/store/store_worker.h"
#include "store_fixtures.h"

namespace {

using namespace kvprism;  // NOLINT(google-build-using-namespace): a program of the whole namespace

constexpr std::uint32_t kItems = 20000;

// Named, so that callgrind can count what happens inside each.
[[gnu::noinline]] void make_keys(const KeySchema& schema, KeySlots& slots,
                                 std::span<const std::uint8_t> hashes) {
  slots.clear();
  for (std::uint32_t i = 0; i < kItems; ++i)
    schema.append_key(slots, StoreIndex{0}, {}, hashes.subspan(i % 64, 32));
}
[[gnu::noinline]] std::uint32_t search_hit(HitSearch& search, const Presence& presence) {
  return search.find(presence, 0, kItems * 16);
}
[[gnu::noinline]] bool retire_jobs(StoreWorker& worker) { return worker.pump(Instant{1}); }

// Whether a worker that has had kItems jobs at once, with nothing to move, has forgotten them.
bool jobs_end(const std::shared_ptr<const Projection>& projection,
              const std::shared_ptr<const KeySchema>& schema) {
  std::vector<std::byte> memory(4096);
  std::vector<CacheTensor> tensors(2);
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    tensors[t].base = memory.data();
    tensors[t].bytes = memory.size();
    tensors[t].layers = projection->group(GroupId{static_cast<std::uint32_t>(t)}).layers;
    tensors[t].block_stride = t == 0 ? 128 : 32;
    tensors[t].offset = t * 2048;
  }
  StoreWorkerOptions options;
  options.max_queued_jobs = kItems;
  StoreWorker worker(schema, SegmentMap::make(projection, tensors),
                     std::make_shared<test::ScriptedStore>(), options);
  StepPlan plan;
  plan.digest = schema->plan_digest();
  plan.epoch = plan.step = 1;
  plan.hash_width = test::Hashes::kWidth;
  for (std::uint32_t i = 0; i < kItems; ++i)
    plan.jobs.push_back({JobId{i + 1}, RequestId{7}, JobKind::kLoad, 0, 0, 0, seconds(10)});
  if (!worker.submit(plan.view(), ReadyToken::host()).accepted) return false;
  retire_jobs(worker);
  return worker.counters().jobs == kItems && worker.counters().jobs_alive == 0;
}

}  // namespace

int main() {
  const auto projection = test::make_projection({test::full_group(16), test::mamba_group(16)}, 16);
  const auto schema = test::make_schema(projection);
  const std::vector<std::uint8_t> hashes(96, 0x5a);
  KeySlots slots;
  // Outside the counted function: the slots get their capacity.
  for (std::uint32_t i = 0; i < kItems; ++i) {
    schema->append_key(slots, StoreIndex{0}, {}, std::span(hashes).first(32));
  }

  HitSearch search(*projection);
  Presence presence;
  presence.reset(search.groups().size());
  for (const StoreIndex index : indices<StoreIndex>(search.groups().size())) {
    presence.set_units(index, kItems);
    for (std::uint32_t chunk = 0; chunk < kItems; ++chunk) presence.mark(index, chunk);
  }
  std::printf("%u items\n", kItems);
  make_keys(*schema, slots, hashes);
  const std::uint32_t hit = search_hit(search, presence);
  const bool right = hit == kItems * 16 && slots.size() == kItems && jobs_end(projection, schema);
  return right ? 0 : 1;
}
