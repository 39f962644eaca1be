// A master, a store on it, and operations that wait for both of their ends.
#pragma once

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <array>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kvprism/backend/blocking_store.h"
#include "kvprism/backend/mooncake_client.h"
#include "mooncake_server.h"

namespace kvprism::test {

// Memory that outlives every store of the test program: a hung call may write there at any time.
class Memory {
 public:
  explicit Memory(std::size_t bytes)
      : base_(static_cast<std::byte*>(
            ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))),
        bytes_(bytes) {}
  std::byte* at(std::size_t offset) const { return base_ + offset; }
  Region region() const { return {base_, bytes_, -1}; }
  std::size_t size() const { return bytes_; }

  void fill(std::size_t offset, std::size_t bytes, std::uint32_t seed) const {
    for (std::size_t i = 0; i < bytes; ++i) {
      seed = seed * 1664525u + 1013904223u;
      base_[offset + i] = static_cast<std::byte>(seed >> 24);
    }
  }
  bool holds(std::size_t offset, std::size_t bytes, std::uint32_t seed) const {
    for (std::size_t i = 0; i < bytes; ++i) {
      seed = seed * 1664525u + 1013904223u;
      if (base_[offset + i] != static_cast<std::byte>(seed >> 24)) return false;
    }
    return true;
  }

 private:
  std::byte* base_;
  std::size_t bytes_;
};

struct Item {
  std::string key;
  std::vector<Segment> segments;
};

inline std::unique_ptr<ObjectBatch> batch_of(const std::vector<Item>& items) {
  auto batch = std::make_unique<ObjectBatch>();
  for (const Item& item : items) {
    batch->keys.append() = item.key;
    batch->segments.insert(batch->segments.end(), item.segments.begin(), item.segments.end());
    batch->ends.push_back(static_cast<std::uint32_t>(batch->segments.size()));
  }
  return batch;
}

// Starts operations on a store and keeps their ends apart.
class Operations {
 public:
  using Statuses = std::vector<ItemStatus>;
  explicit Operations(BlockingStore& store) : store_(store) {}

  static Instant now() {
    return {std::chrono::duration_cast<std::chrono::nanoseconds>(
                std::chrono::steady_clock::now().time_since_epoch())
                .count()};
  }

  OpId start_put(const std::vector<Item>& items) {
    auto batch = batch_of(items);
    const OpId op = next();
    EXPECT_TRUE(store_.start_put(op, batch, now(), now() + seconds(600)));
    return op;
  }
  OpId start_get(const std::vector<Item>& items) {
    auto batch = batch_of(items);
    const OpId op = next();
    EXPECT_TRUE(store_.start_get(op, batch, now(), now() + seconds(600)));
    return op;
  }
  OpId start_exists(const std::vector<std::string>& keys) {
    auto batch = std::make_unique<ObjectBatch>();
    for (const std::string& key : keys) batch->keys.append() = key;
    const OpId op = next();
    EXPECT_TRUE(store_.start_exists(op, batch, now(), now() + seconds(600)));
    return op;
  }

  void drain() {
    Completion completion;
    while (store_.poll_store(now(), completion) || store_.poll_index(now(), completion)) {
      if (completion.outcome) outcomes_[completion.op] = std::move(completion.items);
      if (completion.quiet) quiet_[completion.op] = std::move(completion.batch);
      completion = Completion();
    }
  }
  bool has_outcome(OpId op) const { return outcomes_.contains(op); }
  bool is_quiet(OpId op) const { return quiet_.contains(op); }
  template <class Condition>
  bool wait(Condition condition, std::chrono::milliseconds limit = std::chrono::seconds(30)) {
    const auto end = std::chrono::steady_clock::now() + limit;
    for (drain(); !condition(); drain()) {
      if (std::chrono::steady_clock::now() > end) return false;
      store_.wait_for_completion(milliseconds(5));
    }
    return true;
  }
  const std::vector<ItemResult>& items(OpId op) const { return outcomes_.at(op); }
  Statuses statuses(OpId op) const {
    Statuses result;
    for (const ItemResult& item : outcomes_.at(op)) result.push_back(item.status);
    return result;
  }
  Statuses finish(OpId op) {
    if (!wait([&] { return is_quiet(op); })) {
      ADD_FAILURE() << "operation " << static_cast<std::uint64_t>(op) << " does not end";
      return {};
    }
    return statuses(op);
  }
  Statuses put(const std::vector<Item>& items) { return finish(start_put(items)); }
  Statuses get(const std::vector<Item>& items) { return finish(start_get(items)); }
  Statuses exists(const std::vector<std::string>& keys) { return finish(start_exists(keys)); }

 private:
  OpId next() { return OpId{++last_}; }

  BlockingStore& store_;
  std::uint64_t last_ = 0;
  std::map<OpId, std::vector<ItemResult>> outcomes_;
  std::map<OpId, std::unique_ptr<ObjectBatch>> quiet_;
};

// Needs an installed Mooncake: `make test` installs it, and its absence is a failure.
class MooncakeTest : public testing::Test {
 protected:
  static constexpr std::size_t kPool = 64 << 20;

  void SetUp() override {
    site_packages_ = mooncake_site_packages();
    ASSERT_FALSE(site_packages_.empty())
        << "no Mooncake in a .venv and no KVPRISM_TEST_MOONCAKE_DIR";
    ASSERT_TRUE(std::filesystem::exists(site_packages_ + "/mooncake")) << site_packages_;
  }

  MooncakeOptions options(const MooncakeMaster& master, std::int64_t segment = kPool) const {
    MooncakeOptions result;
    result.site_packages = {site_packages_};
    result.master = master.address();
    result.global_segment_size = segment;
    // Bytes cross sockets, as between machines.
    result.environment = {{"MC_STORE_MEMCPY", "0"}};
    return result;
  }

  std::string site_packages_;
};

}  // namespace kvprism::test
