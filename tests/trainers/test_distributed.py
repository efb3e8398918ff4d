"""Updates of two processes with half a batch each, on TorchRL's own distributed learner.

All cases run in one pair of processes. With the same noise they end where one process with the
whole batch does, and after every update the two have the same bits.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor
from torch import distributed as dist
from torch import multiprocessing as mp
from torchrl.trainers._distributed import _DDPProcessGroup
from torchrl.trainers._execution import _Learner

from minerva_torchrl import MPOLoss
from minerva_torchrl.trainers import make_target_updater
from tests.objectives import base, vmpo_problem
from tests.objectives.vmpo_problem import NUM_ACTIONS
from tests.trainers.problem import (
    assert_identical,
    differs,
    make_mpo_stepper,
    make_vmpo_stepper,
    spoil,
)

PROCESSES = 2
UPDATES = 4
MASK, REWARD = ("collector", "mask"), ("next", "reward")


@dataclass
class Case:
    """Updates with one loss and one stepper.

    ``entries`` names what the data has, beyond transitions or rollouts with ends at random places:

    - ``terminated``: all ends are in the first half, which in every other update has nothing else
    - ``masked``: most steps of the second half, and in every other update all of them, are padding
    - ``weighted``: priorities, or restarting and importance weights
    - ``not_finite``: the second half of the second batch has a number that is not finite
    - ``overflow``: it has an error whose square is not finite, while its gradient is
    - ``late``: it has a critic's target that is not finite, which one minibatch finds
    """

    loss: dict[str, Any] = field(default_factory=dict)
    stepper: dict[str, Any] = field(default_factory=dict)
    entries: tuple[str, ...] = ()
    fused: bool = False
    estimator: Any = None
    discrete: bool = False


SOLVE, LEARN = {"temperature_update": "solve"}, {"temperature_update": "gradient"}
DUAL_FIRST: dict[str, Any] = {"dual_order": "dual_first"}
TWO_STEPS: dict[str, Any] = {"num_policy_steps": 2}

MPO = {
    "plain": Case(),
    "fused": Case(fused=True),
    "terminated": Case(entries=("terminated",)),
    "masked": Case(entries=("masked",)),
    "weighted": Case(entries=("weighted",)),
    "solve": Case(SOLVE, entries=("terminated", "masked")),
    "both": Case({"policy_states": "both"}, entries=("terminated", "masked", "weighted")),
    "sum": Case({"reduction": "sum"}, entries=("masked",)),
    "weighted-sum": Case({"reduction": "sum"}, entries=("weighted",)),
    "ensemble": Case({"num_qvalue_nets": 2, "policy_states": "current"}),
    "retrace": Case({"sequence_steps": "first"}, estimator="retrace"),
    "relative": Case({"alpha_update": "relative"}, entries=("terminated", "masked")),
    "discrete": Case(SOLVE, entries=("terminated",), discrete=True),
    "dual_first": Case(stepper=DUAL_FIRST, entries=("terminated",)),
    "steps": Case(stepper=TWO_STEPS, entries=("masked",)),
    "dual_first-steps": Case(SOLVE, DUAL_FIRST | TWO_STEPS, ("weighted",)),
    "not_finite": Case(entries=("not_finite",)),
    "not_finite-solve-fused": Case(SOLVE, entries=("not_finite",), fused=True),
    "not_finite-dual_first": Case(stepper=DUAL_FIRST | TWO_STEPS, entries=("not_finite",)),
}
VMPO = {
    "plain": Case(),
    "learn": Case(LEARN, fused=True),
    "masked": Case(entries=("masked",)),
    "masked-selected": Case(LEARN | {"kl_samples": "selected"}, entries=("masked",)),
    "weighted": Case(entries=("weighted",)),
    "sum": Case({"reduction": "sum"}, {"lr_scaling": "1/M"}, ("masked",)),
    "target": Case({"old_policy": "target"}),
    "relative": Case({"alpha_update": "relative"}, entries=("masked",)),
    "discrete": Case({"clip_value": 0.2}, discrete=True),
    "dual_first": Case(LEARN, DUAL_FIRST, ("weighted",)),
    "not_finite": Case(entries=("not_finite",)),
    "not_finite-dual_first-fused": Case(LEARN, DUAL_FIRST, ("not_finite",), fused=True),
    "overflow": Case(entries=("overflow",)),
    "overflow-fused": Case(LEARN, entries=("overflow",), fused=True),
}
# Each process draws minibatches of its own, so that one process can't do the same.
MINIBATCHES = {
    "plain": Case(stepper={"minibatch_size": 4, "num_policy_steps": 5}, entries=("masked",)),
    "dual_first": Case(LEARN, {"minibatch_size": 3, "num_policy_steps": 4} | DUAL_FIRST),
    "not_finite": Case(stepper={"minibatch_size": 4}, entries=("not_finite",), fused=True),
    "late": Case(stepper={"minibatch_size": 2, "num_policy_steps": 5}, entries=("late",)),
}
CASES = {
    f"{group}-{name}": case
    for group, cases in (("mpo", MPO), ("vmpo", VMPO), ("minibatches", MINIBATCHES))
    for name, case in cases.items()
}
WHOLE_BATCHES = [name for name in CASES if not name.startswith("minibatches")]
SKIPPING = [name for name in CASES if "not_finite" in name or "overflow" in name]


# Problems ----------------------------------------------------------------------------------------


def half(batch: TensorDict, rank: int | None) -> TensorDict:
    """The part of a process; everything without one."""
    return batch if rank is None else batch.chunk(PROCESSES, 0)[rank].clone()


class SharedNoise:
    """The part of a process of what one process would draw."""

    def __init__(self, rank: int | None) -> None:
        self.rank, self.generator = rank, torch.Generator().manual_seed(1)

    def __call__(self, num_samples: int, like: Tensor) -> Tensor:
        length, *rest = like.shape
        length = length if self.rank is None else PROCESSES * length
        shape = (num_samples, length, *rest)
        draw = torch.randn(shape, generator=self.generator, dtype=like.dtype)
        return draw if self.rank is None else draw.chunk(PROCESSES, 1)[self.rank]


def make_mpo_loss(case: Case) -> Any:
    torch.manual_seed(0)
    actor, critic = base.make_actor(), base.make_critic()
    if case.discrete:
        actor = vmpo_problem.make_actor("categorical")
        network = base.make_mlp(base.OBSERVATION_DIM, NUM_ACTIONS)
        critic = TensorDictModule(network, ["observation"], ["action_value"])
    loss = MPOLoss(actor, critic, num_action_samples=5, **case.loss)
    return loss.make_value_estimator(case.estimator, gamma=0.9).double()


def make_mpo_batch(case: Case, seed: int) -> TensorDict:
    batch = (8, 3) if case.estimator is not None else (8,)
    data = base.make_transitions(*batch, seed=seed, dtype=torch.float64)
    if case.discrete:
        data["action"] = torch.randint(NUM_ACTIONS, batch)
    if "terminated" in case.entries:
        end = torch.zeros_like(data["next", "done"])
        end[: 4 if seed % 2 else 3] = True
        data["next", "terminated"], data["next", "done"] = end, end.clone()
    if "weighted" in case.entries:
        data["priority_weight"] = torch.linspace(0.1, 2.0, 8).double()
    return data


def make_vmpo_loss(case: Case) -> Any:
    kind = "categorical" if case.discrete else "normal"
    return vmpo_problem.make_loss(kind, **case.loss).double()


def make_vmpo_batch(case: Case, seed: int) -> TensorDict:
    kind = "categorical" if case.discrete else "normal"
    data = vmpo_problem.make_rollout(kind, 4, 5, seed=seed, dtype=torch.float64)
    if "weighted" in case.entries:
        vmpo_problem.with_advantage(data, seed)
        vmpo_problem.with_weights(data, "restarting_weight", "importance_weight")
    if {"overflow", "late"} & set(case.entries):
        vmpo_problem.with_advantage(data, seed)
    return data


def make_batch(name: str, seed: int) -> TensorDict:
    """The whole batch of an update."""
    case = CASES[name]
    data = (make_mpo_batch if name.startswith("mpo") else make_vmpo_batch)(case, seed)
    if "masked" in case.entries:
        data[MASK] = torch.arange(data.numel()).reshape(data.shape) % 3 > 0
        data[MASK][len(data) // 2 :] = False
        data[MASK].view(-1)[-1] = seed % 2 == 0
    if seed == 1 and "not_finite" in case.entries:
        data[len(data) // 2 :] = spoil(data[len(data) // 2 :], REWARD, math.nan)
    if seed == 1 and "overflow" in case.entries:
        data["value_target"].view(-1)[-1] = 1.5e154
    if seed == 1 and "late" in case.entries:
        data["value_target"].view(-1)[-1] = math.nan
    return data


class Batches:
    """A replay buffer that has batches in store."""

    def __init__(self, batches: list[TensorDict]) -> None:
        self.batches = iter(batches)

    def sample(self, batch_size: int) -> TensorDict:
        return next(self.batches)


# Runs --------------------------------------------------------------------------------------------


def run(name: str, rank: int | None = None, group: Any = None) -> dict[str, Any]:
    """The state after each update, and for V-MPO the first E-step."""
    case = CASES[name]
    is_mpo = name.startswith("mpo")
    loss = (make_mpo_loss if is_mpo else make_vmpo_loss)(case)
    stepper = (make_mpo_stepper if is_mpo else make_vmpo_stepper)(
        loss, case.stepper, fused=case.fused
    )
    has_target = is_mpo or case.loss.get("old_policy") == "target"
    updater = make_target_updater(loss, period=3) if has_target else None
    if is_mpo and not case.discrete:
        loss.policy._draw_noise = SharedNoise(rank)
    batches = [half(make_batch(name, seed), rank) for seed in range(UPDATES)]
    learner = _Learner(
        loss_module=loss,
        replay_buffer=Batches([batch.clone() for batch in batches]),
        local_batch_size=len(batches[0]),
        optimizer=None,
        optimization_stepper=stepper,
        target_net_updater=updater,
        process_group=group,
    ).initialize()
    torch.manual_seed(0 if rank is None else rank)  # for the order of minibatches
    states = []
    for i in range(UPDATES):
        learner.step(1, round_id=i + 1)
        state = {"loss": dict(loss.state_dict()), "stepper": stepper.state_dict()}
        state["stepper"].pop("updates")  # an update that is left out is counted
        states.append(TensorDict(flatten(state)).clone().to_dict())
    result: dict[str, Any] = {"states": states, "e_step": {}}
    if not is_mpo:
        data, metrics = loss.e_step(batches[0])
        names = ("policy_weight", "kl_weight", "selected", "mask", "dual", "kl")
        result["e_step"] = {name: getattr(data.get("e_step"), name) for name in names}
        result["e_step_metrics"] = metrics | {"temperature": loss.temperature().detach()}
    return result


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """All tensors and numbers of nested containers by their path."""
    if isinstance(tree, Tensor):
        return {prefix: tree}
    if isinstance(tree, dict):
        tree = list(tree.items())
    elif isinstance(tree, (list, tuple)):
        tree = list(enumerate(tree))
    else:
        return {} if tree is None else {prefix: torch.tensor(tree)}
    return {k: v for name, part in tree for k, v in flatten(part, f"{prefix}/{name}").items()}


def work(rank: int, directory: str) -> None:
    """All cases in one of the processes."""
    warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")
    torch.set_num_threads(1)
    group = _DDPProcessGroup.create(
        rank=rank,
        local_rank=0,
        world_size=PROCESSES,
        store=dist.FileStore(f"{directory}/store", PROCESSES),
        timeout=60,
    )
    results = {name: run(name, rank, group) for name in CASES}
    torch.save(results, f"{directory}/{rank}.pt")
    group.close()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What both processes came to, by case."""
    directory: Path = tmp_path_factory.mktemp("processes")
    mp.spawn(work, args=(str(directory),), nprocs=PROCESSES)
    return [torch.load(directory / f"{rank}.pt") for rank in range(PROCESSES)]


