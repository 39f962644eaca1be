/* The C interface (C11): projection, keys, segments, stores, scheduler and worker for engines in C,
   Rust, Go, or any language that calls C (R81). docs/cpp.md tells which call comes when; the rules
   are the same here.

   Calls. Every function that can fail returns a status and takes `error` last: where to put what
   was wrong, or null. On success it becomes null, else an object for kvprism_error_free. Outputs
   are written on success only. No exception leaves a function. A null handle is an error with
   KVPRISM_INVALID_ARGUMENT; only the _free functions take null.

   Versions. kvprism_check_version(KVPRISM_C_VERSION, ...) first. A struct that may grow begins with
   `struct_size`: the _init functions set it, with every other member at its default; of outputs the
   caller sets it to the struct's sizeof. Another size than the library's own is an error.

   Ownership. A handle belongs to the caller until its _free, in any order: handles keep what they
   were made of. A `char*` that a function gives is freed with kvprism_string_free. Pointers that a
   function gives into a handle's own memory hold until the next call of that function on the
   handle. Inputs are read during the call only, but for memory that moves: that of segment maps.

   Text is UTF-8 and ends with a zero byte; null is the empty text. Times are nanoseconds.

   Counts. An array has as many elements as its count says, and bytes as many as their length: what
   lies behind a pointer cannot be checked, and is read. A count that no engine can mean is an error
   that names it, before anything is read: 65,536 tensors, layers of one tensor, kinds or RDMA
   devices; 2^26 hashes; 2^31 - 1 blocks of a table; 64 MiB of JSON, 1 GiB of a plan or report.

   Threads. Different handles may be used by different threads; a scheduler's by one, the engine's.
   kvprism_worker_submit may run beside kvprism_worker_poll; what else a worker has is called from
   one thread at a time. A second thread in a scheduler is undefined, unless `checked`: then it gets
   KVPRISM_INVALID_ARGUMENT.

   Processes. In a forked child every call with a parent's store, scheduler or worker, but for the
   _free functions, is KVPRISM_CLOSED. A child frees none of them before its end.

   Waits. A `longest_ns` or `budget_ns` below 0 is 0. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kvprism/base/export.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Versions, errors, text, log ------------------------------------------------------------ */

#define KVPRISM_C_VERSION 1u

typedef enum kvprism_status {
  KVPRISM_OK = 0,
  KVPRISM_INVALID_CONFIG = 1,   /* a configuration value is malformed or contradicts another */
  KVPRISM_INVALID_ARGUMENT = 2, /* a call's argument is outside its contract */
  KVPRISM_NOT_FOUND = 3,        /* a file, library, device or symbol is missing */
  KVPRISM_MISMATCH = 4,         /* two sides disagree (digest, epoch, layout, version) */
  KVPRISM_UNSUPPORTED = 5,      /* valid, but this build or backend cannot do it */
  KVPRISM_UNAVAILABLE = 6,      /* a service does not answer */
  KVPRISM_TIMED_OUT = 7,        /* a bound was reached */
  KVPRISM_CLOSED = 8,           /* used after a close, or in a forked child */
  KVPRISM_OUT_OF_MEMORY = 9,
  KVPRISM_INTERNAL = 10 /* a defect of this library */
} kvprism_status;

typedef struct kvprism_error kvprism_error;

/* One thing that is wrong; belongs to its error. */
typedef struct kvprism_problem {
  const char* path;     /* e.g. "groups[1].block_size" */
  const char* value;    /* what was found */
  const char* expected; /* what was expected */
  const char* hint;     /* what to do, or "" */
} kvprism_problem;

/* The library's version such as "0.1.0", and that of its C interface. Never freed. */
KVPRISM_API const char* kvprism_version(void);
KVPRISM_API uint32_t kvprism_c_version(void);
/* KVPRISM_MISMATCH unless the library speaks `c_version`. */
KVPRISM_API kvprism_status kvprism_check_version(uint32_t c_version, kvprism_error** error);

/* A word such as "invalid_config"; "unknown" for other values. Never freed. */
KVPRISM_API const char* kvprism_status_name(kvprism_status status);

