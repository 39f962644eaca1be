// A small engine in Rust over the C interface: saves three blocks of a request, then loads them for
// another request of the same prefix.
//
//   rustc --edition 2021 -L LIBRARY_FOLDER -C link-arg=-Wl,-rpath,LIBRARY_FOLDER examples/rust/engine.rs
use std::ffi::{c_char, c_void, CStr};
use std::ptr::{null, null_mut};

// The functions and structs of kvprism.h that this engine uses.
#[repr(C)]
struct KeyFacts {
    struct_size: usize,
    model: *const c_char,
    model_revision: *const c_char,
    kv_quantization: *const c_char,
    hash_algorithm: *const c_char,
    pipeline_split: *const c_char,
    hash_is_stable: bool,
}

#[repr(C)]
struct CacheTensor {
    struct_size: usize,
    base: *mut c_void,
    bytes: u64,
    layers: *const *const c_char,
    num_layers: usize,
    layer_stride: u64,
    block_stride: u64,
    offset: u64,
    head_stride: u64,
    kernel_block_size: u32,
    device: i32,
}

#[repr(C)]
struct SchedulerOptions {
    struct_size: usize,
    epoch: u64,
    ranks: u32,
    loads: bool,
    saves: bool,
    detach_quarantined_loads: bool,
    checked: bool,
    tell_changes: bool,
    durations_ns: [i64; 10],
    backoff_after: u32,
    max_held_percent: u32,
    flight_record_path: *const c_char,
    record_to: *const c_char,
}

#[repr(C)]
struct WorkerOptions {
    struct_size: usize,
    rank: u32,
    max_segments_per_call: u32,
    max_bytes_per_call: u64,
    max_gets_in_flight: u32,
    max_puts_in_flight: u32,
    max_queued_jobs: u32,
    max_bytes_in_flight: u64,
    pump_thread: bool,
    only: bool,
}

#[repr(C)]
struct Hashes {
    data: *const u8,
    count: u32,
    width: u32,
    first: u32,
}

#[repr(C)]
struct Blocks {
    ids: *const i32,
    count: usize,
}

#[repr(C)]
struct LoadEnd {
    struct_size: usize,
    request: u64,
    job: u64,
    valid_tokens: u32,
    complete: bool,
    blocks_quiet: bool,
    failed: *const c_void,
    num_failed: usize,
}

type Handle = *mut c_void;
type Error = *mut *mut c_void;

