r"""Values of mathematical answers: numbers, lists, intervals, words, read without a library of algebra.

Rational numbers are exact, so 0.333333 is not 1/3. All others are numbers of 60 digits, which are the same if
40 digits are; symbols stand for two fixed numbers, so that equal expressions are the same at both. One text
may have several readings: `75\%` is 3/4 and also 75, `6 cm` also 6. An equation or inequality is one side
less the other, and the same as a multiple of it. All work is bounded, so that the text of a model can be
given to `read`.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import factorial
from operator import add, mul, sub, truediv
from typing import Any

from blake3 import blake3
from mpmath.ctx_mp import MPContext

MOST_CHARS, MOST_ITEMS, MOST_DEPTH, MOST_TOKENS = 2000, 64, 24, 400
"""Characters that are read, entries of a list, brackets within brackets, tokens of an expression."""
MOST_BITS, MOST_FACTORIAL, MOST_ARGUMENT = 1 << 16, 5000, 10**30
"""Of a number that is exact; what a factorial may be of, and a sine or an exponential."""
SAME = 10**-40
RELATIONS = ("=", "<", "leq")

Number = Any
"""A `Fraction`, or a complex number of `_mp`."""


class _UnreadError(ValueError):
    """A text is none of what is read here."""


@dataclass(frozen=True, slots=True)
class Group:
    """Several values: a list `,`, a set `{`, a union `u`, a matrix `m`, a ratio `:`, or two brackets."""

    kind: str
    items: "tuple[Readings, ...]"


@dataclass(frozen=True, slots=True)
class Reading:
    """One reading of a text."""

    value: tuple[Number, ...] | Group | str
    """A number is one for each value of its symbols."""
    left_out: str = ""
    """What the value is of: a name before `=`, a base, how a percent sign was read, a relation to zero.

    Two different ones do not match; a missing one does, unless the answer alone has a base.
    """


Readings = tuple[Reading, ...]

_mp = MPContext()
_mp.dps = 60
_FUNCTIONS: dict[str, Callable[[Number], Number]] = {
    **{f"{name}{h}": getattr(_mp, f"{name}{h}") for name in ("sin", "cos", "tan") for h in ("", "h")},
    **{f"{made}{name}": getattr(_mp, f"a{name}") for name in ("sin", "cos", "tan") for made in ("a", "arc")},
    **{"cot": _mp.cot, "sec": _mp.sec, "csc": _mp.csc, "ln": _mp.log, "log": _mp.log, "exp": _mp.exp},
}
_CONSTANTS = {r"\pi": +_mp.pi, "e": +_mp.e, "i": _mp.mpc(0, 1)}
_ROUNDING = {"|": abs, r"\lfloor": _mp.floor, r"\lceil": _mp.ceil}
_OPENING, _CLOSING = r"( [ { \{ | \lfloor \lceil", r") ] } \} | \rfloor \rceil"
_BRACKETS = dict(zip(_OPENING.split(), _CLOSING.split(), strict=True))
_SYMBOL = re.compile(
    r"[A-Za-z]|\\(?:alpha|beta|gamma|delta|(?:var)?epsilon|zeta|eta|theta|kappa|lambda|mu|nu|xi|pi|rho|sigma|tau|"
    r"(?:var)?phi|chi|psi|omega|Gamma|Delta|Theta|Lambda|Phi|Psi|Omega|hbar|ell)"
)
_OPERAND = re.compile(rf"[0-9.]+|\\(?:frac|sqrt)|{_SYMBOL.pattern}")
_UNICODE = {
    **{
        "−": "-",
        "–": "-",
        "×": r"\times ",
        "·": r"\cdot ",
        "÷": "/",
        "π": r"\pi ",
        "∞": r"\infty ",
        "°": r"\degree ",
    },
    **{"∪": r"\cup ", "≤": r"\leq ", "≥": r"\geq ", "√": r"\sqrt ", "£": "", "€": "", "\xa0": " "},
    **{"**": "^", "*": r"\cdot ", "{,}": ","},
}
_NAMES = {
    **dict.fromkeys(("dfrac", "tfrac", "cfrac"), "frac"),
    **dict.fromkeys(("mbox", "textbf", "textrm", "textit", "textnormal", "mathrm", "operatorname"), "text"),
    **{"dbinom": "binom", "tbinom": "binom", "le": "leq", "ge": "geq", "leqslant": "leq", "geqslant": "geq"},
    **{"lbrace": "{", "rbrace": "}", "div": "/", "ast": "cdot", "lvert": "|", "rvert": "|", "ne": "neq"},
}
_GONE = re.compile(
    r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle|phantom|hspace\{[^{}]*\})(?![A-Za-z])"
    r"|(?<!\\)\\[!,;: ]|\\?\$"
)
_DEGREE = re.compile(r"\^\{?\\circ\}?|\\degree(?![A-Za-z])")
_OF_ANGLES = re.compile(r"sin|cos|tan|cot|sec|csc")
_TOKEN = re.compile(r"(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3}(?![0-9.]))?|\\[A-Za-z]+|\\.|\S")
_BARE = re.compile(r"(?<![\\A-Za-z{])(pi|sqrt|sin|cos|tan|arctan|log|ln|exp)(?![A-Za-z}])")
_THOUSANDS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9,])")
_SCALE = re.compile(r"([0-9)}])\s*(\\text\{\s*)?(hundred|thousand|million|billion|trillion)(?![A-Za-z])")
_ZEROS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_UNIT = re.compile(
    r"(.*(?:[0-9})]|\\pi))(?:\s*(?:(?:/\s*)?\\text\{[^{}]*\}(?:\^\{?-?[0-9]\}?)?\s*)+"
    r"|\s+(?:[A-Z]?[a-z]{4,}|[mck]m|[mk]g|m[lL]|ft|in|yd|mi|oz|lbs?|hrs?|min|sec|kph|mph|sq|cu)(?![A-Za-z])"
    r"[A-Za-z ./]*(?:\^[0-9])?)"
)
"""Letters behind a number are factors, but for words with a space before them."""
_BASE = re.compile(r"(-?[0-9]+)_(?:\{([0-9]{1,2})\}|([0-9]))")
_NAMED = re.compile(
    r"((?![a-z]{2}[ =])"
    r"\\?[A-Za-z]+(?:_\{?\w+\}?)?(?:\([A-Za-z,\s]{1,8}\))?|\([A-Za-z,\s]{1,12}\))\s*(?:=|\\in(?![a-z]))\s*(?=\S)"
)
_AND = re.compile(r",?\s*(?:\\text\{,?\s*(?:and|or)\s*\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z]))\s*")
_CLOCK = re.compile(r"(.*[0-9]) *(?:\\text\{)? *([ap])\.? ?m\.?\}?")
_WORDS = re.compile(r"\\text\{([^{}]*)\}|(\(?[A-J]\)?|\([a-j]\)|[A-Za-z][A-Za-z' -]*[A-Za-z])")
_RELATION = re.compile(r"(=|<|>|\\(?:[lg]t|[lg]eq)(?![a-z]))")
_APPLIED = re.compile(r"(?<![A-Za-z\\])[f-h]\s*\(|[A-Za-z]\s*\(-?[0-9.]+\)")
_MATRIX = re.compile(r"\\begin\{[pb]matrix\}(.*)\\end\{[pb]matrix\}", re.DOTALL)


def tidy(text: str) -> str:
    r"""Return a text without what changes only its looks.

    >>> tidy(r"$\left( \dfrac12,\, 3 \right)$."), tidy(r"\$32,\!348")
    ('( \\frac12, 3 )', '32,348')
    """
    for shown, plain in _UNICODE.items():
        text = text.replace(shown, plain)
    if text.strip()[:2] in ("\\(", "\\["):
        text = re.sub(r"\\[()\[\]]", " ", text)
    text = re.sub(r"\\q?quad|~", " ", text)
    text = re.sub(r"\\([A-Za-z]+)", lambda found: "\\" + _NAMES.get(found[1], found[1]), _GONE.sub("", text))
    text = _BARE.sub(r"\\\1", _DEGREE.sub(r"\\degree " if _OF_ANGLES.search(text) else "", text))
    return text.replace("\\|", "|").replace("\\/", "/").strip().rstrip(" .,;")


def squeezed(text: str) -> str:
    """Return a tidy text in the form in which two are the same text: without idle spaces and braces."""
    return re.sub(r"\{([^\\{}])\}", r"\1", re.sub(r"(?<![0-9])\s+|\s+(?![0-9])", "", text))


def read(text: str) -> Readings:
    r"""Return the readings of a tidy text; none when it is nothing that is read here.

    >>> read(r"\text{East}")[0].value, read("2 1/2")[0].value
    ('east', (Fraction(5, 2),))
    >>> same(read(r"\frac{\sqrt{12}}{2}"), read("3^{1/2}")), same(read("1/3"), read("0.333333"))
    (True, False)
    """
    try:
        return _readings(text, 0) if len(text) <= MOST_CHARS else ()
    except (ArithmeticError, ValueError, RecursionError):
        return ()


def same(ours: Readings, theirs: Readings) -> bool:
    """Return whether some reading of an answer is one of a reference."""
    return any(_same(one, other) for one in ours for other in theirs)


def _same(one: Reading, other: Reading) -> bool:
    a, b = one.value, other.value
    required = other.left_out or one.left_out.startswith("base ")
    if one.left_out and required and one.left_out != other.left_out:
        return False
    if isinstance(a, tuple) and isinstance(b, tuple):
        if (relation := other.left_out) in RELATIONS:
            if relation != one.left_out or 0 in a or 0 in b:
                return False
            ratio, again = (x / y for x, y in zip(a, b, strict=True))
            return _equal(ratio, again) and (relation == "=" or bool(_mp.re(ratio) > 0))
        return all(_equal(a[place % len(a)], b[place % len(b)]) for place in range(max(len(a), len(b))))
    if not isinstance(a, Group) or not isinstance(b, Group):
        return isinstance(a, str) and a == b
    if len(a.items) != len(b.items):
        return False
    if {a.kind, b.kind} in ({","}, {"{"}, {",", "{"}, {"u"}):  # in any order
        left = list(b.items)
        for item in a.items:
            found = next((place for place, entry in enumerate(left) if same(item, entry)), None)
            if found is None:
                return False
            del left[found]
        return True
    alike = a.kind == b.kind or {a.kind, b.kind} == {",", "()"}
    return alike and all(same(x, y) for x, y in zip(a.items, b.items, strict=True))


def _equal(a: Number, b: Number) -> bool:
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a == b
    a, b = _mp.convert(a), _mp.convert(b)
    return bool(abs(a - b) <= SAME * max(abs(a), abs(b)))


def _readings(text: str, depth: int) -> Readings:
    text = text.strip()
    if not text or depth > MOST_DEPTH:
        raise _UnreadError
    found: Readings = ()
    if _THOUSANDS.search(text) and not re.search(r"[(\[]", text):
        found = _readings(_THOUSANDS.sub(lambda number: number[0].replace(",", ""), text), depth + 1)
        if len(_split(text, ",")) < 2:
            return found
    for marks, kind in ((",", ","), (";", ","), ("\\cup", "u"), (":", ":")):
        if len(parts := _split(_AND.sub(",", text) if marks == "," else text, marks)) > 1:
            return (*found, Reading(_group(kind, parts, depth)))
    if (named := _NAMED.match(text)) and "\\text" not in named[1]:
        name, rest = squeezed(named[1]), _readings(text[named.end() :], depth + 1)
        found = tuple(Reading(one.value, one.left_out or name) for one in rest)
        formula = any(isinstance(one.value, tuple) and len(one.value) > 1 for one in rest)
        related = formula and "\\in" not in text and not _APPLIED.search(text)
        return (*found, _relation(text)) if related else found
    if _RELATION.search(text):
        return (_relation(text),)
    if _SCALE.search(text):
        return _readings(
            _SCALE.sub(lambda one: rf"{one[1]}\cdot 10^{{{_ZEROS[one[3]]}}}{one[2] or ' '}", text), depth + 1
        )
    if clock := _CLOCK.fullmatch(text):
        return tuple(Reading(one.value, f"{clock[2]}m") for one in _readings(clock[1], depth + 1))
    if words := _WORDS.fullmatch(text):
        inner = " ".join((words[1] or words[2] or "").split()).rstrip(".")
        if re.search("[0-9,]| and ", inner):
            return _readings(inner, depth + 1)
        letter = inner.strip("()")
        product = words[1] is None and inner.lower() != "no" and not re.search("[A-Za-z]{3}", inner)
        folded = letter.upper() if len(letter) == 1 else inner if product else inner.lower()
        found = (Reading(folded),)
        if not product:
            return found
    if infinite := re.fullmatch(r"([-+]?)\s*\\infty", text):
        return (Reading(infinite[1].strip("+") + "oo"),)
    if (matrix := _MATRIX.fullmatch(text)) and "\\begin" not in matrix[1]:
        rows = [_group("m", row.split("&"), depth) for row in matrix[1].split("\\\\") if row.strip()]
        return (Reading(Group("m", tuple((Reading(row),) for row in rows))),)
    if text.count("\\pm") == 1:
        return (Reading(_group(",", [text.replace("\\pm", sign) for sign in "+-"], depth)),)
    begin = 2 if text[:2] == "\\{" else 1
    opening, closing, inner = text[:begin], text[-begin:], text[begin:-begin]
    if opening in ("(", "[", "\\{") and closing in (")", "]", "\\}") and len(_split(text, text[-1])) == 2:
        parts = _split(inner, ",")
        if len(parts) > 1 or opening == "\\{":
            return (Reading(_group("{" if opening == "\\{" else opening + closing, parts, depth)),)
    if base := _BASE.fullmatch(text):
        return (Reading((_number(base[1]),), f"base {base[2] or base[3]}"),)
    if percent := re.fullmatch(r"(.*?)\s*(?:\\?%|\\text\{ ?percent\}|percent)", text):
        value = _expression(percent[1])
        return Reading(value, "percent"), Reading(tuple(part / 100 for part in value), "hundredth")
    unit = _UNIT.fullmatch(text)
    try:
        found = (*found, Reading(_expression(text)))
    except (ArithmeticError, ValueError):
        if not unit and not found:
            raise
    if unit and len(value := _expression(unit[1])) == 1:  # one without symbols
        found = (*found, Reading(value))
    return found


def _relation(text: str) -> Reading:
    """Return one side less the other, at two points: a multiple of it says the same."""
    if _APPLIED.search(text):  # not a product, so that f(1) < f(2) is not f(1) < f(7)
        raise _UnreadError
    left, sign, right, *more = _RELATION.split(text)
    if more:
        parts = _relation(left + sign + right), _relation("".join((right, *more)))
        return Reading(Group(",", tuple((part,) for part in parts)))
    if sign in (">", "\\gt", "\\geq"):
        left, right = right, left
    if len(values := _expression(f"{left}-({right})")) < 2:
        raise _UnreadError
    return Reading(values, {"=": "=", "\\leq": "leq", "\\geq": "leq"}.get(sign, "<"))


def _group(kind: str, parts: Sequence[str], depth: int) -> Group:
    if len(parts) > MOST_ITEMS:
        raise _UnreadError
    return Group(kind, tuple(_readings(part, depth + 1) for part in parts))


def _split(text: str, mark: str) -> list[str]:
    """Split at a mark that stands outside of all brackets."""
    parts, depth, begin = [], 0, 0
    for place, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0 and text.startswith(mark, place):
            parts.append(text[begin:place])
            begin = place + len(mark)
    return [*parts, text[begin:]]


def _number(text: str) -> Fraction:
    mantissa, _, power = text.lower().partition("e")
    if len(mantissa) + abs(int(power or 0)) > MOST_BITS // 64:
        raise _UnreadError
    return Fraction(text)


def _expression(text: str) -> tuple[Number, ...]:
    text = _THOUSANDS.sub(lambda number: number[0].replace(",", ""), text)
    reader = _Reader(text, 0)
    first = reader.whole()
    return (first, _Reader(text, 1).whole()) if reader.symbols else (first,)


def _made(operator: Callable[[Number, Number], Number], a: Number, b: Number) -> Number:
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        if sum(part.bit_length() for one in (a, b) for part in one.as_integer_ratio()) > MOST_BITS:
            raise _UnreadError
        return operator(a, b)
    a, b = _mp.convert(a), _mp.convert(b)
    if operator in (add, sub) and a and b and not SAME < abs(a) / abs(b) < 1 / SAME:
        raise _UnreadError  # the smaller one would be lost
    return operator(a, b)


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(exponent, Fraction) and isinstance(base, Fraction):
        bits = max(part.bit_length() for part in base.as_integer_ratio())
        if exponent.denominator == 1 and abs(exponent) * (bits if abs(base) != 1 else 0) <= MOST_BITS:
            return base ** int(exponent)
    return _mp.power(_mp.convert(base), _small(exponent))


def _small(value: Number) -> Number:
    if (value := _mp.convert(value)) and not abs(value) < MOST_ARGUMENT:
        raise _UnreadError
    return value


def _factorial(value: Number) -> Number:
    if not abs(value) <= MOST_FACTORIAL:
        raise _UnreadError
    if isinstance(value, Fraction) and value.denominator == 1 and value >= 0:
        return Fraction(factorial(int(value)))
    return _mp.gamma(_mp.convert(value) + 1)


class _Reader:
    """Reads one expression, of LaTeX or plain text, by recursive descent."""

    def __init__(self, text: str, point: int) -> None:
        """Prepare; `point` says which of their two values the symbols have."""
        self._tokens = _TOKEN.findall(text)
        self._at, self._depth, self._angles, self._point = 0, 0, 0, point
        self.symbols = False
        if len(self._tokens) > MOST_TOKENS:
            raise _UnreadError

    def whole(self) -> Number:
        """Return the value of the whole text."""
        value = self._sum()
        if self._at < len(self._tokens) or not _mp.isfinite(value):
            raise _UnreadError
        return value

    def _next(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _takes(self, *tokens: str) -> str:
        """Return the next token if it is one of these, and go behind it."""
        token = self._next()
        if token not in tokens:
            return ""
        self._at += 1
        return token

    def _sum(self) -> Number:
        value = self._term()
        while sign := self._takes("+", "-"):
            value = _made(add if sign == "+" else sub, value, self._term())
        return value

    def _term(self) -> Number:
        sign = -1 if self._takes("+", "-") == "-" else 1
        begin = self._at
        value = self._factor()
        while token := self._next():
            last = self._tokens[self._at - 1]
            mixed = self._at == begin + 1 and last.isdecimal()
            if operator := self._takes("\\cdot", "\\times", "/"):
                value *= -1 if self._takes("-") else 1
                value = _made(truediv if operator == "/" else mul, value, self._factor())
            elif mixed and token.isdecimal() and self._tokens[self._at + 1 : self._at + 2] == ["/"]:
                top, _, bottom = self._factor(), self._takes("/"), self._factor()  # 7 1/3
                proper = isinstance(top, Fraction) and isinstance(bottom, Fraction) and bottom > top > 0
                value += top / bottom if proper else _no_number()
            elif token[0] in "([{\\" or token.isalpha() or token[0].isdecimal() > last[-1].isdecimal():
                if token in ("\\rfloor", "\\rceil", "\\}"):
                    break
                factor = self._factor()
                mixed = mixed and token == "\\frac" and isinstance(factor, Fraction) and 0 < factor < 1
                value = _made(add if mixed else mul, value, factor)
            else:
                break
        return sign * value

    def _factor(self) -> Number:
        value = self._base()
        while mark := self._takes("!", "^"):
            value = _factorial(value) if mark == "!" else _power(value, self._argument())
        return value

    def _argument(self) -> Number:
        return -self._base() if self._takes("-") else self._base()

    def _digit(self) -> Number:
        r"""Return an argument of `\frac`, which without braces is one digit."""
        token = self._next()
        if token.isdecimal() and len(token) > 1:
            self._tokens[self._at : self._at + 1] = [token[0], token[1:]]
        return self._base()

    def _base(self) -> Number:
        self._depth += 1
        if self._depth > MOST_DEPTH:
            raise _UnreadError
        value = self._part()
        if self._takes("\\degree") and self._angles:
            value = _made(mul, value, _mp.pi / 180)
        self._depth -= 1
        return value

    def _part(self) -> Number:
        token = self._next()
        self._at += 1
        if re.match(r"\.?[0-9]", token, re.ASCII):
            return _number(token)
        if closing := _BRACKETS.get(token):
            value = self._sum()
            if not self._takes(closing):
                raise _UnreadError
            return _ROUNDING[token](_mp.convert(value)) if token in _ROUNDING else value
        if token == "\\frac":
            return _made(truediv, self._digit(), self._digit())
        if token == "\\binom":
            whole, part = self._base(), self._base()
            below = _made(mul, _factorial(part), _factorial(_made(sub, whole, part)))
            return _made(truediv, _factorial(whole), below)
        if token == "\\sqrt":
            degree = self._base() if self._next() == "[" else 2
            return _mp.root(
                _mp.convert(self._base()), int(degree) if degree in range(2, 100) else _no_number()
            )
        if token[1:] in _FUNCTIONS:
            return self._applied(token[1:])
        return self._symbol(token)

    def _applied(self, name: str) -> Number:
        exponent: Number = self._argument() if self._takes("^") else Fraction(1)
        base = self._base() if name == "log" and self._takes("_") else None
        self._angles += 1
        if self._next() == "(":
            value = self._base()
        else:
            value = self._argument()
            while _OPERAND.fullmatch(self._next()):
                value = _made(mul, value, self._factor())
        self._angles -= 1
        if exponent == -1:
            name, exponent = f"a{name}", Fraction(1)
        function: Callable[[Number], Number] = _FUNCTIONS.get(name, _no_number)
        value = function(_small(value))
        return _power(value / _mp.log(_small(base)) if base is not None else value, exponent)

    def _symbol(self, token: str) -> Number:
        if not _SYMBOL.fullmatch(token):
            raise _UnreadError
        if self._takes("_"):
            end = self._at + 1
            if self._next() == "{":
                end = self._tokens.index("}", self._at) + 1
            token += "_" + "".join(self._tokens[self._at : end]).strip("{}")
            self._at = end
        elif token in _CONSTANTS:
            return _CONSTANTS[token]
        self.symbols = True
        digest = blake3(f"{self._point} {token}".encode()).digest()
        return _mp.mpf(int.from_bytes(digest, "little")) / (1 << 255) + 1


def _no_number(*_: Number) -> Number:
    raise _UnreadError
