"""The connector against vLLM 0.30, 0.31 and 0.33: their sources, their classes, their engines."""

from __future__ import annotations

import ast
import inspect
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import conftest
import harness
import pytest
import versions
from harness import Engine
from kvprism.local_mooncake import LocalMooncake

OURS = Path(__file__).parents[2] / "python" / "kvprism" / "vllm"
BASE = "distributed/kv_transfer/kv_connector/v1/base.py"
# Where vLLM calls a connector: names under which it holds one, and the folders that do.
HOLDERS = {"connector", "kv_connector", "c"}
CALLERS = ("v1", "distributed/kv_transfer", "config", "model_executor/layers/attention")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(version, marks=pytest.mark.xdist_group(version))
        for version in sorted(versions.WHEELS)
    ],
)
def version(request: pytest.FixtureRequest) -> str:
    conftest.version(request.param)
    return str(request.param)


def parse(version: str, module: str) -> ast.Module:
    return ast.parse((versions.folder(version) / "vllm" / module).read_text("utf-8"))


def classes(tree: ast.Module) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def members(node: ast.ClassDef) -> set[str]:
    """Fields, methods and what a method assigns to self."""
    found = set()
    for part in ast.walk(node):
        if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found.add(part.name)
        elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            found.add(part.target.id)
        elif (
            isinstance(part, ast.Attribute)
            and isinstance(part.ctx, ast.Store)
            and ast.unparse(part.value) == "self"
        ):
            found.add(part.attr)
    return found


def parameters(function: ast.FunctionDef) -> tuple[str, ...]:
    given = function.args
    names = [each.arg for each in [*given.posonlyargs, *given.args, *given.kwonlyargs]]
    names += [each.arg for each in (given.vararg, given.kwarg) if each is not None]
    return tuple(names[1:] if names[:1] in (["self"], ["cls"]) else names)


def test_the_base_class_is_the_one_of_the_contract(version: str) -> None:
    from kvprism.vllm import KVPrismConnector
    from kvprism.vllm.contract import _NEEDED, _parameters

    bases = classes(parse(version, BASE))
    methods = {
        part.name: part
        for name in ("KVConnectorBase_V1", "SupportsHMA")
        for part in bases[name].body
        if isinstance(part, ast.FunctionDef) and not part.name.startswith("_")
    }
    own = vars(KVPrismConnector)
    assert set(_NEEDED) <= set(methods)
    plain = {name for name in methods if name in own and not isinstance(own[name], property)}
    assert {name: parameters(methods[name]) for name in plain} == {
        name: _parameters(getattr(KVPrismConnector, name)) for name in plain
    }
    # Nothing that this version may call is left to a default, but for book-keeping.
    left = {"role", "has_connector_metadata", "get_external_cache_hit_sources"}
    left |= {"get_loaded_kv_cache_group_ids", "prefer_cross_layer_blocks"}
    assert set(methods) - left <= set(own)


def test_what_the_connector_uses_is_there(version: str) -> None:
    from kvprism.vllm.contract import _USED

    missing = []
    for module, name, wanted in _USED:
        path = module.removeprefix("vllm.").replace(".", "/") + ".py"
        found = members(classes(parse(version, path))[name])
        missing += [f"{module}.{name}.{each}" for each in wanted if each not in found]
    assert missing == []


def test_what_the_connector_calls_has_its_parameters(version: str) -> None:
    from kvprism.vllm.contract import _CALLED

    different = []
    for module, name, expected in _CALLED:
        tree: Any = parse(version, module.removeprefix("vllm.").replace(".", "/") + ".py")
        for part in name.split("."):
            (tree,) = (each for each in tree.body if getattr(each, "name", "") == part)
        if parameters(tree) != expected:
            different.append((name, parameters(tree), expected))
    assert different == []


def test_the_policy_is_read_after_the_connector_was_made(version: str) -> None:
    """The connector sets it in its constructor."""
    (scheduler,) = (
        node
        for node in classes(parse(version, "v1/core/sched/scheduler.py"))["Scheduler"].body
        if isinstance(node, ast.FunctionDef) and node.name == "__init__"
    )
    lines = {
        name: [
            node.lineno
            for node in ast.walk(scheduler)
            if isinstance(node, ast.Attribute) and node.attr == name
        ]
        for name in ("create_connector", "kv_load_failure_policy")
    }
    assert min(lines["create_connector"]) < min(lines["kv_load_failure_policy"])


