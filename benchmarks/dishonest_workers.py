"""Dishonest workers: how surely audits find workers that lie, and how often they wrong honest ones.

A small real model, the production sampler, the production auditor and the production gate. Every kind of
worker does the same leases; each group is audited with the band that is shipped and with one calibrated on
trusted workers. The table says how many groups an audit finds, how many by proof, and how many groups a
newcomer of that kind hands in, and has audited, before it is shut out (median, at the shares of
`core.trust.reputation`). What a worker sampled of a group counts for it alone, not for the one that handed
the group in. Of workers that no audit concerns it says by what they are refused, struck or named.
"""

import asyncio
import copy
import statistics
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from antiphon.api.snapshots import Broadcast
from antiphon.benchmarks.parts.results import benchmark_parser, execute, finish
from antiphon.benchmarks.parts.trust import dishonest_workers as workers
from antiphon.core.checks import check_submission
from antiphon.core.config import RunConfig, build_config
from antiphon.core.coordinator.workers import check_claims
from antiphon.core.dissemination.plan import ORIGIN, Assignment
from antiphon.core.errors import ContractError
from antiphon.core.records import (
    PROTOCOL_VERSION,
    DraftingStatistics,
    FinishReason,
    GroupRewards,
    GroupSubmission,
    GroupToAudit,
    Lease,
    Prompt,
    SampleReward,
    SnapshotManifest,
    Trajectory,
    VersionSpan,
)
from antiphon.core.requests import LeaseRequest, WorkerHeartbeat, WorkerHello
from antiphon.core.trust.audit import NOTHING, Band, SampleStatistics, Sums, audit_group, by_author, calibrate
from antiphon.core.trust.reputation import Standing, quarantine_reason
from antiphon.services.coordinator.run_state_machine import RunStateMachine
from antiphon.services.coordinator.service import CoordinatorService
from antiphon.services.learner.audits.auditor import ROUNDING, Auditor
from antiphon.services.learner.snapshot_model import SnapshotModel
from antiphon.simulator.virtual.disk import RUN_ID, JournalDisk, MemoryJournal, MemoryStore
from antiphon.weights.payload_store import PayloadStore
from antiphon.weights.service import BroadcastService
from antiphon.weights.snapshot import weights_of, write_snapshot
from antiphon.weights.transport import Receiver

GROUP_TOKENS = 8
"""Of each completion of a sound group."""


class Prompts:
    """Prompts without an environment."""

    def prompt(self, split: str, index: int) -> Prompt:
        """Return a prompt of two tokens."""
        return Prompt(f"{split}-0-{index}", (1, 2 + index % 5))


def house_config() -> RunConfig:
    """Return a run in which nothing happens by itself: leases and heartbeats last for weeks."""
    return build_config(
        {
            "run": {"steps": 1000, "seed": 7},
            "environment": {"train_size": 10, "heldout_size": 3},
            "evaluation": {"prompts": 3},
            "loop": {"prompts_per_step": 4, "group_size": 2, "max_staleness": 64},
            "sampling": {"max_tokens": 8},
            "coordinator": {"lease_s": 1e6, "heartbeat_s": 1e6, "payload_retention_steps": 2},
            "broadcast": {"snapshots_kept": 80},
            "services": {"stall_timeout_s": 0.3},
        }
    )


def sound_submission(lease: Lease, worker: str, version: int) -> GroupSubmission:
    """Return a group of a lease as it should be."""
    tokens = np.arange(1, GROUP_TOKENS + 1, dtype=np.int32)
    logprobs = np.full(GROUP_TOKENS, -1.5, dtype=np.float32)
    spans = (VersionSpan(version, 0, GROUP_TOKENS),)
    made = tuple(
        Trajectory(tokens, logprobs, spans, FinishReason.LENGTH, sample_index=index, seed=seed)
        for index, seed in enumerate(lease.seeds)
    )
    drafting = DraftingStatistics(8, 4, 6, 5, 4, 1, 0.1, 0.1, gain=2.0)
    return GroupSubmission(lease.lease_id, lease.group_id, worker, made, 1.0, drafting)


MOST_GROUPS = 64


