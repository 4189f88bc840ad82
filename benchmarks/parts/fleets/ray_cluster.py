"""A Ray cluster on this machine: nodes that come, and go without notice."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

STORE_BYTES = 80 << 20
"""Of each node, for objects that nobody makes."""


class RayCluster:
    """A head that places no worker, and nodes that do."""

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self.address: str = cluster.address
        self.nodes: list[Any] = []
        """That place workers, the oldest first."""

    def add_node(self, cpus: int = 2) -> Any:
        """Add a node and return it."""
        self.nodes.append(self._cluster.add_node(num_cpus=cpus, object_store_memory=STORE_BYTES))
        return self.nodes[-1]

    def lose_node(self, node: Any) -> None:
        """End a node's processes without notice, as a reclaimed machine does."""
        self.nodes.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)


@contextmanager
def ray_cluster(nodes: int = 1) -> Iterator[RayCluster]:
    """Start a cluster and end all of it; Ray must be installed."""
    # A process of Ray per processor is a second each; nothing is told to anybody.
    os.environ.update(RAY_enable_worker_prestart="0", RAY_USAGE_STATS_ENABLED="0")
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE_BYTES}
    handler = signal.getsignal(signal.SIGTERM)
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        made = RayCluster(cluster)
        for _ in range(nodes):
            made.add_node()
        yield made
    finally:
        cluster.shutdown()
        signal.signal(signal.SIGTERM, handler)  # which each of Ray's nodes takes, in this process too
