// Projection, keys and segments of the C interface.
#include <optional>
#include <string>

#include "c_api/guard.h"
#include "c_api/handles.h"
#include "c_api/kinds.h"
#include "kvprism/group/cache_config.h"
#include "kvprism/spec/spec_registry.h"
#include "kvprism/store/validate_store.h"

using namespace kvprism;         // NOLINT(google-build-using-namespace): functions outside of any
using namespace kvprism::c_api;  // NOLINT(google-build-using-namespace)

namespace {

template <class Index>
std::uint32_t index_or_none(const std::optional<Index>& index) {
  return index ? raw(*index) : KVPRISM_NO_INDEX;
}

void need_group(Arguments& arguments, const kvprism_projection* projection, std::uint32_t group) {
  if (projection == nullptr) return;
  const std::size_t groups = projection->shared->num_groups();
  if (group >= groups) {
    arguments.wrong("group", std::to_string(group),
                    "less than " + std::to_string(groups) + ", the number of groups");
  }
}

void make_projection(Arguments& arguments, const char* json, size_t length,
                     const kvprism_kind* kinds, size_t num_kinds, kvprism_projection** projection) {
  arguments.need(json, "json");
  arguments.need_at_most(length, "length", kMostJson);
  arguments.need_array(kinds, num_kinds, "kinds", "num_kinds", kMostElements);
  arguments.need(projection, "projection");
  arguments.check();
  const SpecRegistry registry = registry_with(arguments, kinds, num_kinds);
  *projection = new kvprism_projection{
      Projection::make(cache_config_from_json({json, length}, registry), registry)};
}

}  // namespace

kvprism_status kvprism_projection_from_json(const char* json, size_t length,
                                            kvprism_projection** projection,
                                            kvprism_error** error) {
  return guarded(error, [&] {
    Arguments arguments("kvprism_projection_from_json");
    make_projection(arguments, json, length, nullptr, 0, projection);
  });
}

kvprism_status kvprism_projection_with_kinds(const char* json, size_t length,
                                             const kvprism_kind* kinds, size_t num_kinds,
                                             kvprism_projection** projection,
                                             kvprism_error** error) {
  return guarded(error, [&] {
    Arguments arguments("kvprism_projection_with_kinds");
    make_projection(arguments, json, length, kinds, num_kinds, projection);
  });
}

kvprism_status kvprism_projection_get_info(const kvprism_projection* projection,
                                           kvprism_projection_info* info, kvprism_error** error) {
  return guarded(error, [&] {
    Arguments arguments("kvprism_projection_get_info");
    arguments.need(projection, "projection");
    arguments.need_struct(info, "info");
    arguments.check();
    const Projection& groups = *projection->shared;
    *info = {.struct_size = sizeof(*info),
             .num_groups = static_cast<std::uint32_t>(groups.num_groups()),
             .num_transfer_groups = static_cast<std::uint32_t>(groups.num_transfer_groups()),
             .num_store_groups = static_cast<std::uint32_t>(groups.num_store_groups()),
             .num_blocks = groups.num_blocks(),
             .scheduler_block_size = groups.scheduler_block_size(),
             .hash_block_size = groups.hash_block_size(),
             .hit_alignment = groups.hit_alignment(),
             .replay_tokens = groups.replay_tokens()};
  });
}

kvprism_status kvprism_projection_get_group(const kvprism_projection* projection, uint32_t group,
                                            kvprism_group_info* info, kvprism_error** error) {
  return guarded(error, [&] {
    Arguments arguments("kvprism_projection_get_group");
    arguments.need(projection, "projection");
    need_group(arguments, projection, group);
    arguments.need_struct(info, "info");
    arguments.check();
    const Projection& groups = *projection->shared;
    const GroupId id{group};
    *info = {.struct_size = sizeof(*info),
             .transfer_index = index_or_none(groups.transfer_index(id)),
             .store_index = index_or_none(groups.store_index(id)),
             .tokens_per_block = groups.group(id).tokens_per_block,
             .object_bytes = groups.group(id).object_bytes()};
  });
}

kvprism_status kvprism_projection_why_not_stored(const kvprism_projection* projection,
                                                 uint32_t group, char** text,
                                                 kvprism_error** error) {
  return guarded(error, [&] {
    Arguments arguments("kvprism_projection_why_not_stored");
    arguments.need(projection, "projection");
    need_group(arguments, projection, group);
    arguments.need(text, "text");
    arguments.check();
    *text = give(projection->shared->why_not_stored(GroupId{group}));
  });
}

kvprism_status kvprism_projection_check_store(const kvprism_projection* projection,
                                              kvprism_error** error) {
  return guarded(error, [&] {
    Arguments arguments("kvprism_projection_check_store");
    arguments.need(projection, "projection");
    arguments.check();
    ProblemList problems;
    problems.append(validate_store(*projection->shared));
    problems.throw_if_any(ErrorCode::kInvalidConfig, "store");
  });
}

kvprism_status kvprism_projection_digest(const kvprism_projection* projection, char** hex,
                                         kvprism_error** error) {
  return guarded(error, [&] {
    Arguments arguments("kvprism_projection_digest");
    arguments.need(projection, "projection");
    arguments.need(hex, "hex");
    arguments.check();
    *hex = give(to_hex(projection->shared->digest()));
  });
}

void kvprism_projection_free(kvprism_projection* projection) { delete projection; }

