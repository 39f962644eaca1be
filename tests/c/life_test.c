/* A small engine in C: saves three blocks, forgets them, and loads them for another request.

     c_life_test             in this process's memory, with a pump thread and without
     c_life_test HOST:PORT   in Mooncake, whose master listens there */
#include "check.h"
#include "kvprism/kvprism.h"

enum { kBlocks = 8, kPage = 16 * (8 + 8) * 2, kTokens = 48 };
static const char kConfig[] =
    "{\"num_blocks\": 8, \"groups\": [{\"kind\": \"full_attention\", \"layers\": [\"l0\"],"
    " \"block_size\": 16, \"num_kv_heads\": 1, \"head_size\": 8, \"dtype\": \"float16\"}]}";
static const int64_t kSecond = 1000000000;
static const char kRecording[] = "c_life_test.run"; /* where the test runs */

typedef struct {
  kvprism_key_schema* schema;
  kvprism_store* store;
  kvprism_scheduler* scheduler;
  kvprism_worker* worker;
  bool pump_thread;
  unsigned char* memory;
  int references[kBlocks];
  unsigned queries, destroyed;
} Engine;

static kvprism_ready_state ready_at_second(void* context) {
  Engine* const engine = context;
  return ++engine->queries < 2 ? KVPRISM_READY_PENDING : KVPRISM_READY;
}
static void destroy_ready(void* context) { ++((Engine*)context)->destroyed; }

static void connect_store(const kvprism_memory_pool* pool, const char* master,
                          kvprism_store** store) {
  if (master == NULL) {
    OK(kvprism_memory_store_new(pool, store, &error));
    return;
  }
  kvprism_mooncake_options options;
  OK(kvprism_mooncake_options_init(&options, sizeof options, &error));
  options.master = master;
  OK(kvprism_mooncake_store_new(&options, store, &error));
}

static void new_scheduler(const Engine* engine, kvprism_store* store, uint64_t epoch,
                          const char* recording, kvprism_scheduler** scheduler) {
  kvprism_scheduler_options options;
  OK(kvprism_scheduler_options_init(&options, sizeof options, &error));
  options.epoch = epoch;
  options.checked = true;
  options.tell_changes = true;
  options.healthy_after_ns = kSecond;
  options.flight_record_path = "c_life_test.flight";
  options.record_to = recording;
  OK(kvprism_scheduler_new(engine->schema, store, &options, scheduler, &error));
}

static void open_engine(Engine* engine, const kvprism_memory_pool* pool, const char* master,
                        bool pump_thread) {
  memset(engine, 0, sizeof *engine);
  engine->pump_thread = pump_thread;
  engine->memory = malloc(kBlocks * kPage);
  CHECK(engine->memory != NULL);
  kvprism_projection* projection = NULL;
  OK(kvprism_projection_from_json(kConfig, strlen(kConfig), &projection, &error));
  kvprism_key_facts facts;
  OK(kvprism_key_facts_init(&facts, sizeof facts, &error));
  facts.model = "m";
  facts.hash_algorithm = "sha256_cbor";
  OK(kvprism_key_schema_new(projection, &facts, &engine->schema, &error));
  const char* const layers[] = {"l0"};
  kvprism_cache_tensor tensor;
  OK(kvprism_cache_tensor_init(&tensor, sizeof tensor, &error));
  tensor.base = engine->memory;
  tensor.bytes = kBlocks * kPage;
  tensor.layers = layers;
  tensor.num_layers = 1;
  tensor.block_stride = kPage;
  kvprism_segment_map* map = NULL;
  OK(kvprism_segment_map_new(projection, &tensor, 1, &map, &error));
  connect_store(pool, master, &engine->store);
  remove(kRecording);
  new_scheduler(engine, engine->store, 0x5eed, master == NULL ? kRecording : NULL,
                &engine->scheduler);
  kvprism_worker_options worker;
  OK(kvprism_worker_options_init(&worker, sizeof worker, &error));
  worker.pump_thread = pump_thread;
  OK(kvprism_worker_new(engine->schema, map, engine->store, &worker, &engine->worker, &error));
  kvprism_segment_map_free(map);
  kvprism_projection_free(projection);
}

