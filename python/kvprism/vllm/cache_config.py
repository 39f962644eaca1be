"""vLLM's KVCacheConfig in kvprism's words: groups, sizes and addresses, no decisions.

Classes are told apart by their exact name, since a subclass may well mean something else, and
nothing of vLLM is imported for it: names have moved between versions.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .._core import (
    CacheConfig,
    CacheTensor,
    GroupId,
    KeySchema,
    Projection,
    SegmentMap,
    SpecRegistry,
)
from .meaning import as_json, attends_sparsely, facts_of_options
from .problems import Problems

Fields = dict[str, Any]


class UnknownSpecError(Exception):
    """A spec class that nobody has described."""


def _dtype(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


# Attributes that vLLM 0.30 does not have yet, and what it does without them.
_SINCE_0_31 = {"max_tp_shards": None, "dcp_sharded": True, "bounded_replay": False}


def _attribute(spec: Any, name: str) -> Any:
    if name in _SINCE_0_31:
        return getattr(spec, name, _SINCE_0_31[name])
    return getattr(spec, name)


def _attention(spec: Any, kind: str, *more: str) -> Fields:
    """Keys of every attention spec, and the named ones, which have vLLM's own names."""
    per_state = spec.tokens_per_state
    # vLLM counts tokens in a block, kvprism stored positions.
    compression = int(per_state) if per_state >= 1 else 1
    states_per_token = 1 if per_state >= 1 else int(1 / per_state)
    fields: Fields = {
        "kind": kind,
        "block_size": spec.block_size * states_per_token // compression,
        "compression": compression,
        "states_per_token": states_per_token,
        "num_kv_heads": spec.num_kv_heads,
        "max_tp_shards": _attribute(spec, "max_tp_shards"),
        "head_size": spec.head_size,
        "head_size_v": spec.head_size_v,
        "dtype": _dtype(spec.dtype),
        "cache_dtype": _cache_dtype(spec),
        "num_head_slots": spec.num_head_slots,
        "state_content_bytes": spec.state_content_bytes,
        "dcp_sharded": _attribute(spec, "dcp_sharded"),
    }
    return fields | {name: _attribute(spec, name) for name in more}


def _cache_dtype(spec: Any) -> str:
    """How the elements are packed: the name that the spec has, and vLLM's quantisation mode."""
    mode = getattr(spec, "kv_quant_mode", None)
    words = (getattr(spec, "cache_dtype_str", None), mode.name if mode else None)
    return "/".join(str(word) for word in words if word)


def _plain(kind: str, *more: str) -> Callable[[Any], Fields]:
    return lambda spec: _attention(spec, kind, *more)


def _window(kind: str, *more: str) -> Callable[[Any], Fields]:
    def translate(spec: Any) -> Fields:
        retained = getattr(spec, "extra_retained_tokens", 0)
        return _attention(spec, kind, "sliding_window", *more) | {"extra_retained_tokens": retained}

    return translate


def _latent_window(spec: Any) -> Fields:
    fields = _window("sliding_window_mla", "bounded_replay")(spec)
    # vLLM's scheduler itself goes back behind the end of a hit to compute the window again.
    return fields | ({"replay_tokens": 0} if fields["bounded_replay"] else {})


def _mamba(spec: Any) -> Fields:
    return {
        "kind": "mamba",
        "block_size": spec.block_size,
        "mamba_cache_mode": spec.mamba_cache_mode,
        "shapes": [list(shape) for shape in spec.shapes],
        "dtypes": [_dtype(dtype) for dtype in spec.dtypes],
        "num_speculative_blocks": spec.num_speculative_blocks,
        "num_prefill_checkpoint_blocks": getattr(spec, "num_prefill_checkpoint_blocks", 0),
        "prefill_checkpoint_alignment": getattr(spec, "prefill_checkpoint_alignment", None),
        "tp_replicated": bool(getattr(spec, "tp_replicated", False)),
    }


def _raw(kind: str, *more: str) -> Callable[[Any], Fields]:
    return lambda spec: {
        "kind": kind,
        "block_size": spec.block_size,
        "page_size_bytes": spec.page_size_bytes,
        **{name: getattr(spec, name) for name in more},
    }