#[link(name = "kvprism")]
extern "C" {
    fn kvprism_check_version(version: u32, error: Error) -> i32;
    fn kvprism_error_message(error: *const c_void) -> *const c_char;
    fn kvprism_error_free(error: *mut c_void);
    fn kvprism_now() -> i64;
    fn kvprism_projection_from_json(json: *const c_char, length: usize, out: *mut Handle, error: Error) -> i32;
    fn kvprism_projection_free(projection: Handle);
    fn kvprism_key_facts_init(facts: *mut KeyFacts, size: usize, error: Error) -> i32;
    fn kvprism_key_schema_new(projection: Handle, facts: *const KeyFacts, out: *mut Handle, error: Error) -> i32;
    fn kvprism_key_schema_free(schema: Handle);
    fn kvprism_cache_tensor_init(tensor: *mut CacheTensor, size: usize, error: Error) -> i32;
    fn kvprism_segment_map_new(projection: Handle, tensors: *const CacheTensor, count: usize, out: *mut Handle, error: Error) -> i32;
    fn kvprism_segment_map_free(map: Handle);
    fn kvprism_memory_pool_new(options: *const c_void, out: *mut Handle, error: Error) -> i32;
    fn kvprism_memory_pool_free(pool: Handle);
    fn kvprism_memory_store_new(pool: Handle, out: *mut Handle, error: Error) -> i32;
    fn kvprism_store_close(store: Handle, budget_ns: i64, unquiet: *mut u64, error: Error) -> i32;
    fn kvprism_store_free(store: Handle);
    fn kvprism_scheduler_options_init(options: *mut SchedulerOptions, size: usize, error: Error) -> i32;
    fn kvprism_scheduler_new(schema: Handle, store: Handle, options: *const SchedulerOptions, out: *mut Handle, error: Error) -> i32;
    fn kvprism_scheduler_lookup(scheduler: Handle, request: u64, prompt_tokens: u32, hashes: *const Hashes, local_tokens: u32, now_ns: i64, pending: *mut bool, external_tokens: *mut u32, error: Error) -> i32;
    fn kvprism_scheduler_allocated(scheduler: Handle, request: u64, external_tokens: u32, rows: *const Blocks, num_rows: usize, now_ns: i64, job: *mut u64, error: Error) -> i32;
    fn kvprism_scheduler_advanced(scheduler: Handle, request: u64, tokens: u32, hashes: *const Hashes, error: Error) -> i32;
    fn kvprism_scheduler_wants_save(scheduler: Handle, request: u64, now_ns: i64, from: *mut u32, to: *mut u32, error: Error) -> i32;
    fn kvprism_scheduler_save(scheduler: Handle, request: u64, from: u32, to: u32, rows: *const Blocks, num_rows: usize, now_ns: i64, error: Error) -> i32;
    fn kvprism_scheduler_finished(scheduler: Handle, request: u64, aborted: bool, error: Error) -> i32;
    fn kvprism_scheduler_end_step(scheduler: Handle, now_ns: i64, plan: *mut *const c_void, length: *mut usize, error: Error) -> i32;
    fn kvprism_scheduler_report(scheduler: Handle, report: *const c_void, length: usize, now_ns: i64, error: Error) -> i32;
    fn kvprism_scheduler_take_load_end(scheduler: Handle, end: *mut LoadEnd, found: *mut bool, error: Error) -> i32;
    fn kvprism_scheduler_take_acquired(scheduler: Handle, blocks: *mut Blocks, error: Error) -> i32;
    fn kvprism_scheduler_take_released(scheduler: Handle, blocks: *mut Blocks, error: Error) -> i32;
    fn kvprism_scheduler_has_pending_work(scheduler: Handle, pending: *mut bool, error: Error) -> i32;
    fn kvprism_scheduler_free(scheduler: Handle);
    fn kvprism_worker_options_init(options: *mut WorkerOptions, size: usize, error: Error) -> i32;
    fn kvprism_worker_new(schema: Handle, map: Handle, store: Handle, options: *const WorkerOptions, out: *mut Handle, error: Error) -> i32;
    fn kvprism_worker_submit(worker: Handle, plan: *const c_void, length: usize, ready: *const c_void, error: Error) -> i32;
    fn kvprism_worker_poll(worker: Handle, report: *mut *const c_void, length: *mut usize, error: Error) -> i32;
    fn kvprism_worker_wait(worker: Handle, longest_ns: i64, error: Error) -> i32;
    fn kvprism_worker_close(worker: Handle, now_ns: i64, budget_ns: i64, unquiet: *mut u64, error: Error) -> i32;
    fn kvprism_worker_free(worker: Handle);
}

const PAGE: usize = 16 * (8 + 8) * 2; // bytes of a block
const BLOCKS: usize = 8;
const TOKENS: u32 = 48;
const SECOND: i64 = 1_000_000_000;
const CONFIG: &str = r#"{"num_blocks": 8, "groups": [{"kind": "full_attention", "layers": ["l0"],
    "block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": "float16"}]}"#;

/// Makes a call with a place for its error, and turns that into a `Result`.
fn check(call: impl FnOnce(Error) -> i32) -> Result<(), String> {
    let mut error: *mut c_void = null_mut();
    if call(&mut error) == 0 {
        return Ok(());
    }
    // SAFETY: the library gave the error, whose text holds until it is freed.
    unsafe {
        let message = CStr::from_ptr(kvprism_error_message(error)).to_string_lossy().into_owned();
        kvprism_error_free(error);
        Err(message)
    }
}

struct Engine {
    scheduler: Handle,
    worker: Handle,
    store: Handle,
    memory: Vec<u8>,
    references: [i32; BLOCKS],
}

