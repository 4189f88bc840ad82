"""Words that readers stumble over stay out of the product and its pages; each has a plainer one."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
INSTEAD = {
    "whoever": "name it: the caller, the receiver, anyone who",
    "anew": "again",
    "so many": "this many, N",
    "of nobody": "empty, of no user",
    "mend": "fix",
}
"""Word -> what to write."""
ASIDE = ("tests/", "benchmarks/", "protos/", "requirements/", "docs/images/", "scripts/unchanged.json")


def test_no_page_and_no_line_of_the_product_has_them() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, text=True, capture_output=True, check=True)
    words = re.compile(rf"\b({'|'.join(INSTEAD)})\b", re.IGNORECASE)
    found = []
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if name.startswith(ASIDE) or path.suffix not in {".py", ".md", ".html", ".yaml", ""}:
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            found += [f"{name}:{number}: {word}: {INSTEAD[word.lower()]}" for word in words.findall(line)]
    assert not found, "\n".join(found)