_TRANSLATORS: dict[str, Callable[[Any], Fields]] = {
    "FullAttentionSpec": _plain("full_attention"),
    "MLAAttentionSpec": _plain("mla_attention"),
    "HiddenStateCacheSpec": _plain("hidden_state"),
    "RSWASpec": _plain("rswa", "rswa_window"),
    "SinkFullAttentionSpec": _plain("sink_full_attention", "sink_len"),
    "ChunkedLocalAttentionSpec": _plain("chunked_local_attention", "attention_chunk_size"),
    "SlidingWindowSpec": _window("sliding_window"),
    "SlidingWindowMLASpec": _latent_window,
    "CircularBufferSpec": _plain("circular_buffer"),
    "KpoolTailSpec": _plain("circular_buffer"),  # as vLLM 0.30 and 0.31 call such a ring
    "MambaSpec": _mamba,
    "EncoderOnlyAttentionSpec": _plain("encoder_only_attention"),
    "CrossAttentionSpec": _plain("cross_attention"),
    "HiSparseHotSpec": _raw("hisparse_hot", "blocks_per_request"),
    "HiSparseResidentSpec": _raw("hisparse_resident"),
}
_registry = SpecRegistry.builtin()


def register_spec(class_name: str, translate: Callable[[Any], Fields], **kind: Any) -> None:
    """Teaches the connector a spec class of yours. Call it where vLLM loads your plugin.

    Args:
        class_name: Name of the class, without its module.
        translate: Gives the keys of a group (docs/configuration.md) for one spec.
        kind: Arguments of ``SpecRegistry.with_kind`` when the class is of a kind that is not built
            in; none when ``translate`` names a built-in kind.
    """
    global _registry
    if kind:
        _registry = _registry.with_kind(**kind)
    _TRANSLATORS[class_name] = translate


def _layer_specs(spec: Any) -> Mapping[str, Any] | None:
    """The specs of the layers of a wrapper; None of a plain spec."""
    layers = getattr(spec, "kv_cache_specs", None)
    return layers if isinstance(layers, Mapping) else None


def _first_layer(spec: Any) -> Any:
    layers = _layer_specs(spec)
    return next(iter(layers.values())) if layers else spec


def _name_of_spec(spec: Any) -> str:
    """Of its first layer, if it is a wrapper."""
    return type(_first_layer(spec)).__name__


def _one_spec(spec: Any) -> Fields:
    translate = _TRANSLATORS.get(type(spec).__name__)
    if translate is None:
        raise UnknownSpecError(type(spec).__name__)
    fields = translate(spec)
    if "page_size_bytes" not in fields:
        # The engine's own page holds; what lies behind the content of one is padding.
        fields["page_size_padded"] = spec.page_size_bytes
    return fields


def _group(group: Any) -> Fields:
    layers = _layer_specs(group.kv_cache_spec)
    common = {
        "layers": list(group.layer_names),
        "enable_kv_transfer": bool(getattr(group, "enable_kv_transfer", True)),
        "is_eagle_group": bool(group.is_eagle_group),
        "host_resident": bool(getattr(group, "host_resident", False)),
        "role": _word(getattr(group, "role", "default")),
    }
    if layers is None:
        return _one_spec(group.kv_cache_spec) | common
    members: list[Fields] = []
    # The order of the wrapper: vLLM's scheduler knows a wrapper by its first layer. Where a stage
    # holds none of its layers, vLLM leaves those of the other pipeline stages in it.
    held = set(group.layer_names)
    for name, spec in layers.items():
        fields = _one_spec(spec)
        for member in members:
            if all(member[key] == fields.get(key) for key in member if key != "layers"):
                break
        else:
            member = fields | {"layers": []}
            members.append(member)
        if name in held:
            member["layers"].append(name)
    if len(members) == 1:
        return members[0] | common
    return {"kind": "uniform", "members": members} | common


def _word(value: object) -> str:
    return str(getattr(value, "value", value))


def _eagle_drops_blocks(vllm_config: Any) -> bool:
    speculative = vllm_config.speculative_config
    drops = getattr(speculative, "use_eagle_block_drop", None)
    return bool(drops and drops())


@dataclass(frozen=True)
class Described:
    """Both halves of the connector build the same one, in their own processes."""

    projection: Projection
    schema: KeySchema
    facts: Mapping[str, Any]
    meaning: Mapping[str, Any]
    """What the facts say in few words, as JSON."""


