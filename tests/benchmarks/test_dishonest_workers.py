"""A small share of the benchmark of dishonest workers: it finds what it must, and no honest worker."""

import json

import pytest

from antiphon.benchmarks import dishonest_workers


def test_a_share_of_the_benchmark_holds(capsys: pytest.CaptureFixture[str]) -> None:
    assert dishonest_workers.main(["--groups", "2", "--honest", "16", "--careers", "40"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["honest_struck"] == 0 and result["behaviours"] == 26
    assert result["hanging_groups_until_out"] <= 5 and all(result["gate"].values())
    assert result["edited_token_audits"] <= dishonest_workers.MOST_EDITED_AUDITS
