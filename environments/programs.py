r"""Programs: whether what a policy wrote does what a row's tests ask of it.

The program is what the last closed block between lines of three backticks holds, else what the last
`<answer>..</answer>` does, else the whole text. A row has its tests in one of these forms, under the key that
`environment.parameters.tests` names:

- code with assert statements: a text, `{"functional": text}`, or a list of lines (MBPP). Where it defines
  `check` and does not call it, it is called with the function that `entry_point` names (HumanEval). What the
  keys of `SETUP` have runs before it.
- arguments of the function that `entry_point` names, for which the reference solution says what is right:
  `base_input`, or `plus_input`, which adds to them (HumanEval+, MBPP+).
- standard input and output of a script: `[{"input": .., "output": ..}, ..]`, or lists `inputs` and `outputs`.

With an `entry_point` the program may go on with or use the row's `prompt`.

The judge runs the row's code and the program runs in a runner (`scoring.runners`), which is asked for values.
They are compared here, where everything is of a built-in type, so `f(2) == 4` means what it says.
"""

import ast
import builtins
import contextlib
import json
import math
import signal
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType
from typing import Any

from antiphon.core.errors import ContractError
from antiphon.environments.scoring.runners import (
    Named,
    ProgramEndedError,
    Runners,
    call,
    decode,
    encode,
    execute,
    output_of,
)

PROGRAMS, CREDITS = "programs", ("all", "share")
"""The name of this score, and what is paid: whole programs alone, or the share of tests passed."""
PROGRAM_CHARS = 1 << 16
"""What is longer is no program."""
SETUP = ("sanitized_imports", "test_imports", "setup", "test_setup_code")
"""Keys of a row that may have code for its tests, as a text or a list of lines."""
TOLERANCE = 1e-6, 1e-7
"""How far a floating-point number may be from a reference solution's: absolute, relative (EvalPlus)."""
_MODULES = "bisect collections functools heapq itertools math operator random re string typing builtins"
IMPORTS = "".join(f"import {name}\nfrom {name} import *\n" for name in _MODULES.split(" "))
"""What LeetCode has imported where a class `Solution` begins; last what others hide, such as `pow`."""
_FENCE = "```"
_NOTE = "_note_"


class LateError(BaseException):
    """The time of a program is over, or its verdict is clear; no test may catch it."""


@dataclass(frozen=True, slots=True)
class Tests:
    """What a program must do; one of `code`, `cases` and `scripts` is there."""

    entry: str = ""
    """The function that is asked for; empty where the tests name what they call."""
    before: str = ""
    """Code that the program goes on with or uses, and the tests too."""
    solution: str = ""
    code: str = ""
    """Assert statements, with what they need."""
    cases: tuple[list[Any], ...] = ()
    """Arguments of the entry."""
    tolerance: float = 0.0
    scripts: tuple[tuple[str, str], ...] = ()
    """Standard inputs and outputs."""


_judging: list[tuple[Runners, float]] = []


def judge_with(runners: Runners, limit_s: float) -> None:
    """Let this process judge: with these runners, and for each program this many seconds."""
    _judging[:] = [(runners, limit_s)]


def program_in(text: str) -> str:
    r"""Return the program within a text.

    >>> program_in("So:\n```python\nprint(1)\n```\nThat is all.")
    'print(1)\n'
    >>> program_in("It is <answer>n + 1</answer>")
    'n + 1'
    """
    lines = text.splitlines(keepends=True)
    fences = [number for number, line in enumerate(lines) if line.lstrip().startswith(_FENCE)]
    if len(fences) > 1:
        last = len(fences) // 2 * 2
        return "".join(lines[fences[last - 2] + 1 : fences[last - 1]])
    stop = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(0, stop))
    return text[start + len("<answer>") : stop] if start >= 0 else text


def read_tests(row: Mapping[str, Any], key: str, solution: str) -> Tests:
    """Read a row's tests under a key; `solution` is its reference solution, or empty.

    Raises:
        ValueError: saying what is wrong with which key.
    """
    try:
        return _read_tests(row, key, solution)
    except TypeError as error:
        raise ValueError(f"{key!r} is in none of the forms that tests may have: {error}") from error


