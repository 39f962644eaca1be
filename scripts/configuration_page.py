#!/usr/bin/env python3
"""Writes the tables of docs/configuration.md from python/kvprism/cache_config.schema.json.

Usage: configuration_page.py [--check]. With --check nothing is written, and the exit status is 1 if
the page is not what would be written.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SCHEMA = ROOT / "python/kvprism/cache_config.schema.json"
PAGE = ROOT / "docs/configuration.md"

# <!-- keys NAME --> stands before a table, <!-- end --> behind it.
REGION = re.compile(r"(<!-- keys (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def type_words(schema: dict[str, Any]) -> str:
    """A key's type in words."""
    if "$ref" in schema:
        return "object"
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    kind = kinds[0]
    if kind == "array":
        item = schema["items"]
        kind = f"list of {plural(item)}"
    elif kind == "integer" and schema["minimum"] == 0:
        kind = "integer, 0 or more"
    elif kind == "integer" and schema["minimum"] > 1:
        kind = f"integer, at least {schema['minimum']}"
    elif "maxLength" in schema:
        kind = f"string of at most {schema['maxLength']} bytes"
    return kind + (" or null" if "null" in kinds else "")


def plural(item: dict[str, Any]) -> str:
    if "$ref" in item:
        return "objects"
    return f"lists of {item['items']['type']}s" if item["type"] == "array" else f"{item['type']}s"


def default_words(schema: dict[str, Any], required: bool) -> str:
    if required:
        return "required"
    if "x-default" in schema:
        return str(schema["x-default"])
    value = schema["default"]
    text = json.dumps(value)
    return text if isinstance(value, int | None) and not isinstance(value, bool) else f"`{text}`"


def table(properties: dict[str, dict[str, Any]], required: list[str]) -> str:
    kinds = any("x-kinds" in schema for schema in properties.values())
    head = ["key", "type", "unit", "default", *(["kinds"] if kinds else []), "meaning"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for key, schema in properties.items():
        must = key in required or schema.get("x-required", False)
        cells = [f"`{key}`", type_words(schema), schema.get("x-unit", "")]
        cells += [default_words(schema, must), *([schema["x-kinds"]] if kinds else [])]
        cells.append(schema["description"])
        lines.append("| " + " | ".join(cells).replace("|  |", "| |") + " |")
    return re.sub(r"\|  (?=\|)", "| ", "\n".join(lines)) + "\n"


def tables(schema: dict[str, Any]) -> dict[str, str]:
    found = {"top": table(schema["properties"], schema["required"])}
    found["parallel"] = table(schema["$defs"]["parallel"]["properties"], [])
    groups: dict[str, dict[str, dict[str, Any]]] = {}
    group = schema["$defs"]["group"]
    for key, value in group["properties"].items():
        groups.setdefault(value["x-table"], {})[key] = value
    return found | {name: table(keys, group["required"]) for name, keys in groups.items()}


def render(page: str, schema: dict[str, Any]) -> str:
    """The page with every table written anew."""
    known = tables(schema)
    return REGION.sub(lambda match: match[1] + known[match[2]] + match[3], page)


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--check"]):
        print(__doc__)
        return 2
    page = PAGE.read_text("utf-8")
    wanted = render(page, json.loads(SCHEMA.read_text("utf-8")))
    if page == wanted:
        return 0
    if arguments:
        print(
            "docs/configuration.md is not what the schema says: run scripts/configuration_page.py"
        )
        return 1
    PAGE.write_text(wanted, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
