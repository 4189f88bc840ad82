"""Guard: every call over a network is let in by name, scope and rate, or refused in a sentence.

An RPC that is not in the table below is refused, so a new one cannot be forgotten. A call is let in by its
headers, before its message is read; a message is weighed before it is parsed. A call that is refused reaches
no service and changes nothing but the caller's rate.
"""

import hashlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from antiphon.core.errors import ContractError
from antiphon.core.trust.access_tokens import Denial, Refusal, Scope, TokenClaims, check_access
from antiphon.core.trust.worker_names import name_of_worker
from antiphon.net.security.access_tokens import load_claims
from antiphon.protos import broadcast_pb2, coordinator_pb2, records_pb2, rollout_pb2


@dataclass(frozen=True, slots=True)
class Rate:
    """A steady rate and how far it may be exceeded at once."""

    per_s: float
    """Units per second in the long run."""
    burst: float
    """Most units at one moment."""


class TokenBucket:
    """One caller's bucket; the caller passes the time, in seconds that never go back."""

    def __init__(self, rate: Rate) -> None:
        """Begin full."""
        self._rate = rate
        self._held = rate.burst
        self._at_s: float | None = None

    def take(self, units: float, now: float) -> float:
        """Take `units` and return 0, or take nothing and return the seconds until they are there.

        More than the burst is granted from a full bucket and leaves a debt: the long-run rate
        holds, and no message is too large for ever.

        >>> bucket = TokenBucket(Rate(per_s=2.0, burst=4.0))
        >>> bucket.take(4.0, now=10.0), bucket.take(1.0, now=10.0), bucket.take(1.0, now=10.5)
        (0.0, 0.5, 0.0)
        """
        if self._at_s is not None:
            filled = self._held + max(0.0, now - self._at_s) * self._rate.per_s
            self._held = min(self._rate.burst, filled)
        self._at_s = now if self._at_s is None else max(self._at_s, now)
        needed = min(units, self._rate.burst)
        if self._held < needed:
            return (needed - self._held) / self._rate.per_s
        self._held -= units
        return 0.0

    def owe(self, units: float, now: float) -> float:
        """Take `units` in any case and return the seconds until they are there.

        >>> bucket = TokenBucket(Rate(per_s=2.0, burst=4.0))
        >>> bucket.owe(4.0, now=10.0), bucket.owe(3.0, now=10.0), bucket.owe(1.0, now=12.0)
        (0.0, 1.5, 0.0)
        """
        self.take(0.0, now)
        self._held -= units
        return max(0.0, -self._held / self._rate.per_s)


_BY_SERVICE: dict[str, dict[Scope, str]] = {
    "Coordinator": {
        Scope.LEASE: "Register Work",
        Scope.PULL: "LatestManifest PlanTransfer WorkerKit",
        Scope.ADMIN: "PullForReward SubmitRewards PullTurns SubmitTurns OpenStep OpenEvaluation AwaitStage "
        "CommitStep AnnounceSnapshot SkipStep Pause Finish CommitsAfter Status WatchEvents Revoke Pardon "
        "PullForAudit SubmitAudit Drain NoteOrders RequestSamples AwaitSamples SealClientStep",
    },
    "Broadcast": {Scope.PULL: "GetChunks Where GetBlocks"},
    "Learner": {Scope.ADMIN: "AwaitStep AwaitSnapshot AwaitCall AwaitSaved DropSaved Score Status"},
    "Scorer": {Scope.ADMIN: "Score"},
}
SCOPE_OF: dict[str, Scope] = {
    f"/antiphon.{service}/{method}": scope
    for service, scopes in _BY_SERVICE.items()
    for scope, methods in scopes.items()
    for method in methods.split()
}
"""Full name of each RPC -> the scope that a token needs for it."""
_STREAM = "/antiphon.Coordinator/Work"
_REGISTER = "/antiphon.Coordinator/Register"
WORKER_NAMED_IN: dict[type[Any], str] = {
    rollout_pb2.WorkerHello: "worker_name",
    rollout_pb2.WorkerHeartbeat: "worker_id",
    rollout_pb2.LeaseRequest: "worker_id",
    rollout_pb2.TurnRequest: "worker_id",
    records_pb2.GroupSubmission: "worker_id",
    rollout_pb2.WorkRequest: "",
    rollout_pb2.WorkRequests: "",
    coordinator_pb2.OptionalVersionRequest: "",
    coordinator_pb2.KitRequest: "",
    coordinator_pb2.TransferRequest: "worker_id",
    broadcast_pb2.ChunksRequest: "",
    broadcast_pb2.PlaceRequest: "",
    broadcast_pb2.BlocksRequest: "",
}
"""Each request that a worker may make -> the field with the worker it speaks for; "" where for none."""
_SCOPE_OF_PART = {
    "heartbeat": Scope.LEASE,
    "lease": Scope.LEASE,
    "turn": Scope.SUBMIT,
    "submission": Scope.SUBMIT,
}
"""What each request within a worker's stream needs."""
OPEN_TO_CERTIFICATES = frozenset({"/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"})
"""RPCs for which a certificate is enough."""
CALLS_AT_ONCE = 16
"""Most calls of one worker that have not ended; it needs one for its work and a few for weights."""
LONGEST_WAIT_S = 30.0
"""Longest wait that a refusal names, and for which a message is held back."""
BUCKETS_KEPT = 4096
"""Workers whose rate is remembered; the longest silent are forgotten."""


