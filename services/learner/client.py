"""Learner over gRPC, the asking side: the same contract over a channel."""

from typing import Any

from antiphon.api.learner import Learner
from antiphon.net.rpc.calls import Client, asks
from antiphon.net.security.credentials import Credentials
from antiphon.net.wire import LEARNER_CALLS
from antiphon.protos import learner_pb2_grpc


class LearnerClient(Client, Learner):
    """A learner at host:port; each call has a deadline of `timeout_s` seconds, on top of what it may wait.

    A call that ran into its deadline may be repeated: the learner joins it with the one under way.
    """

    def __init__(
        self,
        address: str,
        timeout_s: float = 10.0,
        *,
        channel: Any = None,
        credentials: Credentials | None = None,
    ) -> None:
        super().__init__(learner_pb2_grpc.LearnerStub, address, credentials, channel)
        self._timeout_s = timeout_s

    await_step = asks(LEARNER_CALLS, Learner.await_step)
    await_snapshot = asks(LEARNER_CALLS, Learner.await_snapshot)
    await_call = asks(LEARNER_CALLS, Learner.await_call)
    await_saved = asks(LEARNER_CALLS, Learner.await_saved)
    drop_saved = asks(LEARNER_CALLS, Learner.drop_saved)
    score = asks(LEARNER_CALLS, Learner.score)
    status = asks(LEARNER_CALLS, Learner.status)
