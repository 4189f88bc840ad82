"""A journal without a place for long: every process stays, and the run ends as if nothing had been."""

from collections.abc import Callable

import pytest

from antiphon.core.errors import UnavailableError
from antiphon.services.coordinator.journal.store import JournalStore, WriteBatch, Written
from antiphon.simulator.campaign import mute_logs
from antiphon.simulator.scenario import Scenario
from antiphon.simulator.virtual.disk import JournalDisk
from antiphon.simulator.world import World

STALL_S = 60.0


class FullDisk(JournalDisk):
    """A disk that takes nothing now and then."""

    full: Callable[[], bool]
    refused = 0

    def open(self) -> JournalStore:
        store = super().open()
        write = store.write

        def write_if_there_is_space(batch: WriteBatch) -> Written:
            if self.full():
                self.refused += 1
                raise UnavailableError("no space is left for the journal")
            return write(batch)

        store.write = write_if_there_is_space  # type: ignore[method-assign]
        return store


@pytest.mark.parametrize(
    ("mode", "begin_s", "outage_s"),
    [("elastic", 5.0, 900.0), ("elastic", 8.0, 240.0), ("fixed", 2.0, 240.0), ("fixed", 8.0, 240.0)],
)
def test_an_outage_of_the_journal_ends_no_process(
    mode: str, begin_s: float, outage_s: float, logs_as_they_were: None
) -> None:
    mute_logs()
    scenario = Scenario(
        run={
            "run": {"steps": 6},
            "loop": {"mode": mode},
            "services": {"stall_timeout_s": STALL_S},
        },
        limit_s=2 * outage_s,
    )
    disk = FullDisk()
    world = World(scenario, 3, [], disk)

    def full() -> bool:
        if now_full := begin_s <= world.loop.time() < begin_s + outage_s:
            world._injector.trouble(0.0)  # that nothing happens meanwhile is no fault of the run
        return now_full

    disk.full = full
    outcome = world.run()
    assert not outcome.violations
    assert outcome.restarts == 0 and disk.refused > outage_s / 2
    assert len(outcome.weights) == scenario.run_config().run.steps
    assert outcome.virtual_s > outage_s
