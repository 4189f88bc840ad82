"""DeepSpeed engine: the one place that trains weights, on one rank inside this process.

Same weights, same batches, same threads: same bits. Micro-batches may be as many as a batch
needs, since the engine leaves the end of an update to its caller. The optimizer is
torch's AdamW, and DeepSpeed's shared-memory extension is switched off: neither needs a C++
compiler, and one rank has no one to share memory with.
"""

import atexit
import gc
import logging
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from antiphon.core.broadcast.probe import PROBE_TOKENS, probe_tokens
from antiphon.core.config import RunConfig
from antiphon.core.errors import IntegrityError
from antiphon.core.learning_rate import rate_by_size
from antiphon.core.records import Probe
from antiphon.cpu.layers import compile_blocks
from antiphon.services.learner.objective import NOTHING, Objective, TokenMetrics, UpdateTotals
from antiphon.services.learner.packing import MicroBatch, count_trajectories, probe_batch
from antiphon.services.learner.policy import Policy, load_causal_model, published_names
from antiphon.system import failpoints
from antiphon.weights.snapshot import Weights, published_entries

_TORCH_DTYPE = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_SHARED_MEMORY_EXTENSION = "deepspeed_shm_comm"
_PREFIX = "causal_model."
_TAG = "state"
_FIX = "look at the batch's logprobs and rewards, or lower learner.learning_rate"


@dataclass(frozen=True, slots=True, eq=False)
class UpdateMetrics:
    """What one optimizer update reports."""

    loss: float
    gradient_norm: float
    tokens: tuple[TokenMetrics, ...]
    """One per micro-batch, on the CPU."""


def _open_deepspeed() -> Any:
    """Import DeepSpeed and join a process group of one, again if another library has left it meanwhile."""
    cuda = torch.cuda.is_available()
    if not cuda:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}.items():
        os.environ.setdefault(name, value)
    # One rank talks to no other: it needs neither a port nor a host name that resolves.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    import deepspeed
    from deepspeed.utils import groups, logger

    logger.setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__[_SHARED_MEMORY_EXTENSION] = False
    if not torch.distributed.is_initialized():
        groups._WORLD_GROUP = None  # its copy of a process group that was left
        folder = Path(tempfile.mkdtemp(prefix="antiphon-rank-"))
        # Process groups made later meet here too, so it stays until the process ends.
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        deepspeed.init_distributed(
            dist_backend="nccl" if cuda else "gloo",
            auto_mpi_discovery=False,
            verbose=False,
            init_method=f"file://{folder / 'meeting-point'}",
            rank=0,
            world_size=1,
        )
    return deepspeed