/* All of an error; the text holds until it is freed. Null: KVPRISM_OK, "" and 0. */
KVPRISM_API kvprism_status kvprism_error_status(const kvprism_error* error);
KVPRISM_API const char* kvprism_error_message(const kvprism_error* error);
KVPRISM_API size_t kvprism_error_num_problems(const kvprism_error* error);
/* False, with nothing written, when there is no problem of that number. */
KVPRISM_API bool kvprism_error_problem(const kvprism_error* error, size_t index,
                                       kvprism_problem* problem);
KVPRISM_API void kvprism_error_free(kvprism_error* error);

KVPRISM_API void kvprism_string_free(char* text);

/* `level`: 0 debug, 1 info, 2 warning, 3 error, 4 off. `line` has no zero byte at its end. Called
   from any thread, also from two at once, and must not call back. Null drops every line. */
typedef void (*kvprism_log_sink)(void* context, int32_t level, const char* line, size_t length);
KVPRISM_API kvprism_status kvprism_set_log_sink(kvprism_log_sink sink, void* context, int32_t level,
                                                kvprism_error** error);

/* A clock that never goes back, for engines without one of their own. */
KVPRISM_API int64_t kvprism_now(void);

/* Called once for each counter, which docs/operations.md explains; names are not kept. */
typedef void (*kvprism_counter_visitor)(void* context, const char* name, uint64_t value);

/* ---- Projection ------------------------------------------------------------------------------ */

typedef struct kvprism_projection kvprism_projection;

#define KVPRISM_NO_INDEX UINT32_MAX

typedef struct kvprism_projection_info {
  size_t struct_size;
  uint32_t num_groups;
  uint32_t num_transfer_groups;
  uint32_t num_store_groups;
  uint32_t num_blocks;           /* with the null block */
  uint32_t scheduler_block_size; /* S: requests are saved in steps of so many tokens */
  uint32_t hash_block_size;      /* h: tokens per hash */
  uint32_t hit_alignment;        /* tokens; hits are multiples: S, or less inside a block */
  uint32_t replay_tokens;        /* that a hit leaves to compute */
} kvprism_projection_info;

typedef struct kvprism_group_info {
  size_t struct_size;
  uint32_t transfer_index; /* KVPRISM_NO_INDEX: not transferable */
  uint32_t store_index;    /* KVPRISM_NO_INDEX: not storable */
  uint32_t tokens_per_block;
  uint64_t object_bytes; /* of one block of all layers on this rank */
} kvprism_group_info;

/* From the JSON of docs/configuration.md; `length` bytes. All problems at once. */
KVPRISM_API kvprism_status kvprism_projection_from_json(const char* json, size_t length,
                                                        kvprism_projection** projection,
                                                        kvprism_error** error);

#define KVPRISM_UNDECLARED UINT32_MAX
#define KVPRISM_OWN_WINDOW (UINT32_MAX - 1u)

/* A kind of cache that an engine adds. Nothing has a default: _init leaves text null and numbers
   KVPRISM_UNDECLARED, and what is left so is an error. Traits that follow from a group's sizes need
   C++. */
typedef struct kvprism_kind {
  size_t struct_size;
  const char* name;             /* what a group's "kind" says; not taken yet */
  const char* payload;          /* "attention" sizes, "state" tensors or "raw" bytes */
  const char* hit;              /* "prefix", "window", "chunk", "last_state" or "never" */
  const char* save;             /* "positional", "hand_off" or "never" */
  const char* peer;             /* "suffix", "window", "state", "whole" or "none" */
  uint32_t dcp_sharded;         /* 0 or 1: decode context ranks share its positions */
  uint32_t latent;              /* 0 or 1: one vector a position, the same on every tensor rank */
  uint32_t prefix_cacheable;    /* 0 or 1: may enter a store */
  uint32_t fine_grained_lookup; /* 0 or 1: hits may end inside a block */
  /* Tokens of a "window" or "chunk" rule, else 0. KVPRISM_OWN_WINDOW: each group's own
     "sliding_window" or "attention_chunk_size". */
  uint32_t window;
  uint32_t replay_tokens; /* computed again after a hit; a group may give its own */
} kvprism_kind;

KVPRISM_API kvprism_status kvprism_kind_init(kvprism_kind* kind, size_t struct_size,
                                             kvprism_error** error);
