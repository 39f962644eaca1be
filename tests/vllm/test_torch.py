"""Tensors of the real PyTorch as cache memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kvprism
import pytest
from kvprism.vllm import ready


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "uint8"])
def test_bytes_come_back_into_a_tensor(dtype: str) -> None:
    import torch

    raw = torch.randint(0, 256, (8, 512), dtype=torch.uint8)
    cache: Any = raw.view(getattr(torch, dtype))
    group = {
        "kind": "full_attention",
        "layers": ["l0"],
        "block_size": 16,
        "num_kv_heads": 1,
        "head_size": 16 // cache.element_size(),
        "dtype": dtype,
    }
    groups = kvprism.Projection(kvprism.CacheConfig.from_dict({"num_blocks": 8, "groups": [group]}))
    schema = kvprism.KeySchema.kvprism(groups, model="m", hash_algorithm="h", hash_is_stable=True)
    tensor = kvprism.CacheTensor(cache, layers=["l0"], block_stride=512)
    assert (tensor.address, tensor.bytes, tensor.device) == (cache.data_ptr(), 8 * 512, -1)
    store = kvprism.memory_store()
    scheduler = kvprism.StoreScheduler(schema, store)
    worker = kvprism.StoreWorker(schema, kvprism.SegmentMap(groups, [tensor]), store)
    hashes = [bytes([n]) * 32 for n in (1, 2, 3)]
    scheduler.advanced(1, 48, hashes)
    scheduler.save(1, (0, 48), [[1, 2, 3]])
    worker.submit(scheduler.end_step(), kvprism.ReadyToken.host())
    scheduler.report(worker.wait(60) or b"")
    while (tokens := scheduler.lookup(2, 49, hashes)) is None:
        scheduler.end_step()
    assert tokens == 48
    scheduler.allocated(2, tokens, [[4, 5, 6]])
    worker.submit(scheduler.end_step(), kvprism.ReadyToken.host())
    scheduler.report(worker.wait(60) or b"")
    (end,) = scheduler.take_load_ends()
    assert end.complete
    assert torch.equal(raw[4:7], raw[1:4])
    worker.close()
    scheduler.close()


def test_events_are_of_the_runtime_that_pytorch_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    maps = tmp_path / "maps"
    ends = {name: f"/lib/{name}" for name in ("libcudart.so.12", "libcudart.so.13", "libc.so.6")}
    line = "7f00-7f01 r-xp 00000000 08:01 1 "
    maps.write_text("".join(f"{line}{path}\n" for path in ends.values()))
    assert ready._cudart_path(str(maps)) == ends["libcudart.so.13"]
    maps.write_text(f"{line}{ends['libc.so.6']}\n7f02-7f03 rw-p 0 00:00 0\n")
    with pytest.raises(RuntimeError, match="no libcudart"):
        ready._cudart_path(str(maps))


def test_a_step_on_rocm_waits_for_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch calls its devices "cuda"."""
    import torch

    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert isinstance(ready.ready_source("cuda"), ready.SynchronizedReady)
    assert isinstance(ready.ready_source("cpu"), ready.HostReady)
