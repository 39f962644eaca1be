"""A step fails in an engine that lives on: what workers told in it, or should have heard, is lost.

vLLM waits for every load until each rank has told its end, once.
"""

from __future__ import annotations

import functools
import json
import logging
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import conftest
import harness
import kvprism
import pytest
from kvprism.local_mooncake import LocalMooncake
from kvprism.vllm import worker_side
from kvprism.vllm.arrivals import Arrivals
from kvprism.vllm.metadata import ReportMetadata, StepEnd, StepMetadata
from kvprism.vllm.mooncake import open_store
from kvprism.vllm.worker_side import Results, WorkerSide
from test_halves import BLOCK, TOKENS, Engine, configuration, describe, make_worker, run

pytestmark = pytest.mark.xdist_group("lost_steps")


@pytest.fixture(scope="module")
def mooncake() -> Iterator[LocalMooncake]:
    with LocalMooncake(storage_bytes=64 << 20) as running:
        yield running


@pytest.fixture(scope="module")
def described() -> Any:
    return describe(configuration())


@pytest.fixture
def engine(mooncake: LocalMooncake, described: Any) -> Iterator[Engine]:
    made = Engine(mooncake, described)
    yield made
    made.half.close()


@pytest.fixture
def worker(mooncake: LocalMooncake, described: Any) -> Iterator[WorkerSide]:
    made = make_worker(mooncake, configuration(), described)
    yield made
    made.close()


def waiting(engine: Engine, worker: WorkerSide, first: int) -> StepMetadata:
    """The step with the load of a request "b", whose blocks are in the store."""
    tokens = [first, *TOKENS[1:]]
    request = engine.request("a", tokens)
    engine.allocate(request, len(tokens))
    run(worker, engine, engine.step(a=len(tokens)))
    engine.free(request)
    again = engine.request("b", tokens)
    end = time.monotonic() + 60
    while engine.half.lookup(again, 0)[0] != 4 * BLOCK:
        assert time.monotonic() < end
        one_step(engine, [worker])
    engine.allocate(again, 4 * BLOCK, external=4 * BLOCK)
    metadata = engine.step()
    assert [name for _, name in metadata.loads] == ["b"]
    return metadata


def ends(worker: WorkerSide) -> tuple[Results, ReportMetadata | None]:
    """What a worker says in the step in which a load ends."""
    end = time.monotonic() + 60
    while not (results := worker.take_results()).finished:
        assert time.monotonic() < end
    return results, worker.take_reports()


def bind(worker: WorkerSide, metadata: StepMetadata) -> None:
    worker.bind(metadata)
    worker.submit()


def take(engine: Engine, outputs: list[ReportMetadata | None]) -> None:
    for each in outputs:
        engine.half.take_output(
            SimpleNamespace(kv_connector_worker_meta=each, invalid_block_ids=set())
        )


def one_step(engine: Engine, workers: list[WorkerSide]) -> list[Results]:
    metadata = engine.step()
    results = []
    words = []
    for worker in workers:
        bind(worker, metadata)
        results.append(worker.take_results())
        words.append(worker.take_reports())
        worker.clear()
    said = [word for word in words if word is not None]
    take(engine, [functools.reduce(ReportMetadata.aggregate, said) if said else None])
    return results


def told(engine: Engine, worker: WorkerSide, steps: int = 8) -> tuple[Counter[str], Counter[str]]:
    """How often each request is told in so many steps, and told as failed."""
    finished: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    for _ in range(steps):
        for results in one_step(engine, [worker]):
            finished.update(results.finished)
            failed.update(results.failed)
    return finished, failed


def test_the_end_of_a_load_that_was_told_in_a_lost_step_is_told_again(
    engine: Engine, worker: WorkerSide
) -> None:
    bind(worker, waiting(engine, worker, 60))
    results, reports = ends(worker)  # and an exception while the step samples: vLLM has neither
    assert results == Results(finished={"b"})
    assert reports is not None
    assert engine.half.pending_work()
    assert told(engine, worker) == (Counter("b"), Counter())
    assert not engine.half.pending_work()
    counters = engine.half.counters()
    assert (counters["loads"], counters["loads_failed"]) == (1, 0)
    assert worker._told == {}


