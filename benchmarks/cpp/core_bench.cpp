// What the step's own work costs: keys, hit search, plans. Each beside the least work that could do
// it, so that a reader compares two lines of one run and never two runs.
#include <benchmark/benchmark.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "kvprism/group/projection.h"
#include "kvprism/hit/hit_search.h"
#include "kvprism/key/key_schema.h"
#include "kvprism/spec/spec_registry.h"
#include "kvprism/wire/step_plan.h"

namespace {

using namespace kvprism;  // NOLINT(google-build-using-namespace): a benchmark of the whole
                          // namespace

std::shared_ptr<const Projection> hybrid() {
  const SpecRegistry registry = SpecRegistry::builtin();
  return Projection::make(
      cache_config_from_json(R"({"num_blocks": 4096, "kv_layout": "LBHNC", "groups": [
    {"kind": "full_attention", "layers": ["f0"], "block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": "bfloat16"},
    {"kind": "sliding_window", "layers": ["w0"], "block_size": 16, "sliding_window": 1024, "num_kv_heads": 2,
     "head_size": 64, "dtype": "bfloat16"},
    {"kind": "mamba", "layers": ["m0"], "block_size": 16, "mamba_cache_mode": "align", "shapes": [[4, 32]],
     "dtypes": ["float32"]}]})",
                             registry),
      registry);
}

std::shared_ptr<const KeySchema> schema_of(const std::shared_ptr<const Projection>& projection) {
  KeyFacts facts;
  facts.model = "bench";
  facts.hash_algorithm = "sha256_cbor";
  return KeySchema::kvprism(projection, facts);
}

std::vector<std::uint8_t> hashes(std::size_t count) {
  std::vector<std::uint8_t> bytes(count * 32);
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::uint8_t>(i * 37);
  return bytes;
}

void keys(benchmark::State& state) {
  const auto schema = schema_of(hybrid());
  const auto count = static_cast<std::size_t>(state.range(0));
  const std::vector<std::uint8_t> bytes = hashes(count);
  KeySlots slots;
  for (auto _ : state) {
    slots.clear();
    for (std::size_t i = 0; i < count; ++i) {
      schema->append_key(slots, StoreIndex{0}, {}, std::span(bytes).subspan(i * 32, 32));
    }
    benchmark::DoNotOptimize(slots.strings().data());
  }
  state.SetItemsProcessed(state.iterations() * state.range(0));
}
BENCHMARK(keys)->Arg(1024)->Arg(16384);

// The floor of `keys`: the same bytes copied into strings that are there.
void keys_floor_memcpy(benchmark::State& state) {
  const auto schema = schema_of(hybrid());
  const auto count = static_cast<std::size_t>(state.range(0));
  const std::vector<std::uint8_t> bytes = hashes(1);
  KeySlots one;
  schema->append_key(one, StoreIndex{0}, {}, bytes);
  std::vector<std::string> slots(count, std::string(one[0].size(), 'x'));
  for (auto _ : state) {
    for (std::string& slot : slots) std::memcpy(slot.data(), one[0].data(), slot.size());
    benchmark::DoNotOptimize(slots.data());
    benchmark::ClobberMemory();
  }
  state.SetItemsProcessed(state.iterations() * state.range(0));
}
BENCHMARK(keys_floor_memcpy)->Arg(1024)->Arg(16384);

void hit_search(benchmark::State& state) {
  const auto projection = hybrid();
  HitSearch search(*projection);
  const std::size_t groups = search.groups().size();
  const auto chunks = static_cast<std::uint32_t>(state.range(0));
  Presence presence;
  presence.reset(groups);
  for (const StoreIndex index : indices<StoreIndex>(groups)) {
    presence.set_units(index, chunks);
    for (std::uint32_t chunk = 0; chunk < chunks; ++chunk) presence.mark(index, chunk);
  }
  for (auto _ : state) benchmark::DoNotOptimize(search.find(presence, 0, chunks * 16));
  state.SetItemsProcessed(state.iterations() * state.range(0) * static_cast<std::int64_t>(groups));
}
BENCHMARK(hit_search)->Arg(1024)->Arg(16384);

StepPlan large_plan(std::uint32_t chunks) {
  StepPlan plan;
  plan.epoch = 1;
  plan.hash_width = 32;
  plan.jobs = {{JobId{1}, RequestId{1}, JobKind::kSave, 0, 1, 0, seconds(60)}};
  plan.runs = {{StoreIndex{0}, 0, chunks, 0, 0, 16}};
  for (std::uint32_t i = 0; i < chunks; ++i) {
    plan.ids.push_back(BlockId{static_cast<std::int32_t>(i + 1)});
    plan.mark_tokens.push_back(16 * (i + 1));
  }
  plan.mark_hashes = hashes(chunks);
  return plan;
}

void plan_encode_decode(benchmark::State& state) {
  const StepPlan plan = large_plan(static_cast<std::uint32_t>(state.range(0)));
  std::vector<std::byte> bytes;
  for (auto _ : state) {
    encode(plan.view(), bytes);
    benchmark::DoNotOptimize(decode_plan(bytes).ids.data());
  }
  state.SetBytesProcessed(state.iterations() * static_cast<std::int64_t>(bytes.size()));
}
BENCHMARK(plan_encode_decode)->Arg(128)->Arg(16384);

// The floor of `plan_encode_decode`: its bytes copied once.
void plan_floor_memcpy(benchmark::State& state) {
  std::vector<std::byte> bytes;
  encode(large_plan(static_cast<std::uint32_t>(state.range(0))).view(), bytes);
  std::vector<std::byte> copy(bytes.size());
  for (auto _ : state) {
    std::memcpy(copy.data(), bytes.data(), bytes.size());
    benchmark::DoNotOptimize(copy.data());
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * static_cast<std::int64_t>(bytes.size()));
}
BENCHMARK(plan_floor_memcpy)->Arg(128)->Arg(16384);

}  // namespace
