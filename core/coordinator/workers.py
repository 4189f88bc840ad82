"""Workers: who takes part, what their heartbeats mean, whose leases end, and who is shut out."""

import dataclasses
from collections.abc import Collection, Sequence

from antiphon.core.checks import LONGEST_TEXT, MOST_PLACES, check_number
from antiphon.core.config import dump_config, with_rule
from antiphon.core.coordinator.consequences import begin_again, check_of, lose, lose_named, strike, take_back
from antiphon.core.coordinator.fleet import Member
from antiphon.core.coordinator.loop_state import (
    LONGEST_REASON,
    NO_REASON,
    Decision,
    LoopState,
    News,
)
from antiphon.core.dissemination.plan import ORIGIN
from antiphon.core.dissemination.reports import DeliveryRecord, NetworkReport, check_address, check_report
from antiphon.core.errors import ContractError, UnavailableError
from antiphon.core.loop import acceptance
from antiphon.core.loop import events as e
from antiphon.core.records import PROTOCOL_VERSION, KeptProgress
from antiphon.core.requests import HeartbeatReply, WorkerHeartbeat, WorkerHello, WorkerWelcome
from antiphon.core.sampling_config import Rule, decide_rule
from antiphon.core.status import OrderState, WorkerOrder
from antiphon.core.trust.worker_names import WORKER_NAME, name_of_worker

OTHER_SOURCES = (ORIGIN, "Lattica", "object store")
"""Sources of a delivery that are no workers."""


def register(
    loop: LoopState, hello: WorkerHello, now: float, wall_s: float, learner_key: bytes
) -> Decision[WorkerWelcome]:
    """Admit a worker; one of the same name that is not lost is replaced, unless it is another living process.

    Raises:
        ContractError: another protocol version, another run, a name that is invalid, or a device that its
            class does not promise.
        UnavailableError: while another process of that name lives.
    """
    config, name = loop.config, hello.worker_name
    if hello.protocol_version != PROTOCOL_VERSION:
        raise ContractError(
            f"worker {name!r} speaks protocol version {hello.protocol_version}, but this "
            f"coordinator speaks {PROTOCOL_VERSION}; install the same version of Antiphon on both"
        )
    if hello.run_id and hello.run_id != loop.run_id:
        raise ContractError(
            f"worker {name!r} means to serve run {hello.run_id!r}, but this coordinator "
            f"serves {loop.run_id!r}; give the address of the right coordinator"
        )
    if not WORKER_NAME.fullmatch(name):
        raise ContractError(
            f"worker name {name[:80]!r} cannot be used; take up to 64 letters, digits, "
            "dots, dashes and underscores"
        )
    check_number(f"concurrent_groups of worker {name}", hello.concurrent_groups, MOST_PLACES)
    if hello.relay_address:
        check_address(hello.relay_address)
    if barred := loop.run.barred(name):
        raise ContractError(f"worker {name} was excluded from this run: {barred}")
    for other in loop.fleet.named(name):
        if other.streams and hello.instance and other.instance not in ("", hello.instance):
            raise UnavailableError(
                f"worker {name} takes part already, as another process; each needs a bundle of its own, "
                "which `antiphon invite` makes"
            )
    yield from _check_device(loop, hello, now, wall_s)
    yield from lose_named(loop, name, "another worker of this name registered", now)
    worker_id = f"{name}-{loop.run.registrations.get(name, 0) + 1}"
    places = hello.concurrent_groups or config.rollout.concurrent_groups
    of_class, usd = config.price_of(name, wall_s)
    rule = _rule(loop, hello)
    yield e.WorkerRegistered(worker_id, name, places, now, rule, usd, of_class)
    member = loop.fleet.get(worker_id)
    if member is not None:
        member.relay_address, member.instance = hello.relay_address, hello.instance
    if loop.limits is not None:  # each turn has what stood before it as its prompt
        config = config.model_copy(
            update={"rollout": config.rollout.model_copy(update={"prefix_caching": True})}
        )
    return WorkerWelcome(
        worker_id=worker_id,
        run_id=loop.run_id,
        config_yaml=dump_config(with_rule(config, rule)),
        heartbeat_s=config.coordinator.heartbeat_s,
        learner_key=learner_key,
    )


