"""A worker extension that compares the blocks of the cache with what the model wrote.

After each forward pass it notes a digest of every block that the pass has completed, for each
layer, under the tokens up to its end. Before a pass it looks at the valid blocks of requests that
begin with computed tokens, and now and then at those that run: the bytes must be some that a model
has left under those tokens, here or in an engine whose notes were read. Blocks are filled with a
pattern when they are handed out anew, so whatever is read or stored unwritten shows. It knows
nothing of kvprism but which blocks a plan loads into.

Where hits may end inside a block, a loaded block that ends one holds what some pass has left of
that block with at least the hit's tokens in it: what lies behind those is the writer's own.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

PATTERN = 1.0e4
SHOWN = 20
OFTEN = 4  # passes after which a running request is looked at again


def _digest(data: Any) -> bytes:
    return blake2b(data, digest_size=8).digest()


class _Group:
    """The layers of a KV cache group, and what a position of it is."""

    def __init__(self, number: int, group: Any, contexts: Any, blocks: int) -> None:
        self.number = number
        spec = group.kv_cache_spec
        self.spec = next(iter(getattr(spec, "kv_cache_specs", {"": spec}).values()))
        self.block_size = spec.block_size
        self.kind = type(self.spec).__name__
        self.window = getattr(self.spec, "sliding_window", None)
        self.layers = [(name, contexts[name].kv_cache) for name in group.layer_names]
        self.blocks = blocks

    def tensors(self) -> Iterator[Any]:
        for _, cache in self.layers:
            yield from cache if isinstance(cache, (list, tuple)) else [cache]

    def fill(self, block: int) -> None:
        for tensor in self.tensors():
            tensor.unflatten(0, (self.blocks, -1))[block].fill_(PATTERN)

    def digest(self, cache: Any, block: int) -> bytes:
        """Of a block's bytes in one layer, or in the tensors of one layer's state."""
        import torch

        return _digest(
            b"".join(
                tensor.unflatten(0, (self.blocks, -1))[block]
                .contiguous()
                .flatten()
                .view(torch.uint8)
                .numpy()
                .tobytes()
                for tensor in (cache if isinstance(cache, (list, tuple)) else [cache])
            )
        )

    def tails(self, table: list[int], end: int, unit: int) -> Iterator[tuple[int, int, bytes]]:
        """Layer, last position of a prefix and digest of the block in which a pass has ended, for
        each prefix that may end inside it."""
        if self.kind == "CircularBufferSpec" or unit >= self.block_size:
            return
        at = (end - 1) // self.block_size
        first = at * self.block_size
        prefixes = range(first + unit, end + 1, unit)
        if self.kind == "MambaSpec":  # a state is valid at its end alone
            prefixes = range(end, end + (end % unit == 0))
        if table[at] and prefixes:
            for layer, (_, cache) in enumerate(self.layers):
                digest = self.digest(cache, table[at])
                for prefix in prefixes:
                    yield layer, prefix - 1, digest

    def digests(
        self, table: list[int], first: int, end: int, *, passed: bool = False
    ) -> Iterator[tuple[int, int, bytes]]:
        """Layer, last position and digest of each block that is complete within (first, end].

        Kernels may interleave the positions of a block, so part of one says nothing. What a pass
        has written it has in all blocks of a window's group; a request that goes on from `end` has
        those that its next token sees.
        """
        if self.kind == "CircularBufferSpec":
            return
        begin = first // self.block_size
        if self.kind == "MambaSpec":
            if end % self.block_size:
                return
            begin = end // self.block_size - 1  # of a running request, only the newest is in place
        elif self.window is not None and not passed:
            begin = max(begin, max(0, end - self.window + 1) // self.block_size)
        for at in range(begin, end // self.block_size):
            if table[at]:
                for layer, (_, cache) in enumerate(self.layers):
                    yield layer, (at + 1) * self.block_size - 1, self.digest(cache, table[at])


class _Request:
    """What the extension knows of a request."""

    def __init__(self, tokens: list[int]) -> None:
        self.chain: list[bytes] = []
        self.append(tokens)
        self.tables: list[list[int]] = []
        self.passes = 0
        self.valid = 0

    def append(self, tokens: list[int]) -> None:
        last = self.chain[-1] if self.chain else b""
        for token in tokens:
            last = _digest(last + token.to_bytes(8, "little", signed=True))
            self.chain.append(last)


class _Watch:
    def __init__(self, worker: Any) -> None:
        runner = worker.model_runner
        config = runner.kv_cache_config
        contexts = runner.vllm_config.compilation_config.static_forward_context
        self.rank = worker.rank
        self.groups = [
            _Group(number, group, contexts, config.num_blocks)
            for number, group in enumerate(config.kv_cache_groups)
        ]
        self.requests: dict[str, _Request] = {}
        # Tokens, group, layer and "block" or "tail".
        self.known: dict[tuple[bytes, int, int, str], set[bytes]] = {}
        self.unit = getattr(config, "hash_block_size", None) or 1 << 30
        self.loaded: set[int] = set()  # destinations that nobody else was given since
        kinds = ("written", "compared", "again", "tails", "filled", "wrong")
        self.counts = dict.fromkeys(kinds, 0)
        self.wrong: list[str] = []
        self._execute, self._sample = runner.execute_model, runner.sample_tokens
        runner.execute_model, runner.sample_tokens = self.execute_model, self.sample_tokens
        self._step: Any = None
        self._now: set[bytes] = set()  # prefixes that the pass itself writes, and others share

    def read(self, path: Path) -> None:
        if path.exists():
            for key, digests in pickle.loads(path.read_bytes()).items():
                self.known.setdefault(key, set()).update(digests)

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        self._before(scheduler_output)
        result = self._execute(scheduler_output, *args, **kwargs)
        self._after(scheduler_output)
        self._step = scheduler_output
        if result is not None:
            self._sampled(result)
        return result

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        result = self._sample(*args, **kwargs)
        if result is not None:
            self._sampled(result)
        return result

    def _sampled(self, result: Any) -> None:
        step, self._step = self._step, None
        sampled = getattr(result, "sampled_token_ids", None)
        if step is None or sampled is None:
            return
        for at, name in enumerate(result.req_ids):
            request = self.requests.get(name)
            fresh = [int(token) for token in sampled[at]] if at < len(sampled) else []
            if request is not None and fresh:
                # Of a request that was preempted, some are known already.
                del request.chain[request.valid :]
                request.append(fresh)

    def _before(self, output: Any) -> None:
        for name in output.finished_req_ids:
            self.requests.pop(name, None)
        metadata = output.kv_connector_metadata
        if getattr(metadata, "plan", b""):
            self._fill_destinations(metadata)
        for new in output.scheduled_new_reqs:
            tokens = new.prefill_token_ids or new.prompt_token_ids
            self.requests[new.req_id] = _Request(list(tokens))
        self._now.clear()
        for name, first in self._computed(output).items():
            end = first + output.num_scheduled_tokens[name]
            self._now.update(self.requests[name].chain[first:end])
        for new in output.scheduled_new_reqs:
            request = self.requests[new.req_id]
            self._begin(new.req_id, request, new.block_ids, new.num_computed_tokens)
            self._compare_tails(new.req_id, request, new.num_computed_tokens, output)
        cached = output.scheduled_cached_reqs
        for name, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            request = self.requests[name]
            if name in cached.resumed_req_ids:
                self._begin(name, request, blocks, computed)
                self._compare_tails(name, request, computed, output)
                continue
            for group, table, more in zip(
                self.groups, request.tables, blocks or [[]] * len(self.groups), strict=True
            ):
                table.extend(more)
                for block in more:
                    self._fill(group, block)
            request.passes += 1
            if request.passes % OFTEN == 0:
                self._compare(name, request, computed, "again")

    def _begin(self, name: str, request: _Request, blocks: Any, computed: int) -> None:
        request.tables = [list(table) for table in blocks]
        for group, table in zip(self.groups, request.tables, strict=True):
            ring = group.kind == "CircularBufferSpec"
            for at, block in enumerate(table):
                if ring or at * group.block_size >= computed:
                    self._fill(group, block)
        if computed:
            self._compare(name, request, computed, "compared")

    def _fill(self, group: _Group, block: int) -> None:
        if block:
            group.fill(block)
            self.counts["filled"] += 1
            self.loaded.discard(block)

    def _fill_destinations(self, metadata: Any) -> None:
        from kvprism import StepPlan

        plan = StepPlan.decode(metadata.plan)
        for job, _ in metadata.loads:
            for block in plan.blocks(job):
                # Whose block it is does not matter here: all groups share one pool.
                for group in self.groups:
                    group.fill(block)
                self.counts["filled"] += 1
                self.loaded.add(block)

    def _compare(self, name: str, request: _Request, computed: int, what: str) -> None:
        for group, table in zip(self.groups, request.tables, strict=True):
            for layer, position, digest in group.digests(table, 0, computed):
                if position >= len(request.chain) or request.chain[position] in self._now:
                    continue
                key = (request.chain[position], group.number, layer, "block")
                self._look(key, digest, what, f"{name}, block to {position} of {computed}")

    def _compare_tails(self, name: str, request: _Request, computed: int, output: Any) -> None:
        """Of a request that begins inside a block, which was loaded and perhaps is copied next."""
        sources = {each[1]: each[0] for each in output.kv_cache_block_copies or ()}
        for group, table in zip(self.groups, request.tables, strict=True):
            if group.kind == "CircularBufferSpec" or computed % group.block_size == 0:
                continue
            block = table[computed // group.block_size]
            block = sources.get(block, block)
            if block not in self.loaded:
                continue
            for layer, (_, cache) in enumerate(group.layers):
                key = (request.chain[computed - 1], group.number, layer, "tail")
                digest = group.digest(cache, block)
                self._look(key, digest, "tails", f"{name}, block that {computed} tokens end in")

    def _look(self, key: tuple[bytes, int, int, str], digest: bytes, what: str, place: str) -> None:
        self.counts[what] += 1
        if digest in self.known.get(key, ()):
            return
        self.counts["wrong"] += 1
        if len(self.wrong) < SHOWN:
            _, number, layer, _ = key
            state = "other bytes" if key in self.known else "never computed"
            self.wrong.append(
                f"rank {self.rank}, {what}, request {place}, group {number}, "
                f"{self.groups[number].layers[layer][0]}: {state}"
            )

    @staticmethod
    def _computed(output: Any) -> dict[str, int]:
        cached = output.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        return computed | {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}

    def _after(self, output: Any) -> None:
        for name, first in self._computed(output).items():
            request = self.requests[name]
            end = request.valid = first + output.num_scheduled_tokens[name]
            for group, table in zip(self.groups, request.tables, strict=True):
                for kind, found in (
                    ("block", group.digests(table, first, end, passed=True)),
                    ("tail", group.tails(table, end, self.unit)),
                ):
                    for layer, position, digest in found:
                        if position < len(request.chain):
                            key = (request.chain[position], group.number, layer, kind)
                            self.known.setdefault(key, set()).add(digest)
                            self.counts["written"] += kind == "block"


class ByteWatch:
    """Mixed into vLLM's worker by ``worker_extension_cls``."""

    def byte_watch_start(self, path: str) -> None:
        """Begins, with the notes of an earlier engine if there are any."""
        self._byte_watch = _Watch(self)
        self._byte_watch_path = Path(f"{path}.{self._byte_watch.rank}")
        self._byte_watch.read(self._byte_watch_path)

    def byte_watch_report(self) -> dict[str, Any]:
        """Counts so far, and the first differences; leaves the notes for the next engine."""
        watch = self._byte_watch
        self._byte_watch_path.write_bytes(pickle.dumps(watch.known))
        return {**watch.counts, "first": watch.wrong}
