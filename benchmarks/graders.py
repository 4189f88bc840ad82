r"""Graders: the mathematical judge on published problems, on wrong answers and on hostile ones.

Of GSM8K and MATH worked solutions are judged, where a file has them; of the others each answer in three
other forms (respelled, without `\frac`, another expression of its value), without those that the judge takes
for the reference's own text; `texts` are what was judged. Wrong answers are made of the right ones. Hostile
strings are drawn from families that stop algebra systems. `answers_per_s` is right and wrong answers over
seconds of processor time of one process, and hostile strings are timed by them too. Every bar of `bar` is
checked, and the memory of the process.

    .venv/bin/python benchmarks/graders.py --data DIR     # DIR/tasks/math/*.jsonl.gz: answer, solution
    .venv/bin/python benchmarks/graders.py                # the problems of examples/math
"""

import gzip
import json
import random
import re
import resource
import sys
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

from antiphon.benchmarks.parts.results import PROJECT, benchmark_parser, execute, finish
from antiphon.environments.math_judge import OR, judge, reference_of, warm_up
from antiphon.environments.math_values import RELATIONS, Reading, read, same, squeezed, tidy

HOSTILE, WORST_S, MEAN_S, WRONG_SHARE, MEMORY_MB = 1000, 1.2, 0.1, 0.005, 300
_WHOLE = re.compile(r"-?[0-9]+")


