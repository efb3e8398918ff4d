"""Settings of older versions: renamed ones, and those that there were not."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from minerva_torchrl.algorithms import ALGORITHMS
from minerva_torchrl.runs import check_overrides, load_config, parse_config
from minerva_torchrl.runs.settings import resumed_config
from tests.runs.tiny import EXAMPLES, arguments, dotted, nested, run_script, train

RESULTS = sorted((Path(__file__).parents[2] / "results").glob("*/config.yaml"))


def written(file: Path) -> dict[str, Any]:
    return yaml.safe_load(file.read_text())


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.parent.name)
def test_stored_results_keep_every_setting(file: Path) -> None:
    config = load_config(file.parent)
    for section, values in written(file).items():
        if not isinstance(values, dict):
            assert getattr(config, section) == values
            continue
        for name, value in values.items():
            full = ALGORITHMS[config.algo].renamed.get(f"{section}.{name}", f"{section}.{name}")
            found = getattr(getattr(config, section), full.rpartition(".")[2])
            assert found == (tuple(value) if isinstance(value, list) else value)


@pytest.mark.parametrize("file", [f for f in RESULTS if written(f)["algo"] == "vmpo"], ids=str)
def test_multipliers_stepped_first_before_there_was_a_choice(file: Path) -> None:
    """And nothing is said about its old names: nobody has to change a finished run."""
    config = load_config(file.parent)
    assert config.optim.dual_order == "dual_first"
    assert config.loss.epsilon == written(file)["loss"]["epsilon_eta"]


def test_a_preset_of_today_changes_no_older_run() -> None:
    """Its networks were others, before there was a choice."""
    config = load_config(RESULTS[0].parents[1] / "mpo-cartpole-swingup-minerva-seed-0")
    assert config.preset == "minerva-seed"
    assert (config.network.scale, config.network.initializer) == ("softplus", "small_heads")
    assert not config.loss.truncation_is_terminal
    assert parse_config("mpo", {"preset": "minerva-seed"}).network.scale == "exp"


@pytest.mark.parametrize("algo", list(ALGORITHMS))
def test_runs_had_no_gain_before_there_was_a_choice(algo: str) -> None:
    """Whatever the default is: their standard deviation is another one with it."""
    assert ALGORITHMS[algo].earlier["network.scale_gain"] == 1.0


@pytest.mark.parametrize("algo", list(ALGORITHMS))
def test_runs_had_white_noise_before_there_was_a_choice(algo: str) -> None:
    assert ALGORITHMS[algo].earlier["collector.noise"] == "white"


def test_means_were_free_before_there_was_a_choice() -> None:
    assert ALGORITHMS["mpo"].earlier["network.tanh_mean"] is False


def test_new_runs_step_all_together() -> None:
    assert parse_config("vmpo", {}).optim.dual_order == "simultaneous"
    assert parse_config("vmpo", {"preset": "minerva-seed"}).optim.dual_order == "dual_first"


@pytest.fixture
def old_run(tmp_path: Path) -> Path:
    """A run of V-MPO whose file of settings is that of version 0.1."""
    folder = train(tmp_path / "run", "vmpo", total_frames=100).run_dir
    settings = written(folder / "config.yaml")
    settings["loss"]["epsilon_eta"] = settings["loss"].pop("epsilon")
    del settings["optim"]["dual_order"]
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    return folder


def test_an_old_run_goes_on_as_it_was(old_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resumed_config(old_run, {}).optim.dual_order == "dual_first"
    monkeypatch.chdir(old_run.parent)
    assert run_script("vmpo_dmc.py", "resume=run", "total_frames=150") == 0
    settings = written(old_run / "config.yaml")  # written again, with today's names
    assert settings["optim"]["dual_order"] == "dual_first"
    assert settings["loss"]["epsilon"] == 0.1
    assert "epsilon_eta" not in settings["loss"]


# Old names ---------------------------------------------------------------------------------------


def test_from_python() -> None:
    settings = nested({"loss.epsilon_eta": 0.3, "preset": "minerva-seed"})
    with pytest.warns(FutureWarning, match=r"loss.epsilon_eta is now called loss.epsilon\."):
        config = parse_config("vmpo", settings)
    assert config.loss.epsilon == 0.3
    assert settings["loss"] == {"epsilon_eta": 0.3}  # left as it was


def test_of_another_algorithm() -> None:
    with pytest.raises(ValueError, match=r"no setting .*epsilon_eta"):
        parse_config("mpo", nested({"loss.epsilon_eta": 0.3}))


def test_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = {**dotted("vmpo", total_frames=50, run_dir="run"), "loss.epsilon_eta": 0.3}
    assert run_script("vmpo_dmc.py", *arguments(settings)) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "warning: the setting loss.epsilon_eta is now called loss.epsilon."
    assert "epsilon_eta" not in "\n".join(lines[1:])
    assert load_config(tmp_path / "run").loss.epsilon == 0.3


def test_in_a_script_that_checks_its_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["script.py", "seed=1", "++loss.epsilon_eta=0.3", "-m"])
    assert check_overrides("vmpo") == ["seed=1", "++loss.epsilon=0.3", "-m"]
    assert sys.argv == ["script.py", "seed=1", "++loss.epsilon=0.3", "-m"]


def test_in_a_file_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of an older configs/vmpo.yaml, with a change."""
    text = "defaults: [defaults, preset: default, _self_]\nloss: {epsilon_eta: 0.3}\n"
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "vmpo.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "examples" / "vmpo_dmc.py"
    script.parent.mkdir()
    shutil.copy(EXAMPLES / "vmpo_dmc.py", script)
    settings = dotted("vmpo", total_frames=50, run_dir="run")
    with pytest.warns(FutureWarning, match="loss.epsilon_eta"):
        assert run_script(str(script), *arguments(settings)) == 0
    assert load_config(tmp_path / "run").loss.epsilon == 0.3


@pytest.mark.parametrize("algo", ["mpo", "vmpo", "ppo"])
def test_actions_in_own_units_before_there_were_others(algo: str) -> None:
    folder = Path(__file__).parents[1] / "fixtures" / "runs-0.1" / algo
    assert not load_config(folder).env.canonical_actions
    assert parse_config(algo, {}).env.canonical_actions
