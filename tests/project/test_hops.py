"""The counter of hops follows a group, a metric and a chunk through the loop."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_each_way_has_hops_and_the_group_has_shapes() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "hops"], text=True, capture_output=True, timeout=300
    )
    assert not done.returncode, done.stderr
    counts = json.loads(done.stdout.splitlines()[-1])
    assert all(counts[f"{way}_functions"] > 0 for way in ("group", "metric", "chunk"))
    assert counts["group_shapes"] > 0
