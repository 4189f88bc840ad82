"""What is kept by digest: the first row of a name stays, and a full file loses none."""

from pathlib import Path
from typing import NamedTuple

import pytest

from antiphon.core.errors import UnavailableError
from antiphon.lineage.kept import Kept


class Row(NamedTuple):
    body: bytes
    said: str


def test_the_first_row_stays_and_a_full_disk_loses_none(tmp_path: Path) -> None:
    path = tmp_path / "rows.sqlite"
    with Kept(path, "rows", Row) as kept:
        assert kept.find("a") is None
        kept.add("a", Row(b"1", "first"))
        kept.add("a", Row(b"2", "second"))
        kept._file.execute("PRAGMA max_page_count = 10")
        with pytest.raises(UnavailableError, match=r"rows\.sqlite cannot be used: .*full"):
            kept.add("b", Row(bytes(1 << 20), ""))
    with Kept(path, "rows", Row) as kept:
        assert kept.find("a") == Row(b"1", "first") and kept.find("b") is None
