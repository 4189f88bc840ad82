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
import math
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType
from typing import Any

from antiphon.core.errors import ContractError
from antiphon.environments.scoring.runners import (
    KEEP,
    KEPT,
    Named,
    ProgramEndedError,
    Runners,
    call,
    compiled_part,
    decode,
    encode,
    execute,
    joined,
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
AGAIN_S = 0.05
"""How soon an alarm goes off again that tests have caught."""
_FENCE = "```"
_NOTE = "_note_"


class LateError(BaseException):
    """The time of a program is over, or its verdict is clear; no test may catch it."""


@dataclass(frozen=True, slots=True, eq=False)
class Asserts:
    """A row's assert statements, with what they need."""

    before: CodeType
    """The row's code that they use."""
    imports: CodeType
    """What the solution imports and they use."""
    code: CodeType
    """They and what is around them, where each says whether it holds."""
    count: int
    once: frozenset[int]
    """Those that count for a program that ends before the tests do: in no block but that of `check`."""
    remote: frozenset[str]
    """Names that are the program's; but for the entry, those that the row's code defines are not."""
    classes: frozenset[str]


@dataclass(frozen=True, slots=True, eq=False)
class Tests:
    """What a program must do; one of `asserts`, `cases` and `scripts` is there."""

    entry: str = ""
    """The function that is asked for; empty where the tests name what they call."""
    before: str = ""
    """Code that the program goes on with or uses, and the tests too."""
    solution: str = ""
    asserts: Asserts | None = None
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
    except (TypeError, ValueError, SyntaxError) as error:
        raise ValueError(f"{key!r}, where the tests should be, {error}") from error


def _read_tests(row: Mapping[str, Any], key: str, solution: str) -> Tests:
    found, entry = row.get(key), row.get("entry_point") or ""
    if key == "plus_input":
        found = (row.get("base_input") or []) + (found or [])
    if not found:
        there = f"is {found!r}" if key in row else f"is not among its keys {', '.join(row)[:200]}"
        raise ValueError(there)
    before = row.get("prompt") or "" if entry else ""
    if not isinstance(entry, str) or not isinstance(before, str):
        raise TypeError("goes with an entry_point or a prompt that is no text")
    if key in ("base_input", "plus_input"):
        near, lists = row.get("atol") or 0.0, isinstance(found, list)
        if not (entry and solution and lists and all(isinstance(one, list) for one in found)):
            raise ValueError("takes lists of arguments, entry_point and a reference solution")
        if not isinstance(near, int | float) or not 0.0 <= near < 1e300:
            raise ValueError(f"goes with atol={near!r:.40}, which is no finite number")
        return Tests(entry, before, solution, cases=(*found,), tolerance=near)
    if isinstance(found, dict) and "functional" in found:
        found = found["functional"]
    if isinstance(found, list) and all(isinstance(one, dict) for one in found):
        found = {f"{name}s": [one.get(name) for one in found] for name in ("input", "output")}
    if isinstance(found, dict):
        inputs, outputs = found.get("inputs") or (), found.get("outputs") or ()
        pairs = [*zip(inputs, outputs, strict=False)]
        texts = all(isinstance(one, str) for pair in pairs for one in pair)
        if not pairs or not texts or len(inputs) != len(outputs):
            raise ValueError("has no inputs, or not as many outputs, as texts")
        return Tests(scripts=(*pairs,))
    code = "\n".join(_lines(part) for part in (*(row.get(name) for name in SETUP), found) if part)
    tree = ast.parse(code)
    if any(isinstance(node, ast.Name) and node.id == "Solution" for node in ast.walk(tree)):
        before = IMPORTS + before
    return Tests(entry, before, solution, _asserts(tree, entry, before, solution))


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
    asserts, late, finished = tests.asserts, False, False
    count = asserts.count if asserts else len(tests.scripts) or len(tests.cases)
    once = asserts.once if asserts else range(count)

    def ring(number: int, frame: object) -> None:
        nonlocal late
        late = True
        raise LateError

    def over() -> bool:
        # Tests may have caught that.
        return late or channel.fileno() < 0

    def note(test: int, passed: bool) -> None:
        if over():
            raise LateError
        results[test] = passed and results.get(test, True)
        if all_or_nothing and not passed:
            raise LateError

    program = program_in(text)
    if len(program) <= PROGRAM_CHARS:
        told = {"before": tests.before, "program": program, "entry": tests.entry}
        signal.signal(signal.SIGALRM, ring)
        try:
            with contextlib.suppress(ProgramEndedError, LateError):
                try:
                    signal.setitimer(signal.ITIMER_REAL, limit_s, AGAIN_S)
                    for test, (given, right) in enumerate(tests.scripts):
                        with runners.start({**told, "input": given}) as channel:
                            passed = _trimmed(output_of(channel)) == _trimmed(right)
                            note(test, runners.end() == 0 and passed)
                    if not tests.scripts:
                        with runners.start(told) as channel:
                            do = _do_asserts if asserts else _do_cases
                            finished = do(tests, channel, note) and not over()
                finally:
                    # Here and in no function of ours, in which it could go off before it is stopped.
                    signal.setitimer(signal.ITIMER_REAL, 0.0)
        finally:
            runners.end()
    if finished and results:
        results = {**dict.fromkeys(range(count), True), **results}  # those that are not reached do no harm
    passed_count = sum(held and (finished or test in once) for test, held in results.items())
    return float(passed_count == count) if all_or_nothing else passed_count / count


class _Remote(Named):
    """A function or a class of the program, one of its objects, or a method of that.

    What is plain data is fetched and compared here; nothing else has a truth or is equal to anything.
    """

    def __init__(self, channel: socket.socket, path: str, *, is_class: bool = False) -> None:
        vars(self).update(_channel=channel, _path=path, _is_class=is_class)

    def __repr__(self) -> str:
        return str(self._path)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        if self._is_class:
            place = call(self._channel, KEEP, (self, *arguments), keywords)
            return _Remote(self._channel, f"{KEPT}[{place}]")
        return call(self._channel, self._path, arguments, keywords)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return call(self._channel, "getattr", (self, name), {})
        except TypeError:  # it is no plain data, such as a method
            return _Remote(self._channel, f"{self._path}.{name}")

    def __setattr__(self, name: str, value: Any) -> None:
        call(self._channel, "setattr", (self, name, value), {})

    def __bool__(self) -> bool:
        raise TypeError(f"{self} is no plain data")

    def __eq__(self, other: object) -> bool:
        raise TypeError(f"{self} is no plain data")


def _do_asserts(tests: Tests, channel: socket.socket, note: Callable[[int, bool], None]) -> bool:
    """Run a row's tests; return whether they came to their end."""
    asserts = tests.asserts
    assert asserts is not None
    names: dict[str, Any] = {"__name__": "tests"}
    imported: dict[str, Any] = {}
    try:
        exec(asserts.before, names)
        for name in asserts.remote - names.keys() | asserts.remote & {tests.entry}:
            names[name] = _Remote(channel, name, is_class=name in asserts.classes)
        exec(asserts.imports, imported)
        names |= {name: found for name, found in imported.items() if name not in names} | {_NOTE: note}
        exec(asserts.code, names)
    except BaseException:  # noqa: BLE001 - what the program returned broke them, or it raised, or they end
        return False
    return True


def _do_cases(tests: Tests, channel: socket.socket, note: Callable[[int, bool], None]) -> bool:
    """Compare what the program returns with what the reference solution does."""
    for test, right in _right_values(tests).items():
        try:
            passed = _is_near(call(channel, tests.entry, tests.cases[test], {}), right, tests.tolerance)
        except Exception:  # noqa: BLE001 - the program raised it
            passed = False
        note(test, passed)
    return True


@lru_cache(maxsize=1)
def _right_values(tests: Tests) -> dict[int, Any]:
    """Return what the reference solution returns for each case; those for which it raises are no test."""
    names: dict[str, Any] = {"__name__": "solution"}
    execute(tests.before, tests.solution, tests.entry, names)
    found = {}
    for test, arguments in enumerate(tests.cases):
        with contextlib.suppress(Exception):
            found[test] = decode(encode(names[tests.entry](*deepcopy(arguments))))
    return found


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
        raise TypeError(f"is a {type(text).__name__}, no code")
    return text.replace("\r\n", "\n")


class _Noting(ast.NodeTransformer):
    """Has each assert statement say whether it holds, and the code go on behind it."""

    def __init__(self) -> None:
        self.found = list[ast.Assert]()

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        note = f"{_NOTE}({len(self.found)}"
        tells = f"try: pass\nexcept Exception: {note}, False)\nelse: {note}, True)"
        noted = ast.parse(tells).body[0]
        assert isinstance(noted, ast.Try)
        noted.body = [node]
        self.found.append(node)
        return noted


def _asserts(tree: ast.Module, entry: str, before: str, solution: str) -> Asserts:
    """Return what a row's tests are.

    Raises:
        SyntaxError, ValueError: when they cannot be compiled, or have no assert statement.
    """
    nodes = [*ast.walk(tree)]
    used = {node.id for node in nodes if isinstance(node, ast.Name)} | {entry} - {""}
    called = [one.value for one in tree.body if isinstance(one, ast.Expr) and isinstance(one.value, ast.Call)]
    checks = [one for one in tree.body if isinstance(one, ast.FunctionDef) and one.name == "check"]
    direct = {*tree.body, *(inner for one in checks for inner in one.body)}
    if entry and checks and not any(ast.unparse(one.func) == "check" for one in called):
        tree.body += ast.parse(f"check({entry})").body
    noting = _Noting()
    noted = ast.fix_missing_locations(noting.visit(tree))
    if not noting.found:
        raise ValueError("has no assert statement")
    body = list[ast.stmt]()
    with contextlib.suppress(SyntaxError, ValueError):
        body = ast.parse(joined(before, solution, entry)[1] if solution else "").body
    imports: list[ast.stmt] = [one for one in body if isinstance(one, ast.Import | ast.ImportFrom)]
    if body:
        remote = {name for one in body if one not in imports for name in _bound(one)} & used
        classes = {one.name for one in body if isinstance(one, ast.ClassDef)}
    else:  # what is not known otherwise; but sys.x means the module, and classes have names like Pair
        of = [one.value for one in nodes if isinstance(one, ast.Attribute)]
        modules = {one.id for one in of if isinstance(one, ast.Name)} & sys.stdlib_module_names
        remote = used - modules - {*dir(builtins)}
        classes = {name for name in used if name[0].isupper()}
    imports = [one for one in imports if _bound(one) & (used | {"*"})]
    return Asserts(
        compiled_part(before),
        compile(ast.Module(imports, []), "<imports>", "exec"),
        compile(noted, "<tests>", "exec"),
        len(noting.found),
        frozenset(place for place, one in enumerate(noting.found) if one in direct),
        frozenset(remote | ({entry} & used)),
        frozenset(classes),
    )


def _bound(statement: ast.stmt) -> set[str]:
    """Return the names to which a statement gives a meaning."""
    match statement:
        case ast.FunctionDef() | ast.ClassDef():
            return {statement.name}
        case ast.Import() | ast.ImportFrom():
            return {(one.asname or one.name).partition(".")[0] for one in statement.names}
        case ast.Assign():
            return {one.id for one in statement.targets if isinstance(one, ast.Name)}
    return set()