def describe(
    vllm_config: Any,
    kv_cache_config: Any,
    block_sizes: tuple[int, int],
    namespace: str,
    key_schema: str = "kvprism",
    stages: Mapping[int, Collection[int]] | None = None,
    meaning: Mapping[str, Any] | None = None,
) -> Described:
    """The projection and the key schema of an engine.

    Args:
        vllm_config: vLLM's VllmConfig.
        kv_cache_config: vLLM's KVCacheConfig, of the scheduler or of a worker.
        block_sizes: The engine's scheduler block size and hash block size, in tokens.
        namespace: Namespace of the keys.
        key_schema: How objects are named: ``kvprism`` or ``vllm``.
        stages: Pipeline rank to the indices of the groups that it holds layers of; None where only
            this rank is known.
        meaning: What the workers say that their bytes mean; None to go by this process's own
            configuration.

    Raises:
        ConfigError: With every problem at once.
    """
    problems = Problems()
    groups = kv_cache_config.kv_cache_groups
    _need_prefixes(vllm_config, groups, problems)
    rows = []
    for index, group in enumerate(groups):
        try:
            row = _group(group)
            if stages is not None:
                row["pipeline_stages"] = [at for at in sorted(stages) if index in stages[at]]
            rows.append(row)
        except UnknownSpecError as unknown:
            problems.add(
                f"kv_cache_groups[{index}].kv_cache_spec",
                str(unknown),
                "one of " + ", ".join(sorted(_TRANSLATORS)),
                "kvprism.vllm.register_spec() teaches the connector another class",
            )
    problems.raise_if_any("KV cache of this model")
    parallel = vllm_config.parallel_config
    if key_schema == "kvprism" and _draft_attends_otherwise(vllm_config):
        _hold_apart(rows, parallel.tensor_parallel_size)
    scheduler_block_size, hash_block_size = block_sizes

    def projection_of(rows: list[Fields]) -> Projection:
        return Projection(CacheConfig.from_dict(common | {"groups": rows}, _registry), _registry)

    common = {
        "num_blocks": kv_cache_config.num_blocks,
        "kv_layout": _layout(vllm_config, kv_cache_config),
        "parallel": {
            "tp": parallel.tensor_parallel_size,
            "pp": parallel.pipeline_parallel_size,
            "pcp": getattr(parallel, "prefill_context_parallel_size", 1),
            "dcp": getattr(parallel, "decode_context_parallel_size", 1),
        },
        "scheduler_block_size": scheduler_block_size,
        "hash_block_size": hash_block_size,
        "cache_hit_alignment_tokens": _hit_alignment(
            kv_cache_config, block_sizes, getattr(parallel, "decode_context_parallel_size", 1)
        ),
        "prefix_cache_retention_interval": getattr(
            kv_cache_config, "prefix_cache_retention_interval", None
        ),
        "use_eagle": _eagle_drops_blocks(vllm_config),
        "model_total_kv_heads": vllm_config.model_config.get_total_num_kv_heads(),
        "key_schema": key_schema,
        "namespace": namespace,
    }
    projection = projection_of(rows)
    _compare(projection, kv_cache_config, problems)
    problems.raise_if_any("KV cache of this model")
    if meaning is None:
        meaning = meaning_of(vllm_config, kv_cache_config)
    facts = key_facts(vllm_config, meaning)
    # vLLM's scheduler knows a wrapper by its first layer, so that keys may say no more of it here;
    # what the others are follows from the model's configuration, which they do say.
    wrapped = key_schema == "kvprism" and any("members" in row for row in rows)
    named = projection_of([_of_first_layer(row) for row in rows]) if wrapped else projection
    schema = KeySchema.make(named, **facts)
    if wrapped:
        _compare_shards(schema, KeySchema.make(projection, **facts), problems)
        problems.raise_if_any("KV cache of this model")
    return Described(projection, schema, facts, meaning)


_RINGS = ("CircularBufferSpec", "KpoolTailSpec")


