r"""Mathematical judge: the answer of a long text, and whether it is a reference answer.

The answer is what the last `<answer>..</answer>`, else the last `\boxed{..}` holds, else what follows the
last `####` or "the answer is", else the last formula or number of the last line. One answer is judged: of two
in a box neither is. It is compared by what it writes (`math_values`). Of the few references with a relation
that are not read so, math-verify is asked, where they are small, for at most `ALGEBRA_S`. A decimal is the
number that it writes: 0.333333 is not 1/3.

A model may have written the text: no more than its end is read, and nothing of it is ever run.
"""

import functools
import logging
import re
import signal
from dataclasses import dataclass
from typing import Any

from antiphon.environments.answers import END_CHARS, marked
from antiphon.environments.math_values import MOST_CHARS, RELATIONS, Readings, read, same, squeezed, tidy

OR = " OR "
"""Stands between references any of which is right."""
ALGEBRA_S = 0.8
"""Seconds of processor time after which an answer that math-verify looks at is wrong."""
ALGEBRA_CHARS, ALGEBRA_DIGITS, ALGEBRA_POWER, ALGEBRA_BRACKETS = 240, 12, 40, 24
"""What it looks at: characters, digits of a number, product of all powers, opening brackets."""

_SAID = re.compile(
    r"(?i)answer\s*(?:is|:|=)\s*:?(?:\s*(?:therefore|thus|hence|then|simply|just|equal to|given by)\b[,:]?)*"
)
_DENIED = re.compile(r"(?i)not\b|.*\bnot \S+$")
_FORMULA = re.compile(r"\$(?![0-9.,]+\s+[A-Za-z]{2})([^$]+)\$(?![0-9])|\\\((.+?)\\\)|\\\[(.+?)\\\]")
_NUMBER = re.compile(
    r"[(\[]\s*-?[0-9.]+(?:\s*,\s*-?[0-9.]+)+\s*[)\]]"
    r"|(?:(?<![\w)\]}])-\s?)?(?<![\w.])\.?[0-9][0-9,]*(?:\.[0-9]+)?(?:/[0-9]+)?(?:\s?\\?%)?"
)
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")
_DECIMAL = re.compile(r"([0-9]*)\.([0-9]+)")
_NAME = re.compile(
    r"(?:\\[a-z]+|\\(?:angle|overline)[ {]*[A-Z]+\}?|[A-Za-z]|[A-Z]{2,4}|[A-Za-z]{3,}|\\text\{\w+\})"
    r"(?:_\{?\w+\}?)?(?:\([\w, ]{1,8}\))?"
)
_UNEQUAL = re.compile(r"[<>!]=|\\neq(?![a-z])")
_RELATION = re.compile(r"[=<>]|\\(?:[lg]t|[lg]eq)(?![a-z])")
_KNOWN = re.compile(
    r"\\(?:frac|sqrt|pi|cdot|times|leq|geq|lt|gt|infty|cup|in|pm|alpha|beta|gamma|delta|theta|lambda|mu|rho|sigma|"
    r"tau|phi|omega|sin|cos|tan|log|ln)(?![A-Za-z])|\\[{}]|[0-9A-Za-z+\-/^_=<>(){}\[\],.| \n]"
)
"""No integrals, sums and factorials, which may take any time."""


@dataclass(frozen=True, slots=True)
class _Side:
    """An answer or a reference, ready to be compared."""

    text: str
    squeezed: str
    readings: Readings


def reference_of(value: Any) -> str | None:
    r"""Return a row's answer as `judge` takes it; None where there is none.

    It may be a list, any of which is right, and each a whole solution with its `\boxed{..}` or `####`.

    >>> reference_of(["$4$\n", "8/2"]), reference_of(r"So it is \boxed{5}.")
    ('$4$ OR 8/2', '5')
    """
    texts = [str(one) for one in value] if isinstance(value, list) else [str(value)]
    found = [_unboxed(text.rpartition("####")[2]).strip() for text in texts]
    return OR.join(dict.fromkeys(one for one in found if one)) or None


def can_compare(reference: str) -> bool:
    """Return whether more than a reference's very text can be found right."""
    sides = [_side(one) for one in reference.split(OR)]
    return any(
        one.readings or (_RELATION.search(one.text) and _parsed(one.text) is not None) for one in sides
    )


def warm_up() -> None:
    """Load what `judge` may need, so that processes forked from this one have it."""
    _by_algebra("x-1=0", "y-1=0")