def extreme_numbers() -> str:
    """Return why a heartbeat is refused whose numbers would be too large for every reply."""
    largest = 2**63 - 1
    try:
        check_claims(WorkerHeartbeat("w-1", 0, None, (), largest, 0.0, 0.0, bytes_fetched=largest), 1)
    except ContractError as error:
        return str(error)
    return ""


async def hangs_the_judge() -> tuple[str, int, int]:
    """Hand in groups none of whose answers can be scored, each beside a group of an honest worker.

    Returns why the worker is out, how many groups it handed in by then, and the strikes of the honest one.
    """
    clock = asyncio.get_running_loop().time
    journal = MemoryJournal(JournalDisk(), lambda: 0.0)
    machine = RunStateMachine(house_config(), RUN_ID, journal, MemoryStore(), Prompts(), clock)
    await machine.start()
    service = CoordinatorService(machine)
    await service.announce_snapshot(SnapshotManifest(RUN_ID, 0, "0" * 64, (), 0, (), ""))
    ids = {}
    for name in ("honest", "hanging"):
        ids[name] = (await service.register(WorkerHello(name, PROTOCOL_VERSION, RUN_ID, 1))).worker_id

    async def hand_in(name: str, failure: str) -> bool:
        reply = await service.lease_group(LeaseRequest(ids[name], 0, 1, 0.0))
        for lease in reply.leases:
            await service.submit_group(sound_submission(lease, ids[name], 0))
            rewards = tuple(SampleReward(index, 0.0, failure) for index in range(len(lease.seeds)))
            await service.submit_rewards([GroupRewards(lease.group_id, rewards)])
        return bool(reply.leases)

    groups = 0
    for step in range(MOST_GROUPS):
        await service.open_step(step)
        await hand_in("honest", "")
        if not await hand_in("hanging", "the scorer gave no reward within 5 s"):
            break
        groups += 1
    standings, reason = machine.state.standings, machine.state.barred("hanging")
    strikes = standings["honest"].strikes if "honest" in standings else 0
    if machine.state.paused_reason:
        reason = ""
    await machine.close()
    return reason, groups, strikes


class _Truncating(BroadcastService):
    """A relay that sends each chunk without its last byte, and one at a time."""

    async def get_chunks(
        self, payload_digest: str, indices: Sequence[int], held_only: bool = False
    ) -> AsyncIterator[tuple[int, bytes]]:
        async for index, piece in super().get_chunks(payload_digest, indices[:1]):
            yield index, piece[:-1]


async def lies_in_a_tree() -> str:
    """Fetch a snapshot from a liar that stands above in a tree, and return by what it is named."""
    with tempfile.TemporaryDirectory() as folder:
        origin, below = PayloadStore(Path(folder) / "origin"), PayloadStore(Path(folder) / "below")
        tensors = {"w": torch.from_numpy(np.arange(1 << 16, dtype=np.int32))}
        manifest = write_snapshot(origin, RUN_ID, 0, weights_of(tensors), 1 << 14)
        (payload,) = manifest.payloads
        incoming, culprits = below.receive(payload), dict[str, str]()
        sources: dict[str, Sequence[Broadcast]] = {
            "liar-1": [_Truncating(origin)],
            ORIGIN: [BroadcastService(origin)],
        }
        planned = Assignment(("liar-1", ORIGIN), (), 2, 1e9)
        await Receiver(incoming, sources, planned, culprits).run()
        assert incoming.held.all(), "the origin has everything"
    return culprits.get("liar-1", "")


BATCH = 16
"""Groups sampled together."""
LONGEST_CAREER = 2000
"""Groups after which a worker counts as never found."""
STEP_GROUPS, AUDIT_LAG = 4, 4
"""Groups of one worker in a training step, and groups that it hands in until an audit is answered."""
MOST_EDITED_AUDITS = 20
"""Largest number of its audited groups until a worker is out that edits one token of each group."""
GIVEN = 10
"""Tokens of each completion that a liar sampled and an honest worker continued."""
MUST_BE_FOUND = dict.fromkeys(
    (
        "wrong model",
        "temperature 0.8",
        "copied results",
        "one edited token",
        "one false logprob",
        "liar's prefix",
    ),
    40,
)
"""Kind of worker -> most groups until a newcomer of it is shut out."""
GATE_VERSION, GATE_NEWEST = 2, 4
"""Versions that are published are those up to the newest one that this divides."""


