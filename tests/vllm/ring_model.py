"""Models whose layers own a scratch ring beside their cache, as those with compressed keys do.

The ring of a layer keeps the rows of the open group of CAP positions: p - p % CAP to p. Half of
their mean is added to the layer's output, so that a wrong ring changes the answer. vLLM may make
the ring larger than it was declared: the capacity is what the group's spec says in the end.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from typing import Any

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.qwen3_next import Qwen3NextForCausalLM
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder, MultipleOf
from vllm.v1.kv_cache_interface import CircularBufferSpec

DECLARED_CAPACITY = 16

# First bytes of every row that was written, for the search in the store.
written: set[bytes] = set()
PIECE = 32
_record = bool(os.environ.get("RING_RECORD"))


@dataclass
class RingMetadata:
    """Where each request's ring is, and which positions this step computes."""

    blocks: list[int]
    first: list[int]
    counts: list[int]


class RingBuilder(AttentionMetadataBuilder[RingMetadata]):
    """Takes from the common metadata what a ring needs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> RingMetadata:
        common = common_attn_metadata
        starts = common.query_start_loc_cpu[: common.num_reqs + 1].tolist()
        counts = [end - start for start, end in itertools.pairwise(starts)]
        ends = common.seq_lens[: common.num_reqs].tolist()
        return RingMetadata(
            common.block_table_tensor[: common.num_reqs, 0].tolist(),
            [end - count for end, count in zip(ends, counts, strict=True)],
            counts,
        )


class RingBackend(AttentionBackend):
    """Nothing but a builder: the layer computes by itself."""

    @staticmethod
    def get_name() -> str:
        return "TEST_RING"

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(1)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return []

    @staticmethod
    def get_impl_cls() -> Any:
        raise NotImplementedError

    @staticmethod
    def get_builder_cls() -> type[RingBuilder]:
        return RingBuilder


class Ring(torch.nn.Module, AttentionLayerBase):
    """The ring of one layer."""

    def __init__(self, prefix: str, width: int, dtype: torch.dtype, contexts: dict[str, Any]):
        super().__init__()
        self.prefix, self.width, self.dtype = prefix, width, dtype
        self.kv_cache = torch.tensor([])
        contexts[prefix] = self

    def get_attn_backend(self) -> type[AttentionBackend]:
        return RingBackend

    def get_kv_cache_spec(self, vllm_config: Any) -> CircularBufferSpec:
        return CircularBufferSpec(
            block_size=DECLARED_CAPACITY,
            num_kv_heads=1,
            head_size=self.width,
            head_size_v=0,
            dtype=self.dtype,
        )

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        self.kv_cache = kv_cache.squeeze(1)  # [blocks, positions, width]

    def means(self, rows: torch.Tensor) -> torch.Tensor:
        """For each row, the mean over its group so far; and keeps the open group."""
        metadata = get_forward_context().attn_metadata
        if isinstance(metadata, list):
            metadata = metadata[0]
        if not metadata or self.prefix not in metadata:
            return torch.zeros_like(rows)
        means = torch.zeros_like(rows)
        at = 0
        mine = metadata[self.prefix]
        for block, first, count in zip(mine.blocks, mine.first, mine.counts, strict=True):
            if block > 0 and count > 0:
                means[at : at + count] = self._one(rows[at : at + count], block, first)
            at += count
        return means

    def _one(self, rows: torch.Tensor, block: int, first: int) -> torch.Tensor:
        ring = self.kv_cache[block]
        capacity = ring.shape[0]
        carried = first % capacity
        group = torch.cat((ring[:carried], rows)).float()
        total = group.shape[0]
        padded = torch.nn.functional.pad(group, (0, 0, 0, -total % capacity))
        sums = padded.view(-1, capacity, self.width).cumsum(1)
        counts = torch.arange(1, capacity + 1, dtype=torch.float32).view(1, -1, 1)
        means = (sums / counts).view(-1, self.width)[carried:total]
        last = (total - 1) // capacity * capacity
        ring[: total - last] = group[last:].to(self.dtype)
        if _record:
            for row in group[last:].to(self.dtype):
                written.add(row.contiguous().view(torch.uint8).numpy()[:PIECE].tobytes())
        return means.to(rows.dtype)


def _add_rings(model: Any, vllm_config: Any) -> None:
    config = vllm_config.model_config.hf_text_config
    dtype = vllm_config.model_config.dtype
    contexts = vllm_config.compilation_config.static_forward_context
    for number, layer in enumerate(model.model.layers):
        ring = Ring(f"model.layers.{number}.ring", 2 * config.hidden_size, dtype, contexts)
        layer.register_forward_hook(_hook(ring))


def _hook(ring: Ring) -> Any:
    def add(_module: Any, _arguments: Any, output: Any) -> Any:
        hidden, residual = output
        means = ring.means(torch.cat((hidden, residual), dim=-1))
        return hidden + 0.5 * means[:, : hidden.shape[-1]], residual

    return add


class RingLlamaForCausalLM(LlamaForCausalLM):
    """Full attention and rings."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        _add_rings(self, vllm_config)


class RingQwen3NextForCausalLM(Qwen3NextForCausalLM):
    """Full attention, recurrent states and rings."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        _add_rings(self, vllm_config)


def register() -> None:
    """Makes both known to vLLM."""
    from vllm import ModelRegistry

    ModelRegistry.register_model("RingLlamaForCausalLM", RingLlamaForCausalLM)
    ModelRegistry.register_model("RingQwen3NextForCausalLM", RingQwen3NextForCausalLM)
