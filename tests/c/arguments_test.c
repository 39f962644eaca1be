/* What callers get wrong: counts that no engine can mean, and kinds that leave something open. */
#include "check.h"
#include "kvprism/kvprism.h"

static const char kConfig[] =
    "{\"num_blocks\": 8, \"groups\": [{\"kind\": \"full_attention\", \"layers\": [\"l0\"],"
    " \"block_size\": 16, \"num_kv_heads\": 1, \"head_size\": 8, \"dtype\": \"float16\"}]}";

static void counts(void) {
  kvprism_projection* projection = NULL;
  FAILS(kvprism_projection_from_json(kConfig, SIZE_MAX, &projection, &error),
        KVPRISM_INVALID_ARGUMENT,
        "kvprism_projection_from_json: length = 18446744073709551615: expected at most 67108864");
  OK(kvprism_projection_from_json(kConfig, strlen(kConfig), &projection, &error));

  static unsigned char memory[8 * 512];
  const char* const layers[] = {"l0"};
  kvprism_cache_tensor tensor;
  OK(kvprism_cache_tensor_init(&tensor, sizeof tensor, &error));
  tensor.base = memory;
  tensor.bytes = sizeof memory;
  tensor.block_stride = 512;
  tensor.layers = layers;
  tensor.num_layers = SIZE_MAX;
  kvprism_segment_map* map = NULL;
  FAILS(kvprism_segment_map_new(projection, &tensor, 1, &map, &error), KVPRISM_INVALID_ARGUMENT,
        "kvprism_segment_map_new: tensors[0].num_layers = 18446744073709551615: expected at most "
        "65536");
  FAILS(kvprism_segment_map_new(projection, &tensor, SIZE_MAX, &map, &error),
        KVPRISM_INVALID_ARGUMENT,
        "kvprism_segment_map_new: num_tensors = 18446744073709551615: expected at most 65536");
  tensor.num_layers = 1;
  OK(kvprism_segment_map_new(projection, &tensor, 1, &map, &error));

  kvprism_key_facts facts;
  kvprism_key_schema* schema = NULL;
  OK(kvprism_key_facts_init(&facts, sizeof facts, &error));
  facts.model = "m";
  facts.hash_algorithm = "sha256_cbor";
  OK(kvprism_key_schema_new(projection, &facts, &schema, &error));
  const uint8_t bytes[32] = {0};
  char* key = NULL;
  FAILS(kvprism_key_schema_key(schema, 0, 0, bytes, SIZE_MAX, &key, &error),
        KVPRISM_INVALID_ARGUMENT,
        "kvprism_key_schema_key: hash_bytes = 18446744073709551615: expected 16 to 64 bytes");

  kvprism_memory_pool* pool = NULL;
  kvprism_store* store = NULL;
  OK(kvprism_memory_pool_new(NULL, &pool, &error));
  OK(kvprism_memory_store_new(pool, &store, &error));
  kvprism_scheduler_options options;
  kvprism_scheduler* scheduler = NULL;
  OK(kvprism_scheduler_options_init(&options, sizeof options, &error));
  options.epoch = 5;
  OK(kvprism_scheduler_new(schema, store, &options, &scheduler, &error));
  kvprism_hashes hashes = {bytes, UINT32_MAX, 16, 0};
  FAILS(kvprism_scheduler_advanced(scheduler, 1, 32, &hashes, &error), KVPRISM_INVALID_ARGUMENT,
        "kvprism_scheduler_advanced: hashes.count = 4294967295: expected at most 67108864");
  hashes.count = 2;
  hashes.first = UINT32_MAX;
  FAILS(kvprism_scheduler_advanced(scheduler, 1, 32, &hashes, &error), KVPRISM_INVALID_ARGUMENT,
        "kvprism_scheduler_advanced: hashes.first = 4294967295: expected at most 67108864 hashes "
        "before and in the list");
  hashes.first = 0;
  OK(kvprism_scheduler_advanced(scheduler, 1, 32, &hashes, &error));
  uint32_t known = 0;
  OK(kvprism_scheduler_known_hashes(scheduler, 1, &known, &error));
  CHECK(known == 2);
  const int32_t ids[] = {1, 2};
  const kvprism_blocks row = {ids, SIZE_MAX};
  FAILS(kvprism_scheduler_save(scheduler, 1, 0, 32, &row, 1, 0, &error), KVPRISM_INVALID_ARGUMENT,
        "kvprism_scheduler_save: rows[0].count = 18446744073709551615: expected at most "
        "2147483647");
  FAILS(kvprism_scheduler_report(scheduler, bytes + 1, SIZE_MAX, 0, &error),
        KVPRISM_INVALID_ARGUMENT,
        "kvprism_scheduler_report: length = 18446744073709551615: expected at most 1073741824");
  FAILS(kvprism_scheduler_report(scheduler, bytes, sizeof bytes, 0, &error), KVPRISM_MISMATCH,
        "kvprism_scheduler_report: report = 32 bytes, not all of which could be taken: expected "
        "what kvprism_worker_poll gave, of this scheduler's workers (counted as reports_malformed "
        "or reports_foreign)");

  kvprism_worker_options wanted;
  kvprism_worker *worker = NULL, *second = NULL;
  OK(kvprism_worker_options_init(&wanted, sizeof wanted, &error));
  OK(kvprism_worker_new(schema, map, store, &wanted, &worker, &error));
  FAILS(kvprism_worker_new(schema, map, store, &wanted, &second, &error), KVPRISM_INVALID_ARGUMENT,
        "store worker: store = in use: expected an object store of its own (completions go to "
        "whoever polls; destroy its user first, or connect again)");
  FAILS(kvprism_worker_submit(worker, bytes + 1, SIZE_MAX, NULL, &error), KVPRISM_INVALID_ARGUMENT,
        "kvprism_worker_submit: length = 18446744073709551615: expected at most 1073741824");
  const void* plan = bytes;
  size_t length = 1;
  OK(kvprism_scheduler_end_step(scheduler, 0, &plan, &length, &error));
  CHECK(length == 0);
  FAILS(kvprism_worker_submit(worker, plan, length, NULL, &error), KVPRISM_INVALID_ARGUMENT,
        "kvprism_worker_submit: length = 0: expected a plan: an empty one goes nowhere");
  FAILS(kvprism_worker_submit(worker, bytes, 8, NULL, &error), KVPRISM_MISMATCH,
        "kvprism_worker_submit: step plan: bytes = 8: expected at least the header of 72");
  kvprism_worker_free(worker);
  kvprism_scheduler_free(scheduler);
  kvprism_store_free(store);
  kvprism_memory_pool_free(pool);
  kvprism_key_schema_free(schema);
  kvprism_segment_map_free(map);
  kvprism_projection_free(projection);
}

