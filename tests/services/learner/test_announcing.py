"""What is announced comes from the learner that lives, however late the words of another one arrive."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from antiphon.core.errors import UnavailableError
from antiphon.services.learner import service


class Said:
    """A coordinator that names an origin, or is away."""

    def __init__(self, *origins: str | None) -> None:
        self.left = list(origins)
        self.over = asyncio.Event()

    async def latest_manifest(self, version: int | None) -> Any:
        if not self.left:
            self.over.set()
            return None
        origin = self.left.pop(0)
        if origin is None:
            raise UnavailableError("away")
        return SimpleNamespace(version=3, origin=origin)


def test_a_late_announcement_of_another_learner_is_put_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "LOOK_S", 0.0)
    repeated = []

    class Learner(service.LearnerService):
        def __init__(self, coordinator: Said) -> None:
            self.origin, self._coordinator = "new:1", coordinator  # type: ignore[assignment]

        async def publish_again(self, all_of_them: bool = False) -> None:
            repeated.append(all_of_them)

    async def act() -> None:
        said = Said("new:1", "old:1", None, "new:1", "old:1")
        task = asyncio.create_task(Learner(said).keep_announced())
        async with asyncio.timeout(30.0):
            await said.over.wait()
        task.cancel()

    asyncio.run(act())
    assert repeated == [True, True]
