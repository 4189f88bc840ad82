"""The simulation as a flow counts what it simulated and fails with the seeds that broke a promise."""

from pathlib import Path

import pytest

from antiphon.core.errors import AntiphonError, ConfigError
from antiphon.flows import simulate as place
from antiphon.simulator.report import Outcome


@pytest.fixture
def artifacts(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Keep the page's artifacts here: the flow's body is called without a server."""
    kept: dict[str, str] = {}
    monkeypatch.setattr(place, "mute_logs", lambda: None)
    monkeypatch.setattr(place, "create_progress_artifact", lambda *_, **__: "id")
    monkeypatch.setattr(place, "update_progress_artifact", lambda *_: None)
    monkeypatch.setattr(
        place, "create_markdown_artifact", lambda text, *, key, description: kept.update({key: text})
    )
    return kept


def test_seeds_are_counted(artifacts: dict[str, str]) -> None:
    summary = place.simulate.fn(first_seed=3, seeds=2)
    assert summary["seeds"] == 2 and summary["events"] > 100 and summary["violations"] == 0
    (text,) = artifacts.values()
    assert "2 seeds" in text and "0 violations" in text


def test_a_broken_promise_fails_the_run(
    artifacts: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Broken:
        def __init__(self, scenario: object) -> None: ...

        def seeds(self, seeds: range) -> list[Outcome]:
            import dataclasses

            from antiphon.simulator.campaign import Campaign

            (found,) = Campaign(None).seeds(seeds)
            return [dataclasses.replace(found, violations=("group g1 trained twice",))]

    monkeypatch.setattr(place, "Campaign", Broken)
    with pytest.raises(AntiphonError, match="1 of 1 seeds broke a promise: seed 5: 1 violations"):
        place.simulate.fn(first_seed=5, seeds=1)
    (text,) = artifacts.values()
    assert "antiphon simulate --seed 5" in text
    with pytest.raises(ConfigError):
        place.simulate.fn(scenario=str(tmp_path / "none.yaml"))
