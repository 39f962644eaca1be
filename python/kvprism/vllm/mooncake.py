"""Clients of Mooncake, as the options describe them."""

from __future__ import annotations

from .._core import ObjectStore, mooncake_store
from .options import Options


def open_store(options: Options, *, moves: bool = False, lends: bool = False) -> ObjectStore:
    """Connects a client of its own.

    Args:
        options: Of the connector.
        moves: Whether bytes go through it; one that only asks needs no staging buffer.
        lends: Whether it adds a segment to the pool, in mode ``embedded``. Such a client is for
            nothing else: one that moves or asks is replaced when a call leaves it in doubt, and
            its segment would go with it.

    Raises:
        Error: What is wrong with the options, the installed Mooncake or the master.
    """
    return mooncake_store(
        master=options.master_server_address,
        local_hostname=options.local_hostname,
        metadata_server=options.metadata_server or "P2PHANDSHAKE",
        protocol=options.protocol,
        rdma_devices=[name.strip() for name in options.device_name.split(",") if name.strip()],
        global_segment_size=options.global_segment_size if lends else 0,
        local_buffer_size=options.local_buffer_size if moves else 0,
        connect_timeout_seconds=options.connect_timeout_seconds,
        setup_timeout_seconds=options.setup_timeout_seconds,
        unknown_build=options.unknown_build,
    )
