"""The code in the documents compiles and does what the text around it says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import kvprism
from kvprism.cli import cmake_dir

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = cmake_dir().parents[1]
INCLUDE = LIBRARIES.parent / "include"
CXX = shutil.which(os.environ.get("CXX") or "c++") or shutil.which("g++")
CC = shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc")
assert CXX is not None
assert CC is not None


def code(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text("utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def compile_and_run(path: Path, compiler: str, *flags: str) -> str:
    program = path.with_suffix("")
    command = [compiler, *flags, "-Wall", "-Wextra", "-Werror", f"-I{INCLUDE}", str(path)]
    command += [f"-L{LIBRARIES}", "-lkvprism_hash", "-lkvprism", f"-Wl,-rpath,{LIBRARIES}"]
    built = subprocess.run([*command, "-o", str(program)], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_kind_of_cache_is_added_as_contributing_says(tmp_path: Path) -> None:
    test, kind = code("CONTRIBUTING.md", "cpp")
    path = tmp_path / "kind.cpp"
    path.write_text(test + kind + "int main() { return test(with_pooled_keys()); }\n")
    assert compile_and_run(path, CXX, "-std=c++20") == "pooled keys are stored\n"
    without = tmp_path / "without.cpp"
    without.write_text(
        test + "int main() try { return test(kvprism::SpecRegistry::builtin()); }\n"
        "catch (const kvprism::Error& error) { std::puts(error.what()); return 0; }\n"
    )
    assert "groups[0].kind" in compile_and_run(without, CXX, "-std=c++20")


def test_code_of_the_cpp_page(tmp_path: Path) -> None:
    step, hashing = code("docs/cpp.md", "cpp")
    (setup,) = code("README.md", "cpp")
    setup = setup.split("  StoreScheduler scheduler", 1)[0]
    path = tmp_path / "page.cpp"
    path.write_text(
        """
#include <cstdint>
#include <cstdio>
#include <memory>
#include <span>
#include <vector>
#include "kvprism/backend/clock.h"
#include "kvprism/backend/memory_store.h"
#include "kvprism/backend/pump_thread.h"
#include "kvprism/checked/checked_scheduler.h"
#include "kvprism/group/cache_config.h"
#include "kvprism/hash/block_hasher.h"
#include "kvprism/layout/segment_map.h"
using namespace kvprism;
struct Request {
  RequestId id;
  std::vector<std::uint8_t> hashes;
  std::uint32_t num_hashes, computed;
  std::vector<BlockId> table;
};
struct Pool {
  void reference(const std::vector<BlockId>& ids) {
    if (!ids.empty()) std::printf("+%zu ", ids.size());
  }
  void unreference(const std::vector<BlockId>& ids) {
    if (!ids.empty()) std::printf("-%zu ", ids.size());
  }
};
constexpr std::size_t kPage = 16 * (8 + 8) * 2;
constexpr const char* kConfig =
    R"({"num_blocks": 8, "groups": [{"kind": "full_attention", "layers": ["l0"],
  "block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": "float16"}]})";
struct Scheduler {
  void advanced(int, std::uint32_t accepted, const HashList& hashes) {
    std::printf("%u tokens, %u hashes of %u bytes\\n", accepted, hashes.count, hashes.width);
  }
};
void hash() {
  Scheduler scheduler;
  const int request = 1;
  const std::uint32_t accepted = 40, count = 2;
  const std::vector<std::uint32_t> tokens(40, 7);
"""
        + hashing
        + "}\n"
        + step
        + "int main() {\n  std::vector<std::byte> memory(8 * kPage);\n"
        + "  const CacheTensor tensor{.base = memory.data(), .bytes = memory.size(), "
        + '.layers = {"l0"}, .block_stride = kPage};\n'
        + setup
        + """
  EngineScheduler scheduler(schema, store, {.epoch = 0x5eed});
  const auto worker = std::make_shared<StoreWorker>(schema, map, store, StoreWorkerOptions{});
  PumpThread pump(worker, store);
  Request request{RequestId{7}, std::vector<std::uint8_t>(64, 1), 2, 32, {BlockId{1}, BlockId{2}}};
  request.hashes[63] = 2;  // of two blocks
  Pool pool;
  do step(scheduler, *worker, pump, request, pool, monotonic_now());
  while (scheduler.has_pending_work());
  std::printf("%lu bytes\\n", static_cast<unsigned long>(worker->counters().bytes_stored));
  hash();
}
"""
    )
    assert compile_and_run(path, CXX, "-std=c++20") == (
        "+2 -2 1024 bytes\n40 tokens, 2 hashes of 32 bytes\n"
    )


def test_errors_of_the_c_interface(tmp_path: Path) -> None:
    (body,) = code("docs/cpp.md", "c")
    path = tmp_path / "errors.c"
    path.write_text(
        "#include <stdio.h>\n#include <string.h>\n#include <kvprism/kvprism.h>\n"
        'int main(void) {\n  const char* json = "{}";\n  const size_t length = strlen(json);\n'
        "#undef stderr\n#define stderr stdout\n" + body + "  return projection != NULL;\n}\n"
    )
    told = compile_and_run(path, CC, "-std=c11")
    assert told.startswith("cache config: 2 problems\n  num_blocks: expected")


def test_python_of_the_configuration_page_runs(tmp_path: Path) -> None:
    reading, adding = code("docs/configuration.md", "python")
    (example,) = code("docs/configuration.md", "json")
    (tmp_path / "cache.json").write_text(example)
    names: dict[str, object] = {"kvprism": kvprism}
    exec(reading.replace('"cache.json"', repr(str(tmp_path / "cache.json"))), names)
    assert isinstance(names["projection"], kvprism.Projection)
    exec(adding, names)
