"""Pages: docs/benchmarks.md and every quoted metric in README and docs, from the result files.

    scripts/benchmarks                   write the page and the quoted metrics
    scripts/benchmarks --check           only tell whether they are current
    scripts/benchmarks --run NAME...     measure and record these first (`all`: every one), then write
    scripts/benchmarks --smoke [NAME...] run every script in its smallest form, two at a time: only what must
                                         hold at any size counts, and nothing is recorded

A quoted metric stands in Markdown between two comments that no reader sees:

    <!-- figure: demo.pass_after .2f -->0.85<!-- /figure -->
    <!-- figure: demo.pass_after range .2f -->0.83 to 0.87<!-- /figure -->

After the result's name and the figure's: optionally `range` of its repetitions, then optionally a format as
Python has it (`.1%` makes a percentage of a share). `demo.@commit`, `@machine` and `@repetitions` quote the
circumstances.
"""

import argparse
import ast
import json
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import yaml

from antiphon.benchmarks.parts import results
from antiphon.benchmarks.parts.results import PROJECT, MeasuredFigure, Result

PAGE = PROJECT / "docs" / "benchmarks.md"
LONGER = 6.0
"""A benchmark is ended when it takes this many times as long as it should."""
MISSING = "(not measured)"
"""Shown where a result file is missing."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One entry of what can be run."""

    arguments: str
    """Script below benchmarks/ and its arguments."""
    minutes: float
    """About how long it takes on two idle cores."""


_LISTED = yaml.safe_load((PROJECT / "benchmarks" / "data" / "measurements.yaml").read_text(encoding="utf-8"))
MEASUREMENTS = {name: Measurement(one["run"], one["minutes"]) for name, one in _LISTED["measured"].items()}
"""Name of the result -> how it is measured."""
SMALLEST: dict[str, str] = _LISTED["smallest"]
"""Script -> the arguments of its smallest form."""
SMOKE_S = 300
"""Longest time of one of them."""

_MARK = re.compile(
    r"<!-- figure: (?P<name>\w+)\.(?P<figure>@?[\w.-]+)(?: (?P<part>range))?"
    r"(?: (?P<form>\S+))? -->(?P<shown>[^\n]*?)<!-- /figure -->"
)
_ANY_MARK = re.compile(r"<!-- /?figure")
_AT_LINE_START = re.compile(r"^[ \t]*(?:(?:[-*+>]|\d+[.)])[ \t]+)*<!-- figure", re.MULTILINE)


class BadMark(Exception):
    """A mark in a page that cannot be filled in."""


def quoting_pages(project: Path = PROJECT) -> list[Path]:
    """Return the pages that may quote metrics."""
    return [project / "README.md", *(p for p in sorted((project / "docs").rglob("*.md")) if p != PAGE)]


def fill_in(text: str, found: Mapping[str, Result]) -> str:
    """Return a page with every quoted metric as its result file has it.

    Args:
        text: the page.
        found: name -> result.

    Raises:
        BadMark: for a mark that is malformed, begins a line (Markdown would take it for the start of
            an HTML block), or names no figure.
    """
    if at := _AT_LINE_START.search(text):
        line = text[at.start() :].lstrip("\n").splitlines()[0][:60]
        raise BadMark(f"a mark must not begin a line, where Markdown takes it for HTML: {line}")
    filled = _MARK.sub(lambda match: _filled(match, found), text)
    if len(_ANY_MARK.findall(text)) != 2 * len(_MARK.findall(text)):
        raise BadMark("a mark is malformed; write <!-- figure: NAME.FIGURE .2f -->...<!-- /figure -->")
    return filled


def _filled(match: "re.Match[str]", found: Mapping[str, Result]) -> str:
    whole, shown = match.group(0), match["shown"]
    begin = whole[: whole.index("-->") + 3]
    result = found.get(match["name"])
    if result is None:
        if match["name"] not in MEASUREMENTS:
            raise BadMark(f"{begin} names no benchmark; there are {', '.join(MEASUREMENTS)}")
        shown = MISSING
    elif match["figure"].startswith("@"):
        shown = _circumstance(result, match["figure"][1:], begin)
    else:
        figure = result.figure(match["figure"])
        if figure is None:
            names = ", ".join(figure.name for figure in result.figures)
            raise BadMark(f"{begin} names no figure of {result.name}; it has {names}")
        shown = show(figure, match["part"], match["form"] or ".4g")
    return f"{begin}{shown}<!-- /figure -->"