class DeepSpeedEngine:
    """Weights and optimizer of one policy."""

    def __init__(self, config: RunConfig, make_policy: Callable[[Any, Objective], Policy] = Policy) -> None:
        """Load the base weights and make the engine.

        Args:
            config: of the run.
            make_policy: what computes the loss from the causal model and the objective.

        Raises:
            ConfigError: when `model.path` cannot be loaded or trained.
        """
        pin_numerics(config.learner.threads)
        deepspeed = _open_deepspeed()
        section = config.learner
        objective = Objective(config.algorithm, config.sampling.max_tokens, config.sampling.temperature)
        # bfloat16 training keeps float32 masters, made from the weights handed over here.
        causal_model = load_causal_model(
            config.model.path, _TORCH_DTYPE[section.dtype], section.gradient_checkpointing
        )
        self._names = published_names(causal_model)
        self._publish_dtype = _TORCH_DTYPE[config.model.dtype]
        self._stage = _zero_stage(config)
        # An engine scores them as a prompt, with room for one token more.
        scored = min(PROBE_TOKENS, config.rollout.max_model_tokens - 2)
        self._probed = probe_tokens(causal_model.config.get_text_config().vocab_size, scored)
        self._dtype = section.dtype
        policy = make_policy(causal_model, objective)
        if section.compiled:
            compile_blocks(causal_model)
        size = sum(parameter.numel() for parameter in policy.parameters())
        self.learning_rate = section.learning_rate or rate_by_size(size)
        optimizer = torch.optim.AdamW(
            policy.parameters(),
            lr=self.learning_rate,
            betas=(section.beta1, section.beta2),
            weight_decay=section.weight_decay,
        )
        self._optimizer = optimizer
        self._engine, *_ = deepspeed.initialize(
            model=policy, optimizer=optimizer, config=_deepspeed_config(config)
        )

    def update(
        self,
        batches: Sequence[MicroBatch],
        proximal_logprobs: Sequence[torch.Tensor] | None = None,
        left_out: UpdateTotals = NOTHING,
        share: float = 1.0,
        done: Callable[[], None] = lambda: None,
    ) -> UpdateMetrics:
        """Make one optimizer update from all micro-batches together.

        Args:
            batches: at least one.
            proximal_logprobs: per micro-batch, the logprobs [R, T] at the start of the step;
                None when this is the step's first update.
            left_out: what the update divides by besides its own trajectories and tokens, and their `longest`.
            share: of the learning rate, 0..1.
            done: called after each micro-batch.

        Raises:
            IntegrityError: when the loss or the gradient is no number; make a new engine then.
        """
        totals = UpdateTotals(
            trajectories=left_out.trajectories + count_trajectories(batches),
            tokens=left_out.tokens + sum(batch.completion_tokens for batch in batches),
            longest=left_out.longest,
        )
        loss, metrics = self.sum_gradients(batches, totals, proximal_logprobs, done)
        for group in self._optimizer.param_groups:
            group["lr"] = self.learning_rate * share
        return UpdateMetrics(loss, self._apply(), tuple(metrics))

    def sum_gradients(
        self,
        batches: Sequence[MicroBatch],
        totals: UpdateTotals,
        proximal_logprobs: Sequence[torch.Tensor] | None = None,
        done: Callable[[], None] = lambda: None,
    ) -> tuple[float, list[TokenMetrics]]:
        """Add the gradients of micro-batches to those of the update under way; `update` does this first.

        Returns:
            The loss of these micro-batches as a share of the update's, and what it did with their tokens.
        """
        loss = 0.0
        metrics = []
        for place, batch in enumerate(batches):
            proximal = None if proximal_logprobs is None else proximal_logprobs[place].to(self._engine.device)
            failpoints.reach("learner.forward")
            share, found = self._engine(batch.to(self._engine.device), totals, proximal)
            loss += float(share.detach())
            if not math.isfinite(loss):
                raise IntegrityError(
                    f"the loss is {loss} at micro-batch {place + 1} of {len(batches)}: "
                    f"{_culprit(batch, found)}; {_FIX}"
                )
            self._engine.backward(share)
            metrics.append(TokenMetrics(**{f.name: getattr(found, f.name).cpu() for f in fields(found)}))
            done()
        return loss, metrics

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return the sums of the gradients since the last optimizer step, on the CPU, by parameter.

        They have the type in which they are summed, float32. For a float32 learner only stage 0 has them.
        """
        from deepspeed.utils import safe_get_full_grad

        named = self._engine.module.named_parameters()
        return {name: safe_get_full_grad(parameter).cpu() for name, parameter in named}

    def _apply(self) -> float:
        norm = None
        if self._stage == 0:
            held = [one.grad for one in self._engine.module.parameters() if one.grad is not None]
            norm = float(torch.nn.utils.get_total_norm(held))
        if norm is None or math.isfinite(norm):
            failpoints.reach("learner.optimizer")
            self._engine.step()
        if norm is None:
            found = self._engine.get_global_grad_norm()
            norm = float("nan") if found is None else float(found)
        if not math.isfinite(norm):
            raise IntegrityError(f"the norm of the gradient is {norm}{self._worst()}; {_FIX}")
        return norm

    def _worst(self) -> str:
        """Name the first parameter whose gradient is no number, where the gradients are still there."""
        for name, parameter in self._engine.module.named_parameters():
            if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all()):
                return f", that of {name.removeprefix(_PREFIX)} is no number"
        return ""

    def logprobs(self, batch: MicroBatch, temperature: float | None = None) -> torch.Tensor:
        """Return the logprobs [R, T] of the completion tokens, float32 nats, on the CPU.

        They are those of `temperature`, by default the run's.
        """
        with torch.no_grad():
            found: torch.Tensor = self._engine(batch.to(self._engine.device), temperature=temperature)
        return found.cpu()

    def probe(self) -> Probe:
        """Return what an engine that loads the weights held now must compute.

        Raises:
            IntegrityError: when a log-probability is no number.
        """
        found = self.logprobs(probe_batch(self._probed), 1.0)[0].float()
        if not bool(torch.isfinite(found).all()):
            raise IntegrityError(f"the weights give a log-probability that is no number; {_FIX}")
        return Probe(self._probed, tuple(found.tolist()), self._dtype)

    def weights(self) -> Weights:
        """Return the weights as they are published, each tensor once, to be read while they are held.

        Sharded ones are gathered one by one, so reading takes the memory of the largest. It raises
        IntegrityError naming the first tensor that holds something else than numbers.
        """
        module = self._engine.module
        held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        tensors = {name: held[_PREFIX + name] for name in self._names}
        shapes = {}
        for name, tensor in tensors.items():
            dtype = self._publish_dtype if tensor.is_floating_point() else tensor.dtype
            shapes[name] = dtype, tuple(getattr(tensor, "ds_shape", tensor.shape))
        entries = published_entries(shapes)
        return Weights(
            entries, lambda name: _whole(tensors[name]), _check_numbers, self._gathering, self.probe
        )

    @contextmanager
    def _gathering(self) -> Iterator[None]:
        """Have every sharded tensor sharded inside the block: DeepSpeed keeps small ones whole otherwise."""
        if self._stage != 3:
            yield
            return
        self._engine.optimizer.checkpoint_event_prologue()
        try:
            yield
        finally:
            self._engine.optimizer.checkpoint_event_epilogue()

    def save(self, folder: Path, client_state: dict[str, Any]) -> None:
        """Write weights, optimizer and `client_state` into `folder`."""
        self._engine.save_checkpoint(str(folder), tag=_TAG, client_state=client_state, save_latest=False)

    def load(self, folder: Path) -> dict[str, Any]:
        """Load what `save` wrote, and return its client state; its bytes must have been checked.

        Raises:
            IntegrityError: when the folder holds no checkpoint of this shape.
        """
        path, state = self._engine.load_checkpoint(str(folder), tag=_TAG)
        if path is None:
            raise IntegrityError(f"there is no DeepSpeed checkpoint in {folder}; remove the folder")
        return dict(state)

    def close(self) -> None:
        """Give the memory back; the engine is of no use afterwards."""
        self._engine.destroy()
        del self._engine
        gc.collect()


@contextmanager
def _whole(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Give a tensor that may be sharded over ranks, all of it."""
    if not hasattr(tensor, "ds_id"):
        yield tensor
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters([tensor]):
        yield tensor.data