# Tests -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_processes_have_the_same_bits_after_every_update(ranks: Any, name: str) -> None:
    first, second = (rank[name]["states"] for rank in ranks)
    assert_identical(first, second)
    assert all(value.isfinite().all() for state in first for value in state.values())


@cache
def alone(name: str) -> dict[str, Any]:
    """What one process with the whole batch comes to."""
    return run(name)


@pytest.mark.parametrize("name", WHOLE_BATCHES)
def test_two_halves_are_the_whole(ranks: Any, name: str) -> None:
    """Parameters, targets, duals, the optimisers' moments and the counters."""
    for actual, expected in zip(ranks[0][name]["states"], alone(name)["states"], strict=True):
        assert actual.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(
                actual[key], value, rtol=1e-9, atol=1e-12, msg=lambda m, key=key: f"{key}: {m}"
            )


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("vmpo")])
def test_e_step_is_that_of_the_whole(ranks: Any, name: str) -> None:
    """The best samples, their weights and the temperature are chosen over all processes."""
    expected = alone(name)
    halves = [rank[name]["e_step"] for rank in ranks]
    whole = {key: torch.cat([part[key] for part in halves]) for key in halves[0]}
    for key, value in expected["e_step"].items():
        torch.testing.assert_close(whole[key], value, rtol=1e-9, atol=1e-12)
    for rank in ranks:
        base.assert_equal(rank[name]["e_step_metrics"], expected["e_step_metrics"], 1e-9, 1e-12)


@pytest.mark.parametrize("name", SKIPPING)
def test_all_processes_leave_out_what_is_not_finite_in_one(ranks: Any, name: str) -> None:
    """Nothing changes in any of them, and both count it."""
    for rank in ranks:
        counts, states = [], []
        for state in rank[name]["states"]:
            counts.append([int(state[key]) for key in state if key.startswith("/stepper/skips")])
            states.append({k: v for k, v in state.items() if not k.startswith("/stepper/skips")})
        # In all, in a row until now, most in a row.
        assert counts == [[0, 0, 0], [1, 1, 1], [1, 0, 1], [1, 0, 1]]
        assert_identical(states[1], states[0])
        assert differs(states[2], states[1])


def test_processes_stop_at_the_same_minibatch(ranks: Any) -> None:
    """Steps before the one that is not finite in one process count in both."""
    first, stopped, *_ = ranks[0]["minibatches-late"]["states"]
    assert int(stopped["/stepper/skips/0"]) == 1
    moved = differs(
        {k: v for k, v in stopped.items() if k.startswith("/loss")},
        {k: v for k, v in first.items() if k.startswith("/loss")},
    )
    assert moved
