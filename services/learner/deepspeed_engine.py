"""DeepSpeed engine: the one place that trains weights, on each rank.

Same weights, same batches, same threads, same ranks: same bits. Micro-batches may be as many as a batch
needs, since the engine leaves the end of an update to its caller. The optimizer is
torch's AdamW, and DeepSpeed's shared-memory extension is switched off: neither needs a C++
compiler. What is collective raises on all ranks or on none.
"""

import atexit
import gc
import json
import logging
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from antiphon.core.broadcast.probe import PROBE_TOKENS, probe_tokens
from antiphon.core.capacity.model_shape import frozen_names
from antiphon.core.client_records import AdamParameters
from antiphon.core.config import RunConfig
from antiphon.core.config_sections import LearnerSection
from antiphon.core.digests import digest_file
from antiphon.core.errors import ConfigError, IntegrityError, UnavailableError
from antiphon.core.learning_rate import rate_by_size
from antiphon.core.ranks.memory import bucket_parameters, whole_parameters
from antiphon.core.records import Probe
from antiphon.core.seeds import derive_seed
from antiphon.cpu.layers import compile_blocks
from antiphon.services.learner.adapters import Adapters
from antiphon.services.learner.client_losses import ClientBatch, figures_of, losses_of
from antiphon.services.learner.objective import Objective, TokenMetrics, UpdateTotals
from antiphon.services.learner.packing import MicroBatch, probe_batch
from antiphon.services.learner.policy import (
    Policy,
    check_kind,
    empty_causal_model,
    fill_parts,
    load_causal_model,
    published_pieces,
)
from antiphon.services.learner.ranks.group import Order, join
from antiphon.services.ranks.group import ALIVE
from antiphon.system import failpoints
from antiphon.system.spared import without
from antiphon.weights.snapshot import Adapter, Weights, published_entries

_TORCH_DTYPE = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_SHARED_MEMORY_EXTENSION = "deepspeed_shm_comm"
_PREFIX = "causal_model."
_TAG = "state"
Done = Callable[[MicroBatch, float, TokenMetrics], None]
_ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"} | {
    # One rank talks to no other: it needs neither a port nor a host name that resolves.
    "GLOO_SOCKET_IFNAME": "lo",
    "MASTER_ADDR": "127.0.0.1",
}
_FIX = "look at the batch's logprobs and rewards, or lower learner.learning_rate"


@contextmanager
def _refusal_named() -> Iterator[None]:
    """Say what a model computes that has no deterministic kernel, where torch refuses to.

    Raises:
        ConfigError: naming the operation.
    """
    try:
        yield
    except RuntimeError as error:
        operation, refused, _ = str(error).partition(" does not have a deterministic implementation")
        if not refused:
            raise
        raise ConfigError(
            f"the model of model.path computes {operation}, which on this device gives other bits each time, "
            "so that a restarted learner would refuse its own steps; train on a CPU or use another model"
        ) from error


def _open_deepspeed() -> Any:
    """Import DeepSpeed and be in a process group; of one if there is none, or another library has left it."""
    cuda = torch.cuda.is_available()
    if not cuda:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        for name, value in _ALONE.items():
            os.environ.setdefault(name, value)
    with without("mlflow"):  # four fifths of the import, for a tuner that nothing here calls
        import deepspeed
    from deepspeed.utils import groups, logger

    logger.setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__[_SHARED_MEMORY_EXTENSION] = False
    if not torch.distributed.is_initialized():
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
    global _opened
    if _opened is not (_opened := torch.distributed.group.WORLD):
        # Its copy of a process group that was left; of a new one it would make a copy with torch's deadlines.
        several = torch.distributed.get_world_size() > 1
        groups._WORLD_GROUP = torch.distributed.new_group(timeout=ALIVE) if several else None
    return deepspeed


def _number_from_zero() -> None:
    """Have stage 3 number modules and parameters alike on all ranks, whatever engines a process had before.

    DeepSpeed counts through the life of a process, and ranks whose numbers differ refuse to work together.
    """
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.runtime.zero.partition_parameters import Init

    (counter,) = DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__
    counter[0] = Init.param_id = 0


