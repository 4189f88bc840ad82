"""Checks of what only a GPU can show: numerics, memory and speed of the CUDA paths, each with its figures.

`conformance` runs each in a process of its own. With the sizes of a CPU they show that they run, and nothing
about speed.
"""

import contextlib
import gc
import hashlib
import inspect
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "models" / "chain-sum"
QWEN3_VOCABULARY = 151_936
REPEATS = 5
"""Times that a gradient is computed; one that differs in a run of them is not deterministic."""
PROBE_TOKENS = 64


@dataclass(frozen=True)
class Sizes:
    """How large the checks are."""

    vocabulary: int
    pairs: int
    """Completion tokens of the loss."""
    width: int
    requests: int
    drafts: int
    row: int
    """Tokens of the longest row of attention."""
    rows: int
    copy_mib: int
    merged: int
    """Rows and columns of the matrix that an adapter is merged into."""
    repeats: int
    """Times that something is timed."""


SIZES = {
    "cuda": Sizes(QWEN3_VOCABULARY, 16_384, 1024, 256, 32, 4096, 16, 1024, 4096, 10),
    "cpu": Sizes(2_000, 48, 16, 4, 3, 40, 4, 2, 64, 2),
}


@dataclass
class Found:
    """What a check found."""

    figures: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    """Parts that did not run, and why."""

    def note(self, name: str, value: Any) -> None:
        """Keep a figure and print it."""
        self.figures[name] = value
        print(f"  {name}: {value}", flush=True)

    def expect(self, holds: bool, sentence: str) -> None:
        """Count a failure unless it holds."""
        if not holds:
            self.failures.append(sentence)
            print(f"  FAILED: {sentence}", flush=True)

    def skip(self, sentence: str) -> None:
        """Say what did not run, and why."""
        self.skipped.append(sentence)
        print(f"  skipped: {sentence}", flush=True)


@dataclass(frozen=True)
class Device:
    """Where a check works, and how large it is."""

    kind: str
    sizes: Sizes

    @property
    def torch(self) -> Any:
        """Return torch's device."""
        import torch

        return torch.device(self.kind)

    def wait(self) -> None:
        """Wait until the device has done all its work."""
        if self.kind == "cuda":
            import torch

            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], object]) -> float:
        """Return the median time of `work` after one call that is not counted, seconds."""
        taken = []
        for turn in range(self.sizes.repeats + 1):
            self.wait()
            begun = time.perf_counter()
            work()
            self.wait()
            if turn:
                taken.append(time.perf_counter() - begun)
        return statistics.median(taken)

    @contextlib.contextmanager
    def peak(self, found: Found, name: str) -> Iterator[None]:
        """Note the most memory that the block takes besides what is held before it, GiB."""
        if self.kind == "cpu":
            yield
            return
        import torch

        gc.collect()
        self.wait()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        yield
        self.wait()
        found.note(name, round((torch.cuda.max_memory_allocated() - before) / 2**30, 3))