/* With kinds beside the built-in ones. Ranks that exchange plans must give the same. */
KVPRISM_API kvprism_status kvprism_projection_with_kinds(const char* json, size_t length,
                                                         const kvprism_kind* kinds,
                                                         size_t num_kinds,
                                                         kvprism_projection** projection,
                                                         kvprism_error** error);
KVPRISM_API kvprism_status kvprism_projection_get_info(const kvprism_projection* projection,
                                                       kvprism_projection_info* info,
                                                       kvprism_error** error);
KVPRISM_API kvprism_status kvprism_projection_get_group(const kvprism_projection* projection,
                                                        uint32_t group, kvprism_group_info* info,
                                                        kvprism_error** error);
/* Why a group is not storable, one phrase; "" when it is. */
KVPRISM_API kvprism_status kvprism_projection_why_not_stored(const kvprism_projection* projection,
                                                             uint32_t group, char** text,
                                                             kvprism_error** error);
/* Every reason why a store cannot be used, as KVPRISM_INVALID_CONFIG. */
KVPRISM_API kvprism_status kvprism_projection_check_store(const kvprism_projection* projection,
                                                          kvprism_error** error);
/* 32 hex digits, equal on all ranks that may exchange plans. */
KVPRISM_API kvprism_status kvprism_projection_digest(const kvprism_projection* projection,
                                                     char** hex, kvprism_error** error);
KVPRISM_API void kvprism_projection_free(kvprism_projection* projection);

/* ---- Keys ------------------------------------------------------------------------------------ */

typedef struct kvprism_key_schema kvprism_key_schema;

typedef struct kvprism_key_facts {
  size_t struct_size;
  const char* model;           /* name or path; not empty */
  const char* model_revision;  /* version of the weights, of a draft model's too, and with context
                                  ranks which tokens each of them holds */
  const char* kv_quantization; /* e.g. "none" */
  const char* hash_algorithm;  /* e.g. "sha256_cbor"; not empty */
  const char* pipeline_split;  /* which layers each pipeline stage holds, e.g. "0-15,15-31", alike
                                  on all ranks; not empty with parallel.pp > 1, schema kvprism */
  bool hash_is_stable;         /* false: processes hash alike tokens differently; refused */
} kvprism_key_facts;

KVPRISM_API kvprism_status kvprism_key_facts_init(kvprism_key_facts* facts, size_t struct_size,
                                                  kvprism_error** error);
/* A pipeline_split for engines that know the layers of every stage: of `count` projections, in the
   order of pipeline ranks. Equal texts mean the same layers, by name, order and spec. */
KVPRISM_API kvprism_status kvprism_pipeline_split_of(const kvprism_projection* const* stages,
                                                     size_t count, char** split,
                                                     kvprism_error** error);
/* The schema that the projection's config names. */
KVPRISM_API kvprism_status kvprism_key_schema_new(const kvprism_projection* projection,
                                                  const kvprism_key_facts* facts,
                                                  kvprism_key_schema** schema,
                                                  kvprism_error** error);
/* The key of one object as `rank` names it. `hash`: 16 to 64 bytes. */
KVPRISM_API kvprism_status kvprism_key_schema_key(const kvprism_key_schema* schema,
                                                  uint32_t store_index, uint32_t rank,
                                                  const uint8_t* hash, size_t hash_bytes,
                                                  char** key, kvprism_error** error);
KVPRISM_API void kvprism_key_schema_free(kvprism_key_schema* schema);

/* ---- Segments -------------------------------------------------------------------------------- */

typedef struct kvprism_segment_map kvprism_segment_map;

/* One allocation, or a view of it that some layers use. Byte 0 of layer l, block b, head h:
   base + offset + l * layer_stride + b * block_stride + h * head_stride. */
typedef struct kvprism_cache_tensor {
  size_t struct_size;
  void* base;                /* stays mapped while a worker uses it */
  uint64_t bytes;            /* of the allocation */
  const char* const* layers; /* names, in the order of their places */
  size_t num_layers;
  uint64_t layer_stride;      /* bytes */
  uint64_t block_stride;      /* bytes */
  uint64_t offset;            /* bytes */
  uint64_t head_stride;       /* bytes; 0: what the layout and the other strides imply */
  uint32_t kernel_block_size; /* positions; 0: the block */
  int32_t device;             /* -1: host; other ordinals are the engine's own, not checked */
} kvprism_cache_tensor;