_opened: Any = None
"""The process group of the last engine."""


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
        self._ranks = join(config)
        deepspeed = _open_deepspeed()
        section = config.learner
        with self._ranks.together():  # it may be the user's code, which each rank imports
            objective = Objective(
                config.algorithm,
                config.sampling.max_tokens,
                config.sampling.temperature,
                config.reference,
                config.model.head == "float32",
            )
        self._objective = objective
        sources = self._ranks.texts(objective.source)
        with self._ranks.together():
            if other := next((rank for rank, one in enumerate(sources) if one != sources[0]), 0):
                raise ConfigError(
                    f"algorithm.objective={config.algorithm.objective} has source {sources[0][:12]} on rank "
                    f"0, but {sources[other][:12]} on rank {other}; put the same in PYTHONPATH of all ranks"
                )
        if section.stage == 3:
            _number_from_zero()
        causal_model = self._load(config)
        size = sum(getattr(one, "ds_numel", one.numel()) for one in causal_model.parameters())
        self._pieces = published_pieces(causal_model, config.model.path)
        self._publish_dtype = _TORCH_DTYPE[config.model.dtype]
        self._adapters: Adapters | None = None
        if section.lora.rank:
            seed = derive_seed("lora", config.run.seed)
            with self._ranks.together():
                self._adapters = Adapters(
                    causal_model, section.lora, self._publish_dtype, config.model.path, seed
                )
        for name in frozen_names(dict(causal_model.named_parameters()), section.freeze):
            causal_model.get_parameter(name).requires_grad_(False)
        self._trains_all = not (section.freeze or section.lora.rank)
        self._stage = section.stage
        # An engine scores them as a prompt, with room for one token more.
        scored = min(PROBE_TOKENS, config.rollout.max_model_tokens - 2)
        self.vocabulary: int = causal_model.config.get_text_config().vocab_size
        self._probed = probe_tokens(self.vocabulary, scored)
        self._dtype = section.dtype
        vectors = [one for one in causal_model.parameters() if len(getattr(one, "ds_shape", "  ")) == 1]
        with deepspeed.zero.GatheredParameters(vectors):  # norms are tried
            policy = make_policy(causal_model, objective)
        if section.stage == 3 and self._ranks.world > 1 and not policy.shares_rows:
            # A micro-batch has as many forward passes as blocks, and each of them gathers every layer.
            raise ConfigError(
                "learner.zero_stage=3 with several ranks needs a model whose attention is replaced here, and "
                "that of model.path is not; set learner.zero_stage to 2"
            )
        if section.compiled:
            compile_blocks(causal_model)
        self.learning_rate = section.learning_rate or rate_by_size(size, adapters=self._adapters is not None)
        trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(
            trained,
            lr=self.learning_rate,
            betas=(section.beta1, section.beta2),
            weight_decay=section.weight_decay,
        )
        self._optimizer = optimizer
        reduced = sum(getattr(one, "ds_numel", one.numel()) for one in trained)
        self._engine, *_ = deepspeed.initialize(
            model=policy, optimizer=optimizer, config=_deepspeed_config(section, size, reduced)
        )

    def _load(self, config: RunConfig) -> Any:
        """Return the causal model; at stage 3 with several ranks no rank ever has all of its weights.

        With adapters each loads all of them, which the engine parts afterwards.
        """
        path, section = config.model.path, config.learner
        # bfloat16 training keeps float32 masters, made from the weights handed over here.
        dtype, recomputed = _TORCH_DTYPE[section.dtype], section.gradient_checkpointing
        if section.stage < 3 or self._ranks.world == 1 or section.lora.rank:
            with self._ranks.together():
                return load_causal_model(path, dtype, recomputed)
        from deepspeed import zero
        from deepspeed.runtime.zero.partition_parameters import DeepSpeedTensorOverride
        from deepspeed.utils import groups

        with self._ranks.together():
            check_kind(path, dtype)
        with zero.Init(
            data_parallel_group=groups._WORLD_GROUP,
            config_dict_or_path=_deepspeed_config(section, 1, 1),
            tensor_overrides=[DeepSpeedTensorOverride.device],  # tables in float32 stay so
        ):
            causal_model = empty_causal_model(path, dtype, recomputed)
        with self._ranks.together():
            fill_parts(causal_model, path, self._ranks.rank)
        return causal_model

    def update(
        self,
        batches: Iterable[MicroBatch],
        totals: UpdateTotals,
        proximal_logprobs: Sequence[torch.Tensor] | None = None,
        share: float = 1.0,
        done: Done = lambda batch, loss, found: None,
    ) -> float:
        """Make one optimizer update from all micro-batches together, and return the norm of its gradient.

        Args:
            batches: those of this rank, at least one.
            totals: of the whole update, all ranks together.
            proximal_logprobs: per micro-batch, the logprobs [R, T] at the start of the step;
                None when this is the step's first update.
            share: of the learning rate, 0..1.
            done: called after each micro-batch with its part of the loss.

        Raises:
            IntegrityError: when the loss or the gradient is no number; make a new engine then.
            ConfigError: when the model computes something in no fixed order.
        """
        self.sum_gradients(batches, totals, proximal_logprobs, done)
        for group in self._optimizer.param_groups:
            group["lr"] = self.learning_rate * share
        return self._apply()

    def step_with(self, adam: AdamParameters) -> float:
        """Make one optimizer update from the gradients that `add_client` summed; return their norm before
        the clip.

        Raises:
            IntegrityError: when the gradient is no number; make a new engine then.
        """
        # Both places, as DeepSpeed's stages look at one or the other.
        self._engine._config.gradient_clipping = adam.grad_clip_norm
        if self._stage:
            self._engine.optimizer.clip_grad = adam.grad_clip_norm
        for group in self._optimizer.param_groups:
            group["lr"], group["betas"] = adam.learning_rate, (adam.beta1, adam.beta2)
            group["eps"], group["weight_decay"] = adam.eps, adam.weight_decay
        return self._apply()

    @_refusal_named()
    def add_client(
        self, batch: ClientBatch, names: Sequence[str], backward: bool = True
    ) -> tuple[torch.Tensor, npt.NDArray[np.float64]]:
        """Add the gradients of a client's data to those of the update under way, of all ranks together.

        Args:
            batch: the micro-batch of this rank.
            names: what its data are called, in the order in which they were given.
            backward: False computes the same and adds nothing.

        Returns:
            The logprobs [R, T] of the targets, float32 nats at temperature 1, on the CPU, and `FIGURES`.

        Raises:
            IntegrityError: when the loss of any rank is no number; nothing of these micro-batches was added.
            ConfigError: when the model computes something in no fixed order.
        """
        batch = batch.to(self._engine.device)
        failpoints.reach("learner.forward")
        with torch.set_grad_enabled(backward):
            logprobs = self._engine(batch.positions, temperature=1.0).float()
            losses = losses_of(logprobs, batch, self._objective.importance_weights)
            loss = losses.costs.sum()
        # An infinite ratio that is clipped away leaves a loss that is a number, and no gradient that is one.
        sound = losses.costs.isfinite() & (losses.ratios is None or losses.ratios.isfinite())
        problem = None
        if not bool(sound.all()) or not math.isfinite(float(loss.detach())):
            wrong = (~sound).any(1).nonzero()
            where = names[batch.order[int(wrong[0]) if len(wrong) else 0]]
            problem = IntegrityError(
                f"the loss {batch.loss} is {float(loss.detach())}, or its ratio overflows, at {where}; look "
                "at its logprobs, weights and advantages"
            )
        self._ranks.agree(problem)
        if backward:
            failpoints.reach("learner.backward")
            self._engine.backward(loss * self._ranks.world)  # DeepSpeed averages over the ranks
        logprobs = logprobs.detach()
        return logprobs.cpu(), figures_of(logprobs, batch, losses)

    def drop_gradients(self) -> None:
        """Forget the gradients of the update under way."""
        held = self._engine.optimizer if self._stage else self._engine
        held.zero_grad()
        for group in getattr(held, "all_grad_tensors", {}):  # where stages 1 and 2 have the sums
            held.all_grad_tensors[group] = None

    @_refusal_named()
    def sum_gradients(
        self,
        batches: Iterable[MicroBatch],
        totals: UpdateTotals,
        proximal_logprobs: Sequence[torch.Tensor] | None = None,
        done: Done = lambda batch, loss, found: None,
    ) -> None:
        """Add the gradients of micro-batches to those of the update under way; `update` does this first."""
        world, problem = self._ranks.world, None
        # DeepSpeed averages over the ranks. liger divides its count of tokens by their number by itself.
        totals = replace(totals, trajectories=totals.trajectories / world)
        for place, batch in enumerate(batches):
            proximal = None if proximal_logprobs is None else proximal_logprobs[place].to(self._engine.device)
            failpoints.reach("learner.forward")
            share, found = self._engine(batch.to(self._engine.device), totals, proximal)
            loss = float(share.detach()) / world
            if problem is None and not math.isfinite(loss):
                rank = f" of rank {self._ranks.rank}" if world > 1 else ""
                problem = IntegrityError(
                    f"the loss is {loss} at micro-batch {place + 1}{rank}: {_culprit(batch, found)}; {_FIX}"
                )
            failpoints.reach("learner.backward")
            self._engine.backward(share)  # whatever the loss: the other ranks wait for this one's part
            done(batch, loss, TokenMetrics(**{f.name: getattr(found, f.name).cpu() for f in fields(found)}))
        self._ranks.agree(problem)

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return the sums of the gradients since the last optimizer step, on the CPU, by parameter.

        They have the type in which they are summed, float32. For a float32 learner only stage 0 has them.
        """
        from deepspeed.utils import safe_get_full_grad

        named = self._engine.module.named_parameters()
        return {name: safe_get_full_grad(one).cpu() for name, one in named if one.requires_grad}

    def _apply(self) -> float:
        norm = None
        if self._stage == 0:
            held = [one.grad for one in self._engine.module.parameters() if one.grad is not None]
            norm = float(torch.nn.utils.get_total_norm(held))
        if norm is None or math.isfinite(norm):
            failpoints.reach("learner.optimizer")
            self._engine.step()
        if norm is None:  # of all ranks' gradients, which stage 1 sums in step()
            found = self._engine.get_global_grad_norm()
            norm = float("nan") if found is None else float(found)
        problem = None
        if not math.isfinite(norm):
            problem = IntegrityError(f"the norm of the gradient is {norm}{self._worst()}; {_FIX}")
        self._ranks.agree(problem)
        return norm

    def _worst(self) -> str:
        """Name the first parameter whose gradient is no number, where the gradients are still there."""
        for name, parameter in self._engine.module.named_parameters():
            if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all()):
                return f", that of {name.removeprefix(_PREFIX)} is no number"
        return ""

    @_refusal_named()
    def logprobs(self, batch: MicroBatch, temperature: float | None = None) -> torch.Tensor:
        """Return the logprobs [R, T] of the completion tokens, float32 nats, on the CPU.

        They are those of `temperature`, by default the run's.
        """
        with torch.no_grad():
            found: torch.Tensor = self._engine(batch.to(self._engine.device), temperature=temperature)
        return found.cpu()

    def _probe_logprobs(self) -> torch.Tensor:
        """Return the logprobs of the probe's tokens, [T]; at stage 3 each rank calls it."""
        return self.logprobs(probe_batch(self._probed), 1.0)[0].float()

    def _probe_of(self, found: torch.Tensor) -> Probe:
        if not bool(torch.isfinite(found).all()):
            raise IntegrityError(f"the weights give a log-probability that is no number; {_FIX}")
        return Probe(self._probed, tuple(found.tolist()), self._dtype)

    def weights(self) -> Weights:
        """Return the weights as they are published, each tensor once, to be read while they are held.

        Sharded ones are gathered one by one, so reading takes the memory of the largest, or of the experts of
        a layer. It raises IntegrityError naming the first tensor that holds something else than numbers.
        """
        module = self._engine.module
        held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        adapters = self._adapters
        # A weight with an adapter is made of three tensors.
        tensors = {
            name: [held[_PREFIX + part] for part in ([name] if adapters is None else adapters.parts(name))]
            for name in dict.fromkeys(piece.tensor for piece in self._pieces.values())
        }
        shapes, pairs = {}, dict[str, torch.Tensor]()
        for name, piece in self._pieces.items():
            tensor = tensors[piece.tensor][0]
            shapes[name] = self._publish_dtype if tensor.is_floating_point() else tensor.dtype, piece.shape
        entries, left = published_entries(shapes), list[str]()
        probed: torch.Tensor | None = None
        layer, gathered = "", ExitStack()

        @contextmanager
        def whole(name: str) -> Iterator[torch.Tensor]:
            failpoints.reach("learner.gather")
            if left:
                left.remove(name)
            nonlocal layer
            piece = self._pieces[name]
            with ExitStack() as stack:
                with self._ranks.running():  # where it fails on one rank alone, the others would wait in it
                    if layer != piece.experts:
                        gathered.close()
                        layer = piece.experts
                        if layer:  # once for all of its experts, whose matrices follow each other
                            own = dict.fromkeys(p.tensor for p in self._pieces.values() if p.experts == layer)
                            gathered.enter_context(_whole([tensors[part][0] for part in own]))
                    if layer:
                        found = [piece.of(tensors[piece.tensor][0].data)]
                    else:
                        found = stack.enter_context(_whole(tensors[name]))
                    whole, *pair = found
                if adapters is not None and pair and self._ranks.rank == 0:  # the others read nothing
                    whole = adapters.merged(name, found, pairs)
                yield whole

        @contextmanager
        def reading() -> Iterator[None]:
            if self._stage != 3:
                yield
                return
            self._ranks.order(Order.READ)
            nonlocal probed
            with self._ranks.running():
                # DeepSpeed keeps small tensors whole otherwise.
                self._engine.optimizer.checkpoint_event_prologue()
            left[:] = [entry.name for entry in entries]
            try:
                yield
            finally:
                with self._ranks.running():
                    # The other ranks gather them all, whatever went wrong with one.
                    while left:
                        with whole(left[0]):
                            pass
                    gathered.close()
                    self._engine.optimizer.checkpoint_event_epilogue()
                    probed = self._probe_logprobs()

        def probe() -> Probe:
            return self._probe_of(self._probe_logprobs() if probed is None else probed)

        def adapter() -> Adapter | None:
            return None if adapters is None else Adapter(adapters.scale, pairs)

        return Weights(entries, whole, _check_numbers, reading, probe, adapter)

    def gather(self) -> None:
        """Take part in rank 0's reading of the weights."""
        weights = self.weights()
        with weights.reading():
            pass

    def save(
        self,
        folder: Path,
        client_state: dict[str, Any],
        digested: Callable[[int], None] = lambda length: None,
    ) -> dict[str, str]:
        """Write weights, optimizer and `client_state` into `folder`; each rank writes and digests its part.

        Args:
            folder: of the checkpoint, the same for all ranks.
            client_state: what `load` returns.
            digested: gets the bytes of each piece of a file of this rank whose digest is made.

        Returns:
            The digests of all ranks' files by name, on rank 0; on others nothing.

        Raises:
            UnavailableError: when any rank cannot write its part.
        """
        problems: list[Exception] = []
        digests: dict[str, str] = {}
        # DeepSpeed leaves out one name of each frozen tensor, and a tied head has two.
        named = self._engine.module.named_parameters(remove_duplicate=False)
        frozen = {name for name, one in named if not one.requires_grad}
        engine = self._engine.checkpoint_engine
        write = type(engine).save

        def save(state_dict: Any, path: str, *args: Any, **named: Any) -> None:  # passed by name too
            failpoints.reach("learner.save")
            for name in frozen & state_dict.get("module", {}).keys():
                del state_dict["module"][name]
            try:
                write(engine, state_dict, path, *args, **named)
                digests[str(Path(path).relative_to(folder))] = digest_file(Path(path), digested)
            except (OSError, RuntimeError) as error:  # torch's word for a full disk
                problems.append(error)

        engine.save = save  # DeepSpeed would leave the other ranks waiting for one that raises
        self._engine._copy_recovery_script = lambda path: None  # rank 0's alone, and nobody runs the scripts
        try:
            self._engine.save_checkpoint(
                str(folder),
                tag=_TAG,
                client_state=client_state,
                save_latest=False,
                exclude_frozen_parameters=not self._trains_all,
            )
        finally:
            del engine.save, self._engine._copy_recovery_script
        self._ranks.agree(UnavailableError(str(problems[0])) if problems else None)
        parts = self._ranks.texts(json.dumps(digests))
        return {name: digest for part in parts for name, digest in json.loads(part).items()}

    def load(self, folder: Path, optimizer: bool = True) -> dict[str, Any]:
        """Load what `save` wrote, and return its client state; its bytes must have been checked.

        Without `optimizer` the moments of the optimizer stay as they are.

        Raises:
            IntegrityError: when the folder holds no checkpoint of this shape.
        """
        # Stage 3 has its weights in the optimizer's files alone.
        sharded = self._stage == 3
        path, state = self._engine.load_checkpoint(
            str(folder),
            tag=_TAG,
            load_module_strict=self._trains_all,
            load_optimizer_states=optimizer or sharded,
            load_module_only=not optimizer and not self._stage,
        )
        if sharded and not optimizer:
            self._optimizer.state.clear()
        if path is None:
            raise IntegrityError(f"there is no DeepSpeed checkpoint in {folder}; remove the folder")
        return dict(state)

    def close(self) -> None:
        """Give the memory back; the engine is of no use afterwards."""
        self._engine.destroy()
        del self._engine
        gc.collect()


