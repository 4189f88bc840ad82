"""Dishonest workers: how surely audits find workers that lie, and how often they wrong honest ones.

A small real model, the production sampler and the production auditor. Every kind of worker does
the same leases; each group is audited with the band that is shipped and with one calibrated on
trusted workers. The table says how many groups an audit finds, how many by proof, and how many
groups a newcomer of that kind hands in before it is shut out (median, at the shares of
`core.trust.reputation`). Kinds that the gate refuses or that leases bound are in tests/services.
"""

import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch

from antiphon.benchmarks.parts.results import benchmark_parser, finish
from antiphon.benchmarks.parts.trust import dishonest_workers as workers
from antiphon.core.records import GroupSubmission, GroupToAudit, Lease
from antiphon.core.trust.audit import Band, SampleStatistics, audit_group, calibrate
from antiphon.core.trust.reputation import Standing, quarantine_reason
from antiphon.services.learner.auditor import Auditor

BATCH = 16
"""Groups sampled together."""
CAREERS = 200
"""Careers of a newcomer that are played through."""
LONGEST_CAREER = 2000
"""Groups after which a worker counts as never found."""
HONEST_BAR = 0.01
"""Largest share of an honest worker's groups with a finding."""
GROSS = {"wrong model": 40, "temperature 0.8": 40, "copied results": 40}
"""Kind of worker that changes most of its tokens -> most groups until a newcomer of it is shut out."""
GATE = {
    "NaN": "refused at the gate: logprobs must be finite",
    "oversize": "refused before it is held: message and token limits",
    "replay of old leases": "refused or given its old answer: lease ids, holders and digests",
    "slow loris": "bounded: handshake, stream and lease deadlines",
    "fake version": "refused: protocol number, weights digest, versions that exist",
}
"""The kinds that no audit is needed for."""


