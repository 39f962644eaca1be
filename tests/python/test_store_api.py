"""Scheduler, worker and stores as an engine written in Python uses them."""

from __future__ import annotations

import pickle
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from typing import Any

import configs
import kvprism
import numpy as np
import pytest
from store_helpers import BLOCK, NUM_BLOCKS, Rank, hashes, projection, schema

TOKENS = list(range(13))  # three whole blocks


def test_bytes_travel_through_the_store() -> None:
    pool = kvprism.MemoryPool()
    first = Rank(pool)
    random = np.random.default_rng(5)
    first.memory[:] = random.integers(256, size=first.memory.shape, dtype=np.uint8)
    plan = first.save(TOKENS, [3, 1, 7])
    assert len(plan) == 1
    assert plan.num_blocks == 3

    objects = dict(pool.objects())
    names = first.schema.keys(kvprism.StoreIndex(0), hashes(TOKENS))
    assert set(objects) == set(names)
    for name, block in zip(names, (3, 1, 7), strict=True):
        assert pool.read(name) == first.memory[:, block].tobytes()
    first.close()

    second = Rank(pool)
    assert second.lookup(TOKENS) == 12
    job = second.scheduler.allocated(2, 12, [[5, 6, 2]])
    assert job is not None
    assert sorted(second.scheduler.take_acquired()) == [2, 5, 6]
    plan = second.scheduler.end_step()
    # As bytes, as it would reach another process.
    assert second.worker.submit(plan.encode(), kvprism.ReadyToken.host())
    report = second.worker.wait(10.0)
    assert report is not None
    second.scheduler.report(report)
    (end,) = second.scheduler.take_load_ends()
    assert (end.request, end.job, end.valid_tokens) == (2, job, 12)
    assert end.complete
    assert end.blocks_quiet
    assert end.failed == []
    assert sorted(second.scheduler.take_released()) == [2, 5, 6]
    for source, target in ((3, 5), (1, 6), (7, 2)):
        assert (second.memory[:, target] == first.memory[:, source]).all()
    untouched = [b for b in range(NUM_BLOCKS) if b not in (2, 5, 6)]
    assert not second.memory[:, untouched].any()
    second.scheduler.finished(2)
    assert second.scheduler.tracked() == 0
    second.close()


def test_a_failed_block_is_named() -> None:
    pool = kvprism.MemoryPool()
    first = Rank(pool)
    first.save(TOKENS, [3, 1, 7])
    second = Rank(pool)
    assert second.lookup(TOKENS) == 12
    names = second.schema.keys(kvprism.StoreIndex(0), hashes(TOKENS))
    assert pool.erase(names[1])
    second.scheduler.allocated(2, 12, [[5, 6, 2]])
    second.step()
    (end,) = second.scheduler.take_load_ends()
    assert end.valid_tokens == 4
    assert not end.complete
    assert [(f.group, f.chunk, f.block) for f in end.failed] == [(kvprism.GroupId(0), 1, 6)]
    assert second.scheduler.counters()["load_races"] == 1


ROWS = {
    "list": [3, 1, 7],
    "tuple": (3, 1, 7),
    "range": range(3, 6),
    "int32": np.array([3, 1, 7], dtype=np.int32),
    "int64": np.array([3, 1, 7], dtype=np.int64),
    "uint64": np.array([3, 1, 7], dtype=np.uint64),
    "strided": np.array([3, 0, 1, 0, 7, 0], dtype=np.int32)[::2],
    "bytes": np.array([3, 1, 7], dtype=np.int32).tobytes(),
    "memoryview": memoryview(np.array([3, 1, 7], dtype=np.int32)),
    "numpy ints": [np.int64(3), np.int32(1), 7],
}


