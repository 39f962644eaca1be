"""The decisions of the real vLLM 0.32.0, called without an engine."""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import inspect
import logging
import os
from fractions import Fraction
from types import SimpleNamespace
from typing import Any
from unittest import mock

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
logging.disable(logging.WARNING)
# Replaces parts of torch.cuda that the store's worker imports; without it a machine that has no
# GPU cannot import the worker.
importlib.import_module("vllm.v1.worker.cpu.shm")

import cases  # noqa: E402
import torch  # noqa: E402
from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.distributed import parallel_state  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import (  # noqa: E402
    connector,
    data,
    scheduler,
    worker,
)
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import (  # noqa: E402
    coordinator as coordinators,
)
from vllm.v1 import kv_cache_interface as interface  # noqa: E402
from vllm.v1.core import kv_cache_utils  # noqa: E402

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "int8": torch.int8}


def window_of(group: dict[str, Any]) -> dict[str, int]:
    return {
        "sliding_window": group["sliding_window"],
        "extra_retained_tokens": group.get("extra_retained_tokens", 0),
    }


def meant(config: dict[str, Any]) -> dict[str, Any]:
    """The windows as kvprism means them, where the reference means less by the same words.

    One of 1 token needs an object (D1): here it is one of so few tokens that a block holds them.
    One that retains more is longer by as much (D3).
    """
    config = copy.deepcopy(config)
    windows = [
        member
        for group in config["groups"]
        for member in cases.members_of(group)
        if "sliding_window" in member
    ]
    taken = {member["sliding_window"] for member in windows}
    for member in windows:
        if member["sliding_window"] == 1:
            # Groups of equal specs are searched as one: it must not become equal to another.
            member["sliding_window"] = next(size for size in range(2, 99) if size not in taken)
        member["sliding_window"] += member.get("extra_retained_tokens", 0)
    return config


def engine_takes(tp: int, pcp: int, dcp: int) -> bool:
    """Whether the engine starts with so many ranks of each kind."""
    try:
        ParallelConfig(
            tensor_parallel_size=tp,
            prefill_context_parallel_size=pcp,
            decode_context_parallel_size=dcp,
            distributed_executor_backend="mp",
        )
    except ValueError:
        return False
    return True


@functools.cache
def positions(tp: int, pcp: int, dcp: int, pp: int) -> list[tuple[int, int, int, int]]:
    """(tp, pcp, dcp, pp) of every rank, from the process groups that vLLM makes."""
    world = tp * pcp * pp
    made: dict[str, list[list[int]]] = {}

    def take(ranks: list[list[int]], *_: Any, group_name: str, **__: Any) -> Any:
        made[group_name] = [[int(rank) for rank in row] for row in ranks]
        return SimpleNamespace(rank_in_group=0)

    groups = [name for name in vars(parallel_state) if name.isupper() and name[0] == "_"]
    kept = {name: getattr(parallel_state, name) for name in groups}
    try:
        with (
            mock.patch("torch.distributed.is_initialized", return_value=True),
            mock.patch("torch.distributed.get_world_size", return_value=world),
            mock.patch("torch.distributed.get_rank", return_value=0),
            mock.patch.object(parallel_state, "init_model_parallel_group", take),
            mock.patch.object(
                parallel_state, "get_world_group", return_value=SimpleNamespace(local_rank=0)
            ),
            set_current_vllm_config(VllmConfig()),
        ):
            parallel_state.initialize_model_parallel(tp, pp, pcp, dcp, backend="gloo")
    finally:
        for name, value in kept.items():
            setattr(parallel_state, name, value)

    def place(name: str, rank: int) -> int:
        (row,) = [row for row in made[name] if rank in row]
        return row.index(rank)

    names = ("tp", "pcp", "dcp", "pp")
    return [tuple(place(name, rank) for name in names) for rank in range(world)]  # type: ignore[misc]


