"""Seeds: every random stream of a run, derived by name from one number.

Nothing draws from a global generator. A stream is named by what it is for, so adding a new
one never shifts another, and the same configuration gives the same run.
"""

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from blake3 import blake3


def derive_seed(*parts: str | int) -> int:
    """Hash names and numbers into an unsigned 64-bit seed.

    Parts are joined with their types and lengths, so ("a", "b") and ("ab",) differ.

    >>> derive_seed("x", 1) == derive_seed("x", 1)
    True
    >>> derive_seed("x", 1) == derive_seed("x1")
    False
    """
    return _seed_of(_joined(parts))


def _joined(parts: Sequence[str | int]) -> bytes:
    """Return parts as bytes, each with its type and length; so joined parts are parts joined."""
    joined = bytearray()
    for part in parts:
        body = str(part).encode()
        joined += b"i" if isinstance(part, int) else b"s"
        joined += len(body).to_bytes(4, "little") + body
    return bytes(joined)


@functools.lru_cache(maxsize=1024)
def _joined_index(index: int) -> bytes:
    return _joined((index,))


def _seed_of(joined: bytes) -> int:
    return int.from_bytes(blake3(joined).digest(length=8), "little")


def generator(*parts: str | int) -> np.random.Generator:
    """Return the NumPy generator of the stream that `parts` name."""
    return np.random.Generator(np.random.PCG64(derive_seed(*parts)))


def request_seeds(run_seed: int, prompt_key: str, epoch: int, group_size: int) -> tuple[int, ...]:
    """Return one sampler seed per sample of a group; the policy version takes no part.

    So a group that is sampled again, elsewhere or later, under the same version has the same
    tokens (position-keyed sampling).
    """
    # As `derive_seed(*beginning, i)`; every lease asks for these, so the beginning is joined once.
    beginning = _joined(("request", run_seed, prompt_key, epoch))
    return tuple(_seed_of(beginning + _joined_index(i)) for i in range(group_size))


def branch_seed(seed: int, branch: int) -> int:
    """Return the sampler seed of a branch of a trajectory with this seed; of branch 0 it is the seed itself.

    So no random number is drawn twice, although positions count from the beginning of each branch.
    """
    return derive_seed("branch", seed, branch) if branch else seed


def conversation_seed(environment_seed: int, prompt_key: str) -> int:
    """Return the seed of a prompt's conversations: the same for all samples, so that they can be compared."""
    return derive_seed("conversation", environment_seed, prompt_key)


def prompt_order(run_seed: int, epoch: int, size: int) -> npt.NDArray[np.int64]:
    """Return the order in which one epoch visits the training prompts, a permutation [size]."""
    return generator("prompt-order", run_seed, epoch).permutation(size)


def refill_order(run_seed: int, step: int, size: int, exclude: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return the spare prompts of one step in fixed mode, those it uses already left out.

    A function of (seed, step) alone; `size` is the number of training prompts.
    """
    order = generator("refill-order", run_seed, step).permutation(size)
    return order[~np.isin(order, np.asarray(exclude, dtype=np.int64))]