@pytest.mark.parametrize("kind", ROWS)
def test_every_form_of_a_row_means_the_same(kind: str) -> None:
    blocks = list(ROWS["range"]) if kind == "range" else ROWS["list"]
    pool = kvprism.MemoryPool()
    rank = Rank(pool)
    rank.memory[:] = np.arange(NUM_BLOCKS, dtype=np.uint8)[None, :, None]
    rank.save(TOKENS, ROWS[kind])
    names = rank.schema.keys(kvprism.StoreIndex(0), hashes(TOKENS))
    assert [pool.read(name)[0] for name in names] == blocks  # type: ignore[index]


def test_every_form_of_hashes_means_the_same() -> None:
    digests = hashes(TOKENS)
    flat = b"".join(digests)
    forms = {
        "list": digests,
        "tuple": tuple(digests),
        "flat bytes": flat,
        "shape (count, width)": np.frombuffer(flat, dtype=np.uint8).reshape(3, 32),
        "items": np.frombuffer(flat, dtype="V32"),
    }
    keys = {}
    for name, form in forms.items():
        pool = kvprism.MemoryPool()
        rank = Rank(pool)
        rank.scheduler.advanced(1, 12, form)
        assert rank.scheduler.known_hashes(1) == 3
        rank.scheduler.save(1, (0, 12), [[1, 2, 3]])
        rank.step()
        keys[name] = [key for key, _ in pool.objects()]
    assert set(map(tuple, keys.values())) == {tuple(keys["list"])}


def test_flat_hashes_of_another_width() -> None:
    rank = Rank(hash_width=16)
    rank.scheduler.advanced(1, 12, b"".join(hashes(TOKENS, 16)))
    assert rank.scheduler.known_hashes(1) == 3


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([[3, "x", 7]], r"rows\[0\]\[1\] = 'x': expected a block id of 32 bits"),
        ([[3, 2**31, 7]], r"rows\[0\]\[1\] = 2147483648: expected a block id of 32 bits"),
        ([[3, 2**70]], r"rows\[0\]\[1\] = 1180591620717411303424: expected a block id"),
        ([np.array([1, 2**40])], r"rows\[0\]\[1\] = 1099511627776: expected a block id"),
        ([np.array([1.5])], r"rows\[0\] = buffer of shape \(1\), format 'd': expected integers"),
        ([np.zeros((2, 2), np.int32)], r"rows\[0\] = buffer .*: expected one dimension"),
        ([b"abc"], r"rows\[0\] = buffer of shape \(3\).*: expected 32-bit integers"),
        ([7], r"rows\[0\] = 7: expected a sequence"),
        (7, r"rows = 7: expected a sequence"),
        (["abc"], r"rows\[0\] = 'abc': expected a sequence"),
    ],
)
def test_a_bad_row_is_named(rows: object, text: str) -> None:
    rank = Rank()
    rank.scheduler.advanced(1, 12, hashes(TOKENS))
    with pytest.raises(kvprism.ArgumentError, match=text):
        rank.scheduler.save(1, (0, 12), rows)
    # It has done no harm.
    assert rank.scheduler.wants_save(1) == (0, 12)


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        ([b"short"], r"hashes\[0\] = 5 bytes: expected 16 to 64 bytes"),
        ([bytes(16), bytes(17)], r"hashes\[1\] = 17 bytes: expected 16 bytes as the others"),
        ([bytes(16), "x"], r"hashes\[1\] = 'x': expected bytes"),
        (bytes(33), r"hashes = buffer of shape \(33\).*: expected shape \(count, width\)"),
        (np.zeros((2, 8), np.uint8), r"hashes = buffer of shape \(2, 8\)"),
        (np.zeros((4, 32), np.uint8)[::2], r"hashes = .*: expected a contiguous array"),
        (12, r"hashes = 12: expected a sequence"),
    ],
)
def test_bad_hashes_are_named(bad: object, text: str) -> None:
    with pytest.raises(kvprism.ArgumentError, match=text):
        Rank().scheduler.advanced(1, 12, bad)


