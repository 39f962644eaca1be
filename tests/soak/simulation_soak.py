"""The simulated world for some minutes; arguments go to kvprism_simulation."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from records import record

PROGRAM = Path(__file__).resolve().parents[2] / "build/release/bin/kvprism_simulation"
# What the program says at its end.
TOTALS = re.compile(
    r"^(?P<events>\d+) events, (?P<requests>\d+) requests .* (?P<jobs>\d+) jobs, "
    r"(?P<loads>\d+) loads, (?P<objects_checked>\d+) objects checked",
    re.MULTILINE,
)
SPEED = re.compile(
    r"^(?P<seeds>\d+) seeds in (?P<minutes>[\d.]+) minutes, "
    r"(?P<events_a_minute>\d+) events a minute",
    re.MULTILINE,
)
VERDICT = re.compile(r"^(?P<passed>\d+) passed, (?P<failed>\d+) failed", re.MULTILINE)


def main() -> int:
    """Runs it and notes its figures."""
    command = [str(PROGRAM), "--soak", *sys.argv[1:]]
    said = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        for line in program.stdout:
            print(line, end="", flush=True)
            said.append(line)
    text = "".join(said)
    found: dict[str, float] = {}
    for part in (TOTALS, SPEED, VERDICT):
        match = part.search(text)
        assert match is not None, f"no line like {part.pattern}"
        found |= {name: float(value) for name, value in match.groupdict().items()}
    numbers = {name: int(value) if value.is_integer() else value for name, value in found.items()}
    record("soak-simulation", arguments=sys.argv[1:], **numbers)
    return program.returncode


if __name__ == "__main__":
    sys.exit(main())
