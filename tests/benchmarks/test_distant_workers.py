"""What a download costs sampling is told apart from requests, swaps and steps that lie across its ends."""

import json
from pathlib import Path

import pytest

from antiphon.benchmarks.distant_workers import sampling_during_download, taken_by_others, write_model
from antiphon.benchmarks.parts.measure import PROJECT


def _note(during_s: float) -> dict[str, object]:
    """Steps of 0.1 s with 8 requests, of 0.2 s with 16; from 10 s to 20 s something arrives."""
    steps = []
    at = 0.0
    while at < 40.0:
        requests = 16 if int(at) % 2 else 8
        seconds = requests / 80
        if 10.0 <= at < 20.0:
            seconds *= during_s
        steps.append((at, at + seconds, seconds, requests))
        at += seconds
    swap = (20.0, 20.5)
    steps.append((20.1, 25.0, 4.9, 8))  # a step that a swap interrupted
    return {"steps": sorted(steps), "loads": [swap], "transfers": [(10.0, 20.0, 9), (30.0, 30.5, 0)]}


@pytest.mark.parametrize("slower", [1.0, 1.25])
def test_steps_are_compared_with_such_of_as_many_requests(slower: float) -> None:
    share, compared = sampling_during_download([_note(slower)])
    assert compared >= 50
    assert share == pytest.approx(1 / slower, rel=0.01)


def test_too_few_steps_say_nothing() -> None:
    note = _note(1.0)
    assert sampling_during_download([{**note, "transfers": [(10.0, 10.5, 9)]}])[0] is None


def test_a_core_that_others_use_is_noticed() -> None:
    steps = [(0.0, 1.0, 0.5, 8), (1.0, 2.0, 1.0, 8)]
    assert taken_by_others([{"steps": steps}]) == 0.25


def test_the_wider_model_says_almost_what_the_demos_does(tmp_path: Path) -> None:
    from antiphon.services.learner.policy import load_causal_model

    torch = pytest.importorskip("torch")
    write_model(tmp_path / "model", 512)
    assert json.loads((tmp_path / "model" / "config.json").read_text())["intermediate_size"] == 512
    tokens = torch.arange(4, 36)[None]
    with torch.no_grad():
        wide, plain = (
            load_causal_model(str(path), torch.float32, False).eval()(tokens).logits.softmax(-1)
            for path in (tmp_path / "model", PROJECT / "examples" / "models" / "chain-sum")
        )
    assert float((wide - plain).abs().max()) < 0.25