def test_hashes_that_are_known_are_not_read_again() -> None:
    rank = Rank()
    digests = hashes(TOKENS)
    assert rank.scheduler.lookup(1, len(TOKENS), digests) is None
    # Only their number and width count.
    assert rank.scheduler.lookup(1, len(TOKENS), [b"", b"", digests[2]]) is None
    assert rank.scheduler.known_hashes(1) == 3


def test_a_plan_pickles_and_decodes() -> None:
    rank = Rank()
    rank.scheduler.advanced(1, 12, hashes(TOKENS))
    rank.scheduler.save(1, (0, 12), [[1, 2, 3]])
    plan = rank.scheduler.end_step()
    copies = (pickle.loads(pickle.dumps(plan)), kvprism.StepPlan.decode(plan.encode()))
    for copy in copies:
        assert (len(copy), copy.step, copy.epoch, copy.num_blocks) == (1, 1, plan.epoch, 3)
        assert copy.encode() == plan.encode()
    # At an address that is no multiple of 8.
    shifted = memoryview(b"x" + plan.encode())[1:]
    assert kvprism.StepPlan.decode(shifted).encode() == plan.encode()
    assert not Rank().scheduler.end_step()


@pytest.mark.parametrize("cut", [0, 7, 40, -1])
def test_a_truncated_plan_is_refused(cut: int) -> None:
    rank = Rank()
    rank.scheduler.advanced(1, 12, hashes(TOKENS))
    rank.scheduler.save(1, (0, 12), [[1, 2, 3]])
    encoded = rank.scheduler.end_step().encode()[:cut]
    with pytest.raises(kvprism.Error):
        kvprism.StepPlan.decode(encoded)
    result = rank.worker.submit(encoded, kvprism.ReadyToken.host())
    assert not result
    assert result.refusal
    assert rank.worker.counters()["plans_refused"] == 1


def test_a_plan_of_another_configuration_is_refused_and_its_job_ends() -> None:
    rank, other = Rank(), Rank(model="another")
    rank.scheduler.advanced(1, 12, hashes(TOKENS))
    rank.scheduler.save(1, (0, 12), [[1, 2, 3]])
    result = other.worker.submit(rank.scheduler.end_step().encode(), kvprism.ReadyToken.host())
    assert not result.accepted
    assert "different cache configurations or key facts" in result.refusal
    report = other.worker.wait(10.0)
    assert report is not None
    rank.scheduler.report(report)
    assert rank.scheduler.counters()["ledger"]["alive"] == 0


def test_what_is_neither_plan_nor_bytes_is_refused() -> None:
    rank = Rank()
    with pytest.raises(kvprism.ArgumentError, match="plan = 7: expected bytes or a buffer"):
        rank.worker.submit(7, kvprism.ReadyToken.host())  # type: ignore[call-overload]
    with pytest.raises(TypeError):
        rank.worker.submit(rank.scheduler.end_step())  # type: ignore[call-overload]


def test_odd_reports_are_counted() -> None:
    rank = Rank()
    assert rank.scheduler.report(b"what is this") is False
    assert rank.scheduler.report(b"") is True
    assert rank.scheduler.counters()["reports_malformed"] == 1


