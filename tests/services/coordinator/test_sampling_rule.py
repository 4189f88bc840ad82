"""The first worker's device decides how a run's tokens are chosen; everyone after it is told."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from antiphon.core.config import RunConfig, parse_config
from antiphon.core.records import GroupSubmission, GroupToAudit, SamplingParameters
from antiphon.core.requests import LeaseRequest
from antiphon.protos import records_pb2
from antiphon.services.coordinator.audit_queue import AuditQueue
from tests.support.light_parties import hello, sample_lease, served
from tests.support.loop_model import light_manifest, make_config
from tests.support.messages import read, written

CONFIG = make_config(steps=4, max_staleness=3, filter_="none", prompts_per_step=10)


def changed(section: str, **fields: object) -> RunConfig:
    return CONFIG.model_copy(update={section: getattr(CONFIG, section).model_copy(update=fields)})


@pytest.mark.parametrize(
    ("asked", "devices", "rule"),
    [
        ("auto", ("cpu", "gpu"), "inverse_cdf"),
        ("auto", ("gpu", "cpu"), "gumbel"),
        ("auto", ("", "gpu"), "inverse_cdf"),
        ("gumbel", ("cpu", "cpu"), "gumbel"),
        ("inverse_cdf", ("gpu", "gpu"), "inverse_cdf"),
    ],
)
def test_the_first_worker_decides_for_all_and_for_good(
    tmp_path: Path, asked: str, devices: tuple[str, str], rule: str
) -> None:
    config = changed("sampling", rule=asked)

    async def run() -> None:
        for number, device in enumerate(devices):  # the second one after a restart of the coordinator
            async with served(config, tmp_path) as site, asyncio.timeout(60.0):
                welcome = await site.client().register(replace(hello(f"w{number}"), device=device))
                assert parse_config(welcome.config_yaml).sampling.rule == rule
                assert site.service.state_machine.state.sampling_rule == rule

    asyncio.run(run())


def test_evaluation_is_sampled_and_audited_by_its_own_keys(tmp_path: Path) -> None:
    config = changed("evaluation", temperature=0.0, top_k=5)

    async def run() -> None:
        async with served(config, tmp_path) as site, asyncio.timeout(60.0):
            client, state_machine = site.client(), site.service.state_machine
            await client.announce_snapshot(light_manifest(0))
            await client.open_step(0)
            await client.open_evaluation(0)
            worker_id = (await client.register(replace(hello(), device="gpu"))).worker_id
            leases = (await client.lease_group(LeaseRequest(worker_id, 0, 16, 5.0))).leases
            heldout = [lease for lease in leases if lease.prompt_key.startswith("heldout")]
            assert heldout and len(heldout) < len(leases)
            wanted = {}
            queues = [AuditQueue(state_machine, bytes([number] * 32)) for number in range(12)]
            for lease in leases:
                own = config.evaluation if lease in heldout else None
                whole = config.sampling.parameters()
                expected = whole if own is None else own.parameters(config.sampling)
                assert lease.sampling == wanted.setdefault(lease.group_id, expected)
                for queue in queues:  # each draws other groups
                    state_machine.run(queue.choose(sample_lease(lease, worker_id, 0)))
            found = [group for queue in queues for group in await queue.pull(100, 0.0)]
            assert len({group.sampling for group in found}) == 2
            for group in found:
                assert group.rule == "gumbel" and group.sampling == wanted[group.submission.group_id]

    asyncio.run(run())


def test_the_wire_carries_what_an_audit_needs() -> None:
    group = GroupToAudit(
        GroupSubmission("l", "g", "w", (), 0.1), (1, 2), SamplingParameters(0.5, 3, 0.9, 7), "gumbel"
    )
    message = written(group, records_pb2.GroupToAudit)
    again = read(records_pb2.GroupToAudit.FromString(message.SerializeToString()))
    assert (again.sampling, again.rule, again.prompt_token_ids) == (group.sampling, "gumbel", (1, 2))