def spec_of(group: dict[str, Any]) -> Any:
    """The engine's spec of a group in kvprism's form."""
    if group["kind"] == "uniform":
        layers = {
            layer: spec_of(member) for member in group["members"] for layer in member["layers"]
        }
        return interface.UniformTypeKVCacheSpecs(
            block_size=next(iter(layers.values())).block_size, kv_cache_specs=layers
        )
    if group["kind"] == "mamba":
        return interface.MambaSpec(
            block_size=group["block_size"],
            shapes=tuple(tuple(shape) for shape in group["shapes"]),
            dtypes=tuple(DTYPES[name] for name in group["dtypes"]),
            mamba_cache_mode=group["mamba_cache_mode"],
            num_speculative_blocks=group.get("num_speculative_blocks", 0),
            num_prefill_checkpoint_blocks=group.get("num_prefill_checkpoint_blocks", 0),
        )
    if group["kind"] == "hisparse_hot":
        return interface.HiSparseHotSpec(
            block_size=group["block_size"],
            page_size=group["page_size_bytes"],
            blocks_per_request=group["blocks_per_request"],
        )
    if group["kind"] == "hisparse_resident":
        return interface.HiSparseResidentSpec(
            block_size=group["block_size"], page_size=group["page_size_bytes"]
        )
    states = group.get("states_per_token", 1)
    common = {
        "block_size": cases.tokens_of(group),
        "tokens_per_state": group.get("compression", 1) if states == 1 else Fraction(1, states),
        "num_kv_heads": group["num_kv_heads"],
        "head_size": group["head_size"],
        "dtype": DTYPES[group["dtype"]],
        "max_tp_shards": group.get("max_tp_shards"),
        "dcp_sharded": group.get("dcp_sharded", True),
    }
    kind = group["kind"]
    if kind == "full_attention":
        return interface.FullAttentionSpec(**common)
    if kind == "mla_attention":
        return interface.MLAAttentionSpec(**common)
    if kind == "hidden_state":
        return interface.HiddenStateCacheSpec(**common)
    if kind == "encoder_only_attention":
        return interface.EncoderOnlyAttentionSpec(**common)
    if kind == "cross_attention":
        return interface.CrossAttentionSpec(**common)
    if kind == "rswa":
        return interface.RSWASpec(**common, rswa_window=group["rswa_window"])
    if kind == "sink_full_attention":
        return interface.SinkFullAttentionSpec(**common, sink_len=group["sink_len"])
    if kind == "sliding_window":
        return interface.SlidingWindowSpec(**common, **window_of(group))
    if kind == "sliding_window_mla":
        return interface.SlidingWindowMLASpec(
            **common,
            **window_of(group),
            bounded_replay=group.get("bounded_replay", False),
        )
    if kind == "chunked_local_attention":
        return interface.ChunkedLocalAttentionSpec(
            **common, attention_chunk_size=group["attention_chunk_size"]
        )
    if kind == "circular_buffer":
        return interface.CircularBufferSpec(**common)
    raise ValueError(f"no spec of kind {kind}")


def group_of(group: dict[str, Any]) -> Any:
    return interface.KVCacheGroupSpec(
        layer_names=[
            layer for member in group.get("members", [group]) for layer in member["layers"]
        ],
        kv_cache_spec=spec_of(group),
        is_eagle_group=group.get("is_eagle_group", False),
        enable_kv_transfer=group.get("enable_kv_transfer", True),
        host_resident=group.get("host_resident", False),
    )


def unwrapped(group: Any) -> Any:
    spec = group.kv_cache_spec
    if isinstance(spec, interface.UniformTypeKVCacheSpecs):
        spec = next(iter(spec.kv_cache_specs.values()))
    return dataclasses.replace(group, kv_cache_spec=spec)


PIPELINE_RANK = "(parallel_config.rank // self.tp_size) % self.pp_size"


@functools.cache
def source_of_worker() -> str:
    return inspect.getsource(worker.MooncakeStoreWorker.__init__)