def test_options_are_checked_all_at_once() -> None:
    groups = projection()
    with pytest.raises(kvprism.ConfigError) as caught:
        kvprism.StoreScheduler(
            schema(groups), kvprism.memory_store(), epoch=0, load_timeout_seconds=0
        )
    assert {p.path for p in caught.value.problems} == {"epoch", "load_timeout"}
    for seconds in (-1.0, float("nan")):
        with pytest.raises(kvprism.ConfigError) as caught:
            kvprism.StoreScheduler(
                schema(groups),
                kvprism.memory_store(),
                epoch=-1,
                load_timeout_seconds=seconds,
                save_timeout_seconds=0,
                max_held_percent=2**40,
                hash_width=8,
            )
        assert {p.path: p.expected for p in caught.value.problems if p.path != "save_timeout"} == {
            "epoch": "a whole number from 0 to 18446744073709551615",
            "load_timeout_seconds": "0 or more seconds",
            "max_held_percent": "a whole number from 0 to 4294967295",
            "hash_width": "16 to 64 bytes",
        }
        assert "save_timeout" in {p.path for p in caught.value.problems}
    page = groups.groups()[0].page_size_bytes
    tensor = kvprism.CacheTensor(
        np.zeros((2, NUM_BLOCKS, page), np.uint8),
        layers=["f0", "f1"],
        layer_stride=NUM_BLOCKS * page,
        block_stride=page,
    )
    with pytest.raises(kvprism.ConfigError) as caught:
        kvprism.StoreWorker(
            schema(groups),
            kvprism.SegmentMap(groups, [tensor]),
            kvprism.memory_store(),
            rank=-1,
            max_bytes_per_call=10**5000,
        )
    assert [(p.path, p.value) for p in caught.value.problems] == [
        ("rank", "-1"),
        ("max_bytes_per_call", "a number of thousands of digits"),
    ]
    with pytest.raises(kvprism.ConfigError) as caught:
        kvprism.memory_store(latency_seconds=-1, max_bytes_per_call=-2)
    assert {p.path for p in caught.value.problems} == {"latency_seconds", "max_bytes_per_call"}


def test_numbers_out_of_range_are_named() -> None:
    scheduler = Rank().scheduler
    whole = "expected a whole number from 0 to"
    for call in (
        lambda: scheduler.lookup(-1, 8, []),
        lambda: scheduler.allocated(-1, 0, []),
        lambda: scheduler.finished(-1),
        lambda: scheduler.restrict(-1),
        lambda: scheduler.known_hashes(-1),
    ):
        with pytest.raises(
            kvprism.ArgumentError, match=f"request = -1: {whole} 18446744073709551615"
        ):
            call()
    with pytest.raises(kvprism.ArgumentError, match=f"prompt_tokens = -8: {whole} 4294967295"):
        scheduler.lookup(1, -8, [])
    with pytest.raises(kvprism.ArgumentError, match=rf"range\[1\] = 4294967296: {whole}"):
        scheduler.save(1, (0, 2**32), [])
    with pytest.raises(kvprism.ArgumentError, match=f"value = -1: {whole} 4294967295"):
        kvprism.GroupId(-1)
    with pytest.raises(kvprism.ArgumentError, match=f"most = -1: {whole} 18446744073709551615"):
        scheduler.flight_record(-1)
    with pytest.raises(kvprism.ArgumentError, match=f"pp = -1: {whole} 4294967295"):
        kvprism.RankPosition(pp=-1)
    assert scheduler.lookup(np.int64(1), np.uint32(0), []) == 0
    assert scheduler.tracked() == 0


def test_a_checked_scheduler_raises_for_calls_out_of_order() -> None:
    bearing, checked = Rank(), Rank(checked=True)
    bearing.scheduler.allocated(1, BLOCK, [])
    with pytest.raises(kvprism.ArgumentError, match="allocated"):
        checked.scheduler.allocated(1, BLOCK, [])
    checked.scheduler.advanced(1, len(TOKENS), hashes(TOKENS))
    first, end = checked.scheduler.wants_save(1) or (0, 0)
    assert (first, end) == (0, 3 * BLOCK)
    for wrong in ((first, end + BLOCK), (first + BLOCK, end)):
        with pytest.raises(kvprism.ArgumentError, match="save"):
            checked.scheduler.save(1, wrong, [[1, 2, 3, 4]])
    checked.scheduler.save(1, (first, end), [[1, 2, 3]])
    plan = checked.scheduler.end_step()
    with pytest.raises(kvprism.ArgumentError, match="acquired blocks not taken"):
        checked.scheduler.finished(1)
    assert list(checked.scheduler.take_acquired()) == [1, 2, 3]
    assert checked.worker.submit(plan, kvprism.ReadyToken.host())
    checked.settle()
    checked.scheduler.finished(1)
    with pytest.raises(kvprism.MismatchError, match="a worker's poll"):
        checked.scheduler.report(b"what is this")
    assert checked.scheduler.counters()["saved_objects"] == 3
    assert checked.scheduler.tracked() == 0