static void close_engine(Engine* engine) {
  uint64_t unquiet = 1;
  kvprism_key_schema_free(engine->schema);
  OK(kvprism_worker_close(engine->worker, kvprism_now(), INT64_MAX, &unquiet, &error));
  CHECK(unquiet == 0);
  unquiet = 1;
  OK(kvprism_store_close(engine->store, INT64_MAX, &unquiet, &error));
  CHECK(unquiet == 0);
  kvprism_worker_free(engine->worker);
  kvprism_scheduler_free(engine->scheduler);
  kvprism_store_free(engine->store);
  free(engine->memory);
}

static void follow_references(Engine* engine) {
  kvprism_blocks blocks;
  OK(kvprism_scheduler_take_acquired(engine->scheduler, &blocks, &error));
  for (size_t i = 0; i < blocks.count; ++i) ++engine->references[blocks.ids[i]];
  OK(kvprism_scheduler_take_released(engine->scheduler, &blocks, &error));
  for (size_t i = 0; i < blocks.count; ++i) --engine->references[blocks.ids[i]];
}

static void step(Engine* engine, const kvprism_ready* ready) {
  const void* bytes = NULL;
  size_t length = 0;
  OK(kvprism_scheduler_end_step(engine->scheduler, kvprism_now(), &bytes, &length, &error));
  if (length != 0) OK(kvprism_worker_submit(engine->worker, bytes, length, ready, &error));
  follow_references(engine);
  if (!engine->pump_thread) {
    bool moved = true;
    while (moved) OK(kvprism_worker_pump(engine->worker, kvprism_now(), &moved, &error));
  }
  OK(kvprism_worker_poll(engine->worker, &bytes, &length, &error));
  if (length != 0) {
    /* From anywhere: a report that came over a wire need not be aligned. */
    unsigned char* const copy = malloc(length + 1);
    CHECK(copy != NULL);
    memcpy(copy + 1, bytes, length);
    OK(kvprism_scheduler_report(engine->scheduler, copy + 1, length, kvprism_now(), &error));
    free(copy);
  } else if (engine->pump_thread) {
    OK(kvprism_worker_wait(engine->worker, INT64_MIN, &error)); /* no time at all */
    OK(kvprism_worker_wait(engine->worker, kSecond / 1000, &error));
  }
  follow_references(engine);
}

static bool pending_work(const Engine* engine) {
  bool pending = false;
  OK(kvprism_scheduler_has_pending_work(engine->scheduler, &pending, &error));
  return pending;
}

static void find_counter(void* context, const char* name, uint64_t value) {
  if (strcmp(name, "saved_objects") == 0 || strcmp(name, "objects") == 0 ||
      strcmp(name, "bytes_fetched") == 0)
    *(uint64_t*)context = value;
}

static void find_got_bytes(void* context, const char* name, uint64_t value) {
  if (strcmp(name, "get_bytes") == 0) *(uint64_t*)context = value;
}

static void find_group_counter(void* context, const char* name, uint64_t value) {
  if (strcmp(name, "loaded_bytes") == 0) *(uint64_t*)context = value;
}

/* Chunks from `chunk` on, each behind the one before it, and nothing else: how many there are then.
   While one waits, also in the handle, the engine must go on. */
static uint32_t changes(Engine* engine, const unsigned char* hashes, uint32_t chunk) {
  kvprism_change change = {.struct_size = sizeof change};
  bool found = false;
  for (bool pending = pending_work(engine);; ++chunk, pending = pending_work(engine)) {
    OK(kvprism_scheduler_take_change(engine->scheduler, &change, &found, &error));
    if (!found) return chunk;
    CHECK(pending);
    CHECK(change.stored && change.request == 1 && change.group == 0);
    CHECK(change.chunk == chunk && change.tokens == (chunk + 1) * 16);
    CHECK(change.hash_bytes == 16 && memcmp(change.hash, hashes + chunk * 16, 16) == 0);
    CHECK(change.parent_bytes == (chunk == 0 ? 0u : 16u));
    if (chunk != 0) CHECK(memcmp(change.parent, hashes + (chunk - 1) * 16, 16) == 0);
  }
}

