// What the step's own work costs, each part beside the least work that could do it.
//
//   core_bench [--json FILE] [--commit NAME] [--mooncake HOST:PORT] [--pairs N] [--sample-ms N]
#include <malloc.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kvprism/base/error.h"
#include "kvprism/base/version.h"
#include "kvprism/group/projection.h"
#include "kvprism/hit/hit_search.h"
#include "kvprism/key/key_schema.h"
#include "kvprism/layout/segment_map.h"
#include "kvprism/spec/spec_registry.h"
#include "kvprism/wire/step_plan.h"
#include "pairs.h"
#include "stores.h"

namespace kvprism::bench {
namespace {

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

std::vector<std::uint8_t> hashes(std::size_t count) {
  std::vector<std::uint8_t> bytes(count * 32);
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::uint8_t>(i * 37);
  return bytes;
}

void keys(Pairs& pairs, std::size_t count) {
  KeyFacts facts;
  facts.model = "bench";
  facts.hash_algorithm = "sha256_cbor";
  const auto schema = KeySchema::kvprism(hybrid(), facts);
  const std::vector<std::uint8_t> bytes = hashes(count);
  KeySlots slots;
  const auto make = [&] {
    slots.clear();
    for (std::size_t i = 0; i < count; ++i)
      schema->append_key(slots, StoreIndex{0}, {}, std::span(bytes).subspan(i * 32, 32));
  };
  make();
  const std::string one = slots[0];
  std::vector<std::string> there(count, std::string(one.size(), 'x'));
  pairs.compare(
      "keys/" + std::to_string(count), "key", static_cast<double>(count),
      [&](std::uint64_t n) {
        for (; n > 0; --n) {
          make();
          keep(slots.strings().data());
        }
      },
      "memcpy of the same bytes",
      [&](std::uint64_t n) {
        for (; n > 0; --n) {
          for (std::string& slot : there) std::memcpy(slot.data(), one.data(), one.size());
          keep(there.data());
        }
      });
}

void hit_search(Pairs& pairs, std::uint32_t chunks) {
  HitSearch search(*hybrid());
  const std::size_t groups = search.groups().size();
  Presence presence;
  presence.reset(groups);
  for (const StoreIndex index : indices<StoreIndex>(groups)) {
    presence.set_units(index, chunks);
    for (std::uint32_t chunk = 0; chunk < chunks; ++chunk) presence.mark(index, chunk);
  }
  pairs.compare(
      "hit search/" + std::to_string(chunks), "chunk", chunks,
      [&](std::uint64_t n) {
        for (; n > 0; --n) {
          std::uint32_t hit = search.find(presence, 0, chunks * 16);
          keep(&hit);
        }
      },
      "one look at each prefix flag",
      [&](std::uint64_t n) {
        // Only of the full attention group every flag must be seen.
        for (; n > 0; --n) {
          std::uint32_t chunk = 0;
          while (chunk < chunks && presence.has(StoreIndex{0}, chunk)) ++chunk;
          keep(&chunk);
        }
      });
}

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

void plans(Pairs& pairs, std::uint32_t chunks) {
  const StepPlan plan = large_plan(chunks);
  std::vector<std::byte> bytes;
  encode(plan.view(), bytes);
  std::vector<std::byte> copy(bytes.size());
  pairs.compare(
      "plan encode+decode/" + std::to_string(chunks), "chunk", chunks,
      [&](std::uint64_t n) {
        for (; n > 0; --n) {
          encode(plan.view(), bytes);
          keep(decode_plan(bytes).ids.data());
        }
      },
      "memcpy of the same bytes",
      [&](std::uint64_t n) {
        for (; n > 0; --n) {
          std::memcpy(copy.data(), bytes.data(), bytes.size());
          keep(copy.data());
        }
      });
}

// 32 layers of scattered pages: nothing can be merged.
void segments(Pairs& pairs, std::uint32_t blocks) {
  constexpr std::size_t kLayers = 32;
  constexpr std::size_t kPage = 16 * 2 * 128 * 2;
  std::string layers = "\"l0\"";
  for (std::size_t layer = 1; layer < kLayers; ++layer)
    layers += ", \"l" + std::to_string(layer) + "\"";
  const SpecRegistry registry = SpecRegistry::builtin();
  const auto projection = Projection::make(
      cache_config_from_json(R"({"num_blocks": 2048, "groups": [{"kind": "full_attention",
    "layers": [)" + layers + R"(], "block_size": 16, "num_kv_heads": 1, "head_size": 128,
    "dtype": "bfloat16"}]})",
                             registry),
      registry);
  // Never touched: only addresses are made.
  std::byte* const base = reinterpret_cast<std::byte*>(std::uintptr_t{1} << 40);
  CacheTensor tensor;
  tensor.base = base;
  tensor.bytes = kLayers * 2048 * kPage;
  for (std::size_t layer = 0; layer < kLayers; ++layer)
    tensor.layers.push_back("l" + std::to_string(layer));
  tensor.layer_stride = 2048 * kPage;
  tensor.block_stride = kPage;
  const auto map = SegmentMap::make(projection, {tensor});
  std::vector<Segment> out;
  out.reserve(blocks * kLayers);
  std::vector<Segment> there(blocks * kLayers);
  const auto id = [](std::uint32_t i) {
    return BlockId{static_cast<std::int32_t>(1 + i * 7 % 2047)};
  };
  pairs.compare(
      "segments/" + std::to_string(blocks) + "x32", "segment", blocks * double{kLayers},
      [&](std::uint64_t n) {
        for (; n > 0; --n) {
          out.clear();
          for (std::uint32_t i = 0; i < blocks; ++i)
            map->append_segments(StoreIndex{0}, id(i), out);
          keep(out.data());
        }
      },
      "address and length of each",
      [&](std::uint64_t n) {
        for (; n > 0; --n) {
          Segment* to = there.data();
          for (std::uint32_t i = 0; i < blocks; ++i) {
            const std::size_t at = static_cast<std::size_t>(raw(id(i))) * kPage;
            for (std::size_t layer = 0; layer < kLayers; ++layer)
              *to++ = {base + layer * 2048 * kPage + at, kPage};
          }
          keep(there.data());
        }
      });
}