def _hit_alignment(
    kv_cache_config: Any, block_sizes: tuple[int, int], context_ranks: int
) -> int | None:
    """Of the engine's own cache; the store offers and keeps what it would."""
    scheduler_block_size, unit = block_sizes
    groups = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    specs = [each for spec in groups for each in (_layer_specs(spec) or {"": spec}).values()]
    if any(getattr(spec, "prefix_replay_tokens", 0) for spec in specs):
        # Where the end of a hit is computed anew, vLLM takes whole blocks of what is offered.
        return scheduler_block_size
    aligned: int | None
    if hasattr(kv_cache_config, "cache_hit_alignment_tokens"):
        aligned = kv_cache_config.cache_hit_alignment_tokens
    else:  # before vLLM 0.32
        fine = _ends_inside_blocks(kv_cache_config.kv_cache_groups, unit, context_ranks)
        aligned = unit if fine else scheduler_block_size
    rings = (spec for spec in specs if type(spec).__name__ in _RINGS)
    if aligned and any(aligned % ring.block_size for ring in rings):
        # A ring is not stored, and behind such an end it would have to be half full.
        return scheduler_block_size
    return aligned


def _ends_inside_blocks(groups: Collection[Any], unit: int, context_ranks: int) -> bool:
    """Whether hits may: where states are larger, and whatever manages the others looks so closely.

    Args:
        groups: vLLM's groups.
        unit: Tokens of a hash.
        context_ranks: That share the tokens of a block of attention.
    """
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    # Workers have wrappers where the scheduler has the first layer.
    firsts = [_first_layer(group.kv_cache_spec) for group in groups]
    states = [spec for spec in firsts if getattr(spec, "mamba_cache_mode", None) == "align"]
    least = unit if context_ranks > 1 else unit + 1
    if len(groups) == 1 or not any(spec.block_size >= least for spec in states):
        return False
    for group, spec in zip(groups, firsts, strict=True):
        manager = KVCacheSpecRegistry.get_manager_class(spec, group.role)
        if not spec.prefix_cacheable or manager.supports_fine_grained_hash_lookup:
            continue
        shared = _attribute(spec, "dcp_sharded")
        if spec.block_size * (context_ranks if shared else 1) != unit:
            return False
    return True


def _need_prefixes(vllm_config: Any, groups: Collection[Any], problems: Problems) -> None:
    """A store is of use only where a prefix and its hashes say what the bytes are."""
    reads_ahead = [at for at, group in enumerate(groups) if _reads_ahead(group.kv_cache_spec)]
    for at in reads_ahead:
        problems.add(
            f"kv_cache_groups[{at}].kv_cache_spec.non_causal",
            True,
            "layers that read no token before its time",
            "what such layers leave depends on what comes after the prefix",
        )
    if getattr(vllm_config.model_config, "is_diffusion", False):
        problems.add(
            "model_config.is_diffusion",
            True,
            "a model that computes its answer token by token",
            "requests with diffusion_read_only never write blocks that vLLM's own cache then has",
        )
    if not reads_ahead and not vllm_config.cache_config.enable_prefix_caching:
        problems.add(
            "cache_config.enable_prefix_caching",
            False,
            "True",
            "without it vLLM may number pictures instead of hashing them, and turns it off where "
            "prefixes do not say what a cache holds",
        )


def _reads_ahead(spec: Any) -> bool:
    """Whether an attention layer of the group is not causal, which vLLM's core acts on itself."""
    members = (_layer_specs(spec) or {"": spec}).values()
    return any(getattr(member, "non_causal", False) for member in members)


def _draft_attends_otherwise(vllm_config: Any) -> bool:
    """Whether one wrapper may hold latent layers, the same on all ranks, and others."""
    draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
    if draft is None:
        return False
    return bool(getattr(draft, "use_mla", False)) != bool(
        getattr(vllm_config.model_config, "use_mla", False)
    )


def _hold_apart(rows: list[Fields], tensor_ranks: int) -> None:
    """No ranks share a key: the scheduler cannot see what a wrapper has beside its first layer."""
    for row in rows:
        for spec in row.get("members", [row]):
            if "num_kv_heads" in spec:
                spec["total_num_kv_heads"] = spec["num_kv_heads"] * tensor_ranks


def _compare_shards(first: KeySchema, whole: KeySchema, problems: Problems) -> None:
    """Tensor ranks share a key of a wrapper only where they hold the same bytes of every layer."""
    projection = whole.projection
    for gid in projection.store_group_ids:
        index = projection.store_index(gid)
        assert index is not None
        by_first, by_all = len(first.shards(index)), len(whole.shards(index))
        if by_first != by_all:
            problems.add(
                f"kv_cache_groups[{int(gid)}].kv_cache_spec",
                f"{by_first} shards of its first layer, {by_all} of all its layers",
                "as many of either",
                "vLLM's scheduler knows the first layer alone, and looks for its shards",
            )