def main() -> int:
    """Judge the files, then what is hostile, and check the bars."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--data", type=Path, default=PROJECT / "examples", help="folder with the files")
    parser.add_argument("--rows", type=int, default=None, help="most rows of a file (default all)")
    parser.add_argument("--hostile", type=int, default=HOSTILE, help=f"strings (default {HOSTILE})")
    parser.add_argument("--show", action="store_true", help="print what was judged otherwise than it is")
    options = parser.parse_args()
    folders = (options.data / "tasks" / "math", options.data / "math", options.data)
    folder = next(one for one in folders if one.is_dir())
    files = sorted(path for path in folder.iterdir() if path.name.endswith((".jsonl", ".jsonl.gz")))
    warm_up()
    result: dict[str, Any] = {}
    violated, slow, wrong, accepted = [], [], 0, 0
    for path in files:
        name = path.name.partition(".")[0]
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        rows = [json.loads(line) for line in data.splitlines()][: options.rows]
        share, speed = bar(name)
        found = judged(name, rows, options.show)
        wrong, accepted = wrong + found.pop("wrong"), accepted + found.pop("accepted")
        result[name] = found
        if found["right_share"] < share:
            violated.append(f"{name}: {found['right_share']:.4f} right, fewer than {share}")
        if found["answers_per_s"] < speed:
            slow.append(f"{name}: {found['answers_per_s']:.0f} answers/s, fewer than {speed}")
    if not files:
        violated.append(f"{folder} holds no file of JSON lines")
    times, right = attacked(options.hostile, options.show)
    memory_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    result |= {
        "wrong_answers": wrong,
        "wrong_accepted_share": accepted / max(1, wrong),
        "hostile_worst_s": max(times),
        "hostile_mean_s": sum(times) / len(times),
        "hostile_right": right,
        "peak_memory_mb": memory_mb,
    }
    for holds, said in (
        (result["wrong_accepted_share"] <= WRONG_SHARE, f"{accepted} of {wrong} wrong answers were accepted"),
        (right == 0, f"{right} hostile strings were accepted"),
        (memory_mb <= MEMORY_MB, f"the judge took {memory_mb:.0f} MB, more than {MEMORY_MB}"),
    ):
        violated += [] if holds else [said]
    if max(times) > WORST_S or sum(times) > MEAN_S * len(times):
        slow.append(
            f"hostile strings took {max(times):.2f} s at worst, {sum(times) / len(times):.3f} on average"
        )
    return finish(_rounded(result), record=options.record, violated=violated, at_size=slow)


def bar(name: str) -> tuple[float, float]:
    """Return the least share of right answers that are accepted, and the fewest answers a second."""
    if name.startswith("gsm8k"):
        return 0.999, 1500.0
    return (0.99, 500.0) if name.startswith("math") else (0.97, 200.0)


def judged(name: str, rows: list[dict[str, Any]], show: bool) -> dict[str, Any]:
    """Return what came of the right and the wrong answers to the rows of one file."""
    rng, right, count, wrong, accepted, cpu_s = random.Random(0), 0, 0, 0, 0, 0.0
    worked = name.startswith(("gsm8k", "math")) and all(
        re.search(r"####|\\boxed", str(row.get("solution", ""))) for row in rows
    )
    for row in rows:
        reference = None if row["answer"] is None else reference_of(row["answer"])
        if reference is None:
            continue  # a row without an answer is refused when the file is opened
        answer = reference.split(OR)[0]
        other = reference_of(rng.choice(rows)["answer"]) or answer
        own = {squeezed(tidy(one)) for one in reference.split(OR)}
        texts = [
            said(form)
            for said, form in zip(SAID, forms(answer), strict=True)
            if squeezed(tidy(form)) not in own
        ]
        texts = [row["solution"]] if worked else texts
        bad = [rf"So it is \boxed{{{one}}}." for one in wrongs(answer, other.split(OR)[0], reference, rng)]
        begun = time.process_time()
        verdicts = [judge(text, reference) for text in [*texts, *bad]]
        cpu_s += time.process_time() - begun
        right, count = right + sum(verdicts[: len(texts)]), count + len(texts)
        wrong, accepted = wrong + len(bad), accepted + sum(verdicts[len(texts) :])
        for place, (text, verdict) in enumerate(zip([*texts, *bad], verdicts, strict=True)):
            if show and verdict != (place < len(texts)):
                print(f"{'missed' if place < len(texts) else 'took'} {text[-99:]!r} for {reference[:99]!r}")
    per_s = (count + wrong) / cpu_s
    return {"right_share": right / max(1, count), "n": len(rows), "texts": count, "answers_per_s": per_s} | {
        "wrong": wrong,
        "accepted": accepted,
    }


SAID: tuple[Callable[[str], str], ...] = (
    lambda form: f"We find\n\\[\\boxed{{{form}}}\\]",
    lambda form: f"Hence the final answer is ${form}$.",
    lambda form: f"<think>hm</think><answer>{form}</answer>",
)


def forms(answer: str) -> tuple[str, str, str]:
    """Return an answer respelled, without fractions of LaTeX, and as another expression of its value."""
    plain = (
        re.sub(r"^\\[(\[]\s*|\s*\\[)\]]$", "", answer.strip()).strip("$ ").replace("\\$", "").replace("$", "")
    )
    respelled = re.sub(r"\\[dt]?frac", r"\\tfrac", plain).replace("(", r"\left( ").replace(")", r" \right)")
    respelled = rf"\displaystyle {respelled} \,"
    flat = re.sub(r"([0-9])\s*\\[dt]?frac\{([0-9]+)\}\{([0-9]+)\}$", r"\1 \2/\3", plain)
    flat = re.sub(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"((\1)/(\2))", flat)
    flat = re.sub(r"\\(?:cdot|times)", "*", flat).replace("\\pi", "π").replace("{,}", ",")
    flat = f"{flat}.0" if _WHOLE.fullmatch(flat) else f" {flat.replace(' ', '  ')} "
    reading = read(tidy(plain))
    if _WHOLE.fullmatch(plain):
        made = rf"\frac{{{3 * int(plain)}}}{{3}}"
    elif _is_number(reading) and not re.search(r"\\pm|[=%]|\\in\b|text|mbox|_|circ", plain):
        made = rf"\frac{{6\left({tidy(plain)}\right)}}{{6}}"
    elif named := re.fullmatch(r"(\\?[A-Za-z](?:\(.\))?|[^=<>]+)=([^=<>]+)", plain):
        made = named[2] if len(named[1].strip()) < 7 else f"{named[2]} = {named[1]}"
    elif re.fullmatch(r"[^()\[\]]+(?:,[^()\[\]]+)+", plain) and "text" not in plain:
        made = r"\{" + ", ".join(reversed(plain.split(","))) + r"\}"
    else:
        made = plain.replace(",", " ,  ") + r"\;"
    return respelled, flat, made


def wrongs(answer: str, other: str, reference: str, rng: random.Random) -> Iterator[str]:
    """Yield answers that are wrong: another problem's, and others made of the right one."""
    known = [reading for one in reference.split(OR) for reading in read(tidy(one))]
    if all(_differ(other, one) for one in reference.split(OR)) and other.strip() != answer.strip():
        yield other
    plain = tidy(answer)
    if percent := re.fullmatch(r"([1-9][0-9]*)\s*\\?%", plain):
        yield from (f"{percent[1]}00%", f"{int(percent[1]) / 100}%")
    if dropped := re.match(r"-?[0-9]+(?=[A-Za-z]+$)", plain):
        yield dropped[0]
    if _is_number(tuple(known)) and not re.search(r"[=%]|text|_|\\pm", plain):
        if not same(tuple(known), read("0")):
            yield plain[1:] if plain.startswith("-") and _WHOLE.fullmatch(plain) else f"-({plain})"
            if not same(tuple(known), read("1")) and not same(tuple(known), read("-1")):
                yield rf"\frac{{1}}{{{plain}}}"
        yield from (f"2Q = {plain}", f"Q + 1 = {plain}", rf"Q \geq {plain}", rf"Q \neq {plain}")
        yield str(int(plain) + rng.choice((-1, 1))) if _WHOLE.fullmatch(plain) else f"{plain} + 1"
    if digit := re.search("[0-9]", plain):
        yield f"{plain[: digit.start()]}{(int(digit[0]) + rng.randint(1, 8)) % 10}{plain[digit.end() :]}"
    yield f"{rng.randint(1000, 9999)}, {plain}, {rng.randint(1000, 9999)}"


