"""Metrics: every number a learner step reports, with its unit and its meaning.

A commit carries these names and no others. Metrics that exist once per staleness are named
by `staleness_metric`, so that a reader can split any of them by how old the data was.
"""

from dataclasses import dataclass

from antiphon.core.drafting.statistics import drafting_rates
from antiphon.core.records import BatchRef
from antiphon.core.reporting.figures import FIGURES


@dataclass(frozen=True, slots=True)
class Metric:
    """One number that is reported."""

    name: str
    unit: str
    meaning: str


LEARNER_METRICS: tuple[Metric, ...] = (
    Metric("loss", "1", "objective's loss over the batch, mean over the step's updates"),
    Metric("gradient_norm", "1", "norm of the gradient before clipping, mean over the step's updates"),
    Metric("learning_rate", "1", "AdamW learning rate of the step's last update, made or not"),
    Metric("ratio_mean", "1", "mean importance ratio exp(learner - behaviour logprob) over tokens"),
    Metric("ratio_max", "1", "largest importance ratio of a token"),
    Metric(
        "clip_share",
        "1",
        "share of tokens whose ratio the clip altered: no gradient, for cispo a smaller one",
    ),
    Metric("truncated_share", "1", "share of tokens whose importance weight was truncated or masked"),
    Metric("kl_k1", "nats", "k1 estimate of KL(behaviour || learner) per token"),
    Metric("kl_k3", "nats", "k3 estimate of KL(behaviour || learner) per token; never negative"),
    Metric(
        "effective_sample_share",
        "1",
        "effective sample size of the applied weights (after cap, mask, clip) over the tokens",
    ),
    Metric("entropy_estimate", "nats", "mean of minus the learner's logprob over the sampled tokens"),
    Metric("completion_tokens", "tokens", "completion tokens the step trained on"),
    Metric("trajectories", "trajectories", "trajectories the step trained on"),
    Metric("padding_share", "1", "share of padding in the blocks in which attention sees whole rows"),
    Metric("micro_batches", "micro-batches", "forward and backward passes of the step"),
    Metric("train_s", "s", "seconds of the step on the training thread, loading the batch included"),
)
"""What every learner step reports; an empty batch reports zeros."""

BATCH_METRICS: tuple[Metric, ...] = (
    Metric("reward_mean", "reward", "mean reward of all scored trajectories, filtered groups included"),
    Metric("completion_tokens_mean", "tokens", "mean completion length of all rewarded trajectories"),
    Metric("trajectories_failed", "trajectories", "trajectories that could not be scored"),
    Metric("groups_filtered", "groups", "groups without reward variance that were left out"),
    Metric("groups_dropped_stale", "groups", "finished groups dropped beyond the bound since the last batch"),
    Metric("staleness_mean", "versions", "mean staleness of the batch's trajectories; 0 for an empty batch"),
    Metric("staleness_max", "versions", "largest staleness of the batch's trajectories"),
)
"""What a commit says of the batch it was trained on."""

REFERENCE_METRICS: tuple[Metric, ...] = (
    Metric("reference_kl_k1", "nats", "k1 estimate of KL(learner || reference) per token of the batch"),
    Metric("reference_kl_k3", "nats", "k3 estimate of KL(learner || reference) per token; never negative"),
)
"""What a learner step also reports where a reference model scored its batch."""

ORDER_METRICS: tuple[Metric, ...] = (
    Metric("order_correlation", "1", "rank correlation of remembered and sampled lengths, -1..1"),
    Metric("order_by_length", "1", "1 where groups were leased by remembered lengths, 0 where as they came"),
)
"""What a commit says of the order of leasing, where `loop.order` is by_length, as far as it is known."""

DRAFTING_METRICS: tuple[Metric, ...] = (
    Metric("drafting_acceptance", "1", "share of the drafted tokens that were right"),
    Metric("drafting_coverage", "1", "share of the sampled tokens at whose place a draft stood"),
    Metric("drafting_tokens_per_pass", "tokens", "tokens sampled per forward pass of a completion"),
    Metric("drafting_history_share", "1", "share of completions whose prompt came with history"),
    Metric("drafting_rested_share", "1", "share of tokens sampled without drafts while over 0.8 were right"),
    Metric("drafting_drafter_ms", "ms", "milliseconds in the drafter per forward pass of a completion"),
    Metric("drafting_sampler_ms", "ms", "milliseconds in the sampler per forward pass of a completion"),
    Metric("drafting_gain", "1", "tokens per second relative to the last undrafted probe; 0 before one"),
)
"""What a commit says of drafting, over all rewarded trajectories of the step; left out where no engine
could draft. They follow who finished first, so they count as timings even in fixed mode."""

STALENESS_METRICS: tuple[Metric, ...] = (
    Metric("kl_k1", "nats", "as kl_k1, over the tokens of this staleness"),
    Metric("kl_k3", "nats", "as kl_k3, over the tokens of this staleness"),
    Metric("tokens", "tokens", "completion tokens of this staleness"),
)
"""What a learner step also reports for each staleness that occurs in its batch."""