def show(figure: MeasuredFigure, part: str | None, form: str) -> str:
    """Return a figure as a page shows it.

    Args:
        figure: what was measured.
        part: range of its repetitions; None shows the median.
        form: a format as Python has it.

    >>> figure = MeasuredFigure("pass_after", 0.85, "", 3, [0.85, 0.831, 0.87])
    >>> show(figure, None, ".2f"), show(figure, "range", ".0%")
    ('0.85', '83% to 87%')
    """
    if part is None:
        return format(figure.value, form)
    values = figure.spread or [figure.value]
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"


def _circumstance(result: Result, name: str, begin: str) -> str:
    known = {
        "commit": result.commit,
        "machine": describe(result.machine),
        "repetitions": str(max(figure.repetitions for figure in result.figures)),
    }
    if name not in known:
        raise BadMark(f"{begin}: there are {', '.join(f'@{key}' for key in known)}")
    return known[name]


def describe(machine: Mapping[str, object]) -> str:
    """Return a kind of machine in a few words."""
    gpus = machine["gpus"]
    shown = ", ".join(map(str, gpus)) if isinstance(gpus, list) and gpus else "no GPU"
    return f"{machine['cores']} cores ({machine['cpu']}), {machine['memory_gb']} GB, {shown}"


def benchmarks_page(found: Mapping[str, Result]) -> str:
    """Return docs/benchmarks.md."""
    machines = Counter(describe(result.machine) for result in found.values())
    usual = max(machines, key=lambda machine: (machines[machine], machine), default="")
    parts = [
        "# Benchmarks\n",
        "Generated by `scripts/benchmarks` from the files in `benchmarks/results/`; do not edit it. Each\n"
        f"section is one command on an otherwise idle machine, with {usual} unless it names\n"
        "another. A value is the median of its repetitions, with the smallest and the largest in brackets;\n"
        "shares are from 0 to 1. Figures of single parts (`part.figure`) are in the result's file alone.\n"
        "`scripts/benchmarks --run NAME` measures again. Every night the same scripts can be\n"
        "[measured and compared](guides/scheduled-benchmarks.md).\n",
    ]
    for name in sorted(found, key=lambda name: (*MEASUREMENTS, name).index(name)):
        parts.append(_section(found[name], usual))
    missing = [f"`{name}`" for name in MEASUREMENTS if name not in found]
    if missing:
        parts.append(f"## Without a result\nNo result file is kept of {', '.join(missing)}.\n")
    return "\n".join(parts)


def _section(result: Result, usual: str) -> str:
    whole = [figure for figure in result.figures if "." not in figure.name]
    single = ", ".join(f"`{figure.name}` {_value(figure)}" for figure in whole if not _spread(figure))
    ranges = [
        f"- `{figure.name}` {_value(figure)} ({_spread(figure)})" for figure in whole if _spread(figure)
    ]
    words = result.command.split()
    script = PROJECT / next((word for word in words if word.endswith(".py")), "")
    about = summary(script) if script.is_file() else ""
    machine = describe(result.machine)
    parts = [
        f"## {result.name}",
        f"{about}\n",
        f"`{result.command}`{'' if machine == usual else f' on {machine}'}; commit {result.commit}, "
        f"{result.date} UTC, {result.took_s / 60:.1f} minutes.\n",
    ]
    if single:
        parts.append(f"{single}.\n")
    return "\n".join([*parts, *ranges, *([""] if ranges else [])])


def _value(figure: MeasuredFigure) -> str:
    return f"{figure.value:.6g}{' s' * (figure.unit == 's')}"


def summary(script: Path) -> str:
    """Return the first sentence of a script's docstring."""
    said = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or ""
    return " ".join(said.partition("\n\n")[0].split())


def _spread(figure: MeasuredFigure) -> str:
    values = figure.spread or []
    return f"{min(values):.6g} to {max(values):.6g}" if len(values) > 1 else ""


