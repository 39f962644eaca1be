"""One pool for both connectors: each continues from what the other has stored."""

from __future__ import annotations

from pathlib import Path

import conftest
import harness
from harness import Engine
from kvprism.local_mooncake import LocalMooncake
from test_four_ways import BUILTIN, builtin_environment

ENGINE = {"block_size": 32}


def test_the_built_in_connector_and_ours_share_a_pool(tmp_path: Path) -> None:
    path = conftest.model("llama")
    prefixed = BUILTIN | {"kv_connector_extra_config": {"cache_prefix": "ours-first"}}
    with LocalMooncake(storage_bytes=1 << 30) as mooncake:
        shared = {"key_schema": "vllm"}
        reader = harness.kvprism_connector(mooncake.master, **shared)
        writer = harness.kvprism_connector(mooncake.master, cache_prefix="ours-first", **shared)
        environment = builtin_environment(mooncake, tmp_path)
        (theirs,) = harness.run_engines(
            path, [Engine(BUILTIN)], engine=ENGINE, environment=environment, abrupt=True
        )
        warm, ours = harness.run_engines(path, [Engine(reader), Engine(writer)], engine=ENGINE)
        (other,) = harness.run_engines(
            path, [Engine(prefixed)], engine=ENGINE, environment=environment, abrupt=True
        )
    assert harness.hits(theirs) == harness.hits(ours) == 0
    assert harness.hits(warm) == harness.hits(other) == 2432
    answers = harness.tokens(theirs)
    assert harness.tokens(warm) == harness.tokens(ours) == harness.tokens(other) == answers
