"""What really lies in the store, by content: read with other means than those that wrote it."""

from __future__ import annotations

import contextlib
import os
import tempfile
import urllib.parse
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from .. import sim
from .._core import MemoryPool, Projection, UnavailableError
from ..local_mooncake import open_local
from .workload import Variant

# Reads one object by its name.
Read = Callable[[str], bytes]
_STAGING_BYTES = 64 << 20


@dataclass
class Stored:
    """Objects of one variant.

    Attributes:
        objects: Number by store index.
        bytes: Sum of sizes by store index.
        wrong_size: Names of objects that are not as long as their group's objects.
        ring_positions: Ring positions found in them.
    """

    objects: dict[int, int] = field(default_factory=dict)
    bytes: dict[int, int] = field(default_factory=dict)
    wrong_size: list[str] = field(default_factory=list)
    ring_positions: int = 0


def ring_detector(projection: Projection, texts: Iterable[list[int]]) -> sim.RingDetector:
    """Knows what rings hold while these tokens are computed."""
    detector = sim.RingDetector(projection)
    for tokens in texts:
        detector.add(np.asarray(tokens, dtype=np.uint32))
    return detector


def audit(variant: Variant, keys: Iterable[str], read: Read, rings: sim.RingDetector) -> Stored:
    """Reads every object of a variant and counts.

    Args:
        variant: Whose objects to look at; those of others are left out.
        keys: Names of all objects in the store.
        read: Reads one of them.
        rings: Recognises ring bytes.
    """
    sizes = {
        int(group.store_index): group.object_bytes
        for group in map(variant.projection.group, variant.projection.store_group_ids)
        if group.store_index is not None
    }
    found = Stored(dict.fromkeys(sizes, 0), dict.fromkeys(sizes, 0))
    for key in keys:
        if variant.schema.fingerprint not in key:
            continue
        content = read(key)
        index = int(key.split("/")[-2])
        if sizes.get(index) != len(content):
            found.wrong_size.append(key)
        found.objects[index] = found.objects.get(index, 0) + 1
        found.bytes[index] = found.bytes.get(index, 0) + len(content)
        found.ring_positions += rings.count(content)
    return found


def pool_objects(pool: MemoryPool) -> tuple[list[str], Read]:
    """Names of all objects in a pool, and a way to read them."""

    def read(key: str) -> bytes:
        content = pool.read(key)
        assert content is not None, key
        return content

    return [key for key, _ in pool.objects()], read


@contextlib.contextmanager
def _stderr_aside() -> Iterator[Callable[[], str]]:
    """Keeps what native code writes to stderr meanwhile, and gives it to whoever asks."""
    with tempfile.TemporaryFile() as file:
        saved = os.dup(2)
        os.dup2(file.fileno(), 2)

        text = ""
        try:
            yield lambda: text
        finally:
            text = os.pread(file.fileno(), 1 << 20, 0).decode(errors="replace")
            os.dup2(saved, 2)
            os.close(saved)


def mooncake_objects(master: str, metrics: str) -> tuple[list[str], Read]:
    """Names of all objects in a Mooncake, told by its master, and a way to read them.

    Nothing of kvprism takes part: Mooncake's own Python client reads.

    Args:
        master: Address of the master.
        metrics: Address of the master's HTTP port.
    """
    url = urllib.parse.urlunsplit(("http", metrics, "/get_all_keys", "", ""))
    with open_local(url, timeout=10) as answer:
        keys = answer.read().decode().split()
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # read when the library is opened
    with _stderr_aside() as log:
        from mooncake.store import MooncakeDistributedStore

        client = MooncakeDistributedStore()
        status = client.setup("127.0.0.1", "P2PHANDSHAKE", 0, _STAGING_BYTES, "tcp", "", master)
    if status != 0:
        raise UnavailableError(f"Mooncake's own client cannot be set up: {status}\n{log()}")
    return keys, client.get
