// Small configurations and a store whose every completion the test decides.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "kvprism/group/cache_config.h"
#include "kvprism/group/projection.h"
#include "kvprism/io/object_store.h"
#include "kvprism/key/key_schema.h"
#include "kvprism/layout/segment_map.h"
#include "kvprism/spec/spec_registry.h"
#include "kvprism/store/store_scheduler.h"

namespace kvprism::test {

inline GroupConfig attention_group(std::string kind, std::uint32_t block_size, std::string layer) {
  GroupConfig group;
  group.spec.kind = std::move(kind);
  group.spec.block_size = block_size;
  AttentionPayload payload;
  payload.num_kv_heads = 1;
  payload.head_size = 4;
  payload.head_size_v = 4;
  payload.dtype = DType::kInt8;
  group.spec.payload = payload;
  group.layers = {std::move(layer)};
  return group;
}
inline GroupConfig full_group(std::uint32_t block_size, std::string layer = "full") {
  return attention_group("full_attention", block_size, std::move(layer));
}
inline GroupConfig ring_group(std::uint32_t capacity, std::string layer = "ring") {
  return attention_group("circular_buffer", capacity, std::move(layer));
}
inline GroupConfig window_group(std::uint32_t block_size, std::uint32_t window,
                                std::string layer = "window") {
  GroupConfig group = attention_group("sliding_window", block_size, std::move(layer));
  group.spec.sliding_window = window;
  return group;
}
inline GroupConfig mamba_group(std::uint32_t block_size, std::string layer = "mamba") {
  GroupConfig group;
  group.spec.kind = "mamba";
  group.spec.block_size = block_size;
  group.spec.payload = StatePayload{{{32}}, {DType::kInt8}, "align"};
  group.layers = {std::move(layer)};
  return group;
}

inline std::shared_ptr<const Projection> make_projection(std::vector<GroupConfig> groups,
                                                         std::uint32_t num_blocks = 64,
                                                         std::uint32_t tp = 1) {
  CacheConfig config;
  config.num_blocks = num_blocks;
  config.parallel.tp = tp;
  config.groups = std::move(groups);
  return Projection::make(config, SpecRegistry::builtin());
}

inline std::shared_ptr<const KeySchema> make_schema(std::shared_ptr<const Projection> projection) {
  KeyFacts facts;
  facts.model = "test-model";
  facts.hash_algorithm = "test";
  if (projection->parallel().pp > 1) facts.pipeline_split = "uneven";
  return KeySchema::kvprism(std::move(projection), facts);
}

// Hashes of tokens 1, 2, 3, ... that depend on `salt` and the position alone.
struct Hashes {
  std::vector<std::uint8_t> bytes;
  static constexpr std::uint32_t kWidth = 16;

  Hashes(std::uint32_t count, std::uint8_t salt) {
    for (std::uint32_t i = 0; i < count; ++i) {
      for (std::uint32_t b = 0; b < kWidth; ++b) {
        bytes.push_back(static_cast<std::uint8_t>(b < 4 ? (i + 1) >> (8 * b) : salt + b));
      }
    }
  }
  HashList list(std::uint32_t from = 0) const {
    return {bytes.data() + static_cast<std::size_t>(from) * kWidth,
            static_cast<std::uint32_t>(bytes.size() / kWidth) - from, kWidth, from};
  }
};

// A table of rows that can be handed to the scheduler.
class Rows {
 public:
  explicit Rows(std::vector<std::vector<std::int32_t>> rows) {
    for (const auto& row : rows) {
      auto& ids = ids_.emplace_back();
      for (const std::int32_t id : row) ids.push_back(BlockId{id});
    }
    for (const auto& ids : ids_) spans_.emplace_back(ids);
  }
  BlockRows get() const { return BlockRows(std::span<const std::span<const BlockId>>(spans_)); }

 private:
  std::vector<std::vector<BlockId>> ids_;
  std::vector<std::span<const BlockId>> spans_;
};

// Nothing completes until the test says so.
class ScriptedStore final : public ObjectStore, public ObjectIndex {
 public:
  struct Started {
    OpId op{};
    std::unique_ptr<ObjectBatch> batch;
    Instant deadline;
    std::vector<std::string> keys() const { return batch->keys.strings(); }
  };

