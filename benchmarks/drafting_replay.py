"""Replay of real responses against the draft tree: tokens per target pass, without any model.

A recorded response is replayed as if an engine sampled it: at each pass the tree drafts from the text so
far, the run of drafted tokens that equal the recorded ones is accepted, and one more token is
sampled. Accept-if-equal makes this exact: a verifying engine would need as many passes. Response 0 of
a prompt is the target; drafts come from its own text alone (the prompt included), from that and 1, 3 or 7
further responses to the same prompt, from that and the responses of earlier policy versions, or, as a
control, from nothing but three responses to another prompt. `control_with_own` adds the own text
to the control, so that its distance from `own_text` is all that foreign texts are worth. Printed are
medians over prompts of tokens / passes, at a fixed window of 8 and with the windows that a worker uses.
The last line is one JSON object.

    .venv/bin/python benchmarks/drafting_replay.py --corpus FILE --tokenizer FILE

The repository holds no recorded responses: a file of them, one JSON object a line, has to be given.
"""

import argparse
import gzip
import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from antiphon.core.drafting import kernels
from antiphon.core.drafting.config import DraftingSection
from antiphon.core.drafting.forest import DraftForest
from antiphon.core.drafting.windows import DraftWindows
from antiphon.core.errors import AntiphonError, ConfigError
from antiphon.core.records import IntArray