class ShippedModel(SnapshotModel):
    """Every version is the shipped model."""

    def fill(self, version: int) -> bool:
        """Hold what is held."""
        return True


class ScoringAuditor(Auditor):
    """Scores by the shipped model."""

    def __init__(self, config: RunConfig, model: Any) -> None:
        self._config = config
        self._held = ShippedModel(config, None, model)  # type: ignore[arg-type]


Row = dict[str, Any]
Groups = list[list[SampleStatistics]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, then one JSON object."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--groups", type=int, default=48, help="groups of each kind (default 48)")
    parser.add_argument("--honest", type=int, default=2000, help="groups of the honest worker (default 2000)")
    parser.add_argument("--careers", type=int, default=200, help="of a newcomer, of each kind (default 200)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    sampler = workers.load_sampler(getattr(torch, options.dtype))
    auditor = ScoringAuditor(workers.trust_config(options.dtype), sampler.model)
    trusted = audited(auditor, workers.honest(sampler), workers.trust_leases(64, first=100_000))
    band = calibrate([sample for group in trusted for sample in group])
    print(f"shipped band {Band()}\ncalibrated band {band}\n")
    honest = audited(auditor, workers.honest(sampler), workers.trust_leases(options.honest))
    prefixed, continuing = continued_groups(auditor, sampler, options.groups)
    played = options.careers
    rows = [row("honest", honest, band, played), row("liar's prefix", prefixed, band, played)]
    for shown in rows:
        print(shown, flush=True)
    for kind, make in kinds(sampler, options.dtype).items():
        groups = audited(auditor, make, workers.trust_leases(options.groups))
        rows.append(row(kind, groups, band, played))
        print(rows[-1], flush=True)
    hanging, hanging_groups, hanging_strikes = asyncio.run(hangs_the_judge())
    gate = at_the_gate(sampler) | {
        "extreme numbers": extreme_numbers(),
        "groups that hang the judge": hanging,
        "liar in a tree": asyncio.run(lies_in_a_tree()),
    }
    for kind, sentence in gate.items():
        print(f"{kind:24s} {sentence or 'TAKEN'}")
    edited = next(entry for entry in rows if entry["kind"] == "one edited token")
    struck = hanging_strikes + sum(
        findings_against(groups, found) for groups in (honest, continuing) for found in (Band(), band)
    )
    result = {
        "dtype": options.dtype,
        "behaviours": len(rows) - 1 + len(gate),
        "reached_learner": sum(entry["groups_trained"] or 0.0 for entry in rows[1:]),
        "never_out": [entry["kind"] for entry in rows[1:] if entry["groups_until_out"] is None],
        "honest_struck": struck,
        "hanging_groups_until_out": hanging_groups,
        "edited_token_audits": edited["audits_until_out"],
        "honest_groups": len(honest) + len(continuing),
        "rows": rows,
        "gate": gate,
    }
    return finish(result, record=options.record, violated=violations(gate, struck), at_size=late(rows))


def violations(gate: dict[str, str], struck: int) -> list[str]:
    """Return a sentence for every promise about audits and the gate that is broken.

    A finding about an honest worker counts against it like any other, so there must be none.
    """
    found = [f"{struck} findings against honest workers, not 0"] if struck else []
    return found + [f"{kind}: taken at the gate" for kind, sentence in gate.items() if not sentence]


def late(rows: Sequence[Row]) -> list[str]:
    """Return a sentence for every worker that cheats grossly and is not shut out soon.

    One edited token in a group is gross.
    """
    found = []
    for entry in rows:
        kind, out, audits = entry["kind"], entry["groups_until_out"], entry["audits_until_out"]
        most = MUST_BE_FOUND.get(kind)
        if most is not None and (out is None or out > most):
            found.append(f"{kind}: out after {out} groups, not {most}")
        if kind == "one edited token" and (audits is None or audits > MOST_EDITED_AUDITS):
            found.append(f"{kind}: out after {audits} audited groups, not {MOST_EDITED_AUDITS}")
    return found


def kinds(sampler: workers.TinySampler, dtype: str) -> dict[str, workers.Make]:
    """Return the dishonest workers that audits must find, by kind."""
    (lease,) = workers.trust_leases(1, first=200_000)
    rounding = ROUNDING["inverse_cdf"][dtype]
    halved = copy.deepcopy(sampler.model).to(torch.bfloat16).to(sampler.model.dtype)
    found = {
        "one edited token": workers.one_edited(sampler, 1),
        "one false logprob": workers.one_false_logprob(sampler, 1),
        "boundary picker": workers.boundary_picked(sampler, 0.9 * rounding),
        "wrong tokens (1 in 20)": workers.wrong_tokens(sampler, 0.05, 1),
        "wrong model": workers.honest(sampler, workers.disturbed(sampler.model, 0.1, 1)),
        "temperature 0.8": workers.wrong_temperature(sampler, 0.8),
        "temperature 0.95": workers.wrong_temperature(sampler, 0.95),
        "int4 weights": workers.honest(sampler, workers.quantised(sampler.model, 4)),
        "int8 weights": workers.honest(sampler, workers.quantised(sampler.model, 8)),
        "copied results": workers.copied(sampler),
        "cherry-picked (best of 4)": workers.cherry_picked(sampler, 4),
        "fake logprobs": workers.fake_logprobs(sampler),
    }
    if dtype == "float32":
        found["bfloat16 weights"] = workers.honest(sampler, halved)
    for rate in (2e-4, 1e-5, 1e-6):
        found[f"one step stale, lr {rate:g}"] = workers.honest(sampler, workers.stepped(sampler, lease, rate))
    return found


def audited(auditor: Auditor, make: workers.Make, leases: Sequence[Lease]) -> Groups:
    """Have a worker do the leases and return what the auditor finds, group by group."""
    found = []
    for start in range(0, len(leases), BATCH):
        part = leases[start : start + BATCH]
        for lease, group in zip(part, make(part), strict=True):
            submission = GroupSubmission(lease.lease_id, lease.group_id, "w-1", group, 1.0)
            found.append(auditor.examine(GroupToAudit(submission, lease.prompt_token_ids, lease.sampling)))
    return found


def continued_groups(auditor: Auditor, sampler: workers.TinySampler, count: int) -> tuple[Groups, Groups]:
    """Have an honest worker continue and hand in what a liar began with seeds of its own.

    Returns what the auditor finds about the liar's tokens, and about those of the honest worker.
    """
    lied, honest = [], []
    leases, liar = workers.trust_leases(count, first=300_000), workers.cherry_picked(sampler, 1)
    for start in range(0, count, BATCH):
        part = leases[start : start + BATCH]
        begun = liar(part)
        whole = workers.continued(sampler, begun, GIVEN)(part)
        for lease, first, group in zip(part, begun, whole, strict=True):
            submission = GroupSubmission(lease.lease_id, lease.group_id, "honest-1", group, 1.0)
            authors = workers.authors_of(first, GIVEN, "liar-1")
            prompt = lease.prompt_token_ids
            samples = auditor.examine(GroupToAudit(submission, prompt, lease.sampling, authors=authors))
            own = by_author(samples, "honest-1")
            honest.append(own["honest-1"])
            lied.append(own["liar-1"])
    return lied, honest


def findings_against(groups: Groups, band: Band) -> int:
    """Return how many of a worker's groups have a finding, all audited one after the other."""
    count, earlier = 0, NOTHING
    for group in groups:
        count += bool(audit_group(group, band, earlier))
        earlier = earlier.plus(Sums.of(group))
    return count


def at_the_gate(sampler: workers.TinySampler) -> dict[str, str]:
    """Return why the gate refuses each kind that needs no audit; "" for one that it takes."""
    (lease,) = workers.trust_leases(1)
    ((first, *rest),) = workers.honest(sampler)([lease])
    logprobs, length, long = first.logprobs.copy(), first.token_ids.size, workers.MAX_TOKENS + 1
    logprobs[0] = np.nan
    changes: dict[str, dict[str, object]] = {
        "NaN": {"logprobs": logprobs},
        "oversize": {
            "token_ids": np.full(long, 5, dtype=np.int32),
            "logprobs": np.zeros(long, dtype=np.float32),
        },
        "replay of an old group": {"seed": first.seed + 1},
        "version of the future": {"spans": (VersionSpan(GATE_NEWEST + 1, 0, length),)},
        "unpublished version": {"spans": (VersionSpan(GATE_NEWEST - 1, 0, length),)},
        "falling versions": {"spans": (VersionSpan(GATE_NEWEST, 0, 1), VersionSpan(0, 1, length))},
    }
    published = range(0, GATE_NEWEST + 1, GATE_VERSION)

    def refusal(**changed: object) -> str:
        group = (replace(first, **changed), *rest)  # type: ignore[arg-type]
        submission = GroupSubmission(lease.lease_id, lease.group_id, "w-1", group, 1.0)
        try:
            check_submission(submission, lease.seeds, workers.MAX_TOKENS, None, GATE_NEWEST, published)
        except ContractError as error:
            return str(error)
        return ""

    return {kind: refusal(**changed) for kind, changed in changes.items()}


def row(kind: str, groups: Groups, band: Band, careers: int) -> Row:
    """Check the groups of one kind with both bands, and play through this many careers.

    Returns:
        `missed`, `near`: shares of its tokens that are not where their seeds put them, and that are just
        outside their intervals or further; `gross`: tokens a group that no rounding explains; `drift`: mean
        |auditor - worker| logprob, nats a token; `found`, `proven`: shares of its groups with a finding, and
        with one that is proof by itself, by the shipped band (`found_calibrated` by the other);
        `groups_until_out`: that a newcomer hands in before it is shut out, median, None where not within
        2,000; `audits_until_out` those that were audited, `groups_trained` those in sealed batches by then.
    """
    samples = [sample for group in groups for sample in group]
    sums, count = Sums.of(samples), len(groups)
    shipped = [audit_group(group, Band()) for group in groups]
    handed_in, audits = career(groups, Band(), careers) or (None, None)
    return {
        "kind": kind,
        "groups": count,
        "missed": sums.missed / sums.tokens,
        "near": sums.near / sums.tokens,
        "gross": sums.gross / count,
        "drift": sum(sample.drift * sample.tokens for sample in samples) / sums.tokens,
        "found": sum(map(bool, shipped)) / count,
        "proven": sum(any(finding.certain for finding in found) for found in shipped) / count,
        "found_calibrated": sum(bool(audit_group(group, band)) for group in groups) / count,
        "groups_until_out": handed_in,
        "audits_until_out": audits,
        "groups_trained": handed_in and (handed_in + AUDIT_LAG) // STEP_GROUPS * STEP_GROUPS,
        "groups_until_out_calibrated": (career(groups, band, careers) or (None,))[0],
    }


def career(groups: Groups, band: Band, careers: int) -> tuple[float, float] | None:
    """Return the medians of the groups that a newcomer hands in, and has audited, before it is shut out."""
    rng = np.random.default_rng(0)
    alone = [audit_group(group, band) for group in groups]
    if not any(alone) and not audit_group(
        groups[0], band, Sums.of([s for group in groups * 50 for s in group])
    ):
        return None
    played = [_career(groups, band, rng) for _ in range(careers)]
    handed_in, audits = (float(statistics.median(column)) for column in zip(*played, strict=True))
    return None if handed_in >= LONGEST_CAREER else (handed_in, audits)


def _career(groups: Groups, band: Band, rng: np.random.Generator) -> tuple[int, int]:
    standing, audits = Standing(), 0
    for number in range(1, LONGEST_CAREER):
        if rng.random() >= standing.share:
            continue
        group, audits = groups[int(rng.integers(len(groups)))], audits + 1
        findings, sums = audit_group(group, band, standing.sums), Sums.of(group)
        if not findings:
            standing = standing.pass_group(sums)
            continue
        standing = standing.strike(audited=True, gross=sums.gross)
        if quarantine_reason(standing, any(finding.certain for finding in findings), "found"):
            return number, audits
    return LONGEST_CAREER, audits


if __name__ == "__main__":
    execute(main)