  bool start_exists(OpId op, std::unique_ptr<ObjectBatch>& batch, Instant,
                    Instant deadline) override {
    return start(lookups, op, batch, deadline);
  }
  bool start_remove(OpId op, std::unique_ptr<ObjectBatch>& batch, const Removal& removal, Instant,
                    Instant deadline) override {
    if (!start(removals, op, batch, deadline)) return false;
    removal_kinds.push_back(removal);
    return true;
  }
  bool start_put(OpId op, std::unique_ptr<ObjectBatch>& batch, Instant, Instant deadline) override {
    return start(puts, op, batch, deadline);
  }
  bool start_get(OpId op, std::unique_ptr<ObjectBatch>& batch, Instant, Instant deadline) override {
    return start(gets, op, batch, deadline);
  }
  bool poll_index(Instant, Completion& out) override { return pop(lookup_ends, out); }
  bool poll_store(Instant, Completion& out) override { return pop(store_ends, out); }
  CloseReport close_index(Duration) override { return {}; }
  CloseReport close_store(Duration) override {
    closed = true;
    CloseReport report;
    for (const auto* list : {&puts, &gets}) {
      for (const Started& started : *list) report.ops.push_back(started.op);
    }
    report.unquiet = report.ops.size();
    return report;
  }
  StoreCapabilities capabilities() const override { return {"scripted", 0, 0, device_memory}; }
  void add_region(const Region& region) override {
    if (throw_region_at == regions.size()) throw std::bad_alloc();
    if (fail_region_at == regions.size())
      fail(ErrorCode::kUnavailable, "region", {"length", "1", "luck", {}});
    regions.push_back(region);
  }
  void remove_region(const Region& region) override {
    if (keeps_regions) fail(ErrorCode::kUnavailable, "region", {"thread", "none", "one", {}});
    std::erase(regions, region);
  }

  // Ends the oldest call of a list; missing results are kOk with the item's bytes.
  void end_lookup(std::vector<ItemStatus> statuses) {
    Started started = take(lookups);
    Completion end;
    end.op = started.op;
    end.outcome = end.quiet = true;
    for (const ItemStatus status : statuses) end.items.push_back({status, 0});
    end.batch = std::move(started.batch);
    lookup_ends.push_back(std::move(end));
  }
  // Present where the key is in `present`.
  void answer_lookup() {
    std::vector<ItemStatus> statuses;
    for (const std::string& key : lookups.front().keys()) {
      statuses.push_back(present.contains(key) ? ItemStatus::kOk : ItemStatus::kMissing);
    }
    end_lookup(std::move(statuses));
  }
  // Ends the oldest removal, each key with `result`.
  void end_removal(ItemResult result) {
    Started started = take(removals);
    removal_kinds.pop_front();
    Completion end;
    end.op = started.op;
    end.outcome = end.quiet = true;
    end.items.assign(started.batch->keys.size(), result);
    end.batch = std::move(started.batch);
    lookup_ends.push_back(std::move(end));
  }
  void end_put(std::map<std::size_t, ItemStatus> bad = {}, bool quiet = true) {
    end(puts, std::move(bad), quiet);
  }
  void end_get(std::map<std::size_t, ItemStatus> bad = {}, bool quiet = true) {
    end(gets, std::move(bad), quiet);
  }
  void become_quiet() {
    Started started = std::move(unquiet.front());
    unquiet.pop_front();
    Completion end;
    end.op = started.op;
    end.quiet = true;
    end.batch = std::move(started.batch);
    store_ends.push_back(std::move(end));
  }

  std::deque<Removal> removal_kinds;  // of `removals`
  std::deque<Started> lookups, removals, puts, gets, unquiet;
  std::deque<Completion> lookup_ends, store_ends;
  std::map<std::string, int> present;
  std::vector<Region> regions;
  std::size_t fail_region_at = SIZE_MAX;
  bool keeps_regions = false;
  std::size_t throw_region_at = SIZE_MAX;
  bool device_memory = true;
  bool refuse = false;
  bool closed = false;

 private:
  bool start(std::deque<Started>& list, OpId op, std::unique_ptr<ObjectBatch>& batch,
             Instant deadline) {
    if (refuse) return false;
    list.push_back({op, std::move(batch), deadline});
    return true;
  }
  static bool pop(std::deque<Completion>& list, Completion& out) {
    if (list.empty()) return false;
    out = std::move(list.front());
    list.pop_front();
    return true;
  }
  static Started take(std::deque<Started>& list) {
    Started started = std::move(list.front());
    list.pop_front();
    return started;
  }
  void end(std::deque<Started>& list, std::map<std::size_t, ItemStatus> bad, bool quiet) {
    Started started = take(list);
    Completion end;
    end.op = started.op;
    end.outcome = true;
    end.quiet = quiet;
    std::size_t first = 0;
    for (std::size_t i = 0; i < started.batch->ends.size(); ++i) {
      std::uint64_t bytes = 0;
      for (; first < started.batch->ends[i]; ++first)
        bytes += started.batch->segments[first].length;
      const auto it = bad.find(i);
      if (it == bad.end()) {
        end.items.push_back({ItemStatus::kOk, bytes});
      } else {
        end.items.push_back({it->second, 0});
      }
    }
    if (quiet) {
      end.batch = std::move(started.batch);
    } else {
      unquiet.push_back(std::move(started));
    }
    store_ends.push_back(std::move(end));
  }
};

}  // namespace kvprism::test
