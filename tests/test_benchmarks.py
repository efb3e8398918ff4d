"""The benchmarks' arithmetic, and that what they compare does the same. No times are tested."""

from __future__ import annotations

import importlib.util
import json
import sys
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import _harness
import collection
import compiling
import end_to_end
import growth
import mpo_update
import ppo_iteration
import quick
import replay
import sb3
import vmpo_update
from mpo_floor import MPOFloor

from minerva_torchrl import make_env
from minerva_torchrl.presets import mpo_preset
from minerva_torchrl.trainers import make_target_updater

FIELDS = {"name", "config", "threads", "median_ms", "ratio_to_floor"}
ENV = "cartpole-balance"
TINY_MPO = (3, 2, 16, (8, 8), 4)
TINY_VMPO = vmpo_update.Config(obs=3, action=2, batch=64, layers=(8, 8), policy_steps=3)
TINY_PPO = ppo_iteration.Config(
    obs=3, action=2, envs=2, steps=32, layers=(8,), epochs=2, minibatch=16
)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


# Harness -----------------------------------------------------------------------------------------


class Clock:
    """Time passes only when a case lets it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log = ""

    def __call__(self) -> float:
        return self.now

    def case(self, name: str, *seconds: float):
        times = iter(seconds)

        def call() -> None:
            self.log += name
            self.now += next(times)

        return call


def test_ratio_is_the_median_of_the_ratios_within_rounds() -> None:
    ours = _harness.Result("ours", [2.0, 4.0, 9.0])
    floor = _harness.Result("floor", [1.0, 4.0, 3.0])
    assert ours.median == 4.0
    assert floor.median == 3.0
    assert ours.ratio_to(floor) == 2.0  # of 2, 1 and 3
    assert floor.ratio_to(floor) == 1.0


def test_measure_takes_turns() -> None:
    clock = Clock()
    cases = {"a": clock.case("a", 9, 0.002, 0.004), "b": clock.case("b", 9, 0.001, 0.003)}
    results = _harness.measure(cases, rounds=2, warmup=1, clock=clock)
    assert clock.log == "ababab"
    assert results["a"].times == pytest.approx([2.0, 4.0])  # milliseconds, without the warm-up
    assert results["b"].times == pytest.approx([1.0, 3.0])


def test_measure_averages_repeats_and_counts_units() -> None:
    clock = Clock()
    cases = {"a": clock.case("a", 0.002, 0.004), "b": clock.case("b", 0.006)}
    results = _harness.measure(cases, rounds=1, warmup=0, repeats={"a": 2}, per=3, clock=clock)
    assert clock.log == "aab"
    assert results["a"].times == pytest.approx([1.0])
    assert results["b"].times == pytest.approx([2.0])


def make_results() -> dict[str, _harness.Result]:
    return {"ours": _harness.Result("ours", [3.0]), "floor": _harness.Result("floor", [2.0])}


def test_report_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    _harness.report(make_results(), config="tiny", as_json=True, floors={"ours": "floor"})
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert set(first) == set(second) == FIELDS
    assert first["threads"] == torch.get_num_threads()
    assert [first[k] for k in ("name", "config", "median_ms")] == ["ours", "tiny", 3.0]
    assert first["ratio_to_floor"] == 1.5
    assert second["ratio_to_floor"] is None  # it has no floor


def test_report_of_frames(capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"config": "tiny", "floors": {"ours": "floor"}, "frames": 1000}
    _harness.report(make_results(), as_json=True, **settings)
    line = json.loads(capsys.readouterr().out.splitlines()[1])
    assert set(line) == FIELDS | {"frames_per_second"}
    assert line["frames_per_second"] == 500_000  # a thousand in two milliseconds
    _harness.report(make_results(), as_json=False, **settings)
    ours = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("ours"))
    assert ours.split() == ["ours", "3.00", "1.500", "333333"]


def test_start_reads_the_command_line() -> None:
    threads = torch.get_num_threads()
    parser = _harness.make_parser("Title.\n\nText", rounds=7, threads=threads)
    args = _harness.start(parser, ["--json"])
    assert (args.rounds, args.threads, args.json) == (7, threads, True)
    assert parser.description == "Title."


def test_same_parameters() -> None:
    ours = {"weight": torch.ones(2, 3)}
    _harness.check_same_parameters(ours, {"weight": torch.ones(2, 3) + 1e-7}, lr=1e-2)
    with pytest.raises(AssertionError, match="weight differs"):
        _harness.check_same_parameters(ours, {"weight": torch.ones(2, 3) + 1e-4}, lr=1e-2)
    with pytest.raises(AssertionError, match="bias"):
        _harness.check_same_parameters(ours, {"bias": torch.ones(2, 3)}, lr=1e-2)


# Updates -----------------------------------------------------------------------------------------


def check_mpo(preset: str, change=lambda floor: None) -> None:
    loss, stepper = mpo_update.make_ours(TINY_MPO, preset)
    make_target_updater(loss, period=100)
    floor: MPOFloor = mpo_update.make_floor(loss, stepper, mpo_preset(preset).adam)
    change(floor)
    data = mpo_update.make_data(TINY_MPO)
    mpo_update.check_agreement(loss, stepper, floor, data, mpo_update.flat(data))


def perturb(network: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.01)


@pytest.mark.parametrize("preset", ["default", "minerva-seed"])
def test_mpo_agrees_with_its_floor(preset: str) -> None:
    check_mpo(preset)


def test_mpo_check_notices_other_targets() -> None:
    with pytest.raises(AssertionError, match="differs from the floor"):
        check_mpo("default", lambda floor: perturb(floor.target_critic))


@pytest.mark.parametrize("missing", ["jax", "rlax", "optax"])
def test_mpo_is_timed_without_jax(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    found = {name: object() for name in ("jax", "rlax", "optax")} | {missing: None}
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *args: found[name] if name in found else find_spec(name, *args),
    )
    cases, floors = mpo_update.make_cases(TINY_MPO)
    assert floors == {
        "minerva_torchrl[default]": "floor",
        "minerva_torchrl[default,recorded]": "floor",
        "floor": "floor",
        "minerva_torchrl[minerva-seed]": "floor[minerva-seed]",
        "floor[minerva-seed]": "floor[minerva-seed]",
    }
    assert list(cases) == list(floors)


def make_rlax(preset: str) -> tuple[mpo_update.RlaxMPO, MPOFloor, dict[str, torch.Tensor]]:
    """A pair in which every part of an update leaves its mark on the parameters."""
    pytest.importorskip("rlax")
    pytest.importorskip("optax")
    loss, stepper = mpo_update.make_ours(TINY_MPO, preset)
    make_target_updater(loss, period=100)
    floor = mpo_update.make_floor(loss, stepper, mpo_preset(preset).adam)
    perturb(floor.policy)  # away from the target policy
    floor.optimizers[2].param_groups[0]["lr"] = 0.3
    for dual in floor.duals.values():
        dual.raw.detach().zero_()
    if floor.s.clip_duals is not None:
        floor.s = replace(floor.s, clip_duals=0.01)
    plain = mpo_update.flat(mpo_update.make_data(TINY_MPO))
    plain["terminated"][::3] = True
    return mpo_update.make_rlax(floor, plain), floor, plain


# What rlax imports is not always up to date with jax.
behind = pytest.mark.filterwarnings("ignore:jax.core.pytype_aval_mappings:DeprecationWarning")


@behind
@pytest.mark.parametrize("preset", ["default", "minerva-seed"])
def test_rlax_agrees_with_the_floor(preset: str) -> None:
    peer, floor, plain = make_rlax(preset)
    mpo_update.check_rlax(peer, floor, plain)
    before = {part: peer.tensors(part) for part in ("policy", "critic", "duals")}
    peer.update()  # with noise of its own
    for part, old in before.items():
        new = peer.tensors(part)
        assert all(new[name].isfinite().all() for name in old)
        assert all((new[name] != old[name]).any() for name in old)


@behind
def test_rlax_check_notices_other_targets() -> None:
    peer, floor, plain = make_rlax("default")
    perturb(floor.target_critic)
    with pytest.raises(AssertionError, match="differs from the floor"):
        mpo_update.check_rlax(peer, floor, plain)


@pytest.mark.parametrize("preset", ["default", "minerva-seed"])
def test_vmpo_agrees_with_its_floor(preset: str) -> None:
    loss, stepper = vmpo_update.make_ours(TINY_VMPO, preset)
    floor = vmpo_update.make_floor(loss, stepper, preset)
    data = vmpo_update.make_data(TINY_VMPO, loss.actor_network)
    before = [parameter.detach().clone() for parameter in floor.networks]
    vmpo_update.check_agreement(loss, stepper, floor, data)
    pairs = zip(before, floor.networks, strict=True)
    assert all((old != new).any() for old, new in pairs)  # everything was trained


def make_rlax_vmpo(
    preset: str,
) -> tuple[vmpo_update.RlaxVMPO, vmpo_update.VMPOFloor, dict[str, torch.Tensor]]:
    """A pair in which every part of an update leaves its mark on the parameters."""
    pytest.importorskip("rlax")
    pytest.importorskip("optax")
    loss, stepper = vmpo_update.make_ours(TINY_VMPO, preset)
    floor = vmpo_update.make_floor(loss, stepper, preset)
    for optimizer in (floor.optimizer_alpha, floor.optimizer_temperature):
        optimizer.param_groups[0]["lr"] = 0.3
    plain = vmpo_update.flat(vmpo_update.make_data(TINY_VMPO, loss.actor_network))
    return vmpo_update.make_rlax(floor, plain), floor, plain


@behind
@pytest.mark.parametrize("preset", ["default", "minerva-seed"])
def test_rlax_agrees_with_the_floor_of_vmpo(preset: str) -> None:
    peer, floor, plain = make_rlax_vmpo(preset)
    before = {part: peer.tensors(part) for part in ("policy", "critic", "duals")}
    vmpo_update.check_rlax(peer, floor, plain)
    for part, old in before.items():
        new = peer.tensors(part)
        assert all((new[name] != old[name]).any() for name in old)


@behind
def test_rlax_check_notices_another_rollout_of_vmpo() -> None:
    peer, floor, plain = make_rlax_vmpo("default")
    with pytest.raises(AssertionError, match="differs from the floor"):
        vmpo_update.check_rlax(peer, floor, {**plain, "loc": plain["loc"] + 0.1})


def test_vmpo_check_notices_another_batch() -> None:
    loss, stepper = vmpo_update.make_ours(TINY_VMPO, "default")
    floor = vmpo_update.make_floor(loss, stepper, "default")
    data = vmpo_update.make_data(TINY_VMPO, loss.actor_network)
    floor.update(vmpo_update.flat(data))
    with pytest.raises(AssertionError, match="differs from the floor"):
        vmpo_update.check_agreement(loss, stepper, floor, data)


@pytest.mark.parametrize("preset", ["default", "minerva-seed"])
def test_vmpo_check_notices_another_order(preset: str) -> None:
    """With large steps of the multipliers it matters which of them the policy's loss has."""
    for reverse in (False, True):
        torch.manual_seed(0)
        loss, stepper = vmpo_update.make_ours(TINY_VMPO, preset)
        floor = vmpo_update.make_floor(loss, stepper, preset)
        floor.s = replace(floor.s, dual_first=floor.s.dual_first != reverse)
        for optimizer in (stepper.optimizer_alpha, floor.optimizer_alpha):
            optimizer.param_groups[0]["lr"] = 3.0
        data = vmpo_update.make_data(TINY_VMPO, loss.actor_network)
        with pytest.raises(AssertionError) if reverse else nullcontext():
            vmpo_update.check_agreement(loss, stepper, floor, data)


