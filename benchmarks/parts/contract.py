"""Contract: what each ability that an engine declares promises, as checks that any engine can be put to.

A check gets a `Subject`, an idle engine and the versions that it can be given, and returns why the promise
does not hold, or "". What sampled log-probabilities and spans should be comes from transformers, which has no
part in the engine. A check may leave requests behind: `examine` aborts them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from antiphon.api.engine import Engine, EngineOutput, EngineRequest
from antiphon.core.broadcast.probe import probe_tokens
from antiphon.core.errors import AntiphonError, IntegrityError
from antiphon.core.records import FinishReason, PastCompletion, Probe, PromptHistory, SamplingParameters
from antiphon.core.seeds import derive_seed, generator
from antiphon.core.spans import check_cover
from antiphon.models.codec import TextCodec
from antiphon.services.rollout.selfcheck.distribution_check import processed
from antiphon.weights.snapshot import VerifiedWeights, verify

LOUDNESS = (0.4, 0.3, 0.5)
"""By which the last norm is multiplied in each version: flat enough that completions are long, and far enough
apart that log-probabilities say which version gave them."""
NOISE = 0.1
"""Relative, of each weight."""
MOST_NATS = 1e-3
"""Largest difference of a log-probability in float32, from another library's."""
REQUESTS, PROMPT, TOKENS = 12, 8, 64
MOST_STEPS = 20_000
GREEDY = SamplingParameters(0.0, max_tokens=TOKENS)
SAMPLINGS = (SamplingParameters(max_tokens=TOKENS), SamplingParameters(0.7, 16, 0.95, TOKENS))


@dataclass(frozen=True, slots=True)
class Version:
    """One version of the weights, for the engine and for the reference."""

    weights: VerifiedWeights
    model: Any
    """As transformers holds it, on the CPU in float32."""


@dataclass(frozen=True, slots=True)
class Subject:
    """An engine and what it can be given."""

    engine: Engine
    folder: Path
    """Of the model."""
    versions: tuple[Version, ...]

    def load(self, version: int) -> None:
        """Load a version; those beyond the last begin again with the weights of the first."""
        weights = self.versions[version % len(self.versions)].weights
        self.engine.load_weights(version, weights, weights.digest)

    def next_version(self) -> int:
        """Load the version after the one that is held, and return its number."""
        version = 0 if self.engine.version is None else self.engine.version + 1
        self.load(version)
        return version

    def run(self, requests: Sequence[EngineRequest]) -> list[EngineOutput]:
        """Sample to the end, and return outputs in the order of the requests."""
        self.engine.add(requests)
        return self.finish(requests, {})

    def finish(
        self, requests: Sequence[EngineRequest], outputs: dict[str, EngineOutput]
    ) -> list[EngineOutput]:
        """Sample what is in flight to its end."""
        for _ in range(MOST_STEPS):
            outputs |= {one.request_id: one for one in self.engine.step()}
            if all(one.request_id in outputs for one in requests):
                return [outputs[one.request_id] for one in requests]
        missing = [one.request_id for one in requests if one.request_id not in outputs]
        raise RuntimeError(f"{missing} did not end within {MOST_STEPS} steps")

    def started(
        self, requests: Sequence[EngineRequest], tokens: int = 3
    ) -> tuple[dict[str, EngineOutput], dict[str, np.ndarray]]:
        """Begin requests; return what finished before all had so many tokens, and what the others have."""
        self.engine.add(requests)
        outputs: dict[str, EngineOutput] = {}
        for _ in range(MOST_STEPS):
            outputs |= {one.request_id: one for one in self.engine.step()}
            known = {one.request_id: 0 for one in requests if one.request_id not in outputs}
            found = {one.request_id: one.token_ids for one in self.engine.progress(known)}
            if all(len(found.get(name, ())) >= tokens for name in known):
                return outputs, found
        raise RuntimeError(f"nothing but {found} came within {MOST_STEPS} steps")

    @torch.no_grad()
    def scores(self, request: EngineRequest, tokens: np.ndarray, version: int) -> np.ndarray:
        """Return the reference's log-probabilities [T] of a completion's tokens, as they are drawn."""
        model = self.versions[version % len(self.versions)].model
        prompt = [*request.prompt_token_ids, *request.prefix_token_ids]
        logits = model(torch.tensor([[*prompt, *tokens.tolist()]])).logits[0, len(prompt) - 1 : -1]
        rows = torch.log_softmax(logits.double(), -1).numpy()
        with np.errstate(divide="ignore"):
            return np.array(
                [
                    np.log(processed(row, request.sampling)[token])
                    for row, token in zip(rows, tokens, strict=True)
                ]
            )


