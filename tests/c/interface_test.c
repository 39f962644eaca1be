/* The C interface by itself: versions, sizes, null handles, errors, text. */
#define _POSIX_C_SOURCE 200809L /* fork */
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "kvprism/kvprism.h"

static const char kConfig[] =
    "{\"num_blocks\": 8, \"groups\": ["
    "{\"kind\": \"full_attention\", \"layers\": [\"l0\"], \"block_size\": 16, \"num_kv_heads\": 1,"
    " \"head_size\": 8, \"dtype\": \"float16\"},"
    "{\"kind\": \"circular_buffer\", \"layers\": [\"r0\"], \"block_size\": 8, \"num_kv_heads\": 1,"
    " \"head_size\": 8, \"dtype\": \"float16\"}]}";

static kvprism_projection* projection_of(const char* json) {
  kvprism_projection* projection = NULL;
  OK(kvprism_projection_from_json(json, strlen(json), &projection, &error));
  return projection;
}

static kvprism_key_schema* schema_of(const kvprism_projection* projection) {
  kvprism_key_facts facts;
  kvprism_key_schema* schema = NULL;
  OK(kvprism_key_facts_init(&facts, sizeof facts, &error));
  facts.model = "m";
  facts.hash_algorithm = "sha256_cbor";
  OK(kvprism_key_schema_new(projection, &facts, &schema, &error));
  return schema;
}

static void versions(void) {
  CHECK(kvprism_c_version() == KVPRISM_C_VERSION);
  OK(kvprism_check_version(KVPRISM_C_VERSION, &error));
  kvprism_error* error = NULL;
  CHECK(kvprism_check_version(99, &error) == KVPRISM_MISMATCH);
  kvprism_problem problem;
  CHECK(kvprism_error_num_problems(error) == 1);
  CHECK(kvprism_error_problem(error, 0, &problem));
  CHECK(!kvprism_error_problem(error, 1, &problem));
  CHECK(!kvprism_error_problem(error, 0, NULL));
  CHECK_TEXT(problem.path, "KVPRISM_C_VERSION");
  CHECK_TEXT(problem.value, "99");
  CHECK_TEXT(problem.hint, "compile against the header of the library that is loaded");
  kvprism_error_free(error);
  CHECK(strlen(kvprism_version()) >= 5);
  CHECK(kvprism_check_version(99, NULL) == KVPRISM_MISMATCH); /* nobody wants to know why */
  CHECK_TEXT(kvprism_status_name(KVPRISM_TIMED_OUT), "timed_out");
  CHECK_TEXT(kvprism_status_name((kvprism_status)77), "unknown");
}

static void absent_errors(void) {
  kvprism_problem problem;
  CHECK(kvprism_error_status(NULL) == KVPRISM_OK);
  CHECK_TEXT(kvprism_error_message(NULL), "");
  CHECK(kvprism_error_num_problems(NULL) == 0);
  CHECK(!kvprism_error_problem(NULL, 0, &problem));
  kvprism_error_free(NULL);
  kvprism_string_free(NULL);
}

/* A call with a struct of another size says so, beside what else is wrong with it. */
#define WRONG_SIZE(type, path, call)                                                               \
  do {                                                                                             \
    const type given = {.struct_size = sizeof given + 8};                                          \
    kvprism_error* error = NULL;                                                                   \
    CHECK((call) == KVPRISM_INVALID_ARGUMENT);                                                     \
    char wanted[200];                                                                              \
    snprintf(wanted, sizeof wanted, "%s.struct_size = %zu: expected %zu, the struct's size", path, \
             given.struct_size, sizeof given);                                                     \
    CHECK(strstr(kvprism_error_message(error), wanted) != NULL);                                   \
    kvprism_error_free(error);                                                                     \
  } while (0)
#define WRONG_OUTPUT_SIZE(type, path, call)         \
  do {                                              \
    type output = {.struct_size = 0};               \
    WRONG_SIZE(type, path, (output = given, call)); \
  } while (0)
