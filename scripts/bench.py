#!/usr/bin/env python3
"""bench.py PROGRAM [ARGUMENT...]: runs a benchmark beside a Mooncake with a pool of 1 GiB."""

from __future__ import annotations

import os
import subprocess
import sys

from kvprism.local_mooncake import LocalMooncake

POOL_BYTES = 1 << 30
# The transfer engine would otherwise look for other transports, and speak of them.
ENVIRONMENT = {
    "MC_FORCE_TCP": "1",
    "MC_TCP_BIND_ADDRESS": "127.0.0.1",
    "MC_LOG_LEVEL": "ERROR",
}


def main(arguments: list[str]) -> int:
    if not arguments:
        print(__doc__)
        return 2
    with LocalMooncake(storage_bytes=POOL_BYTES) as mooncake:
        command = [*arguments, "--mooncake", mooncake.master]
        return subprocess.run(command, env=os.environ | ENVIRONMENT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
