"""Wire calls: the unary calls of the protos and the methods they stand for, by name."""

from antiphon.protos import coordinator_pb2, learner_pb2
from antiphon.services.coordinator.api import Coordinator
from antiphon.services.learner.api import Learner
from antiphon.services.rpc.unary import unary_calls
from antiphon.services.wire import rewards, status, steps, work  # noqa: F401 - each says how its records travel

CALLS = unary_calls(coordinator_pb2.DESCRIPTOR.services_by_name["Coordinator"], Coordinator)
LEARNER_CALLS = unary_calls(learner_pb2.DESCRIPTOR.services_by_name["Learner"], Learner)