def _of_first_layer(row: Fields) -> Fields:
    """A group with the spec of its first layer in place of a wrapper."""
    if "members" not in row:
        return row
    holders = (
        each for each in row["members"] if row["layers"] and row["layers"][0] in each["layers"]
    )
    first: Fields = next(holders, row["members"][0])
    return first | {key: value for key, value in row.items() if key not in ("kind", "members")}


def _layout(vllm_config: Any, kv_cache_config: Any) -> str:
    name = getattr(kv_cache_config, "kv_cache_layout", None)
    name = name or getattr(vllm_config.cache_config, "kv_cache_layout", None)
    return str(name or "LBHNC")


# vLLM calls them cacheable. No store can hold them, which validate_store tells of one and the other
# needs nobody to be told.
_NEVER_STORED = ("CrossAttentionSpec", "EncoderOnlyAttentionSpec")


def _compare(projection: Projection, kv_cache_config: Any, problems: Problems) -> None:
    """What vLLM says itself of its groups must be what the projection says."""
    ours = tuple(
        gid
        for gid in range(projection.num_groups)
        if projection.store_index(GroupId(gid)) is not None
    )
    groups = kv_cache_config.kv_cache_groups
    theirs = tuple(
        gid
        for gid in kv_cache_config.prefix_cacheable_group_ids
        if _name_of_spec(groups[gid].kv_cache_spec) not in _NEVER_STORED
    )
    if ours != theirs:
        problems.add("prefix_cacheable_group_ids", theirs, f"{ours}, as the spec classes say")
    for gid, (group, row) in enumerate(zip(groups, projection.groups(), strict=True)):
        layers = _layer_specs(group.kv_cache_spec) or {}
        specs = [layers.get(name, group.kv_cache_spec) for name in group.layer_names]
        pages = sum(spec.page_size_bytes for spec in specs)
        # A class of somebody's own may not say it.
        contents = sum(getattr(spec, "real_page_size_bytes", 0) for spec in specs)
        # Padding may be moved, and content must be.
        if not contents <= row.object_bytes <= pages:
            problems.add(
                f"kv_cache_groups[{gid}].kv_cache_spec",
                f"{_name_of_spec(group.kv_cache_spec)} of {contents} bytes in each block",
                f"the {row.object_bytes} that kvprism makes of its fields",
                "kvprism.vllm.register_spec() can translate the class otherwise",
            )


def meaning_of(vllm_config: Any, kv_cache_config: Any = None) -> dict[str, Any]:
    """What gives the bytes their meaning, beside what the specs of the groups say; as JSON."""
    model = vllm_config.model_config
    return {
        "model": str(model.model),
        "revision": model.revision,
        "weights": as_json(getattr(model, "quantization", None)),
        "dtype": _dtype(model.dtype),
        "kv_quantization": _kv_quantization(vllm_config, kv_cache_config),
        "context_interleave": _context_interleave(vllm_config, kv_cache_config),
        "hashes": hash_generation(),
        **facts_of_options(vllm_config),
    }