KVPRISM_API kvprism_status kvprism_cache_tensor_init(kvprism_cache_tensor* tensor,
                                                     size_t struct_size, kvprism_error** error);
KVPRISM_API kvprism_status kvprism_segment_map_new(const kvprism_projection* projection,
                                                   const kvprism_cache_tensor* tensors,
                                                   size_t num_tensors, kvprism_segment_map** map,
                                                   kvprism_error** error);
KVPRISM_API void kvprism_segment_map_free(kvprism_segment_map* map);

/* ---- Stores ---------------------------------------------------------------------------------- */

/* Objects in this process's memory; what several memory stores share. */
typedef struct kvprism_memory_pool kvprism_memory_pool;

/* A connection. One scheduler and one worker at a time use it; others are refused. */
typedef struct kvprism_store kvprism_store;

typedef struct kvprism_memory_pool_options {
  size_t struct_size;
  uint64_t capacity_bytes; /* 0: no limit */
  bool evict;              /* makes room by dropping the least recently used */
} kvprism_memory_pool_options;

typedef struct kvprism_mooncake_options {
  size_t struct_size;
  const char* master;              /* "host:port" */
  const char* local_hostname;      /* under which other clients reach this one */
  const char* metadata_server;     /* "P2PHANDSHAKE" or a URL */
  const char* protocol;            /* "tcp" or "rdma" */
  const char* const* rdma_devices; /* null: Mooncake chooses */
  size_t num_rdma_devices;
  /* Bytes given to the pool; 0 or at least 16 MiB. They go with the client, also when it is
     replaced: lend with a store that nothing else uses. */
  int64_t global_segment_size;
  int64_t local_buffer_size; /* bytes; 0 or at least 16 MiB */
  int64_t connect_timeout_ns;
  int64_t setup_timeout_ns;
  const char* library;        /* null: searched, see docs/cpp.md */
  const char* python_library; /* null: searched */
  /* Of these, 0 is the default. Members of MooncakeOptions: */
  uint64_t max_region_bytes;    /* of a piece that is registered at once, for devices that take no
                                   more; at least 1 MiB. By default 2 GiB with rdma, and a
                                   region is whole with tcp */
  uint64_t max_bytes_per_call;  /* of a native call; UINT64_MAX: no limit */
  uint32_t max_slices_per_call; /* pieces of memory in a native call, 1 to 8192 */
  int32_t unknown_build; /* 0: a build that is not known is refused; 1: it is tried first, in a
                            process of its own */
  /* Of BlockingStoreOptions: */
  int64_t stuck_after_ns;    /* a call that takes longer is given up, and its client replaced */
  int64_t region_timeout_ns; /* how long a worker's making and end wait for a registration */
  int64_t probe_interval_ns; /* between questions to a service that did not answer */
  int64_t first_retry_ns;    /* pause after a failure to make a client; doubles each time */
  int64_t max_retry_ns;      /* longest pause */
  int64_t close_budget_ns;   /* how long kvprism_store_free waits for a store that is not closed */
  uint64_t queue_limit;      /* operations waiting, of each kind */
  uint32_t max_retired;      /* clients that still have calls; at the limit none is made */
  uint32_t max_attempts;     /* failures in a row before giving up for good. By default: never */
} kvprism_mooncake_options;

KVPRISM_API kvprism_status kvprism_memory_pool_options_init(kvprism_memory_pool_options* options,
                                                            size_t struct_size,
                                                            kvprism_error** error);
/* Null options: the defaults. */
KVPRISM_API kvprism_status kvprism_memory_pool_new(const kvprism_memory_pool_options* options,
                                                   kvprism_memory_pool** pool,
                                                   kvprism_error** error);
KVPRISM_API kvprism_status kvprism_memory_pool_counters(const kvprism_memory_pool* pool,
                                                        kvprism_counter_visitor visitor,
                                                        void* context, kvprism_error** error);
KVPRISM_API void kvprism_memory_pool_free(kvprism_memory_pool* pool);

KVPRISM_API kvprism_status kvprism_memory_store_new(const kvprism_memory_pool* pool,
                                                    kvprism_store** store, kvprism_error** error);

