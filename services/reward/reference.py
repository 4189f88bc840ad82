"""Reference: the asking side of the scorer, for who rewards groups."""

from typing import Any

from antiphon.api.scorer import Scorer
from antiphon.net.rpc.calls import Client, asks
from antiphon.net.security.credentials import Credentials
from antiphon.net.wire import SCORER_CALLS
from antiphon.protos import scorer_pb2_grpc


class ScorerClient(Client, Scorer):
    """A scorer at host:port; each call has a deadline of `timeout_s` seconds, and may be repeated."""

    def __init__(
        self, address: str, timeout_s: float, *, channel: Any = None, credentials: Credentials | None = None
    ) -> None:
        super().__init__(scorer_pb2_grpc.ScorerStub, address, credentials, channel)
        self._timeout_s = timeout_s

    score = asks(SCORER_CALLS, Scorer.score)
