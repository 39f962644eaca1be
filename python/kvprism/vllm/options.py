"""Options of the connector: one table of names, types, defaults and units.

They come, in this order, from ``kv_connector_extra_config``, from the JSON file that
``MOONCAKE_CONFIG_PATH`` names, from environment variables, and from the defaults. Names of vLLM's
built-in connector are taken where they mean the same.
"""

from __future__ import annotations

import logging
import math
import os
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .json_file import read_object
from .problems import Problems, suggestion

logger = logging.getLogger("vllm.kvprism")

MIB = 1 << 20
_MIN_SEGMENT = 16 * MIB


@dataclass(frozen=True)
class Option:
    """One row of the table in docs/vllm.md."""

    name: str
    kind: str
    """bool, int, bytes, seconds, text or choice."""
    default: Any
    unit: str
    meaning: str
    least: float | None = None
    choices: tuple[str, ...] = ()
    file_key: bool = False
    """Also a key of the Mooncake JSON file."""
    environment: str = ""


OPTIONS: tuple[Option, ...] = (
    Option(
        "master_server_address",
        "text",
        "",
        "host:port",
        "Address of `mooncake_master`. Required.",
        file_key=True,
    ),
    Option(
        "metadata_server",
        "text",
        "P2PHANDSHAKE",
        "",
        "`P2PHANDSHAKE`, or a URL with a scheme.",
        file_key=True,
    ),
    Option(
        "protocol",
        "choice",
        "tcp",
        "",
        "How bytes move.",
        choices=("tcp", "rdma"),
        file_key=True,
    ),
    Option(
        "device_name",
        "text",
        "",
        "",
        "RDMA devices, separated by commas; Mooncake chooses when empty.",
        file_key=True,
    ),
    Option(
        "mode",
        "choice",
        "standalone-store",
        "",
        "`standalone-store`: storage processes of their own hold the objects. `embedded`: each "
        "worker gives `global_segment_size` to the pool, and its part is gone when it ends.",
        choices=("standalone-store", "embedded"),
        file_key=True,
    ),
    Option(
        "global_segment_size",
        "bytes",
        0,
        "bytes",
        "What each worker gives to the pool, at least 16 MiB; only in mode `embedded`.",
        least=0,
        file_key=True,
    ),
    Option(
        "local_buffer_size",
        "bytes",
        0,
        "bytes",
        "Mooncake's staging buffer, 0 or at least 16 MiB.",
        least=0,
        file_key=True,
    ),
    Option(
        "local_hostname",
        "text",
        "",
        "",
        "Under which other clients reach this host; found when empty.",
        environment="MOONCAKE_REQUESTER_LOCAL_HOSTNAME",
    ),
    Option(
        "cache_prefix",
        "text",
        "",
        "",
        "Namespace: two of them never share an object. Change it when weights change under one "
        "name.",
    ),
    Option(
        "key_schema",
        "choice",
        "kvprism",
        "",
        "How objects are named. `vllm`: as the built-in connector names them, to share a pool with "
        "it; such names say less about what the bytes mean.",
        choices=("kvprism", "vllm"),
    ),
    Option("enable_lookup", "bool", True, "", "Look up and load. False: only save."),
    Option(
        "save_decode_cache",
        "bool",
        False,
        "",
        "Also save blocks of generated tokens. A `kv_consumer` saves nothing without it.",
    ),
    Option(
        "load_failure_policy",
        "choice",
        "recompute",
        "",
        "What vLLM does when a load fails. `fail` ends the request with an error. That is vLLM's "
        'own default, so an explicit `"kv_load_failure_policy": "fail"` cannot be told from it '
        "and becomes what stands here.",
        choices=("recompute", "fail"),
    ),
    Option(
        "lookup_timeout_seconds",
        "seconds",
        0.5,
        "seconds",
        "A later answer counts as a miss.",
        least=0.001,
    ),
    Option(
        "load_timeout_seconds",
        "seconds",
        20.0,
        "seconds",
        "Bound of a load's outcome; the rest is computed.",
        least=0.001,
    ),
    Option(
        "save_timeout_seconds",
        "seconds",
        60.0,
        "seconds",
        "Bound of a save's outcome.",
        least=0.001,
    ),
    Option(
        "quarantine_after_seconds",
        "seconds",
        120.0,
        "seconds",
        "Blocks that Mooncake may still touch this long after the outcome are set aside, and a "
        "request that waits for them gets others.",
        least=0.001,
    ),
    Option(
        "backoff_after",
        "int",
        3,
        "saves",
        "So many refused saves in a row (pool full, away or late) pause saving.",
        least=1,
    ),
    Option("backoff_seconds", "seconds", 5.0, "seconds", "Length of that pause.", least=0.001),
    Option(
        "max_held_percent",
        "int",
        50,
        "percent",
        "Nothing is saved while jobs hold more of the pool's blocks: a store slower than prefill "
        "must not take the engine's memory.",
        least=1,
    ),
    Option(
        "saved_fresh_for_seconds",
        "seconds",
        60.0,
        "seconds",
        "What was saved is not saved again for so long.",
        least=0.001,
    ),
    Option(
        "purge_settle_seconds",
        "seconds",
        12.0,
        "seconds",
        "After a reset the store is not used for at least so long: Mooncake's lease and a little.",
        least=0.001,
    ),
    Option(
        "shutdown_timeout_seconds",
        "seconds",
        10.0,
        "seconds",
        "How long a worker waits at its end for saves in flight, as far as vLLM lets it: workers "
        "in processes of their own get `VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS` (5).",
        least=0.0,
    ),
    Option(
        "connect_timeout_seconds",
        "seconds",
        2.0,
        "seconds",
        "Bound for reaching the master's port.",
        least=0.001,
    ),
    Option(
        "setup_timeout_seconds",
        "seconds",
        15.0,
        "seconds",
        "Bound for setting a Mooncake client up.",
        least=0.001,
    ),
    Option(
        "max_segments_per_call",
        "int",
        2048,
        "segments",
        "Pieces of memory per call, if Mooncake's TCP queue is raised: 512 where it is not.",
        least=1,
    ),
    Option("max_bytes_per_call", "bytes", 64 * MIB, "bytes", "Bytes per call.", least=1),
    Option(
        "max_gets_in_flight",
        "int",
        4,
        "calls",
        "Loading calls at a time.",
        least=1,
        environment="VLLM_MOONCAKE_LOAD_RECV_THREADS",
    ),
    Option("max_puts_in_flight", "int", 2, "calls", "Saving calls at a time.", least=1),
    Option(
        "max_bytes_in_flight",
        "bytes",
        1024 * MIB,
        "bytes",
        "Of calls that Mooncake has not let go of. Beyond it saves wait, and loads do not; "
        "0 for no limit.",
        least=0,
    ),
    Option(
        "control_file",
        "text",
        "",
        "",
        'A file with `{"mode": "read_only"}` (or `read_write`, `write_only`, `off`), read once a '
        "second by the scheduler's process: what the store is used for from the next step on.",
    ),
    Option(
        "unknown_build",
        "choice",
        "refuse",
        "",
        "`probe` tries a Mooncake build that is not known in a process of its own first.",
        choices=("refuse", "probe"),
    ),
)

