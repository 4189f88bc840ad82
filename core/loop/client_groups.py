"""Client groups: what clients may ask for, and which version a worker samples next, decided from state alone.

A request waits until a worker holds a version that it allows. Workers go by the oldest request that nobody
else serves: one that holds another version gets no further group before it has loaded that, so neither
requests of a version nor those of the newest ones are put off for ever.
"""

import re
from collections.abc import Sequence
from math import isfinite

from antiphon.core.checks import TokenRules
from antiphon.core.client_records import CLIENT, SampleRequest
from antiphon.core.config import RunConfig
from antiphon.core.errors import ContractError
from antiphon.core.frozen import frozen
from antiphon.core.loop.places import window_of
from antiphon.core.loop.run_state import RunState
from antiphon.core.message_sizes import MARGIN_BYTES, MESSAGE_BYTES, fits, group_bytes
from antiphon.core.sampling_config import LONGEST_STOP

MOST_STOPS = 64
"""Texts, and tokens, that end a completion."""
MOST_TEMPERATURE = 10.0
KEPT_STEPS, MOST_KEPT = 64, 1 << 16
"""Newest steps, and newest requests, whose completions stay."""
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def check_driven(config: RunConfig) -> None:
    """Refuse what only runs of clients have.

    Raises:
        ContractError: when the run has prompts of its own.
    """
    if not config.client_driven:
        raise ContractError(
            f"environment.name={config.environment.name} has prompts of its own; only a run with "
            f"environment.name={CLIENT}, which `antiphon door` starts, takes them from a client"
        )


def check_request(
    request: SampleRequest, state: RunState, config: RunConfig, rules: TokenRules | None, texts: bool
) -> None:
    """Refuse a request that no worker could sample.

    `rules` are None where nothing is known of the model's tokens; `texts`: a completion may end with a text.

    Raises:
        ContractError: naming the field and the fix.
    """
    sampling, prompt, seeds = request.sampling, request.prompt_token_ids, request.seeds
    size, most = len(prompt) + sampling.max_tokens, config.rollout.max_model_tokens
    tokens = (*prompt, *sampling.stop_token_ids)
    vocabulary = 1 << 31 if rules is None else rules.vocabulary
    foreign = next((token for token in tokens if not 0 <= token < vocabulary), None)
    group = group_bytes(len(seeds), len(seeds) * sampling.max_tokens, len(prompt))
    problems = {
        f"request_id={request.request_id[:140]!r} needs 1 to 128 of A-Z a-z 0-9 . _ : -": (
            _REQUEST_ID.fullmatch(request.request_id) is None
        ),
        "prompt_token_ids is empty; give a token at least": not prompt,
        "seeds is empty; give one for each completion": not seeds,
        "a seed is not in 0..2**64 - 1; take it modulo 2**64": any(not 0 <= seed < 1 << 64 for seed in seeds),
        f"token id {foreign} is not in the vocabulary of {vocabulary}; use the model's own tokenizer": (
            foreign is not None
        ),
        f"max_tokens={sampling.max_tokens} leaves nothing to sample; ask for 1 or more": sampling.max_tokens
        < 1,
        f"{len(prompt)} prompt tokens and max_tokens={sampling.max_tokens} exceed rollout.max_model_tokens="
        f"{most}; shorten either, or have the latter raised": size > most,
        f"{len(seeds)} completions of {sampling.max_tokens} tokens are more than one message of "
        f"{(MESSAGE_BYTES - MARGIN_BYTES) >> 20} MiB carries; ask for fewer at a time": not fits(group),
        f"temperature={sampling.temperature} is not in 0..{MOST_TEMPERATURE:g}": not (
            isfinite(sampling.temperature) and 0.0 <= sampling.temperature <= MOST_TEMPERATURE
        ),
        f"top_k={sampling.top_k} is negative; 0 keeps all tokens": sampling.top_k < 0,
        f"top_p={sampling.top_p} is no share in (0, 1]; 1 keeps all tokens": not 0.0 < sampling.top_p <= 1.0,
        f"there are more than {MOST_STOPS} stop sequences; give fewer": (
            max(len(sampling.stop), len(sampling.stop_token_ids)) > MOST_STOPS
        ),
        f"stop has a text of no character, of more than {LONGEST_STOP}, or with half of one": any(
            not text or len(text) > LONGEST_STOP or "\ufffd" in text for text in sampling.stop
        ),
        "stop sequences as texts cannot be looked for here; give token ids": bool(sampling.stop)
        and not texts,
        f"max_staleness={request.max_staleness} is negative; 0 asks for the newest": request.max_staleness
        < 0,
    }
    if problem := next((words for words, found in problems.items() if found), ""):
        raise ContractError(problem)
    if request.version is not None and request.version not in state.snapshots:
        raise ContractError(
            f"version {request.version} was never announced; versions up to {state.newest_version} are"
        )


@frozen
class OtherWorker:
    """What is known of another worker that can sample."""

    held: int | None
    asked: int | None
    """Version that it was asked to load."""
    free: bool
    """It has room for another group."""


def version_wanted(
    state: RunState, config: RunConfig, held: int | None, asked: int | None, others: Sequence[OtherWorker]
) -> tuple[int | None, bool]:
    """Return which version a worker should sample with, None for the newest, and whether it must load that
    before it gets any group.

    Args:
        state: the run.
        config: its configuration.
        held: version that the worker holds.
        asked: version that it was last asked to load.
        others: the other workers that can sample.
    """
    seen, to_help = set[tuple[int | None, int]](), None
    for group in sorted(state.open_groups.values(), key=lambda group: group.number):
        window = window_of(state, config.loop, group)
        if held is not None and window.admits(held):
            return group.version, False
        if (group.version, window.oldest) in seen:
            continue
        seen.add((group.version, window.oldest))
        holders = [one for one in others if one.held is not None and window.admits(one.held)]
        pinned = group.version is not None
        coming = pinned and asked != group.version and any(one.asked == group.version for one in others)
        if not (holders or coming):
            return group.version, True
        if to_help is None and not any(one.free for one in holders):
            to_help = group
    return (None, False) if to_help is None else (to_help.version, True)
