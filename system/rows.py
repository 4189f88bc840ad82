"""Rows: what files of JSON lines, Parquet or Arrow hold, one at a time and in their order.

A million rows open in seconds: of JSON lines only the places are kept, and a row is read when it is asked
for; of the others the wanted columns are. A file that is written over while it is in use is noticed; one that
takes its place is not read.
"""

import gzip
import json
import os
import shutil
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from antiphon.core.errors import ConfigError

SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet", ".arrow")
BLOCK_BYTES = 16 << 20
FEW_ROWS = 256
"""Rows of a table that are held while it is iterated over."""
_ROOT = Path(__file__).resolve().parents[1]


def split_files(parameters: Mapping[str, Any]) -> dict[str, tuple[Path, ...]]:
    """Return the files that `train` and `heldout` of `environment.parameters` name, as absolute paths.

    Each is a path, a list of paths, or `hub:NAME`, `hub:NAME:SPLIT` or `hub:NAME:CONFIG:SPLIT`, which the
    library `datasets` finds. A path that is none here is looked for in the project's root, as `model.path`
    is. There is no "heldout" where that is a share of the training rows.

    Raises:
        ConfigError: when something else is named, or nothing is found.
    """
    found = {"train": named_files(parameters.get("train"), "environment.parameters.train", "train")}
    heldout, field = parameters.get("heldout", 0.1), "environment.parameters.heldout"
    if not isinstance(heldout, int | float):
        found["heldout"] = named_files(heldout, field, "test")
    elif not 0.0 < heldout < 1.0:
        raise ConfigError(f"{field}={heldout} is neither a file nor a share between 0 and 1")
    return found