static void kinds(void) {
  static const char config[] =
      "{\"num_blocks\": 8, \"groups\": [{\"kind\": \"pooled_keys\", \"layers\": [\"p0\"],"
      " \"block_size\": 64, \"page_size_bytes\": 256}]}";
  kvprism_projection* projection = NULL;
  kvprism_kind kind;
  OK(kvprism_kind_init(&kind, sizeof kind, &error));
  kind.name = "mamba";
  kind.hit = "prefx";
  FAILS(kvprism_projection_with_kinds(config, strlen(config), &kind, 1, &projection, &error),
        KVPRISM_INVALID_ARGUMENT,
        "kvprism_projection_with_kinds: 11 problems\n"
        "  kinds[0].payload = null: expected one of attention, state, raw\n"
        "  kinds[0].hit = prefx: expected one of prefix, window, chunk, last_state, never\n"
        "  kinds[0].save = null: expected one of positional, hand_off, never\n"
        "  kinds[0].peer = null: expected one of suffix, window, state, whole, none\n"
        "  kinds[0].dcp_sharded = undeclared: expected 0 or 1\n"
        "  kinds[0].latent = undeclared: expected 0 or 1\n"
        "  kinds[0].prefix_cacheable = undeclared: expected 0 or 1\n"
        "  kinds[0].fine_grained_lookup = undeclared: expected 0 or 1\n"
        "  kinds[0].replay_tokens = undeclared: expected a number of tokens\n"
        "  kinds[0].window = undeclared: expected 0, as the hit rule has no window\n"
        "  kinds[0].name = mamba: expected a name that is not taken");
  kind = (kvprism_kind){.struct_size = sizeof kind,
                        .name = "pooled_keys",
                        .payload = "raw",
                        .hit = "prefix",
                        .save = "positional",
                        .peer = "suffix",
                        .latent = 1,
                        .prefix_cacheable = 1};
  OK(kvprism_projection_with_kinds(config, strlen(config), &kind, 1, &projection, &error));
  kvprism_group_info group = {.struct_size = sizeof group};
  OK(kvprism_projection_get_group(projection, 0, &group, &error));
  CHECK(group.store_index == 0 && group.tokens_per_block == 64 && group.object_bytes == 256);
  kvprism_projection_free(projection);
  FAILS(kvprism_projection_with_kinds(config, strlen(config), &kind, SIZE_MAX, &projection, &error),
        KVPRISM_INVALID_ARGUMENT,
        "kvprism_projection_with_kinds: num_kinds = 18446744073709551615: expected at most 65536");
  kind.hit = "window";
  FAILS(kvprism_projection_with_kinds(config, strlen(config), &kind, 1, &projection, &error),
        KVPRISM_INVALID_ARGUMENT,
        "kvprism_projection_with_kinds: kinds[0].window = 0: expected a number of tokens above 0, "
        "or KVPRISM_OWN_WINDOW");
}

int main(void) {
  counts();
  kinds();
  puts("c arguments: all as it should be");
  return 0;
}
