"""What a reader of the package sees: types, and docstrings that name every argument."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import kvprism
import kvprism._core
import kvprism.hash
import pytest

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "tests/python/reference/_core.pyi"


def constructible(cls: type) -> bool:
    """Whether a bound class has a constructor of its own: nanobind then tells its signature."""
    made = vars(cls).get("__init__")
    return (getattr(made, "__doc__", None) or "").startswith("__init__(")


def public_callables() -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for module in (kvprism, kvprism.hash):
        for name in module.__all__:
            thing = getattr(module, name)
            found.append((name, thing))
            if inspect.isclass(thing) and not issubclass(thing, Exception):
                members = [(n, m) for n, m in vars(thing).items() if not n.startswith("_")]
                if constructible(thing):
                    members.append(("__init__", vars(thing)["__init__"]))
                found += [(f"{name}.{n}", m) for n, m in members]
    return [(name, thing) for name, thing in found if name != "__version__"]


def docstring(thing: Any) -> str:
    return inspect.getdoc(getattr(thing, "__func__", thing)) or ""


def parameters(thing: Any) -> list[str]:
    """Those of a function, from its signature or from the one in its docstring."""
    function = getattr(thing, "__func__", thing)
    if inspect.isfunction(function):
        names = list(inspect.signature(function).parameters)
    else:
        first = docstring(thing).partition("\n")[0]
        inside = re.match(r"\w+\((.*)\) -> ", first)
        text = re.sub(r"\[[^\[\]]*\]", "", re.sub(r"\[[^\[\]]*\]", "", inside[1] if inside else ""))
        names = [part.partition(":")[0].strip(" *") for part in text.split(",")]
    return [name for name in names if name and name not in ("self", "/")]


def test_everything_public_says_what_it_is() -> None:
    silent = []
    for name, thing in public_callables():
        text = docstring(thing)
        # A bound function's docstring begins with its signature.
        if re.match(r"\w+\(.*\) ->", text):
            text = text.partition("\n")[2]
        if not text.strip():
            silent.append(name)
    assert silent == []


def test_functions_of_several_arguments_tell_each() -> None:
    untold = []
    for name, thing in public_callables():
        if inspect.isclass(thing) or isinstance(thing, property):
            continue
        names = parameters(thing)
        if len(names) > 1:
            text = docstring(thing)
            untold += [f"{name}({each})" for each in names if f"\n    {each}: " not in text]
    assert untold == []


def test_calls_of_the_store_tell_their_errors() -> None:
    silent = []
    for cls in (kvprism.StoreScheduler, kvprism.StoreWorker):
        for name, thing in vars(cls).items():
            bound = docstring(thing).startswith(f"{name}(")
            if (bound and not name.startswith("__")) or name == "__init__":
                told = re.search(r"\nRaises:\n    \w*Error: ", docstring(thing))
                if parameters(thing) and told is None:
                    silent.append(f"{cls.__name__}.{name}")
    assert silent == []


def test_stub_is_that_of_the_reviewed_interface() -> None:
    """A change of the Python interface is seen in a review."""
    built = next(Path(kvprism._core.__file__).parent.glob("_core.pyi"))
    assert built.read_text("utf-8") == REFERENCE.read_text("utf-8"), (
        f"the interface has changed; if it should: cp {built} {REFERENCE.relative_to(ROOT)}"
    )


def test_package_says_that_it_has_types() -> None:
    assert (Path(kvprism.__file__).parent / "py.typed").is_file()


@pytest.mark.slow
def test_users_are_type_checked_strictly(tmp_path: Path) -> None:
    """A program against the installed package: good calls pass, bad ones are found."""
    pytest.importorskip("mypy")
    good = tmp_path / "good.py"
    good.write_text(
        "import kvprism\n"
        "def f(path: str) -> int:\n"
        "    groups = kvprism.Projection(kvprism.CacheConfig.from_file(path))\n"
        "    return groups.num_store_groups\n"
    )
    bad = tmp_path / "bad.py"
    bad.write_text(
        "import kvprism\n"
        "def f(groups: kvprism.Projection, index: kvprism.StoreIndex) -> None:\n"
        "    groups.store_index(index)\n"
    )
    command = [sys.executable, "-m", "mypy", "--strict", "--no-incremental", "--config-file="]
    done = subprocess.run(
        [*command, str(good), str(bad)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"MYPYPATH": str(ROOT / "python")},
    )
    assert "good.py" not in done.stdout
    assert 'bad.py:3: error: Argument 1 to "store_index"' in done.stdout, done.stdout
