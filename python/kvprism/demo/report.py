"""How the demonstration is judged and shown."""

from __future__ import annotations

from typing import Any

from .audit import Stored
from .workload import Variant

Row = dict[str, Any]

_COLUMNS = (
    ("group", "kind"),
    ("tokens", "tokens_per_block"),
    ("transfer", "transferable"),
    ("store", "storable"),
    ("objects", "objects_stored"),
    ("bytes", "bytes_stored"),
    ("loaded", "objects_loaded"),
    ("verified", "bytes_verified"),
    ("wrong", "bytes_mismatched"),
)


def _speed(total: Row) -> float:
    seconds = total["seconds"]
    return total["bytes"] / seconds / 1e9 if seconds > 0 else 0.0


def judge(variant: Variant, filled: Row, loaded: Row, stored: Stored, patterns: int) -> Row:
    """Puts together what one variant showed.

    Args:
        variant: The variant.
        filled: Result of the engine that saved.
        loaded: Result of the engine that loaded.
        stored: What lies in the store.
        patterns: Ring positions that were looked for.
    """
    groups = []
    for group, stats in zip(variant.projection.groups(), loaded["stats"]["groups"], strict=True):
        index = None if group.store_index is None else int(group.store_index)
        groups.append(
            {
                "kind": group.kind,
                "tokens_per_block": group.tokens_per_block,
                "transferable": group.transfer_index is not None,
                "storable": index is not None,
                "objects_stored": 0 if index is None else stored.objects[index],
                "bytes_stored": 0 if index is None else stored.bytes[index],
                "objects_loaded": stats["chunks_loaded"],
                "bytes_verified": stats["bytes_loaded"],
                "bytes_mismatched": stats["bytes_mismatched"],
            }
        )
    saves, loads = filled["stats"]["saves"], loaded["stats"]["loads"]
    row: Row = {
        "variant": variant.name,
        "groups": groups,
        "ring_positions_known": patterns,
        "ring_positions_in_memory": filled["ring_positions_in_memory"],
        "ring_positions_in_store": stored.ring_positions,
        "saved_bytes": saves["bytes"],
        "save_gb_per_second": round(_speed(saves), 3),
        "loaded_bytes": loads["bytes"],
        "load_gb_per_second": round(_speed(loads), 3),
        "prompt_tokens": loaded["stats"]["prompt_tokens"],
        "loaded_tokens": loaded["stats"]["external_hit_tokens"],
        "computed_tokens": loaded["stats"]["computed_tokens"],
        "bytes_verified": loaded["stats"]["bytes_verified"],
        "bytes_mismatched": loaded["stats"]["bytes_mismatched"],
        "first_seconds": round(filled["seconds"], 3),
        "second_seconds": round(loaded["seconds"], 3),
    }
    row["failures"] = _failures(row, filled, loaded, stored)
    return row


def _failures(row: Row, filled: Row, loaded: Row, stored: Stored) -> list[str]:
    failures = []
    for name, result in (("first", filled), ("second", loaded)):
        if result["broken"]:
            failures.append(f"the {name} engine: {result['broken']}")
        if result["unquiet"]:
            failures.append(f"the {name} engine left {result['unquiet']} calls running")
    if row["bytes_mismatched"]:
        failures.append(f"{row['bytes_mismatched']:,} loaded bytes are wrong")
    if row["loaded_tokens"] == 0 or row["bytes_verified"] == 0:
        failures.append("nothing was loaded")
    if row["ring_positions_in_store"]:
        failures.append(f"{row['ring_positions_in_store']:,} ring positions reached the store")
    if row["ring_positions_in_memory"] == 0:
        failures.append("no ring was found in the engine's memory: the check proves nothing")
    if stored.wrong_size:
        failures.append(f"{len(stored.wrong_size)} objects have no group's size")
    for group in row["groups"]:
        if group["storable"] and group["objects_stored"] == 0:
            failures.append(f"no object of group {group['kind']} is stored")
        if group["storable"] and group["objects_loaded"] == 0:
            failures.append(f"no object of group {group['kind']} was loaded")
        if not group["storable"] and (group["objects_stored"] or group["objects_loaded"]):
            failures.append(f"group {group['kind']} must not be stored")
    return failures


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)


def show(row: Row) -> str:
    """A variant as a table with what it showed below."""
    cells = [[title for title, _ in _COLUMNS]]
    cells += [[_cell(group[key]) for _, key in _COLUMNS] for group in row["groups"]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for line in cells:
        first = line[0].ljust(widths[0])
        rest = (text.rjust(width) for text, width in zip(line[1:], widths[1:], strict=True))
        lines.append("  ".join((first, *rest)))
    share = row["loaded_tokens"] / row["prompt_tokens"]
    lines += [
        "",
        f"first engine   saved {row['saved_bytes'] / 1e6:,.1f} MB at"
        f" {row['save_gb_per_second']:.2f} GB/s, objects that were there already included",
        f"second engine  loaded {row['loaded_bytes'] / 1e6:,.1f} MB at"
        f" {row['load_gb_per_second']:.2f} GB/s: {row['loaded_tokens']:,} of"
        f" {row['prompt_tokens']:,} prompt tokens ({share:.0%}),"
        f" computed {row['computed_tokens']:,} tokens",
        f"oracle         {row['bytes_verified']:,} loaded bytes compared,"
        f" {row['bytes_mismatched']:,} wrong",
        f"rings          {row['ring_positions_known']:,} positions looked for:"
        f" {row['ring_positions_in_memory']:,} seen in the engine's memory,"
        f" {row['ring_positions_in_store']:,} in the store",
    ]
    return "\n".join(lines)