impl Engine {
    fn open(pool: Handle) -> Result<Engine, String> {
        let mut engine = Engine {
            scheduler: null_mut(),
            worker: null_mut(),
            store: null_mut(),
            memory: vec![0; BLOCKS * PAGE],
            references: [0; BLOCKS],
        };
        let (mut projection, mut schema, mut map) = (null_mut(), null_mut(), null_mut());
        // SAFETY: every pointer is to a live value of the type that kvprism.h declares, and the
        // memory lives as long as the worker.
        unsafe {
            check(|e| kvprism_check_version(1, e))?;
            check(|e| kvprism_projection_from_json(CONFIG.as_ptr().cast(), CONFIG.len(), &mut projection, e))?;
            let mut facts: KeyFacts = std::mem::zeroed();
            check(|e| kvprism_key_facts_init(&mut facts, size_of::<KeyFacts>(), e))?;
            facts.model = c"my-model".as_ptr();
            facts.hash_algorithm = c"sha256_cbor".as_ptr();
            check(|e| kvprism_key_schema_new(projection, &facts, &mut schema, e))?;
            let layers = [c"l0".as_ptr()];
            let mut tensor: CacheTensor = std::mem::zeroed();
            check(|e| kvprism_cache_tensor_init(&mut tensor, size_of::<CacheTensor>(), e))?;
            tensor.base = engine.memory.as_mut_ptr().cast();
            tensor.bytes = engine.memory.len() as u64;
            tensor.layers = layers.as_ptr();
            tensor.num_layers = layers.len();
            tensor.block_stride = PAGE as u64;
            check(|e| kvprism_segment_map_new(projection, &tensor, 1, &mut map, e))?;
            check(|e| kvprism_memory_store_new(pool, &mut engine.store, e))?;
            let mut options: SchedulerOptions = std::mem::zeroed();
            check(|e| kvprism_scheduler_options_init(&mut options, size_of::<SchedulerOptions>(), e))?;
            options.epoch = 0x5eed;
            options.checked = true;
            check(|e| kvprism_scheduler_new(schema, engine.store, &options, &mut engine.scheduler, e))?;
            let mut worker: WorkerOptions = std::mem::zeroed();
            check(|e| kvprism_worker_options_init(&mut worker, size_of::<WorkerOptions>(), e))?;
            check(|e| kvprism_worker_new(schema, map, engine.store, &worker, &mut engine.worker, e))?;
            kvprism_segment_map_free(map);
            kvprism_key_schema_free(schema);
            kvprism_projection_free(projection);
        }
        Ok(engine)
    }

    fn follow_references(&mut self) -> Result<(), String> {
        let mut blocks = Blocks { ids: null(), count: 0 };
        // SAFETY: what is given holds until the next call of the same function.
        unsafe {
            check(|e| kvprism_scheduler_take_acquired(self.scheduler, &mut blocks, e))?;
            for i in 0..blocks.count {
                self.references[*blocks.ids.add(i) as usize] += 1;
            }
            check(|e| kvprism_scheduler_take_released(self.scheduler, &mut blocks, e))?;
            for i in 0..blocks.count {
                self.references[*blocks.ids.add(i) as usize] -= 1;
            }
        }
        Ok(())
    }

    fn step(&mut self) -> Result<(), String> {
        let (mut bytes, mut length) = (null(), 0);
        // SAFETY: plans and reports hold until the next call of the function that gave them.
        unsafe {
            check(|e| kvprism_scheduler_end_step(self.scheduler, kvprism_now(), &mut bytes, &mut length, e))?;
            if length != 0 {
                check(|e| kvprism_worker_submit(self.worker, bytes, length, null(), e))?;
            }
            self.follow_references()?;
            check(|e| kvprism_worker_poll(self.worker, &mut bytes, &mut length, e))?;
            if length != 0 {
                check(|e| kvprism_scheduler_report(self.scheduler, bytes, length, kvprism_now(), e))?;
            } else {
                check(|e| kvprism_worker_wait(self.worker, SECOND / 1000, e))?;
            }
        }
        self.follow_references()
    }