def test_a_checked_save_sees_only_the_tables_it_is_given() -> None:
    """Blocks go from one request to another, and tables of earlier calls are no longer true."""
    rank = Rank(checked=True)
    saved, other = list(range(8)), list(range(100, 116))

    def save(request: int, tokens: list[int], span: tuple[int, int], table: list[int]) -> None:
        rank.scheduler.advanced(request, span[1], hashes(tokens))
        assert rank.scheduler.wants_save(request) == span
        rank.scheduler.save(request, span, [table])
        rank.scheduler.take_acquired()
        rank.step()

    save(1, other, (0, 8), [3, 4])
    save(2, saved, (0, 8), [1, 2])
    rank.scheduler.finished(2)
    save(1, other, (8, 16), [3, 4, 1, 2])
    with pytest.raises(kvprism.ArgumentError, match="block 3 twice in the table of group 0"):
        save(3, [7, *range(200, 207)], (0, 8), [3, 3])
    assert rank.scheduler.counters()["saved_objects"] == 6


def test_a_truth_value_is_no_number() -> None:
    with pytest.raises(TypeError):
        Rank(max_held_percent=True)
    with pytest.raises(TypeError):
        Rank().scheduler.finished(True)


def test_each_side_of_a_store_has_one_owner() -> None:
    rank = Rank()
    with pytest.raises(kvprism.ArgumentError, match="make one store object for each scheduler"):
        kvprism.StoreScheduler(rank.schema, rank.store)
    # A scheduler that could not be made does not keep the index.
    store = kvprism.memory_store()
    with pytest.raises(kvprism.Error):
        kvprism.StoreScheduler(rank.schema, store, epoch=0)
    kvprism.StoreScheduler(rank.schema, store)


def test_use_after_close() -> None:
    rank = Rank()
    plan = rank.scheduler.end_step()
    rank.close()
    rank.close()
    calls = [
        lambda: rank.scheduler.end_step(),
        lambda: rank.scheduler.lookup(1, 13, hashes(TOKENS)),
        lambda: rank.scheduler.counters(),
        lambda: rank.scheduler.report(b""),
        lambda: rank.worker.submit(plan, kvprism.ReadyToken.host()),
        lambda: rank.worker.submit(plan.encode(), kvprism.ReadyToken.host()),
        lambda: rank.worker.wait(0.0),
    ]
    for call in calls:
        with pytest.raises(kvprism.ClosedError):
            call()
    store = kvprism.memory_store()
    assert store.close() == 0
    with pytest.raises(kvprism.ClosedError):
        kvprism.StoreScheduler(rank.schema, store)


def test_close_cancels_what_has_not_started() -> None:
    rank = Rank(store=kvprism.inject_faults(kvprism.memory_store(), hang=1.0))
    rank.scheduler.advanced(1, 12, hashes(TOKENS))
    rank.scheduler.save(1, (0, 12), [[1, 2, 3]])
    assert rank.worker.submit(rank.scheduler.end_step(), kvprism.ReadyToken.host())
    while rank.worker.counters()["puts"] == 0:
        rank.worker.wait(0.01)
    assert rank.worker.close(0.0) == 1  # memory that a hung call may read
    report = rank.worker.poll()
    assert report is not None
    rank.scheduler.report(report)
    assert rank.scheduler.counters()["save_chunks_failed"] == 3


