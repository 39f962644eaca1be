"""Keys are the same in the scheduler and in workers, where models change their configuration."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import conftest
import pytest
import versions
from kvprism.vllm import cache_config, meaning

# Of draft models, whose configuration keys do not have; of configurations that a model makes for
# itself; put back at once; words of a comment; or nothing that a configuration's dictionary has.
ELSEWHERE = {
    "attr",
    "attribute_map",
    "attrs",
    "buffer_keys",
    "defer_moe_finalize_max_num_tokens",
    "draft_vocab_size",
    "layer_types",
    "model_type",
    "n_routed_experts",
    "no_rope_layers",
    "num_experts_per_tok",
    "num_hash_layers",
    "rope_parameters",
    "score_function",
    "target_layer_count",
}
WRITTEN = re.compile(
    r"^[^#\n]*\b(?:hf_config|hf_text_config|text_config|config)\.([a-z][a-z0-9_]*)"
    r"(?:\[\"(\w+)\"\])? = ",
    re.M,
)


@pytest.fixture(scope="module")
def vllm_config() -> Any:
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=str(conftest.model("llama")), enforce_eager=True, block_size=32
    ).create_engine_config()


def revision(vllm_config: Any, config: dict[str, Any], **model: Any) -> str:
    """The part of keys that says what the model computes."""
    changed = copy.copy(vllm_config)
    changed.model_config = copy.copy(vllm_config.model_config)
    before = vllm_config.model_config.hf_config.to_dict()
    given = {"hf_config": SimpleNamespace(to_dict=lambda: before | config)} | model
    for name, value in given.items():
        object.__setattr__(changed.model_config, name, value)
    return str(cache_config.key_facts(changed)["model_revision"])


@pytest.mark.parametrize("version", ["installed", *sorted(versions.WHEELS)])
def test_what_models_write_into_their_configuration_is_left_out(version: str) -> None:
    import vllm

    if version == "installed":
        root = Path(vllm.__file__).parent
    else:
        root = conftest.version(version) / "vllm"
    sources = [
        path
        for folder in ("model_executor/models", "models")
        for path in (root / folder).rglob("*.py")
        # Of these the engine's own process calls all, before it makes workers.
        if path.name != "config.py"
    ]
    assert len(sources) > 200
    written: dict[str, set[str]] = {}
    for path in sources:
        for name, item in WRITTEN.findall(path.read_text("utf-8")):
            written.setdefault(item or name, set()).add(path.name)
    assert {"max_model_len", "attn_temperature_tuning"} <= set(written)
    known = meaning.WRITTEN_BY_MODELS | ELSEWHERE
    assert {name: files for name, files in written.items() if name not in known} == {}


def test_a_worker_that_has_made_its_model_has_the_keys_of_the_scheduler(vllm_config: Any) -> None:
    plain = revision(vllm_config, {})
    # MiniMax-M2, Llama 4, Falcon.
    written = {"max_model_len": 4096, "attn_temperature_tuning": True, "num_ln_in_parallel_attn": 2}
    assert revision(vllm_config, written) == plain
    assert revision(vllm_config, {"text_config": written}) == revision(
        vllm_config, {"text_config": {}}
    )


def test_llama_4_is_tuned_by_length_where_generation_does_not_say(vllm_config: Any) -> None:
    short, long = 32_768, 32_769
    for kind, counts in (("llama", False), ("llama4_text", True)):
        for config in ({"model_type": kind}, {"text_config": {"model_type": kind}}):
            seen = [revision(vllm_config, config, max_model_len=each) for each in (1, short, long)]
            assert seen[0] == seen[1]
            assert (seen[1] != seen[2]) == counts
    llama4 = {"model_type": "llama4_text"}
    tuned = {"override_generation_config": {"attn_temperature_tuning": True}}
    one, other = (revision(vllm_config, llama4, max_model_len=n, **tuned) for n in (short, long))
    assert one == other != revision(vllm_config, llama4, max_model_len=long)
    elsewhere = revision(vllm_config, llama4, generation_config="/a/folder")
    assert elsewhere != revision(vllm_config, llama4)


def sparse_caches(packing: str, layout: str = "BLNHC", layers: int = 1) -> tuple[Any, Any]:
    """What a worker has of sparse attention beside its indexer, and what the scheduler has."""
    import planning
    import test_layouts
    import torch
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    packed = {"dtype": torch.uint8, "cache_dtype_str": packing, "state_content_bytes": 656}
    plain = {"dtype": torch.bfloat16, "cache_dtype_str": packing}
    keys = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=132, dtype=torch.uint8)
    rows = MLAAttentionSpec(
        block_size=64,
        num_kv_heads=1,
        head_size=576,
        **(packed if packing == "fp8_ds_mla" else plain),
    )
    # In the order in which a layer makes them.
    specs = {}
    for at in range(layers):
        specs |= {f"{at}.indexer": keys, f"{at}.attn": rows}
    made, _ = test_layouts.engine(layout, specs)
    return made, planning.of_scheduler([made])


def sparse_config(vllm_config: Any, dtype: str, **ranks: int) -> Any:
    """The configuration of a model with sparse attention."""
    sparse = vllm_config.model_config.hf_config.to_dict() | {"index_topk": 2048}
    changed = copy.copy(vllm_config)
    for part in ("model_config", "cache_config", "parallel_config"):
        object.__setattr__(changed, part, copy.copy(getattr(vllm_config, part)))
    object.__setattr__(changed.model_config, "hf_config", SimpleNamespace(to_dict=lambda: sparse))
    object.__setattr__(changed.cache_config, "cache_dtype", dtype)
    for name, count in ranks.items():
        object.__setattr__(changed.parallel_config, name, count)
    return changed


# In LHBNC and BHLNC vLLM cannot lay out pages of several sizes.
@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
def test_stages_of_any_number_of_layers_name_a_packing_alike(vllm_config: Any, layout: str) -> None:
    names = []
    for packing, layers in (("fp8_ds_mla", 1), ("fp8_ds_mla", 3), ("auto", 1), ("auto", 3)):
        stage, _ = sparse_caches(packing, layout, layers)
        changed = sparse_config(vllm_config, packing, pipeline_parallel_size=2)
        names.append(cache_config.meaning_of(changed, stage)["kv_quantization"])
    assert names[0] == names[1] == f"sparse, {64 * 132}, {64 * 656} bytes"
    assert names[2] == names[3] == f"sparse, {64 * 132}, {64 * 576 * 2} bytes"


def test_a_packing_that_only_workers_know_is_in_the_keys_of_both(vllm_config: Any) -> None:
    def described(cache: Any, dtype: str) -> Any:
        changed = sparse_config(vllm_config, dtype, tensor_parallel_size=2)
        return cache_config.describe(changed, cache, (64, 64), "")

    worker, scheduler = sparse_caches("fp8_ds_mla")
    one, other = described(worker, "fp8_ds_mla"), described(scheduler, "fp8")
    assert one.facts == other.facts
    assert one.schema.fingerprint == other.schema.fingerprint
    assert one.projection.digest == other.projection.digest
    unpacked, _ = sparse_caches("auto")
    assert described(unpacked, "auto").schema.fingerprint != one.schema.fingerprint
    assert described(worker, "fp8_e5m2").facts["kv_quantization"] == "fp8_e5m2"
