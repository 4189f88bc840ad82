"""Help: every verb has a place, words that its parameters keep, and an example that would run."""

import re
import shlex
from importlib import import_module
from inspect import getdoc

import pytest

from antiphon.cli.app import app, execute
from antiphon.cli.verbs import GROUPS, REPLACED, VERBS, help_of, place_of, words_of

NOISE = ("--empty-", "[default: ()]", '[default: ""]', "[default: False]", "[ARGS", "[default: None]")


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert execute([*arguments, "--help"]) == 0
    return capsys.readouterr().out


def test_the_first_page_lists_every_verb_once_under_its_group(capsys: pytest.CaptureFixture[str]) -> None:
    page = said(capsys)
    places = [page.index(f"─ {group} ─") for group in GROUPS]
    assert places == sorted(places)
    for verb in VERBS:
        assert len(re.findall(rf"^│ {verb} ", page, re.MULTILINE)) == 1
    assert "Examples:" in page and "docs/guides/README.md" in page and "--install-completion" in page


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_verb_has_an_example_and_no_noise(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = said(capsys, verb)
    assert f"• antiphon {verb}" in page
    assert not [noise for noise in NOISE if noise in page]
    arguments = re.search(r"─ Arguments ─.*?╰", page, re.DOTALL)
    usage = page.splitlines()[0]
    for name in re.findall(r"^│ \*?\s*([A-Z][A-Z_]+) ", arguments[0] if arguments else "", re.MULTILINE):
        assert re.search(rf"\b{name}\b", usage), f"{usage} does not name {name}"


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_is_explained_by_its_docstring(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    module, function = place_of(verb)
    said_of_it = getdoc(getattr(import_module(f"antiphon.cli.{module}"), function)) or ""
    explained, _, _ = said_of_it.partition("Args:")
    assert help_of(verb) == explained.strip()
    assert explained.split("\n")[0].split()[0] in said(capsys, verb)


@pytest.mark.parametrize("verb", VERBS)
def test_examples_are_command_lines_that_the_verb_takes(verb: str) -> None:
    examples = re.findall(r"^- `antiphon (.*)`$", words_of(verb)["help_epilogue"], re.MULTILINE)
    assert examples
    for example in examples:
        command, _, _ = app.parse_args(shlex.split(example), exit_on_error=False, print_error=False)
        assert verb in (command.__name__, command.__module__.rpartition(".")[2]), example


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_the_verbs(shell: str) -> None:
    script = app.generate_completion(shell=shell)
    assert all(re.search(rf"\b{verb}\b", script) for verb in VERBS)


@pytest.mark.parametrize("before", REPLACED)
def test_a_verb_that_went_names_what_took_its_place(before: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute([*before.split(), "RUN"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    verb, *words = REPLACED[before].split()
    assert verb in VERBS
    help_page = said(capsys, verb)
    assert all(word in help_page for word in words if word.startswith("--"))