class Rows:
    """The rows of one or several files, by their number from 0; each is an object with its keys."""

    def __init__(self, files: Sequence[Path], columns: Sequence[str] | None = None) -> None:
        """Open the files; of tables only `columns` are held, where they are given.

        With no columns at all, tables are only iterated over.

        Raises:
            ConfigError: when a file cannot be read or lacks a column, or all are empty.
        """
        self._parts: list[_Lines | _Table] = []
        for path in files:
            try:
                table = path.suffix in (".parquet", ".arrow")
                self._parts.append(_Table(path, columns) if table else _Lines(path))
            except (OSError, EOFError, ValueError, zlib.error) as error:  # of Arrow's, most are ValueErrors
                said = " ".join(str(error).split())[:200]
                raise ConfigError(f"{path} cannot be read as {path.suffix[1:]}: {said}") from error
        self._begins = [0, *accumulate(map(len, self._parts))]
        if not len(self):
            raise ConfigError(f"{self} holds no rows")

    def __str__(self) -> str:
        return " and ".join(str(part.path) for part in self._parts)

    def __len__(self) -> int:
        return self._begins[-1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a row.

        Raises:
            ConfigError: naming it, when it is no JSON object, or its file has changed.
        """
        part, place = self._place(index)
        return part[place]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the rows in their order with all their columns; of a table a few are held at a time.

        Raises:
            ConfigError: as for one row, or when a table is damaged.
        """
        for part in self._parts:
            yield from part

    def where(self, index: int) -> str:
        """Return a row's number, from 1, and its file."""
        part, place = self._place(index)
        return f"row {place + 1} of {part.path}"

    def most_bytes(self, column: str) -> npt.NDArray[np.int64]:
        """Return how many bytes of UTF-8 each row's text of a column has at most, without reading them."""
        return np.concatenate([part.most_bytes(column) for part in self._parts])

    def _place(self, index: int) -> "tuple[_Lines | _Table, int]":
        number = bisect_right(self._begins, index) - 1
        return self._parts[number], index - self._begins[number]


class _Lines:
    """A file of JSON lines; empty ones are no rows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[bytes] = path.open("rb")
        if path.suffix == ".gz":  # unpacked into memory, since a sandbox has nowhere else
            with gzip.open(self._file) as packed:
                self._file = open(os.memfd_create(path.name), "w+b")  # noqa: SIM115 - as long as the rows
                shutil.copyfileobj(packed, self._file, BLOCK_BYTES)
                self._file.seek(0)
        self._state = self._now()
        ends: list[npt.NDArray[np.int64]] = []
        read = 0
        while block := self._file.read(BLOCK_BYTES):
            ends.append(np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")) + read + 1)
            read += len(block)
        stops = np.unique(np.concatenate([*ends, [read]]))
        starts = np.concatenate([[0], stops[:-1]])
        kept = stops - starts > 1
        self._starts: npt.NDArray[np.int64] = starts[kept]
        self._stops: npt.NDArray[np.int64] = stops[kept]

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        start, stop = int(self._starts[index]), int(self._stops[index])
        line = os.pread(self._file.fileno(), stop - start, start)
        if self._now() != self._state:
            raise ConfigError(
                f"{self.path} was written over while it was in use; put it back and start again to continue, "
                "or start a new run (--fresh)"
            )
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"row {index + 1} of {self.path} is not JSON in UTF-8: {error}") from error
        if not isinstance(row, dict):
            raise ConfigError(f"row {index + 1} of {self.path} is no JSON object with keys")
        return row

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(self.__getitem__, range(len(self)))

    def most_bytes(self, column: str) -> npt.NDArray[np.int64]:
        return self._stops - self._starts  # JSON writes no character with fewer bytes than UTF-8

    def _now(self) -> tuple[int, int]:
        found = os.fstat(self._file.fileno())
        return found.st_size, found.st_mtime_ns


class _Table:
    """A file of Parquet or, as `datasets` keeps its rows, of Arrow, which processes share by mapping it."""

    def __init__(self, path: Path, columns: Sequence[str] | None) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self.path = path
        arrow = path.suffix == ".arrow"
        file = pa.ipc.open_stream(pa.memory_map(str(path))).read_all() if arrow else pq.ParquetFile(path)
        names = (file.schema if arrow else file.schema_arrow).names
        for name in columns or ():
            if name not in names:
                raise ConfigError(f"{path} has no column {name!r}; it has {', '.join(names)}")
        wanted = names if columns is None else [*dict.fromkeys(columns)]
        table = file.select(wanted) if arrow else file.read(wanted)
        self._columns = dict(zip(wanted, table.columns, strict=True))
        self._rows = int(file.num_rows if arrow else file.metadata.num_rows)
        self._batches = file.to_batches if arrow else file.iter_batches

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: column[index].as_py() for name, column in self._columns.items()}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        try:
            for batch in self._batches(FEW_ROWS):
                yield from batch.to_pylist()
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self.path} is damaged: {' '.join(str(error).split())[:200]}") from error

    def most_bytes(self, column: str) -> npt.NDArray[np.int64]:
        import pyarrow as pa
        import pyarrow.compute as pc

        texts = self._columns.get(column)
        if texts is None or not (pa.types.is_string(texts.type) or pa.types.is_large_string(texts.type)):
            return np.full(len(self), 1 << 62)  # not known before they are read
        return np.asarray(pc.fill_null(pc.binary_length(texts), 0), np.int64)


def named_files(named: Any, field: str, split: str) -> tuple[Path, ...]:
    """Return the files that a field names, as `split_files` takes them; `split` is the hub's by default.

    Raises:
        ConfigError: when something else is named, or nothing is found.
    """
    names = [named] if isinstance(named, str) else named
    if not isinstance(names, list | tuple) or not names or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{field}={named!r} is neither the path of a file nor a list of them")
    found = list[Path]()
    for name in names:
        if name.startswith("hub:"):
            found += _hub_files(name, field, split)
            continue
        places = [Path(name).expanduser(), _ROOT / name]
        path = next((place for place in places if place.is_file()), None)
        if path is None:
            raise ConfigError(f"{field}: there is no file {name} under {Path.cwd()}; give its path")
        if not path.name.endswith(SUFFIXES):
            raise ConfigError(f"{field}: the name of {name} must end in one of {', '.join(SUFFIXES)}")
        found.append(path.resolve())
    return tuple(found)


def _hub_files(named: str, field: str, split: str) -> tuple[Path, ...]:
    _, name, *rest = named.split(":")
    *configuration, split = rest or [split]
    if not name or len(configuration) > 1 or not split.isidentifier():
        raise ConfigError(f"{field}={named!r} is none of hub:NAME, hub:NAME:SPLIT and hub:NAME:CONFIG:SPLIT")
    try:
        import datasets

        datasets.disable_progress_bars()
        found = datasets.load_dataset(name, *configuration, split=split)
    except ImportError as error:
        raise ConfigError(
            f"{field}={named!r} needs the library datasets ({error}); install it (.venv/bin/python -m pip "
            "install 'datasets>=4'), or name files"
        ) from error
    except Exception as error:  # builders, file systems and hubs raise what they like
        said = " ".join(str(error).split())[:200]
        raise ConfigError(f"{field}={named!r} cannot be loaded ({type(error).__name__}: {said})") from error
    return tuple(Path(file["filename"]).resolve() for file in found.cache_files)