struct Options {
  std::string json, commit, mooncake;
  int pairs = 15;
  double sample_ms = 20;
};

// False: what is wrong has been said.
bool read_options(std::span<char* const> words, Options& options) {
  bool good = true;
  const auto wrong = [&](std::string_view word, const char* expected) {
    std::fprintf(stderr, "core_bench: %.*s: expected %s\n", static_cast<int>(word.size()),
                 word.data(), expected);
    good = false;
  };
  const auto number = [&](std::string_view option, const std::string& text, double least) {
    char* end = nullptr;
    const double value = std::strtod(text.c_str(), &end);
    if (text.empty() || *end != 0 || !(value >= least))
      wrong(std::string(option) + " = " + text, least < 1 ? "a positive number" : "3 or more");
    return value;
  };
  for (std::size_t i = 0; i < words.size(); i += 2) {
    const std::string_view option = words[i];
    const std::string value = i + 1 < words.size() ? words[i + 1] : "";
    if (i + 1 == words.size()) wrong(option, "a value behind it");
    if (option == "--json") {
      options.json = value;
    } else if (option == "--commit") {
      options.commit = value;
    } else if (option == "--mooncake") {
      options.mooncake = value;
    } else if (option == "--pairs") {
      options.pairs = static_cast<int>(std::min(number(option, value, 3), 1e6));
    } else if (option == "--sample-ms") {
      options.sample_ms = number(option, value, 0.001);
    } else {
      wrong(option, "--json, --commit, --mooncake, --pairs or --sample-ms");
    }
  }
  return good;
}

}  // namespace
}  // namespace kvprism::bench

int main(int argc, char** argv) try {
  using namespace kvprism;         // NOLINT(google-build-using-namespace): the program itself
  using namespace kvprism::bench;  // NOLINT(google-build-using-namespace)
  // Else the pool that lies at the end of the heap would give its pages back at every eviction.
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
  Options options;
  if (!read_options(std::span(argv, static_cast<std::size_t>(argc)).subspan(1), options)) return 2;
  Pairs pairs(options.pairs, options.sample_ms);
  Pairs::print_header();
  for (const std::size_t size : {1024, 16384}) keys(pairs, size);
  for (const std::uint32_t size : {1024, 16384}) hit_search(pairs, size);
  for (const std::uint32_t size : {128, 16384}) plans(pairs, size);
  segments(pairs, 1024);
  memory_store(pairs);
  if (!options.mooncake.empty()) mooncake_store(pairs, options.mooncake);
  if (!options.json.empty() &&
      !pairs.write_json(options.json.c_str(), kVersionString, options.commit.c_str())) {
    std::fprintf(stderr, "core_bench: %s cannot be written\n", options.json.c_str());
    return 1;
  }
  return 0;
} catch (const kvprism::Error& error) {
  std::fprintf(stderr, "core_bench: %s\n", error.what());
  return 1;
}
