"""No circle of modules or folders, no import upwards; and the page says how large the product is."""

import json
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_nothing_goes_in_circles_or_up_and_the_page_says_how_large_the_product_is() -> None:
    told = subprocess.run([ROOT / "scripts" / "size", "--json"], text=True, capture_output=True, check=True)
    found = json.loads(told.stdout)
    assert found["circles"] == []
    assert found["folder_circles"] == []
    assert found["arrows_up"] == []
    assert sum(found["rooms"].values()) == found["product_lines"]
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    quoted = re.search(r"about ([\d,]+) lines of product", page)
    assert quoted is not None
    assert abs(int(quoted[1].replace(",", "")) / found["product_lines"] - 1.0) < 0.02, found["product_lines"]