KVPRISM_API kvprism_status kvprism_mooncake_options_init(kvprism_mooncake_options* options,
                                                         size_t struct_size, kvprism_error** error);
/* Connects; waits for at most setup_timeout_ns. */
KVPRISM_API kvprism_status kvprism_mooncake_store_new(const kvprism_mooncake_options* options,
                                                      kvprism_store** store, kvprism_error** error);

/* Such as "mooncake 0.3.13.post1 tcp". */
KVPRISM_API kvprism_status kvprism_store_name(const kvprism_store* store, char** name,
                                              kvprism_error** error);
/* Of a connection to Mooncake. Of a memory store none: kvprism_memory_pool_counters has them. */
KVPRISM_API kvprism_status kvprism_store_counters(const kvprism_store* store,
                                                  kvprism_counter_visitor visitor, void* context,
                                                  kvprism_error** error);
/* After its worker is closed. Waits for at most `budget_ns`, lookups and transfers together; below
   0 is 0. `unquiet` counts operations that may still touch memory, which must then stay mapped
   until the process ends. */
KVPRISM_API kvprism_status kvprism_store_close(kvprism_store* store, int64_t budget_ns,
                                               uint64_t* unquiet, kvprism_error** error);
KVPRISM_API void kvprism_store_free(kvprism_store* store);

/* ---- Scheduler ------------------------------------------------------------------------------- */

typedef struct kvprism_scheduler kvprism_scheduler;

/* The three structs that follow never change. */
typedef struct kvprism_hashes {
  const uint8_t* data; /* hash number `first` */
  uint32_t count;
  uint32_t width; /* bytes of a hash, 16 to 64 */
  uint32_t first;
} kvprism_hashes;

typedef struct kvprism_blocks {
  const int32_t* ids;
  size_t count;
} kvprism_blocks;

typedef struct kvprism_failed_block {
  uint32_t group;
  uint32_t chunk;
  int32_t block;
} kvprism_failed_block;

typedef struct kvprism_scheduler_options {
  size_t struct_size;
  uint64_t epoch; /* random, other than 0 */
  uint32_t ranks; /* 0: tp x pp x pcp of the config */
  bool loads;
  bool saves;
  bool detach_quarantined_loads;
  bool checked;      /* refuse calls out of order: for the first weeks of an engine and its tests */
  bool tell_changes; /* for kvprism_scheduler_take_change, which must then be called */
  int64_t lookup_timeout_ns;
  int64_t lookup_fresh_for_ns;
  int64_t load_timeout_ns;
  int64_t save_timeout_ns;
  int64_t quarantine_after_ns;
  int64_t backoff_ns;
  int64_t saved_fresh_for_ns;
  int64_t avoid_failed_for_ns;
  int64_t purge_settle_ns;
  int64_t healthy_after_ns;
  uint32_t backoff_after;
  uint32_t max_held_percent;
  const char* flight_record_path; /* null: the last events go to the log at an incident */
  const char*
      record_to; /* a new file for everything that decides, written in the step; null: none */
} kvprism_scheduler_options;

/* The end of one load, as docs/cpp.md explains. */
typedef struct kvprism_load_end {
  size_t struct_size;
  uint64_t request;
  uint64_t job;
  uint32_t valid_tokens; /* usable prefix, local tokens included */
  bool complete;
  bool blocks_quiet; /* false: quarantined, the request needs other blocks */
  const kvprism_failed_block* failed;
  size_t num_failed;
} kvprism_load_end;

/* A chunk that every rank has stored, or one that is gone. */
typedef struct kvprism_change {
  size_t struct_size;
  bool stored; /* false: gone */
  uint64_t request;
  uint32_t group;
  uint32_t chunk;
  uint32_t tokens;       /* of the prefix that ends with it */
  const uint8_t* hash;   /* of that prefix */
  const uint8_t* parent; /* of the prefix before it */
  size_t hash_bytes;
  size_t parent_bytes; /* 0: there is none */
} kvprism_change;

typedef enum kvprism_health_state {
  KVPRISM_HEALTHY = 0,
  KVPRISM_DEGRADED = 1,
  KVPRISM_OFF = 2
} kvprism_health_state;

