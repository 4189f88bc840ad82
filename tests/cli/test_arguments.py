"""Arguments: what verbs share."""

import shlex

import pytest

from antiphon.cli import arguments
from antiphon.cli.arguments import command_line


@pytest.mark.parametrize("program", ["/x/.venv/bin/antiphon", arguments.__file__.replace("arguments", "app")])
def test_the_command_line_is_what_a_shell_takes_again(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    monkeypatch.setattr("sys.argv", [program, "run", "my file.yaml", "run.name='a'"])
    said = shlex.split(command_line())
    assert said[1:] == ["run", "my file.yaml", "run.name='a'"] and said[0] in ("./antiphon", "antiphon")


def test_another_program_has_no_command_line_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/usr/lib/prefect/app.py", "run"])
    assert command_line() == ""