def test_a_request_of_a_real_engine_comes_to_its_end() -> None:
    """It waits for a load whose end was in the output of a step that raised."""
    with (
        LocalMooncake(storage_bytes=1 << 30) as store,
        tempfile.TemporaryFile("w+") as order,
        tempfile.TemporaryFile("w+") as log,
        tempfile.TemporaryFile("w+") as answer,
    ):
        task = {
            "model": str(conftest.model("llama")),
            "engine": harness._ENGINE | {"block_size": 32},
            "connector": harness.kvprism_connector(store.master),
            "prompts": [*harness.prompts(seed=23)[:1], *harness.prompts(seed=24)[:1]],
        }
        json.dump(task, order)
        order.seek(0)
        script = harness.SCRIPT.with_name("lost_step_run.py")
        files = (order.fileno(), log.fileno(), answer.fileno())
        status = harness.EngineProcess(script, *files, {}).wait(300)
        log.seek(0)
        assert status == 0, log.read()[-20000:]
        answer.seek(0)
        found = json.load(answer)
    assert found["raised"] == 1
    assert found["tokens"] == found["expected"]
    assert found["loaded_tokens"] == 608
    assert found["emptied"]


def test_what_is_told_again_may_be_lost_again(engine: Engine, worker: WorkerSide) -> None:
    bind(worker, waiting(engine, worker, 61))
    ends(worker)
    for _ in range(2):
        one_step(engine, [worker])  # in whose output the worker asks
        bind(worker, engine.step())
        results, _ = worker.take_results(), worker.take_reports()
        assert results == Results(finished={"b"})
    assert told(engine, worker) == (Counter("b"), Counter())


def test_steps_in_flight_are_not_lost(engine: Engine, worker: WorkerSide) -> None:
    """With asynchronous scheduling, or pipeline stages, outputs are taken steps later."""
    bind(worker, waiting(engine, worker, 62))
    flying = [ends(worker)[1]]
    for _ in range(6):
        bind(worker, engine.step())
        assert worker.take_results() == Results()
        flying.append(worker.take_reports())
        if len(flying) == 3:
            take(engine, [flying.pop(0)])
    take(engine, flying)
    assert told(engine, worker) == (Counter(), Counter())
    assert worker._told == {}


def test_a_word_that_was_taken_is_not_told_again_because_the_answer_is_lost(
    engine: Engine, worker: WorkerSide
) -> None:
    bind(worker, waiting(engine, worker, 63))
    take(engine, [ends(worker)[1]])
    assert engine.step().settled, "never bound"
    assert told(engine, worker) == (Counter(), Counter())
    assert worker._told == {}


def test_a_load_whose_plan_never_came_is_told_as_failed(engine: Engine, worker: WorkerSide) -> None:
    """The step fails before its metadata is bound."""
    waiting(engine, worker, 64)
    assert told(engine, worker) == (Counter("b"), Counter("b"))
    assert not worker._missed


def test_a_refusal_that_never_came_is_told(engine: Engine, worker: WorkerSide) -> None:
    one_step(engine, [worker])
    request = engine.request("c", TOKENS)
    engine.allocate(request, 2 * BLOCK, external=2 * BLOCK)
    assert engine.step().refused == ("c",)
    assert told(engine, worker) == (Counter("c"), Counter("c"))


def two_ranks(mooncake: LocalMooncake, described: Any, step: int) -> list[WorkerSide]:
    """Workers of one engine that have run the steps before that one."""
    made = [make_worker(mooncake, configuration(), described, ranks=2) for _ in range(2)]
    for each in made:
        each._step = step - 1
    return made


def aggregated(aggregator: Any, words: list[tuple[Results, ReportMetadata | None]]) -> Any:
    """What vLLM makes of the outputs of several ranks."""
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

    outputs = [
        ModelRunnerOutput.with_kv_conn_output_only(
            KVConnectorOutput(
                finished_recving=results.finished,
                failed_recving=results.failed,
                invalid_block_ids=results.failed_blocks,
                kv_connector_worker_meta=reports,
            )
        )
        for results, reports in words
    ]
    return aggregator.aggregate(outputs).kv_connector_output


def aggregated_step(
    engine: Engine,
    workers: list[WorkerSide],
    aggregator: Any,
    unread: list[tuple[Results, ReportMetadata | None]] | None = None,
) -> Any:
    """A step of two ranks; what the second has said before and is not read yet comes first."""
    metadata = engine.step()
    words = []
    for worker in workers:
        bind(worker, metadata)
        words.append((worker.take_results(), worker.take_reports()))
        worker.clear()
    if unread is not None:
        unread.append(words.pop())
        words.append(unread.pop(0))
    output = aggregated(aggregator, words)
    engine.half.take_output(output)
    return output


