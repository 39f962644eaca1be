// A worker over a scripted store and three groups in one allocation, with plans made by hand.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <utility>
#include <vector>

#include "kvprism/store/store_worker.h"
#include "store_fixtures.h"

namespace kvprism::test {

inline constexpr std::uint64_t kWorkerEpoch = 99;
inline constexpr std::uint64_t kPage = 128;  // 16 tokens of 8 bytes

inline KeyFacts vllm_facts() {
  KeyFacts facts;
  facts.model = "m";
  facts.hash_algorithm = "test";
  return facts;
}

class WorkerTest : public ::testing::Test {
 protected:
  WorkerTest() { build(); }

  void build(StoreWorkerOptions options = {}) {
    worker.reset();
    store = std::make_shared<ScriptedStore>();
    projection = make_projection({full_group(16), ring_group(8), full_group(16, "second")});
    schema = make_schema(projection);
    memory.assign(3 * 64 * kPage, std::byte{0});
    std::vector<CacheTensor> tensors(3);
    const char* layers[] = {"full", "ring", "second"};
    for (std::size_t t = 0; t < 3; ++t) {
      tensors[t].base = memory.data();
      tensors[t].bytes = memory.size();
      tensors[t].layers = {layers[t]};
      tensors[t].layer_stride = 64 * kPage;
      tensors[t].block_stride = kPage;
      tensors[t].offset = t * 64 * kPage;
    }
    map = SegmentMap::make(projection, tensors);
    worker.reset();
    worker = std::make_unique<StoreWorker>(schema, map, store, options);
  }

  StepPlan plan_of(std::vector<JobRecord> jobs, std::vector<RunRecord> runs,
                   std::vector<std::int32_t> ids) {
    StepPlan plan;
    plan.digest = schema->plan_digest();
    plan.epoch = kWorkerEpoch;
    plan.step = ++last_step;
    plan.hash_width = Hashes::kWidth;
    plan.jobs = std::move(jobs);
    plan.runs = std::move(runs);
    for (const std::int32_t id : ids) plan.ids.push_back(BlockId{id});
    const auto marks = static_cast<std::uint32_t>(plan.ids.size());
    plan.mark_tokens.resize(marks);
    for (RunRecord& run : plan.runs) {
      run.valid_tokens_last = 16;
      for (std::uint32_t i = 0; i < run.count && run.first_mark + i < marks; ++i) {
        plan.mark_tokens[run.first_mark + i] = 16 * (run.first_chunk + i + 1);
      }
    }
    plan.mark_hashes = Hashes(marks, 1).bytes;
    return plan;
  }
  // One job over `count` chunks of the first group in blocks 1, 2, ...
  StepPlan simple(JobKind kind, std::uint32_t count, std::uint64_t id = 1) {
    std::vector<std::int32_t> ids;
    for (std::uint32_t i = 0; i < count; ++i) ids.push_back(static_cast<std::int32_t>(1 + i));
    return plan_of({{JobId{id}, RequestId{7}, kind, 0, 1, 0, seconds(10)}},
                   {{StoreIndex{0}, 0, count, 0, 0, 16}}, ids);
  }
  WorkerReport report() {
    WorkerReport out;
    worker->poll(out);
    return out;
  }

  std::shared_ptr<ScriptedStore> store;
  std::shared_ptr<const Projection> projection;
  std::shared_ptr<const KeySchema> schema;
  std::vector<std::byte> memory;
  std::shared_ptr<const SegmentMap> map;
  std::unique_ptr<StoreWorker> worker;
  Instant now{seconds(1).ns};
  std::uint64_t last_step = 0;
};

}  // namespace kvprism::test