def test_faults_are_named_and_counted() -> None:
    with pytest.raises(kvprism.ArgumentError) as caught:
        kvprism.inject_faults(kvprism.memory_store(), fail_cal=0.5, delay=2.0, hang="x")
    assert {p.path for p in caught.value.problems} == {"fail_cal", "delay", "hang"}
    assert "fail_call" in str(caught.value)

    store = kvprism.inject_faults(kvprism.memory_store(), fail_call=1.0)
    rank = Rank(store=store)
    rank.save(TOKENS, [1, 2, 3])
    assert rank.store.faults()["fail_call"] == 1
    assert rank.scheduler.counters()["save_chunks_failed"] == 3
    with pytest.raises(kvprism.ArgumentError):
        kvprism.inject_faults(store)  # its sides have owners


def test_states_are_offered_by_group() -> None:
    groups = kvprism.Projection(kvprism.CacheConfig.from_dict(configs.config()))
    scheduler = kvprism.StoreScheduler(schema(groups), kvprism.memory_store())
    digest = [bytes(32)]
    scheduler.advanced(1, 800, digest)
    scheduler.boundary(1, kvprism.GroupId(2), 5, 800)
    assert list(scheduler.take_acquired()) == [5]
    scheduler.boundary(1, kvprism.GroupId(1), 5, 800)  # a ring: not stored, no offence
    scheduler.boundary(1, kvprism.GroupId(2), 0, 800)  # the null block
    assert scheduler.counters()["offers_refused"] == 1
    assert len(scheduler.take_acquired()) == 0
    with pytest.raises(TypeError):
        scheduler.boundary(1, 2, 5, 800)  # type: ignore[arg-type]
    with pytest.raises(IndexError):
        scheduler.boundary(1, kvprism.GroupId(3), 5, 800)


def test_one_call_at_a_time() -> None:
    rank = Rank()
    refused = []

    def hammer() -> None:
        for _ in range(300):
            try:
                rank.scheduler.end_step()
            except kvprism.ArgumentError as error:
                refused.append(str(error))

    threads = [threading.Thread(target=hammer) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Whether any two met is up to the machine; none may do harm.
    assert all("one call at a time" in text for text in refused)
    rank.save(TOKENS, [1, 2, 3])


def test_a_forked_child_is_refused() -> None:
    program = """
        import os, sys
        sys.path.insert(0, sys.argv[1])
        from store_helpers import Rank
        import kvprism
        rank = Rank()
        plan = rank.scheduler.end_step()
        rank.worker.submit(plan, kvprism.ReadyToken.host())
        pid = os.fork()
        if pid == 0:
            try:
                rank.worker.submit(plan, kvprism.ReadyToken.host())
            except kvprism.ClosedError as error:
                ok = "forked child" in str(error)
            for call in (rank.scheduler.end_step, lambda: rank.scheduler.advanced(1, 4, [])):
                try:
                    call()
                    ok = False
                except kvprism.ClosedError as error:
                    ok = ok and "the process that made the scheduler" in str(error)
            rank.worker.close()
            os._exit(0 if ok else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        rank.close()
    """
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program), sys.path[0]],
        check=True,
        timeout=60,
    )


def test_known_builds() -> None:
    builds = kvprism.known_mooncake_builds()
    assert builds
    assert any(build.exercised for build in builds)
    for build in builds:
        assert build.distribution.startswith("mooncake-transfer-engine")
        assert int(build.build_id, 16)


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ({"master": "no port"}, "master"),
        ({"master": "127.0.0.1:1", "protocol": "udp"}, "protocol"),
        ({"master": "127.0.0.1:1", "unknown_build": "refus"}, "unknown_build"),
        ({"master": "127.0.0.1:1", "connect_timeout_seconds": -1.0}, "connect_timeout_seconds"),
    ],
)
def test_bad_mooncake_options_are_named(options: dict[str, object], path: str) -> None:
    with pytest.raises(kvprism.Error) as caught:
        kvprism.mooncake_store(**options)  # type: ignore[arg-type]
    assert path in {problem.path for problem in caught.value.problems}