_BY_NAME = {option.name: option for option in OPTIONS}


@dataclass(frozen=True)
class Accepted:
    """A key of the built-in connector that needs nothing done, or that cannot be honoured."""

    name: str
    fine: Callable[[Any], bool]
    meaning: str
    expected: str


def _off(value: Any) -> bool:
    return value in (None, "", False, 0) or str(value).lower() == "false"


ACCEPTED: tuple[Accepted, ...] = (
    Accepted("load_async", lambda v: v is True, "Loads never block a step.", "True"),
    Accepted(
        "lookup_async",
        lambda v: isinstance(v, bool),
        "Lookups never block a step; the value changes nothing.",
        "True or False",
    ),
    Accepted(
        "lookup_rpc_port",
        lambda v: isinstance(v, (int, str)),
        "There is no lookup server; the value changes nothing.",
        "a number",
    ),
    Accepted("enable_group_semantics", _off, "Not available.", "False or left out"),
    Accepted("enable_store_tp_lcm", _off, "Not available.", "False or left out"),
    Accepted(
        "prefill_tp_sizes",
        lambda v: True,
        "Read with `enable_store_tp_lcm` only; the value changes nothing.",
        "anything",
    ),
    Accepted("store_tp_size", _off, "Not available.", "left out"),
    Accepted(
        "enable_cross_layers_blocks",
        lambda v: isinstance(v, bool) or str(v).lower() in ("true", "false"),
        "It keeps the built-in connector from cutting layers for other tensor sizes, which kvprism "
        "never does; the value changes nothing.",
        "True or False",
    ),
    Accepted("custom_mem_pool", _off, "Not available.", "left out"),
    Accepted("preferred_segment", _off, "Not available.", "left out"),
    Accepted(
        "enable_offload",
        lambda v: isinstance(v, bool),
        "A matter of the storage processes; the value changes nothing.",
        "True or False",
    ),
    Accepted(
        "tenant_id",
        lambda v: v is None or str(v).strip() in ("", "default"),
        "Not available; see `cache_prefix`.",
        "'default' or left out",
    ),
)
_ACCEPTED_BY_NAME = {accepted.name: accepted for accepted in ACCEPTED}
_ACCEPTED_IN_FILE = ("enable_offload", "tenant_id")


