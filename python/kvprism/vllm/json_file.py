"""Files with a JSON object that an operator writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .problems import Problems


def read_object(path: str, where: str, problems: Problems) -> dict[str, Any] | None:
    """The object in a file; None, and a problem that names ``where``, when there is none."""
    file = Path(path)
    try:
        if file.exists() and not file.is_file():  # a pipe would never end
            problems.add(where, path, "an ordinary file")
            return None
        content = json.loads(file.read_text("utf-8"))
    except OSError as error:
        problems.add(where, path, "a file that can be read", str(error.strerror))
        return None
    except (ValueError, RecursionError) as error:
        problems.add(where, path, "a file with a JSON object", str(error))
        return None
    if not isinstance(content, dict):
        problems.add(where, path, "a file with a JSON object")
        return None
    return content