WINDOW = 8
"""Tokens of a draft under the fixed window."""
VOCABULARY = 1 << 24
"""Above every tokenizer's ids."""
SIBLINGS = (1, 3, 7)
CONTROL_SIBLINGS = 3
DRAFTING = DraftingSection()


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt: what is replayed and what may be drafted from; token ids throughout."""

    prompt: tuple[int, ...]
    target: IntArray
    siblings: tuple[IntArray, ...]
    """Further responses to the prompt, in the order of the file."""
    previous: tuple[IntArray, ...]
    """Responses of earlier policy versions, oldest first."""


def main() -> None:
    """Replay every corpus of a file and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, required=True, help="JSON lines, .gz or plain")
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer JSON, .gz or plain")
    parser.add_argument("--prompts", type=int, help="most prompts of each corpus; all by default")
    arguments = parser.parse_args()
    try:
        corpora = read_cases(arguments.corpus, arguments.tokenizer, arguments.prompts)
    except AntiphonError as error:
        print(f"drafting_replay: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    result: dict[str, dict[str, dict[str, float | None]]] = {"corpora": {}, "adaptive": {}}
    for name, cases in corpora.items():
        for kind, adaptive in (("corpora", False), ("adaptive", True)):
            result[kind][name] = medians(cases, adaptive)
            print_row(name, "adaptive" if adaptive else f"window {WINDOW}", result[kind][name])
    print(json.dumps(result))


def print_row(corpus: str, window: str, rates: Mapping[str, float | None]) -> None:
    """Print one line of the table."""
    cells = "  ".join(
        f"{key.removesuffix('_median')} {'-' if value is None else format(value, '.2f')}"
        for key, value in rates.items()
    )
    print(f"{corpus:24s} {window:9s} {cells}", flush=True)


def medians(cases: Sequence[Case], adaptive: bool) -> dict[str, float | None]:
    """Return the medians over prompts by draft source; None where no prompt has such a source.

    Args:
        cases: the prompts of one corpus.
        adaptive: windows as in a worker, instead of the fixed one.
    """
    found: dict[str, float | None] = {}
    found["own_text_median"] = replay_all(cases, [() for _ in cases], adaptive)
    for count in SIBLINGS:
        able = [case for case in cases if len(case.siblings) >= count]
        found[f"siblings{count}_median"] = replay_all(able, [c.siblings[:count] for c in able], adaptive)
    able = [case for case in cases if case.previous]
    found["previous_median"] = replay_all(able, [c.previous for c in able], adaptive)
    foreign = [control(cases, k) for k in range(len(cases))]
    found["control_median"] = replay_all(cases, foreign, adaptive, own_text=False)
    found["control_with_own_median"] = replay_all(cases, foreign, adaptive)
    return found


def control(cases: Sequence[Case], index: int) -> tuple[IntArray, ...]:
    """Return responses to the next prompt of the corpus: as many texts, and nothing of this prompt."""
    other = cases[(index + 1) % len(cases)]
    if len(cases) < 2:
        return ()
    return (*other.previous, other.target, *other.siblings)[:CONTROL_SIBLINGS]


def replay_all(
    cases: Sequence[Case],
    sources: Sequence[tuple[IntArray, ...]],
    adaptive: bool,
    own_text: bool = True,
) -> float | None:
    """Return the median of tokens per pass over prompts, each replayed alone.

    One forest serves all of them in turn, as in an engine, so its calibration carries over.
    """
    if not cases:
        return None
    most = DRAFTING.max_window if adaptive else WINDOW
    forest = DraftForest(1, most, DRAFTING.min_match)
    windows = DraftWindows(1, most) if adaptive else None
    rates = []
    for case, texts in zip(cases, sources, strict=True):
        usable = [(text, 1.0) for text in texts if len(text)]
        passes = replay(forest, windows, case, usable, own_text)
        rates.append(len(case.target) / passes)
    return round(statistics.median(rates), 3)


def replay(
    forest: DraftForest,
    windows: DraftWindows | None,
    case: Case,
    completions: Sequence[tuple[IntArray, float]],
    own_text: bool,
) -> int:
    """Return the target passes one recorded response takes."""
    prompt = case.prompt if own_text else case.prompt[-kernels.LONG_GRAM :]  # as context, not as a source
    group = forest.open_group(prompt, completions, len(case.target), VOCABULARY)
    forest.open_request(0, group, len(case.prompt), len(case.target), own_text)
    row = np.concatenate([np.array(case.prompt, dtype=np.int32), case.target])[None, :]
    if windows is not None:
        windows.open(0)
    slot = np.zeros(1, dtype=np.int64)
    length, passes = len(case.prompt), 0
    fixed = np.full(1, WINDOW, dtype=np.int64)
    while length < row.shape[1]:
        passes += 1
        wanted = fixed if windows is None else windows.limits(slot)
        limits = np.minimum(wanted, row.shape[1] - length - 1)  # the last token is sampled anyway
        drafts, counts, _ = forest.draft(slot, row, np.full(1, length, dtype=np.int64), limits, 0.0)
        count = int(counts[0])
        equal = drafts[0, :count] == row[0, length : length + count]
        accepted = count if equal.all() else int(equal.argmin())
        outcome = np.full(1, accepted, dtype=np.int64)
        forest.learn(slot, outcome)
        if windows is not None:
            windows.learn(slot, np.full(1, count, dtype=np.int64), outcome)
        length += accepted + 1
    forest.close_request(0, finished=True)
    forest.close_group(group)
    return passes


def read_cases(corpus: Path, tokenizer_path: Path, prompts: int | None) -> dict[str, list[Case]]:
    """Read, group and tokenize a file of rollouts, by corpus name.

    Args:
        corpus: JSON lines with `corpus, prompt_id, prompt` and either `responses` (several of one
            policy) or `response, order` (one of each policy version).
        tokenizer_path: a tokenizer JSON of the `tokenizers` library.
        prompts: most prompts of each corpus, in the order of the file; None takes all.

    Raises:
        ConfigError: a file is missing, is not of that format, or holds nothing to replay.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(read_text(tokenizer_path))
    except Exception as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"--tokenizer={tokenizer_path} is no tokenizer JSON ({error}); give another file"
        ) from None

    def encode(text: str) -> IntArray:
        return np.array(tokenizer.encode(text).ids, dtype=np.int32)

    found: dict[str, list[Case]] = {}
    for name, rows in by_prompt(read_rows(corpus)):
        if prompts is not None and len(found.get(name, ())) >= prompts:
            continue
        case = make_case(rows, encode)
        if case is not None:
            found.setdefault(name, []).append(case)
    if not found:
        raise ConfigError(f"--corpus={corpus} holds no prompt with a response; give a file of rollouts")
    return found


def make_case(rows: Sequence[Mapping[str, Any]], encode: Any) -> Case | None:
    """Turn the rows of one prompt into a case; None where the target is empty."""
    prompt = tuple(encode(rows[0]["prompt"] or "").tolist())
    if "responses" in rows[0]:
        texts = [encode(text) for text in rows[0]["responses"]]
        target, siblings, previous = texts[0], tuple(t for t in texts[1:] if len(t)), ()
    else:
        # The newest version's first response is the target, its further ones are siblings.
        newest = max(row["order"] for row in rows)
        last = [encode(row["response"]) for row in rows if row["order"] == newest]
        older = sorted((row for row in rows if row["order"] < newest), key=lambda row: row["order"])
        target, siblings = last[0], tuple(t for t in last[1:] if len(t))
        previous = tuple(t for t in (encode(row["response"]) for row in older) if len(t))
    return Case(prompt, target, siblings, previous) if len(target) else None


def by_prompt(rows: Iterator[Mapping[str, Any]]) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    """Yield (corpus, rows of one prompt) in the order prompts first occur."""
    grouped: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        grouped.setdefault((row["corpus"], row["prompt_id"]), []).append(row)
    for (name, _), members in grouped.items():
        yield name, members


def read_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the checked rows of a file of rollouts."""
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"--corpus={path} line {number} is not JSON ({error}); give JSON lines"
            ) from None
        if not sound_row(row):
            raise ConfigError(
                f"--corpus={path} line {number} lacks strings `corpus`, `prompt_id` and `prompt` with a list "
                "`responses` "
                "or with `response` and a number `order`; give a file in the format of multi_sample.jsonl.gz "
                "or policy_versions.jsonl.gz"
            )
        yield row


def sound_row(row: Any) -> bool:
    """Tell whether a row has the fields and types of one of the two formats."""
    if not isinstance(row, dict) or not all(
        isinstance(row.get(k), str) for k in ("corpus", "prompt_id", "prompt")
    ):
        return False
    responses = row.get("responses")
    if responses is not None:
        return isinstance(responses, list) and bool(responses) and all(isinstance(t, str) for t in responses)
    return isinstance(row.get("response"), str) and isinstance(row.get("order"), int)


def read_text(path: Path) -> str:
    """Return the text of a plain or gzip file."""
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); name a readable file in UTF-8 or gzip") from None


if __name__ == "__main__":
    main()