def made_rows(
    groups: int, size: int, prompt: int, tokens: int, vocabulary: int, seed: int, even: bool = False
) -> list[Any]:
    """Return rows of random tokens, the rows of a group after one prompt.

    They are `tokens` long if `even`, else from a quarter of that to all of it.
    """
    import numpy as np

    from antiphon.core.records import BatchRow, FinishReason, VersionSpan

    rng = np.random.default_rng(seed)
    rows = []
    for place in range(groups * size):
        if place % size == 0:
            question = rng.integers(0, vocabulary, prompt).astype(np.int32)
        length = tokens if even else int(rng.integers(max(1, tokens // 4), tokens + 1))
        rows.append(
            BatchRow(
                rng.integers(0, vocabulary, length).astype(np.int32),
                rng.uniform(-4.5, -3.5, length).astype(np.float32),
                (VersionSpan(0, 0, length),),
                FinishReason.STOP,
                group_id=f"g{place // size}",
                prompt_key="p",
                sample_index=place % size,
                prompt_token_ids=question,
                reward=float(place % 2),
                advantage=1.0 if place % 2 else -1.0,
            )
        )
    return rows


def run_config(dtype: str = "float32", stage: int = 0, model: Path = EXAMPLE, budget: int = 16_384) -> Any:
    """Return the configuration of a run with this learner."""
    from antiphon.core.config import build_config

    learner = {"dtype": dtype, "zero_stage": stage, "learning_rate": 1e-3, "micro_batch_tokens": budget}
    return build_config({"model": {"path": str(model)}, "learner": learner})


def make_model(folder: Path, sizes: Sizes, mixture: bool = False) -> Path:
    """Write a model of the Qwen3 classes with random weights, and return its folder."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": min(sizes.vocabulary, 32_000),
        "hidden_size": sizes.width,
        "intermediate_size": 2 * sizes.width,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    }
    if mixture:
        experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": sizes.width}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **experts))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**shape))
    model.save_pretrained(folder)
    return folder


def check_stages(device: Device, found: Found) -> None:
    """Train through the product's trainer at each stage and precision."""
    from antiphon.core.errors import AntiphonError
    from antiphon.lineage.rollout_table import encode_batch
    from antiphon.services.learner.checkpoints import CheckpointStore
    from antiphon.services.learner.step import Trainer

    tokens = 400 if device.kind == "cuda" else 12
    batches = [encode_batch(made_rows(4, 8, 40, tokens, 60, seed)) for seed in range(2)]
    for dtype in ("float32", "bfloat16"):
        losses: dict[int, float] = {}
        for stage in range(4):
            where = f"stage {stage}, {dtype}"
            with tempfile.TemporaryDirectory() as folder:
                trainer = Trainer(run_config(dtype, stage), CheckpointStore(Path(folder), 2))
                try:
                    begun = time.perf_counter()
                    trainer.start(0)
                    first = trainer.train(0, batches[0])
                    digest = first.weights.digest()
                    losses[stage] = first.metrics["loss"]
                    trainer.save()
                    second = trainer.train(1, batches[1]).weights.digest()
                    found.expect(
                        trainer.start(1).weights.digest() == digest, f"{where}: a checkpoint differs"
                    )
                    resumed = trainer.train(1, batches[1]).weights.digest()
                    found.expect(resumed == second, f"{where}: the step after a checkpoint differs")
                    trainer.start(0)
                    again = trainer.train(0, batches[0]).weights.digest()
                    found.expect(again == digest, f"{where}: the same step twice gives other weights")
                    norm = first.metrics["gradient_norm"]
                    found.note(
                        where,
                        {
                            "loss": losses[stage],
                            "norm": norm,
                            "digest": digest[:12],
                            "seconds": round(time.perf_counter() - begun, 2),
                        },
                    )
                except (AntiphonError, RuntimeError, ValueError, AttributeError, TypeError) as error:
                    found.expect(False, f"{where}: {short(error)}")
                finally:
                    with contextlib.suppress(Exception):
                        trainer.stop()
        if losses:
            apart = max(losses.values()) - min(losses.values())
            found.note(f"loss over stages, {dtype}: largest difference", apart)
            found.expect(apart <= 1e-5, f"{dtype}: the loss differs by {apart:.2g} over the stages")


MODES = {"strict": (True, False), "warn only": (True, True), "free": (False, False)}
"""Arguments of torch.use_deterministic_algorithms."""


def check_determinism(device: Device, found: Found) -> None:
    """Repeat backward passes: of each attention kernel, then of the learner's whole policy."""
    import torch
    from torch.nn import functional
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from antiphon.services.learner.deepspeed_engine import pin_numerics

    pin_numerics(1)
    sizes, attention = device.sizes, cast(Any, functional.scaled_dot_product_attention)
    kernels = {
        "math": SDPBackend.MATH,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "flash": SDPBackend.FLASH_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
    }
    for dtype in (torch.float32, torch.bfloat16):
        for name, backend in kernels.items():
            torch.manual_seed(0)
            shape = (4, 8, sizes.row // 2, 64)
            parts = [torch.randn(shape, device=device.torch, dtype=dtype).requires_grad_() for _ in range(3)]
            above = torch.randn(shape, device=device.torch, dtype=dtype)

            def gradients(parts: Any = parts, above: Any = above, backend: Any = backend) -> list[Any]:
                with sdpa_kernel([backend]):
                    out = attention(*parts, is_causal=True)
                return list(torch.autograd.grad(out, parts, above))

            _repeat(device, found, f"attention {name} {_name(dtype)}", gradients, refusal_is_failure=False)
    for mixture in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            model = make_model(Path(folder), sizes, mixture)
            for dtype in ("float32", "bfloat16"):
                what = f"{'mixture' if mixture else 'dense'} policy {dtype}"
                try:
                    of_policy = _policy_gradients(device, model, dtype)
                except (RuntimeError, ValueError, TypeError) as error:
                    found.expect(False, f"{what}: {short(error)}")
                    continue
                _repeat(device, found, what, of_policy, refusal_is_failure=True)


def _policy_gradients(device: Device, model: Path, dtype: str) -> Callable[[], list[Any]]:
    import torch

    from antiphon.services.learner.objective import Objective, UpdateTotals
    from antiphon.services.learner.packing import make_micro_batches
    from antiphon.services.learner.policy import Policy, load_causal_model

    config = run_config(dtype, model=model)
    objective = Objective(config.algorithm, config.sampling.max_tokens, config.sampling.temperature)
    policy = Policy(load_causal_model(str(model), getattr(torch, dtype), False), objective).to(device.torch)
    row = device.sizes.row // 4
    rows = made_rows(4, 8, row // 2, row, policy.causal_model.config.vocab_size, 3)
    batches = make_micro_batches(rows, 0, 8 * row)
    totals = UpdateTotals(len(rows), sum(batch.completion_tokens for batch in batches))
    parameters = [one for one in policy.parameters() if one.requires_grad]

    def gradients() -> list[Any]:
        loss, _ = policy(batches[0].to(device.torch), totals)
        return list(torch.autograd.grad(loss, parameters, allow_unused=True))

    return gradients


def _repeat(
    device: Device, found: Found, what: str, gradients: Callable[[], list[Any]], refusal_is_failure: bool
) -> None:
    """Note how many of the gradients differ from the first, and the time of one, in each mode."""
    import torch

    noted: dict[str, Any] = {}
    for mode, (on, warn) in MODES.items():
        torch.use_deterministic_algorithms(on, warn_only=warn)
        try:
            first = gradients()
            begun = time.perf_counter()
            others = [gradients() for _ in range(REPEATS - 1)]
            device.wait()
            ms = 1000 * (time.perf_counter() - begun) / (REPEATS - 1)
            differ = sum(not all(map(_same, first, other)) for other in others)
            noted[mode] = {"differ": differ, "of": REPEATS - 1, "ms": round(ms, 2)}
        except RuntimeError as error:
            noted[mode] = short(error)
    torch.use_deterministic_algorithms(True)
    found.note(what, noted)
    strict = noted["strict"]
    if isinstance(strict, str):
        found.expect(not refusal_is_failure, f"{what}: {strict}")
    else:
        found.expect(strict["differ"] == 0, f"{what}: {strict['differ']} gradients differ in strict mode")


def _same(one: Any, other: Any) -> bool:
    import torch

    return (one is None and other is None) or bool(torch.equal(one, other))


def check_loss(device: Device, found: Found) -> None:
    """Compare the objective's gradient with that of plain float32 logits, chunk by chunk."""
    import torch
    from torch.nn.functional import cross_entropy
    from torch.utils.checkpoint import checkpoint

    from antiphon.services.learner.deepspeed_engine import pin_numerics
    from antiphon.services.learner.objective import Objective, UpdateTotals
    from antiphon.services.learner.packing import make_micro_batches

    class Plain(Objective):
        def logprobs(self, hidden: Any, head: Any, batch: Any, temperature: float | None = None) -> Any:
            def part(states: Any, ids: Any) -> Any:
                return -cross_entropy(states @ head.T, ids, reduction="none")

            pieces = zip(hidden.split(1024), batch.pair_ids.split(1024), strict=True)
            logs = torch.cat([checkpoint(part, *piece, use_reentrant=False) for piece in pieces])
            return logs.index_select(0, batch.token_index.flatten()).view_as(batch.mask)

    pin_numerics(1)
    sizes, config = device.sizes, run_config()
    rows = made_rows(sizes.rows, 1, 8, sizes.pairs // sizes.rows, sizes.vocabulary, 5, even=True)
    (batch,) = make_micro_batches(rows, 0, 4 * sizes.pairs)
    totals = UpdateTotals(len(rows), batch.completion_tokens)
    found.note("vocabulary, pairs", [sizes.vocabulary, len(batch.pair_ids)])
    torch.manual_seed(0)
    hidden = torch.randn(len(batch.pair_ids), sizes.width, device=device.torch)
    head = torch.randn(sizes.vocabulary, sizes.width, device=device.torch) * sizes.width**-0.5
    batch = batch.to(device.torch)

    def gradients(kind: type[Objective], dtype: Any) -> list[Any]:
        states, weights = (part.to(torch.bfloat16).to(dtype).requires_grad_() for part in (hidden, head))
        objective = kind(config.algorithm, config.sampling.max_tokens, 1.0)
        loss, _ = objective.loss(states, weights, batch, totals, None)
        return list(torch.autograd.grad(loss, (states, weights)))

    with device.peak(found, "plain float32 peak, GiB"):
        wanted = gradients(Plain, torch.float32)
    taken = device.seconds(partial(gradients, Plain, torch.float32))
    found.note("plain float32 in chunks, s", round(taken, 4))
    for dtype, most in ((torch.float32, 1e-4), (torch.bfloat16, 3e-2)):
        with device.peak(found, f"objective {_name(dtype)} peak, GiB"):
            made = gradients(Objective, dtype)
        taken = device.seconds(partial(gradients, Objective, dtype))
        found.note(f"objective {_name(dtype)}, s", round(taken, 4))
        for name, one, other in zip(("states", "head"), made, wanted, strict=True):
            apart = float((one.float() - other).norm() / other.norm())
            found.note(f"gradient of the {name}, {_name(dtype)}: relative error", apart)
            found.expect(apart <= most, f"{_name(dtype)}: gradient of the {name} is {apart:.2g} off")


def check_samplers(device: Device, found: Found) -> None:
    """Draw plain and drafted rows by both rules; compare with the CPU and with rows drawn alone."""
    import numpy as np
    import torch

    from antiphon.sampling.keyed_sampler import CHUNK_GPU, PLAIN, RowSampling, request_key
    from antiphon.sampling.rules import RULES

    sizes = device.sizes
    rng = np.random.default_rng(0)
    keys = np.array([request_key(seed) for seed in range(sizes.requests)], np.uint64)
    lengths = rng.integers(10, 4000, sizes.requests)
    torch.manual_seed(0)
    logits = 3.0 * torch.randn(sizes.requests, sizes.vocabulary, device=device.torch)
    cut = RowSampling(top_p=torch.full((sizes.requests,), 0.95, dtype=torch.float64, device=device.torch))
    times = sizes.drafts + 1
    wide_keys, wide_lengths = keys.repeat(times), (lengths[:, None] + np.arange(times)).reshape(-1)
    for name, rule in RULES.items():
        with device.peak(found, f"{name} plain peak, GiB"):
            tokens, logprobs = rule.draw(logits, keys, lengths, PLAIN)
        plain = device.seconds(partial(rule.draw, logits, keys, lengths, PLAIN))
        found.note(f"{name} plain, {sizes.requests} rows, ms", round(1000 * plain, 3))
        top = device.seconds(partial(rule.draw, logits, keys, lengths, cut))
        found.note(f"{name} top-p, {sizes.requests} rows, ms", round(1000 * top, 3))
        drafted = logits.repeat_interleave(times, 0)
        peak = f"{name} drafted peak, GiB"
        with device.peak(found, peak):
            wide, wide_logprobs = rule.draw(drafted, wide_keys, wide_lengths, PLAIN)
        most = 32 * CHUNK_GPU / 2**30 + 0.5
        found.expect(found.figures.get(peak, 0.0) <= most, f"{name}: drafted rows take more than {most} GiB")
        step = device.seconds(partial(rule.draw, drafted, wide_keys, wide_lengths, PLAIN))
        found.note(f"{name} drafted, {len(drafted)} rows, ms", round(1000 * step, 3))
        first = slice(None, None, times)
        alike = torch.equal(wide[first], tokens) and torch.equal(wide_logprobs[first], logprobs)
        found.note(f"{name}: drafted rows have the bits of plain ones", alike)
        found.expect(alike, f"{name}: tokens or log-probabilities depend on how many rows are drawn at once")
        some = [0, sizes.requests // 2]
        alone = [
            rule.draw(logits[one : one + 1], keys[one : one + 1], lengths[one : one + 1], PLAIN)
            for one in some
        ]
        same = all(
            torch.equal(drawn[0], tokens[one]) and torch.equal(log[0], logprobs[one])
            for one, (drawn, log) in zip(some, alone, strict=True)
        )
        found.expect(same, f"{name}: a row drawn alone differs from the same row in a batch")
        heats = torch.linspace(0.5, 1.5, sizes.requests, dtype=torch.float64)
        few = min(64, sizes.requests)
        heat, on_device = RowSampling(temperature=heats), RowSampling(temperature=heats.to(device.torch))
        for how, here, there in (("temperature 1", PLAIN, PLAIN), ("mixed temperatures", on_device, heat)):
            drawn = [part[:few].cpu() for part in rule.draw(logits, keys, lengths, here)]
            wanted = rule.draw(logits[:few].cpu(), keys[:few], lengths[:few], there.part(0, few))
            other = int((drawn[0] != wanted[0]).sum())
            found.note(f"{name}, {how}: tokens that differ from the CPU's, of {few}", other)
            apart = float((drawn[1] - wanted[1])[drawn[0] == wanted[0]].abs().max())
            found.note(f"{name}, {how}: log-probabilities against the CPU's, nats", apart)
            good = other <= 1 and apart <= 1e-5
            found.expect(good, f"{name}, {how}: {other} tokens or {apart:.2g} nats off the CPU's")


def check_attention(device: Device, found: Found) -> None:
    """Compare one call over packed rows with calls over padded ones, and float32 with and without groups."""
    import torch
    from torch.nn import functional

    from antiphon.services.learner.deepspeed_engine import pin_numerics

    pin_numerics(1)
    sizes, attention = device.sizes, cast(Any, functional.scaled_dot_product_attention)
    torch.manual_seed(0)
    lengths = [max(1, sizes.row * (place + 1) // sizes.rows) for place in range(sizes.rows)]
    shape = (1, 16, sizes.row, 64)
    keys = (1, 4, sizes.row, 64)
    for grouped in (True, False):
        parts = [
            torch.randn(shape if not place or not grouped else keys, device=device.torch)
            for place in range(3)
        ]
        parts = [part.requires_grad_() for part in parts]

        def one_row(parts: Any = parts, grouped: bool = grouped) -> None:
            out = attention(*parts, is_causal=True, enable_gqa=grouped)
            torch.autograd.grad(out.sum(), parts)

        name = f"float32, one row of {sizes.row}, {'4 key heads' if grouped else '16 key heads'}"
        try:
            with device.peak(found, f"{name}: peak, GiB"):
                one_row()
            found.note(f"{name}: forward and backward, ms", round(1000 * device.seconds(one_row), 3))
        except RuntimeError as error:
            found.expect(False, f"{name}: {short(error)}")
    _check_shared_rows(device, found)
    if device.kind == "cpu":
        found.skip("packed rows: torch.nn.attention.varlen has no kernel for CPUs")
        return
    from torch.nn.attention.varlen import varlen_attn

    heads, width, total = 16, 64, sum(lengths)
    packed = [
        torch.randn(total, heads, width, device=device.torch, dtype=torch.bfloat16).requires_grad_()
        for _ in range(3)
    ]
    above = torch.randn(total, heads, width, device=device.torch, dtype=torch.bfloat16)
    ends = torch.tensor([0, *lengths], device=device.torch).cumsum(0).to(torch.int32)
    options: dict[str, Any] = {}
    known = inspect.signature(varlen_attn).parameters
    found.note("varlen_attn takes", list(known))
    options |= {"is_causal": True} if "is_causal" in known else {"window_size": (-1, 0)}

    def varlen() -> list[Any]:
        out = varlen_attn(*packed, ends, ends, max(lengths), max(lengths), **options)
        return [out, *torch.autograd.grad(out, packed, above)]

    def padded() -> list[Any]:
        rows = [torch.nn.utils.rnn.pad_sequence(part.split(lengths), True).transpose(1, 2) for part in packed]
        out = attention(*rows, is_causal=True).transpose(1, 2)
        out = torch.cat([row[:length] for row, length in zip(out, lengths, strict=True)])
        return [out, *torch.autograd.grad(out, packed, above)]

    def by_row() -> list[Any]:
        rows = zip(*(part.split(lengths) for part in packed), strict=True)
        outs = [attention(*(part[None].transpose(1, 2) for part in row), is_causal=True) for row in rows]
        out = torch.cat([one.transpose(1, 2)[0] for one in outs])
        return [out, *torch.autograd.grad(out, packed, above)]

    exact = [part.detach().float().requires_grad_() for part in packed]
    outs = [
        attention(*(part[None].transpose(1, 2) for part in row), is_causal=True)
        for row in zip(*(part.split(lengths) for part in exact), strict=True)
    ]
    out = torch.cat([one.transpose(1, 2)[0] for one in outs])
    wanted = [out.detach(), *torch.autograd.grad(out, exact, above.float())]
    for name, work in (("varlen", varlen), ("padded", padded), ("a call for each row", by_row)):
        try:
            with device.peak(found, f"{name}: peak, GiB"):
                made = work()
        except RuntimeError as error:
            found.expect(False, f"{name}: {short(error)}")
            continue
        apart = max(
            float(((one.float() - other).norm() / other.norm()).detach())
            for one, other in zip(made, wanted, strict=True)
        )
        found.note(f"{name}: relative error to float32", apart)
        found.expect(apart <= 1e-2, f"{name} is {apart:.2g} off")
        found.note(f"{name}: forward and backward, ms", round(1000 * device.seconds(work), 3))
        again = sum(not all(map(_same, made, work())) for _ in range(REPEATS - 1))
        found.note(f"{name}: gradients that differ in strict mode, of {REPEATS - 1}", again)
        found.expect(not again, f"{name}: {again} of {REPEATS - 1} gradients differ in strict mode")


def _check_shared_rows(device: Device, found: Found) -> None:
    """Compare the two ways in which the learner's attention works off a CPU, on many short rows."""
    import numpy as np
    import torch

    from antiphon.cpu import shared_rows as rows

    lengths = (
        np.random.default_rng(1).integers(2, max(3, device.sizes.row // 8), 4 * device.sizes.rows).tolist()
    )
    shared, _ = rows.share_rows(lengths, [0] * len(lengths))
    shared = shared.to(device.torch)
    count = sum(lengths) + shared.padding
    attend = cast(Any, rows.attend)
    leaves = [torch.randn(1, heads, count, 64, device=device.torch) for heads in (16, 4, 4)]
    above = torch.randn(1, count, 16, 64, device=device.torch)
    above[:, sum(lengths) :] = 0.0  # of padding

    def work(dtype: Any, packs: bool) -> list[Any]:
        parts = [part.to(dtype).requires_grad_() for part in leaves]
        with patch.object(rows, "_packs", rows._packs if packs else lambda query: False):
            out, _ = attend(torch.nn.Identity(), *parts, None, shared_rows=shared)
        gradients = torch.autograd.grad(out, parts, above.to(dtype))
        return [out.detach()[:, : sum(lengths)], *gradients]

    wanted = work(torch.float32, False)
    row, _ = rows.share_rows([device.sizes.row], [0])
    row = row.to(device.torch)
    long = [
        torch.randn(1, heads, device.sizes.row + row.padding, 64, device=device.torch) for heads in (16, 4, 4)
    ]
    long = [part.requires_grad_() for part in long]
    peak = f"float32, one row of {device.sizes.row}, 4 key heads, through the learner's attention: peak, GiB"
    with device.peak(found, peak):
        out, _ = attend(torch.nn.Identity(), *long, None, shared_rows=row)
        torch.autograd.grad(out.sum(), long)
    found.expect(
        found.figures.get(peak, 0.0) <= 1.0, "the learner's attention holds the scores of a long row"
    )
    del out, long
    for packs in (False, True):
        name = f"{len(lengths)} short rows, {'packed' if packs else 'in blocks'}"
        made = work(torch.bfloat16, packs)
        apart = [
            float((one.float() - other).norm() / other.norm())
            for one, other in zip(made, wanted, strict=True)
        ]
        found.note(f"{name}: relative error to float32", max(apart))
        found.expect(max(apart) <= 1e-2, f"{name} is {max(apart):.2g} off")
        again = sum(not all(map(_same, made, work(torch.bfloat16, packs))) for _ in range(REPEATS - 1))
        found.expect(not again, f"{name}: {again} of {REPEATS - 1} gradients differ in strict mode")
        found.note(
            f"{name}: forward and backward, ms",
            round(1000 * device.seconds(partial(work, torch.bfloat16, packs)), 3),
        )


def check_copies(device: Device, found: Found) -> None:
    """Time copies of both kinds of host memory, and the reading of weights to publish."""
    if device.kind == "cpu":
        found.skip("there is no device to copy to")
        return
    import torch

    from antiphon.services.learner.deepspeed_engine import _check_numbers
    from antiphon.weights.snapshot import Weights, published_entries, weights_digest

    count = device.sizes.copy_mib << 20
    held = torch.empty(count, dtype=torch.uint8, device=device.torch)
    for kind in ("pageable", "pinned"):
        host = torch.ones(count, dtype=torch.uint8, pin_memory=kind == "pinned")
        to = device.seconds(partial(held.copy_, host, non_blocking=True))
        back = device.seconds(partial(host.copy_, held, non_blocking=True))
        found.note(f"{kind}: host to device, GB/s", round(count / to / 1e9, 2))
        found.note(f"{kind}: device to host, GB/s", round(count / back / 1e9, 2))
    tensor = torch.randn(count // 4, device=device.torch)
    for dtype in (torch.float32, torch.bfloat16):
        entries = published_entries({"weight": (dtype, (count // 4,))})
        weights = Weights(entries, lambda name: contextlib.nullcontext(tensor), _check_numbers)
        read = device.seconds(partial(weights.read, lambda length: None))
        found.note(
            f"weights read to publish as {_name(dtype)}, GB/s", round(entries[0].length / read / 1e9, 2)
        )
        whole = device.seconds(weights.digest)
        found.note(
            f"weights read and digested as {_name(dtype)}, GB/s", round(entries[0].length / whole / 1e9, 2)
        )
        there = weights_digest({"weight": tensor.to("cpu", dtype)})
        found.expect(weights.digest() == there, f"{_name(dtype)}: weights on the device have another digest")


def check_probe(device: Device, found: Found) -> None:
    """Compare the learner's log-probabilities of 64 fixed tokens with a plain forward pass."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    from antiphon.core.records import BatchRow, FinishReason, VersionSpan
    from antiphon.services.learner.deepspeed_engine import DeepSpeedEngine
    from antiphon.services.learner.packing import make_micro_batches

    with tempfile.TemporaryDirectory() as folder:
        models = {"chain-sum": EXAMPLE, "Qwen3 made here": make_model(Path(folder), device.sizes)}
        for title, path in models.items():
            seen = {}
            for dtype, most in (("float32", 1e-4), ("bfloat16", 0.15)):
                plain = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).to(
                    device.torch
                )
                ids = np.random.default_rng(9).integers(0, plain.config.vocab_size, PROBE_TOKENS + 1)
                with torch.no_grad():
                    given = torch.from_numpy(ids).to(device.torch)
                    logits = plain.eval()(input_ids=given[None, :-1]).logits[0].float()
                    wanted = logits.log_softmax(-1).gather(-1, given[1:, None])[:, 0].cpu()
                del plain
                row = BatchRow(
                    ids[1:].astype(np.int32),
                    np.zeros(PROBE_TOKENS, np.float32),
                    (VersionSpan(0, 0, PROBE_TOKENS),),
                    FinishReason.STOP,
                    group_id="g",
                    prompt_key="p",
                    sample_index=0,
                    prompt_token_ids=ids[:1].astype(np.int32),
                    reward=0.0,
                    advantage=0.0,
                )
                engine = DeepSpeedEngine(run_config(dtype, model=path))
                made = engine.logprobs(make_micro_batches([row], 0, 4096)[0])[0]
                engine.close()
                seen[dtype] = made
                apart = float((made - wanted).abs().max())
                found.note(f"{title}, {dtype}: greatest difference, nats", apart)
                found.expect(apart <= most, f"{title}, {dtype}: {apart:.2g} nats off a plain forward pass")
            between = float((seen["float32"] - seen["bfloat16"]).abs().max())
            found.note(f"{title}: bfloat16 against float32, nats", between)


def check_merge(device: Device, found: Found) -> None:
    """Merge an adapter by rank-one updates, product and sum apart, here and on the CPU."""
    import torch

    size, rank = device.sizes.merged, 16
    torch.manual_seed(0)
    base = torch.randn(size, size // 2)
    down, up = torch.randn(rank, size // 2), torch.randn(size, rank)

    def merged(where: Any) -> Any:
        weight, below, above = (part.to(where, copy=True) for part in (base, down, up))
        for column, row in zip(above.T, below, strict=True):
            weight.add_(torch.mul(column[:, None], row[None]))
        return weight

    here, there = merged(device.torch).cpu(), merged("cpu")
    digests = [hashlib.sha256(one.numpy()).hexdigest()[:16] for one in (here, there)]
    found.note("digests, device and CPU", digests)
    found.expect(
        digests[0] == digests[1], f"{int((here != there).sum())} merged weights differ from the CPU's"
    )
    found.note(
        f"{size} x {size // 2}, rank {rank}, ms",
        round(1000 * device.seconds(lambda: merged(device.torch)), 2),
    )
    product = (base.to(device.torch) + up.to(device.torch) @ down.to(device.torch)).cpu()
    found.note("weights that one matrix product changes besides", int((product != there).sum()))


def check_memory(device: Device, found: Found) -> None:
    """Compare the most memory that a step takes with what `antiphon plan --memory` says of it."""
    from antiphon.core.ranks.memory import plan_memory
    from antiphon.lineage.rollout_table import encode_batch
    from antiphon.models.directory import known_tensors
    from antiphon.services.learner.checkpoints import CheckpointStore
    from antiphon.services.learner.step import Trainer

    if device.kind == "cuda":
        import torch

        found.note("free and all, GiB", [round(size / 2**30, 2) for size in torch.cuda.mem_get_info()])
    else:
        found.skip("what a step takes: torch counts the memory of a GPU alone")
    budget = max(64, device.sizes.pairs)
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder, "model"), device.sizes)
        tensors, shape = known_tensors(str(model), model)
        batch = encode_batch(made_rows(4, 8, 4, budget // 16, 60, 7, even=True))
        for number, (dtype, stage) in enumerate((("bfloat16", 0), ("bfloat16", 2), ("float32", 0))):
            config, where = run_config(dtype, stage, model, budget), f"stage {stage}, {dtype}"
            uses = plan_memory(config, tensors, shape).rank
            planned = sum(size for use, size in uses.items() if use != "process") / 2**30
            found.note(f"{where}: planned, GiB", round(planned, 3))
            trainer = Trainer(config, CheckpointStore(Path(folder, str(number)), 2))
            try:
                with device.peak(found, f"{where}: peak, GiB"):
                    trainer.start(0)
                    trainer.train(0, batch)
            finally:
                trainer.stop()
            peak = found.figures.get(f"{where}: peak, GiB", 0.0)
            found.expect(
                peak <= 1.1 * planned, f"{where}: {peak} GiB are more than the planned {planned:.3f}"
            )


def check_pairs(device: Device, found: Found) -> None:
    """Sum the numbers of each pair of GPUs, and of all: NCCL, or gloo between two processes of a CPU."""
    import torch
    from torch.multiprocessing.spawn import spawn

    count = torch.cuda.device_count() if device.kind == "cuda" else 2
    if count < 2:
        found.skip("NCCL between GPUs: there is one")
        return
    with tempfile.TemporaryDirectory() as folder:
        spawn(_sum_over_ranks, (count, device, folder), nprocs=count)
        for file in sorted(Path(folder).glob("*.json")):
            told = json.loads(file.read_text())
            found.note(f"{file.stem}: sum of {device.sizes.copy_mib} MiB, GB/s", told["rate"])
            found.expect(told["right"], f"{file.stem}: the sum is wrong")


def _sum_over_ranks(rank: int, count: int, device: Device, folder: str) -> None:
    import torch
    from torch import distributed

    if device.kind == "cuda":
        torch.cuda.set_device(rank)
    backend, limit = "nccl" if device.kind == "cuda" else "gloo", timedelta(seconds=60)
    meeting = f"file://{folder}/meeting"
    distributed.init_process_group(backend, meeting, limit, count, rank)
    numbers = torch.full((device.sizes.copy_mib << 18,), float(rank + 1), device=device.torch)
    for ranks in sorted({*combinations(range(count), 2), tuple(range(count))}):
        group = distributed.new_group(ranks)
        if rank in ranks:
            own = numbers.clone()
            distributed.all_reduce(own, group=group)
            right = bool((own == sum(ranks) + len(ranks)).all())
            seconds = device.seconds(partial(distributed.all_reduce, own.zero_(), group=group))
            sent = 2 * (len(ranks) - 1) / len(ranks) * numbers.nbytes  # by each in a ring
            name = "all" if len(ranks) > 2 else " and ".join(map(str, ranks))
            if rank == ranks[0] or not right:
                told = {"rate": round(sent / seconds / 1e9, 3), "right": right}
                Path(folder, f"{name}.json").write_text(json.dumps(told))
    distributed.destroy_process_group()


@dataclass(frozen=True)
class Check:
    """One entry of the list."""

    shows: str
    work: Callable[[Device, Found], None] | None
    """None where it is for an engine on a GPU, which nothing here starts."""
    needs: tuple[str, ...] = ()
    """Modules besides torch."""
    limit_s: float = 180.0


_LEARNER = ("liger_kernel", "transformers")
_TRAINER = ("deepspeed", *_LEARNER, "cryptography")
CHECKS: dict[str, Check] = {
    "copies": Check("pinned and pageable copies, and weights read to publish", check_copies, _LEARNER),
    "merge": Check("an adapter merged into its base has the CPU's bits", check_merge),
    "samplers": Check(
        "both keyed samplers at 152k tokens, plain and drafted: time, memory, the CPU's tokens",
        check_samplers,
    ),
    "stages": Check(
        "a step at ZeRO stages 0 to 3: alike, the same bits again and from a checkpoint",
        check_stages,
        _TRAINER,
    ),
    "determinism": Check(
        "the same gradient twice, of each attention kernel and of models, in torch's strict mode and others",
        check_determinism,
        _LEARNER,
    ),
    "loss": Check(
        "the loss at 152k tokens x 16k positions: memory, time, error of its gradient", check_loss, _LEARNER
    ),
    "attention": Check(
        "rows of mixed length packed without padding, against padded ones", check_attention, _LEARNER
    ),
    "probe": Check(
        "log-probabilities of 64 tokens, learner against a plain forward pass", check_probe, _TRAINER[:-1]
    ),
    "memory": Check("the most that a step holds, against `antiphon plan --memory`", check_memory, _TRAINER),
    "pairs": Check("NCCL between each two GPUs, and between all", check_pairs),
    "version": Check("log-probabilities of a version in vLLM's engine, against the learner's", None),
    "graphs": Check("the same tokens from vLLM with CUDA graphs and without", None),
    "swap": Check("seconds to swap the weights of a version into vLLM", None),
}
"""By name, in the order in which they run."""


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def short(error: BaseException) -> str:
    """Return what an error says, in a line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
