"""Programs: how fast and how surely the judge of programs tells right from wrong, and attacks on its verdict.

With `--data`, a folder with humaneval.jsonl.gz and mbpp.jsonl.gz (or one that has it as tasks/code), every
reference solution is judged, in groups as a run has them, by two scoring processes; those of `BROKEN` are
left out, since their tests fail on them. Then each program of `data/verdict_attacks.yaml` is judged with a
right and a wrong one behind it, once for all tests and once for a share of them. It has forged its verdict
if it is paid anything, and disturbed the judge if those behind it are not judged as ever. `hang_delay_s` is
how long a program takes that is judged behind one that hangs, which has 0.8 of the seconds of an answer.

    .venv/bin/python benchmarks/programs.py --data DIR [--samples N] [--record]
"""

import asyncio
import gzip
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

import yaml

from antiphon.benchmarks.parts.results import PROJECT, benchmark_parser, execute, finish
from antiphon.core.config_sections import FILE, MOST_PROMPTS
from antiphon.environments.file import located
from antiphon.environments.programs import CREDITS
from antiphon.environments.scoring.messages import Failed, ScoringTask, Verdict
from antiphon.environments.scoring.pool import ScoringPool

SETS = {
    "humaneval": {"question": "prompt", "answer": "canonical_solution", "tests": "test"},
    "mbpp": {"question": "prompt", "answer": "code", "tests": "tests"},
}
BROKEN = {"mbpp": (367, 927)}
"""By `task_id`."""
ATTACKS = PROJECT / "benchmarks" / "data" / "verdict_attacks.yaml"
FEWEST_PER_S, FEWEST_ATTACKS = 150.0, 40
ANSWER_S = 10.0
"""Seconds that judging a reference solution may take."""
NUMBERS = (3, 4, 11)
SECRET = {3: 7391, 4: 2287, 11: 90813}
SOLUTION = f"""import math
def secret(n): return {SECRET}[n]
class Box:
    def __init__(self, n): self.value = secret(n)
"""
LEARN = r"""import re
TABLE = {}
def learn(text):
    TABLE.update((int(n), int(v)) for n, v in re.findall(r"secret\((\d+)\) == (\d+)", str(text)))
def secret(n): return TABLE.get(n)
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, check and print; return the exit status."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--data", type=Path, help="folder with HumanEval and MBPP; without, attacks alone")
    parser.add_argument("--samples", type=int, default=8, help="programs of a group")
    parser.add_argument("--credits", nargs="+", default=CREDITS, choices=CREDITS, help="of the attacks")
    parser.add_argument("--attack-s", type=float, default=2.0, help="seconds that judging an attack may take")
    options = parser.parse_args(arguments)
    result: dict[str, Any] = {}
    violated, at_size = [], []
    if options.data is not None:
        folder = options.data / "tasks" / "code"
        folder = folder if folder.is_dir() else options.data
        judged, spent_s = 0, 0.0
        for name, keys in SETS.items():
            right, wrong, seconds = asyncio.run(judge_references(folder, name, keys, options.samples))
            count = right + len(wrong)
            result |= {f"{name}_right": round(right / count, 4), f"{name}_programs": count}
            violated += [f"{name}: {one} is judged wrong" for one in wrong]
            judged, spent_s = judged + count * options.samples, spent_s + seconds
        result["programs_per_s"] = round(judged / spent_s, 1)
        if judged / spent_s < FEWEST_PER_S:
            at_size.append(f"programs_per_s is {judged / spent_s:.0f}, below {FEWEST_PER_S:g}")
    attacked = asyncio.run(attack(options.credits, options.attack_s))
    violated += [f"{name} {what}" for what in ("forged", "disturbed") for name in attacked[what]]
    if attacked["attacks"] < FEWEST_ATTACKS:
        violated.append(f"{attacked['attacks']} attacks are fewer than {FEWEST_ATTACKS}")
    result |= {name: len(found) if isinstance(found, list) else found for name, found in attacked.items()}
    if attacked["hang_delay_s"] > 1.5 * options.attack_s:
        at_size.append(f"a program that hangs delays another by {attacked['hang_delay_s']:.2f} s")
    return finish(result, record=options.record, violated=violated, at_size=at_size)


async def judge_references(
    folder: Path, name: str, keys: Mapping[str, str], samples: int
) -> tuple[int, list[str], float]:
    """Judge the reference solutions of a set.

    Returns how many are judged right, which of the others are not known to be broken, and the seconds.
    """
    path = folder / f"{name}.jsonl.gz"
    with gzip.open(path, "rt") as lines:
        rows = [json.loads(line) for line in lines]
    wrong: list[str] = []
    todo = [place for place in range(len(rows)) if rows[place]["task_id"] not in BROKEN.get(name, ())]
    count = len(todo)
    async with pool(path, keys, ANSWER_S, processes=2) as judge:

        async def work() -> None:
            while todo:
                place = todo.pop()
                found = await judge.score(f"train-0-{place}", [rows[place][keys["answer"]]] * samples)
                if found != [1.0] * samples:
                    wrong.append(f"{rows[place]['task_id']} ({said(found)})")

        begun = time.perf_counter()
        await asyncio.gather(work(), work())
        spent_s = time.perf_counter() - begun
    return count - len(wrong), wrong, spent_s


async def attack(credits: Sequence[str], answer_s: float) -> dict[str, Any]:
    """Try all attacks; return how many, the names of those that succeeded, and what hanging costs others.

    Args:
        credits: what is paid: programs that pass all tests, or the share of them.
        answer_s: seconds that one answer may take.
    """
    attacks: dict[str, dict[str, Any]] = yaml.safe_load(ATTACKS.read_text(encoding="utf-8"))
    functions = SOLUTION, SOLUTION.replace(f"{SECRET}[n]", "1")
    scripts = f"print({SECRET}[int(input())])", "print(1)"
    honest = {"functions": functions, "scripts": scripts}
    todo = [(kind, title, one) for kind, some in attacks.items() for title, one in some.items()]
    attacked = dict(zip(attacks, rows_of_attacks(), strict=True))
    rows = [{**attacked[kind], "question": f"{kind}: {title}"} for kind, title, _ in todo]
    programs = [one if isinstance(one, str) else one["program"] for *_, one in todo]
    for row, (*_, one) in zip(rows, todo, strict=True):
        row |= {"tests": one["tests"]} if isinstance(one, dict) else {}
    text = "".join(json.dumps(row) + "\n" for row in rows)
    forged, disturbed = [], []
    with tempfile.TemporaryDirectory(prefix="antiphon-programs-") as name:
        folder = Path(name)
        folder.chmod(0o777)
        tests = folder / "tests.jsonl"
        tests.write_text(text)
        tests.chmod(0o666)
        there = {"folder": folder, "tests": tests}
        for credit in credits:
            keys = {"credit": credit}
            async with pool(tests, keys, answer_s, processes=1) as judge:
                for place, (kind, title, _) in enumerate(todo):
                    program = LEARN + Template(programs[place]).safe_substitute(there)
                    paid, *after = await judge.score(f"train-0-{place}", [program, *honest[kind]])
                    called = f"{kind}: {title} ({said([paid, *after])})"
                    forged += [called] if not isinstance(paid, Failed) and paid > 0.0 else []
                    left = len([*folder.iterdir()]) > 1 or tests.read_text() != text
                    disturbed += [called] if after != [1.0, 0.0] or left else []
                    print(called, file=sys.stderr, flush=True)
                if credit == credits[0]:
                    begun = time.perf_counter()
                    await judge.score("train-0-0", ["while True: pass", functions[0]])
                    delay_s = time.perf_counter() - begun
    return {"attacks": len(todo), "forged": forged, "disturbed": disturbed, "hang_delay_s": round(delay_s, 2)}


def rows_of_attacks() -> list[dict[str, Any]]:
    """Return the problems that are attacked: a function and a script."""
    asserts = [f"assert secret({n}) == {SECRET[n]}" for n in NUMBERS]
    streams = [{"input": f"{n}\n", "output": f"{SECRET[n]}\n"} for n in NUMBERS]
    first = {"question": "Write secret.", "answer": SOLUTION, "tests": asserts}
    return [first, {"question": "Read n, print secret(n).", "answer": "", "tests": streams}]


def pool(path: Path, keys: Mapping[str, str], answer_s: float, *, processes: int) -> ScoringPool:
    """Return scoring processes that judge the programs of a file."""
    parameters, files = located({"train": str(path), "heldout": str(path), "score": "programs", **keys})
    task = ScoringTask(FILE, parameters, 0, MOST_PROMPTS, MOST_PROMPTS, answer_s, 2 << 30, readable=files)
    return ScoringPool(task, processes=processes, attempts=3, sandbox=True, patience_s=60.0)


def said(verdicts: Sequence[Verdict]) -> str:
    """Return verdicts as words."""
    return ", ".join(one.reason if isinstance(one, Failed) else f"{one:g}" for one in verdicts)


if __name__ == "__main__":
    execute(main)