def _check_numbers(name: str, values: torch.Tensor) -> None:
    if not values.is_floating_point():
        return
    lowest, highest = torch.aminmax(values)  # neither is finite where a value is no number
    if not bool(torch.isfinite(lowest) & torch.isfinite(highest)):
        raise IntegrityError(f"the weight {name} holds values that are no numbers; {_FIX}")


def pin_numerics(threads: int) -> None:
    """Fix what the bits depend on, for the calling thread: thread count and deterministic kernels."""
    torch.set_num_threads(threads)
    cuda = torch.cuda.is_available()
    if cuda:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # On a CPU every kernel in use is deterministic; on a GPU a few have no such variant.
    torch.use_deterministic_algorithms(True, warn_only=cuda)
    # Filling every fresh tensor would only hide reads of unset memory, and costs time.
    torch.utils.deterministic.fill_uninitialized_memory = False


def _zero_stage(config: RunConfig) -> int:
    """Return DeepSpeed's stage: its stage 0 sums gradients of bfloat16 in bfloat16 and cannot do otherwise.

    Stage 1 can, and on one rank it is the same arithmetic, since one partition is the whole.
    """
    section = config.learner
    return max(section.zero_stage, 1) if section.dtype == "bfloat16" else section.zero_stage


def _deepspeed_config(config: RunConfig) -> dict[str, Any]:
    section = config.learner
    tree: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        # An update ends when step() is called, whatever the number of micro-batches.
        "managed_gradient_accumulation": False,
        "gradient_clipping": section.gradient_clip,
        "zero_optimization": {
            "stage": _zero_stage(config),
            "overlap_comm": False,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        # In bfloat16 a sum of many micro-batches stops growing once it is 256 times as large as they are.
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    if section.dtype == "bfloat16":
        tree["bf16"] = {"enabled": True}
    return tree


def _culprit(batch: MicroBatch, found: TokenMetrics) -> str:
    """Say which of the loss's ingredients is no number."""
    for tensor, what in (
        (batch.advantages[:, None], "the advantage"),
        (batch.behaviour_logprobs, "a behaviour logprob"),
        (found.learner_logprobs, "the learner's logprob"),
    ):
        wrong = (~torch.isfinite(tensor)).any(1).nonzero()
        if len(wrong):
            group_id, sample = batch.rows[int(wrong[0])]
            return f"{what} of sample {sample} of group {group_id} is no number"
    return "it overflows"
