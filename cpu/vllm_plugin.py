"""vLLM plugin: fixes one defect of vLLM 0.32 on CPU, once, and only where it shows.

vLLM's rejection sampler spreads every request's temperature, top-k and top-p over the rows of its
drafts. On CPU the stand-in for that kernel writes 32-bit values into a copy, so the rows are
divided by uninitialised memory (vllm-project/vllm#55005, fixed upstream by #55006). Only vLLM's
own sampler is hurt, and only where it verifies drafts; the keyed sampler has no part in it.

vLLM loads this through the entry point `vllm.general_plugins`; the engine calls `register` as
well, because an entry point is invisible until the package is installed again.
"""

from collections.abc import Callable
from types import ModuleType

import structlog
import torch

AFFECTED = ("0", "32")
"""First two numbers of the vLLM versions that may have the defect."""

_MARK = "antiphon_guard"

_log = structlog.get_logger(__name__)


def register() -> None:
    """Install the guard where platform and version call for it; calling again does nothing."""
    import vllm
    from vllm.platforms import current_platform

    if not concerns(vllm.__version__, bool(current_platform.is_cpu())):
        return
    from vllm.v1.sample import rejection_sampler

    guard(rejection_sampler, vllm.__version__)


def concerns(version: str, on_cpu: bool) -> bool:
    """Return whether a vLLM version may have the defect on this platform.

    >>> concerns("0.32.1+cpu", on_cpu=True), concerns("0.32.0", on_cpu=False), concerns("0.33.0", on_cpu=True)
    (True, False, False)
    """
    return on_cpu and tuple(version.split(".")[:2]) == AFFECTED


def guard(module: ModuleType, version: str) -> None:
    """Let `module.expand_batch_to_tokens` prove itself when it is first used, and replace it if it fails.

    vLLM binds its CPU kernels after it has loaded its plugins, so there is nothing to test before.

    Args:
        module: vLLM's `v1.sample.rejection_sampler`.
        version: vLLM's version, for the log.
    """
    if hasattr(module, _MARK):
        return
    setattr(module, _MARK, True)
    original: Callable[..., torch.Tensor] = module.expand_batch_to_tokens

    def decide(
        x: torch.Tensor,
        cu_num_tokens: torch.Tensor,
        num_tokens: int,
        replace_from: float = 0,
        replace_to: float = 0,
    ) -> torch.Tensor:
        chosen = original if is_sound(original, x.device) else spread
        module.expand_batch_to_tokens = chosen  # type: ignore[attr-defined]
        if chosen is spread:
            _log.info("vllm.fixed", function="expand_batch_to_tokens", vllm=version)
        return chosen(x, cu_num_tokens, num_tokens, replace_from, replace_to)

    module.expand_batch_to_tokens = decide  # type: ignore[attr-defined]


def is_sound(expand: Callable[..., torch.Tensor], device: torch.device) -> bool:
    """Return whether `expand` spreads 32-bit values, floats and integers, as it should.

    Two different inputs: memory left over from the one cannot pass for the answer to the other.
    """
    for offset in (0, 4):
        for dtype in (torch.float32, torch.int32):
            x = torch.tensor([3, 5, 9], dtype=dtype, device=device) + offset
            ends = torch.tensor([2, 5, 6], dtype=torch.int32, device=device)
            wanted = [2, 2] + [5 + offset] * 3 + [9 + offset]
            if expand(x, ends, 6, 3 + offset, 2).tolist() != wanted:
                return False
    return True


def spread(
    x: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    num_tokens: int,
    replace_from: float = 0,
    replace_to: float = 0,
) -> torch.Tensor:
    """Repeat each request's value for each of its draft rows.

    Args:
        x: [B] value of each request.
        cu_num_tokens: [B] draft rows up to and with each request.
        num_tokens: draft rows in all, R.
        replace_from: a value that stands for another one,
        replace_to: namely this.

    Returns:
        [R], of the dtype of `x`.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values = torch.where(x == replace_from, torch.as_tensor(replace_to, dtype=x.dtype, device=x.device), x)
    return torch.repeat_interleave(values, counts, output_size=num_tokens)