/* Request 1 saves its three blocks. */
static void save(Engine* engine, const kvprism_hashes* hashes, const kvprism_ready* ready) {
  const int32_t blocks[] = {1, 2, 3};
  const kvprism_blocks row = {blocks, 3};
  uint32_t from = 0, to = 0, told = 0;
  OK(kvprism_scheduler_advanced(engine->scheduler, 1, kTokens, hashes, &error));
  bool paused = true;
  OK(kvprism_scheduler_saves_paused(engine->scheduler, kvprism_now(), &paused, &error));
  CHECK(!paused);
  OK(kvprism_scheduler_wants_save(engine->scheduler, 1, kvprism_now(), &from, &to, &error));
  CHECK(from == 0 && to == kTokens);
  OK(kvprism_scheduler_save(engine->scheduler, 1, from, to, &row, 1, kvprism_now(), &error));
  do {
    step(engine, ready);
    told = changes(engine, hashes->data, told);
  } while (pending_work(engine));
  CHECK(told == 3);
  OK(kvprism_scheduler_finished(engine->scheduler, 1, false, &error));
}

/* Until the store offers the request all three. */
static void look_up(Engine* engine, uint64_t request, const kvprism_hashes* hashes) {
  bool pending = true;
  uint32_t external = 0;
  for (;;) {
    OK(kvprism_scheduler_lookup(engine->scheduler, request, kTokens + 1, hashes, 0, kvprism_now(),
                                &pending, &external, &error));
    if (!pending) break;
    step(engine, NULL);
  }
  CHECK(external == kTokens);
}

/* The job that loads them. */
static uint64_t allocate(Engine* engine, uint64_t request, const int32_t* blocks) {
  const kvprism_blocks row = {blocks, 3};
  uint64_t job = 0;
  OK(kvprism_scheduler_allocated(engine->scheduler, request, kTokens, &row, 1, kvprism_now(), &job,
                                 &error));
  CHECK(job != 0);
  return job;
}

static void health(const Engine* engine) {
  kvprism_health health = {.struct_size = sizeof health};
  char* text = NULL;
  OK(kvprism_scheduler_health(engine->scheduler, &health, &text, &error));
  CHECK(health.state == KVPRISM_HEALTHY && health.reasons == 0);
  CHECK_TEXT(text, "healthy");
  kvprism_string_free(text);
  OK(kvprism_scheduler_health(engine->scheduler, &health, NULL, &error));
}

static void purge(Engine* engine, const kvprism_memory_pool* pool) {
  const char* state = NULL;
  uint64_t removed = 0;
  OK(kvprism_scheduler_purge(engine->scheduler, kvprism_now(), &error));
  while (removed < 3) {
    step(engine, NULL);
    OK(kvprism_scheduler_purge_status(engine->scheduler, &state, &removed, &error));
  }
  CHECK_TEXT(state, "waiting");
  uint64_t left = 1;
  OK(kvprism_memory_pool_counters(pool, &find_counter, &left, &error));
  CHECK(left == 0);
}

