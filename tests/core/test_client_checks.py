"""What of a client's data is refused, each in one sentence that names it."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.client_checks import check_adam, check_call, counts
from antiphon.core.client_records import LOSSES, AdamParameters, Datum, TrainingCall
from antiphon.core.errors import ContractError
from tests.support.client_calls import VOCABULARY, make_call

MOST = 24


def check(call: TrainingCall, ours: bool = True) -> None:
    check_call(call, VOCABULARY, MOST, ours)


def altered(datum: Datum, name: str, place: int, value: float) -> Datum:
    """Return a datum with another value in one of its arrays."""
    arrays = {"token_ids": datum.token_ids, "targets": datum.targets, **datum.inputs}
    changed = arrays[name].copy()
    changed[place] = value
    if name in datum.inputs:
        return dataclasses.replace(datum, inputs={**datum.inputs, name: changed})
    return dataclasses.replace(datum, **{name: changed})


@given(seed=st.integers(0, 99), loss=st.sampled_from(LOSSES), draw=st.data())
def test_one_wrong_value_is_named_with_datum_and_position(seed: int, loss: str, draw: st.DataObject) -> None:
    call = make_call(seed, 4, loss)
    check(call)
    place = draw.draw(st.integers(0, 3))
    datum = call.data[place]
    at = draw.draw(st.integers(0, len(datum.targets) - 1))
    name = draw.draw(st.sampled_from(["token_ids", "targets", *datum.inputs]))
    bad = [-1, VOCABULARY, 2**31 - 1] if name in ("token_ids", "targets") else [np.nan, np.inf, -np.inf]
    wrong = altered(datum, name, at, draw.draw(st.sampled_from(bad)))
    changed = dataclasses.replace(call, data=(*call.data[:place], wrong, *call.data[place + 1 :]))
    if name == "targets" and not counts(loss, datum)[at]:
        check(changed)  # whatever the client put there
        return
    with pytest.raises(ContractError) as refused:
        check(changed)
    assert f"datum {place} " in str(refused.value) and f"position {at}" in str(refused.value)


@pytest.mark.parametrize(
    "loss, config, words",
    [
        ("mse", {}, "no loss 'mse'; give one of cross_entropy"),
        ("ppo", {"beta": 0.1}, "configuration of ppo has 'beta'; it may hold clip_low_threshold and"),
        ("cross_entropy", {"clip": 0.1}, "'clip'; it may hold nothing"),
        ("dro", {"beta": float("nan")}, "beta=nan of dro cannot be"),
        ("ppo", {"clip_low_threshold": 1.5}, "clip_low_threshold=1.5 is above clip_high_threshold=1.2"),
    ],
)
def test_losses_and_their_configuration(loss: str, config: dict[str, float], words: str) -> None:
    call = make_call(loss=loss if loss in LOSSES else "ppo")
    with pytest.raises(ContractError, match=words):
        check(TrainingCall(loss, config, call.data))


def test_shapes_lengths_and_missing_inputs() -> None:
    (datum,) = make_call(count=1, loss="ppo").data
    length = len(datum.targets)
    wide: dict[str, Any] = {"token_ids": np.zeros(MOST + 1, np.int32)}
    for inputs, changes, words in (
        ({"advantages": datum.inputs["advantages"]}, {}, "datum 0 has no logprobs, which ppo needs"),
        (datum.inputs | {"reward": datum.inputs["advantages"]}, {}, "an input 'reward'; known are weights"),
        (datum.inputs, {"targets": datum.targets[1:]}, f"has {length} tokens, but targets of shape"),
        (datum.inputs | {"mask": np.ones((length, 1), np.float32)}, {}, "mask of shape"),
        (datum.inputs, wide, "datum 0 has 25 tokens; give 1 to 24"),
        (datum.inputs, {"token_ids": np.zeros(0, np.int32)}, "datum 0 has 0 tokens"),
    ):
        with pytest.raises(ContractError, match=words):
            check(TrainingCall("ppo", {}, (dataclasses.replace(datum, inputs=inputs, **changes),)))
    with pytest.raises(ContractError, match="no data"):
        check(TrainingCall("ppo", {}, ()))
    with pytest.raises(ContractError, match=r"start the door with door.stable_reinforce=ours"):
        check(make_call(loss="stable_reinforce"), ours=False)


def test_parameters_of_a_step() -> None:
    check_adam(AdamParameters())
    check_adam(AdamParameters(learning_rate=0.0, eps=1e-30))
    for name, value in (
        ("beta2", 1.0),
        ("learning_rate", -1e-4),
        ("eps", float("inf")),
        ("eps", 0.0),
        ("eps", 1e-50),
        ("grad_clip_norm", float("nan")),
    ):
        with pytest.raises(ContractError, match=f"{name}="):
            check_adam(dataclasses.replace(AdamParameters(), **{name: value}))


@pytest.mark.parametrize("bounds", [(0.9, 0.8), (1.5, None), (None, 0.5)], ids=str)
def test_bounds_of_a_position_in_the_wrong_order(bounds: tuple[float | None, float | None]) -> None:
    (datum,) = make_call(0, 1, "ppo").data
    length = len(datum.targets)
    given = {
        name: np.where(np.arange(length) == length - 1, value, 1.0).astype(np.float32)
        for name, value in zip(("clip_low_threshold", "clip_high_threshold"), bounds, strict=True)
        if value is not None
    }
    changed = dataclasses.replace(datum, inputs={**datum.inputs, **given})
    with pytest.raises(ContractError, match=f"of datum 0 is above .* at position {length - 1};"):
        check(TrainingCall("ppo", {}, (changed,)))