def test_ppo_agrees_with_its_floor() -> None:
    trainer = ppo_iteration.make_ours(TINY_PPO)
    rollout = ppo_iteration.make_rollout(TINY_PPO, trainer.loss_module.actor_network)
    assert rollout["next", "done"].any()
    floor = ppo_iteration.make_floor(TINY_PPO, trainer)
    before = [parameter.detach().clone() for parameter in floor.parameters]
    ppo_iteration.check_agreement(trainer, floor, rollout)
    pairs = zip(before, floor.parameters, strict=True)
    assert all((old != new).any() for old, new in pairs)
    assert "advantage" not in rollout.keys()  # an iteration leaves it as it was


def test_ppo_check_notices_another_critic() -> None:
    trainer = ppo_iteration.make_ours(TINY_PPO)
    rollout = ppo_iteration.make_rollout(TINY_PPO, trainer.loss_module.actor_network)
    floor = ppo_iteration.make_floor(TINY_PPO, trainer)
    perturb(floor.critic)
    with pytest.raises(AssertionError, match="differs from the floor"):
        ppo_iteration.check_agreement(trainer, floor, rollout)


def test_ppo_of_torchrl_runs() -> None:
    trainer = ppo_iteration.make_ours(TINY_PPO)
    rollout = ppo_iteration.make_rollout(TINY_PPO, trainer.loss_module.actor_network)
    ppo_iteration.make_torchrl(TINY_PPO, rollout)()