def _read_tests(row: Mapping[str, Any], key: str, solution: str) -> Tests:
    found = row.get(key)
    if isinstance(found, str):
        with contextlib.suppress(ValueError):
            found = json.loads(found)
    if key == "plus_input" and row.get("base_input"):
        found = [*row["base_input"], *(found or ())]
    if not isinstance(found, str | list | dict) or not found:
        there = f"is {found!r:.40}" if key in row else f"is not among its keys {', '.join(row)[:200]}"
        raise ValueError(f"{key!r}, where the tests should be, {there}")
    entry = row.get("entry_point") or ""
    before = row.get("prompt") or "" if entry else ""
    if not isinstance(entry, str) or not isinstance(before, str):
        raise ValueError("entry_point or prompt is no text")
    if key in ("base_input", "plus_input"):
        if not entry or not solution or not all(isinstance(one, list) for one in found):
            raise ValueError(f"{key!r} takes lists of arguments, entry_point and a reference solution")
        return Tests(entry, before, solution, cases=(*found,), tolerance=float(row.get("atol") or 0.0))
    if isinstance(found, dict) and "functional" in found:
        found = found["functional"]
    if isinstance(found, list) and all(isinstance(one, dict) for one in found):
        found = {f"{name}s": [one.get(name) for one in found] for name in ("input", "output")}
    if isinstance(found, dict):
        inputs, outputs = found.get("inputs"), found.get("outputs")
        pairs = [*zip(inputs, outputs, strict=False)] if inputs and outputs else []
        texts = all(isinstance(one, str) for pair in pairs for one in pair)
        if not pairs or not texts or len(inputs or "") != len(outputs or ""):
            raise ValueError(f"{key!r} has no inputs, or not as many outputs, as texts")
        return Tests(scripts=(*pairs,))
    try:
        code = "\n".join(_lines(part) for part in (*(row.get(name) for name in SETUP), found) if part)
        classes = _compiled(code, entry, solution)[3]
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{key!r} is no code with assert statements: {error}") from error
    return Tests(entry, IMPORTS + before if "Solution" in classes else before, solution, code)


def share_passed(text: str, tests: Tests, *, all_or_nothing: bool) -> float:
    """Return the share of its tests that the program within a text passes.

    An assert statement is one test, and is passed when it holds as often as it is reached. A program that
    ends, takes too long or answers what is no value passes no test from there on, and none in a loop, which
    it may have held for a while.

    With `all_or_nothing` it is 0 for less than all of them, as soon as that is clear.

    Raises:
        ContractError: outside of a scoring process.
        UnavailableError: when runners have ended.
    """
    if not _judging:
        raise ContractError("programs are judged in scoring processes alone")
    runners, limit_s = _judging[0]
    results: dict[int, bool] = {}
    once = {*range(len(tests.scripts) or len(tests.cases))}
    count, finished = len(once), False
    if tests.code:
        _, count, once, *_ = _compiled(tests.code, tests.entry, tests.solution)

    def note(test: int, passed: bool) -> None:
        results[test] = passed and results.get(test, True)
        if all_or_nothing and not passed:
            raise LateError

    program = program_in(text)
    if len(program) <= PROGRAM_CHARS:
        told = {"before": tests.before, "program": program, "entry": tests.entry}
        try:
            # The alarm within: it cannot go off between the two.
            with contextlib.suppress(ProgramEndedError, LateError), _alarm(limit_s):
                for test, (given, right) in enumerate(tests.scripts):
                    with runners.start({**told, "input": given}) as channel:
                        passed = _trimmed(output_of(channel)) == _trimmed(right)
                        note(test, runners.end() == 0 and passed)
                if not tests.scripts:
                    with runners.start(told) as channel:
                        finished = (_do_cases if tests.cases else _do_code)(tests, channel, note)
        finally:
            runners.end()
    if finished and results:
        results = {**dict.fromkeys(range(count), True), **results}  # those that are not reached do no harm
    passed_count = sum(held and (finished or test in once) for test, held in results.items())
    return float(passed_count == count) if all_or_nothing else passed_count / count


class _Remote(Named):
    """A function or a class of the program, one of its objects, or a method of that."""

    def __init__(self, channel: socket.socket, path: str, *, is_class: bool = False) -> None:
        self._channel, self._path, self._is_class = channel, path, is_class

    def __repr__(self) -> str:
        return self._path

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        if self._is_class:
            given = [*map(repr, arguments), *(f"{name}={value!r}" for name, value in keywords.items())]
            return _Remote(self._channel, f"{self._path}({', '.join(given)})")
        return call(self._channel, self._path, arguments, keywords)

    def __getattr__(self, name: str) -> "_Remote":
        if name.startswith("__"):
            raise AttributeError(name)
        return _Remote(self._channel, f"{self._path}.{name}")


def _do_code(tests: Tests, channel: socket.socket, note: Callable[[int, bool], None]) -> bool:
    """Run a row's tests; return whether they came to their end."""
    compiled, _, _, classes, functions = _compiled(tests.code, tests.entry, tests.solution)
    remote = {name: _Remote(channel, name, is_class=name in classes) for name in functions}
    names = {**remote, "__name__": "tests"}
    with contextlib.suppress(SyntaxError):  # the head of a function, with which the program goes on
        exec(compile(tests.before, "<before>", "exec"), names)
    names |= {name: one for name, one in remote.items() if name in classes or name == tests.entry}
    names[_NOTE] = note
    try:
        exec(compiled, names)
    except Exception:  # noqa: BLE001 - what the program returned broke them, or it raised
        return False
    return True