def test_all_bad_mooncake_options_are_named_at_once() -> None:
    with pytest.raises(kvprism.ConfigError) as caught:
        kvprism.mooncake_store(
            master="x",
            protocol="zz",
            connect_timeout_seconds=-1,
            unknown_build="q",
            max_slices_per_call=0,
            global_segment_size=5,
            environment={"K": "x\0y"},
        )
    assert str(caught.value).splitlines() == [
        "mooncake options: 7 problems",
        "  connect_timeout_seconds = -1.000000: expected 0 or more seconds",
        '  unknown_build = q: expected "refuse" or "probe"',
        "  master = x: expected a port between 1 and 65535 after the host (e.g. 127.0.0.1:50051)",
        "  protocol = zz: expected tcp or rdma",
        "  global_segment_size = 5: expected 0 or at least 16777216 bytes",
        "  max_slices_per_call = 0: expected between 1 and 8192 (more of them clog Mooncake's TCP "
        "queue for a minute)",
        "  environment.K = x\\x00y: expected a value without a byte 0",
    ]


def test_everything_public_is_documented() -> None:
    from kvprism import sim

    bare = []
    for module in (kvprism, sim):
        for name in module.__all__:
            thing = getattr(module, name)
            if name.startswith("__") or not callable(thing):
                continue
            if not thing.__doc__:
                bare.append(name)
            if not isinstance(thing, type) or issubclass(thing, BaseException):
                continue
            for member, value in vars(thing).items():
                if not member.startswith("_") and not getattr(value, "__doc__", None):
                    bare.append(f"{name}.{member}")
    assert bare == []


def test_a_prefix_is_saved_up_to_the_first_block_that_is_gone() -> None:
    """A null block in a row is never read, and what lies behind it serves no hit (R50)."""
    pool = kvprism.MemoryPool()
    rank = Rank(pool)
    rank.save(TOKENS, [3, 0, 7])
    names = rank.schema.keys(kvprism.StoreIndex(0), hashes(TOKENS))
    assert [pool.contains(name) for name in names] == [True, False, False]
    assert rank.scheduler.counters()["sources_skipped"] == 1
    assert rank.projection.scheduler_block_size == BLOCK


@pytest.mark.parametrize("form", [list, tuple, lambda ids: np.asarray(ids, dtype=np.int64)])
def test_a_save_reads_only_the_blocks_of_its_range(form: Callable[[list[int]], Any]) -> None:
    """The cost of a chunk follows the chunk, not the context before it."""
    rank = Rank()
    tokens = list(range(12 * BLOCK))
    table = [*range(1, 13)]
    rank.scheduler.advanced(1, 4 * BLOCK, hashes(tokens))
    rank.scheduler.save(1, (0, 4 * BLOCK), [form(table)])
    assert rank.scheduler.counters()["block_ids_read"] == 4
    rank.step()
    rank.scheduler.advanced(1, 6 * BLOCK)
    # What lies outside the range is never looked at.
    table[:4], table[6:] = [2**40] * 4, [2**40] * 6
    rank.scheduler.save(1, (4 * BLOCK, 6 * BLOCK), [form(table)])
    assert rank.scheduler.counters()["block_ids_read"] == 6
    plan = rank.step()
    assert plan.num_blocks == 2
    assert rank.scheduler.counters()["saved_objects"] == 6


def test_a_save_that_names_a_later_start_reads_from_the_watermark() -> None:
    rank = Rank()
    rank.scheduler.advanced(1, 12, hashes(TOKENS))
    rank.scheduler.save(1, (8, 12), [[1, 2, 3]])
    assert rank.scheduler.counters()["block_ids_read"] == 3
    assert rank.step().num_blocks == 3


def test_a_save_reads_nothing_of_scratch_and_of_states() -> None:
    groups = kvprism.Projection(kvprism.CacheConfig.from_dict(configs.config()))
    scheduler = kvprism.StoreScheduler(schema(groups), kvprism.memory_store())
    scheduler.advanced(1, 800, [bytes(32)])
    scheduler.save(1, (0, 800), [[3], ["a ring's row is not read"], ["nor a state's"]])
    assert scheduler.counters()["block_ids_read"] == 1
    assert scheduler.end_step().num_blocks == 1