# Collection --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_envs", "steps"), [(None, 10), (2, 1003)])
def test_collection_agrees_with_dm_control(num_envs: int | None, steps: int) -> None:
    collection.check_agreement(ENV, num_envs=num_envs, steps=steps)


def test_policies_of_collection_agree() -> None:
    actor = collection.make_actor(make_env(ENV, num_envs=2, seed=0), (8, 8))
    observation = torch.randn(7, 5)
    expected = actor.module[0].module(observation)
    for ours, floor in zip(expected, collection.plain_policy(actor)(observation), strict=True):
        torch.testing.assert_close(ours, floor)


def test_raw_loop_goes_from_frame_to_frame() -> None:
    actor = collection.make_actor(make_env(ENV, seed=0), (8,))
    raw = collection.RawLoop(ENV, collection.plain_policy(actor), frames=4)
    first, second = raw.collect(), raw.collect()
    assert torch.equal(first["observation"][1:], first["next_observation"][:-1])
    assert torch.equal(second["observation"][0], first["next_observation"][-1])
    normal = torch.distributions.Normal(first["loc"], first["scale"])
    torch.testing.assert_close(first["log_prob"], normal.log_prob(first["action"]).sum(-1))


def test_all_ways_of_collection_run() -> None:
    with ExitStack() as stack:
        cases = collection.make_cases(ENV, 16, stack, workers=0)
        assert {"floor", "torchrl", "minerva_torchrl[1 env]"} < set(cases)
        for case in cases.values():
            case()