Check = Callable[[Subject], str]


def requests_of(name: str, sampling: SamplingParameters = SAMPLINGS[0]) -> list[EngineRequest]:
    """Return requests whose prompts and seeds follow from their number alone."""
    drawn = generator("contract-prompts", 0).integers(3, 64, size=(REQUESTS, PROMPT))
    return [
        EngineRequest(f"{name}-{i}", tuple(row.tolist()), derive_seed("contract", i), sampling)
        for i, row in enumerate(drawn)
    ]


def keeps_versions(subject: Subject) -> str:
    """It names the version it serves, and refuses weights that are not what was announced."""
    engine, version = subject.engine, subject.next_version()
    digest = subject.versions[version % len(subject.versions)].weights.digest
    if (engine.version, engine.weights_digest) != (version, digest):
        return f"it serves {engine.version} with {engine.weights_digest} after a load of {version}"
    other = subject.versions[(version + 1) % len(subject.versions)].weights
    try:
        engine.load_weights(version + 1, other, "0" * 64)
    except IntegrityError:
        return "" if engine.version == version else "weights that it refused took the place of others"
    return "it took weights of another digest than was announced"


def keeps_requests(subject: Subject) -> str:
    """It finishes what it was given once, within its limits, and forgets what is aborted."""
    subject.next_version()
    requests = requests_of("kept")
    subject.engine.add(requests)
    subject.engine.abort([requests[0].request_id, "unknown"])
    if subject.engine.unfinished != len(requests) - 1:
        return f"{subject.engine.unfinished} are in flight after one of {len(requests)} was aborted"
    outputs = subject.finish(requests[1:], {})
    if subject.engine.unfinished:
        return "it holds requests that it has finished"
    if any(not 0 < len(one.token_ids) <= TOKENS for one in outputs):
        return "a completion is empty or too long"
    cut = [one for one in outputs if one.finish_reason is FinishReason.LENGTH]
    return "one that was cut off is shorter" if any(len(one.token_ids) != TOKENS for one in cut) else ""