def judge(text: str, reference: str) -> bool:
    r"""Return whether the answer of a text is right; `reference` is of `reference_of`.

    >>> judge(r"So it is \boxed{\frac{2}{4}}.", "0.5"), judge("It is 3.", "4")
    (True, False)
    """
    found = answer_in(text)
    if not found or len(found) > MOST_CHARS:
        return False
    ours = _side(found)
    for theirs in map(_side, reference.split(OR)):
        right = True if ours.squeezed == theirs.squeezed else _compared(ours, theirs)
        if right or (right is None and _by_algebra(ours.text, theirs.text)):
            return True
    return False


def answer_in(text: str) -> str:
    """Return the answer within a text, as this module says; empty when there is none."""
    text = text[-END_CHARS:]
    if (inner := marked(text)) is not None:
        return _unboxed(inner).strip()
    if "\\boxed{" in text:
        return ""  # cut off
    _, mark, rest = text.rpartition("####")
    if not mark and (said := [*_SAID.finditer(text)]):
        rest = re.split(r"\.\s", text[said[-1].end() :].strip() + " ", maxsplit=1)[0]
    elif not mark:
        rest = text.rstrip().rpartition("\n")[2]
    line = rest.strip().partition("\n")[0][-2 * MOST_CHARS :].strip("*_ ")
    if _DENIED.match(line):
        return ""
    if formulas := _FORMULA.findall(line):
        return "".join(formulas[-1]).strip()
    if _WORD.search(line) and (numbers := _NUMBER.findall(line)):
        return str(numbers[-1]).rstrip(",")
    return line


def _unboxed(text: str) -> str:
    while "\\boxed{" in text and (inner := marked(text)) is not None:
        text = inner
    return text


@functools.lru_cache(256)
def _side(text: str) -> _Side:
    text = tidy(text)
    return _Side(text, squeezed(text), read(text))


def _compared(ours: _Side, theirs: _Side) -> bool | None:
    """Compare by what is read; None where that is not enough."""
    if not theirs.readings:
        return None
    right = same(ours.readings, theirs.readings)
    read_whole = any(one.left_out not in RELATIONS for one in ours.readings)
    if right or read_whole or "=" not in ours.text or _UNEQUAL.search(ours.text):
        return right
    first, *parts = ours.text.split("=")  # 2 + 3 = 5: all that it says must be right, but a name
    parts += [] if _NAME.fullmatch(first.strip()) else [first]
    return all(same(read(part.strip()), theirs.readings) for part in parts)


class _TooLong(BaseException):
    """No `Exception`: the library swallows those."""


def _by_algebra(ours: str, theirs: str) -> bool:
    """Ask math-verify about relations; False where it must not, cannot or takes longer than `ALGEBRA_S`.

    Its own deadlines are in whole seconds of the clock. This needs the main thread, as they do.
    """

    def stop(*_: object) -> None:
        raise _TooLong

    if not _RELATION.search(ours + theirs):
        return False
    before = signal.signal(signal.SIGPROF, stop)
    try:
        signal.setitimer(signal.ITIMER_PROF, ALGEBRA_S, 0.1)  # again, where a clause for all errors took it
        right = _parsed(theirs)
        if right is None or (left := _parsed(ours)) is None:
            return False
        from math_verify import verify

        return bool(verify(right, left, timeout_seconds=None))
    except _TooLong:
        return False
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)


@functools.lru_cache(256)
def _parsed(text: str) -> Any:
    """Return the library's object of a tidy text; None where that is too large, or none."""
    powers = 1
    for power in re.findall(r"\^\{?-?([0-9]+)", text):
        powers *= max(1, int(power[:9]))
    if (
        len(text) > ALGEBRA_CHARS
        or powers > ALGEBRA_POWER
        or sum(map(text.count, "([{")) > ALGEBRA_BRACKETS
        or re.search(rf"[0-9]{{{ALGEBRA_DIGITS + 1}}}|\^\{{[^}}]*\^", text)
        or _KNOWN.sub("", text)
        or _WORD.search(text)
    ):
        return None
    from math_verify import LatexExtractionConfig, parse

    for name in ("math_verify.parser", "math_verify.grader"):  # that there is no deadline of its own
        logging.getLogger(name).setLevel(logging.ERROR)
    # Without fractions in place of decimals it would take 0.333333 for 1/3.
    exact = _DECIMAL.sub(lambda one: rf"\frac{{{one[1]}{one[2]}}}{{1{'0' * len(one[2])}}}", text)
    form = LatexExtractionConfig(boxed_match_priority=0)
    found = parse(rf"\boxed{{{exact}}}", [form], "no_fallback", parsing_timeout=None)
    return found[0] if found else None
