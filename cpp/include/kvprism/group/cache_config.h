// What the engine tells us about its cache: groups, sizes and layout (vLLM: KVCacheConfig).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kvprism/base/export.h"
#include "kvprism/spec/cache_spec.h"
#include "kvprism/spec/spec_registry.h"

namespace kvprism {

// Layers of one spec inside a uniform wrapper.
struct LayerSpec {
  CacheSpec spec;
  std::vector<std::string> layers;

  bool operator==(const LayerSpec&) const = default;
};

// One KV cache group: layers that share a block table and a spec; or a wrapper around layers of
// several specs that need the same blocks (vLLM: UniformTypeKVCacheSpecs).
struct GroupConfig {
  CacheSpec spec;                   // of a wrapper: kind "uniform" and nothing else
  std::vector<std::string> layers;  // of a wrapper: the order of its members' layers, or empty
  std::vector<LayerSpec> members;   // of a wrapper, else empty
  bool enable_kv_transfer = true;
  bool is_eagle_group = false;  // holds layers of a draft model
  bool host_resident = false;
  std::string role = "default";
  // Pipeline stages that hold layers of the group; absent: every one. `layers` are those of one
  // stage, and empty on a stage that holds none. Not part of the digest: a stage may know only
  // itself. Who looks up and purges must know it.
  std::optional<std::vector<std::uint32_t>> pipeline_stages = std::nullopt;

  bool operator==(const GroupConfig&) const = default;
};

// Ownership: value. Threads: value.
struct CacheConfig {
  std::uint32_t num_blocks = 0;     // of the pool, with the null block
  std::string kv_layout = "LBHNC";  // physical order of layer, block, head, token, content
  ParallelSizes parallel;
  // The engine's own values in tokens hold when given (decision 2).
  std::optional<std::uint32_t> scheduler_block_size;
  std::optional<std::uint32_t> hash_block_size;
  // Hits end on multiples of it; absent: of the scheduler block size (vLLM:
  // cache_hit_alignment_tokens).
  std::optional<std::uint32_t> cache_hit_alignment_tokens;
  // Tokens between prefixes that windows and states stay cached for; 0: only ends of prompts.
  // Absent: every prefix.
  std::optional<std::uint32_t> prefix_cache_retention_interval;
  // Whether a draft model makes the engine drop the last block of a hit. Absent: as the groups say,
  // each for itself.
  std::optional<bool> use_eagle;
  // KV heads of the model as the engine counts them, for the replication of key schema `vllm`.
  std::optional<std::uint32_t> model_total_kv_heads;
  std::string key_schema = "kvprism";  // part of the digest; see key/key_schema.h
  std::string key_namespace;           // tenant; part of the digest and of every key
  std::vector<GroupConfig> groups;

  bool operator==(const CacheConfig&) const = default;
};

// Reads the JSON form (docs/configuration.md: "namespace" is key_namespace). Throws Error with all
// problems: unknown keys with a suggestion, wrong types, sizes of 0 or less, unknown kinds,
// duplicate layers.
KVPRISM_API CacheConfig cache_config_from_json(std::string_view json, const SpecRegistry& registry);

// Reads a file; a missing file, a directory and text that is not JSON are errors that name the
// path.
KVPRISM_API CacheConfig cache_config_from_file(const std::string& path,
                                               const SpecRegistry& registry);

KVPRISM_API std::string to_json(const CacheConfig& config);

}  // namespace kvprism