def _do_cases(tests: Tests, channel: socket.socket, note: Callable[[int, bool], None]) -> bool:
    """Compare what the program returns with what the reference solution does."""
    names: dict[str, Any] = {"__name__": "solution"}
    execute(tests.before, tests.solution, tests.entry, names)
    for test, arguments in enumerate(tests.cases):
        try:
            right = decode(encode(names[tests.entry](*deepcopy(arguments))))
        except Exception:  # noqa: BLE001 - such arguments are no test
            continue
        try:
            passed = _is_near(call(channel, tests.entry, arguments, {}), right, tests.tolerance)
        except Exception:  # noqa: BLE001 - the program raised it
            passed = False
        note(test, passed)
    return True


def _is_near(found: Any, right: Any, tolerance: float) -> bool:
    if isinstance(right, float) and isinstance(found, int | float):
        absolute, relative = TOLERANCE
        near = math.isclose(found, right, rel_tol=relative, abs_tol=tolerance or absolute)
        return near or (math.isnan(found) and math.isnan(right))
    if isinstance(right, list | tuple) and type(found) is type(right) and len(found) == len(right):
        return all(_is_near(one, other, tolerance) for one, other in zip(found, right, strict=True))
    return bool(found == right)


def _trimmed(text: str) -> list[str]:
    """Return the lines of an output without spaces at their ends and without empty ones at its end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _lines(code: Any) -> str:
    text = "\n".join(code) if isinstance(code, list) else code
    if not isinstance(text, str):
        raise TypeError(f"it has a {type(text).__name__}")
    return text.replace("\r\n", "\n")


class _Noting(ast.NodeTransformer):
    """Has each assert statement say whether it holds, and the code go on behind it."""

    def __init__(self) -> None:
        self.count = self.depth = 0
        self.once = set[int]()
        """Statements that are in no loop, and in no function but `check`."""

    def visit(self, node: ast.AST) -> Any:
        many = isinstance(node, ast.For | ast.While | ast.FunctionDef | ast.Lambda | ast.AsyncFunctionDef)
        many = many and getattr(node, "name", "") != "check"
        self.depth += many
        found = super().visit(node)
        self.depth -= many
        return found

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        note = f"{_NOTE}({self.count}"
        tells = f"try: pass\nexcept Exception: {note}, False)\nelse: {note}, True)"
        noted = ast.parse(tells).body[0]
        assert isinstance(noted, ast.Try)
        self.once |= set() if self.depth else {self.count}
        noted.body, self.count = [node], self.count + 1
        return noted


@lru_cache(maxsize=8)
def _compiled(
    code: str, entry: str, solution: str
) -> tuple[CodeType, int, set[int], frozenset[str], frozenset[str]]:
    """Return a row's tests with all assert statements noted, how many there are, which of these are reached
    once at most, and which of their names mean a class of the program, or that or a function of it.

    Raises:
        SyntaxError, ValueError: when it is no code, or has no assert statement.
    """
    tree = ast.parse(code)
    nodes = [*ast.walk(tree)]
    builtin = {*dir(builtins)}
    made = (node.value for node in nodes if isinstance(node, ast.Attribute))
    classes = {one.func.id for one in made if isinstance(one, ast.Call) and isinstance(one.func, ast.Name)}
    with contextlib.suppress(SyntaxError):  # a solution may be the rest of a function
        body = ast.parse(solution).body
        builtin -= _defined(body)
        classes |= _defined(one for one in body if isinstance(one, ast.ClassDef))
    # Names that the tests define themselves are among them, and are defined before they are used.
    functions = {node.id for node in nodes if isinstance(node, ast.Name)} - builtin | {entry} - {""}
    classes &= functions - _defined(nodes)
    called = (one.value for one in tree.body if isinstance(one, ast.Expr) and isinstance(one.value, ast.Call))
    if entry and "check" in _defined(nodes) and not any(ast.unparse(one.func) == "check" for one in called):
        tree.body += ast.parse(f"check({entry})").body
    noting = _Noting()
    noted = ast.fix_missing_locations(noting.visit(tree))
    if not noting.count:
        raise ValueError("it has no assert statement")
    return (
        compile(noted, "<tests>", "exec"),
        noting.count,
        noting.once,
        frozenset(classes),
        frozenset(functions),
    )


def _defined(nodes: Iterable[ast.AST]) -> set[str]:
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}


@contextlib.contextmanager
def _alarm(limit_s: float) -> Iterator[None]:
    """Raise LateError in what is done within, when its time is over."""

    def ring(number: int, frame: object) -> None:
        raise LateError

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
