"""Python of the tool `python`: a program that runs code as it is handed in and keeps its variables.

    python -s -P python_tool.py REQUESTS DONE     (numbers of its pipes; by `tool_processes`)

It knows nothing of ours: it may do whatever the sandbox lets it.
"""

import ast
import json
import sys
import traceback
from typing import Any


def run(code: str, variables: dict[str, Any]) -> None:
    """Run code and print the value of its last line, as Python's prompt does, or what it raised."""
    try:
        tree = ast.parse(code, "<code>")
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "<code>", "exec"), variables)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "<code>", "eval"), variables)
            if value is not None:
                print(repr(value))
    except BaseException as error:  # noqa: BLE001 - also SystemExit: the variables stay
        ours = error.__traceback__ and error.__traceback__.tb_next
        traceback.print_exception(type(error), error, ours, limit=-8)


def main() -> None:
    """Serve until the requests end."""
    variables: dict[str, Any] = {"__name__": "__main__"}
    requests, done = (int(number) for number in sys.argv[1:])
    with open(requests, "rb") as lines, open(done, "wb", buffering=0) as finished:
        for line in lines:
            run(json.loads(line), variables)
            sys.stdout.flush()
            sys.stderr.flush()
            finished.write(b"\n")


if __name__ == "__main__":
    main()
