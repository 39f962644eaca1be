"""The rooms of the C++ tree keep their floors, and the check that says so notices when not."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_rooms", ROOT / "scripts/check_rooms.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


check_rooms = load()


def test_tree_keeps_its_floors() -> None:
    assert check_rooms.check(ROOT) == []


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text if path.suffix == ".cpp" else "#pragma once\n" + text)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for room in check_rooms.FLOOR_OF:
        write(tmp_path, f"cpp/include/kvprism/{room}/{room}.h", "#include <vector>\n")
    write(tmp_path, "third_party/mooncake/abi.h", "#include <dlfcn.h>\n")
    return tmp_path


def test_clean_tree(tree: Path) -> None:
    write(
        tree,
        "cpp/src/wire/codec.cpp",
        '#include "kvprism/wire/wire.h"\n#include <fmt/format.h>\n#include "kvprism/key/key.h"\n'
        '// std::thread t; #include "kvprism/sim/sim.h"\nconst char* text = "steady_clock";\n'
        "struct Timer { int time(int); }; int f(Timer t) { return t.time(0); }\n",
    )
    write(tree, "cpp/src/backend/blocking.cpp", "#include <thread>\nstd::jthread worker;\n")
    write(tree, "cpp/src/backend/mooncake.cpp", '#include "mooncake/abi.h"\n')
    assert check_rooms.check(tree) == []


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("cpp/src/group/a.cpp", '#include "kvprism/store/store.h"\n', "group/ looks up to store/"),
        ("cpp/src/hit/a.cpp", '#include "kvprism/key/key.h"\n', "on one floor"),
        ("cpp/src/store/a.cpp", '#  include "kvprism/peer/peer.h"\n', "on one floor"),
        ("cpp/src/base/a.cpp", '#include "kvprism/run/run.h"\n', "base/ looks up to run/"),
        ("cpp/src/job/a.cpp", "auto t = std::chrono::steady_clock::now();\n", "clock"),
        ("cpp/src/job/a.cpp", "auto t = time(nullptr);\n", "clock"),
        ("cpp/src/run/a.cpp", "std::jthread t;\n", "thread"),
        ("cpp/src/run/a.cpp", "#include <thread>\n", "thread"),
        ("cpp/src/store/a.cpp", "std::this_thread::sleep_for(1s);\n", "sleep"),
        ("cpp/src/sim/a.cpp", "std::random_device seed;\n", "random number"),
        ("cpp/src/sim/a.cpp", "#include <Python.h>\n", "bindings/"),
        ("cpp/src/key/a.cpp", "#include <nanobind/nanobind.h>\n", "bindings/"),
        ("cpp/src/store/a.cpp", '#include "mooncake/abi.h"\n', "only backend/ knows Mooncake"),
        ("cpp/src/store/a.cpp", '#include "kvprism/store/none.h"\n', "does not exist"),
        ("cpp/src/attic/a.cpp", "\n", "not a room"),
        ("cpp/include/kvprism/key/a.h", "#include <fmt/format.h>\n", "only std and kvprism/"),
        ("cpp/include/kvprism/key/a.h", "#include <dlfcn.h>\n", "only std and kvprism/"),
        ("cpp/include/kvprism/key/a.h", '#include "key.h"\n', "public headers say"),
        ("third_party/mooncake/a.h", '#include "kvprism/io/io.h"\n', "must not see io/"),
        ("cpp/src/sim/content_oracle.cpp", '#include "kvprism/key/key.h"\n', "must not see"),
    ],
)
def test_problem_is_noticed(tree: Path, name: str, text: str, expected: str) -> None:
    write(tree, name, text)
    problems = check_rooms.check(tree)
    assert len(problems) == 1
    assert expected in problems[0]
    assert name.rsplit("/", 1)[0] in problems[0]


def test_oracle_is_followed_through_other_headers(tree: Path) -> None:
    write(tree, "cpp/src/sim/content_oracle.cpp", '#include "kvprism/sim/world.h"\n')
    write(tree, "cpp/include/kvprism/sim/world.h", '#include "kvprism/store/uses.h"\n')
    write(tree, "cpp/include/kvprism/store/uses.h", '#include "kvprism/layout/layout.h"\n')
    problems = check_rooms.check(tree)
    assert len(problems) == 1
    assert "content_oracle.cpp -> kvprism/sim/world.h -> kvprism/store/uses.h" in problems[0]


def test_missing_pragma_once(tree: Path) -> None:
    path = tree / "cpp/include/kvprism/key/bare.h"
    path.write_text("#ifndef X\n#define X\n#endif\n")
    assert check_rooms.check(tree) == ["cpp/include/kvprism/key/bare.h: no #pragma once"]