kvprism_status kvprism_key_facts_init(kvprism_key_facts* facts, size_t struct_size,
                                      kvprism_error** error) {
  return init("kvprism_key_facts_init", facts, struct_size,
              kvprism_key_facts{.struct_size = 0,
                                .model = "",
                                .model_revision = "",
                                .kv_quantization = "none",
                                .hash_algorithm = "",
                                .pipeline_split = "",
                                .hash_is_stable = true},
              error);
}

kvprism_status kvprism_pipeline_split_of(const kvprism_projection* const* stages, size_t count,
                                         char** split, kvprism_error** error) {
  return guarded(error, [&] {
    Arguments arguments("kvprism_pipeline_split_of");
    arguments.need_array(stages, count, "stages", "count", kMostElements);
    arguments.need(split, "split");
    arguments.check();
    std::vector<std::shared_ptr<const Projection>> all(count);
    for (size_t at = 0; at < count; ++at) {
      if (stages[at] != nullptr) all[at] = stages[at]->shared;
    }
    *split = give(pipeline_split_of(all));
  });
}

kvprism_status kvprism_key_schema_new(const kvprism_projection* projection,
                                      const kvprism_key_facts* facts, kvprism_key_schema** schema,
                                      kvprism_error** error) {
  return guarded(error, [&] {
    Arguments arguments("kvprism_key_schema_new");
    arguments.need(projection, "projection");
    arguments.need_struct(facts, "facts");
    arguments.need(schema, "schema");
    arguments.check();
    const KeyFacts all{.model = text(facts->model),
                       .model_revision = text(facts->model_revision),
                       .kv_quantization = text(facts->kv_quantization),
                       .hash_algorithm = text(facts->hash_algorithm),
                       .pipeline_split = text(facts->pipeline_split),
                       .hash_is_stable = facts->hash_is_stable};
    *schema = new kvprism_key_schema{KeySchema::make(projection->shared, all)};
  });
}

kvprism_status kvprism_key_schema_key(const kvprism_key_schema* schema, uint32_t store_index,
                                      uint32_t rank, const uint8_t* hash, size_t hash_bytes,
                                      char** key, kvprism_error** error) {
  return guarded(error, [&] {
    Arguments arguments("kvprism_key_schema_key");
    arguments.need(schema, "schema");
    if (schema != nullptr) {
      const Projection& groups = schema->shared->projection();
      if (store_index >= groups.num_store_groups()) {
        arguments.wrong("store_index", std::to_string(store_index),
                        "less than " + std::to_string(groups.num_store_groups()) +
                            ", the number of stored groups");
      }
      if (rank >= groups.parallel().world()) {
        arguments.wrong(
            "rank", std::to_string(rank),
            "less than " + std::to_string(groups.parallel().world()) + ", the number of ranks");
      }
    }
    arguments.need(hash, "hash");
    if (hash_bytes < kMinHashWidth || hash_bytes > kMaxHashWidth)
      arguments.wrong("hash_bytes", std::to_string(hash_bytes), hash_widths());
    arguments.need(key, "key");
    arguments.check();
    KeySlots slots;
    const StoreIndex group{store_index};
    const RankPosition own = rank_position(Rank{rank}, schema->shared->projection().parallel());
    schema->shared->append_key(slots, group, schema->shared->shard_of(group, own),
                               {hash, hash_bytes});
    *key = give(slots[0]);
  });
}

void kvprism_key_schema_free(kvprism_key_schema* schema) { delete schema; }

kvprism_status kvprism_cache_tensor_init(kvprism_cache_tensor* tensor, size_t struct_size,
                                         kvprism_error** error) {
  kvprism_cache_tensor defaults{};
  defaults.device = -1;
  return init("kvprism_cache_tensor_init", tensor, struct_size, defaults, error);
}

kvprism_status kvprism_segment_map_new(const kvprism_projection* projection,
                                       const kvprism_cache_tensor* tensors, size_t num_tensors,
                                       kvprism_segment_map** map, kvprism_error** error) {
  return guarded(error, [&] {
    Arguments arguments("kvprism_segment_map_new");
    arguments.need(projection, "projection");
    arguments.need_array(tensors, num_tensors, "tensors", "num_tensors", kMostElements);
    arguments.need(map, "map");
    arguments.check();
    for (size_t i = 0; i < num_tensors; ++i) {
      const std::string path = "tensors[" + std::to_string(i) + "]";
      arguments.need_size<kvprism_cache_tensor>(tensors[i].struct_size, path + ".struct_size");
      // Of another size the rest would be read from the wrong places.
      arguments.check();
      arguments.need_array(tensors[i].layers, tensors[i].num_layers, (path + ".layers").c_str(),
                           (path + ".num_layers").c_str(), kMostElements);
    }
    arguments.check();
    std::vector<CacheTensor> all;
    for (size_t i = 0; i < num_tensors; ++i) {
      const kvprism_cache_tensor& given = tensors[i];
      CacheTensor& tensor = all.emplace_back();
      tensor.base = static_cast<std::byte*>(given.base);
      tensor.bytes = given.bytes;
      for (size_t layer = 0; layer < given.num_layers; ++layer)
        tensor.layers.push_back(text(given.layers[layer]));
      tensor.layer_stride = given.layer_stride;
      tensor.block_stride = given.block_stride;
      tensor.offset = given.offset;
      tensor.head_stride = given.head_stride;
      tensor.kernel_block_size = given.kernel_block_size;
      tensor.device = given.device;
    }
    *map = new kvprism_segment_map{SegmentMap::make(projection->shared, std::move(all))};
  });
}

void kvprism_segment_map_free(kvprism_segment_map* map) { delete map; }