def _is_number(readings: tuple[Reading, ...]) -> bool:
    return bool(readings) and all(
        isinstance(one.value, tuple) and one.left_out not in RELATIONS for one in readings
    )


def _differ(one: str, other: str) -> bool:
    """Compare plain numbers without the judge, so that its own mistakes are seen, and all else by it."""
    values = []
    for text in (one, other):
        found = re.fullmatch(
            r"(-?)(?:\\frac\{([0-9]+)\}\{([0-9]+)\}|([0-9]+(?:\.[0-9]+)?))", text.strip(" $")
        )
        if found is None or not int(found[3] or 1):
            return not same(read(tidy(one)), read(tidy(other)))
        values.append(Fraction(found[4] or found[2]) / int(found[3] or 1) * (-1 if found[1] else 1))
    return values[0] != values[1]


REFERENCES = (
    "42",
    r"\frac{1}{3}",
    "x^2+2x+1",
    r"\{1,2,3\}",
    "(0,1]",
    r"2\sqrt{3}",
    "x - 3z = 0",
    r"k \geq 2",
    "(x,y) = t(1,2)",
)


def hostile(rng: random.Random) -> str:
    """Draw one string that stops algebra systems, fills memory or looks like an answer."""
    n, k = rng.randint(2, 9), rng.choice((40, 400, 3000))
    return rng.choice(
        (
            "^{".join([str(n)] * rng.randint(3, 6)) + "}" * 5,
            f"{n}^{{{rng.randint(10**6, 10**9)}}}",
            f"x = {n}^{{{n}^{{{n * k}}}}}",
            f"{rng.randint(10**5, 10**9)}!",
            "(" * 2 + f"{n * 10}!)!)!",
            rf"\binom{{10^{{{n}}}}}{{5 \cdot 10^{{{n - 1}}}}}",
            rf"\frac{{\binom{{{k}}}{{{k // 2}}}}}{{y}} = 1",
            str(n) * rng.choice((2000, 200_000)),
            "42." + "0" * k + "1",
            r"\frac{1}{" * k + "3" + "}" * k,
            "(" * k + "42" + ")" * k,
            "(" * k + "42",
            r"\sqrt{" * k + "2" + "}" * k,
            rf"\sqrt[{k}]{{{'7' * k}}}",
            f"(x+1)^{{{k}}}",
            f"(x+y+z+w+1)^{{{n * 10}}} = 0",
            rf"\sum_{{i=1}}^{{10^{{{n}}}}} i",
            rf"\int_0^1 e^{{x^x \sin(x^{n})}} dx",
            rf"\lim_{{x \to 0}} \frac{{\sin(\tan x) - \tan(\sin x)}}{{x^{n}}}",
            r"\sin(" * k + "1" + ")" * k,
            rf"\sin(10^{{{k}}})",
            rf"e^{{e^{{e^{{{n}}}}}}}",
            rf"\log(\log(\log({n}))) < x^{{{n}}} - x",
            r"\boxed{1} " * 5000,
            "x=1, " * k,
            "the answer is not known. " * k,
            r"\{" + ",".join(map(str, range(k))) + r"\}",
            r"\begin{pmatrix}" + r"\\".join("&".join("1" * 60) for _ in range(60)) + r"\end{pmatrix}",
            rf"x^{{{n}}}+x^5-3x^3+x-{n} = 0",
            rf"0 < x^{{{n + 4}}}-x^{{{n}}}+1 \le 1",
            rng.choice(("４２", "4\u200b2", "𝟜𝟚", "42\x00", "\u202e24", "四十二", "42\ud800")),
            rng.choice(("1e400", "--42", "4 2", r"\infty", r"\frac{0}{0}", r"\pm 42", "1e999999999", "NaN")),
            "0." + "3" * rng.randint(3, 45),
            "33." + "3" * rng.randint(2, 30) + "%",
            "1,2,3,41,42,43",
            " ".join(map(str, range(k))),
            "x = 42 = 43",
            "__import__('os').system('true')",
            "lambda x: x",
            "$__class__.__mro__$",
            "{" * 900 + "}" * 900,
            r"\frac" * 300,
            "|" * 901,
            "^" * 500,
            "a_{" * 200,
            ",".join(["(1"] * k),
            "x" * 1900,
            r"5 \text{a} " * 150 + "x",
            rng.choice((" ", r"\(", "$", "answer is ", r"\text{", "-")) * k + "x",
            r"\boxed{" * k + "41" + "}" * (k - 1),
            r"\left" * k + "42",
            "1" + ",000" * k,
            "+".join(f"1/({4999 - place}!4999!{n})" for place in range(60)),
            r"\sin" * k,
            " or ".join(["42"] * k),
        )
    )


def attacked(count: int, show: bool) -> tuple[list[float], int]:
    """Return the seconds that each hostile string took, and how many were accepted."""
    rng, times, right = random.Random(1), [], 0
    for _ in range(count):
        text, reference = hostile(rng), rng.choice(REFERENCES)
        text = text if "boxed" in text or rng.random() < 0.2 else rf"\boxed{{{text}}}"
        begun = time.process_time()
        verdict = judge(text, reference)
        times.append(time.process_time() - begun)
        right += verdict
        if show and (verdict or times[-1] > 0.3):
            print(f"{times[-1]:.2f} s, {verdict}: {text[:99]!r} for {reference!r}", file=sys.stderr)
    return times, right


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(part) for key, part in value.items()}
    return round(value, 4) if isinstance(value, float) else value


if __name__ == "__main__":
    execute(main)
