"""Configuration of provisioning: which workers a run may start and drain by itself, and what they cost."""

from itertools import pairwise
from typing import Literal, Self

from pydantic import AwareDatetime, Field, model_validator

from antiphon.core.capacity.cover import MOST_USD_PER_HOUR, Redundancy
from antiphon.core.capacity.launcher_config import LauncherSection, LocalLauncherSection
from antiphon.core.config_sections import Section

_NAME = r"^[A-Za-z0-9][A-Za-z0-9._]{0,40}$"


class PriceFrom(Section):
    """A price that holds from a moment on."""

    since: AwareDatetime
    """When it begins, with its offset: 2026-11-24T08:00:00Z."""
    usd_per_hour: float = Field(ge=0.0, le=MOST_USD_PER_HOUR)


class PoolClass(Section):
    """Workers that are alike: they cost the same and can be reclaimed at once."""

    name: str = Field(pattern=_NAME)
    usd_per_hour: float = Field(ge=0.0, le=MOST_USD_PER_HOUR)
    prices: tuple[PriceFrom, ...] = ()
    """Later prices, in order of `since`; before the first of them `usd_per_hour` holds."""
    count: int = Field(default=1, ge=1, le=1024)
    zone: str = ""
    """What may vanish at once; empty where its workers depend on nothing in common."""
    tokens_per_s: float | None = Field(default=None, gt=0.0, lt=1e9)
    """What one worker samples; null: as much as the others, until it was measured."""
    availability: float = Field(default=1.0, gt=0.0, le=1.0)
    """Share of time that one is there."""
    device: Literal["any", "gpu"] = "any"
    """gpu: a worker of it that finds none is turned away, and the class is out of order for a while."""
    launcher: LauncherSection = LocalLauncherSection()
    """By which engine they are started."""

    @property
    def workers(self) -> list[str]:
        """Return the names of its workers."""
        return [f"{self.name}-{number}" for number in range(self.count)]

    def usd_at(self, at: float) -> float:
        """Return the price of an hour at a moment, Unix seconds."""
        begun = [one.usd_per_hour for one in self.prices if one.since.timestamp() <= at]
        return begun[-1] if begun else self.usd_per_hour

    @model_validator(mode="after")
    def _check_prices(self) -> Self:
        for one, later in pairwise(self.prices):
            if later.since <= one.since:
                raise ValueError(
                    f"{self.name}: the price since {later.since.isoformat()} stands after the one since "
                    f"{one.since.isoformat()}; give prices in the order of their beginnings, each once"
                )
        return self


class ProvisioningSection(Section):
    """Workers that are started and drained as need and prices say, beside those of `rollout.workers`; see
    docs/concepts/activation.md."""

    pool: tuple[PoolClass, ...] = ()
    """What can be had: entries of name, usd_per_hour, prices (later ones: since, usd_per_hour), count, zone,
    tokens_per_s (null: like the others), availability (1) and launcher (processes of this machine). Empty:
    nothing is started or drained."""
    confidence: float = Field(default=0.95, ge=0.5, lt=1.0)
    """Probability with which the active workers are enough at a random moment."""
    survives: float = Field(default=0.0, ge=0.0, le=1.0)
    """Share of the need that is left when any one zone vanishes."""
    add_after_s: float = Field(default=30.0, ge=0.0, le=86_400.0)
    """Seconds of shortage after which workers are started."""
    hold_s: float = Field(default=600.0, ge=0.0, le=86_400.0)
    """Seconds for which a worker must have been superfluous before it is drained, and after any order."""
    join_s: float = Field(default=60.0, ge=0.0, le=86_400.0)
    """Seconds from an order until a worker samples; near its end a run drains none."""
    start_timeout_s: float = Field(default=600.0, ge=1.0, le=86_400.0)
    """Seconds for an engine to answer a start, and then for the worker to join; after that it is stopped."""
    queue_timeout_s: float = Field(default=3600.0, ge=1.0, le=30 * 86_400.0)
    """Seconds that a worker may wait in its engine's queue, which costs nothing."""
    starts_per_minute: int = Field(default=30, ge=1, le=10_000)
    """Most starts within a minute, over all classes."""
    budget_usd: float | None = Field(default=None, ge=0.0, le=1e9)
    """What the pool's workers may cost in all, US dollars: before it is passed they are stopped; null: no
    limit."""
    egress_usd_per_gb: float = Field(default=0.0, ge=0.0, le=10.0)
    """Price of a gigabyte that workers fetch, US dollars."""

    @property
    def redundancy(self) -> Redundancy:
        """Return what the active workers must survive."""
        return Redundancy(self.confidence, self.survives)

    def class_of(self, worker: str) -> PoolClass | None:
        """Return the class of a worker by its name; None for one that is not of the pool."""
        name, _, number = worker.rpartition("-")  # asked at each heartbeat: no list of names is made
        known = number.isdecimal() and number == str(int(number))
        return next((x for x in self.pool if known and x.name == name and int(number) < x.count), None)

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [one.name for one in self.pool]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(
                f"pool has {twice} twice; give each class, and each of its zones, a name of its own"
            )
        if "worker" in names:
            raise ValueError(
                "a class of the pool is called worker, as those of rollout.workers are; rename it"
            )
        if self.add_after_s > self.hold_s:
            raise ValueError(
                f"add_after_s={self.add_after_s:g} exceeds hold_s={self.hold_s:g}, so that workers come and "
                "go; hold them for no less time than they are waited for"
            )
        return self