PLAN_METRICS: tuple[Metric, ...] = (
    Metric("plan_step_s", "s", "seconds per step that the capacity model expects by what was measured"),
    Metric("plan_measured_step_s", "s", "seconds per step of late; 0 while that is not known"),
    Metric("plan_need_tokens_per_s", "tokens/s", "completion tokens per second that keep the learner busy"),
    Metric("plan_supply_tokens_per_s", "tokens/s", "what the active workers sample while their engines run"),
    Metric("plan_acceptance", "1", "share of the groups that is trained on"),
    Metric("plan_train_s", "s", "seconds of a learner step with its commit, a median of the last ones"),
    Metric("plan_broadcast_s", "s", "seconds until a worker holds a version, a median of the last ones"),
    Metric("plan_group_s", "s", "seconds from the lease to the rewards of the group that a batch waited for"),
    Metric("plan_place_s", "s", "the same, with the groups that were left out before it"),
    Metric("plan_publish_interval", "steps", "publish interval of least seconds per step within the bound"),
)
"""What the run expected of itself when a step was recorded; left out while nothing is measured."""

TOTAL_METRICS: tuple[Metric, ...] = (
    Metric("tokens_total", "tokens", "tokens_sampled until the version was made"),
    Metric("tokens_trained_total", "tokens", "tokens_trained until the version was made"),
    Metric("wall_s", "s", "wall_s until the version was made"),
    Metric("cost_dollars", "USD", "dollars until the version was made"),
)
"""What a policy version had cost when it was made; as x axis they make runs comparable."""

REWARD_LEVELS: tuple[float, ...] = (0.25, 0.5, 0.75, 0.9)
"""Held-out rewards of which a summary says when they were reached."""

SUMMARY_METRICS: tuple[Metric, ...] = (
    *(Metric(figure.name, figure.unit, figure.meaning) for figure in FIGURES),
    *(
        Metric(f"{name}_to_reward_{level:g}", unit, f"{words} the first version that scored {level:g}")
        for level in REWARD_LEVELS
        for name, unit, words in (
            ("steps", "steps", "learner steps until"),
            ("wall_s", "s", "wall_s until"),
            ("tokens", "tokens", "tokens_sampled until"),
            ("tokens_trained", "tokens", "tokens_trained until"),
            ("dollars", "USD", "dollars until"),
        )
    ),
    Metric("workers", "workers", "mean number of workers in a step's batch"),
    Metric("workers_seen", "workers", "different workers in all batches"),
    Metric("worker_share.NAME", "1", "share of the trajectories trained on that the worker NAME sampled"),
)
"""What a run says of itself at its end, each under `summary/`: its figures, and what only MLflow has; a
reward that was never reached and drafting that never was are left out."""

SYSTEM_METRICS: tuple[Metric, ...] = (
    Metric("cpu_utilization_percentage", "%", "all cores of the machine"),
    Metric("system_memory_usage_megabytes", "MB", "memory in use on the machine"),
    Metric("system_memory_usage_percentage", "%", "the same as a share"),
    Metric("run_cpu_percentage", "%", "the run's processes on this machine; 100 is one core"),
    Metric("run_memory_megabytes", "MB", "resident memory of the same processes"),
    Metric("run_processes", "processes", "how many they are"),
    Metric("cpu_seconds_workers", "s", "CPU seconds of the rollout workers here since they started"),
    Metric("cpu_seconds_learner", "s", "the same of the learner"),
    Metric("cpu_seconds_coordinator", "s", "the same of the coordinator"),
    Metric("cpu_seconds_reward", "s", "the same of the reward service, what it starts, and the scorer"),
    Metric("cpu_seconds_prefect", "s", "the same of the Prefect server that the run started"),
    Metric("cpu_seconds_flow", "s", "the same of the flow, with the writers of MLflow and the ledger"),
)
"""What is sampled of the machine while a run lasts, each under `system/`."""

_SPLIT = ".staleness_"


def staleness_metric(name: str, staleness: int) -> str:
    """Return the name of a metric for tokens of one staleness.

    >>> staleness_metric("kl_k3", 2)
    'kl_k3.staleness_2'
    """
    return f"{name}{_SPLIT}{staleness}"


def batch_metrics(batch: BatchRef) -> dict[str, float]:
    """Return the metrics of BATCH_METRICS for one sealed batch, and of DRAFTING_METRICS where it has any."""
    histogram = batch.staleness_histogram
    trajectories = sum(histogram.values())
    weighted = sum(staleness * count for staleness, count in histogram.items())
    rates = {} if batch.drafting is None else drafting_rates(batch.drafting)
    # A client of the door keeps its rewards to itself: nothing was scored here.
    scored = batch.groups or batch.groups_filtered or batch.reward_mean
    means = {"reward_mean": batch.reward_mean, "completion_tokens_mean": batch.completion_tokens_mean}
    return {
        **{f"drafting_{name}": value for name, value in rates.items()},
        **(means if scored else {}),
        "trajectories_failed": float(batch.trajectories_failed),
        "groups_filtered": float(batch.groups_filtered),
        "groups_dropped_stale": float(batch.groups_dropped_stale),
        "staleness_mean": weighted / trajectories if trajectories else 0.0,
        "staleness_max": float(max(histogram, default=0)),
    }


def find_metric(name: str) -> Metric | None:
    """Return the catalogue's entry for a reported name, or None when it has none.

    >>> find_metric("kl_k3.staleness_2").unit
    'nats'
    """
    stem, split, _ = name.partition(_SPLIT)
    plain = *LEARNER_METRICS, *REFERENCE_METRICS, *BATCH_METRICS, *ORDER_METRICS, *DRAFTING_METRICS
    catalogue = STALENESS_METRICS if split else plain
    return next((metric for metric in catalogue if metric.name == stem), None)
