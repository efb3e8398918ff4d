from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Iterator
from typing import Any

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ray leaves sockets open for the garbage collector, which comes in any test."""
    for item in items:
        if item.get_closest_marker("ray") is not None:
            item.add_marker(pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"))


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """A Ray cluster on this machine with one node of eight processors, or that of RAY_ADDRESS."""
    ray = pytest.importorskip("ray")
    if "RAY_ADDRESS" in os.environ:
        ray.init(log_to_driver=False, logging_level=logging.ERROR)
        yield None
        ray.shutdown()
        return
    from ray._raylet import Config
    from ray.cluster_utils import Cluster

    from minerva_torchrl.runs.distributed.cluster import own_cluster, patiently

    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    Config.initialize("")  # Ray read them when it was imported
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    cluster = patiently(lambda: Cluster(initialize_head=True, head_node_args=own_cluster(8)))
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    yield cluster
    ray.shutdown()
    cluster.shutdown()
