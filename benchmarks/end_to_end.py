"""End to end: all of Antiphon against its own synchronous loop, behind a slow link, mechanism by mechanism.

The baseline runs at S=0 without drafts, without an order by length and with whole snapshots; `antiphon` has
every mechanism. Between them stands `drafted`: as synchronous as the baseline, with drafts, order, relay and
patches. All run the same job through Prefect, with the same records, prompts in a fixed order for several
epochs, samples, learning rate, two workers and threads of each engine, on all cores. Lengths have a long tail
(`tokens_median`, `tokens_p99`), and most of a synchronous step is rollout. Each side has the places that
serve it best: a synchronous worker those for its share of a step's groups (with more, one worker would take
all of them), one that overlaps three times as many.

For each seed the baseline runs without a link first. What rollout and training of one of its steps take,
times a share, is what the weights of one version may take to both workers: that gives the rate of the
origin's uplink. The sides then run in turns behind each link. `broadcast_share` is what a delivery really
took in the baseline at the first link, relative to its rollout and training without one.

`ratio` is baseline over Antiphon in seconds per step (from the first lease to the last commit, over the
steps; start-up stands apart) at the first of --links, `ratio_without_link` at link 0, `ratio_by_link` at
all: medians of the pairs. `ratio_over_drafted` and `ratio_over_drafted_without_link` are the same over the
third side, which runs at these two. `ratio_first_epoch` takes the steps of the first epoch alone, before any
prompt has a history (at link 0 where it is among --links), and `ratio_short_answers` the demo's job, whose
answers are short (without a link, --short-seeds). `ablation` adds the mechanisms one by one at the first
link.

`reward_difference` is the mean over seeds of the paired differences of the last version's held-out reward to
the baseline's, at the first link; `reward_equal` says whether the lower end of its 95% interval (Student) is
at least -0.03, null with one seed. `reward_gain` is the mean by which it lies above that of the base model:
what the job learned at all. `repeated_share` says of the longest hundredth of Antiphon's answers which share
of their 8-grams stood before in the same answer: drafts guess such text well. `baseline`, `drafted` and
`antiphon` say where the seconds go at the first link, with `_without_link` at 0.

Fails when a sample was older than its bound, when the sides trained other numbers of samples, when the link
took more than a fifth more or less than it should, when a mean of rewards falls by more than 0.03, or when
all mechanisms together gain nothing. With `--keep FILE` finished runs are kept, and an interrupted
measurement goes on.

    .venv/bin/python benchmarks/end_to_end.py --seeds 5
    .venv/bin/python benchmarks/end_to_end.py --seeds 1 --links 0.5 --ablation-seeds 0 --short-seeds 0
"""

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

from antiphon.benchmarks.parts.kept import Kept
from antiphon.benchmarks.parts.measure import PROJECT
from antiphon.benchmarks.parts.race.runs import link_rate, lower_end, run_here
from antiphon.benchmarks.parts.results import benchmark_parser, execute, finish
from antiphon.benchmarks.reward_parity import make_model
from antiphon.core.config import load_config

CONFIG = PROJECT / "benchmarks" / "race.yaml"
WORKERS = 2
BOTH = (
    f"rollout.workers={WORKERS}",
    "rollout.threads=1",
    "evaluation.interval=0",
    "evaluation.prompts=1",
    "broadcast.links=false",
)
BASELINE = (
    "loop.max_staleness=0",
    "drafting.enabled=false",
    "loop.order=arrival",
    "broadcast.relay=off",
    "broadcast.patches=off",
)
MECHANISMS: Mapping[str, tuple[str, ...]] = {
    "s1": ("loop.max_staleness=1",),
    "s2": ("loop.max_staleness=2",),
    "drafts": ("drafting.enabled=true",),
    "order": ("loop.order=by_length",),
    "kept_caches": ("rollout.swap_cache=keep",),
    "relay": ("broadcast.relay=auto",),
    "patches": ("broadcast.patches=on",),
}
"""In the order in which the ablation adds them: overlap at S=1 and at S=2, drafts from history, leases in
the order of remembered lengths, caches that running requests keep when weights are swapped, weights that the
workers hand to each other, and patches."""
OVERLAPS = ("s1", "s2")
DRAFTED = ("drafts", "order", "relay", "patches")
"""What the drafted synchronous side has."""
SHORT_ANSWERS, SHORT_STEPS = PROJECT / "examples" / "quickstart.yaml", 60
"""A job of short answers, and its learner steps."""
PER_STEP = 8
"""Prompts of a step."""
BOUND = 2
"""Staleness that the side with every mechanism may have."""
OVERLAP_PLACES = 3
"""Places of a worker that overlaps, relative to its share of a step's groups."""
REWARD_MOST_LOST = 0.03
LINK_OFF_MOST = 0.2
RUN_S = 3600.0