/* Why: bits of kvprism_health::reasons. */
typedef enum kvprism_health_reason {
  KVPRISM_LOOKUPS_FAIL = 1,
  KVPRISM_LOADS_FAIL = 2,
  KVPRISM_SAVING_PAUSED = 4,   /* the store refused saves: full, away or late */
  KVPRISM_WORKER_SILENT = 8,   /* a rank let the last job to end expire */
  KVPRISM_QUARANTINE = 16,     /* blocks are in quarantine */
  KVPRISM_HOLDS_TOO_MUCH = 32, /* jobs hold more than max_held_percent */
  KVPRISM_PURGING = 64
} kvprism_health_reason;

typedef struct kvprism_health {
  size_t struct_size;
  kvprism_health_state state;
  uint32_t reasons;
} kvprism_health;

KVPRISM_API kvprism_status kvprism_scheduler_options_init(kvprism_scheduler_options* options,
                                                          size_t struct_size,
                                                          kvprism_error** error);
KVPRISM_API kvprism_status kvprism_scheduler_new(const kvprism_key_schema* schema,
                                                 kvprism_store* store,
                                                 const kvprism_scheduler_options* options,
                                                 kvprism_scheduler** scheduler,
                                                 kvprism_error** error);
/* `mode`: 0 read and write, 1 read only, 2 write only, 3 off. */
KVPRISM_API kvprism_status kvprism_scheduler_set_mode(kvprism_scheduler* scheduler, int32_t mode,
                                                      kvprism_error** error);
/* Removes every object of the key schema; moves on in kvprism_scheduler_end_step. */
KVPRISM_API kvprism_status kvprism_scheduler_purge(kvprism_scheduler* scheduler, int64_t now_ns,
                                                   kvprism_error** error);
/* `state`: a word such as "draining", "none" or "done", never freed; `removed`: objects so far. */
KVPRISM_API kvprism_status kvprism_scheduler_purge_status(const kvprism_scheduler* scheduler,
                                                          const char** state, uint64_t* removed,
                                                          kvprism_error** error);
KVPRISM_API kvprism_status kvprism_scheduler_restrict(kvprism_scheduler* scheduler,
                                                      uint64_t request, bool load, bool save,
                                                      kvprism_error** error);
/* How long the prompt is, for requests that are not looked up: where hits may end inside a block,
   its end is saved too. */
KVPRISM_API kvprism_status kvprism_scheduler_prompt(kvprism_scheduler* scheduler, uint64_t request,
                                                    uint32_t prompt_tokens, kvprism_error** error);
/* `pending`: ask again in the next step. Else `external_tokens` beyond `local_tokens` are there. */
KVPRISM_API kvprism_status kvprism_scheduler_lookup(kvprism_scheduler* scheduler, uint64_t request,
                                                    uint32_t prompt_tokens,
                                                    const kvprism_hashes* hashes,
                                                    uint32_t local_tokens, int64_t now_ns,
                                                    bool* pending, uint32_t* external_tokens,
                                                    kvprism_error** error);
/* `rows`: one for every group of the engine. `job`: 0 when nothing is loaded. */
KVPRISM_API kvprism_status kvprism_scheduler_allocated(kvprism_scheduler* scheduler,
                                                       uint64_t request, uint32_t external_tokens,
                                                       const kvprism_blocks* rows, size_t num_rows,
                                                       int64_t now_ns, uint64_t* job,
                                                       kvprism_error** error);
/* `hashes` may be null: the new tokens fill no block, or come with theirs in a later call. Tokens
   without hashes are counted, and not saved. */
KVPRISM_API kvprism_status kvprism_scheduler_advanced(kvprism_scheduler* scheduler,
                                                      uint64_t request, uint32_t accepted_tokens,
                                                      const kvprism_hashes* hashes,
                                                      kvprism_error** error);
/* Tokens [from, to) that are ready to be saved; equal when none are. */
KVPRISM_API kvprism_status kvprism_scheduler_wants_save(kvprism_scheduler* scheduler,
                                                        uint64_t request, int64_t now_ns,
                                                        uint32_t* from, uint32_t* to,
                                                        kvprism_error** error);
/* Whether wants_save says no to every request now: by mode, purge, back-off or max_held_percent.
   Who asks only when a request has got further must ask again afterwards. */
