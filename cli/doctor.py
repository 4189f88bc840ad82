"""doctor: what a run needs of this machine, looked at one by one."""

import json

from antiphon.cli.arguments import Json
from antiphon.runs.directory import home_directory


def doctor(*, as_json: Json = False) -> int:
    """Look at everything that a run needs of this machine; nothing is started or changed.

    A line for each: `ok`, `note` for what only some runs need, or `WRONG` with the fix; one of these makes
    the exit code 1. What only a GPU can show, `scripts/gpu` does in a clone.

    Args:
        as_json: print one JSON document.
    """
    from antiphon.runs.doctor import examine

    findings = examine(home_directory())
    if as_json:
        rows = [
            {"name": x.name, "ok": x.ok, "needed": x.needed, "said": x.said, **x.figures} for x in findings
        ]
        print(json.dumps({"findings": rows}, indent=2))
    for one in () if as_json else findings:
        mark = "ok" if one.ok else "WRONG" if one.needed else "note"
        print(f"{mark:6}{one.name:15}{one.said}")
    return 1 if any(one.needed and not one.ok for one in findings) else 0