    fn save(&mut self, hashes: &Hashes, row: &[i32]) -> Result<(), String> {
        let rows = Blocks { ids: row.as_ptr(), count: row.len() };
        let (mut from, mut to) = (0, 0);
        // SAFETY: as in `open`.
        unsafe {
            check(|e| kvprism_scheduler_advanced(self.scheduler, 1, TOKENS, hashes, e))?;
            check(|e| kvprism_scheduler_wants_save(self.scheduler, 1, kvprism_now(), &mut from, &mut to, e))?;
            check(|e| kvprism_scheduler_save(self.scheduler, 1, from, to, &rows, 1, kvprism_now(), e))?;
            let mut pending = true;
            while pending {
                self.step()?;
                check(|e| kvprism_scheduler_has_pending_work(self.scheduler, &mut pending, e))?;
            }
            check(|e| kvprism_scheduler_finished(self.scheduler, 1, false, e))
        }
    }

    fn load(&mut self, hashes: &Hashes, row: &[i32]) -> Result<(u32, bool), String> {
        let rows = Blocks { ids: row.as_ptr(), count: row.len() };
        let (mut pending, mut external, mut job) = (true, 0, 0);
        // SAFETY: as in `open`.
        unsafe {
            loop {
                check(|e| kvprism_scheduler_lookup(self.scheduler, 2, TOKENS + 1, hashes, 0, kvprism_now(), &mut pending, &mut external, e))?;
                if !pending {
                    break;
                }
                self.step()?;
            }
            check(|e| kvprism_scheduler_allocated(self.scheduler, 2, external, &rows, 1, kvprism_now(), &mut job, e))?;
            let mut end: LoadEnd = std::mem::zeroed();
            end.struct_size = size_of::<LoadEnd>();
            let mut complete = if job == 0 { Some(false) } else { None };
            while complete.is_none() {
                self.step()?;
                let mut found = true;
                while found { // one report may end several loads
                    check(|e| kvprism_scheduler_take_load_end(self.scheduler, &mut end, &mut found, e))?;
                    if found && end.job == job {
                        complete = Some(end.complete);
                    }
                }
            }
            check(|e| kvprism_scheduler_finished(self.scheduler, 2, false, e))?;
            Ok((external, complete == Some(true)))
        }
    }

    fn close(self) -> Result<(), String> {
        let (mut of_worker, mut of_store) = (0, 0);
        // SAFETY: the handles are used for the last time; the memory outlives the calls that use it.
        unsafe {
            let worker = check(|e| kvprism_worker_close(self.worker, kvprism_now(), 5 * SECOND, &mut of_worker, e));
            let store = check(|e| kvprism_store_close(self.store, 5 * SECOND, &mut of_store, e));
            if worker.is_err() || store.is_err() || of_worker + of_store != 0 {
                std::mem::forget(self.memory); // native calls may go on: it stays for the process's life
            }
            worker.and(store)?;
            kvprism_worker_free(self.worker);
            kvprism_scheduler_free(self.scheduler);
            kvprism_store_free(self.store);
        }
        match of_worker + of_store {
            0 => Ok(()),
            unquiet => Err(format!("{unquiet} calls did not end")),
        }
    }
}

fn main() -> Result<(), String> {
    let bytes: Vec<u8> = (1..=3 * 16).collect();
    let hashes = Hashes { data: bytes.as_ptr(), count: 3, width: 16, first: 0 };
    let mut pool = null_mut();
    // SAFETY: null options are the defaults.
    unsafe { check(|e| kvprism_memory_pool_new(null(), &mut pool, e))? };

    let mut first = Engine::open(pool)?;
    for (at, byte) in first.memory.iter_mut().enumerate() {
        *byte = (at * 31 >> 3) as u8;
    }
    let saved = first.memory[PAGE..4 * PAGE].to_vec();
    first.save(&hashes, &[1, 2, 3])?;
    first.close()?;

    let mut second = Engine::open(pool)?;
    let (tokens, complete) = second.load(&hashes, &[5, 6, 7])?;
    let equal = second.memory[5 * PAGE..8 * PAGE] == saved[..];
    second.close()?;
    // SAFETY: the last use.
    unsafe { kvprism_memory_pool_free(pool) };
    println!("{tokens} tokens offered, load complete: {complete}, bytes equal: {equal}");
    if complete && equal { Ok(()) } else { Err("something is wrong".into()) }
}
