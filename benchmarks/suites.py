"""Suites: a sweep of files of mathematical problems is killed and goes on, and is then asked for again.

A model of the demo's size, with random weights and a tokenizer of bytes, is evaluated by
`antiphon evaluate --suite` on every file of a folder. The first call is killed with SIGKILL when a third of
the samples is there; the second finishes it, and the third must sample nothing.

    .venv/bin/python benchmarks/suites.py --data FOLDER [--limit N] [KEY=VALUE ...]

Without a folder the files are sums that are made here; KEY=VALUE are passed on as `--set`. `resumed_twice`
counts samples that were drawn before the kill and again after it, `cached_samples` what the third call took
from the cache; items with the same prompt share their samples.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from antiphon.benchmarks.parts.measure import PROJECT, read_rows, scratch_home
from antiphon.benchmarks.parts.results import benchmark_parser, execute, finish
from antiphon.benchmarks.parts.warmstart.tiny_model import (
    SPECIAL_TOKENS,
    ModelShape,
    build_model,
    save_tiny_model,
)
from antiphon.system.rows import SUFFIXES

SHAPE = ModelShape(vocabulary=320, context=8192)
SETTINGS = (
    *("sampling.max_tokens=64", f"rollout.max_model_tokens={SHAPE.context}", "rollout.workers=1"),
    *("rollout.concurrent_groups=1", "loop.mode=elastic", "drafting.enabled=false"),
)
CALL_S = 1800.0
"""Longest time of one call."""
KILLED_AT = 1 / 3


def main() -> int:
    """Run the three calls, print, and return the exit status."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--data", type=Path, default=None, help="folder of files with problem and answer")
    parser.add_argument("--limit", type=int, default=None, help="items of each file (default: all)")
    parser.add_argument("overrides", nargs="*", help="key=value pairs, such as score=exact")
    options = parser.parse_args()
    with scratch_home() as home:
        folder = options.data or write_sums(home / "sums")
        files = sorted(path for path in folder.iterdir() if path.name.endswith(SUFFIXES))
        options.overrides += [] if options.data else ["score=number"]
        save_tiny_model(build_model(SHAPE, seed=0), byte_tokenizer(), home / "model")
        calls = Calls(home, files, options)
        before = calls.killed()
        resumed, resumed_s = calls.whole()
        again, again_s = calls.whole()
        total = len(calls.samples())
    result = {
        "files": len(files),
        "samples": total,
        "samples_before_kill": len(before),
        "resumed_twice": len(before) + sum(one["sampled"] for one in resumed) - total,
        "resumed_s": resumed_s,
        "cached_samples": sum(one["cached"] for one in again),
        "sampled_again": sum(one["sampled"] for one in again),
        "again_s": again_s,
    }
    violated = []
    if result["resumed_twice"]:
        violated.append(f"{result['resumed_twice']} samples were drawn before the kill and again after it")
    if result["sampled_again"] or result["cached_samples"] < total:
        violated.append(f"the last call sampled {result['sampled_again']} of {total} answers again")
    if not 0 < len(before) < total:
        violated.append(f"the first call was killed after {len(before)} of {total} samples: it shows nothing")
    if [one["scores"] for one in again] != [one["scores"] for one in resumed]:
        violated.append("the last call found other scores")
    return finish(result, record=options.record, violated=violated)


def write_sums(folder: Path) -> Path:
    """Write three files of sums, and return their folder."""
    folder.mkdir()
    for name, unit in (("ones", 1), ("tens", 10), ("hundreds", 100)):
        rows = ({"id": f"{n}", "problem": f"{n} + {unit} =", "answer": f"{n + unit}"} for n in range(40))
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer with a token for each byte, so that no problem loses a character."""
    words = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({word: place for place, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    pad, eos, bos, unk = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        eos_token=eos,
        bos_token=bos,
        unk_token=unk,
        clean_up_tokenization_spaces=False,
        model_max_length=SHAPE.context,
    )


class Calls:
    """The calls of one sweep, all of the same words."""

    def __init__(self, home: Path, files: Sequence[Path], options: argparse.Namespace) -> None:
        self._home = home
        self._words = [sys.executable, "-P", "-m", "antiphon.cli.app", "evaluate", "--json"]
        self._words += ["--model", str(home / "model"), "--suite", ",".join(map(str, files))]
        self._words += [] if options.limit is None else ["--limit", str(options.limit)]
        self._words += [word for one in (*SETTINGS, *options.overrides) for word in ("--set", one)]

    def samples(self) -> set[tuple[Any, ...]]:
        """Return the name of every sample that is kept."""
        database = self._home / "suites" / "samples.sqlite"
        return set(read_rows(database, "select digest from samples")) if database.exists() else set()

    def killed(self) -> set[tuple[Any, ...]]:
        """Kill a call, and the workers with it, when enough is there; return what was."""
        log = self._home / "killed.log"
        with log.open("wb") as out:
            process = self._started(out, out)
        wanted, deadline = None, time.monotonic() + CALL_S
        while process.poll() is None and time.monotonic() < deadline:
            said = log.read_text(errors="replace").split(" answers to sample")
            if len(said) > 1:
                wanted = KILLED_AT * int(said[0].split()[-1])
            if wanted is not None and len(self.samples()) >= wanted:
                break
            time.sleep(0.1)
        if process.poll() is not None:
            raise SystemExit(f"the first call ended by itself\n{log.read_text()[-2000:]}")
        process.send_signal(signal.SIGKILL)
        process.wait(60)
        self._wait_for_workers()
        return self.samples()

    def whole(self) -> tuple[list[dict[str, Any]], float]:
        """Let a call end; return what it says of each file, and its seconds."""
        begun = time.perf_counter()
        process = self._started(subprocess.PIPE, None)
        said, _ = process.communicate(timeout=CALL_S)
        if process.returncode:
            raise SystemExit(f"a call ended with status {process.returncode}")
        found: list[dict[str, Any]] = json.loads(said)
        return found, time.perf_counter() - begun

    def _started(self, out: Any, errors: Any) -> "subprocess.Popen[bytes]":
        environment = {**os.environ, "ANTIPHON_HOME": str(self._home)}
        return subprocess.Popen(self._words, cwd=PROJECT, env=environment, stdout=out, stderr=errors)

    def _wait_for_workers(self) -> None:
        """Wait until nothing is written any more: the kernel ends workers after who started them."""
        before, count = -1, len(self.samples())
        while before != count:
            time.sleep(1.0)
            before, count = count, len(self.samples())


if __name__ == "__main__":
    execute(main)