class Options:
    """Values by name, as attributes."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_values"][name]
        except KeyError:
            raise AttributeError(name) from None

    def as_dict(self) -> dict[str, Any]:
        """Every option with its value."""
        return dict(self._values)


_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?b?)\s*\Z", re.IGNORECASE)
_MOST = (1 << 63) - 1
_LONGEST = 1e9  # seconds: thirty years, and what fits into 63 bits of nanoseconds
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def _bytes(value: Any) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and (match := _SIZE.match(value)):
        unit = match[2].lower().rstrip("b").rstrip("i")
        size = float(match[1]) * _UNITS[unit]
        return int(size) if math.isfinite(size) else None
    return None


def _parse(option: Option, value: Any, path: str, problems: Problems) -> Any:
    if option.kind == "bool":
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        problems.add(path, value, "true or false")
    elif option.kind in ("int", "bytes"):
        number = _bytes(value) if option.kind == "bytes" else value
        if isinstance(number, bool) or not isinstance(number, int):
            wanted = "an integer" if option.kind == "int" else "bytes, such as 67108864 or '64 MB'"
            problems.add(path, value, wanted)
        elif option.least is not None and number < option.least:
            problems.add(path, value, f"at least {int(option.least)} {option.unit}")
        elif number > _MOST:
            problems.add(path, value, f"at most {_MOST} {option.unit}")
        else:
            return number
    elif option.kind == "seconds":
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            problems.add(path, value, "a number of seconds")
        elif option.least is not None and not value >= option.least:
            problems.add(path, value, f"at least {option.least} seconds")
        elif not value <= _LONGEST:
            problems.add(path, value, f"at most {_LONGEST:.0f} seconds")
        else:
            return float(value)
    elif option.kind == "choice":
        if value in option.choices:
            return value
        hint = suggestion(value, option.choices) if isinstance(value, str) else ""
        problems.add(path, value, "one of " + ", ".join(option.choices), hint)
    elif isinstance(value, str):
        return value.strip()
    else:
        problems.add(path, value, "text")
    return option.default


def _take(
    source: Mapping[str, Any],
    where: str,
    known: tuple[str, ...],
    passed_over: tuple[str, ...],
    values: dict[str, Any],
    problems: Problems,
) -> None:
    for name, value in source.items():
        path = f"{where}.{name}"
        if name in known:
            if name not in values:
                values[name] = _parse(_BY_NAME[name], value, path, problems)
        elif name in passed_over:
            accepted = _ACCEPTED_BY_NAME[name]
            if not accepted.fine(value):
                problems.add(path, value, accepted.expected, accepted.meaning)
        else:
            problems.add(path, value, "a known option", suggestion(name, (*known, *passed_over)))


def own_address(master: str) -> str:
    """The address by which other hosts would reach this one; of a master here that is known."""
    chosen = os.environ.get("VLLM_HOST_IP")
    if chosen:
        return chosen
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # nothing is sent
        except OSError:
            if not master.startswith(("127.", "localhost:", "[::1]:")):
                logger.warning(
                    "kvprism: this host has no route to others: its address is 127.0.0.1 unless "
                    "local_hostname or VLLM_HOST_IP says otherwise"
                )
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def read_options(
    extra_config: Mapping[str, Any], environment: Mapping[str, str] | None = None
) -> Options:
    """Validates and merges all sources.

    Args:
        extra_config: ``kv_connector_extra_config``.
        environment: Variables; those of the process when None.

    Raises:
        ConfigError: With every problem at once.
    """
    environment = os.environ if environment is None else environment
    problems = Problems()
    values: dict[str, Any] = {}
    every = tuple(_BY_NAME)
    _take(
        extra_config,
        "kv_connector_extra_config",
        every,
        tuple(_ACCEPTED_BY_NAME),
        values,
        problems,
    )
    path = environment.get("MOONCAKE_CONFIG_PATH")
    if path:
        in_file = tuple(option.name for option in OPTIONS if option.file_key)
        content = read_object(path, "MOONCAKE_CONFIG_PATH", problems) or {}
        _take(content, path, in_file, _ACCEPTED_IN_FILE, values, problems)
        if content:
            # The built-in connector's defaults, on which a file relies by leaving keys out.
            values.setdefault("protocol", "rdma")
            if values.setdefault("mode", "embedded") == "embedded":
                values.setdefault("global_segment_size", 4 << 30)
    for option in OPTIONS:
        if option.environment and option.name not in values:
            found: Any = environment.get(option.environment)
            if found:
                if option.kind == "int" and found.strip().isdecimal():
                    found = int(found)
                values[option.name] = _parse(option, found, option.environment, problems)
        values.setdefault(option.name, option.default)
    segment = environment.get("MOONCAKE_PREFERRED_SEGMENT", "").strip()
    if segment:
        accepted = _ACCEPTED_BY_NAME["preferred_segment"]
        problems.add("MOONCAKE_PREFERRED_SEGMENT", segment, accepted.expected, accepted.meaning)
    _check_together(values, problems)
    if not values["local_hostname"]:
        values["local_hostname"] = own_address(values["master_server_address"])
    problems.raise_if_any("kvprism options")
    return Options(values)


def _check_together(values: Mapping[str, Any], problems: Problems) -> None:
    if not values["master_server_address"]:
        problems.add(
            "master_server_address",
            values["master_server_address"],
            "host:port of mooncake_master",
            "in kv_connector_extra_config, or in the file of MOONCAKE_CONFIG_PATH",
        )
    size = values["global_segment_size"]
    if values["mode"] == "embedded" and size < _MIN_SEGMENT:
        problems.add("global_segment_size", size, f"at least {_MIN_SEGMENT} in mode embedded")
    if values["mode"] == "standalone-store" and size != 0:
        problems.add(
            "global_segment_size", size, "0 in mode standalone-store", "or mode 'embedded'"
        )
    buffer = values["local_buffer_size"]
    if 0 < buffer < _MIN_SEGMENT:
        problems.add("local_buffer_size", buffer, f"0, or at least {_MIN_SEGMENT}")