def main() -> int:
    """Run both sides behind every link, then the ablation."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="paired seeds (default 5)")
    parser.add_argument("--epochs", type=int, default=6, help="over the prompts (default 6)")
    parser.add_argument("--prompts", type=int, default=64, help="training prompts (default 64)")
    parser.add_argument(
        "--links", type=float, nargs="+", default=[0.5, 0.0, 1.0], help="shares (default 0.5 0 1)"
    )
    parser.add_argument(
        "--link-seeds", type=int, default=None, help="seeds behind the links after the first (default: all)"
    )
    parser.add_argument("--ablation-seeds", type=int, default=1, help="seeds of the ablation (default 1)")
    parser.add_argument("--short-seeds", type=int, default=1, help="seeds of the demo's job (default 1)")
    parser.add_argument("--samples", type=int, default=16, help="of each held-out prompt (default 16)")
    parser.add_argument("--config", type=Path, default=CONFIG, help="the recipe")
    parser.add_argument("--keep", type=Path, default=None, help="file that keeps finished runs")
    parser.add_argument("overrides", nargs="*", help="key=value pairs for both sides")
    options = parser.parse_args()
    if options.prompts % PER_STEP or options.epochs * options.prompts < 3 * PER_STEP:
        parser.error(f"--prompts must be a multiple of {PER_STEP}, and all epochs at least 3 steps")
    if options.link_seeds is not None and options.link_seeds < 1:
        parser.error("--link-seeds must be at least 1; leave it out for all seeds")
    if min(options.links) < 0:
        parser.error("--links are shares of the baseline's step from 0")
    make_model(Path(load_config(options.config, options.overrides).model.path))
    race = Race(options)
    for mechanisms in race.sides.values():  # before the first minute
        load_config(options.config, race.words(0, mechanisms))
    pairs: dict[float, list[dict[str, Mapping[str, Any]]]] = {link: [] for link in options.links}
    ablation, short = [], []
    for number, seed in enumerate(race.seeds):  # what is compared runs close together: the pace drifts
        more = options.link_seeds is None or number < options.link_seeds
        for link in sorted(options.links):  # without a link first: `alone` is one of its sides
            if more or link == options.links[0]:
                pairs[link].append(race.pair(seed, link))
        if number < options.ablation_seeds:
            ablation.append(race.ablation(seed))
        if number < options.short_seeds:
            short.append(race.short(seed))
    result, samples, violated, at_size = compare(pairs, ablation, options.links, short)
    shape = {"epochs": options.epochs, "prompts": options.prompts, "per_step": PER_STEP}
    result = {**shape, "seeds": race.seeds, **result}
    return finish(result, record=options.record, samples=samples, violated=violated, at_size=at_size)


class Race:
    """The runs of one measurement."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Take the command line."""
        self._options, self._kept = options, Kept(options.keep)
        self.seeds = list(range(options.seeds))
        self.mechanisms = list(MECHANISMS)
        self.sides = {"baseline": [], "drafted": list(DRAFTED), "antiphon": self.mechanisms}

    def words(self, seed: int, mechanisms: Sequence[str]) -> list[str]:
        """Return what replaces fields of the recipe, for a side with some mechanisms."""
        options = self._options
        return [
            f"run.steps={options.epochs * options.prompts // PER_STEP}",
            f"environment.train_size={options.prompts}",
            f"loop.prompts_per_step={PER_STEP}",
            *self._manner(seed, PER_STEP, mechanisms),
            *options.overrides,
        ]

    def _manner(self, seed: int, per_step: int, mechanisms: Sequence[str]) -> list[str]:
        """Return the words of a seed and of mechanisms, whatever the job."""
        overlaps = any(name in OVERLAPS for name in mechanisms)
        places = -(-per_step // WORKERS) * (OVERLAP_PLACES if overlaps else 1)
        return [
            f"run.seed={seed}",
            f"rollout.concurrent_groups={places}",
            *BOTH,
            *BASELINE,
            *(word for name in mechanisms for word in MECHANISMS[name]),
        ]

    def pair(self, seed: int, link: float) -> dict[str, Mapping[str, Any]]:
        """Return the baseline without a link, and the sides behind one; who begins alternates.

        The drafted side runs where it is quoted: at the first link and without one.
        """
        alone = self._run(seed, 0.0, "baseline", ())
        rate = link_rate(alone["payload_bytes"], WORKERS, link, busy_seconds(alone))
        order = sorted(self.sides, reverse=bool(seed % 2))
        if link not in (self._options.links[0], 0.0):
            order.remove("drafted")
        found = {side: self._run(seed, link, side, self.sides[side], rate) for side in order}
        return {"alone": alone, **found}

    def short(self, seed: int) -> dict[str, Mapping[str, Any]]:
        """Return the baseline and Antiphon at the demo's job, without a link."""
        per_step = load_config(SHORT_ANSWERS).loop.prompts_per_step
        found = {}
        for side in ("baseline", "antiphon"):
            words = [
                f"run.steps={SHORT_STEPS}",
                *self._manner(seed, per_step, self.sides[side]),
            ]
            found[side] = self._kept.get(
                ["short", *words], partial(run_here, SHORT_ANSWERS, words, "run", 0, RUN_S)
            )
            print(f"seed {seed}, short answers, {side}: {found[side]['seconds_per_step']:.3f} s a step")
        return found

    def ablation(self, seed: int) -> list[tuple[str, float]]:
        """Return seconds per step at the first link with none, one, two, ... all mechanisms."""
        link, names = self._options.links[0], self.mechanisms
        ends = self.pair(seed, link)
        rate = link_rate(ends["alone"]["payload_bytes"], WORKERS, link, busy_seconds(ends["alone"]))
        rows = [("baseline", ends["baseline"]["seconds_per_step"])]
        for count in range(1, len(names)):
            found = self._run(seed, link, f"with {names[count - 1]}", names[:count], rate, scored=False)
            rows.append((names[count - 1], found["seconds_per_step"]))
        return [*rows, (names[-1], ends["antiphon"]["seconds_per_step"])]

    def _run(
        self,
        seed: int,
        link: float,
        said: str,
        mechanisms: Sequence[str],
        rate: float | None = None,
        scored: bool = True,
    ) -> Mapping[str, Any]:
        options, words = self._options, self.words(seed, mechanisms)
        # Rewards of the two ends are compared, at the first link.
        scored &= said != "drafted" and link == options.links[0]
        samples = options.samples if scored else 0
        # The rate follows from a measurement: a run that goes on is recognised by the share.
        key = [str(options.config), samples, link, [*words]]
        if rate is not None:
            words.append(f"broadcast.uplink_bytes_per_s={rate:.0f}")
        found: Mapping[str, Any] = self._kept.get(
            key, lambda: run_here(options.config, words, "run", samples, RUN_S, base=said == "antiphon")
        )
        print(f"seed {seed}, link {link:g}, {said}: {found['seconds_per_step']:.3f} s a step", flush=True)
        return found


def compare(
    pairs: Mapping[float, Sequence[Mapping[str, Mapping[str, Any]]]],
    ablation: Sequence[Sequence[tuple[str, float]]],
    links: Sequence[float],
    short: Sequence[Mapping[str, Mapping[str, Any]]] = (),
) -> tuple[dict[str, Any], dict[str, list[float]], list[str], list[str]]:
    """Return result, samples, violated promises, and those that hold only for a whole measurement.

    Args:
        pairs: link -> for each seed the runs `alone`, `baseline`, `antiphon` and, where it ran, `drafted`.
        ablation: for each of its seeds mechanism and seconds per step.
        links: shares; the first decides.
        short: for each of its seeds the runs `baseline` and `antiphon` of the demo's job.
    """
    ratios = {link: ratios_of(found) for link, found in pairs.items()}
    first = pairs[links[0]]
    share = median(one["baseline"]["delivery_s"] / busy_seconds(one["alone"]) for one in first)
    differences = [one["antiphon"]["reward"] - one["baseline"]["reward"] for one in first]
    mean, low = fmean(differences), lower_end(differences)
    steps = {name: [dict(rows)[name] for rows in ablation] for name, _ in (ablation[0] if ablation else ())}
    samples = {"ratio": ratios[links[0]]}
    samples |= {f"ratio_by_link.{link:g}": values for link, values in ratios.items()}
    if 0.0 in ratios:
        samples["ratio_without_link"] = ratios[0.0]
        samples["ratio_over_drafted_without_link"] = ratios_of(pairs[0.0], "drafted")
    samples["ratio_over_drafted"] = ratios_of(first, "drafted")
    without_history = pairs.get(0.0, first)
    samples["ratio_first_epoch"] = ratios_of(without_history, of="seconds_per_step_first_epoch")
    samples["ratio_short_answers"] = ratios_of(short)
    samples |= {f"seconds_per_step.{name}": values for name, values in steps.items()}
    result: dict[str, Any] = {
        "broadcast_share": round(share, 4),
        "ratio_without_link": None,
        "ratio_over_drafted_without_link": None,
        "ratio_short_answers": None,
        "reward_gain": round(
            fmean(one["antiphon"]["reward"] - one["antiphon"]["reward_before"] for one in first), 4
        ),
        "repeated_share": round(fmean(one["antiphon"]["repeated_share"] for one in first), 4),
        "ablation": [
            {"mechanism": name, "seconds_per_step": round(median(values), 4)}
            for name, values in steps.items()
        ],
        "reward_difference": round(mean, 4),
        "reward_difference_low": None if low is None else round(low, 4),
        "reward_equal": None if low is None else low >= -REWARD_MOST_LOST,
    }
    for link, found in pairs.items():
        if link in (links[0], 0.0):
            end = "" if link == links[0] else "_without_link"
            result |= {
                side + end: means([one[side] for one in found])
                for side in ("baseline", "drafted", "antiphon")
            }
    return result, samples, broken(pairs), missed(links[0], share, mean, median(ratios[links[0]]))


def ratios_of(
    pairs: Sequence[Mapping[str, Mapping[str, Any]]], over: str = "baseline", of: str = "seconds_per_step"
) -> list[float]:
    """Return the seconds per step of another side over those of Antiphon, for each pair."""
    return [round(pair[over][of] / pair["antiphon"][of], 4) for pair in pairs]


def busy_seconds(run: Mapping[str, Any]) -> float:
    """Return the seconds of rollout and training of a step."""
    return float(run["rollout_s"] + run["training_s"])


def means(runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the mean of each figure that all runs have."""
    names = [name for name in runs[0] if all(run[name] is not None for run in runs)]
    return {name: round(fmean(run[name] for run in runs), 4) for name in names}


def broken(pairs: Mapping[float, Sequence[Mapping[str, Mapping[str, Any]]]]) -> list[str]:
    """Return a sentence for every promise that a run broke."""
    found = []
    for one in (pair for group in pairs.values() for pair in group):
        for side in ("baseline", "drafted"):
            if side in one and one[side]["staleness_max"] > 0:
                found.append(f"a sample of the {side} side was {one[side]['staleness_max']} versions old")
        if one["antiphon"]["staleness_max"] > BOUND:
            found.append(
                f"a sample was {one['antiphon']['staleness_max']} versions old, the bound is {BOUND}"
            )
        if one["baseline"]["samples"] != one["antiphon"]["samples"]:
            found.append(
                f"{one['baseline']['samples']} groups were consumed by the baseline, "
                f"{one['antiphon']['samples']} by the other side"
            )
    return found


def missed(link: float, share: float, reward: float, ratio: float) -> list[str]:
    """Return a sentence for everything that does not hold of a whole measurement."""
    found = []
    if abs(share - link) > LINK_OFF_MOST * link:
        found.append(f"the link took {share:.2f} of rollout and training, it should have taken {link:g}")
    if reward < -REWARD_MOST_LOST:
        found.append(f"the last reward is {-reward:.3f} below the baseline's, {REWARD_MOST_LOST} is allowed")
    if ratio <= 1.0:
        found.append(f"all mechanisms together gain nothing: {ratio:.2f} of the baseline's speed")
    return found


if __name__ == "__main__":
    execute(main)
