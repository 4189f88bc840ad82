"""Planner: how many workers of which class a configuration needs, what a run then takes and costs.

A fleet is assessed as a whole: its supply with losses, the broadcast along the planned topology, the longest
completion on its slowest class, and from these the seconds per step, by the capacity model. Fleets for
several needs are covered and assessed. Where the staleness bound lets the learner never wait, the one that
keeps it busy is taken; where it is smaller, the one that costs least per step.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from antiphon.core.capacity.cover import Redundancy, WorkerOffer, cover
from antiphon.core.capacity.estimate import (
    MODELS,
    RATE_BAND,
    TRAIN_BAND,
    ModelSize,
    SamplingRate,
    find_gpu,
    longest_of_group,
    rounds_of_places,
    sampling_rate,
    train_seconds,
)
from antiphon.core.capacity.measured import Measured
from antiphon.core.capacity.model import (
    LoopShape,
    Pace,
    availability,
    best_pace,
    largest_staleness,
    least_staleness,
    pace,
    preemption_efficiency,
    required_supply,
    shape_of,
    trained_share,
)
from antiphon.core.capacity.offers import Offers, WorkerClass, bytes_per_s
from antiphon.core.config import RunConfig
from antiphon.core.dissemination.plan import Link, Size, plan_tree
from antiphon.core.errors import InfeasibleError

_SECONDS_PER_HOUR = 3600.0
_CHUNK_BYTES = 16 << 20
_FEWEST_CHUNKS = 128
_NEEDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0)
"""Needs that are covered, in units of what keeps the learner busy."""
_BUSY = 1.0
_IDLE_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class ClassRate:
    """What one worker of a class gives."""

    sampling: SamplingRate
    measured: bool
    group_s: float
    """From the lease to the rewards of the slowest group of a batch."""
    place_s: float
    """The same of the slowest place, with the groups that are left out before."""
    completions_per_s: float
    """While it lives, work that is lost with its end taken off."""
    availability: float


@dataclass(frozen=True, slots=True)
class Assessment:
    """What a fleet does with a configuration."""

    counts: Mapping[str, int]
    """Class -> workers to have."""
    supply: float
    """Completions per second on average, losses taken off."""
    shape: LoopShape
    pace: Pace
    usd_per_hour: float
    usd_per_step: float
    """With egress."""

    @property
    def workers(self) -> int:
        return sum(self.counts.values())


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer to a configuration."""

    chosen: Assessment
    required: float
    """Completions per second that keep the learner busy, (3)."""
    required_paused: float
    """The same if workers paused for each broadcast, (2); infinity where none would do."""
    acceptance: float
    """Share of the completions that is trained on."""
    least_staleness: int
    staleness_reached: int
    """Largest staleness that occurs when as much is in flight as needed, (4); at most S."""
    run_hours: float
    run_usd: float
    by_bound: tuple[Assessment, ...]
    """The chosen fleet with S = 0, 1, ..."""
    by_workers: tuple[Assessment, ...]
    """Fleets of other sizes with the configuration's S, smallest first."""
    rates: dict[str, ClassRate]
    survives: float
    """Share of the need that is left when the largest zone vanishes."""
    notes: tuple[str, ...]


