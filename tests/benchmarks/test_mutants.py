"""The changes that are always tried fit the code as it is, and name tests that there are."""

import ast
from pathlib import Path

import pytest

from antiphon.benchmarks.mutants import NAMED, NamedMutant

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("mutant", NAMED, ids=lambda mutant: mutant.breaks)
def test_a_named_mutant_changes_one_place_and_has_a_test(mutant: NamedMutant) -> None:
    text = (ROOT / mutant.file).read_text(encoding="utf-8")
    assert text.count(mutant.old) == 1 and mutant.new != mutant.old
    ast.parse(text.replace(mutant.old, mutant.new))
    file, _, name = mutant.test.partition("::")
    tests = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    assert name in {node.name for node in tests.body if isinstance(node, ast.FunctionDef)}
