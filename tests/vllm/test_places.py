"""What the connector makes of vLLM's tensors and of the model's configuration."""

from __future__ import annotations

from typing import Any

import conftest
import kvprism
import pytest
import test_layouts as layouts
from kvprism.vllm import cache_config

SHAPE = {
    "block_size": layouts.POSITIONS,
    "num_kv_heads": layouts.HEADS,
    "head_size": layouts.HEAD,
}


def cache(layout: str) -> tuple[Any, Any, kvprism.Projection]:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    layers = ["0", "1", "2"]
    spec = FullAttentionSpec(**SHAPE, dtype=torch.float16)
    made, raw = layouts.engine(layout, dict.fromkeys(layers, spec))
    group = {"kind": "full_attention", "layers": layers, "dtype": "float16", **SHAPE}
    return made, raw, layouts.described(made, layout, [group])


@pytest.mark.parametrize(("named", "given"), [("LBHNC", "LBNHC"), ("LBNHC", "LBHNC")])
def test_a_view_in_another_order_is_refused(named: str, given: str) -> None:
    made, raw, projection = cache(named)
    with pytest.raises(kvprism.Error) as caught:
        cache_config.segment_map(projection, made, layouts.views(given, made, raw, None))
    text = str(caught.value)
    for layer in ("0", "1", "2"):
        assert f"kv_caches[{layer}].stride()" in text
    assert f"expected heads and tokens in the order of layout {named}" in text


def facts(**arguments: Any) -> dict[str, Any]:
    from vllm.engine.arg_utils import EngineArgs

    model = str(conftest.model("llama"))
    return cache_config.key_facts(
        EngineArgs(model=model, enforce_eager=True, **arguments).create_engine_config()
    )


def test_what_changes_the_values_changes_the_keys() -> None:
    plain = facts(dtype="float32")
    assert plain == facts(dtype="float32")
    others = [
        facts(dtype="bfloat16"),
        facts(dtype="float32", hf_overrides={"rope_theta": 500_000.0}),
        facts(dtype="float32", hf_overrides={"rms_norm_eps": 1e-6}),
    ]
    seen = {tuple(sorted(f.items())) for f in [plain, *others]}
    assert len(seen) == 4


def test_facts_are_the_same_in_every_process() -> None:
    class Odd:
        """Prints its address."""

    noted = cache_config._as_json({"a": Odd(), "b": (1, 2.5, None, True), "_name_or_path": "/x"})
    assert noted == {"a": "Odd", "b": [1, 2.5, None, True]}