def _check_device(loop: LoopState, hello: WorkerHello, now: float, wall_s: float) -> Decision[None]:
    """Turn away a worker without the device that its class promises; its order, if there is one, ends so."""
    name = hello.worker_name
    one = loop.config.provisioning.class_of(name)
    if one is None or one.device == "any" or one.device == hello.device:
        return
    reason = f"provisioning.pool: {one.name} promises a {one.device.upper()}, and {name} found none there"
    if (order := loop.run.orders.get(name)) is not None and order.state is OrderState.UP:
        stopping = dataclasses.replace(order, state=OrderState.STOPPING, reason=reason)
        yield from note_orders(loop, [stopping], now, wall_s)
    raise ContractError(reason)


def _rule(loop: LoopState, hello: WorkerHello) -> Rule:
    """Return the run's rule, which the first worker's device decides where the configuration does not."""
    if loop.run.registrations:  # journals from before there was a choice name none
        return "gumbel" if loop.run.sampling_rule == "gumbel" else "inverse_cdf"
    return decide_rule(loop.config.sampling.rule, hello.device)


def heartbeat(
    loop: LoopState, heartbeat: WorkerHeartbeat, now: float, wall_s: float, blocked: bool
) -> Decision[tuple[HeartbeatReply, bool]]:
    """Extend the worker's leases, keep what they made so far, and say what to give up.

    The lease of another worker is left as it is, and a group with progress that no completion can have
    begins again; both are a strike, and so are numbers that cannot be. `blocked`: nothing can be recorded
    now, so that what was finished cannot be handed in.

    Returns:
        The reply, and whether it must be true after a crash too.

    Raises:
        ContractError: when a number cannot be, or the weights that sample were never announced.
    """
    run, leases, member = loop.run, loop.leases, loop.fleet.get(heartbeat.worker_id)
    if member is None:
        if now - loop.begun_s < loop.config.coordinator.lease_s:
            # A coordinator that was just started knows its leases, and it lives. Later it must register.
            leases.extend(heartbeat.lease_ids, heartbeat.worker_id, now)
        return HeartbeatReply(False, (), run.newest_version, run.finished), False
    try:
        check_claims(heartbeat, loop.config.loop.group_size)
    except ContractError as error:
        yield from strike(loop, member.name, "", "refused", str(error), now)
        raise
    _check_weights(loop, heartbeat)
    _, usd = loop.config.price_of(member.name, wall_s)
    if usd != member.usd_per_hour:
        member.usd_per_hour = usd
        yield e.WorkerPriced(member.worker_id, usd, now)
    gone = leases.extend(heartbeat.lease_ids, heartbeat.worker_id, now)
    foreign = leases.foreign(_named(heartbeat), heartbeat.worker_id)
    heartbeat = _without(heartbeat, foreign) if foreign else heartbeat
    kept, gained, refused = yield from _take_progress(loop, heartbeat, now)
    if loop.fleet.take_heartbeat(member, heartbeat, now):
        yield e.WorkerLoaded(member.worker_id, member.held_version or 0)
    if heartbeat.network is not None:
        yield from _take_network(loop, member, heartbeat.network)
    wanted = loop.news_for(member)
    before = leases.engines.most_leases(member.worker_id)
    waits = any(turn.asked[0] in heartbeat.lease_ids for turn in loop.turns.values())
    hung = [] if blocked else leases.engine_hangs(heartbeat, gained, waits, now)
    seconds = leases.engines.stands_still_s(member.worker_id)
    why = (
        f"its engine brought no token for {seconds:.1f} s" if seconds else "its turns were answered too late"
    )
    if not hung and before is not None and leases.engines.most_leases(member.worker_id) != before:
        yield News()
    for held in hung:
        yield from take_back(loop, held, why, now, hung=seconds > 0)
    for lease_id in heartbeat.released_leases:
        if (released := leases.get(lease_id)) is not None:
            yield from take_back(loop, released, "handed over by its worker", now)
    if heartbeat.leaving:
        yield from lose(loop, member, "it left in order", now)
    for held in foreign.values():
        reason = f"it used the lease of group {held.group_id}, which {name_of_worker(held.worker_id)} holds"
        yield from strike(loop, member.name, held.group_id, "refused", reason, now)
    for group_id, worker_id, reason in refused.values():
        yield from strike(loop, name_of_worker(worker_id), group_id, "refused", reason, now)
    reply = HeartbeatReply(
        known=True,
        cancelled_leases=(*gone, *(held.lease_id for held in hung), *refused),
        newest_version=run.newest_version,
        run_finished=run.finished,
        kept=kept,
        next_s=member.pause_s,
        leave=member.draining,
        wanted_version=wanted,
    )
    # A worker that gave leases up or leaves ends with the answer.
    return reply, bool(heartbeat.released_leases or heartbeat.leaving or foreign or refused)


