"""Probe: fixed tokens and what the learner makes of them, so that an engine is seen to compute the same.

A digest says which bytes an engine was handed, not what it does with them: a head that is packed no more, a
tensor that stayed behind or a rotary base that is another one change no byte. So the manifest of a version
carries log-probabilities of a few tokens under the learner's own model, and every worker compares them with
its engine's between two steps after each load.

Legend: T tokens that are scored; the first one of a probe only begins the text.
"""

import numpy as np
import numpy.typing as npt

from antiphon.core.records import Probe
from antiphon.core.seeds import generator

PROBE_TOKENS = 64
"""Tokens that are scored, where the model has room for them."""
ROUNDING = {"float32": 1e-4, "tf32": 2e-3, "float16": 0.02, "bfloat16": 0.15}
"""Mean difference of the log-probabilities that rounding stays below, nats, by the precision of engine or
learner. Measured on CPUs: 1.3e-6 in float32, 0.02 in bfloat16. The mean, since in 16 bits a router that is
near its edge sends a token elsewhere; a fault moves them all. tf32 is what tensor cores make of float32."""


def probe_tokens(vocabulary: int, scored: int = PROBE_TOKENS) -> tuple[int, ...]:
    """Return the scored + 1 token ids of a probe: one of each equal part of the vocabulary, in a drawn order.

    >>> tokens = probe_tokens(151_936)
    >>> len(tokens), len(set(tokens)), max(tokens) < 151_936, tokens == probe_tokens(151_936)
    (65, 65, True, True)
    """
    random = generator("probe", vocabulary)
    edges = np.arange(scored + 2) * vocabulary // (scored + 1)
    ids = random.integers(edges[:-1], np.maximum(edges[1:], edges[:-1] + 1))
    return tuple(random.permutation(ids).tolist())


def probe_problem(probe: Probe, logprobs: npt.NDArray[np.floating], dtype: str) -> str:
    """Say how an engine's scores contradict a probe; nothing where rounding explains the difference.

    Args:
        probe: of the version that was loaded.
        logprobs: [<= T] the engine's log-probabilities of the probe's tokens from the second one on, nats.
        dtype: precision of the engine.

    >>> probe = Probe((3, 1, 2), (-0.5, -1.5), "float32")
    >>> probe_problem(probe, np.array([-0.50001, -1.5]), "float32")
    ''
    >>> probe_problem(probe, np.array([-0.5, -1.75]), "bfloat16")
    ''
    >>> print(probe_problem(probe, np.array([-0.5, -1.75]), "float32").partition("; ")[0])
    it computes something else than the learner: log-probabilities are 0.25 nat apart (of token 2), 0.12 on average, where rounding in float32 stays below 0.0001
    """  # noqa: E501
    coarser = max(dtype, probe.dtype, key=ROUNDING.__getitem__)
    apart = np.abs(np.asarray(logprobs, np.float64) - np.array(probe.logprobs[: len(logprobs)]))
    apart[np.isnan(apart)] = np.inf
    worst, mean = int(apart.argmax()), apart.mean()
    if mean <= ROUNDING[coarser]:
        return ""
    return (
        f"it computes something else than the learner: log-probabilities are {apart[worst]:.2g} nat apart "
        f"(of token {probe.tokens[worst + 1]}), {mean:.2g} on average, where rounding in {coarser} stays "
        f"below {ROUNDING[coarser]:g}; start this worker again; if all refuse, vllm and transformers "
        "disagree about this model: install those of the lock"
    )