def test_only_the_rank_that_missed_a_step_tells_it_again(
    engine: Engine, worker: WorkerSide, mooncake: LocalMooncake, described: Any
) -> None:
    """vLLM counts what ranks tell: a word too much would end a later load of that request."""
    from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator

    metadata = waiting(engine, worker, 65)
    missing, other = two_ranks(mooncake, described, metadata.step)
    bind(other, metadata)
    # As vLLM's executor for several processes has it once the first rank has raised.
    unread = [ends(other)]
    aggregator = KVOutputAggregator(2)
    finished: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    for _ in range(8):
        output = aggregated_step(engine, [missing, other], aggregator, unread)
        finished.update(output.finished_recving or ())
        failed.update(output.failed_recving)
    assert (finished, failed) == (Counter("b"), Counter("b"))
    assert aggregator._recv_remaining_count == {}
    assert engine.half.counters()["loads"] == 1
    for each in (missing, other):
        each.close()


def test_of_several_ranks_none_tells_a_load_again(
    engine: Engine,
    worker: WorkerSide,
    mooncake: LocalMooncake,
    described: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """vLLM counts before its scheduler has the output: told again, a load counts as over while
    another rank still writes."""
    from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator

    stores: list[kvprism.ObjectStore] = []

    def hanging(*arguments: Any, **named: Any) -> kvprism.ObjectStore:
        stores.append(kvprism.inject_faults(open_store(*arguments, **named), hang=len(stores)))
        return stores[-1]

    metadata = waiting(engine, worker, 68)
    monkeypatch.setattr(worker_side, "open_store", hanging)
    workers = two_ranks(mooncake, described, metadata.step)
    for each in workers:
        bind(each, metadata)
    words = [ends(workers[0]), (workers[1].take_results(), workers[1].take_reports())]
    aggregator = KVOutputAggregator(2)
    # And an exception in vLLM's update_from_output.
    assert aggregated(aggregator, words).finished_recving is None
    with caplog.at_level(logging.ERROR, logger="vllm.kvprism"):
        for _ in range(4):
            assert aggregated_step(engine, workers, aggregator).finished_recving is None
    assert aggregator._recv_remaining_count == {"b": 1}
    errors = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert errors == [
        "kvprism: a step has failed whose output had ends of loads, which of several ranks none "
        "may tell again: start this engine anew; requests that may wait for ever: b"
    ]
    finished: Counter[str] = Counter()
    end = time.monotonic() + 60
    while not finished:
        assert time.monotonic() < end
        stores[1].release_hung()
        finished.update(aggregated_step(engine, workers, aggregator).finished_recving or ())
    assert finished == Counter("b")
    assert aggregator._recv_remaining_count == {}
    assert engine.half.counters()["loads"] == 1
    aggregated_step(engine, workers, aggregator)
    for each in workers:
        assert each._told == {}
        each.close()


def test_words_of_different_steps_in_one_output_count_as_lost() -> None:
    """Where a rank has failed, an executor may take what it says for another step."""
    arrivals = Arrivals()
    arrivals.take([StepEnd(5), StepEnd(4)])
    assert not arrivals.send(6, (), (), awaited=False).settled
    arrivals.take([StepEnd(6, (5,)), StepEnd(5, (4,))])
    assert dict(arrivals.send(7, (), (), awaited=False).settled) == {4: False, 5: False}


def test_what_is_told_again_after_caches_were_registered_anew_has_failed(
    engine: Engine, worker: WorkerSide, mooncake: LocalMooncake, described: Any
) -> None:
    bind(worker, waiting(engine, worker, 67))
    assert ends(worker)[0] == Results(finished={"b"})
    worker.close()
    anew = make_worker(mooncake, configuration(), described)
    anew.inherit(worker)
    assert told(engine, anew) == (Counter("b"), Counter("b"))
    anew.close()


def test_a_load_whose_kernels_cannot_be_waited_for_is_told_as_failed(
    engine: Engine, worker: WorkerSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    def token() -> Any:
        raise RuntimeError("the device is gone")

    metadata = waiting(engine, worker, 66)
    with monkeypatch.context() as patched:
        patched.setattr(worker, "_ready", SimpleNamespace(token=token))
        with pytest.raises(RuntimeError, match="the device is gone"):
            bind(worker, metadata)
    end = time.monotonic() + 60
    finished: Counter[str] = Counter()
    while not finished:
        assert time.monotonic() < end
        finished, failed = told(engine, worker)
    assert finished == Counter("b")
    assert failed <= Counter("b")
    assert told(engine, worker) == (Counter(), Counter())
    assert engine.half.counters()["loads_failed"] == 1