KVPRISM_API kvprism_status kvprism_scheduler_saves_paused(const kvprism_scheduler* scheduler,
                                                          int64_t now_ns, bool* paused,
                                                          kvprism_error** error);
KVPRISM_API kvprism_status kvprism_scheduler_save(kvprism_scheduler* scheduler, uint64_t request,
                                                  uint32_t from, uint32_t to,
                                                  const kvprism_blocks* rows, size_t num_rows,
                                                  int64_t now_ns, kvprism_error** error);
KVPRISM_API kvprism_status kvprism_scheduler_boundary(kvprism_scheduler* scheduler,
                                                      uint64_t request, uint32_t group,
                                                      int32_t block, uint32_t tokens,
                                                      kvprism_error** error);
KVPRISM_API kvprism_status kvprism_scheduler_preempted(kvprism_scheduler* scheduler,
                                                       uint64_t request, kvprism_error** error);
KVPRISM_API kvprism_status kvprism_scheduler_finished(kvprism_scheduler* scheduler,
                                                      uint64_t request, bool aborted,
                                                      kvprism_error** error);
/* The step's plan for every rank's kvprism_worker_submit; `length` 0: there is nothing to do. */
KVPRISM_API kvprism_status kvprism_scheduler_end_step(kvprism_scheduler* scheduler, int64_t now_ns,
                                                      const void** plan, size_t* length,
                                                      kvprism_error** error);
/* What kvprism_worker_poll gave, of one rank or of several, one behind the other. What cannot be
   read, of another epoch or of a job that moves no such chunk is KVPRISM_MISMATCH, and counted; the
   rest has been taken. */
KVPRISM_API kvprism_status kvprism_scheduler_report(kvprism_scheduler* scheduler,
                                                    const void* report, size_t length,
                                                    int64_t now_ns, kvprism_error** error);
/* The process of that worker has ended, and its memory is gone with it: of all jobs planned so far
   it counts as failed and quiet, and those that no plan has named yet end on all ranks. Never for a
   process that may live; a worker that takes its place must get no plan of before. Tell that its
   requests were preempted: what they have computed is gone on that rank. Once it is computed again
   it is saved. */
KVPRISM_API kvprism_status kvprism_scheduler_rank_gone(kvprism_scheduler* scheduler, uint32_t rank,
                                                       int64_t now_ns, kvprism_error** error);
/* One end a call: in every step until `found` is false, which says that there is none left. */
KVPRISM_API kvprism_status kvprism_scheduler_take_load_end(kvprism_scheduler* scheduler,
                                                           kvprism_load_end* end, bool* found,
                                                           kvprism_error** error);
/* One change a call, in order: in every step until `found` is false. */
KVPRISM_API kvprism_status kvprism_scheduler_take_change(kvprism_scheduler* scheduler,
                                                         kvprism_change* change, bool* found,
                                                         kvprism_error** error);
/* As of the last step. `text`, unless null: such as "degraded: lookups fail". */
KVPRISM_API kvprism_status kvprism_scheduler_health(const kvprism_scheduler* scheduler,
                                                    kvprism_health* health, char** text,
                                                    kvprism_error** error);
/* How many hashes of the request are known: kvprism_scheduler_advanced needs those behind them. */
KVPRISM_API kvprism_status kvprism_scheduler_known_hashes(const kvprism_scheduler* scheduler,
                                                          uint64_t request, uint32_t* count,
                                                          kvprism_error** error);
/* Blocks to reference once more / once less. */
KVPRISM_API kvprism_status kvprism_scheduler_take_acquired(kvprism_scheduler* scheduler,
                                                           kvprism_blocks* blocks,
                                                           kvprism_error** error);
KVPRISM_API kvprism_status kvprism_scheduler_take_released(kvprism_scheduler* scheduler,
                                                           kvprism_blocks* blocks,
                                                           kvprism_error** error);
/* While true the engine keeps stepping, also without requests: also while ids, load ends or changes
   wait to be taken. */
KVPRISM_API kvprism_status kvprism_scheduler_has_pending_work(const kvprism_scheduler* scheduler,
                                                              bool* pending, kvprism_error** error);
KVPRISM_API kvprism_status kvprism_scheduler_counters(const kvprism_scheduler* scheduler,
                                                      kvprism_counter_visitor visitor,
                                                      void* context, kvprism_error** error);
