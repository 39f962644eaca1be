"""Clients of Mooncake, as the options describe them."""

from __future__ import annotations

from .._core import ObjectStore, mooncake_store
from .options import Options


def open_store(options: Options, *, gives_memory: bool) -> ObjectStore:
    """Connects a client of its own.

    Args:
        options: Of the connector.
        gives_memory: Whether this process adds its segment to the pool, in mode ``embedded``.

    Raises:
        Error: What is wrong with the options, the installed Mooncake or the master.
    """
    segment = options.global_segment_size if gives_memory else 0
    return mooncake_store(
        master=options.master_server_address,
        local_hostname=options.local_hostname,
        metadata_server=options.metadata_server or "P2PHANDSHAKE",
        protocol=options.protocol,
        rdma_devices=[name.strip() for name in options.device_name.split(",") if name.strip()],
        global_segment_size=segment,
        local_buffer_size=options.local_buffer_size if gives_memory else 0,
        connect_timeout_seconds=options.connect_timeout_seconds,
        setup_timeout_seconds=options.setup_timeout_seconds,
        unknown_build=options.unknown_build,
    )
