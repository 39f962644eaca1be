"""``kvprism inspect``: a row a group, or every problem."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import kvprism
import pytest
from configs import attention, config, mamba, ring
from kvprism.cli import main
from kvprism.inspect_config import COLUMNS

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(value: Any) -> str:
        path = tmp_path / "config.json"
        path.write_text(value if isinstance(value, str) else json.dumps(value))
        return str(path)

    return write


def inspect_json(path: str, capsys: Capture) -> tuple[int, dict[str, Any]]:
    status = main(["inspect", path, "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_hybrid_model_has_a_row_a_group(write: Any, capsys: Capture) -> None:
    status, report = inspect_json(write(config()), capsys)
    assert status == 0
    assert report["transfer_group_ids"] == [0, 1, 2]
    assert report["store_group_ids"] == [0, 2]
    assert report["scheduler_block_size"] == 800
    assert report["hash_block_size"] == 800
    assert len(report["digest"]) == 32
    assert report["problems"] == []
    rows = report["groups"]
    assert [row["kind"] for row in rows] == ["full_attention", "circular_buffer", "mamba"]
    assert [row["transfer_index"] for row in rows] == [0, 1, 2]
    assert [row["store_index"] for row in rows] == [0, None, 1]
    assert [row["page_size_bytes"] for row in rows] == [409600, 4096, 512]
    assert [row["objects_per_1000_tokens"] for row in rows] == [1.25, None, 1.25]
    assert rows[1]["why_not_stored"] == "kind circular_buffer is not prefix-cacheable"


def test_an_object_holds_the_pages_of_all_layers(write: Any, capsys: Capture) -> None:
    _, report = inspect_json(write(config(attention(layers=["a", "b", "c"]))), capsys)
    assert report["groups"][0]["object_bytes"] == 3 * 409600


def test_table_shows_indices_and_reasons(write: Any, capsys: Capture) -> None:
    assert main(["inspect", write(config(attention(), ring(enable_kv_transfer=False)))]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == " ".join(COLUMNS).split()
    assert " ".join(lines[1].split()) == "0 full_attention 800 800 409600 409600 0 0 1.25 -"
    assert lines[2].endswith("  -  enable_kv_transfer is false")
    assert "scheduler block size  800 tokens" in lines


# One group of every kind, as an engine that had them all would describe it.
EVERY_KIND: dict[str, dict[str, Any]] = {
    "full_attention": {},
    "mla_attention": {"num_kv_heads": 1, "head_size": 576},
    "hidden_state": {"num_kv_heads": 1},
    "rswa": {"rswa_window": 128},
    "sink_full_attention": {"sink_len": 800},
    "chunked_local_attention": {"attention_chunk_size": 8192},
    "sliding_window": {"sliding_window": 1024, "extra_retained_tokens": 2},
    "sliding_window_mla": {"sliding_window": 128, "bounded_replay": True},
    "circular_buffer": {"block_size": 8},
    "mamba": {},
    "encoder_only_attention": {},
    "cross_attention": {},
    "hisparse_hot": {"page_size_bytes": 4096, "blocks_per_request": 4},
    "hisparse_resident": {"page_size_bytes": 4096},
}
EXPLAINED = {
    "full_attention": "A hit needs every block of its prefix. Saved from the present block table. "
    "A peer gets the blocks that it lacks.",
    "chunked_local_attention": "A hit needs the blocks since the last multiple of 8192 tokens. "
    "Saved from the present block table. "
    "A peer gets the last blocks, as far as attention looks back.",
    "sliding_window": "A hit needs the blocks of its last 1025 tokens. "
    "Saved from the present block table. "
    "A peer gets the last blocks, as far as attention looks back.",
    "sliding_window_mla": "A hit leaves 128 tokens to compute, which make it whole. Never saved. "
    "A peer gets the last blocks, as far as attention looks back.",
    "circular_buffer": "No hit needs it. Never saved. A peer gets the whole of it.",
    "mamba": "A hit needs the one state at its end. Saved when the engine hands a state over. "
    "A peer gets the state.",
    "encoder_only_attention": "No hit needs it. Never saved. A peer gets nothing of it.",
    "cross_attention": "No hit needs it. Never saved. A peer gets the whole of it.",
    "hisparse_hot": "Neither stored nor sent to a peer: the engine keeps it to itself.",
}
for as_full in ("mla_attention", "hidden_state", "rswa", "sink_full_attention"):
    EXPLAINED[as_full] = EXPLAINED["full_attention"]
EXPLAINED["hisparse_resident"] = EXPLAINED["hisparse_hot"]


def group_of(kind: str) -> dict[str, Any]:
    if kind == "mamba":
        return mamba()
    group = attention(kind=kind, layers=[kind]) | EVERY_KIND[kind]
    if kind.startswith("hisparse"):
        for key in ("num_kv_heads", "head_size", "dtype"):
            del group[key]
        group["enable_kv_transfer"] = False
    return group


def test_every_kind_is_explained(write: Any, capsys: Capture) -> None:
    assert list(EVERY_KIND) == kvprism.SpecRegistry.builtin().names()
    status, report = inspect_json(write(config(*map(group_of, EVERY_KIND))), capsys)
    assert {row["kind"]: row["explanation"] for row in report["groups"]} == EXPLAINED
    assert [row["kind"] for row in report["groups"] if row["store_index"] is None] == [
        "sliding_window_mla",
        "circular_buffer",
        "encoder_only_attention",
        "cross_attention",
        "hisparse_hot",
        "hisparse_resident",
    ]
    assert status == 2
    assert [problem["path"] for problem in report["problems"]] == ["groups[11].kind"]
    assert [problem["path"] for problem in report["peer_problems"]] == [
        "groups[10].enable_kv_transfer"
    ]


def test_groups_alike_share_an_explanation(write: Any, capsys: Capture) -> None:
    groups = [attention(), *(mamba(layers=[f"m{i}"]) for i in range(3))]
    assert main(["inspect", write(config(*groups))]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"1,2,3  mamba           {EXPLAINED['mamba']}" in lines


def test_hits_inside_blocks_are_told(write: Any, capsys: Capture) -> None:
    fine = {"hash_block_size": 16, "cache_hit_alignment_tokens": 16}
    path = write(config(attention(), mamba(), **fine))
    assert main(["inspect", path]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "hit alignment         16 tokens" in lines
    assert any("every block of its prefix and may end inside a block." in line for line in lines)


def test_a_wrapper_shows_what_it_holds(write: Any, capsys: Capture) -> None:
    big = attention(kind="mla_attention", layers=["a"], num_kv_heads=1, head_size=576)
    small = attention(kind="full_attention", layers=["b"])
    wrapper = {"kind": "uniform", "members": [big, small]}
    status, report = inspect_json(write(config(wrapper)), capsys)
    assert status == 0
    (row,) = report["groups"]
    assert row["kind"] == "full_attention, mla_attention"
    assert row["layer_page_bytes"] == [921600, 409600]
    assert row["object_bytes"] == 921600 + 409600
    assert main(["inspect", write(config(wrapper))]) == 0
    assert "409600..921600" in capsys.readouterr().out


def test_every_problem_is_told_and_the_status_is_2(write: Any, capsys: Capture) -> None:
    path = write(config(attention(block_size=-8), mamba(kind="mambo"), num_blocks=0))
    assert main(["inspect", path]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert f"{path}: 3 problems" in told.err
    assert "groups[0].block_size = -8: expected a positive integer" in told.err
    assert "did you mean 'mamba'?" in told.err

    status, report = inspect_json(path, capsys)
    assert status == 2
    assert report["groups"] == []
    assert report["digest"] is None
    assert [problem["path"] for problem in report["problems"]] == [
        "num_blocks",
        "groups[0].block_size",
        "groups[1].kind",
    ]


def test_a_config_that_no_store_can_use_is_shown_with_the_reason(
    write: Any, capsys: Capture
) -> None:
    status, report = inspect_json(
        write(config(attention(), mamba(mamba_cache_mode="none"))), capsys
    )
    assert status == 2
    assert len(report["groups"]) == 2
    assert report["problems"] == [
        {
            "path": "groups[1].mamba_cache_mode",
            "value": "none",
            "expected": "align",
            "hint": "only states committed at block boundaries can be used again",
        }
    ]


def test_rings_alone_leave_nothing_to_store(write: Any, capsys: Capture) -> None:
    status, report = inspect_json(write(config(ring())), capsys)
    assert status == 2
    assert report["problems"][0]["path"] == "groups"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"num_blocks": 1e3}'])
def test_bad_text_still_gives_json(write: Any, capsys: Capture, content: str) -> None:
    status, report = inspect_json(write(content), capsys)
    assert status == 2
    assert report["problems"]


def test_missing_file_and_directory(tmp_path: Path, capsys: Capture) -> None:
    for path in (tmp_path / "absent.json", tmp_path):
        status, report = inspect_json(str(path), capsys)
        assert status == 2
        assert report["problems"][0]["path"] == str(path)


def test_usage_errors_exit_with_2(capsys: Capture) -> None:
    for arguments in (["inspect"], ["no-such-command"], ["inspect", "a", "b"]):
        with pytest.raises(SystemExit) as raised:
            main(arguments)
        assert raised.value.code == 2
    assert main([]) == 2
    capsys.readouterr()


def test_module_runs_as_a_program(write: Any) -> None:
    command = [sys.executable, "-m", "kvprism", "inspect", write(config()), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["store_group_ids"] == [0, 2]


def test_a_reader_that_leaves_early_is_no_error(write: Any) -> None:
    groups = [attention(layers=[f"layer.{i}"]) for i in range(2000)]
    path = write(config(*groups))
    inspect = f"'{sys.executable}' -m kvprism inspect '{path}' --json"
    script = f"{inspect} | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["{", "0"]
    assert done.stderr == ""


def test_import_is_light() -> None:
    """What takes long to import is left to those who use it."""
    script = (
        "import sys; import kvprism; "
        "print(*{'torch', 'numpy', 'vllm', 'mooncake', 'argparse', 'logging'} & set(sys.modules))"
    )
    assert subprocess.check_output([sys.executable, "-c", script], text=True) == "\n"