static void live(const char* master, bool pump_thread) {
  unsigned char hash_bytes[3 * 16];
  for (size_t i = 0; i < sizeof hash_bytes; ++i) hash_bytes[i] = (unsigned char)(i + 1);
  const kvprism_hashes hashes = {hash_bytes, 3, 16, 0};
  const int32_t second[] = {5, 6, 7};
  kvprism_memory_pool* pool = NULL;
  OK(kvprism_memory_pool_new(NULL, &pool, &error));

  Engine engine;
  open_engine(&engine, pool, master, pump_thread);
  for (size_t i = 0; i < kBlocks * kPage; ++i) engine.memory[i] = (unsigned char)(i * 31 >> 3);
  unsigned char expected[3 * kPage];
  memcpy(expected, engine.memory + kPage, sizeof expected);
  const kvprism_ready ready = {&ready_at_second, &destroy_ready, &engine};
  save(&engine, &hashes, &ready);
  health(&engine);
  CHECK(engine.queries == 2);
  for (int i = 0; i < kBlocks; ++i) CHECK(engine.references[i] == 0);
  uint64_t saved = 0;
  OK(kvprism_scheduler_counters(engine.scheduler, &find_counter, &saved, &error));
  CHECK(saved == 3);
  if (master == NULL) {
    OK(kvprism_memory_pool_counters(pool, &find_counter, &saved, &error));
    CHECK(saved == 3);
  }
  close_engine(&engine);

  /* The engine starts anew; the pool is still there. */
  open_engine(&engine, pool, master, pump_thread);
  memset(engine.memory, 0xaa, kBlocks * kPage);
  look_up(&engine, 2, &hashes);
  uint64_t job = 0;
  /* The scheduler is a checked one: a table that is too short is refused, and the offer stands. */
  kvprism_error* out_of_order = NULL;
  const kvprism_blocks too_short = {second, 2};
  CHECK(kvprism_scheduler_allocated(engine.scheduler, 2, kTokens, &too_short, 1, kvprism_now(),
                                    &job, &out_of_order) == KVPRISM_INVALID_ARGUMENT);
  CHECK_TEXT(kvprism_error_message(out_of_order),
             "scheduler call: allocated(request 2) = a table of 2 blocks for group 0: expected at "
             "least 3 blocks, for 48 tokens");
  kvprism_error_free(out_of_order);
  CHECK(job == 0);
  job = allocate(&engine, 2, second);
  CHECK(kvprism_scheduler_advanced(engine.scheduler, 2, kTokens, &hashes, &out_of_order) ==
        KVPRISM_INVALID_ARGUMENT);
  CHECK(strstr(kvprism_error_message(out_of_order), "advanced(request 2) = waiting for load") !=
        NULL);
  kvprism_error_free(out_of_order);
  kvprism_load_end end = {.struct_size = sizeof end};
  bool found = false;
  while (!found) {
    step(&engine, NULL);
    OK(kvprism_scheduler_take_load_end(engine.scheduler, &end, &found, &error));
  }
  CHECK(end.request == 2 && end.job == job && end.valid_tokens == kTokens);
  CHECK(end.complete && end.blocks_quiet && end.num_failed == 0);
  CHECK(memcmp(engine.memory + 5 * kPage, expected, sizeof expected) == 0);
  uint64_t fetched = 0;
  OK(kvprism_worker_counters(engine.worker, &find_counter, &fetched, &error));
  CHECK(fetched == 3 * kPage);
  uint64_t of_group = 0;
  OK(kvprism_worker_group_counters(engine.worker, 0, &find_group_counter, &of_group, &error));
  CHECK(of_group == 3 * kPage);
  FAILS(kvprism_worker_group_counters(engine.worker, 1, &find_group_counter, &of_group, &error),
        KVPRISM_INVALID_ARGUMENT,
        "kvprism_worker_group_counters: group = 1: expected below 1, the config's groups");

  const uint8_t narrow[8] = {0};
  const kvprism_hashes odd = {.data = narrow, .count = 1, .width = sizeof narrow};
  CHECK(kvprism_scheduler_advanced(engine.scheduler, 2, 0, &odd, NULL) == KVPRISM_INVALID_ARGUMENT);

  /* The connection counts what went through it; a memory store has its pool's counters. */
  uint64_t got = 0;
  OK(kvprism_store_counters(engine.store, &find_got_bytes, &got, &error));
  CHECK(got == (master == NULL ? 0 : 3 * kPage));

  /* A foreign plan is refused. */
  const uint64_t rubbish[16] = {0};
  CHECK(kvprism_worker_submit(engine.worker, rubbish, sizeof rubbish, NULL, NULL) ==
        KVPRISM_MISMATCH);
  OK(kvprism_scheduler_finished(engine.scheduler, 2, true, &error));

  /* Mooncake keeps what was read for a while: its purge takes longer than a test may. */
  if (master == NULL) purge(&engine, pool);
  close_engine(&engine);
  kvprism_memory_pool_free(pool);
  if (master == NULL) {
    FILE* const recording = fopen(kRecording, "rb");
    char magic[4] = "";
    CHECK(recording != NULL && fread(magic, 1, 4, recording) == 4);
    CHECK(memcmp(magic, "KVPR", 4) == 0);
    fclose(recording);
  }
  remove(kRecording);
}

/* One report ends two loads: what was not asked for yet keeps the engine going. */
static void two_loads(Engine* engine, const kvprism_hashes* hashes) {
  const int32_t first[] = {1, 2, 3}, second[] = {5, 6, 7};
  look_up(engine, 2, hashes);
  look_up(engine, 3, hashes);
  const uint64_t jobs[] = {allocate(engine, 2, first), allocate(engine, 3, second)};
  step(engine, NULL);
  kvprism_load_end end = {.struct_size = sizeof end};
  bool found = false;
  OK(kvprism_scheduler_take_load_end(engine->scheduler, &end, &found, &error));
  CHECK(found && end.request == 2 && end.job == jobs[0] && end.valid_tokens == kTokens);
  CHECK(pending_work(engine));
  /* A checked scheduler bears that for one step. */
  step(engine, NULL);
  CHECK(pending_work(engine));
  const void* plan = NULL;
  size_t length = 0;
  FAILS(kvprism_scheduler_end_step(engine->scheduler, kvprism_now(), &plan, &length, &error),
        KVPRISM_INVALID_ARGUMENT,
        "scheduler call: end_step = 1 load ends not taken: expected "
        "kvprism_scheduler_take_load_end in every step until it finds none: their requests wait "
        "for them");
  OK(kvprism_scheduler_take_load_end(engine->scheduler, &end, &found, &error));
  CHECK(found && end.request == 3 && end.job == jobs[1] && end.valid_tokens == kTokens);
  CHECK(!pending_work(engine));
  OK(kvprism_scheduler_take_load_end(engine->scheduler, &end, &found, &error));
  CHECK(!found);
  step(engine, NULL);
  for (uint64_t request = 2; request <= 3; ++request)
    OK(kvprism_scheduler_finished(engine->scheduler, request, false, &error));
}