def test_a_rank_hears_of_its_own_loads() -> None:
    pool = kvprism.MemoryPool()
    Rank(pool).save(TOKENS, [1, 2, 3])
    rank = Rank(pool)
    offered = rank.lookup(TOKENS)
    job = rank.scheduler.allocated(2, offered, [[4, 5, 6]])
    assert job is not None
    gone = rank.schema.keys(kvprism.StoreIndex(0), hashes(TOKENS))[1]
    assert pool.erase(gone)
    plan = rank.scheduler.end_step()
    assert (plan.blocks(job), plan.blocks(job + 1)) == ([4, 5, 6], [])
    encoded = plan.encode()
    loads = kvprism.RankLoads()
    loads.expect(encoded)
    assert len(loads) == 1
    assert rank.worker.submit(encoded, kvprism.ReadyToken.host())
    ends: list[kvprism.RankLoadEnd] = []
    while not ends:
        report = rank.worker.wait(10.0)
        assert report is not None
        ends = loads.take(report)
    (end,) = ends
    assert (end.job, end.request, end.complete, end.failed_blocks) == (job, 2, False, [5])
    assert loads.abandon(job) == []
    with pytest.raises(kvprism.Error):
        loads.expect(b"no plan at all")
    with pytest.raises(kvprism.Error):
        loads.take(b"no report at all")


def test_a_kind_of_the_engines_own_is_saved_and_loaded() -> None:
    registry = kvprism.SpecRegistry.builtin().with_kind(
        name="pooled_keys",
        payload="raw",
        dcp_sharded=False,
        latent=False,
        prefix_cacheable=True,
        hit="chunk",
        window=None,
        save="positional",
        peer="window",
        replay_tokens=0,
        fine_grained_lookup=False,
    )
    group = {
        "kind": "pooled_keys",
        "layers": ["k0", "k1"],
        "block_size": BLOCK,
        "page_size_bytes": 24,
        "attention_chunk_size": 8,
    }
    config = {"num_blocks": 8, "kv_layout": "BLHNC", "groups": [group]}
    groups = kvprism.Projection(kvprism.CacheConfig.from_dict(config, registry), registry)
    (row,) = groups.groups()
    assert (row.hit, row.window, row.object_bytes) == ("chunk", 8, 48)

    keys = schema(groups)
    memory = np.random.default_rng(3).integers(256, size=(8, 50), dtype=np.uint8)
    before = memory.copy()
    tensor = kvprism.CacheTensor(memory, layers=["k0", "k1"], layer_stride=24, block_stride=50)
    store = kvprism.memory_store()
    scheduler = kvprism.StoreScheduler(keys, store)
    worker = kvprism.StoreWorker(keys, kvprism.SegmentMap(groups, [tensor]), store)
    chain = hashes(list(range(16)))

    def run() -> None:
        assert worker.submit(scheduler.end_step(), kvprism.ReadyToken.host())
        scheduler.report(worker.wait(10))

    scheduler.advanced(1, 12, chain[:3])
    scheduler.save(1, (0, 12), [[3, 1, 5]])
    run()
    scheduler.finished(1)
    offered = scheduler.lookup(2, 16, chain)
    while offered is None:
        scheduler.end_step()
        offered = scheduler.lookup(2, 16, chain)
    assert offered == 12, "the blocks since token 8 end the prefix"
    memory[:] = 0
    # The chunk that begins at token 8 is the third block; the two before it are not needed.
    scheduler.allocated(2, 12, [[0, 0, 6]])
    run()
    assert [end.complete for end in scheduler.take_load_ends()] == [True]
    assert (memory[6, :48] == before[5, :48]).all()
    assert memory.sum() == before[5, :48].sum()
    assert worker.close() == 0
    assert scheduler.close() == 0
