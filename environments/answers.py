r"""Answers: what a long text's answer is, and whether it is the right one.

What the last `<answer>..</answer>` holds is the answer, or else what the last `\boxed{..}` holds; without
either it is looked for in the whole text:

- exact: the text itself. Spaces at its ends, and how many are between words, do not count.
- number: the last number: 1,234.5 and -3 and 2e-3, and 3/4 or `\frac{3}{4}`. Whole numbers must be equal,
  others within a millionth of the reference.
- choice: the last letter A to J behind "answer is" or "answer:"; else the last in parentheses; else the last
  capital that stands alone and is no word ("A cat", "I think").

A model may have written the text, so no more than its end is read, each pattern takes time in proportion to
that, and numbers have few digits.
"""

import re
from fractions import Fraction
from typing import Any

KINDS = ("exact", "number", "choice")
END_CHARS = 20_000
"""Characters at the end of a text in which the answer is looked for."""
NUMBER_CHARS = 60
"""What is longer is no number."""

_NUMBER = re.compile(
    r"(?:(?<![\w)\]}^])-)?(?<![A-Za-z_^.0-9])"
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
    r"(?:[eE][-+]?[0-9]{1,3}(?![0-9]))?(?:/[0-9]+(?![0-9.]))?"
)
_FRACTION = re.compile(r"\\[dt]?frac\{(-?[0-9]{1,30})\}\{([0-9]{1,30})\}")
_LETTER = r"((?:[B-HJ]|[AI](?! [a-z]))(?![\w']))"
_SAID = re.compile(rf"(?i:answer)(?: is)?[\W_]{{0,10}}{_LETTER}")
_BRACKETED = re.compile(r"\(([A-J])\)")
_ALONE = re.compile(rf"(?<![\w']){_LETTER}")
_ONLY = re.compile(r"\W{0,10}([A-Ja-j])\W{0,10}")


def answer_in(text: str, kind: str) -> str:
    r"""Return the answer within a text, as this module says; empty when there is none.

    >>> answer_in("6 * 7 = 42. So <answer>42</answer> it is, in 3 steps.", "number")
    '42'
    >>> answer_in("Not (A), I think: the answer is **C**", "choice")
    'C'
    """
    text = text[-END_CHARS:]
    held = marked(text)
    text = text if held is None else held
    if kind == "exact":
        return " ".join(text.split())
    if kind == "number":
        found = [match[0] for match in _NUMBER.finditer(_plain(text))]
        return found[-1] if found and _value(found[-1]) is not None else ""
    if only := _ONLY.fullmatch(text):
        return only[1].upper()
    for pattern in (_SAID, _BRACKETED, _ALONE):
        if letters := pattern.findall(text):
            return str(letters[-1])
    return ""


def is_right(answer: str, reference: str, kind: str) -> bool:
    """Return whether what `answer_in` found is what `reference_of` made of the reference."""
    if kind != "number" or not answer:
        return bool(answer) and answer == reference
    found, right = _value(answer), _value(reference)
    if found is None or right is None:
        return False
    whole = found.denominator == right.denominator == 1
    return found == right if whole else abs(found - right) <= abs(right) / 1_000_000


def reference_of(value: Any, kind: str) -> str | None:
    """Return a row's answer in the form that `is_right` takes; None where it is none of its kind.

    A number may stand behind "####", as GSM8K has it. A whole number that stands for a letter counts from 0.

    >>> reference_of("6 * 7 = <<6*7=42>>42 #### 42", "number"), reference_of(2, "choice")
    ('42', 'C')
    """
    if kind == "choice" and isinstance(value, int):
        return "ABCDEFGHIJ"[value] if 0 <= value < 10 else None
    text = str(value)
    if kind == "exact":
        return " ".join(text.split()) or None
    if kind == "choice":
        only = _ONLY.fullmatch(text)
        return only[1].upper() if only else None
    if text.isascii() and text.isdigit() and len(text) <= NUMBER_CHARS:
        return text  # as most are, and there may be a million
    held = marked(text[-END_CHARS:])
    text = _plain(text.rpartition("####")[2] if held is None else held)
    found = _NUMBER.findall(text)
    alone = len(found) == 1 and not re.search(r"\w", text.replace(found[0], "", 1))
    return found[0] if alone and _value(found[0]) is not None else None


def marked(text: str) -> str | None:
    """Return what the last pair of answer tags, else the last closed box, holds."""
    stop = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(0, stop))
    if start >= 0:
        return text[start + len("<answer>") : stop]
    start = text.rfind("\\boxed{")
    depth = 0
    for place in range(start + len("\\boxed"), len(text) if start >= 0 else 0):
        depth += (text[place] == "{") - (text[place] == "}")
        if not depth:
            return text[start + len("\\boxed{") : place]
    return None


def _plain(text: str) -> str:
    return _FRACTION.sub(r"\1/\2", text.replace("−", "-"))


def _value(number: str) -> Fraction | None:
    if len(number) > NUMBER_CHARS:
        return None
    top, _, bottom = number.replace(",", "").partition("/")
    try:
        return Fraction(top) / Fraction(bottom or 1)
    except ZeroDivisionError:
        return None
