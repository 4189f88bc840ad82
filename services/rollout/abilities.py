"""Abilities: what it costs a run that its engine cannot do something, said when a worker starts."""

from antiphon.api.engine import EngineAbilities
from antiphon.core.config import RunConfig
from antiphon.core.errors import ConfigError

COSTS = {
    "ids": "a token may come back as another",
    "logprobs": "the learner computes them, and batches say `recomputed`",
    "seeds": "no group can be sampled again to the same tokens",
    "keyed": "audits compare log-probabilities alone, and a lost group is continued as another draw",
    "spans": "a swap aborts the requests in flight, and they begin again",
    "swaps": "a swap aborts the requests in flight, and they begin again",
    "progress": "what a lost worker had sampled of a group is lost",
    "drafts": "history of a prompt is of no use",
    "stops": "a turn ends at end tokens and its longest alone",
}
"""By ability; the table of docs/concepts/engines.md in words."""


def check_abilities(abilities: EngineAbilities, config: RunConfig) -> tuple[str, ...]:
    """Return what an engine's missing abilities cost a run, one sentence each.

    Raises:
        ConfigError: when the run cannot do without one of them.
    """
    missing = abilities.missing
    if config.loop.mode == "fixed" and (lacks := [one for one in ("seeds", "keyed") if one in missing]):
        raise ConfigError(
            f"the engine has no {' and no '.join(lacks)}, so that a run in loop.mode=fixed would not repeat; "
            "use loop.mode=elastic"
        )
    if "logprobs" in missing and config.rollout.logprobs == "engine":
        raise ConfigError(
            "the engine gives no log-probabilities; set rollout.logprobs=learner and trust.audits=off, so "
            "that the learner computes them"
        )
    if "stops" in missing and config.sampling.stop:
        raise ConfigError(
            f"the engine cannot end a turn at sampling.stop={list(config.sampling.stop)}; leave it out, or "
            "use another engine"
        )
    return tuple(f"the engine has no {name}: {COSTS[name]}" for name in missing)