def key_facts(vllm_config: Any, meaning: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What the keys say of the engine, beside its groups."""
    meaning = meaning_of(vllm_config) if meaning is None else meaning
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    digest = hashlib.sha256(json.dumps(meaning, sort_keys=True).encode()).hexdigest()
    return {
        "model": meaning["model"],
        "model_revision": f"{meaning['revision'] or ''};{digest[:32]}",
        "kv_quantization": meaning["kv_quantization"],
        "hash_algorithm": algorithm,
        "hash_is_stable": _hash_is_stable(algorithm),
        "pipeline_split": _pipeline_split(vllm_config),
    }


# What an engine may be asked for where sparse attention packs the cache in a way of its own.
_MAY_BE_PACKED = ("auto", "fp8", "fp8_e4m3", "fp8_ds_mla")


def _kv_quantization(vllm_config: Any, kv_cache_config: Any) -> str:
    """How elements are quantised, by a name that scheduler and workers have alike.

    Sparse attention settles its packing while a worker makes its model, and writes the name into
    that worker's configuration alone. The bytes of a layer's block tell packings apart, and all
    know them, on a pipeline stage of however many layers: one of its two strides is that long.
    """
    name = str(vllm_config.cache_config.cache_dtype)
    packed = name in _MAY_BE_PACKED and attends_sparsely(vllm_config.model_config)
    if kv_cache_config is None or not packed:
        return name
    tensors = kv_cache_config.kv_cache_tensors
    pages = sorted({min(int(each.layer_stride), int(each.block_stride)) for each in tensors})
    return f"sparse, {', '.join(map(str, pages))} bytes"


def _context_interleave(vllm_config: Any, kv_cache_config: Any) -> int | None:
    """Consecutive tokens that lie on one context rank; None where one rank holds all.

    Up to 0.32 a worker settles it just before it makes its connector, and the scheduler never
    does: both must come to the same.
    """
    parallel = vllm_config.parallel_config
    decode = parallel.decode_context_parallel_size
    if decode * parallel.prefill_context_parallel_size == 1:
        return None
    interleave = int(parallel.cp_kv_cache_interleave_size)
    if decode == 1:
        return interleave
    if parallel.dcp_kv_cache_interleave_size > 1:
        interleave = int(parallel.dcp_kv_cache_interleave_size)
    transfer = vllm_config.kv_transfer_config
    beside_nixl = transfer is not None and transfer.has_connector("NixlConnector")
    if beside_nixl and getattr(parallel, "_allow_auto_resolve_cp_interleave_size", True):
        return min(int(group.kv_cache_spec.block_size) for group in kv_cache_config.kv_cache_groups)
    return interleave


def _pipeline_split(vllm_config: Any) -> str:
    """The layers of every stage: versions of vLLM divide the remainder differently."""
    stages = vllm_config.parallel_config.pipeline_parallel_size
    if stages == 1:
        return ""
    from vllm.distributed.utils import get_pp_indices

    layers = vllm_config.model_config.get_total_num_hidden_layers()
    ranges = (get_pp_indices(layers, stage, stages) for stage in range(stages))
    return ",".join(f"{start}-{end}" for start, end in ranges)


def _hash_is_stable(algorithm: str) -> bool:
    # vLLM starts the chain of xxhash with random bytes unless the seed is fixed.
    return algorithm.startswith("sha256") or bool(os.environ.get("PYTHONHASHSEED"))


def hash_generation() -> str:
    """How this vLLM hashes adapters, media, salts and embeddings: otherwise since 0.31."""
    from vllm.v1.core import kv_cache_utils

    return "tagged" if hasattr(kv_cache_utils, "to_event_extra_keys") else "plain"


def held_layers(kv_cache_config: Any) -> Iterable[str]:
    """Names of the layers of this rank."""
    for group in kv_cache_config.kv_cache_groups:
        yield from group.layer_names


def held_groups(kv_cache_config: Any) -> tuple[int, ...]:
    """Indices of the groups that this rank holds layers of."""
    groups = kv_cache_config.kv_cache_groups
    return tuple(index for index, group in enumerate(groups) if group.layer_names)


def check_ranks(
    described: Described,
    told: Mapping[tuple[int, int], tuple[str, Sequence[tuple[str, str]]]],
) -> None:
    """Refuses ranks that name their objects otherwise, or whose plans would be refused.

    Args:
        described: The scheduler's.
        told: Pipeline and tensor rank to the fingerprint of its keys and the facts of its
            projection's digest.

    Raises:
        ConfigError: With everything in which a rank differs.
    """
    problems = Problems()
    wanted = dict(described.projection.digest_facts)
    for rank, (fingerprint, facts) in sorted(told.items()):
        found = dict(facts)
        for name in sorted(wanted.keys() | found.keys()):
            if found.get(name) != wanted.get(name):
                expected = f"{wanted.get(name)!r}, as in the scheduler"
                problems.add(f"rank {rank}: {name}", found.get(name), expected)
        if fingerprint != described.schema.fingerprint:
            problems.add(
                f"rank {rank}: fingerprint of its keys",
                fingerprint,
                described.schema.fingerprint,
                "layers of one group differ in size, and this stage begins with another one"
                if described.projection.parallel.pp > 1
                else "its process has other options than the scheduler's",
            )
    problems.raise_if_any("what ranks see of the caches")


def segment_map(
    projection: Projection, kv_cache_config: Any, kv_caches: Mapping[str, Any]
) -> SegmentMap:
    """Where the blocks of this rank lie.

    Args:
        projection: Of this rank's own configuration.
        kv_cache_config: This rank's KVCacheConfig.
        kv_caches: Layer name to the tensor (or tensors) that vLLM has made.

    Raises:
        ConfigError: A view does not lie where the configuration says.
    """
    problems = Problems()
    tensors = []
    held = set(held_layers(kv_cache_config))
    for index, placed in enumerate(kv_cache_config.kv_cache_tensors):
        if held.isdisjoint(placed.layers):
            continue  # of a wrapper that lies on other pipeline stages
        path = f"kv_cache_tensors[{index}]"
        views = {name: _first(kv_caches[name]) for name in placed.layers if name in kv_caches}
        if not views:
            problems.add(path, placed.layers, "layers that have a tensor")
            continue
        storage = next(iter(views.values())).untyped_storage()
        base = storage.data_ptr()
        for at, name in enumerate(placed.layers):
            if name not in views:
                continue
            found = views[name].data_ptr() - base
            wanted = placed.offset + at * placed.layer_stride
            if views[name].untyped_storage().data_ptr() != base or found != wanted:
                problems.add(f"{path}.layers[{at}]", name, f"to begin at byte {wanted}")
        kernels = {_kernel_block_size(view, kv_cache_config.num_blocks) for view in views.values()}
        if len(kernels) > 1:
            problems.add(path, sorted(kernels), "one kernel block size for its layers")
        if any(kernels) and not _LAID_OUT_BY_KERNEL_BLOCKS.isdisjoint(
            _modes(kv_cache_config, placed.layers)
        ):
            problems.add(
                f"{path}.kernel_block_size",
                max(kernels),
                "whole blocks: NVFP4 lays data and scales apart in each block of the kernel",
                "start vLLM with --block-size at a size that its attention backend takes whole",
            )
        layout = projection.kv_layout
        for name, view in views.items():
            found = view.stride(0) * view.element_size()
            parts = max(1, view.shape[0] // kv_cache_config.num_blocks)
            if found * parts != placed.block_stride:
                problems.add(
                    f"kv_caches[{name}].stride(0)",
                    f"{found} bytes",
                    f"{placed.block_stride // parts} bytes, block_stride over kernel blocks",
                )
            if not _in_order(view, layout):
                problems.add(
                    f"kv_caches[{name}].stride()",
                    tuple(view.stride()),
                    f"heads and tokens in the order of layout {layout}",
                    "another order under this layout's keys would be other bytes",
                )
        device = next(iter(views.values())).device
        tensors.append(
            CacheTensor(
                base,
                bytes=storage.nbytes(),
                layers=list(placed.layers),
                layer_stride=placed.layer_stride,
                block_stride=placed.block_stride,
                offset=placed.offset,
                kernel_block_size=max(kernels),
                device=-1 if device.type == "cpu" else device.index or 0,
            )
        )
    problems.raise_if_any("KV cache tensors")
    return SegmentMap(projection, tensors)


# Blocks of another kernel size would be other bytes under the same keys.
_LAID_OUT_BY_KERNEL_BLOCKS = {"NVFP4"}


def _modes(kv_cache_config: Any, layers: Iterable[str]) -> set[str]:
    """vLLM's quantisation modes of these layers."""
    found = set()
    for group in kv_cache_config.kv_cache_groups:
        inside = getattr(group.kv_cache_spec, "kv_cache_specs", None) or {}
        for layer in set(layers).intersection(group.layer_names):
            spec = inside.get(layer, group.kv_cache_spec)
            found.add(getattr(getattr(spec, "kv_quant_mode", None), "name", ""))
    return found


def _kernel_block_size(view: Any, num_blocks: int) -> int:
    """Positions in a block of the attention kernel, or 0 where it is the whole block.

    vLLM's views of attention have axes block, head, position and content. Where it split blocks,
    there are several of the kernel's in each.
    """
    split = view.dim() == 4 and view.shape[0] > num_blocks
    return int(view.shape[2]) if split else 0


def _in_order(view: Any, layout: str) -> bool:
    """Whether heads and tokens of a view [B, H, N, C] lie as the layout's letters say."""
    if view.dim() != 4 or 1 in view.shape[1:3]:
        return True
    heads_first = layout.index("H") < layout.index("N")
    return bool((view.stride(1) > view.stride(2)) == heads_first)


def _first(cache: Any) -> Any:
    """The first of a state's tensors, which begins its page."""
    return cache[0] if isinstance(cache, (list, tuple)) else cache


def known_specs() -> Iterable[str]:
    """Names of the spec classes that can be translated."""
    return sorted(_TRANSLATORS)
