"""The connection to a Ray cluster, and whether it has what a run asks for."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import ray
import torch
from ray._private.utils import psutil  # which Ray brings along

from minerva_torchrl.algorithms import RunConfig
from minerva_torchrl.algorithms.ray_config import parse_address
from minerva_torchrl.runs.strict import ConfigError
from minerva_torchrl.text import one_line

__all__ = ["Cluster", "own_cluster", "patiently", "resources"]

_SECONDS_TO_ANSWER = 3.0
_TIMES_TO_START = 3
# How two sides of gRPC begin, which Ray uses: HTTP/2 and its settings, of kind 4.
_SETTINGS = b"\0\0\0\4\0\0\0\0\0"
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _SETTINGS
# Processors for the replay service, and its memory for objects that are on their way.
_REPLAY_CPUS = 1.0
_OBJECT_STORE = 512 * 1024**2


def own_cluster(cpus: int) -> dict[str, Any]:
    """What Ray starts a cluster on this machine with, for one run or some.

    Args:
        cpus (int): processors that it gives out, which may be more than there are.
    """
    return {
        "num_cpus": cpus,
        "include_dashboard": False,
        "object_store_memory": _OBJECT_STORE,
        "_system_config": {
            # As important as the process that was started. By default anything else that runs here
            # would come first, and start-up could take many minutes.
            "worker_niceness": 0,
            # A busy machine is not a lost one. Processes that have ended are noticed without it.
            "health_check_timeout_ms": 60_000,
        },
    }


def patiently(start: Callable[[], Any]) -> Any:
    """Start processes of Ray, again if they took too long.

    Ray gives a node half a minute to start. On a busy machine that is not always enough.

    Args:
        start (callable): starts them.

    Returns:
        What it returned.
    """
    for _ in range(_TIMES_TO_START - 1):
        before = set(_children())
        try:
            return start()
        except Exception as error:
            if "timed out during startup" not in str(error):
                raise
        for process in set(_children()) - before:  # which Ray would only end with this process
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    return start()


def _children() -> Any:
    return psutil.Process().children(recursive=True)


def resources(config: RunConfig) -> dict[str, float]:
    """What a run asks of a cluster, by Ray's names.

    Args:
        config (RunConfig): settings of a run on Ray.
    """
    settings = config.ray
    cpus = settings.collectors * settings.cpus_per_collector
    gpus = settings.collectors * settings.gpus_per_collector
    if config.shared_batch is not None:
        cpus += settings.learners * settings.cpus_per_learner + _REPLAY_CPUS
        gpus += settings.learners * settings.gpus_per_learner
    return {"CPU": cpus, "GPU": gpus}


class Cluster:
    """A connection, made when this is called and ended by :meth:`close`.

    A process that is connected already keeps its connection, also in the end.

    Args:
        config (RunConfig): settings of a run on Ray.

    Raises:
        ConfigError: in one line, if there is no answer or the cluster is too small.
    """

    def __init__(self, config: RunConfig) -> None:
        address = config.ray.address
        needed = resources(config)
        if address is None:
            _check(needed, {"CPU": float("inf"), "GPU": torch.cuda.device_count()}, "this machine")
        else:
            _check_answers(address)
        self._is_ours = not ray.is_initialized()
        if self._is_ours:
            self._connect(config, needed)
        else:
            _check_same(address)
        try:
            _check(needed, ray.cluster_resources(), "the cluster")
        except ConfigError:
            self.close()
            raise

    def _connect(self, config: RunConfig, needed: dict[str, float]) -> None:
        address = config.ray.address
        arguments: dict[str, Any] = {"address": address}
        if address is None:
            # Whoever reaches its ports could run code, so Ray lets a cluster of its own ask for a
            # token. By default that would be one in the user's home.
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
            arguments = {
                "address": "local",  # not one that happens to run here
                "_node_ip_address": "127.0.0.1",
                **own_cluster(max(os.cpu_count() or 1, int(needed["CPU"]) + 1)),
            }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # FutureWarnings of Ray's about itself
            connect = partial(
                ray.init,
                log_to_driver=False,
                configure_logging=True,
                logging_level=logging.ERROR,
                **arguments,
            )
            try:
                patiently(connect)
            except Exception as error:  # of another class for each reason
                what = "Ray can't be started here" if address is None else f"ray.address={address}"
                raise ConfigError([f"{what}: {one_line(error)}"]) from None

    def close(self) -> None:
        """End the connection, and with it all processes of the run. Can be called again."""
        if self._is_ours and ray.is_initialized():
            ray.shutdown()


def _check_same(address: str | None) -> None:
    """Raise if the process is connected to another cluster than the one that is asked for."""
    place = None if address is None else parse_address(address)
    if place is None:
        return
    here = ray.get_runtime_context().gcs_address
    if (socket.gethostbyname(place[0]), place[1]) != parse_address(here):
        raise ConfigError([f"ray.address={address}: this process is connected to {here} already."])


def _check_answers(address: str) -> None:
    """Raise unless something at ``host:port`` speaks as Ray does. Ray would try for minutes."""
    place = parse_address(address)
    if place is None:
        return
    try:
        with socket.create_connection(place, timeout=_SECONDS_TO_ANSWER) as connection:
            if os.environ.get("RAY_USE_TLS", "0") != "0":
                return
            connection.sendall(_HELLO)
            answer = connection.recv(len(_SETTINGS))
    except OSError as error:
        reason = error.strerror or str(error) or type(error).__name__
        raise ConfigError([f"ray.address={address}: nothing answers there ({reason})."]) from None
    if answer[3:4] != _SETTINGS[3:4]:
        raise ConfigError(
            [
                f"ray.address={address}: what answers there is not Ray. The port is that of "
                "`ray start --head`, 6379 by default."
            ]
        )


def _check(needed: dict[str, float], available: Any, where: str) -> None:
    titles = {"CPU": "processors", "GPU": "GPUs"}
    for name, amount in needed.items():
        if amount > available.get(name, 0):
            raise ConfigError(
                [
                    f"the section ray asks for {amount:g} {titles[name]}, but {where} has "
                    f"{available.get(name, 0):g}."
                ]
            )