/* The scheduler starts anew, and the worker does not: one poll has the reports for both. */
static void two_schedulers(Engine* engine, const kvprism_memory_pool* pool,
                           const kvprism_hashes* hashes) {
  const int32_t blocks[] = {5, 6, 7};
  const void* bytes = NULL;
  size_t length = 0;
  kvprism_scheduler* const first = engine->scheduler;
  kvprism_scheduler* second = NULL;
  kvprism_store* store = NULL;
  connect_store(pool, NULL, &store);
  new_scheduler(engine, store, 0xface, NULL, &second);
  look_up(engine, 4, hashes);
  engine->scheduler = second;
  look_up(engine, 5, hashes);

  engine->scheduler = first;
  const uint64_t of_first = allocate(engine, 4, blocks);
  OK(kvprism_scheduler_end_step(first, kvprism_now(), &bytes, &length, &error));
  OK(kvprism_worker_submit(engine->worker, bytes, length, NULL, &error));
  follow_references(engine);
  for (bool moved = true; moved;)
    OK(kvprism_worker_pump(engine->worker, kvprism_now(), &moved, &error));
  engine->scheduler = second;
  const uint64_t of_second = allocate(engine, 5, blocks);
  OK(kvprism_scheduler_end_step(second, kvprism_now(), &bytes, &length, &error));
  CHECK(kvprism_worker_submit(engine->worker, bytes, length, NULL, NULL) == KVPRISM_MISMATCH);
  follow_references(engine);

  OK(kvprism_worker_poll(engine->worker, &bytes, &length, &error));
  kvprism_load_end end = {.struct_size = sizeof end};
  bool found = false;
  /* Each takes its own report, and counts the other one. */
  CHECK(kvprism_scheduler_report(first, bytes, length, kvprism_now(), NULL) == KVPRISM_MISMATCH);
  OK(kvprism_scheduler_take_load_end(first, &end, &found, &error));
  CHECK(found && end.job == of_first && end.complete);
  CHECK(kvprism_scheduler_report(second, bytes, length, kvprism_now(), NULL) == KVPRISM_MISMATCH);
  OK(kvprism_scheduler_take_load_end(second, &end, &found, &error));
  CHECK(found && end.job == of_second && !end.complete && end.valid_tokens == 0);
  follow_references(engine);
  OK(kvprism_worker_poll(engine->worker, &bytes, &length, &error));
  CHECK(length == 0);
  kvprism_scheduler_free(second);
  kvprism_store_free(store);
  engine->scheduler = first;
}

static void several_at_once(void) {
  unsigned char bytes[3 * 16];
  for (size_t i = 0; i < sizeof bytes; ++i) bytes[i] = (unsigned char)(i + 1);
  const kvprism_hashes hashes = {bytes, 3, 16, 0};
  kvprism_memory_pool* pool = NULL;
  OK(kvprism_memory_pool_new(NULL, &pool, &error));
  Engine engine;
  open_engine(&engine, pool, NULL, false);
  memset(engine.memory, 0x55, kBlocks * kPage);
  save(&engine, &hashes, NULL);
  two_loads(&engine, &hashes);
  two_schedulers(&engine, pool, &hashes);
  close_engine(&engine);
  kvprism_memory_pool_free(pool);
  remove(kRecording);
}

int main(int argc, char** argv) {
  if (argc > 1) {
    live(argv[1], true);
  } else {
    live(NULL, false);
    live(NULL, true);
    several_at_once();
  }
  puts("c engine: loaded what it had saved");
  return 0;
}
