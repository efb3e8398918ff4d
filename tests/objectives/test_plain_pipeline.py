"""The plainest pipeline: the loss among TorchRL's own parts, with one optimiser, learns."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import Tensor, nn
from torchrl.data import Bounded, LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import MLP, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import SoftUpdate

from minerva_torchrl import MPOLoss, VMPOLoss


def best_action(observation: Tensor) -> Tensor:
    return 0.5 * observation[..., :1]


def make_transitions(action: Tensor, observation: Tensor) -> TensorDict:
    """Steps whose reward falls with the distance to the best action; states come at random."""
    count = len(observation)
    never = torch.zeros(count, 1, dtype=torch.bool)
    reward = -(action - best_action(observation)).square()
    following = {"observation": 2 * torch.rand(count, 2) - 1, "reward": reward}
    following |= {"done": never, "terminated": never}
    return TensorDict({"observation": observation, "action": action, "next": following}, [count])


def make_actor() -> ProbabilisticActor:
    network = nn.Sequential(
        MLP(in_features=2, out_features=2, num_cells=[32]),
        NormalParamExtractor(scale_mapping="biased_softplus_0.3"),
    )
    return ProbabilisticActor(
        TensorDictModule(network, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        spec=Bounded(-1, 1, (1,)),
        distribution_class=TanhNormal,
        return_log_prob=True,
    )


def mean_error(actor: ProbabilisticActor) -> float:
    """Distance of the deterministic action to the best one."""
    observation = torch.rand(512, 2) * 2 - 1
    with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
        action = actor(TensorDict({"observation": observation}, [512]))["action"]
    return (action - best_action(observation)).abs().mean().item()


def test_mpo() -> None:
    torch.manual_seed(0)
    actor = make_actor()
    critic = ValueOperator(
        MLP(in_features=3, out_features=1, num_cells=[32]), in_keys=["observation", "action"]
    )
    loss = MPOLoss(actor, critic)
    loss.make_value_estimator(gamma=0.5)
    updater = SoftUpdate(loss, tau=0.1)
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-2)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(2000), batch_size=64)
    buffer.extend(make_transitions(2 * torch.rand(2000, 1) - 1, 2 * torch.rand(2000, 2) - 1))
    assert mean_error(actor) > 0.2
    for _ in range(250):
        output = loss(buffer.sample())
        optimizer.zero_grad()
        sum(value for key, value in output.items() if key.startswith("loss_")).backward()
        optimizer.step()
        updater.step()
    assert mean_error(actor) < 0.1


def test_vmpo() -> None:
    torch.manual_seed(0)
    actor = make_actor()
    critic = ValueOperator(MLP(in_features=2, out_features=1, num_cells=[32]), ["observation"])
    loss = VMPOLoss(actor, critic)
    loss.make_value_estimator("td0", gamma=0.5)
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-2)
    assert mean_error(actor) > 0.2
    for _ in range(150):
        observation = 2 * torch.rand(256, 2) - 1
        with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
            acted = actor(TensorDict({"observation": observation}, [256]))
        rollout = acted.update(make_transitions(acted["action"], observation))
        output = loss(rollout)
        optimizer.zero_grad()
        sum(value for key, value in output.items() if key.startswith("loss_")).backward()
        optimizer.step()
    assert mean_error(actor) < 0.1
