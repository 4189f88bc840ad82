"""No circle of modules or folders, no import upwards."""

import json
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_nothing_goes_in_circles_or_up() -> None:
    told = subprocess.run([ROOT / "scripts" / "size", "--json"], text=True, capture_output=True, check=True)
    found = json.loads(told.stdout)
    assert found["circles"] == []
    assert found["folder_circles"] == []
    assert found["arrows_up"] == []
    assert sum(found["rooms"].values()) == found["product_lines"]
