"""Options of the vLLM connector; the ones that need no vLLM."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import kvprism
import pytest
from kvprism.vllm.options import ACCEPTED, OPTIONS, read_options

MASTER = {"master_server_address": "127.0.0.1:50051"}


def test_defaults() -> None:
    options = read_options(MASTER, {})
    assert options.protocol == "tcp"
    assert options.mode == "standalone-store"
    assert options.load_failure_policy == "recompute"
    assert options.enable_lookup is True
    assert options.save_decode_cache is False
    assert options.local_hostname


def test_every_problem_is_told_at_once() -> None:
    wrong = {
        "master_server_addres": "127.0.0.1:1",
        "protocol": "rmda",
        "load_timeout_seconds": -1,
        "backoff_after": True,
        "global_segment_size": "much",
        "enable_lookup": "perhaps",
        "custom_mem_pool": "NVLINK",
        "load_async": False,
    }
    with pytest.raises(kvprism.ConfigError) as caught:
        read_options(wrong, {})
    text = str(caught.value)
    assert text.startswith("kvprism options: 9 problems\n")
    path = "kv_connector_extra_config"
    for line in (
        f"{path}.master_server_addres = '127.0.0.1:1': expected a known option "
        "(did you mean 'master_server_address'?)",
        f"{path}.protocol = 'rmda': expected one of tcp, rdma (did you mean 'rdma'?)",
        f"{path}.load_timeout_seconds = -1: expected at least 0.001 seconds",
        f"{path}.backoff_after = True: expected an integer",
        f"{path}.global_segment_size = 'much': expected bytes, such as 67108864 or '64 MB'",
        f"{path}.enable_lookup = 'perhaps': expected true or false",
        f"{path}.custom_mem_pool = 'NVLINK': expected left out (Not available.)",
        f"{path}.load_async = False: expected True (Loads never block a step.)",
        "master_server_address = '': expected host:port of mooncake_master "
        "(in kv_connector_extra_config, or in the file of MOONCAKE_CONFIG_PATH)",
    ):
        assert f"\n  {line}" in text


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("load_timeout_seconds", 10**400, "at most 1000000000 seconds"),
        ("load_timeout_seconds", float("inf"), "at most 1000000000 seconds"),
        ("load_timeout_seconds", float("nan"), "at least 0.001 seconds"),
        ("max_bytes_per_call", 1 << 63, "at most 9223372036854775807 bytes"),
        ("max_bytes_per_call", "9" * 400, "bytes, such as 67108864 or '64 MB'"),
        ("max_gets_in_flight", 10**30, "at most 9223372036854775807 calls"),
    ],
)
def test_numbers_beyond_reason(name: str, value: object, expected: str) -> None:
    with pytest.raises(kvprism.ConfigError) as caught:
        read_options(MASTER | {name: value}, {})
    assert f".{name} = {value!r}"[:40] in str(caught.value)
    assert str(caught.value).endswith(f": expected {expected}")


@pytest.mark.parametrize(
    ("value", "expected"),
    [(16 << 20, 16 << 20), ("16 MB", 16 << 20), ("1gb", 1 << 30), ("20480 KiB", 20 << 20)],
)
def test_sizes(value: Any, expected: int) -> None:
    options = read_options(MASTER | {"mode": "embedded", "global_segment_size": value}, {})
    assert options.global_segment_size == expected


@pytest.mark.parametrize(
    ("extra", "path"),
    [
        ({"mode": "embedded"}, "global_segment_size"),
        ({"global_segment_size": 1 << 30}, "global_segment_size"),
        ({"local_buffer_size": 1}, "local_buffer_size"),
    ],
)
def test_sizes_and_mode_must_agree(extra: dict[str, Any], path: str) -> None:
    with pytest.raises(kvprism.ConfigError, match=path):
        read_options(MASTER | extra, {})


def test_the_mooncake_file_is_read_as_the_built_in_connector_reads_it(tmp_path: Path) -> None:
    file = tmp_path / "mooncake.json"
    environment = {
        "MOONCAKE_CONFIG_PATH": str(file),
        "MOONCAKE_REQUESTER_LOCAL_HOSTNAME": "10.1.2.3",
    }
    content = {
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": "10.0.0.1:50051",
        "device_name": "mlx5_0,mlx5_1",
        "local_buffer_size": "64mb",
        "tenant_id": "default",
        "enable_offload": False,
    }
    file.write_text(json.dumps(content))
    options = read_options({}, environment)
    assert (options.protocol, options.mode) == ("rdma", "embedded")
    assert (options.global_segment_size, options.local_buffer_size) == (4 << 30, 64 << 20)
    assert options.master_server_address == "10.0.0.1:50051"
    assert options.local_hostname == "10.1.2.3"
    # What the engine's own command line says comes first.
    over = {"protocol": "tcp", "mode": "standalone-store"}
    options = read_options(over, environment)
    assert (options.protocol, options.mode, options.global_segment_size) == (
        "tcp",
        "standalone-store",
        0,
    )
    file.write_text(json.dumps(content | {"tenant_id": "x", "protokol": "tcp"}))
    with pytest.raises(kvprism.ConfigError) as caught:
        read_options({}, environment)
    assert "tenant_id = 'x'" in str(caught.value)
    assert "did you mean 'protocol'?" in str(caught.value)


@pytest.mark.parametrize("content", [None, "[]", "{", "[" * 100_000])
def test_a_bad_mooncake_file_is_named(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "mooncake.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(kvprism.ConfigError, match="MOONCAKE_CONFIG_PATH") as caught:
        read_options(MASTER, {"MOONCAKE_CONFIG_PATH": str(file)})
    assert str(file) in str(caught.value)


def test_a_pipe_in_place_of_a_mooncake_file_does_not_hold_up_the_start(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(kvprism.ConfigError, match="expected an ordinary file"):
        read_options(MASTER, {"MOONCAKE_CONFIG_PATH": str(pipe)})


def test_keys_of_the_built_in_connector_are_taken_where_they_change_nothing() -> None:
    read_options(
        MASTER
        | {
            "load_async": True,
            "lookup_async": False,
            "lookup_rpc_port": 7,
            "enable_group_semantics": "False",
            "enable_cross_layers_blocks": "True",
            "enable_store_tp_lcm": False,
            "prefill_tp_sizes": [2, 4],
            "preferred_segment": None,
        },
        {},
    )
    with pytest.raises(kvprism.ConfigError) as caught:
        read_options(
            MASTER
            | {
                "enable_cross_layers_blocks": "maybe",
                "enable_store_tp_lcm": True,
                "prefill_tp_sizes": [2, 4],
            },
            {},
        )
    message = str(caught.value)
    assert "enable_cross_layers_blocks = 'maybe': expected True or False" in message
    assert "enable_store_tp_lcm = True: expected False or left out (Not available.)" in message
    assert "prefill_tp_sizes" not in message


def test_variables_of_the_built_in_connector() -> None:
    receivers = "VLLM_MOONCAKE_LOAD_RECV_THREADS"
    assert read_options(MASTER, {}).max_gets_in_flight == 4
    assert read_options(MASTER, {receivers: " 7"}).max_gets_in_flight == 7
    chosen = MASTER | {"max_gets_in_flight": 2}
    assert read_options(chosen, {receivers: "7"}).max_gets_in_flight == 2
    read_options(MASTER, {"MOONCAKE_PREFERRED_SEGMENT": "  "})
    with pytest.raises(kvprism.ConfigError) as caught:
        read_options(MASTER, {receivers: "many", "MOONCAKE_PREFERRED_SEGMENT": "host-1"})
    assert str(caught.value) == (
        "kvprism options: 2 problems\n"
        f"  {receivers} = 'many': expected an integer\n"
        "  MOONCAKE_PREFERRED_SEGMENT = 'host-1': expected left out (Not available.)"
    )


def test_the_documentation_lists_the_options() -> None:
    page = (Path(__file__).parents[2] / "docs" / "vllm.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", page, re.MULTILINE))
    for option in OPTIONS:
        default = json.dumps(option.default)
        choices = " or ".join(f"`{choice}`" for choice in option.choices)
        kind = choices or option.kind
        assert rows.pop(option.name) == f"{kind} | `{default}` | {option.unit} | {option.meaning}"
    for accepted in ACCEPTED:
        assert rows.pop(accepted.name) == f"{accepted.expected} | {accepted.meaning}"
    assert not rows


def test_the_prerequisites_are_those_of_the_tests() -> None:
    root = Path(__file__).parents[2]
    page = (root / "docs" / "vllm.md").read_text()
    section = page.split("## Prerequisites\n")[1].split("\n## ")[0]
    script = (root / "scripts" / "vllm_env.sh").read_text()
    (line,) = re.findall(r"^need_packages (.*)$", script, re.MULTILINE)
    packages = set(line.split()) - {"iproute2"}  # for the tests' own network
    assert packages == set(re.findall(r"`(lib\w+)`", section))
    (python,) = re.findall(r'requires-python = ">=(.*)"', (root / "pyproject.toml").read_text())
    assert f"| Python | {python} or later" in section
