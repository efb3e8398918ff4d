"""Environments and the transforms they need."""

from minerva_torchrl.envs import _opengl  # noqa: F401 (first: it explains why mujoco may fail)
from minerva_torchrl.envs.clipping import ClipAction
from minerva_torchrl.envs.energy import EnergyCost
from minerva_torchrl.envs.failures import EnvironmentFailure, PolicyFailure
from minerva_torchrl.envs.gym import GymnasiumEnv
from minerva_torchrl.envs.make import list_envs, make_env
from minerva_torchrl.envs.staggering import StaggeredEpisodes
from minerva_torchrl.envs.suite import SuiteEnv
from minerva_torchrl.envs.transforms import ReturnStdScaling, RunningObservationNorm

__all__ = [
    "ClipAction",
    "EnergyCost",
    "EnvironmentFailure",
    "GymnasiumEnv",
    "PolicyFailure",
    "ReturnStdScaling",
    "RunningObservationNorm",
    "StaggeredEpisodes",
    "SuiteEnv",
    "list_envs",
    "make_env",
]