def wanted_pages(found: Mapping[str, Result]) -> dict[Path, str]:
    """Return path -> content of every page as it should be.

    Raises:
        SystemExit: for a mark that cannot be filled in; its page is named.
    """
    wanted = {PAGE: benchmarks_page(found)}
    for path in quoting_pages():
        try:
            wanted[path] = fill_in(path.read_text(encoding="utf-8"), found)
        except BadMark as error:
            raise SystemExit(f"{path.relative_to(PROJECT)}: {error}") from None
    return wanted


def update(check: bool) -> int:
    """Write the pages, or only tell which are not current; return the exit status."""
    status = 0
    for path, text in wanted_pages(results.read()).items():
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        name = path.relative_to(PROJECT)
        if check:
            print(f"{name} is not what the result files say; run scripts/benchmarks", file=sys.stderr)
            status = 1
        else:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {name}")
    return status


def measure(names: Sequence[str]) -> int:
    """Run benchmarks one after the other and keep the results of those that held; 1 if any did not."""
    status = 0
    for name in names:
        words = shlex.split(MEASUREMENTS[name].arguments)
        print(f"== {name}: benchmarks/{shlex.join(words)}", flush=True)
        begun, lines = time.perf_counter(), list[str]()
        command = [sys.executable, "-P", str(PROJECT / "benchmarks" / words[0]), *words[1:]]
        with subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            limit = threading.Timer(60.0 * LONGER * MEASUREMENTS[name].minutes, process.terminate)
            limit.start()
            for line in process.stdout:
                print(line, end="", flush=True)
                lines.append(line)
            limit.cancel()
        found = results.last_object(lines)
        if process.returncode != 0 or found is None:
            ended = f"ended with status {process.returncode}"
            said = ended if process.returncode else "did not end with a JSON object"
            print(f"{name} {said} and is not recorded", file=sys.stderr)
            status = 1
            continue
        took_s = time.perf_counter() - begun
        results.write(results.make(name, f"benchmarks/{MEASUREMENTS[name].arguments}", found, took_s))
    return status


def smoke(names: Sequence[str]) -> int:
    """Run scripts in their smallest forms, two at a time; 1 if anything that they check does not hold."""

    def run(name: str) -> bool:
        script = [str(PROJECT / "benchmarks" / f"{name}.py"), *shlex.split(SMALLEST[name])]
        begun_s = time.perf_counter()
        done = subprocess.run(
            # Asked to end, a script ends what it started.
            ["timeout", "--kill-after=60", str(SMOKE_S), sys.executable, "-P", *script],
            cwd=PROJECT,
            env={**os.environ, results.SMOKE_VARIABLE: "1"},
            capture_output=True,
            text=True,
        )
        held = done.returncode == 0 and results.last_object(done.stdout.splitlines()) is not None
        took_s = time.perf_counter() - begun_s
        said = "" if held else f"status {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        print(f"{'held' if held else 'FAILED'} {name} in {took_s:.0f} s\n{said}".strip(), flush=True)
        return held

    begun_s = time.perf_counter()
    with ThreadPoolExecutor(2) as pool:
        failed = [name for name, held in zip(names, pool.map(run, names), strict=True) if not held]
    minutes = round((time.perf_counter() - begun_s) / 60, 1)
    print(json.dumps({"benchmarks": len(names), "minutes": minutes, "failed": failed}))
    return 1 if failed else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(
        prog="scripts/benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--check", action="store_true", help="only tell whether the pages are current")
    names = [*MEASUREMENTS, "all"]
    choice.add_argument("--run", nargs="+", choices=names, metavar="NAME", help="measure and record before")
    choice.add_argument("--smoke", nargs="*", choices=SMALLEST, metavar="NAME", help="the smallest forms")
    options = parser.parse_args(arguments)
    if options.smoke is not None:
        return smoke(options.smoke or list(SMALLEST))
    if not options.run:
        return update(options.check)
    status = measure(list(MEASUREMENTS) if "all" in options.run else options.run)
    return max(status, update(check=False))


if __name__ == "__main__":
    sys.exit(main())