class ScoringAuditor(Auditor):
    """Every version is the shipped model."""

    def _fill(self, version: int) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Row:
    """What came of one kind of worker."""

    kind: str
    groups: int
    missed: float
    """Share of its tokens that are not where their seeds put them."""
    drift: float
    """Mean |auditor - worker| logprob, nats a token."""
    found: float
    """Share of audited groups with a finding, shipped band."""
    proven: float
    """Share of audited groups that are proof by themselves, shipped band."""
    found_calibrated: float
    """Share with a finding, band calibrated on trusted workers."""
    groups_until_out: float | None
    """Groups a newcomer hands in before it is shut out, median; None: not within 2,000."""
    groups_until_out_calibrated: float | None


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, then one JSON object."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--groups", type=int, default=48, help="groups of each kind (default 48)")
    parser.add_argument("--honest", type=int, default=800, help="groups of the honest worker (default 800)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    sampler = workers.load_sampler(getattr(torch, options.dtype))
    auditor = ScoringAuditor(workers.trust_config(options.dtype), None, sampler.model)  # type: ignore[arg-type]
    trusted = [audited(auditor, workers.honest(sampler), workers.trust_leases(64, first=100_000))]
    band = calibrate([sample for groups in trusted for group in groups for sample in group])
    print(f"shipped band {Band()}\ncalibrated band {band}\n")
    rows = []
    for kind, make in kinds(sampler).items():
        count = options.honest if kind == "honest" else options.groups
        rows.append(row(kind, audited(auditor, make, workers.trust_leases(count)), band))
        show(rows[-1])
    for kind, words in GATE.items():
        print(f"{kind:24s} {words}")
    honest = rows[0]
    result = {
        "dtype": options.dtype,
        "false_positives": honest.found,
        "false_positives_calibrated": honest.found_calibrated,
        "honest_groups": honest.groups,
        "rows": [asdict(entry) for entry in rows],
        "gate": GATE,
    }
    return finish(result, record=options.record, violated=violations(rows))


def violations(rows: Sequence[Row]) -> list[str]:
    """Return a sentence for every promise about audits that the table breaks.

    A finding about an honest worker counts against it like any other, so there must be (almost) none;
    workers that cheat grossly must be shut out at once.
    """
    honest, *others = rows
    found = [
        f"{share:.2%} of an honest worker's groups are found with the {band} band, not {HONEST_BAR:.0%}"
        for band, share in (("shipped", honest.found), ("calibrated", honest.found_calibrated))
        if share > HONEST_BAR
    ]
    for kind, out in ((other.kind, other.groups_until_out) for other in others):
        if kind in GROSS and (out is None or out > GROSS[kind]):
            found.append(f"{kind}: out after {out} groups, not {GROSS[kind]}")
    return found


def kinds(sampler: workers.TinySampler) -> dict[str, workers.Make]:
    """Return the workers by kind, the honest one first."""
    (lease,) = workers.trust_leases(1, first=200_000)
    found = {
        "honest": workers.honest(sampler),
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
    for rate in (2e-4, 1e-5, 1e-6):
        found[f"one step stale, lr {rate:g}"] = workers.honest(sampler, workers.stepped(sampler, lease, rate))
    return found


def audited(auditor: Auditor, make: workers.Make, leases: Sequence[Lease]) -> list[list[SampleStatistics]]:
    """Have a worker do the leases and return what the auditor finds, group by group."""
    found = []
    for start in range(0, len(leases), BATCH):
        part = leases[start : start + BATCH]
        for lease, group in zip(part, make(part), strict=True):
            submission = GroupSubmission(lease.lease_id, lease.group_id, "w-1", group, 1.0)
            found.append(auditor.examine(GroupToAudit(submission, lease.prompt.token_ids, lease.sampling)))
    return found


def row(kind: str, groups: list[list[SampleStatistics]], band: Band) -> Row:
    """Check the groups of one kind with both bands."""
    samples = [sample for group in groups for sample in group]
    tokens = sum(sample.tokens for sample in samples)
    shipped = [audit_group(group, Band()) for group in groups]
    calibrated = [audit_group(group, band) for group in groups]
    return Row(
        kind=kind,
        groups=len(groups),
        missed=sum(sample.missed for sample in samples) / tokens,
        drift=sum(sample.drift * sample.tokens for sample in samples) / tokens,
        found=sum(map(bool, shipped)) / len(groups),
        proven=sum(any(finding.certain for finding in found) for found in shipped) / len(groups),
        found_calibrated=sum(map(bool, calibrated)) / len(groups),
        groups_until_out=career(groups, Band()),
        groups_until_out_calibrated=career(groups, band),
    )


def career(groups: list[list[SampleStatistics]], band: Band) -> float | None:
    """Return the median of the groups that a newcomer hands in before it is shut out."""
    rng = np.random.default_rng(0)
    alone = [audit_group(group, band) for group in groups]
    if not any(alone) and not audit_group(groups[0], band, _sums(groups * 50)):
        return None
    lengths = [_career(groups, band, rng) for _ in range(CAREERS)]
    median = statistics.median(lengths)
    return None if median >= LONGEST_CAREER else median


def _career(groups: list[list[SampleStatistics]], band: Band, rng: np.random.Generator) -> int:
    standing = Standing()
    for number in range(1, LONGEST_CAREER):
        if rng.random() >= standing.share:
            continue
        group = groups[int(rng.integers(len(groups)))]
        findings = audit_group(group, band, (standing.tokens, standing.missed))
        if not findings:
            standing = standing.pass_group(*_sums([group]))
            continue
        standing = standing.strike(audited=True)
        if quarantine_reason(standing, any(finding.certain for finding in findings), "found"):
            return number
    return LONGEST_CAREER


def _sums(groups: list[list[SampleStatistics]]) -> tuple[int, int]:
    samples = [sample for group in groups for sample in group]
    return sum(sample.tokens for sample in samples), sum(sample.missed for sample in samples)


def show(found: Row) -> None:
    """Print a line of the table."""

    def until(value: float | None) -> str:
        return "   -" if value is None else f"{value:4.0f}"

    print(
        f"{found.kind:24s} missed {found.missed:8.2%}  drift {found.drift:8.1e}  found {found.found:6.1%} "
        f"proven {found.proven:6.1%}  out after {until(found.groups_until_out)} groups   "
        f"calibrated: found {found.found_calibrated:6.1%}, out after "
        f"{until(found.groups_until_out_calibrated)}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