@contextmanager
def _whole(tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Give tensors that may be sharded over ranks, all of each."""
    if not hasattr(tensors[0], "ds_id"):
        yield tensors
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(tensors):
        yield [tensor.data for tensor in tensors]


def _check_numbers(name: str, values: torch.Tensor) -> None:
    if not values.is_floating_point():
        return
    lowest, highest = torch.aminmax(values)  # neither is finite where a value is no number
    if not bool(torch.isfinite(lowest) & torch.isfinite(highest)):
        raise IntegrityError(f"the weight {name} holds values that are no numbers; {_FIX}")


def pin_numerics(threads: int) -> None:
    """Fix what the bits depend on, for the calling thread: thread count and deterministic kernels."""
    torch.set_num_threads(threads)
    if torch.cuda.is_available():
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Not "warn only": in that mode attention keeps its backward pass in no fixed order on a GPU, although it
    # has one, and a restarted learner would not come to its own bits again.
    torch.use_deterministic_algorithms(True)
    # Filling every fresh tensor would only hide reads of unset memory, and costs time.
    torch.utils.deterministic.fill_uninitialized_memory = False


def _deepspeed_config(section: LearnerSection, size: int, trained: int) -> dict[str, Any]:
    """Return DeepSpeed's configuration for a model of `size` parameters, some of them trained."""
    tree: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        # An update ends when step() is called, whatever the number of micro-batches.
        "managed_gradient_accumulation": False,
        "gradient_clipping": section.gradient_clip,
        "zero_optimization": {
            "stage": section.stage,
            "overlap_comm": False,
            "stage3_gather_16bit_weights_on_model_save": True,
            "reduce_bucket_size": bucket_parameters(trained),
            "stage3_prefetch_bucket_size": bucket_parameters(size),
            "stage3_param_persistence_threshold": whole_parameters(size),
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
            if not batch.rows:
                return f"{what} of a micro-batch without rows is no number"
            group_id, sample = batch.rows[int(wrong[0])]
            return f"{what} of sample {sample} of group {group_id} is no number"
    return "it overflows"