@dataclass(frozen=True, slots=True)
class GuardLimits:
    """What one worker may ask for."""

    requests: Rate
    payload_bytes: Rate
    registrations: Rate
    """Each one is written to the journal."""
    releases: Rate
    """Leases given back unused; each one is written to the journal twice, with its grant."""
    turns: Rate = Rate(20.0, 40.0)
    """Questions about turns, for each sample that the worker has a lease for: no engine ends turns so fast.
    What is beyond slows the worker's stream down; one that were ended would only ask again."""


DEFAULT_LIMITS = GuardLimits(
    requests=Rate(100.0, 200.0),
    payload_bytes=Rate(8 << 20, 64 << 20),
    registrations=Rate(0.1, 30.0),
    releases=Rate(0.5, 256.0),
)
"""A worker needs a few requests a second; these are far beyond that."""


class Guard:
    """Admits or refuses the calls to one server of one run."""

    def __init__(
        self,
        token_key: bytes,
        run_id: str,
        wall_clock: Callable[[], float],
        clock: Callable[[], float],
        limits: GuardLimits = DEFAULT_LIMITS,
        revoked: Callable[[], Collection[str]] = tuple,
        note_quota: Callable[[str, int], None] = lambda worker_id, max_leases: None,
        places_of: Callable[[str], int] = lambda worker_id: 1,
    ) -> None:
        """Prepare.

        Args:
            token_key: public key that tokens are signed with, 32 bytes.
            run_id: the run that is served.
            wall_clock: Unix seconds; tokens expire by it.
            clock: seconds that never go back; rates are counted by it.
            limits: of each worker.
            revoked: returns the token ids and worker names that count no more.
            note_quota: told the id of each worker that asks for leases, and how many it may hold at the
                same time; the quota is checked where they are granted, since requests wait for that.
            places_of: returns for how many samples a worker, by its id, has leases.
        """
        self._token_key = token_key
        self._run_id = run_id
        self._wall_clock = wall_clock
        self._clock = clock
        self._limits = limits
        self._revoked = revoked
        self._note_quota, self._places_of = note_quota, places_of
        self._known: dict[str, TokenClaims] = {}
        """Digest of a token -> its claims, once the signature was found right."""
        self._meters: dict[str, _Meters] = {}

    def enter(self, method: str, authorization: str, certificate_names: Collection[str]) -> "Caller | None":
        """Return who makes a call, before anything of its message is read.

        None is a call for which a certificate is enough. A caller that was let in must `leave`.

        Args:
            method: full name of the RPC.
            authorization: the header, `Bearer TOKEN`, or "".
            certificate_names: names in the certificate of the connection.

        Raises:
            Refusal: when the call is not let in.
        """
        if method in OPEN_TO_CERTIFICATES:
            return None
        scope = SCOPE_OF.get(method)
        if scope is None:
            raise Refusal(Denial.FORBIDDEN, f"{method} is not served here; use the same version of Antiphon")
        caller = Caller(method, scope, self._claims(authorization), certificate_names)
        self._check_access(caller, scope)
        if not caller.is_admin:
            meters = self._meters_of(caller)
            if meters.calls >= CALLS_AT_ONCE:
                raise _busy(caller, 1.0)
            self._spend(caller, meters.requests, 1.0)
            if method == _REGISTER:
                self._spend(caller, meters.registrations, 1.0)
            meters.calls += 1
        return caller

    def check_bearer(self, authorization: str, scope: Scope, revoked: Collection[str]) -> str:
        """Let in a call over HTTP, which shows a token and no certificate; return whose token it is.

        Raises:
            Refusal: when it is not let in.
        """
        claims = self._claims(authorization)
        check_access(
            claims,
            run_id=self._run_id,
            scope=scope,
            certificate_names=(claims.worker_name,),
            revoked=revoked,
            now=self._wall_clock(),
        )
        return claims.worker_name

    def leave(self, caller: "Caller") -> None:
        """Note that a call has ended."""
        if not caller.is_admin:
            self._meters_of(caller).calls -= 1

    def weigh(self, caller: "Caller", size: int) -> None:
        """Take in the size of a message before it is parsed.

        Raises:
            Refusal: when it is refused.
        """
        if not caller.is_admin:
            self._spend(caller, self._meters_of(caller).payload_bytes, size)

    def admit(self, caller: "Caller", request: Any) -> float:
        """Let a message in, and return the seconds for which it is held back: turns slow their worker down.

        Raises:
            Refusal: when it is refused.
        """
        parts, turns = [request], 0
        if caller.method == _STREAM and request.requests:
            parts = request.requests
            turns = sum(part.HasField("turn") for part in parts)
        if not caller.is_admin:
            # The first message of a call was counted with it.
            more, caller.read = len(parts) - turns - (not caller.read), True
            if more > 0:
                self._spend(caller, self._meters_of(caller).requests, more)
        for part in parts:
            asked, needed = part, caller.scope
            if isinstance(part, rollout_pb2.WorkRequest):
                body = part.WhichOneof("body")
                if body in _SCOPE_OF_PART:
                    asked, needed = getattr(part, body), _SCOPE_OF_PART[body]
            self._check_access(caller, needed)
            if caller.is_admin:
                continue
            kind = type(asked)
            named = WORKER_NAMED_IN.get(kind)
            _check_name(caller.claims, kind, getattr(asked, named) if named else "")
            if kind is rollout_pb2.LeaseRequest:
                self._note_quota(asked.worker_id, caller.claims.max_leases)
            elif kind is rollout_pb2.WorkerHeartbeat and asked.released_leases:
                self._spend(caller, self._meters_of(caller).releases, len(asked.released_leases))
        if not turns or caller.is_admin:
            return 0.0
        worker_id = next(part.turn.worker_id for part in parts if part.HasField("turn"))
        share = turns / max(1, self._places_of(worker_id))
        return min(LONGEST_WAIT_S, self._meters_of(caller).turns.owe(share, self._clock()))

    def _check_access(self, caller: "Caller", scope: Scope) -> None:
        check_access(
            caller.claims,
            run_id=self._run_id,
            scope=scope,
            certificate_names=caller.certificate_names,
            revoked=self._revoked(),
            now=self._wall_clock(),
        )

    def _spend(self, caller: "Caller", bucket: TokenBucket, units: float) -> None:
        if (wait_s := bucket.take(units, self._clock())) > 0.0:
            raise _busy(caller, wait_s)

    def _claims(self, authorization: str) -> TokenClaims:
        kind, _, text = authorization.partition(" ")
        if kind.lower() != "bearer" or not text:
            raise Refusal(
                Denial.UNKNOWN,
                "this call carries no access token; `antiphon invite WORKER --run RUN` makes one",
            )
        digest = hashlib.sha256(text.encode()).hexdigest()
        known = self._known.get(digest)
        if known is not None:
            return known
        try:
            claims = load_claims(text, self._token_key)
        except ContractError as error:
            raise Refusal(Denial.UNKNOWN, str(error)) from None
        if len(self._known) >= BUCKETS_KEPT:
            self._known.clear()
        self._known[digest] = claims
        return claims

    def _meters_of(self, caller: "Caller") -> "_Meters":
        name = caller.claims.worker_name
        meters = self._meters.pop(name, None)
        if meters is None:
            meters = _Meters(self._limits)
            idle = (other for other, known in self._meters.items() if not known.calls)
            if len(self._meters) >= BUCKETS_KEPT and (oldest := next(idle, None)) is not None:
                del self._meters[oldest]
        self._meters[name] = meters
        return meters