def keeps_ids(subject: Subject) -> str:
    """Tokens come back as they went in: a greedy completion goes on from its own half as it did."""
    subject.next_version()
    greedy = requests_of("greedy", GREEDY)
    whole = subject.run(greedy)
    halves = [one.token_ids[: len(one.token_ids) // 2] for one in whole]
    begun = [
        replace(one, request_id=f"{one.request_id}+", prefix_token_ids=tuple(half.tolist()))
        for one, half in zip(greedy, halves, strict=True)
    ]
    for one, half, rest in zip(whole, halves, subject.run(begun), strict=True):
        if np.concatenate([half, rest.token_ids]).tolist() != one.token_ids.tolist():
            return f"{one.request_id} went on from its own tokens to others"
    return ""


def gives_logprobs(subject: Subject) -> str:
    """Log-probabilities are those of the distribution that was drawn from."""
    version = subject.next_version()
    for sampling in SAMPLINGS:
        requests = requests_of("scored", sampling)
        for request, output in zip(requests, subject.run(requests), strict=True):
            apart = np.abs(subject.scores(request, output.token_ids, version) - output.logprobs).max()
            if not apart <= MOST_NATS:
                return f"{request.request_id} is {apart:.2g} nats off at temperature {sampling.temperature}"
    return ""


def repeats_seeds(subject: Subject) -> str:
    """The same seed gives the same tokens alone and among others; another seed gives others."""
    subject.next_version()
    requests = requests_of("seeded")
    crowd = subject.run(requests)
    alone = [subject.run([one])[0] for one in requests[:4]]
    for one, other in zip(crowd, alone, strict=False):
        if one.token_ids.tolist() != other.token_ids.tolist():
            return f"{one.request_id} had other tokens alone than among {len(requests)}"
    # Wholly others: vLLM's own sampler sees 32 bits of a seed on a CPU.
    others = subject.run([replace(one, seed=derive_seed("other", one.seed)) for one in requests])
    same = all(
        one.token_ids.tolist() == other.token_ids.tolist() for one, other in zip(crowd, others, strict=True)
    )
    return "seeds change nothing" if same else ""


def draws_by_keys(subject: Subject) -> str:
    """A completion that goes on from its half ends as it did: each token depends on seed and place alone."""
    subject.next_version()
    requests = requests_of("keyed")
    whole = subject.run(requests)
    halves = [one.token_ids[: len(one.token_ids) // 2] for one in whole]
    begun = [
        replace(one, request_id=f"{one.request_id}+", prefix_token_ids=tuple(half.tolist()))
        for one, half in zip(requests, halves, strict=True)
    ]
    for one, half, rest in zip(whole, halves, subject.run(begun), strict=True):
        if np.concatenate([half, rest.token_ids]).tolist() != one.token_ids.tolist():
            return f"{one.request_id} ended otherwise when it went on from its half"
    return ""


def swapped(
    subject: Subject, name: str
) -> tuple[list[EngineRequest], dict[str, np.ndarray], int, list[EngineOutput]]:
    """Swap under requests; return them, what those in flight had then, the new version and the outputs."""
    subject.next_version()
    requests = requests_of(name)
    outputs, before = subject.started(requests)
    version = subject.next_version()
    return requests, before, version, subject.finish(requests, outputs)


def names_spans(subject: Subject) -> str:
    """Spans cover each completion, and each token has the log-probability of the version they name."""
    requests, _, version, outputs = swapped(subject, "spanned")
    for request, output in zip(requests, outputs, strict=True):
        try:
            check_cover(
                output.spans, 0, len(output.token_ids), request.request_id, range(version - 1, version + 1)
            )
        except AntiphonError as error:
            return str(error)
        for span in output.spans:
            scores = subject.scores(request, output.token_ids, span.version)[span.start : span.stop]
            apart = np.abs(scores - output.logprobs[span.start : span.stop]).max()
            if subject.engine.abilities.logprobs and not apart <= MOST_NATS:
                return f"{request.request_id}: {span} is {apart:.2g} nats off its version's"
    both = [one for one in outputs if {span.version for span in one.spans} == {version - 1, version}]
    return "" if both else "no completion says that two versions sampled it"


def swaps_in_flight(subject: Subject) -> str:
    """Requests in flight go on from their tokens, and later ones are the new weights' alone."""
    requests, before, version, outputs = swapped(subject, "swapped")
    for request, output in zip(requests, outputs, strict=True):
        had = before.get(request.request_id)
        if had is not None and output.token_ids[: len(had)].tolist() != had.tolist():
            return f"{request.request_id} began again at the swap"
    after = subject.run(requests_of("after"))
    old = [one.request_id for one in after if {span.version for span in one.spans} != {version}]
    return f"{old} have tokens of weights that were swapped out before" if old else ""


def tells_progress(subject: Subject) -> str:
    """What it says of unfinished requests is the beginning of what they end as."""
    subject.next_version()
    requests = requests_of("progress")
    outputs, had = subject.started(requests)
    if not had:
        return "no request was unfinished after its first tokens"
    later = {one.request_id: one for one in subject.engine.progress({name: 1 for name in [*had, "unknown"]})}
    for one in subject.finish(requests, outputs):
        told = had.get(one.request_id)
        if told is not None and one.token_ids[: len(told)].tolist() != told.tolist():
            return f"{one.request_id} ended with other tokens than it had"
        rest = later.get(one.request_id)
        if rest is not None and (
            rest.start != 1 or rest.token_ids.tolist() != one.token_ids[1 : 1 + len(rest.token_ids)].tolist()
        ):
            return f"{one.request_id}: what came since its first token was told as something else"
    return "it tells of requests that it does not know" if "unknown" in later else ""


def drafts_change_nothing(subject: Subject) -> str:
    """With drafts from history tokens are the same, and some drafts are right."""
    subject.next_version()
    requests = requests_of("drafted")
    plain = subject.run(requests)
    drafted = [
        replace(
            request,
            request_id=f"{request.request_id}+",
            group=request.request_id,
            history=PromptHistory(request.request_id, 0, (PastCompletion(one.token_ids, 0, 0, 0, 1.0),)),
        )
        for request, one in zip(requests, plain, strict=True)
    ]
    accepted = 0
    for one, other in zip(plain, subject.run(drafted), strict=True):
        if one.token_ids.tolist() != other.token_ids.tolist():
            return f"{one.request_id} had other tokens with drafts"
        accepted += 0 if other.drafting is None else other.drafting.accepted
    return "" if accepted else "it accepted none of the tokens that it had sampled before"


def stops_at_texts(subject: Subject) -> str:
    """A completion ends with the token that completes a text of `sampling.stop`, and is not longer."""
    subject.next_version()
    decode = TextCodec.load(str(subject.folder)).tokenizer.decode
    requests = requests_of("stopped", GREEDY)  # so that the same comes again without seeds
    tried = 0
    for request, whole in zip(requests, subject.run(requests), strict=True):
        middle = len(whole.token_ids) // 2
        text = decode(whole.token_ids[middle : middle + 1].tolist(), skip_special_tokens=False)
        if not text.strip() or middle == 0:
            continue
        tried += 1
        sampling = replace(request.sampling, stop=(text,))
        (one,) = subject.run([replace(request, request_id=f"{request.request_id}+", sampling=sampling)])
        said = decode(one.token_ids.tolist(), skip_special_tokens=False)
        before = decode(one.token_ids[:-1].tolist(), skip_special_tokens=False)
        if one.finish_reason is not FinishReason.STOP or text not in said or text in before:
            return f"{request.request_id} was to end with {text!r}, and is {said!r}"
    return "" if tried else "no completion had a text that could end it"


CHECKS: Mapping[str, tuple[Check, ...]] = {
    "engine": (keeps_versions, keeps_requests),
    "ids": (keeps_ids,),
    "logprobs": (gives_logprobs,),
    "seeds": (repeats_seeds,),
    "keyed": (draws_by_keys,),
    "spans": (names_spans,),
    "swaps": (swaps_in_flight,),
    "progress": (tells_progress,),
    "drafts": (drafts_change_nothing,),
    "stops": (stops_at_texts,),
}
"""Ability -> its checks; `engine` is what every engine promises."""


def examine(subject: Subject) -> dict[str, Any]:
    """Put an engine to the checks of all that it declares.

    Returns:
        declared and passed: names, in the order of `CHECKS`. failed: name -> why.
    """
    missing = subject.engine.abilities.missing
    declared = [name for name in CHECKS if name not in missing]
    failed: dict[str, str] = {}
    for name in declared:
        for check in CHECKS[name]:
            try:
                why = check(subject)
            except AntiphonError as error:
                why = f"{type(error).__name__}: {error}"
            subject.engine.abort([f"{one.request_id}{end}" for one in requests_of("") for end in ("", "+")])
            if why:
                failed.setdefault(name, f"{check.__name__}: {why}")
    return {"declared": declared, "passed": [one for one in declared if one not in failed], "failed": failed}


@torch.no_grad()
def versions_of(folder: Path) -> tuple[Version, ...]:
    """Return the versions of a model's folder: its own weights, each with a loudness and noise of its own.

    The noise is in every tensor: one that an engine leaves as it was is seen.
    """
    from transformers import AutoModelForCausalLM

    found = []
    for number, loudness in enumerate(LOUDNESS):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        noise = torch.Generator().manual_seed(number)
        for parameter in model.parameters():
            parameter *= 1.0 + NOISE * torch.randn(parameter.shape, generator=noise)
        model.model.norm.weight *= loudness
        tensors = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
        tokens = torch.tensor(probe_tokens(model.config.vocab_size))
        rows = torch.log_softmax(model(tokens[None]).logits[0, :-1], -1)
        scores = rows.gather(-1, tokens[1:, None])[:, 0]
        probe = Probe(tuple(tokens.tolist()), tuple(scores.tolist()), "float32")
        found.append(Version(verify(tensors, probe), model))
    return tuple(found)