#define WRONG_INIT(type)                                                              \
  do {                                                                                \
    type output = {.struct_size = 77};                                                \
    CHECK(type##_init(&output, sizeof output - 8, NULL) == KVPRISM_INVALID_ARGUMENT); \
    CHECK(type##_init(&output, sizeof output + 8, NULL) == KVPRISM_INVALID_ARGUMENT); \
    CHECK(output.struct_size == 77);                                                  \
  } while (0)

/* Every struct that carries its size. */
static void wrong_sizes(void) {
  kvprism_projection* const projection = projection_of(kConfig);
  kvprism_projection* other = NULL;
  kvprism_key_schema* schema = NULL;
  kvprism_segment_map* map = NULL;
  kvprism_memory_pool* pool = NULL;
  kvprism_store* store = NULL;
  kvprism_scheduler* scheduler = NULL;
  kvprism_worker* worker = NULL;
  bool flag = false;
  WRONG_INIT(kvprism_kind);
  WRONG_INIT(kvprism_key_facts);
  WRONG_INIT(kvprism_cache_tensor);
  WRONG_INIT(kvprism_memory_pool_options);
  WRONG_INIT(kvprism_mooncake_options);
  WRONG_INIT(kvprism_scheduler_options);
  WRONG_INIT(kvprism_worker_options);
  WRONG_SIZE(kvprism_kind, "kinds[0]",
             kvprism_projection_with_kinds("{}", 2, &given, 1, &other, &error));
  WRONG_SIZE(kvprism_key_facts, "facts",
             kvprism_key_schema_new(projection, &given, &schema, &error));
  WRONG_SIZE(kvprism_cache_tensor, "tensors[0]",
             kvprism_segment_map_new(projection, &given, 1, &map, &error));
  WRONG_SIZE(kvprism_memory_pool_options, "options",
             kvprism_memory_pool_new(&given, &pool, &error));
  WRONG_SIZE(kvprism_mooncake_options, "options",
             kvprism_mooncake_store_new(&given, &store, &error));
  WRONG_SIZE(kvprism_scheduler_options, "options",
             kvprism_scheduler_new(NULL, NULL, &given, &scheduler, &error));
  WRONG_SIZE(kvprism_worker_options, "options",
             kvprism_worker_new(NULL, NULL, NULL, &given, &worker, &error));
  WRONG_OUTPUT_SIZE(kvprism_projection_info, "info",
                    kvprism_projection_get_info(projection, &output, &error));
  WRONG_OUTPUT_SIZE(kvprism_group_info, "info",
                    kvprism_projection_get_group(projection, 0, &output, &error));
  WRONG_OUTPUT_SIZE(kvprism_load_end, "end",
                    kvprism_scheduler_take_load_end(NULL, &output, &flag, &error));
  WRONG_OUTPUT_SIZE(kvprism_change, "change",
                    kvprism_scheduler_take_change(NULL, &output, &flag, &error));
  WRONG_OUTPUT_SIZE(kvprism_health, "health",
                    kvprism_scheduler_health(NULL, &output, NULL, &error));
  CHECK(other == NULL && schema == NULL && map == NULL && pool == NULL && store == NULL);
  CHECK(scheduler == NULL && worker == NULL);
  kvprism_projection_free(projection);
}

static void struct_sizes(void) {
  kvprism_scheduler_options options;
  kvprism_error* error = NULL;
  CHECK(kvprism_scheduler_options_init(&options, 8, &error) == KVPRISM_INVALID_ARGUMENT);
  char wanted[400];
  snprintf(wanted, sizeof wanted,
           "kvprism_scheduler_options_init: struct_size = 8: expected %zu, the struct's size to "
           "this library (header and library are of one version, and an _init function sets it)",
           sizeof options);
  CHECK_TEXT(kvprism_error_message(error), wanted);
  kvprism_error_free(error);
  OK(kvprism_scheduler_options_init(&options, sizeof options, &error));
  CHECK(options.struct_size == sizeof options && options.loads && options.saves);
  CHECK(!options.checked && options.load_timeout_ns == 20000000000);

  /* One that was never initialised. */
  kvprism_key_facts facts = {0};
  kvprism_projection* projection = projection_of(kConfig);
  kvprism_key_schema* schema = NULL;
  CHECK(kvprism_key_schema_new(projection, &facts, &schema, NULL) == KVPRISM_INVALID_ARGUMENT);
  kvprism_cache_tensor tensors[2];
  OK(kvprism_cache_tensor_init(&tensors[0], sizeof tensors[0], &error));
  CHECK(tensors[0].device == -1);
  tensors[1].struct_size = 3;
  kvprism_segment_map* map = NULL;
  CHECK(kvprism_segment_map_new(projection, tensors, 2, &map, NULL) == KVPRISM_INVALID_ARGUMENT);
  kvprism_projection_info info = {.struct_size = 1};
  CHECK(kvprism_projection_get_info(projection, &info, NULL) == KVPRISM_INVALID_ARGUMENT);
  kvprism_worker_options worker;
  OK(kvprism_worker_options_init(&worker, sizeof worker, &error));
  CHECK(worker.pump_thread && worker.max_segments_per_call == 512);
  kvprism_memory_pool_options pool;
  OK(kvprism_memory_pool_options_init(&pool, sizeof pool, &error));
  CHECK(pool.capacity_bytes == 0 && pool.evict);
  kvprism_projection_free(projection);
}

static void projections(void) {
  const char* const bad = "{\"num_blocks\": 1, \"groups\": [{\"kind\": \"full_atention\"}]}";
  kvprism_projection* projection = NULL;
  kvprism_error* error = NULL;
  CHECK(kvprism_projection_from_json(bad, strlen(bad), &projection, &error) ==
        KVPRISM_INVALID_CONFIG);
  CHECK(projection == NULL);
  CHECK(kvprism_error_num_problems(error) >= 2); /* all at once */
  CHECK(strstr(kvprism_error_message(error), "did you mean 'full_attention'?") != NULL);
  kvprism_error_free(error);

  projection = projection_of(kConfig);
  kvprism_projection_info info = {.struct_size = sizeof info};
  OK(kvprism_projection_get_info(projection, &info, &error));
  CHECK(info.num_groups == 2 && info.num_transfer_groups == 2 && info.num_store_groups == 1);
  CHECK(info.scheduler_block_size == 16 && info.hash_block_size == 16 && info.num_blocks == 8);
  kvprism_group_info group = {.struct_size = sizeof group};
  OK(kvprism_projection_get_group(projection, 1, &group, &error));
  CHECK(group.transfer_index == 1 && group.store_index == KVPRISM_NO_INDEX);
  CHECK(group.tokens_per_block == 8 && group.object_bytes == 8 * (8 + 8) * 2);
  FAILS(kvprism_projection_get_group(projection, 2, &group, &error), KVPRISM_INVALID_ARGUMENT,
        "kvprism_projection_get_group: group = 2: expected less than 2, the number of groups");
  char* text = NULL;
  OK(kvprism_projection_why_not_stored(projection, 1, &text, &error));
  CHECK_TEXT(text, "kind circular_buffer is not prefix-cacheable");
  kvprism_string_free(text);
  OK(kvprism_projection_check_store(projection, &error));
  OK(kvprism_projection_digest(projection, &text, &error));
  CHECK(strlen(text) == 32);
  kvprism_string_free(text);
  const kvprism_projection* const stages[] = {projection, projection};
  OK(kvprism_pipeline_split_of(stages, 1, &text, &error));
  CHECK(strncmp(text, "1 stages, ", 10) == 0 && strlen(text) == 42);
  kvprism_string_free(text);
  FAILS(kvprism_pipeline_split_of(stages, 2, &text, &error), KVPRISM_INVALID_ARGUMENT,
        "pipeline split: stages[0].parallel.pp = 1: expected 2, the number of stages");

  const uint8_t hash[16] = {0xab};
  kvprism_key_schema* const schema = schema_of(projection);
  kvprism_projection_free(projection); /* the schema keeps what it needs */
  OK(kvprism_key_schema_key(schema, 0, 0, hash, sizeof hash, &text, &error));
  CHECK(strncmp(text, "kvp1/-/", 7) == 0);
  CHECK_TEXT(strrchr(text, '/'), "/ab000000000000000000000000000000");
  kvprism_string_free(text);
  FAILS(kvprism_key_schema_key(schema, 1, 5, hash, sizeof hash, &text, &error),
        KVPRISM_INVALID_ARGUMENT,
        "kvprism_key_schema_key: 2 problems\n"
        "  store_index = 1: expected less than 1, the number of stored groups\n"
        "  rank = 5: expected less than 1, the number of ranks");
  CHECK(kvprism_key_schema_key(schema, 0, 0, hash, 15, &text, NULL) == KVPRISM_INVALID_ARGUMENT);
  kvprism_key_schema_free(schema);
}

static void one_owner_a_side(void) {
  kvprism_projection* const projection = projection_of(kConfig);
  kvprism_key_schema* const schema = schema_of(projection);
  kvprism_memory_pool* pool = NULL;
  kvprism_store* store = NULL;
  OK(kvprism_memory_pool_new(NULL, &pool, &error));
  OK(kvprism_memory_store_new(pool, &store, &error));
  kvprism_scheduler_options options;
  OK(kvprism_scheduler_options_init(&options, sizeof options, &error));
  kvprism_scheduler* scheduler = NULL;
  FAILS(kvprism_scheduler_new(schema, store, &options, &scheduler, &error), KVPRISM_INVALID_CONFIG,
        "store scheduler: epoch = 0: expected a random value other than 0");
  options.epoch = 5;
  OK(kvprism_scheduler_new(schema, store, &options, &scheduler, &error));
  kvprism_scheduler* second = NULL;
  FAILS(kvprism_scheduler_new(schema, store, &options, &second, &error), KVPRISM_INVALID_CONFIG,
        "store scheduler: index = in use: expected an object index of its own (completions go to "
        "whoever polls; destroy its user first, or connect again)");
  kvprism_scheduler_free(scheduler);
  OK(kvprism_scheduler_new(schema, store, &options, &scheduler, &error));
  FAILS(kvprism_scheduler_set_mode(scheduler, 4, &error), KVPRISM_INVALID_ARGUMENT,
        "kvprism_scheduler_set_mode: mode = 4: expected 0 to 3");
  OK(kvprism_scheduler_set_mode(scheduler, 3, &error));
  const int32_t id = 1;
  const kvprism_blocks row = {&id, 1};
  FAILS(
      kvprism_scheduler_save(scheduler, 1, 0, 16, &row, SIZE_MAX, 0, &error),
      KVPRISM_INVALID_ARGUMENT,
      "kvprism_scheduler_save: num_rows = 18446744073709551615: expected 2, a row for every group");
  FAILS(kvprism_scheduler_boundary(scheduler, 1, 2, 3, 16, &error), KVPRISM_INVALID_ARGUMENT,
        "kvprism_scheduler_boundary: group = 2: expected less than 2, the number of groups");
  char* name = NULL;
  OK(kvprism_store_name(store, &name, &error));
  CHECK_TEXT(name, "memory");
  kvprism_string_free(name);
  /* Handles go in any order. */
  kvprism_memory_pool_free(pool);
  kvprism_store_free(store);
  kvprism_key_schema_free(schema);
  kvprism_projection_free(projection);
  kvprism_scheduler_free(scheduler);
}

static void mooncake_says_what_is_wrong(void) {
  kvprism_mooncake_options options;
  kvprism_store* store = NULL;
  OK(kvprism_mooncake_options_init(&options, sizeof options, &error));
  CHECK_TEXT(options.protocol, "tcp");
  options.protocol = "pigeon";
  options.setup_timeout_ns = -1;
  kvprism_error* error = NULL;
  CHECK(kvprism_mooncake_store_new(&options, &store, &error) == KVPRISM_INVALID_CONFIG);
  CHECK(kvprism_error_num_problems(error) == 3); /* no master, no such protocol, no time */
  CHECK(strstr(kvprism_error_message(error), "setup_timeout = -1: expected positive") != NULL);
  CHECK(strstr(kvprism_error_message(error), "protocol = pigeon: expected") != NULL);
  kvprism_error_free(error);

  OK(kvprism_mooncake_options_init(&options, sizeof options, &error));
  CHECK(options.max_slices_per_call == 8192 && options.max_bytes_per_call == 256u << 20);
  CHECK(options.max_region_bytes == 0 && options.unknown_build == 0 && options.max_attempts == 0);
  CHECK(options.stuck_after_ns == 65000000000 && options.first_retry_ns == 100000000);
  CHECK(options.max_retry_ns == 10000000000 && options.close_budget_ns == 5000000000);
  CHECK(options.region_timeout_ns == 120000000000 && options.probe_interval_ns == 1000000000);
  CHECK(options.queue_limit == 256 && options.max_retired == 8);
  /* 0 is the default: only the master is missing. */
  options.max_slices_per_call = options.max_retired = 0;
  options.max_bytes_per_call = options.queue_limit = 0;
  options.stuck_after_ns = options.first_retry_ns = options.max_retry_ns = 0;
  options.region_timeout_ns = options.probe_interval_ns = 0;
  CHECK(kvprism_mooncake_store_new(&options, &store, &error) == KVPRISM_INVALID_CONFIG);
  CHECK(kvprism_error_num_problems(error) == 1);
  kvprism_error_free(error);
  /* Every other value arrives. */
  options.max_region_bytes = 1;
  options.max_slices_per_call = 8193;
  options.unknown_build = 2;
  options.stuck_after_ns = options.first_retry_ns = options.max_retry_ns = -1;
  options.region_timeout_ns = options.probe_interval_ns = -1;
  CHECK(kvprism_mooncake_store_new(&options, &store, &error) == KVPRISM_INVALID_CONFIG);
  CHECK(kvprism_error_num_problems(error) == 9);
  const char* const wanted[] = {"max_region_bytes = 1: expected 0 or at least 1048576 bytes",
                                "max_slices_per_call = 8193: expected between 1 and 8192",
                                "unknown_build = 2: expected 0 (refuse) or 1 (probe)",
                                "stuck_after = -1: expected positive",
                                "region_timeout = -1: expected positive",
                                "probe_interval = -1: expected positive",
                                "first_retry = -1: expected positive",
                                "max_retry = -1: expected positive"};
  for (size_t i = 0; i < sizeof wanted / sizeof *wanted; ++i)
    CHECK(strstr(kvprism_error_message(error), wanted[i]) != NULL);
  kvprism_error_free(error);
  CHECK(store == NULL);
}

static void null_ready(void* context) { ++*(int*)context; }
static void count(void* context, const char* name, uint64_t value) {
  (void)context, (void)name, (void)value;
}

/* Every function that takes a handle, without one. */
static void null_handles(void) {
#define REFUSED(call) CHECK((call) == KVPRISM_INVALID_ARGUMENT)
  kvprism_projection* projection = NULL;
  kvprism_projection_info info = {.struct_size = sizeof info};
  kvprism_group_info group = {.struct_size = sizeof group};
  kvprism_key_facts facts;
  kvprism_cache_tensor tensor;
  kvprism_scheduler_options scheduler_options;
  kvprism_worker_options worker_options;
  OK(kvprism_key_facts_init(&facts, sizeof facts, &error));
  OK(kvprism_cache_tensor_init(&tensor, sizeof tensor, &error));
  OK(kvprism_scheduler_options_init(&scheduler_options, sizeof scheduler_options, &error));
  OK(kvprism_worker_options_init(&worker_options, sizeof worker_options, &error));
  kvprism_key_schema* schema = NULL;
  kvprism_segment_map* map = NULL;
  kvprism_store* store = NULL;
  kvprism_scheduler* scheduler = NULL;
  kvprism_worker* worker = NULL;
  const kvprism_hashes hashes = {0};
  kvprism_blocks blocks = {0};
  kvprism_load_end end = {.struct_size = sizeof end};
  const void* bytes = NULL;
  const char* word = NULL;
  const uint8_t hash[16] = {0};
  char* text = NULL;
  size_t length = 0;
  uint64_t number = 0;
  uint32_t small = 0;
  bool flag = false;

  REFUSED(kvprism_projection_from_json(NULL, 1, &projection, NULL));
  REFUSED(kvprism_projection_from_json("{}", 2, NULL, NULL));
  REFUSED(kvprism_kind_init(NULL, sizeof(kvprism_kind), NULL));
  REFUSED(kvprism_projection_with_kinds(NULL, 1, NULL, 0, &projection, NULL));
  REFUSED(kvprism_projection_get_info(NULL, &info, NULL));
  REFUSED(kvprism_projection_get_group(NULL, 0, &group, NULL));
  REFUSED(kvprism_projection_why_not_stored(NULL, 0, &text, NULL));
  REFUSED(kvprism_projection_check_store(NULL, NULL));
  REFUSED(kvprism_projection_digest(NULL, &text, NULL));
  REFUSED(kvprism_pipeline_split_of(NULL, 1, &text, NULL));
  REFUSED(kvprism_key_facts_init(NULL, sizeof facts, NULL));
  REFUSED(kvprism_key_schema_new(NULL, &facts, &schema, NULL));
  REFUSED(kvprism_key_schema_key(NULL, 0, 0, hash, sizeof hash, &text, NULL));
  REFUSED(kvprism_cache_tensor_init(NULL, sizeof tensor, NULL));
  REFUSED(kvprism_segment_map_new(NULL, &tensor, 1, &map, NULL));
  REFUSED(kvprism_memory_pool_options_init(NULL, 24, NULL));
  REFUSED(kvprism_memory_pool_new(NULL, NULL, NULL));
  REFUSED(kvprism_memory_pool_counters(NULL, &count, NULL, NULL));
  REFUSED(kvprism_memory_store_new(NULL, &store, NULL));
  REFUSED(kvprism_mooncake_options_init(NULL, 0, NULL));
  REFUSED(kvprism_mooncake_store_new(NULL, &store, NULL));
  REFUSED(kvprism_store_name(NULL, &text, NULL));
  REFUSED(kvprism_store_counters(NULL, &count, NULL, NULL));
  REFUSED(kvprism_store_close(NULL, 0, &number, NULL));
  REFUSED(kvprism_scheduler_options_init(NULL, 0, NULL));
  REFUSED(kvprism_scheduler_new(NULL, NULL, &scheduler_options, &scheduler, NULL));
  REFUSED(kvprism_scheduler_set_mode(NULL, 0, NULL));
  REFUSED(kvprism_scheduler_purge(NULL, 0, NULL));
  REFUSED(kvprism_scheduler_purge_status(NULL, &word, &number, NULL));
  REFUSED(kvprism_scheduler_restrict(NULL, 1, true, true, NULL));
  REFUSED(kvprism_scheduler_prompt(NULL, 1, 17, NULL));
  REFUSED(kvprism_scheduler_lookup(NULL, 1, 17, &hashes, 0, 0, &flag, &small, NULL));
  REFUSED(kvprism_scheduler_allocated(NULL, 1, 0, &blocks, 1, 0, &number, NULL));
  REFUSED(kvprism_scheduler_advanced(NULL, 1, 0, &hashes, NULL));
  REFUSED(kvprism_scheduler_wants_save(NULL, 1, 0, &small, &small, NULL));
  REFUSED(kvprism_scheduler_saves_paused(NULL, 0, &flag, NULL));
  REFUSED(kvprism_scheduler_save(NULL, 1, 0, 16, &blocks, 1, 0, NULL));
  REFUSED(kvprism_scheduler_boundary(NULL, 1, 0, 1, 16, NULL));
  REFUSED(kvprism_scheduler_preempted(NULL, 1, NULL));
  REFUSED(kvprism_scheduler_finished(NULL, 1, false, NULL));
  REFUSED(kvprism_scheduler_end_step(NULL, 0, &bytes, &length, NULL));
  REFUSED(kvprism_scheduler_report(NULL, hash, sizeof hash, 0, NULL));
  REFUSED(kvprism_scheduler_rank_gone(NULL, 0, 0, NULL));
  REFUSED(kvprism_scheduler_take_load_end(NULL, &end, &flag, NULL));
  kvprism_change change = {.struct_size = sizeof change};
  kvprism_health health = {.struct_size = sizeof health};
  REFUSED(kvprism_scheduler_take_change(NULL, &change, &flag, NULL));
  REFUSED(kvprism_scheduler_health(NULL, &health, &text, NULL));
  REFUSED(kvprism_scheduler_known_hashes(NULL, 1, &small, NULL));
  REFUSED(kvprism_scheduler_take_acquired(NULL, &blocks, NULL));
  REFUSED(kvprism_scheduler_take_released(NULL, &blocks, NULL));
  REFUSED(kvprism_scheduler_has_pending_work(NULL, &flag, NULL));
  REFUSED(kvprism_scheduler_counters(NULL, &count, NULL, NULL));
  REFUSED(kvprism_worker_options_init(NULL, 0, NULL));
  REFUSED(kvprism_worker_new(NULL, NULL, NULL, &worker_options, &worker, NULL));
  int destroyed = 0;
  const kvprism_ready ready = {.query = NULL, .destroy = &null_ready, .context = &destroyed};
  REFUSED(kvprism_worker_submit(NULL, hash, sizeof hash, &ready, NULL));
  CHECK(destroyed == 1);
  REFUSED(kvprism_worker_poll(NULL, &bytes, &length, NULL));
  REFUSED(kvprism_worker_wait(NULL, 0, NULL));
  REFUSED(kvprism_worker_pump(NULL, 0, &flag, NULL));
  REFUSED(kvprism_worker_close(NULL, 0, 0, &number, NULL));
  REFUSED(kvprism_worker_counters(NULL, &count, NULL, NULL));
  REFUSED(kvprism_worker_group_counters(NULL, 0, &count, NULL, NULL));
  FAILS(kvprism_scheduler_lookup(NULL, 1, 17, NULL, 0, 0, NULL, NULL, &error),
        KVPRISM_INVALID_ARGUMENT,
        "kvprism_scheduler_lookup: 4 problems\n"
        "  scheduler = null: expected a pointer\n"
        "  hashes = null: expected a pointer\n"
        "  pending = null: expected a pointer\n"
        "  external_tokens = null: expected a pointer");
  kvprism_projection_free(NULL);
  kvprism_key_schema_free(NULL);
  kvprism_segment_map_free(NULL);
  kvprism_memory_pool_free(NULL);
  kvprism_store_free(NULL);
  kvprism_scheduler_free(NULL);
  kvprism_worker_free(NULL);
#undef REFUSED
}

static void no_line(void* context, int32_t level, const char* line, size_t length) {
  (void)context, (void)level, (void)line, (void)length;
}

static void log_sinks(void) {
  OK(kvprism_set_log_sink(&no_line, NULL, 2, &error));
  OK(kvprism_set_log_sink(NULL, NULL, 0, &error));
  FAILS(kvprism_set_log_sink(&no_line, NULL, 5, &error), KVPRISM_INVALID_ARGUMENT,
        "kvprism_set_log_sink: level = 5: expected 0 to 4");
}

/* It has neither the threads nor the connections of its parent. */
static void forked_children(void) {
  kvprism_projection* projection = projection_of(kConfig);
  kvprism_key_schema* schema = schema_of(projection);
  kvprism_store* store = NULL;
  kvprism_memory_pool* pool = NULL;
  OK(kvprism_memory_pool_new(NULL, &pool, &error));
  OK(kvprism_memory_store_new(pool, &store, &error));
  kvprism_scheduler_options options;
  OK(kvprism_scheduler_options_init(&options, sizeof options, &error));
  options.epoch = 7;
  kvprism_scheduler* scheduler = NULL;
  OK(kvprism_scheduler_new(schema, store, &options, &scheduler, &error));
  const pid_t child = fork();
  if (child == 0) {
    const void* plan = NULL;
    size_t length = 0;
    FAILS(kvprism_scheduler_end_step(scheduler, 0, &plan, &length, &error), KVPRISM_CLOSED,
          "kvprism_scheduler_end_step: scheduler = of another process: expected one that this "
          "process has made (a forked child has none of its threads and connections)");
    kvprism_scheduler* second = NULL;
    CHECK(kvprism_scheduler_new(schema, store, &options, &second, NULL) == KVPRISM_CLOSED);
    _exit(0);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
  kvprism_scheduler_free(scheduler);
  kvprism_store_free(store);
  kvprism_memory_pool_free(pool);
  kvprism_key_schema_free(schema);
  kvprism_projection_free(projection);
}

int main(void) {
  versions();
  forked_children();
  absent_errors();
  struct_sizes();
  wrong_sizes();
  projections();
  one_owner_a_side();
  mooncake_says_what_is_wrong();
  null_handles();
  log_sinks();
  puts("c interface: all as it should be");
  return 0;
}