def _take_network(loop: LoopState, member: Member, report: NetworkReport) -> Decision[None]:
    announced = tuple(
        _known_sources(loop, record) for record in report.deliveries if record.version in loop.run.snapshots
    )
    report = dataclasses.replace(report, deliveries=announced)
    for delivery in loop.fleet.transfers.take(member.worker_id, report):
        yield e.SnapshotDelivered(**dataclasses.asdict(delivery))


def _known_sources(loop: LoopState, record: DeliveryRecord) -> DeliveryRecord:
    """Leave out sources that never were: the journal keeps what is reported for ever."""

    def known(source: str) -> bool:
        name, _, number = source.rpartition("-")
        last = loop.run.registrations.get(name, 0)
        if source in OTHER_SOURCES:
            return True
        return number.isdecimal() and number == str(int(number)) and 0 < int(number) <= last

    return dataclasses.replace(
        record,
        bytes_from={one: count for one, count in record.bytes_from.items() if known(one)},
        best_bytes_per_s={one: rate for one, rate in record.best_bytes_per_s.items() if known(one)},
        culprits={one: what for one, what in record.culprits.items() if known(one)},
    )


def _check_weights(loop: LoopState, heartbeat: WorkerHeartbeat) -> None:
    acceptance.check_held_version(loop.run, heartbeat.worker_id, heartbeat.held_version)
    if heartbeat.held_version is None or heartbeat.weights_digest is None:
        return
    announced = loop.run.snapshots.get(heartbeat.held_version)
    if announced != heartbeat.weights_digest:
        raise ContractError(
            f"worker {heartbeat.worker_id} holds version {heartbeat.held_version} with weights "
            f"{heartbeat.weights_digest[:12]}, but {(announced or 'nothing')[:12]} was announced for it; "
            "load the announced snapshot again"
        )


def _take_progress(
    loop: LoopState, heartbeat: WorkerHeartbeat, now: float
) -> Decision[tuple[tuple[KeptProgress, ...], bool, dict[str, tuple[str, str, str]]]]:
    """Keep the pieces of running leases; those of ended ones are of no use, and not an error.

    Returns:
        What is kept now; whether there was something new; and by id the leases that were taken back for
        a piece that cannot be, each with (group id, worker that sampled it, why).
    """
    kept, gained, refused, partials = [], False, {}, loop.leases.partial_groups
    for progress in heartbeat.progress:
        held = loop.leases.get(progress.lease_id)
        group = None if held is None else loop.run.groups.get(held.group_id)
        if held is None or group is None:
            continue
        before, check = sum(partials.kept(progress.lease_id)), check_of(loop, group)
        try:
            for piece in progress.pieces:
                check(piece)
        except ContractError as error:
            known = partials.snapshot(progress.lease_id)
            false = yield from begin_again(loop, group, progress.lease_id, known, now)
            refused[progress.lease_id] = (group.group_id, *(false or (heartbeat.worker_id, str(error))))
            continue
        gained |= loop.leases.take_progress(heartbeat.worker_id, progress)
        after = partials.kept(progress.lease_id)
        loop.fleet.work_done += max(0, sum(after) - before)
        kept.append(KeptProgress(progress.lease_id, after))
    return tuple(kept), gained, refused


