"""vLLM plugin: fixes one defect of vLLM 0.32 on CPU.

vLLM's rejection sampler spreads every request's temperature, top-k and top-p over the rows of its
drafts. On CPU the stand-in for that kernel writes 32-bit values into a copy, so the rows are
divided by uninitialised memory (vllm-project/vllm#55005, fixed upstream by #55006). Only vLLM's
own sampler is hurt, and only where it verifies drafts; the keyed sampler has no part in it.

vLLM loads this through the entry point `vllm.general_plugins`; the engine calls `register` as
well, because an entry point is invisible until the package is installed again.
"""

import structlog
import torch

AFFECTED = ("0", "32")
"""First two numbers of the vLLM versions that have the defect, but for late ones of them."""

_log = structlog.get_logger(__name__)


def register() -> None:
    """Put `spread` in place of vLLM's function where platform and version call for it; once is enough."""
    import vllm
    from vllm.platforms import current_platform

    if not concerns(vllm.__version__, bool(current_platform.is_cpu())):
        return
    from vllm.v1.sample import rejection_sampler

    if rejection_sampler.expand_batch_to_tokens is not spread:
        rejection_sampler.expand_batch_to_tokens = spread
        _log.info("vllm.fixed", function="expand_batch_to_tokens", vllm=vllm.__version__)


def concerns(version: str, on_cpu: bool) -> bool:
    """Return whether a vLLM version may have the defect on this platform.

    >>> concerns("0.32.1+cpu", on_cpu=True), concerns("0.32.0", on_cpu=False), concerns("0.33.0", on_cpu=True)
    (True, False, False)
    """
    return on_cpu and tuple(version.split(".")[:2]) == AFFECTED


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