@dataclass(slots=True)
class Caller:
    """Who makes a call that was let in, until it ends."""

    method: str
    scope: Scope
    claims: TokenClaims
    certificate_names: Collection[str]
    read: bool = False
    """Whether a message of the call was let in."""

    @property
    def is_admin(self) -> bool:
        return Scope.ADMIN in self.claims.scopes


class _Meters:
    """What one worker has asked for of late."""

    def __init__(self, limits: GuardLimits) -> None:
        self.requests = TokenBucket(limits.requests)
        self.payload_bytes = TokenBucket(limits.payload_bytes)
        self.registrations = TokenBucket(limits.registrations)
        self.releases = TokenBucket(limits.releases)
        self.turns = TokenBucket(limits.turns)
        self.calls = 0
        """Calls that have not ended."""


def _busy(caller: Caller, wait_s: float) -> Refusal:
    name, wait_s = caller.claims.worker_name, min(wait_s, LONGEST_WAIT_S)
    return Refusal(Denial.BUSY, f"worker {name} asks too much at once; come back in {wait_s:.2f} s")


def _check_name(claims: TokenClaims, request: type[Any], said: str) -> None:
    """Check that a worker may make a kind of request that names `said`: it speaks for itself alone."""
    if request not in WORKER_NAMED_IN:
        raise Refusal(Denial.FORBIDDEN, f"a worker's token does not allow {request.__name__}")
    name = name_of_worker(said) if WORKER_NAMED_IN[request] == "worker_id" else said
    if WORKER_NAMED_IN[request] and name != claims.worker_name:
        raise Refusal(
            Denial.FORBIDDEN,
            f"the token is of worker {claims.worker_name}, but the call speaks for {name[:64]!r}",
        )
