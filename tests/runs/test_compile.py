"""The section ``compile``: when updates are compiled, and that runs are then as exact as ever."""

from __future__ import annotations

import functools
import io
from pathlib import Path
from typing import Any

import pytest

from minerva_torchrl.objectives.critics import CRITICS
from minerva_torchrl.runs import assemble as assembling
from minerva_torchrl.runs.assemble import assemble, resolve_compile
from minerva_torchrl.runs.settings import affects_learning, load_config
from minerva_torchrl.runs.strict import ConfigError
from minerva_torchrl.trainers.compiled import CompiledGradients
from tests.runs.test_parted import HYBRID, SWITCHES
from tests.runs.test_resume import assert_resumes
from tests.runs.tiny import make_resumed, make_run, tiny_config
from tests.trainers.problem import assert_identical

ALGOS = ["mpo", "vmpo", "ppo"]
LONG = {"total_frames": 10_000_000}

# Of torch's own parts when its compiler is imported, and of TensorDict's.
pytestmark = [
    pytest.mark.filterwarnings(r"ignore:`torch\.jit\.script_method` is deprecated"),
    pytest.mark.filterwarnings(r"ignore:Using lock_\(\) inside a compiled graph:UserWarning"),
    pytest.mark.filterwarnings(r"ignore:.*_dynamo\.config:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembling, "why_not", lambda device: None)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembling, "why_not", lambda device: "no C++ compiler was found")


def resolved(algo: str, *, resumed: bool = False, **changes: Any) -> tuple[bool | str, str | None]:
    config, note = resolve_compile(tiny_config(algo, **changes), resumed=resumed)
    return config.compile.enabled, note


@pytest.mark.usefixtures("compiler")
class TestAuto:
    @pytest.mark.parametrize("algo", ALGOS)
    def test_for_long_runs_only(self, algo: str) -> None:
        assert resolved(algo) == (False, None)
        assert resolved(algo, **LONG) == (True, None)

    def test_shorter_runs_are_recorded(self) -> None:
        steps = tiny_config("mpo", total_frames=50_000).compilable_steps
        assert 2_000 <= steps < 20_000
        assert resolved("mpo", total_frames=50_000) == ("recorded", None)

    @pytest.mark.parametrize(
        ("algo", "changes"),
        [
            ("mpo", {"optim__dual_order": "dual_first"}),
            ("mpo", {"optim__num_policy_steps": 2}),
            ("vmpo", {"optim__dual_order": "dual_first"}),
            ("ppo", {"network__factory": "my.networks:make"}),
        ],
    )
    def test_only_what_can_be_traced(self, algo: str, changes: dict[str, Any]) -> None:
        assert resolved(algo, **LONG, **changes) == (False, None)

    def test_counts_gradient_steps(self) -> None:
        config = tiny_config("ppo", total_frames=1000, env__frame_skip=2)
        assert config.compilable_steps == 10 * 2 * 2  # batches, epochs, minibatches
        assert tiny_config("vmpo", total_frames=990).compilable_steps == 20 * 2
        assert tiny_config("mpo", total_frames=1000).compilable_steps == 50 * 2

    def test_is_stored_as_what_it_came_to(self, tmp_path: Path) -> None:
        make_run(tiny_config("ppo"), tmp_path).train()
        assert load_config(tmp_path).compile.enabled is False


@pytest.mark.usefixtures("no_compiler")
class TestWithoutCompiler:
    def test_auto_says_why(self) -> None:
        enabled, note = resolved("mpo", **LONG)
        assert enabled == "recorded"
        assert note is not None
        assert note.endswith("no C++ compiler was found")

    def test_true_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"compile\.enabled=true.*no C\+\+ compiler"):
            resolved("mpo", compile__enabled=True)

    def test_resumed_runs_go_on(self, tmp_path: Path) -> None:
        assert resolved("mpo", resumed=True, compile__enabled=True)[1] is not None
        make_run(tiny_config("ppo", total_frames=100), tmp_path).train()
        settings = tmp_path / "config.yaml"
        settings.write_text(settings.read_text().replace("enabled: false", "enabled: true"))
        stream = io.StringIO()
        run = make_resumed(tmp_path, stream, total_frames=200)
        assert run.assembly.trainer.optimization_stepper.compiled.backend == "recorded"
        run.train()
        assert stream.getvalue().count("no C++ compiler was found") == 1


@pytest.mark.parametrize("enabled", [True, "recorded"])
def test_refused_where_nothing_would_be_compiled(enabled: bool | str) -> None:
    match = rf"compile\.enabled={str(enabled).lower()} is for updates taken as a whole"
    with pytest.raises(ConfigError, match=match):
        tiny_config("mpo", compile__enabled=enabled, optim__dual_order="dual_first")


@pytest.mark.parametrize(
    "algo", ["mpo", *(pytest.param(x, marks=pytest.mark.slow) for x in ("vmpo", "ppo"))]
)
def test_recorded_runs_are_the_eager_ones(algo: str, tmp_path: Path) -> None:
    """To the last bit, so that it does not matter which of them a run was."""
    states = []
    for enabled in (False, "recorded"):
        run = make_run(tiny_config(algo, compile__enabled=enabled), tmp_path / str(enabled))
        run.train()
        compiled = run.assembly.trainer.optimization_stepper.compiled
        assert (compiled is None) == (enabled is False)
        assert compiled is None or compiled.backend == "recorded"
        states.append(run.assembly.loss.state_dict())
    assert_identical(states[0], states[1])


MEMBERS: dict[str, tuple[str, dict[str, Any]]] = {
    "TD(lambda)": ("mpo-retrace", {"loss.value_estimator": "td_lambda"}),
    "Retrace": ("mpo-retrace", {"loss.temperature_update": "solve", "network.num_critics": 2}),
    **{critic: ("mpo", {"network.critic": critic}) for critic in CRITICS if critic != "scalar"},
    "tanh": ("mpo", {"network.policy": "tanh_gaussian"}),
    "full covariance": ("mpo", {"network.policy": "full_covariance"}),
    "hybrid": ("mpo", HYBRID),
    "discrete parts": ("mpo", SWITCHES),
    "discrete": ("mpo", {"env.name": "gym:CartPole-v1"}),
    "V-MPO, tanh": ("vmpo", {"network.policy": "tanh_gaussian"}),
    "V-MPO, hybrid": ("vmpo", HYBRID),
    "V-MPO, discrete": ("vmpo", {"env.name": "gym:CartPole-v1"}),
}
OFTEN = ("categorical", "discrete", "hybrid", "tanh", "TD(lambda)", "V-MPO, hybrid")


@pytest.mark.parametrize(
    "member",
    [x if x in OFTEN else pytest.param(x, marks=pytest.mark.slow) for x in MEMBERS],
)
def test_recorded_runs_of_the_whole_family(member: str, tmp_path: Path) -> None:
    """No loss looks at values on the way, so that all can be recorded, and end like eager ones."""
    algo, settings = MEMBERS[member]
    states = []
    for enabled in (False, "recorded"):
        config = tiny_config(algo, **settings, **{"compile.enabled": enabled})
        run = make_run(config, tmp_path / str(enabled))
        run.train()
        states.append(run.assembly.loss.state_dict())
    assert run.assembly.trainer.optimization_stepper.compiled is not None
    assert run.updates > 2
    assert_identical(states[0], states[1])


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("algo", ALGOS)
def test_steppers_are_compiled_if_asked_for(algo: str) -> None:
    for enabled in (False, True):
        config = tiny_config(algo, compile__enabled=enabled, compile__mode="reduce-overhead")
        compiled = assemble(config).trainer.optimization_stepper.compiled
        assert (compiled is not None) == enabled
        assert compiled is None or compiled.mode == "reduce-overhead"


def test_rounding_is_no_other_setting() -> None:
    assert not affects_learning("compile.enabled")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("algo", ALGOS)
def test_resumes_exactly(
    algo: str, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiled run that is killed and resumed ends like one that is not, to the last bit."""
    compiled = functools.partial(CompiledGradients, backend=backend)
    monkeypatch.setattr(assembling, "CompiledGradients", compiled)
    assert_resumes(tmp_path, algo, 180, checkpoint__interval=140, compile__enabled=True)
