"""doctor: what a run needs of this machine, looked at one by one."""

import json
import sys
from functools import partial
from pathlib import Path

from antiphon.cli.arguments import Json
from antiphon.core.errors import ConfigError
from antiphon.runs.directory import home_directory


def doctor(*, gpu: bool = False, out: Path | None = None, fix: bool = False, as_json: Json = False) -> int:
    """Look at everything that a run needs of this machine; nothing is started or changed without an option.

    A line for each: `ok`, `note` for what only some runs need, or `WRONG` with the fix; one of these makes
    the exit code 1, and so does a check of the GPU that fails.

    Args:
        gpu: check besides what only a GPU can show, in at most eight minutes; without one it says what it
            skipped.
        out: keep the figures of the GPU in this file, as JSON.
        fix: remove what killed processes of this user left in shared memory.
        as_json: print one JSON document.
    """
    if out is not None and not (gpu and out.parent.is_dir()):
        so = f"make the folder {out.parent} first" if gpu else "give --gpu too"
        raise ConfigError(f"--out {out} is to keep what --gpu finds; {so}")
    from antiphon.runs.doctor import examine
    from antiphon.runs.gpu.conformance import conform, write_record
    from antiphon.system.shared_memory import remove_leftovers

    removed = list(remove_leftovers()) if fix else []
    findings = examine(home_directory())
    if not as_json:
        for path in removed:
            print(f"{'fixed':6}{'shared memory':15}{path} removed")
        for one in findings:
            mark = "ok" if one.ok else "WRONG" if one.needed else "note"
            print(f"{mark:6}{one.name:15}{one.said}", flush=True)
    record = None
    if gpu:
        record = conform(say=partial(print, file=sys.stderr if as_json else sys.stdout, flush=True))
        if out is not None:
            write_record(out, record)
    if as_json:
        rows = [
            {"name": x.name, "ok": x.ok, "needed": x.needed, "said": x.said, **x.figures} for x in findings
        ]
        told = {"findings": rows} | ({"removed": list(map(str, removed))} if fix else {})
        print(json.dumps(told | ({} if record is None else {"gpu": record}), indent=2))
    return int(any(x.needed and not x.ok for x in findings) or bool(record and record["failed"]))