def note_orders(loop: LoopState, orders: Sequence[WorkerOrder], now: float, wall_s: float) -> Decision[None]:
    """Note how orders of the pool's workers stand; one that is known so changes nothing.

    Raises:
        ContractError: for a worker that is none of the pool's.
    """
    for order in orders:
        if loop.config.provisioning.class_of(order.worker) is None:
            raise ContractError(f"{order.worker[:80]!r} is no worker of provisioning.pool")
        for name in ("up_s", "left_s"):
            check_number(f"{name} of an order", getattr(order, name))
    for order in orders:
        if loop.run.orders.get(order.worker) != order:
            of_class, usd = loop.config.price_of(order.worker, wall_s)
            told = order.instance[:LONGEST_REASON], order.reason[:LONGEST_REASON], order.up_s, order.left_s
            yield e.WorkerOrdered(order.worker, order.state, *told, now, usd, of_class)


def revoke(loop: LoopState, name: str, reason: str, now: float) -> Decision[None]:
    """Exclude a token or a worker, which loses its leases at once.

    Raises:
        ContractError: for a name that none can have.
    """
    if not WORKER_NAME.fullmatch(name):
        raise ContractError(
            f"{name[:80]!r} is neither a token's id nor a worker's name; see `antiphon status`"
        )
    if name not in loop.run.revoked:
        reason = reason[:LONGEST_REASON] or NO_REASON
        yield e.AccessRevoked(name, reason)
        yield from lose_named(loop, name, f"excluded: {reason}", now)


def pardon(loop: LoopState, name: str, reason: str) -> Decision[None]:
    """Let a worker that was shut out take part again."""
    if loop.run.barred(name):
        yield e.WorkerPardoned(name, reason[:LONGEST_REASON] or NO_REASON)


def check_claims(heartbeat: WorkerHeartbeat, group_size: int) -> None:
    """Refuse what no worker can have measured: much is decided and shown by these numbers.

    A place for a group of `group_size` samples takes as many held-out prompts, each with a lease of its own.

    Raises:
        ContractError: naming the number.
    """
    for name in ("tokens_generated", "bytes_fetched", "busy_s", "uptime_s", "swap_failing_s"):
        check_number(f"{name} of a heartbeat", getattr(heartbeat, name))
    most = MOST_PLACES * group_size
    for name in ("lease_ids", "released_leases", "progress"):
        check_number(f"the length of {name} of a heartbeat", len(getattr(heartbeat, name)), most)
    check_number("the length of numerics of a heartbeat", len(heartbeat.numerics), LONGEST_TEXT)
    missing = ",".join(heartbeat.missing_abilities)
    check_number("the length of missing_abilities of a heartbeat", len(missing), LONGEST_TEXT)
    if not all(name.isidentifier() for name in heartbeat.missing_abilities):
        raise ContractError("missing_abilities of a heartbeat has something else than names of abilities")
    if heartbeat.network is not None:
        check_report(heartbeat.network)


def _named(heartbeat: WorkerHeartbeat) -> tuple[str, ...]:
    """Return the leases that a heartbeat speaks of."""
    reported = (progress.lease_id for progress in heartbeat.progress)
    return (*heartbeat.lease_ids, *heartbeat.released_leases, *reported)


def _without(heartbeat: WorkerHeartbeat, lease_ids: Collection[str]) -> WorkerHeartbeat:
    """Return a heartbeat that says nothing of some leases."""
    return dataclasses.replace(
        heartbeat,
        lease_ids=tuple(i for i in heartbeat.lease_ids if i not in lease_ids),
        released_leases=tuple(i for i in heartbeat.released_leases if i not in lease_ids),
        progress=tuple(piece for piece in heartbeat.progress if piece.lease_id not in lease_ids),
    )
