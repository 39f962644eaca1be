"""What must not compile does not, while the same code without the mistake does.

The C++ tests assert all of it with concepts; these few show that a compiler says so too.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

INCLUDE = Path(__file__).resolve().parents[2] / "cpp" / "include"
COMPILER = shutil.which(os.environ.get("CXX") or "c++") or shutil.which("g++")
assert COMPILER is not None, "these tests need a C++ compiler: run `make test`"

TRAITS = """
#include "kvprism/spec/spec_traits.h"
using namespace kvprism;
SpecTraits traits() {{ return {{ {members} }}; }}
"""
MEMBERS = [
    ".prefix_cacheable = true",
    ".hit = HitRule::kPrefix",
    ".window = 0",
    ".save = SaveRule::kPositional",
    ".peer = PeerRule::kSuffix",
    ".replay_tokens = 0",
    ".fine_grained_lookup = true",
]

KIND = """
#include "kvprism/spec/spec_registry.h"
using namespace kvprism;
using Function = std::function<SpecTraits(const CacheSpec&)>;
SpecRegistry add(const SpecRegistry& registry, Function traits) {{
  return registry.with({{ {members} }});
}}
"""
KIND_MEMBERS = [
    ".payload = PayloadKind::kRaw",
    ".needs = ParameterSet{}",
    ".allows = ParameterSet{}",
    ".dcp_sharded = false",
    ".latent = false",
]

INDEX = """
#include "kvprism/group/projection.h"
using namespace kvprism;
auto use(const Projection& projection, IndexedSpan<StoreIndex, const int> rows, GroupId group,
         TransferIndex transfer, StoreIndex store) {{
  (void)group; (void)transfer; (void)store; (void)rows;
  return {expression};
}}
"""


def compiles(tmp_path: Path, text: str) -> bool:
    source = tmp_path / "snippet.cpp"
    source.write_text(text)
    command = [str(COMPILER), "-std=c++20", "-fsyntax-only", f"-I{INCLUDE}", str(source)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_traits_that_declare_everything_compile(tmp_path: Path) -> None:
    assert compiles(tmp_path, TRAITS.format(members=", ".join(MEMBERS)))


@pytest.mark.parametrize("left_out", [0, len(MEMBERS) - 1])
def test_traits_that_leave_one_out_do_not(tmp_path: Path, left_out: int) -> None:
    members = [member for at, member in enumerate(MEMBERS) if at != left_out]
    assert not compiles(tmp_path, TRAITS.format(members=", ".join(members)))


def test_a_kind_must_declare_everything(tmp_path: Path) -> None:
    def kind(members: list[str]) -> str:
        return KIND.format(members=", ".join(['.name = "x"', *members, ".traits = traits"]))

    assert compiles(tmp_path, kind(KIND_MEMBERS))
    assert not compiles(tmp_path, kind(KIND_MEMBERS[:-1]))


def test_an_index_addresses_its_own_space_only(tmp_path: Path) -> None:
    assert compiles(tmp_path, INDEX.format(expression="projection.store_index(group)"))
    assert not compiles(tmp_path, INDEX.format(expression="projection.store_index(store)"))
    assert not compiles(tmp_path, INDEX.format(expression="rows[transfer]"))