class Reference:
    """The built-in connector's view of one configuration."""

    def __init__(
        self,
        config: dict[str, Any],
        *,
        prefix_match_unit: int | None = None,
        use_eagle: bool = False,
        model: str = "model",
        cache_prefix: str = "",
        model_total_kv_heads: int = 1,
    ) -> None:
        parallel = {"tp": 1, "pp": 1, "pcp": 1, "dcp": 1} | config.get("parallel", {})
        self.parallel = parallel
        self.config = interface.KVCacheConfig(
            num_blocks=config["num_blocks"],
            kv_cache_tensors=[],
            kv_cache_groups=[group_of(group) for group in config["groups"]],
            prefix_cache_retention_interval=config.get("prefix_cache_retention_interval"),
        )
        specs = [group.kv_cache_spec for group in self.config.kv_cache_groups]
        self.vllm_config = SimpleNamespace(
            cache_config=SimpleNamespace(
                block_size=specs[0].block_size,
                prefix_match_unit=prefix_match_unit,
                enable_prefix_caching=True,
            ),
            parallel_config=SimpleNamespace(decode_context_parallel_size=parallel["dcp"]),
            kv_transfer_config=SimpleNamespace(),
            speculative_config=SimpleNamespace(use_eagle_block_drop=lambda: True)
            if use_eagle
            else None,
        )
        self.step, self.unit = kv_cache_utils.resolve_kv_cache_block_sizes(
            self.config, self.vllm_config
        )
        # The engine asks it of the scheduler's view, which has no wrappers.
        self.alignment = kv_cache_utils.resolve_cache_hit_alignment_tokens(
            dataclasses.replace(
                self.config,
                kv_cache_groups=[unwrapped(group) for group in self.config.kv_cache_groups],
            ),
            self.vllm_config,
            self.step,
            self.unit,
        )
        self.config.hash_block_size = self.unit
        self.config.cache_hit_alignment_tokens = self.alignment
        self.coordinator = coordinators.MooncakeStoreCoordinator.from_kv_cache_config(
            self.config, self.vllm_config, self.step, self.unit
        )
        self.groups = self.coordinator.kv_cache_groups
        self.block_sizes: list[int] = [group.kv_cache_spec.block_size for group in self.groups]
        self.model = model
        self.cache_prefix = cache_prefix
        self.model_total_kv_heads = model_total_kv_heads

    def stage_groups(self, layers: set[str]) -> list[int]:
        """Which groups a pipeline stage that holds `layers` stores."""
        groups = kv_cache_utils._project_kv_cache_groups_to_worker(
            self.config.kv_cache_groups, dict.fromkeys(layers)
        )
        config = dataclasses.replace(self.config, kv_cache_groups=groups)
        return list(config.prefix_cacheable_group_ids)

    def find(self, hashes: list[bytes], exists: set[tuple[int, bytes]], max_tokens: int) -> int:
        pool = coordinators.ExternalCachedBlockPool(self.unit, exists)
        return self.coordinator.find_longest_cache_hit(hashes, max_tokens, pool)[1]

    def prompt_tail(self, hashes: list[bytes], prompt_tokens: int) -> list[tuple[int, int, int]]:
        """(group, block, tokens) of what is published when a prompt has been computed."""
        rows = [[1000 * (group + 1) + at for at in range(64)] for group in range(len(self.groups))]
        request = SimpleNamespace(
            boundary_puts=None,
            publish_partial_tail=True,
            num_prompt_tokens=prompt_tokens,
            completed_token_len=prompt_tokens,
            block_hashes=hashes[: prompt_tokens // self.unit],
            block_ids=rows,
        )
        puts = scheduler._partial_tail_non_mamba_puts(self.coordinator, request, self.block_sizes)
        return [(put.group_id, put.block_id % 1000, put.num_tokens) for put in puts]

    def worker_of(self, rank: int = 0) -> Any:
        """A rank's worker with what its keys and lookups need, and no store yet."""
        sizes = self.parallel
        tp, pcp, dcp, _ = positions(sizes["tp"], sizes["pcp"], sizes["dcp"], sizes["pp"])[rank]
        # The reference does not ask for its pipeline group, but counts.
        assert PIPELINE_RANK in source_of_worker()
        pp = (rank // sizes["tp"]) % sizes["pp"]
        one = worker.MooncakeStoreWorker.__new__(worker.MooncakeStoreWorker)
        one.tp_rank, one.tp_size = tp, sizes["tp"]
        one.pp_rank, one.pp_size = pp, sizes["pp"]
        one.pcp_rank, one.pcp_size = pcp, sizes["pcp"]
        one.dcp_rank, one.dcp_size = dcp, sizes["dcp"]
        one.num_kv_head = self.model_total_kv_heads
        one.block_size, one.hash_block_size = self.step, self.unit
        one.coord = self.coordinator
        one._kv_cache_groups = self.groups
        one._capacity_only = False
        one._record_kv_connector_operation = lambda *_, **__: None
        one.store_tp_size = None
        metadata = data.KeyMetadata(
            model_name=self.model.rstrip("/").split("/")[-1],
            tp_rank=tp,
            pcp_rank=pcp,
            dcp_rank=dcp,
            pp_rank=pp,
            cache_prefix=self.cache_prefix,
        )
        one._group_tp_replication_factors = one._compute_group_tp_replication_factors()
        one.token_dbs = one._build_token_databases(metadata, None)
        one._init_lookup_key_prefixes()
        return one

    def lookup(self, one: Any, hashes: list[bytes], present: set[str], tokens: int) -> Any:
        """A worker's answer when the store has exactly `present`."""
        one.store = SimpleNamespace(
            batch_is_exist=lambda keys: [1 if key in present else 0 for key in keys],
            close=lambda: None,
        )
        return one.lookup(tokens, hashes)


def refusal(config: dict[str, Any], step: int, unit: int, alignment: int | None) -> str | None:
    """Why the reference does not start with these groups and the engine's sizes, or None.

    It looks at the worker's configuration and at the scheduler's, which has no wrappers.
    """
    parallel = {"tp": 1, "pp": 1, "pcp": 1, "dcp": 1} | config.get("parallel", {})
    workers = interface.KVCacheConfig(
        num_blocks=config["num_blocks"],
        kv_cache_tensors=[],
        kv_cache_groups=[group_of(group) for group in config["groups"]],
        hash_block_size=unit,
        cache_hit_alignment_tokens=alignment,
    )
    schedulers = dataclasses.replace(
        workers, kv_cache_groups=[unwrapped(group) for group in workers.kv_cache_groups]
    )
    vllm_config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(
            prefill_context_parallel_size=parallel["pcp"],
            decode_context_parallel_size=parallel["dcp"],
        ),
        speculative_config=None,
    )
    try:
        for each in (schedulers, workers):
            connector.MooncakeStoreConnector._validate_kv_cache_config(vllm_config, each)
            one = coordinators.MooncakeStoreCoordinator.from_kv_cache_config(
                each, vllm_config, step, unit
            )
            metadata = data.KeyMetadata("model", 0, 0, 0, 0)
            for group in one.kv_cache_groups:
                data.ChunkedTokenDatabase(metadata, group.kv_cache_spec.block_size, unit)
    except (AssertionError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return None