# Replay ------------------------------------------------------------------------------------------


def test_plain_replay_is_a_ring() -> None:
    ring = replay.PlainReplay(5, {"x": torch.zeros(1, dtype=torch.int64)})
    ring.extend({"x": torch.tensor([0, 1, 2])})
    assert ring.stored == 3
    assert ring.sample(50)["x"].max() <= 2
    ring.extend({"x": torch.tensor([3, 4, 5, 6])})
    assert ring.tensors["x"].tolist() == [5, 6, 2, 3, 4]
    assert ring.gather(torch.tensor([4, 0]))["x"].tolist() == [4, 5]
    assert ring.bytes_per_frame == 8


def test_plain_replay_draws_sequences_within_episodes() -> None:
    like = {"episode": torch.zeros(1, dtype=torch.int32), "x": torch.zeros(1, dtype=torch.int64)}
    ring = replay.PlainReplay(8, like)
    number = torch.arange(10)
    ring.extend({"episode": (number // 4).int(), "x": number})
    drawn = ring.sample_sequences(100, 2)["x"].reshape(-1, 2)
    assert set(map(tuple, drawn.tolist())) == {(2, 3), (4, 5), (5, 6), (6, 7), (8, 9)}


@pytest.mark.parametrize("length", [1, 5])
def test_replay_agrees_with_its_floor(length: int, capsys: pytest.CaptureFixture[str]) -> None:
    filled = replay.Filled(ENV, 2500, length, batch=16)
    replay.check_agreement(filled)
    filled.store(60)  # beyond the end of the ring
    replay.check_agreement(filled)
    for case in filled.cases().values():
        case()
    replay.report_bytes(filled, ENV, as_json=True)
    ours, floor = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert set(ours) == FIELDS | {"bytes_per_frame"}
    assert floor["bytes_per_frame"] == 4 * (5 + 5 + 1 + 1 + 1) + 2 + 4
    assert ours["bytes_per_frame"] == sum(filled.entries.values()) > floor["bytes_per_frame"]


# Whole training ----------------------------------------------------------------------------------


def tiny_config(**env: int):
    return end_to_end.make_config(
        ENV,
        env=env,
        collector={"frames_per_batch": 10},
        replay_buffer={"size": 500, "batch_size": 8, "warmup_frames": 20},
        network={"actor_sizes": [8], "critic_sizes": [8]},
        loss={"num_action_samples": 4},
        optim={"updates_per_frame": 0.2},
    )


def test_training_agrees_with_its_floor() -> None:
    end_to_end.check_agreement(tiny_config(max_episode_steps=13))


def test_training_loops_take_as_many_updates() -> None:
    config = tiny_config()
    assembly = end_to_end.assemble(config)
    ours, floor = end_to_end.OurLoop(assembly), end_to_end.FloorLoop(config, assembly)
    for loop in (ours, floor):
        loop.step(updates=False)
        loop.step()
        loop.step()
    assert ours.trainer._optim_count == floor.updates == 4
    assert ours.trainer.collected_frames == 30
    assembly.collector.shutdown()


TINY_PEERS = sb3.Config(
    name="InvertedPendulum-v5",
    layers=(8,),
    envs=2,
    rollout=64,
    epochs=2,
    minibatch=16,
    batch=8,
    frames=50,
    warmup=50,
)


@pytest.mark.parametrize(("algo", "updates"), [("ppo", 8), ("mpo", 25)])
def test_training_of_ours_for_peers(algo: str, updates: int) -> None:
    ours = sb3.Ours(TINY_PEERS, algo, compiled=False)
    ours.train()
    frames, before = ours.frames, ours.updates
    ours.train()
    assert ours.frames - frames == (64 if algo == "ppo" else 50)
    assert ours.updates - before == updates


@pytest.mark.parametrize("algo", ["ppo", "mpo"])
def test_peers_take_as_many_updates(algo: str) -> None:
    pytest.importorskip("stable_baselines3")
    cases, peers = sb3.make_cases(TINY_PEERS, algo, {"": False})
    peer = {"ppo": "stable-baselines3[PPO]", "mpo": "stable-baselines3[SAC]"}[algo]
    assert peers == dict.fromkeys(cases, peer)
    other = sb3.Theirs(replace(TINY_PEERS, minibatch=32, frames=70), algo)
    with pytest.raises(AssertionError, match="frames and updates are"):
        sb3.check_same_work(sb3.Ours(TINY_PEERS, algo, compiled=False), other)


# Growth and the quick set ------------------------------------------------------------------------


def test_exponent() -> None:
    x = [1.0, 10.0, 100.0]
    assert growth.exponent(x, [3 * value**1.5 for value in x]) == pytest.approx(1.5)
    assert growth.exponent(x, [2.0, 2.0, 2.0]) == pytest.approx(0.0)


def test_growth_is_drawn(tmp_path: Path) -> None:
    updates, none = growth.measure_updates((4, 8), (2, 3), (8,), rounds=1)
    assert none == {}
    assert set(updates) == {(4, 2), (4, 3), (8, 2), (8, 3)}
    by_kind = growth.measure_replay(ENV, (1000, 2000), length=2, batch=4, rounds=1)
    assert all(set(by_size) == {1000, 2000} for by_size in by_kind.values())
    compiled = {(4, 3): updates[4, 3], (8, 3): updates[8, 3]}
    growth.draw(updates, compiled, by_kind, tmp_path / "growth.png")
    assert (tmp_path / "growth.png").read_bytes().startswith(b"\x89PNG")


def test_growth_of_a_run_that_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the compiler, which takes half a minute for each size."""
    made: list[tuple[bool, int, int]] = []

    def assemble(config):
        made.append(
            (
                config.compile.enabled,
                config.replay_buffer.batch_size,
                config.loss.num_action_samples,
            )
        )
        return end_to_end.assemble(replace(config, compile=replace(config.compile, enabled=False)))

    monkeypatch.setattr(growth, "assemble", assemble)
    cases = growth.compiled_cases(ENV, (4, 8), 3, (8,))
    assert made == [(True, 4, 3), (True, 8, 3)]
    assert list(cases) == [(4, 3), (8, 3)]
    for case in cases.values():
        case()


def test_only_compiling_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter((1.0, 3.0, 10.0, 11.5))
    monkeypatch.setattr(compiling.time, "perf_counter", lambda: next(now))
    watch = compiling.Stopwatch()
    for _ in range(2):
        watch("compiling the update")
        watch("compiled in 2 s")
    assert (watch.seconds, watch.graphs) == (3.5, 2)
    assert watch.processor >= 0


def test_quick_set_names_scripts_that_exist() -> None:
    for script in quick.RUNS:
        line = quick.command(script, rounds=2, threads=1, flags=["--json"])
        assert Path(line[1]).is_file()
        assert line[-5:-2] == ["--rounds", str(2 * quick.RUNS[script][1]), "--threads"]
        assert line[-1] == "--json"
