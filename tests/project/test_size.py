"""The product stays small and flat: what `scripts/size` counts keeps within its limits."""

import json
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST_LINES = 69_000
MOST_IN_A_ROW = 18
MOST_LONG_FILES = 2


def test_the_product_keeps_within_its_limits() -> None:
    told = subprocess.run([ROOT / "scripts" / "size", "--json"], text=True, capture_output=True, check=True)
    found = json.loads(told.stdout)
    assert found["product_lines"] <= MOST_LINES
    assert found["largest_row"] <= MOST_IN_A_ROW, found["largest_row_folder"]
    assert found["circles"] == []
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    quoted = re.search(r"about ([\d,]+) lines of product", page)
    assert quoted is not None
    assert abs(int(quoted[1].replace(",", "")) / found["product_lines"] - 1.0) < 0.02, found["product_lines"]
    assert len(found["files_over_400"]) <= MOST_LONG_FILES
    for name in found["files_over_400"]:
        assert f"`{name}`" in page, f"docs/architecture.md must give the reason for the length of {name}"
