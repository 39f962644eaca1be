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
from pathlib import Path
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
from test_halves import (
    BLOCK,
    TOKENS,
    Engine,
    configuration,
    describe,
    finish_purge,
    make_worker,
    run,
    saved_blocks,
)

ENGINE = harness._ENGINE | {"block_size": 32}
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
def purging(mooncake: LocalMooncake, described: Any) -> Iterator[Engine]:
    """An engine whose purges are over soon."""
    made = Engine(mooncake, described, purge_settle_seconds=0.01)
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


def run_script(name: str, task: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """What an engine's process answers, and its log."""
    task = {"model": str(conftest.model("llama")), "engine": ENGINE} | task
    with (
        tempfile.TemporaryFile("w+") as order,
        tempfile.TemporaryFile("w+") as log,
        tempfile.TemporaryFile("w+") as answer,
    ):
        json.dump(task, order)
        order.seek(0)
        files = (order.fileno(), log.fileno(), answer.fileno())
        status = harness.EngineProcess(harness.SCRIPT.with_name(name), *files, {}).wait(300)
        log.seek(0)
        said = log.read()
        assert status == 0, said[-20000:]
        answer.seek(0)
        return json.load(answer), said


def test_a_request_of_a_real_engine_comes_to_its_end() -> None:
    """It waits for a load whose end was in the output of a step that raised."""
    with LocalMooncake(storage_bytes=1 << 30) as store:
        task = {
            "connector": harness.kvprism_connector(store.master, purge_settle_seconds=0.01),
            "prompts": [*harness.prompts(seed=23)[:1], *harness.prompts(seed=24)[:1]],
        }
        found, said = run_script("lost_step_run.py", task)
    assert found["raised"] == 1
    assert found["tokens"] == found["expected"]
    assert found["loaded_tokens"] == 608
    assert found["emptied"]
    before, lost, reset = found["saved"]
    assert before == lost < reset
    assert said.count(LOST) == 1


@pytest.mark.soak  # three engines of its own
def test_what_follows_a_lost_token_is_not_saved_for_the_next_turn(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    with LocalMooncake(storage_bytes=1 << 30) as store:
        connector = harness.kvprism_connector(store.master)
        task = {"connector": connector, "prompt": harness.prompts(seed=25)[0]}
        found, said = run_script("shifted_step_run.py", task)
        whole, shifted, turn = found["whole"], found["shifted"], found["turn"]
        pairs = enumerate(zip(whole, shifted, strict=True))
        at = next(at for at, (one, other) in pairs if one != other)
        assert shifted[at : at + 20] == whole[at + 1 : at + 21], "one of the tokens is missing"
        assert found["cached"] >= len(task["prompt"]) + 64, "vLLM's own cache has what follows"
        assert said.count(LOST) == 1
        before, after = found["saved"]
        assert before == after
        model = conftest.model("llama")
        with harness.LiveEngine(model, engine=ENGINE, watch=notes) as cold:
            expected = cold.serve([turn])
        checked = connector | {
            "kv_connector": "CheckedConnector",
            "kv_connector_module_path": "faulty",
        }
        with harness.LiveEngine(model, engine=ENGINE, connector=checked, watch=notes) as warm:
            answer = warm.serve([turn])
    (rank,) = answer["watch"]
    assert rank["wrong"] == 0, rank["first"]
    assert rank["compared"] > 0
    assert answer["hits"] == len(task["prompt"]) // 32 * 32
    assert harness.tokens_of(answer) == harness.tokens_of(expected)


def test_what_is_told_again_may_be_lost_again(engine: Engine, worker: WorkerSide) -> None:
    bind(worker, waiting(engine, worker, 61))
    ends(worker)
    for _ in range(2):
        one_step(engine, [worker])  # in whose output the worker asks
        bind(worker, engine.step())
        results, _ = worker.take_results(), worker.take_reports()
        assert results == Results(finished={"b"})
    assert told(engine, worker) == (Counter("b"), Counter())


class Failing:
    """A StoreScheduler in which one call of report() raises."""

    def __init__(self, core: Any) -> None:
        self._core = core
        self.failed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def report(self, reports: bytes) -> None:
        if not self.failed:
            self.failed = True
            raise MemoryError
        self._core.report(reports)


def test_an_output_that_could_not_be_taken_is_told_again(
    engine: Engine, worker: WorkerSide
) -> None:
    """The exception ends vLLM's call as well, before it counts the ends of loads."""
    bind(worker, waiting(engine, worker, 69))
    results, reports = ends(worker)
    assert results == Results(finished={"b"})
    engine.half._core = Failing(engine.half._core)
    with pytest.raises(MemoryError):
        take(engine, [reports])
    assert told(engine, worker) == (Counter("b"), Counter())
    assert not engine.half.pending_work()
    assert worker._told == {}


def output(
    engine: Engine, worker: WorkerSide, **scheduled: int
) -> tuple[StepMetadata, list[ReportMetadata | None]]:
    """A step that computes tokens, and what its worker says in it."""
    metadata = engine.step(**scheduled)
    bind(worker, metadata)
    worker.take_results()
    reports = worker.take_reports()
    worker.clear()
    assert reports is not None, "it is answered"
    assert [end.step for end in reports.ends] == [metadata.step]
    return metadata, [reports]


def settle(engine: Engine, worker: WorkerSide) -> None:
    """Steps without tokens until everything has been told."""
    end = time.monotonic() + 60
    while engine.half.pending_work() or worker.counters()["jobs_alive"]:
        assert time.monotonic() < end
        one_step(engine, [worker])


def planned(engine: Engine, worker: WorkerSide, name: str, first: int) -> list[int]:
    """Blocks that are saved of a new request, which is over afterwards."""
    tokens = [first, *TOKENS[1:]]
    request = engine.request(name, tokens)
    engine.allocate(request, len(tokens))
    metadata, reports = output(engine, worker, **{name: len(tokens)})
    take(engine, reports)
    settle(engine, worker)
    engine.free(request)
    return saved_blocks(metadata.plan) if metadata.plan else []


def decoding(engine: Engine, worker: WorkerSide, first: int) -> Any:
    """A request whose prompt is saved."""
    request = engine.request("a", [first, *TOKENS[1:]])
    engine.allocate(request, 6 * BLOCK)
    take(engine, output(engine, worker, a=len(TOKENS))[1])
    settle(engine, worker)
    request.num_computed_tokens = len(TOKENS)
    request.append_output_token_ids(7)
    return request


LOST = (
    "kvprism: the output of a step is lost, and vLLM may take tokens for others from then on: "
    "nothing is saved any more before the requests of that time have ended, and "
    "reset_prefix_cache with reset_connector after that"
)


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno == logging.ERROR]


@pytest.mark.parametrize("in_flight", [1, 2])
def test_after_a_step_whose_output_is_lost_nothing_is_saved_before_a_reset(
    purging: Engine, worker: WorkerSide, caplog: pytest.LogCaptureFixture, in_flight: int
) -> None:
    """Its worker was done with it. vLLM, which schedules ahead, has a place for its token, and
    puts that of the next step there."""
    request = decoding(purging, worker, 70)
    _, *flying = [output(purging, worker, a=1)[1] for _ in range(1 + in_flight)]
    assert purging.half._may_save()
    with caplog.at_level(logging.ERROR, logger="vllm.kvprism"):
        for each in flying:
            take(purging, each)
    assert errors(caplog) == [LOST]
    assert planned(purging, worker, "b", 71) == []
    purging.half.purge()
    finish_purge(purging, worker)
    assert planned(purging, worker, "c", 71) == [], "its blocks are in vLLM's own cache"
    purging.free(request)
    assert planned(purging, worker, "d", 71) == []
    purging.half.purge()
    finish_purge(purging, worker)
    assert len(planned(purging, worker, "e", 71)) == 4
    assert errors(caplog) == [LOST]


def test_a_request_that_outlives_a_lost_output_and_a_reset_is_not_trusted(
    purging: Engine, worker: WorkerSide, caplog: pytest.LogCaptureFixture
) -> None:
    """A reset preempts it, and vLLM still waits for its share of that output."""
    request = decoding(purging, worker, 72)
    output(purging, worker, a=1)
    request.num_computed_tokens = 0
    purging.pool.free_blocks(reversed(purging.tables.pop("a")))
    purging.half.purge()
    finish_purge(purging, worker)
    with caplog.at_level(logging.ERROR, logger="vllm.kvprism"):
        assert len(planned(purging, worker, "b", 73)) == 4, "nobody can know of it yet"
        assert errors(caplog) == [LOST]
        purging.allocate(request, len(TOKENS))
        purging.half.purge()
        finish_purge(purging, worker)
        assert planned(purging, worker, "c", 73) == []
        purging.free(request)
        purging.half.purge()
        finish_purge(purging, worker)
        assert len(planned(purging, worker, "d", 73)) == 4
    assert errors(caplog) == [LOST]


def test_what_was_lost_before_a_reset_with_its_requests_matters_to_nobody(
    purging: Engine, worker: WorkerSide, caplog: pytest.LogCaptureFixture
) -> None:
    request = decoding(purging, worker, 74)
    output(purging, worker, a=1)
    purging.free(request)
    purging.half.purge()
    finish_purge(purging, worker)
    with caplog.at_level(logging.ERROR, logger="vllm.kvprism"):
        assert len(planned(purging, worker, "b", 75)) == 4
        assert len(planned(purging, worker, "c", 76)) == 4
    assert errors(caplog) == []


def test_a_step_without_tokens_may_be_lost(
    engine: Engine, worker: WorkerSide, caplog: pytest.LogCaptureFixture
) -> None:
    bind(worker, engine.step())
    assert worker.take_reports() is None
    with caplog.at_level(logging.ERROR, logger="vllm.kvprism"):
        assert len(planned(engine, worker, "a", 77)) == 4
        assert len(planned(engine, worker, "b", 78)) == 4
    assert errors(caplog) == []


def test_who_saves_nothing_asks_for_no_answer(engine: Engine, worker: WorkerSide) -> None:
    engine.half._saves = False
    engine.allocate(engine.request("a", [79, *TOKENS[1:]]), len(TOKENS))
    metadata = engine.step(a=len(TOKENS))
    assert metadata.plan == b""
    assert not metadata.answer
    bind(worker, metadata)
    assert worker.take_reports() is None


def test_what_is_remembered_of_steps_in_flight_does_not_grow() -> None:
    arrivals = Arrivals()
    for step in range(1, 100):
        assert arrivals.send(step, (), (), computed=("a",)).answer
        assert arrivals.take([StepEnd(step - 2)] if step > 2 else []) == {}
    assert sorted(arrivals._computing) == [98, 99]
    assert arrivals.take([StepEnd(99)]) == {98: ("a",)}
    assert not arrivals.send(100, (), ()).answer
    for step in range(101, 3000):  # and nobody answers
        arrivals.send(step, (), (), computed=("a",))
    assert len(arrivals._computing) == 1024


def test_a_step_that_tells_of_its_end_alone_costs_no_statistics(engine: Engine) -> None:
    engine.half.take_stats()
    take(engine, [ReportMetadata(b"", (StepEnd(1),))])
    assert not engine.half._stirred


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
    for step in (4, 5):
        arrivals.send(step, (), (), computed=(f"of {step}",))
    lost = arrivals.take([StepEnd(5), StepEnd(4)])
    assert lost == {4: ("of 4",), 5: ("of 5",)}, "vLLM has taken one's tokens for the other's"
    assert not arrivals.send(6, (), ()).settled
    assert arrivals.take([StepEnd(6, (5,)), StepEnd(5, (4,))]) == {}
    assert dict(arrivals.send(7, (), ()).settled) == {4: False, 5: False}


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