def test_every_import_is_there(version: str) -> None:
    missing = []
    for file in sorted(OURS.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("vllm."):
                continue
            path = str(node.module).removeprefix("vllm.").replace(".", "/")
            package = versions.folder(version) / "vllm" / path
            if package.is_dir():  # whose modules are imported
                missing += [
                    f"{node.module}.{a.name}"
                    for a in node.names
                    if not (package / f"{a.name}.py").exists()
                ]
                continue
            tree = parse(version, path + ".py")
            names = {
                *(part.name for part in tree.body if hasattr(part, "name")),
                *(
                    target.id
                    for part in tree.body
                    for target in (
                        *getattr(part, "targets", ()),  # of a plain assignment
                        getattr(part, "target", None),  # of one with a type
                    )
                    if isinstance(target, ast.Name)
                ),
                *(
                    alias.asname or alias.name
                    for part in ast.walk(tree)
                    if isinstance(part, (ast.Import, ast.ImportFrom))
                    for alias in part.names
                ),
            }
            missing += [f"{node.module}.{a.name}" for a in node.names if a.name not in names]
    assert missing == []


def calls(version: str) -> Iterator[tuple[str, str, ast.Call]]:
    """Calls of methods of something that holds a connector: where, the method, the call."""
    root = versions.folder(version) / "vllm"
    for folder in CALLERS:
        for file in sorted((root / folder).rglob("*.py")):
            place = str(file.relative_to(root))
            if "kv_connector/v1/" in place and not place.endswith("multi_connector.py"):
                continue
            for node in ast.walk(ast.parse(file.read_text("utf-8"))):
                if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                    continue
                holder = node.func.value
                name = getattr(holder, "attr", getattr(holder, "id", ""))
                if name in HOLDERS:
                    yield f"{place}:{node.lineno}", node.func.attr, node


def test_every_call_fits_our_signatures(version: str) -> None:
    from kvprism.vllm import KVPrismConnector

    base = classes(parse(version, BASE))["KVConnectorBase_V1"]
    known = members(base)
    wrong, checked = [], set()
    for place, method, call in calls(version):
        ours = getattr(KVPrismConnector, method, None)
        if ours is None:
            if method in known:
                wrong.append(f"{place} {method}: missing")
            continue
        if method not in known and not method.startswith("request_finished"):
            continue
        starred = any(isinstance(argument, ast.Starred) for argument in call.args)
        keywords = {k.arg: None for k in call.keywords if k.arg is not None}
        if starred:
            continue
        static = inspect.getattr_static(KVPrismConnector, method)
        bound = () if isinstance(static, (classmethod, staticmethod)) else (None,)
        try:
            inspect.signature(ours).bind(*bound, *call.args, **keywords)
        except TypeError as error:
            wrong.append(f"{place} {method}: {error}")
        checked.add(method)
    assert wrong == []
    expected = {
        "bind_connector_metadata",
        "build_connector_meta",
        "build_connector_worker_meta",
        "clear_connector_metadata",
        "get_block_ids_with_load_errors",
        "get_num_new_matched_tokens",
        "get_transfer_results",
        "has_pending_push_work",
        "on_new_request",
        "start_load_kv",
        "take_events",
        "update_connector_output",
        "update_state_after_alloc",
        "wait_for_save",
    }
    assert expected <= checked


def test_every_spec_class_can_be_translated(version: str) -> None:
    """Or is a base or a wrapper, whose members are."""
    from kvprism.vllm.cache_config import known_specs

    defined = {
        name
        for name in classes(parse(version, "v1/kv_cache_interface.py"))
        if name.endswith("Spec") and not name.startswith("KVCache")
    }
    assert defined - {"AttentionSpec"} <= set(known_specs())


def test_their_classes(version: str) -> None:
    """The contract, the gallery and the layouts, with the classes of that version."""
    script = Path(__file__).with_name("classes_run.py")
    with tempfile.TemporaryFile("w+") as log, open(os.devnull) as nothing:
        files = (nothing.fileno(), log.fileno(), log.fileno())
        process = harness.EngineProcess(script, *files, versions.environment(version))
        status = process.wait(900.0)
        log.seek(0)
        text = log.read()
    assert status == 0, text[-8000:]
    assert f"vLLM {version}" in text


def test_an_engine_continues_from_the_store(version: str) -> None:
    """A model of two groups: full attention and sliding windows."""
    environment = versions.environment(version)
    path = conftest.model("gemma3")
    engine: dict[str, Any] = {"block_size": 32}
    with LocalMooncake(storage_bytes=1 << 30) as mooncake:
        twice = Engine(
            harness.kvprism_connector(mooncake.master),
            rounds=[harness.prompts()] * 2,
            reset=True,
        )
        (result,) = harness.run_engines(path, [twice], engine=engine, environment=environment)
    assert result["version"] == version
    assert (harness.hits(result), harness.hits(result, 1)) == (0, 2432)
    assert harness.tokens(result) == harness.tokens(result, 1)
    assert result["counters"]["loads_failed"] == result["counters"]["save_chunks_failed"] == 0


@pytest.mark.soak  # the rule itself is in test_contract.py, with the managers of each version
def test_hits_end_inside_blocks_of_states(version: str) -> None:
    engine = {"dtype": "bfloat16", "mamba_cache_mode": "align", "prefix_match_unit": 32}
    with LocalMooncake(storage_bytes=1 << 30) as mooncake:
        twice = Engine(
            harness.kvprism_connector(mooncake.master),
            rounds=[harness.prompts()] * 2,
            reset=True,
        )
        (result,) = harness.run_engines(
            conftest.model("qwen3next"),
            [twice],
            engine=engine,
            environment=versions.environment(version),
        )
    assert result["version"] == version
    assert (harness.hits(result), harness.hits(result, 1)) == (0, 2432)
    assert harness.tokens(result) == harness.tokens(result, 1)
    assert result["counters"]["loads_failed"] == result["counters"]["save_chunks_failed"] == 0


# With one group vLLM hears of blocks, with two of requests.
@pytest.mark.parametrize("name", ["llama", pytest.param("gemma3", marks=pytest.mark.soak)])
def test_an_engine_computes_what_a_load_did_not_bring(version: str, name: str) -> None:
    with harness.patient_mooncake() as mooncake:
        failing = harness.kvprism_connector(mooncake.master) | {
            "kv_connector": "SomeRanksFailConnector",
            "kv_connector_module_path": "faulty",
        }
        (result,) = harness.run_engines(
            conftest.model(name),
            [Engine(failing, rounds=[harness.prompts()] * 2, reset=True)],
            engine={"block_size": 32},
            environment=versions.environment(version) | {"FAILING": "0"},
        )
    assert result["version"] == version
    assert harness.tokens(result, 1) == harness.tokens(result)
    counters = result["counters"]
    assert counters["loads"] == counters["loads_failed"] > 0
    assert {each["finish"] for part in result["rounds"] for each in part["outputs"]} == {"length"}