KVPRISM_API void kvprism_scheduler_free(kvprism_scheduler* scheduler);

/* ---- Worker ---------------------------------------------------------------------------------- */

typedef struct kvprism_worker kvprism_worker;

typedef struct kvprism_worker_options {
  size_t struct_size;
  uint32_t rank;
  uint32_t max_segments_per_call;
  uint64_t max_bytes_per_call;
  uint32_t max_gets_in_flight;
  uint32_t max_puts_in_flight;
  uint32_t max_queued_jobs;
  uint64_t max_bytes_in_flight; /* beyond them saves wait, and loads do not; 0: no limit */
  bool pump_thread;             /* false: the engine calls kvprism_worker_pump */
  bool only; /* no worker of this process has had jobs of this scheduler before */
} kvprism_worker_options;

typedef enum kvprism_ready_state {
  KVPRISM_READY = 0,
  KVPRISM_READY_PENDING = 1,
  KVPRISM_READY_FAILED = 2
} kvprism_ready_state;

/* Asks, without waiting, whether the writes of a step have finished. Never changes. Called by the
   thread that pumps; `destroy` (or null) once, when it is not needed any more, by any thread. */
typedef struct kvprism_ready {
  kvprism_ready_state (*query)(void* context);
  void (*destroy)(void* context);
  void* context;
} kvprism_ready;

KVPRISM_API kvprism_status kvprism_worker_options_init(kvprism_worker_options* options,
                                                       size_t struct_size, kvprism_error** error);
/* Registers the map's memory with the store, all of it or none. KVPRISM_TIMED_OUT: it may still be
   registered, and must stay mapped. */
KVPRISM_API kvprism_status kvprism_worker_new(const kvprism_key_schema* schema,
                                              const kvprism_segment_map* map, kvprism_store* store,
                                              const kvprism_worker_options* options,
                                              kvprism_worker** worker, kvprism_error** error);
/* `length` above 0. Null `ready`: the bytes are in memory now. A plan that is not taken is
   KVPRISM_MISMATCH; its jobs are reported failed, but for those that were taken before, with the
   same step or a damaged copy of it: they go on, and reports tell their ends. `ready` is destroyed
   in any case. */
KVPRISM_API kvprism_status kvprism_worker_submit(kvprism_worker* worker, const void* plan,
                                                 size_t length, const kvprism_ready* ready,
                                                 kvprism_error** error);
/* All that has happened since the last call, for kvprism_scheduler_report; `length` 0: nothing. Of
   jobs of several schedulers several reports, one behind the other. */
KVPRISM_API kvprism_status kvprism_worker_poll(kvprism_worker* worker, const void** report,
                                               size_t* length, kvprism_error** error);
/* Waits until something has moved since the last poll, for at most `longest_ns`; of workers with a
   pump thread. */
KVPRISM_API kvprism_status kvprism_worker_wait(kvprism_worker* worker, int64_t longest_ns,
                                               kvprism_error** error);
/* Of workers without a pump thread: starts and ends calls, and does not wait. */
KVPRISM_API kvprism_status kvprism_worker_pump(kvprism_worker* worker, int64_t now_ns, bool* moved,
                                               kvprism_error** error);
/* Nothing new is started; waits for at most `budget_ns`, and a second longer for a pump thread that
   does not come back: it is left behind, and counts as unquiet until it does. `unquiet` as in
   kvprism_store_close; a later call tells what is left then. */
KVPRISM_API kvprism_status kvprism_worker_close(kvprism_worker* worker, int64_t now_ns,
                                                int64_t budget_ns, uint64_t* unquiet,
                                                kvprism_error** error);
KVPRISM_API kvprism_status kvprism_worker_counters(const kvprism_worker* worker,
                                                   kvprism_counter_visitor visitor, void* context,
                                                   kvprism_error** error);
/* What this rank has moved of one of the engine's groups. */
KVPRISM_API kvprism_status kvprism_worker_group_counters(const kvprism_worker* worker,
                                                         uint32_t group,
                                                         kvprism_counter_visitor visitor,
                                                         void* context, kvprism_error** error);
/* Without a close before it, calls that hang may still touch the memory. */
KVPRISM_API void kvprism_worker_free(kvprism_worker* worker);

#ifdef __cplusplus
}
#endif