class Planner:
    """Plans one configuration with one set of offers.

    Raises:
        InfeasibleError: when the numbers do not say what is needed.
    """

    def __init__(
        self,
        config: RunConfig,
        offers: Offers,
        measured: Measured | None = None,
        redundancy: Redundancy | None = None,
    ) -> None:
        self.config, self.offers, self.measured = config, offers, measured
        self.redundancy = redundancy or Redundancy()
        if not offers.workers:
            raise InfeasibleError("no workers are offered; name classes under workers in the offers")
        loop, task = config.loop, offers.task
        self._known = MODELS.get(offers.model or config.model.path)
        self.parameters = offers.parameters or (self._known.parameters if self._known else None)
        """Of the model; None where neither the offers nor its name say them."""
        self.completions = loop.prompts_per_step * loop.group_size
        told = measured.completion_tokens if measured else task.completion_tokens
        self.tokens: float = told or config.sampling.max_tokens / 2.0
        self.acceptance = measured.acceptance if measured else task.acceptance
        self.longest, self.longest_of_any = (
            min(longest_of_group(task.spread, count) * self.tokens, config.sampling.max_tokens)
            for count in (self.completions, loop.group_size)
        )
        self.train_s, self.train_measured = self._train_s()
        self.rates = {one.name: self._rate(one) for one in offers.workers}
        self.classes = {one.name: one for one in offers.workers}
        self.pool = [
            WorkerOffer(
                f"{one.name} {number}",
                one.usd_per_hour or 0.0,
                self.rates[one.name].completions_per_s,
                self.rates[one.name].availability,
                f"{one.name}/{number % one.zones}" if one.losses_per_hour else "",
            )
            for one in offers.workers
            for number in range(one.most)
        ]

    def _model(self) -> ModelSize:
        offers, known, parameters = self.offers, self._known, self.parameters
        name = offers.model or self.config.model.path
        cache = offers.cache_bytes_per_token or (known.cache_bytes_per_token if known else None)
        if parameters is None or cache is None:
            raise InfeasibleError(
                f"nothing is known of the size of {name}; give model as one of {', '.join(MODELS)}, or "
                "parameters and cache_bytes_per_token, or measured rates, in the offers"
            )
        active = offers.active_parameters or (known.active_parameters if known else parameters)
        return ModelSize(parameters, active, cache)

    def _payload_bytes(self) -> float:
        return self._model().parameters * self.offers.weight_bytes * self.offers.payload_share

    def _train_s(self) -> tuple[float, bool]:
        learner = self.offers.learner
        if learner.train_s is not None:
            return learner.train_s, True
        trained = self.completions * trained_share(self.config.loop, self.acceptance)
        if self.measured is not None:
            return self.measured.seconds[0] * trained / self.measured.trained, True
        if learner.gpu is None:
            raise InfeasibleError(
                "the seconds of a learner step are not known; give learner.gpu to have them estimated, "
                "learner.train_s, or a run that measured them"
            )
        tokens = trained * (self.tokens + self.offers.task.prompt_tokens)
        return train_seconds(self._model(), find_gpu(learner.gpu), learner.gpus, tokens), False

    def _rate(self, one: WorkerClass) -> ClassRate:
        loop, task, rollout = self.config.loop, self.offers.task, self.config.rollout
        at_once = rollout.concurrent_groups * loop.group_size
        given = one.tokens_per_s or (self.measured.tokens_per_s if self.measured else None)
        if given is not None:
            sampling = SamplingRate(given, at_once)
        else:
            if one.gpu is None:
                raise InfeasibleError(
                    f"the rate of workers {one.name} is not known; give gpu to have it estimated, "
                    "tokens_per_s, or a run that measured it"
                )
            # Of lognormal lengths the mean live completion holds E[n^2] / (2 E[n]) tokens.
            live = task.prompt_tokens + self.tokens * math.exp(task.spread**2) / 2.0
            sampling = sampling_rate(
                self._model(), find_gpu(one.gpu), one.gpus, live, at_once, self.offers.weight_bytes
            )
        if one.tokens_per_s is None and self.measured is not None:
            _, _, group_s, place_s = self.measured.seconds
        else:
            token_s = sampling.at_once / sampling.tokens_per_s
            group_s, any_s = (n * token_s + task.reward_s for n in (self.longest, self.longest_of_any))
            refilled = rounds_of_places(loop.prompts_per_step, self.acceptance, loop.refill_limit) - 1.0
            place_s = group_s + (refilled * any_s if loop.filter == "refill" else 0.0)
        losses = one.losses_per_hour / _SECONDS_PER_HOUR
        coordinator = self.config.coordinator
        unsafe_s = min(group_s, coordinator.heartbeat_s) if coordinator.partials_mib else group_s
        kept = preemption_efficiency(losses, unsafe_s)
        return ClassRate(
            sampling,
            given is not None,
            group_s,
            place_s,
            sampling.tokens_per_s / self.tokens * kept,
            availability(losses, one.replaced_s),
        )

    def broadcast_s(self, counts: Mapping[str, int]) -> float:
        """Return the seconds in which a fleet has a published version, along the best topology."""
        if self.measured is not None and not any(self.classes[name].gpu for name in counts):
            return self.measured.seconds[1]  # of machines of one's own; links of rented ones are other ones
        if all(rate.measured for rate in self.rates.values()) and self.parameters is None:
            return 0.0
        payload = int(self._payload_bytes()) or 1
        size = Size(payload, min(_CHUNK_BYTES, max(1, payload // _FEWEST_CHUNKS)))
        learner = self.offers.learner
        links = {
            f"{name} {number}": Link(
                bytes_per_s(self.classes[name].up_mbit_per_s), bytes_per_s(self.classes[name].down_mbit_per_s)
            )
            for name, count in counts.items()
            for number in range(count)
        }
        origin = Link(bytes_per_s(learner.up_mbit_per_s), bytes_per_s(learner.down_mbit_per_s))
        return plan_tree(size, origin, links).seconds

    def assess(
        self, counts: Mapping[str, int], max_staleness: int | None = None, interval: int | None = None
    ) -> Assessment:
        """Return what a fleet does; with the best publish interval where none is named."""
        counts = {name: counts[name] for name in self.classes if counts.get(name)}
        bound = self.config.loop.max_staleness if max_staleness is None else max_staleness
        supply = sum(
            count * self.rates[name].completions_per_s * self.rates[name].availability
            for name, count in counts.items()
        )
        shape = shape_of(
            self.config.loop,
            self.train_s,
            self.broadcast_s(counts),
            max(self.rates[name].group_s for name in counts),
            max(self.rates[name].place_s for name in counts),
            self.acceptance,
        )
        found = best_pace(shape, bound, supply) if interval is None else pace(shape, bound, interval, supply)
        per_hour = (self.offers.learner.usd_per_hour or 0.0) + sum(
            (self.classes[name].usd_per_hour or 0.0) * count * self.rates[name].availability
            for name, count in counts.items()
        )
        offers, egress_usd = self.offers, 0.0
        if offers.egress_usd_per_gb:
            egress_usd = sum(counts.values()) * self._payload_bytes() / 1e9 * offers.egress_usd_per_gb
        usd_per_step = per_hour * found.step_s / _SECONDS_PER_HOUR + egress_usd / found.publish_interval
        return Assessment(counts, supply, shape, found, per_hour, usd_per_step)

    def plan(self, max_idle: float | None = None, max_usd: float | None = None) -> Plan:
        """Return the plan.

        Args:
            max_idle: largest share of time that the learner may wait, 0..1.
            max_usd: most US dollars that the run may cost.

        Raises:
            InfeasibleError: when no offered fleet meets what is demanded.
        """
        bound, steps = self.config.loop.max_staleness, self.config.run.steps
        need = required_supply(shape_of(self.config.loop, self.train_s, 0.0, 1.0, 1.0, self.acceptance))
        covers = [cover(self.pool, share * need, self.redundancy) for share in _NEEDS]
        fleets = {
            one.names: (self.assess(Counter(name.rpartition(" ")[0] for name in one.names)), one)
            for one in covers
        }
        chosen = fleets[covers[_NEEDS.index(_BUSY)].names]
        allowed = assessed = list(fleets.values())
        if bound < least_staleness(chosen[0].shape):
            chosen = min(assessed, key=lambda pair: _worth(pair[0]))
        if max_idle is not None:
            allowed = [p for p in allowed if p[0].pace.idle_share <= max_idle + _IDLE_TOLERANCE]
            if not allowed:
                raise InfeasibleError(self._too_idle(max_idle, [pair[0] for pair in assessed]))
        if max_usd is not None:
            cheapest = min(steps * pair[0].usd_per_step for pair in allowed)
            allowed = [p for p in allowed if steps * p[0].usd_per_step <= max_usd]
            if not allowed:
                raise InfeasibleError(
                    f"{steps} steps cost at least ${cheapest:,.2f} with these offers"
                    f"{' and that idle share' if max_idle is not None else ''}, more than ${max_usd:,.2f}; "
                    "train fewer steps, or find cheaper workers"
                )
        if chosen not in allowed:
            chosen = min(allowed, key=lambda pair: _worth(pair[0]))
        fleet, covered = chosen
        shape, step_s = fleet.shape, fleet.pace.step_s
        least = least_staleness(shape)
        most = max(bound, least) + 2
        waited = replace(shape, train_s=step_s)
        reached = largest_staleness(waited, fleet.pace.publish_interval, waited.run_ahead)
        return Plan(
            chosen=fleet,
            required=need,
            required_paused=required_supply(replace(shape, pauses=True), fleet.pace.publish_interval),
            acceptance=self.acceptance,
            least_staleness=least,
            staleness_reached=min(bound, reached),
            run_hours=steps * step_s / _SECONDS_PER_HOUR,
            run_usd=steps * fleet.usd_per_step,
            by_bound=tuple(self.assess(fleet.counts, s) for s in range(most + 1)),
            by_workers=tuple(
                sorted((p[0] for p in assessed), key=lambda one: (one.workers, one.usd_per_hour))
            ),
            rates=self.rates,
            survives=covered.survives,
            notes=tuple(self._notes(fleet, need, covered.enough)),
        )

    def _too_idle(self, max_idle: float, assessed: Sequence[Assessment]) -> str:
        best = min(assessed, key=lambda one: one.pace.idle_share)
        least, bound = least_staleness(best.shape), self.config.loop.max_staleness
        way = f"offer more than {best.workers} workers"
        if bound < least:
            way = f"raise loop.max_staleness from {bound} to {least}"
        return (
            f"the learner would wait {best.pace.idle_share:.1%} of the time at least "
            f"({best.pace.wait_s:,.1f} s of each {best.pace.step_s:,.1f} s), more than the "
            f"demanded {max_idle:.1%}; {way}"
        )

    def _notes(self, fleet: Assessment, need: float, enough: bool) -> list[str]:
        found = []
        loop = self.config.loop
        best = fleet.pace
        if loop.max_staleness >= loop.publish_interval - 1 and loop.publish_interval != best.publish_interval:
            here = pace(fleet.shape, loop.max_staleness, loop.publish_interval, fleet.supply)
            if here.step_s > best.step_s * 1.005:
                found.append(
                    f"loop.publish_interval={loop.publish_interval} gives {here.step_s:,.1f} s a step; "
                    f"{best.publish_interval} gives {best.step_s:,.1f} s"
                )
        if not enough and fleet.supply < need:
            found.append(
                f"the {fleet.workers} workers offered sample {fleet.supply:.3g} completions per second, "
                f"and {need:.3g} keep the learner busy"
            )
        if fleet.shape.broadcast_s == 0.0:
            found.append(
                "nothing is known of a broadcast's time, so none is counted; name the model in the offers"
            )
        if not self.train_measured:
            found.append(f"the seconds of a learner step are an estimate, +-{TRAIN_BAND:.0%}")
        if not all(rate.measured for rate in self.rates.values()):
            found.append(f"rates of workers are estimates from data sheets, +-{RATE_BAND:.0%}")
        return found


def _worth(one: Assessment) -> tuple[float, float, int]:
    """Order fleets by their price per step; machines of one's own by their speed and number."""
    return (round(one.usd_per_step, 9), round(one.pace.step_s, 6), one.workers)


def staleness_warning(config: RunConfig, before: RunConfig) -> str | None:
    """Return a sentence where S was raised and the learning rate was not lowered as much, else None.

    Stale data biases each update by about S times the learning rate (arXiv 2607.01083), so the product is
    what should stay.
    """
    bound, earlier = config.loop.max_staleness, before.loop.max_staleness
    rate, old_rate = config.learner.learning_rate, before.learner.learning_rate
    if rate is None or old_rate is None:  # chosen by the size of a model that is not here
        return None
    fit = old_rate * max(1, earlier) / max(1, bound)
    if bound <= max(1, earlier) or rate <= fit * (1.0 + 1e-9):
        return None
    return (
        f"loop.max_staleness rises from {earlier} to {bound}, and learner.learning_rate={rate:g} is not "
        f"lowered to match; the bias of stale data grows with their product, so {fit:.2g} is as safe"
    )
