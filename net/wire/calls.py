"""Wire calls: the unary calls of the protos and the methods they stand for, by name."""

from antiphon.api.coordinator import Coordinator
from antiphon.api.learner import Learner
from antiphon.net.rpc.unary import unary_calls
from antiphon.net.wire import rewards, status, steps, work  # noqa: F401 - each says how its records travel
from antiphon.protos import coordinator_pb2, learner_pb2

CALLS = unary_calls(coordinator_pb2.DESCRIPTOR.services_by_name["Coordinator"], Coordinator)
LEARNER_CALLS = unary_calls(learner_pb2.DESCRIPTOR.services_by_name["Learner"], Learner)
