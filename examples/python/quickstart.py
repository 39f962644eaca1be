"""Saves the cache blocks of one request and loads them into the blocks of another."""

import hashlib

import kvprism as kv
import numpy as np

group = {"kind": "full_attention", "layers": ["layer0"], "block_size": 16, "num_kv_heads": 1}
group |= {"head_size": 8, "dtype": "float16"}
groups = kv.Projection(kv.CacheConfig.from_dict({"num_blocks": 8, "groups": [group]}))
schema = kv.KeySchema.kvprism(groups, model="m", hash_algorithm="sha256", hash_is_stable=True)
cache = np.random.default_rng(0).integers(256, size=(8, 512), dtype=np.uint8)  # one row a block
tensor = kv.CacheTensor(cache, layers=["layer0"], block_stride=512)

store = kv.memory_store()  # or kv.mooncake_store(master="127.0.0.1:50051")
scheduler = kv.StoreScheduler(schema, store)
worker = kv.StoreWorker(schema, kv.SegmentMap(groups, [tensor]), store)
hashes = [hashlib.sha256(b"the first %d tokens" % n).digest() for n in (16, 32, 48)]

scheduler.advanced(1, 48, hashes)  # request 1 has computed 48 tokens, in blocks 1, 2 and 3
scheduler.save(1, (0, 48), [[1, 2, 3]])
worker.submit(scheduler.end_step(), kv.ReadyToken.host())
scheduler.report(worker.wait(10) or b"")

while (tokens := scheduler.lookup(2, 49, hashes)) is None:  # request 2 begins with the same
    scheduler.end_step()
scheduler.allocated(2, tokens, [[4, 5, 6]])
worker.submit(scheduler.end_step(), kv.ReadyToken.host())
scheduler.report(worker.wait(10) or b"")

(end,) = scheduler.take_load_ends()
assert end.complete
assert (cache[4:7] == cache[1:4]).all()
print(f"{tokens} tokens came from the store, byte for byte")
