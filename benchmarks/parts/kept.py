"""Kept: finished runs of a measurement in a file, so that one that was interrupted goes on."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Kept:
    """Results by key, one JSON array of key and result a line; a line that was cut off does not count."""

    def __init__(self, path: Path | None) -> None:
        """Read the file, if there is one; None keeps nothing."""
        text = path.read_text(encoding="utf-8") if path is not None and path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if path is not None and whole != text:
            path.write_text(whole, encoding="utf-8")
        self._path = path
        self._found: dict[str, Any] = dict(json.loads(line) for line in whole.splitlines())

    def __contains__(self, key: object) -> bool:
        """Return whether a result is kept under a key: all that it depends on, as plain values."""
        return json.dumps(key) in self._found

    def found(self, key: object) -> Any:
        """Return a result that is kept."""
        return self._found[json.dumps(key)]

    def add(self, key: object, result: Any) -> Any:
        """Keep a result in plain values and return it."""
        name = json.dumps(key)
        self._found[name] = result
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as out:
                out.write(json.dumps([name, result]) + "\n")
        return result

    def get(self, key: object, make: Callable[[], Any]) -> Any:
        """Return the result under a key, made and kept first when it is not there."""
        return self.found(key) if key in self else self.add(key, make())
