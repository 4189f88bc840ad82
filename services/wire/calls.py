"""Wire calls: the unary calls of protos/coordinator.proto and the methods they stand for."""

from antiphon.protos import coordinator_pb2
from antiphon.services.coordinator.api import Coordinator
from antiphon.services.rpc.unary import unary_calls
from antiphon.services.wire import rewards, status, steps, work  # noqa: F401 - each says how its records travel

CALLS = unary_calls(coordinator_pb2.DESCRIPTOR.services_by_name["Coordinator"], Coordinator)
"""By the name of the method."""
