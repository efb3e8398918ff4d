"""The pull requests: what is in each."""

from __future__ import annotations

from dataclasses import dataclass, field

from config_nodes import mpo_edits, vmpo_edits
from edits import Edit, exported, smoke_test
from port import needed_by

REFERENCE = "docs/source/reference"


@dataclass(frozen=True)
class PullRequest:
    """One of the series."""

    branch: str
    title: str
    roots: tuple[str, ...] = ()
    """Our modules, below ``objectives``; what they import comes with the first that needs it."""
    tests: dict[str, str] = field(default_factory=dict)
    """Our test files, below ``tests/objectives``, and their names in TorchRL's."""
    helpers: dict[str, str] = field(default_factory=dict)
    """Modules that the tests import, like ``tests``."""
    files: tuple[str, ...] = ()
    """Files in ``docs/upstream/files``, which are in TorchRL's form already."""
    edits: tuple[Edit, ...] = ()


def see_also(module: str, config: str) -> Edit:
    """A loss names its configuration."""
    sentence = f"    See also :class:`~torchrl.trainers.algorithms.configs.{config}`.\n\n"
    arguments = "    Args:\n        actor_network ("
    return Edit(f"torchrl/objectives/{module}.py", arguments, sentence, before=True)


SERIES = [
    PullRequest(
        "1-retrace-functional",
        "[Feature] Retrace and other off-policy corrected returns as functions",
        ("value.functional",),
        {"value/test_value_functional.py": "test_off_policy_functional.py"},
    ),
    PullRequest(
        "2-retrace",
        "[Feature] Retrace value estimator",
        ("value.retrace",),
        {
            "value/test_retrace.py": "test_retrace.py",
            "value/test_retrace_estimator.py": "test_retrace_estimator.py",
        },
        helpers={"value/retrace_problem.py": "_retrace_common.py"},
        edits=(
            Edit(
                "torchrl/objectives/value/__init__.py",
                "\n__all__ = [\n",
                "from .retrace import Retrace\n",
                before=True,
            ),
            Edit(
                "torchrl/objectives/value/__init__.py", '    "MultiAgentGAE",\n', '    "Retrace",\n'
            ),
            Edit(f"{REFERENCE}/objectives_common.rst", "    VTrace\n", "    Retrace\n"),
        ),
    ),
    PullRequest(
        "3-mpo-functional",
        "[Feature] Dual variables and the functions of MPO",
        ("functional", "duals"),
        {
            "test_functional.py": "test_mpo_e_step.py",
            "test_functional_m_step.py": "test_mpo_m_step.py",
            "test_temperature_constraint.py": "test_mpo_duals.py",
        },
    ),
    PullRequest(
        "4-mpo",
        "[Feature] MPOLoss",
        ("mpo",),
        {"test_mpo.py": "test_mpo.py", "test_mpo_maths.py": "test_mpo_maths.py"},
        helpers={"base.py": "_mpo_common.py", "mpo_problem.py": "_mpo_problem.py"},
        files=("test/objectives/test_mpo_loss_module.py",),
        edits=(
            *exported("mpo", "MPOLoss", "multiagent", "OnlineDTLoss"),
            *mpo_edits(),
            see_also("mpo", "MPOLossConfig"),
            Edit(f"{REFERENCE}/objectives_actorcritic.rst", "    DDPGLoss\n", "    MPOLoss\n"),
        ),
    ),
    PullRequest(
        "5-mpo-script",
        "[Algorithm] MPO script and benchmark",
        files=(
            "sota-implementations/mpo/mpo.py",
            "sota-implementations/mpo/utils.py",
            "sota-implementations/mpo/config.yaml",
            "sota-check/run_mpo.sh",
            "benchmarks/test_mpo_benchmark.py",
        ),
        edits=smoke_test(
            "mpo",
            "collector.total_frames=48 collector.warmup_frames=16 collector.frames_per_batch=16 "
            "optim.batch_size=16 replay_buffer.size=120 env.name=Pendulum-v1 "
            "env.max_episode_steps=20 logger.eval_iter=32 logger.backend=",
        ),
    ),
    PullRequest(
        "6-vmpo",
        "[Feature] VMPOLoss",
        ("vmpo",),
        {"test_vmpo.py": "test_vmpo.py", "test_vmpo_maths.py": "test_vmpo_maths.py"},
        helpers={"vmpo_problem.py": "_vmpo_problem.py"},
        files=("test/objectives/test_vmpo_loss_module.py",),
        edits=(
            *exported("vmpo", "VMPOLoss", "world_model_loss", "ValueEstimators"),
            *vmpo_edits(),
            see_also("vmpo", "VMPOLossConfig"),
            Edit(f"{REFERENCE}/objectives_policy.rst", "    KLPENPPOLoss\n", "    VMPOLoss\n"),
        ),
    ),
    PullRequest(
        "7-vmpo-script",
        "[Algorithm] V-MPO script and benchmark",
        files=(
            "sota-implementations/vmpo/vmpo.py",
            "sota-implementations/vmpo/utils.py",
            "sota-implementations/vmpo/config.yaml",
            "sota-check/run_vmpo.sh",
            "benchmarks/test_vmpo_benchmark.py",
        ),
        edits=smoke_test(
            "vmpo",
            "collector.total_frames=64 collector.frames_per_batch=32 optim.mini_batch_size=16 "
            "optim.epochs=2 env.name=Pendulum-v1 env.max_episode_steps=20 "
            "logger.eval_iter=32 logger.backend=",
        ),
    ),
]


def modules_of(pull: PullRequest) -> set[str]:
    """Our modules that a pull request brings."""
    before = SERIES[: SERIES.index(pull)]
    there = needed_by(tuple(root for earlier in before for root in earlier.roots))
    return needed_by(pull.roots) - there
