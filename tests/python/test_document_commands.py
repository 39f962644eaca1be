"""Commands, configs and CMake lines of the documents are taken as they stand."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import kvprism
import pytest
from kvprism.cli import cmake_dir
from kvprism.vllm.options import read_options

ROOT = Path(__file__).resolve().parents[2]


def blocks(page: str, language: str | None = None) -> list[str]:
    text = (ROOT / page).read_text("utf-8")
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [body for name, body in found if language in (None, name)]


@pytest.mark.parametrize("page", ["README.md", "docs/cpp.md"])
def test_cmake_lines_find_the_package(page: str, tmp_path: Path) -> None:
    (lines,) = blocks(page, "cmake")
    if "add_executable" not in lines:
        lines = "add_executable(my_engine engine.cpp)\n" + lines
    (tmp_path / "engine.cpp").write_text("int main() {}\n")
    (tmp_path / "CMakeLists.txt").write_text(
        f"cmake_minimum_required(VERSION 3.25)\nproject(engine LANGUAGES CXX)\n{lines}"
    )
    done = subprocess.run(
        ["cmake", "-S", tmp_path, "-B", tmp_path / "build", f"-Dkvprism_DIR={cmake_dir()}"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", ["README.md", "docs/vllm.md"])
def test_the_server_takes_its_options(page: str) -> None:
    (command,) = [text for text in blocks(page) if "vllm serve MODEL --enable-prefix" in text]
    words = shlex.split(command)
    config: dict[str, Any] = json.loads(words[words.index("--kv-transfer-config") + 1])
    assert config["kv_connector"] == "KVPrismConnector"
    assert config["kv_connector_module_path"] == "kvprism.vllm"
    assert config["kv_role"] == "kv_both"
    options = read_options(config["kv_connector_extra_config"], {})
    assert options.master_server_address == "127.0.0.1:50051"


def test_the_wrapper_of_the_configuration_page_is_one() -> None:
    (text,) = [block for block in blocks("docs/configuration.md") if '"uniform"' in block]
    registry = kvprism.SpecRegistry.builtin()
    config = json.dumps({"num_blocks": 8, "groups": [json.loads(text)]})
    projection = kvprism.Projection(kvprism.CacheConfig.from_json(config, registry), registry)
    (group,) = projection.groups()
    assert group.kind == "full_attention"
    assert list(group.layers) == ["0", "2", "1"]


@pytest.mark.mooncake
def test_python_of_the_mooncake_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (body,) = blocks("docs/mooncake.md", "python")
    exec(body, {})
    assert re.fullmatch(r"127\.0\.0\.1:\d+\n", capsys.readouterr().out)


def test_the_seed_of_the_testing_page_runs() -> None:
    (command,) = [
        text for text in blocks("docs/testing.md") if "kvprism_simulation --first-seed" in text
    ]
    done = subprocess.run(
        shlex.split(command), cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
