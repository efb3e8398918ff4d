from __future__ import annotations

import json
from pathlib import Path

import pytest

from minerva_torchrl.report import Reference, ReferencesError, load_references

LINE = {"task": "walker-walk", "label": "x", "value": 1}


def written(folder: Path, content: object, name: str = "references.json") -> Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_yaml(tmp_path: Path) -> None:
    text = """
    references:
    - {task: cartpole-swingup, algo: mpo, label: "tonic 642 ± 160", value: 642, frames: 100_000}
    - {task: gym:Hopper-v5, label: "best ${known}", value: 1e3, deviation: 20}
    """
    references = load_references(written(tmp_path, text, "references.yaml"))
    assert references.references == (
        Reference("cartpole-swingup", "tonic 642 ± 160", 642.0, "mpo", 100_000),
        Reference("gym:Hopper-v5", "best ${known}", 1000.0, deviation=20.0),
    )
    assert [reference.result for reference in references.references] == ["642.0", "1,000.0 ± 20.0"]


@pytest.mark.parametrize("name", ["references.json", "references.yaml"])
def test_a_list_of_references(tmp_path: Path, name: str) -> None:
    references = load_references(written(tmp_path, [LINE], name))
    assert references.references == (Reference("walker-walk", "x", 1.0),)


def test_json_with_tabs(tmp_path: Path) -> None:
    text = json.dumps({"references": [LINE]}, indent="\t")
    assert load_references(written(tmp_path, text)).references[0].value == 1.0


@pytest.mark.parametrize("content", [{}, [], {"references": None}])
def test_nothing(tmp_path: Path, content: object) -> None:
    assert load_references(written(tmp_path, content)).references == ()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            [LINE, {**LINE, "value": "high"}],
            r"references\[1\]: value must be a number, got 'high' \(str\)",
        ),
        ([{**LINE, "value": True}], r"references\[0\]: value must be a number, got True"),
        ([{**LINE, "frames": 1.5}], r"references\[0\]: frames must be an integer or null, got"),
        ([{**LINE, "frames": 0}], r"references\[0\]: frames must be positive, got 0"),
        ([{**LINE, "algo": "sac"}], r"\[0\]: algo must be one of mpo, vmpo, ppo, got 'sac'"),
        (
            [{"task": "x"}],
            r"references\[0\]: label, value is missing. It has task, label, value, and if wanted "
            "algo, frames, deviation.",
        ),
        ([{**LINE, "colour": 1}], r"references\[0\]: colour is unknown. It has task, label, "),
        (["x"], r"references\[0\]: must be a mapping, got 'x'. It has task, "),
        ([{**LINE, "deviation": -1}], r"\[0\]: deviation must be finite and not negative, got -1"),
        ({"references": LINE}, "references must be a list, got dict"),
        ({"lines": []}, r"or have references, suites and names; got \['lines'\]"),
        ('"text"', "must be a list of references, or have references, suites and names; got str"),
        ("{", "can't be understood: "),
    ],
)
def test_errors(tmp_path: Path, content: object, message: str) -> None:
    path = written(tmp_path, content)
    with pytest.raises(ReferencesError, match=message) as caught:
        load_references(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "can't be understood: "),
        ("just words", "can't be understood|neither a list nor a mapping|must be a list"),
        ("- {task: x, label: y, value: .nan}", r"references\[0\]: value must be finite, got nan"),
    ],
)
def test_errors_of_yaml(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ReferencesError, match=message) as caught:
        load_references(written(tmp_path, text, "references.yaml"))
    assert "\n" not in str(caught.value)


def test_all_entries_are_checked(tmp_path: Path) -> None:
    content = [{**LINE, "value": None}, {**LINE, "label": 3}, {}]
    with pytest.raises(ReferencesError) as caught:
        load_references(written(tmp_path, content))
    places = [line.split(": ")[1] for line in str(caught.value).splitlines()]
    assert places == ["references[0]", "references[1]", "references[2]"]


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ReferencesError, match=r"nowhere.yaml: can't be read: No such file"):
        load_references(tmp_path / "nowhere.yaml")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ReferencesError, match=r"bytes.yaml: (is not text|can't be understood)"):
        load_references(tmp_path / "bytes.yaml")
