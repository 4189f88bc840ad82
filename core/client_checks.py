"""Client checks: which data of a client's call can be trained on, decided before anything is added up.

The client's library checks nothing: what is wrong with a call is said here, in one sentence that names the
datum, the position and the fix. Which positions count follows from the loss: anything may be the target of
one that does not.

Legend: T positions of one datum.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from antiphon.core.client_records import LOSSES, AdamParameters, Datum, TrainingCall
from antiphon.core.errors import ContractError
from antiphon.core.records import FloatArray

CLIPS = ("clip_low_threshold", "clip_high_threshold")
"""Bounds of the ratio, by these names in a call's configuration or, per position, in its inputs."""
DEFAULTS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2, "beta": 0.05}
"""What a call's configuration leaves out; beta is dro's."""
MOST = 1e12
"""Largest number that a client may set: what optimizer and loss make of it is in the range of float32."""
LEAST_EPS = 1e-37
"""Smaller ones are 0 in float32."""
_CLIPPED = ("ppo", "cispo", "gspo")
_NUMBERS = {"dro": ("beta",)} | dict.fromkeys(_CLIPPED, CLIPS)
"""What the configuration of a loss may hold; nothing, of the others."""
_NEEDED = {"cross_entropy": ("weights",), "stable_reinforce": ("logprobs", "advantages", "staleness")}
"""The inputs that each datum of a loss must have; logprobs and advantages, of the others."""
_INPUTS = ("weights", "logprobs", "advantages", "mask", "sequence_ratio_mask", "staleness", *CLIPS)


def weight_of(loss: str, datum: Datum) -> FloatArray:
    """Return what the positions of a datum are multiplied by, [T] float32: weights or advantages, masked."""
    own = datum.inputs["weights" if loss == "cross_entropy" else "advantages"]
    mask = datum.inputs.get("mask")
    return own if mask is None else own * mask


def counts(loss: str, datum: Datum) -> npt.NDArray[np.bool_]:
    """Return which positions, [T], take part in a loss: those with a weight or an advantage.

    dro's penalty is there without an advantage too: without a mask, where there is a log-probability. gspo's
    ratio is of the positions of `sequence_ratio_mask`.
    """
    inputs = datum.inputs
    found: npt.NDArray[np.bool_] = weight_of(loss, datum) != 0
    if loss == "gspo":
        found |= ratio_mask(datum)
    if loss == "dro":
        mask = inputs.get("mask")
        found |= inputs["logprobs"] != 0 if mask is None else mask != 0
    return found


def ratio_mask(datum: Datum) -> npt.NDArray[np.bool_]:
    """Return over which positions, [T], gspo's ratio is taken."""
    for name in ("sequence_ratio_mask", "mask", "advantages"):
        if name in datum.inputs:
            return np.asarray(datum.inputs[name] != 0)
    return np.zeros(len(datum.targets), dtype=np.bool_)


def check_call(call: TrainingCall, vocabulary: int, most_tokens: int, ours: bool) -> None:
    """Check that a call can be trained on.

    Args:
        call: as the client gave it.
        vocabulary: tokens that the model has.
        most_tokens: positions of a sequence (`rollout.max_model_tokens`).
        ours: whether `stable_reinforce` may be our decoupled objective.

    Raises:
        ContractError: in a sentence that names what of it cannot be.
    """
    loss = call.loss
    if loss not in LOSSES:
        raise ContractError(f"there is no loss {loss!r}; give one of {', '.join(LOSSES)}")
    if loss == "stable_reinforce" and not ours:
        raise ContractError(
            "the definition of stable_reinforce is not published; give another loss such as ppo, or start "
            "the door with door.stable_reinforce=ours, which trains our decoupled objective instead"
        )
    numbers = _NUMBERS.get(loss, ())
    for name, value in call.config.items():
        if name not in numbers:
            known = " and ".join(numbers) or "nothing"
            raise ContractError(f"the configuration of {loss} has {name!r}; it may hold {known}")
        if not 0 <= value <= MOST:
            raise ContractError(
                f"{name}={value} of {loss} cannot be; give a number of at least 0, at most {MOST:g}"
            )
    low, high = (call.config.get(name, DEFAULTS[name]) for name in CLIPS)
    if loss in _CLIPPED and low > high:
        raise ContractError(
            f"clip_low_threshold={low:g} is above clip_high_threshold={high:g}; both are bounds of the ratio "
            "itself, such as 0.8 and 1.2"
        )
    if not call.data:
        raise ContractError("a call has no data; give at least one datum")
    for place, datum in enumerate(call.data):
        _check_datum(loss, datum, f"datum {place}", vocabulary, most_tokens)
        if loss in _CLIPPED:
            _check_bounds(call, datum, f"datum {place}")


def _check_bounds(call: TrainingCall, datum: Datum, where: str) -> None:
    lower, upper = (datum.inputs.get(name, call.config.get(name, DEFAULTS[name])) for name in CLIPS)
    wrong = np.flatnonzero(counts(call.loss, datum) & np.greater(lower, upper))
    if wrong.size:
        raise ContractError(
            f"clip_low_threshold of {where} is above its clip_high_threshold at position {wrong[0]}; both "
            "are bounds of the ratio itself, such as 0.8 and 1.2"
        )


def _check_datum(loss: str, datum: Datum, where: str, vocabulary: int, most_tokens: int) -> None:
    length = len(datum.token_ids)
    if not 1 <= length <= most_tokens:
        raise ContractError(
            f"{where} has {length} tokens; give 1 to {most_tokens} (rollout.max_model_tokens)"
        )
    needed = _NEEDED.get(loss, ("logprobs", "advantages"))
    missing = [name for name in needed if name not in datum.inputs]
    if missing:
        raise ContractError(f"{where} has no {missing[0]}, which {loss} needs for each position")
    arrays: dict[str, npt.NDArray[Any]] = {"targets": datum.targets, **dict(sorted(datum.inputs.items()))}
    for name, values in arrays.items():
        if name != "targets" and name not in _INPUTS:
            raise ContractError(f"{where} has an input {name!r}; known are {', '.join(_INPUTS)}")
        if values.shape != (length,):
            raise ContractError(
                f"{where} has {length} tokens, but {name} of shape {values.shape}; give as many"
            )
        wrong = np.flatnonzero(~np.isfinite(values))
        if wrong.size:
            raise ContractError(
                f"{name} of {where} is {values[wrong[0]]} at position {wrong[0]}; give a number"
            )
    for name, ids, asked in (
        ("token", datum.token_ids, np.ones(length, dtype=np.bool_)),
        ("target", datum.targets, counts(loss, datum)),
    ):
        wrong = np.flatnonzero(asked & ((ids < 0) | (ids >= vocabulary)))
        if wrong.size:
            raise ContractError(
                f"{where} has {name} {ids[wrong[0]]} at position {wrong[0]}, which is no token of the model; "
                f"give 0 to {vocabulary - 1}"
            )


def check_adam(adam: AdamParameters) -> None:
    """Check the parameters of a step.

    Raises:
        ContractError: naming the one that cannot be.
    """
    for name in ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm"):
        value = getattr(adam, name)
        below = name in ("beta1", "beta2")
        if name == "eps" and 0 <= value < LEAST_EPS:
            raise ContractError(
                f"eps={value} cannot be: a weight without a gradient would become 0 / 0; give 1e-12"
            )
        if not 0 <= value <= MOST or (below and value >= 1):
            most = "below 1" if below else f"at most {MOST:g}"
            raise ContractError(f"{name}={value} cannot be; give a number of at least 0, {most}")
