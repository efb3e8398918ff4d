"""Folders of runs that are damaged, or that somebody else has prepared.

Whatever uses such a folder must say what is wrong in one line, change nothing, run nothing of what
is in it, and come to an end.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import pickle
import random
import re
import resource
import shutil
import socket
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import yaml
from hydra.core.global_hydra import GlobalHydra

from minerva_torchrl.__main__ import main as command_line
from minerva_torchrl.report import load_runs
from minerva_torchrl.runs import CheckpointError, ConfigError, load_policy
from tests.campaign import trained
from tests.campaign.case import Case
from tests.runs.tiny import fix_hash

GROUP = "damaged, hostile folders"

Damage = Callable[[Path], object]
IMPORTANT = "do not touch"
MORE = {"total_frames": 400}


# Using a folder ----------------------------------------------------------------------------------


def resume(folder: Path) -> None:
    trained.resume(folder, **MORE)


def act(folder: Path) -> None:
    load_policy(folder)


def resume_by_command(folder: Path) -> None:
    _command("train", algo_of(folder), f"resume={folder}", "total_frames=400")


def evaluate_by_command(folder: Path) -> None:
    _command("evaluate", str(folder), "--episodes", "1")


def _command(*arguments: str) -> None:
    """Run the program in this process; a refusal must be status 1 and one line."""
    errors = io.StringIO()
    sys.argv = ["minerva_torchrl", *arguments]
    try:
        with contextlib.redirect_stderr(errors):
            status = command_line(arguments)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    finally:
        GlobalHydra.instance().clear()
    lines = [line for line in errors.getvalue().splitlines() if line.startswith("error: ")]
    if status == 0:
        return
    if status != 1 or len(lines) != 1 or "Traceback" in errors.getvalue():
        raise AssertionError(f"status {status}, and on the screen: {errors.getvalue()[:300]!r}")
    raise CheckpointError(lines[0])


def report(folder: Path) -> None:
    loaded = load_runs(folder, include_unfinished=True)
    if loaded.problems:
        raise CheckpointError(loaded.problems[0].reason)


def algo_of(folder: Path) -> str:
    return folder.name.partition("-")[0]


def refused(kind: str, damage: Damage, use: Callable[[Path], None]) -> Callable[[Path], str | None]:
    """A case: a run is damaged and then used."""

    def run(place: Path) -> str | None:
        folder = place / kind
        shutil.copytree(base(kind), folder, symlinks=True)
        outside = place / "outside"
        outside.mkdir()
        (outside / "important").write_text(IMPORTANT)
        damage(folder)
        before = listing(place)
        problem = None
        try:
            use(folder)
            problem = "it was accepted"
        except (CheckpointError, ConfigError) as error:
            if not str(error) or "\n" in str(error):
                problem = f"not one line: {str(error)!r}"
        after = listing(place)
        if after != before:
            names = sorted(name for name in before | after if before.get(name) != after.get(name))
            problem = f"{problem or 'refused'}, but changed: {', '.join(names)}"
        return problem

    return run


def listing(folder: Path) -> dict[str, str]:
    """Everything in a folder: kinds and contents. Neither links nor pipes are followed."""
    found = {}
    for directory, folders, files in os.walk(folder):
        for name in folders + files:
            path = Path(directory, name)
            key = str(path.relative_to(folder))
            if path.is_symlink():
                found[key] = f"link to {os.readlink(path)}"
            elif path.is_file():
                found[key] = hashlib.sha256(path.read_bytes()).hexdigest()
            else:
                found[key] = oct(path.lstat().st_mode)
    return found


def base(kind: str) -> Path:
    changes = {"total_frames": 200, "logger__interval": 40, "checkpoint__interval": 100}
    return trained.trained(kind, **changes)


def last(folder: Path) -> Path:
    return folder / "checkpoints" / os.readlink(folder / "checkpoints" / "last")


# Manifests ---------------------------------------------------------------------------------------

VALUES: dict[str, Any] = {
    "null": None,
    "true": True,
    "-5": -5,
    "1e30": 1e30,
    "10**30": 10**30,
    "NaN": float("nan"),
    "text": "x",
    "list": [],
    "object": {},
    "deep": [[[[[[1]]]]]],
}
FIELDS = [
    "format",
    "version",
    "frames",
    "metadata",
    "metadata.algo",
    "metadata.wall_seconds",
    "metadata.best_return",
    "metadata.rows",
    "metadata.rows.eval",
    "parts",
    "parts.model",
    "parts.model.file",
    "parts.model.bytes",
    "parts.model.sha256",
    "versions",
    "versions.torch",
]
# Which of these a run could have written.
SENSIBLE = {
    *(("metadata.best_return", name) for name in ("null", "-5", "1e30", "10**30", "lost")),
    ("metadata.rows", "lost"),
    ("versions", "lost"),
    ("versions", "object"),
    ("versions.torch", "text"),
    ("versions.torch", "lost"),
}


def edit_manifest(
    field: str, value: Any = None, *, lose: bool = False, add: bool = False
) -> Damage:
    def damage(folder: Path) -> None:
        file = last(folder) / "manifest.json"
        manifest = json.loads(file.read_text())
        section = manifest
        *sections, name = field.split(".")
        for part in sections:
            section = section[part]
        if lose:
            del section[name]
        elif add:
            section[name]["surplus"] = 1
        else:
            section[name] = value
        file.write_text(json.dumps(manifest))

    return damage


def write_manifest(text: str | bytes) -> Damage:
    data = text.encode() if isinstance(text, str) else text
    return lambda folder: (last(folder) / "manifest.json").write_bytes(data)


def manifests() -> Iterator[tuple[str, Damage]]:
    for field in FIELDS:
        for name, value in VALUES.items():
            if (field, name) not in SENSIBLE:
                yield f"manifest: {field} is {name}", edit_manifest(field, value)
        if (field, "lost") not in SENSIBLE:
            yield f"manifest: {field} is lost", edit_manifest(field, lose=True)
    for field in ("metadata", "metadata.rows", "parts.model"):
        yield f"manifest: {field} has a surplus", edit_manifest(field, add=True)
    texts = {"empty": "", "array": "[]", "deep": "[" * 200_000, "cut": '{"format": "miner'}
    texts |= {"duplicates": '{"format": 1, "format": 2}', "large": " " * (1 << 21) + "{}"}
    for name, text in texts.items():
        yield f"manifest: {name}", write_manifest(text)
    yield "manifest: binary", write_manifest(bytes(range(256)))


# Parts with right checksums ----------------------------------------------------------------------


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    if isinstance(value, dict):
        for name, item in value.items():
            yield from paths_in(item, (*path, name))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from paths_in(item, (*path, index))


def mutated(value: Any, path: tuple[Any, ...], how: str) -> Any:
    """A copy with another structure at one place."""
    if not path:
        if how == "surplus":
            return {**value, "surplus": 1} if isinstance(value, dict) else [value, 1]
        others = {"text": "x", "list": [[]], "negative": -7, "object": {"x": {"y": 1}}}
        if how == "tensor":
            return torch.zeros(3, 1, 2, dtype=torch.int16)
        return others[how]
    first, *rest = path
    copy = dict(value) if isinstance(value, dict) else list(value)
    if how == "lost" and not rest:
        del copy[first]
    else:
        copy[first] = mutated(copy[first], tuple(rest), how)
    return copy


# Names under which new entries, or any content, are a matter of the run.
OPEN = ("entries", "waiting", "losses", "state", "callbacks", "random", "simulators")


def mutate_part(part: str, seed: int, how: str) -> Damage:
    def damage(folder: Path) -> None:
        rng = random.Random(seed)
        file = last(folder) / f"{part}.pt"
        value = torch.load(file, weights_only=True)
        found = [path for path in paths_in(value) if not set(path[:-1]) & {"random", "returns"}]
        if how == "surplus":
            found = [path for path in found if not set(path) & set(OPEN)]
        if how == "lost":  # those that earlier versions did not have may be missing
            late = {"callbacks", "metrics", "skipped_frames", "waiting", "lengths"}
            found = [path for path in found if not set(path) & (late | {"state", "losses"})]
        path = rng.choice([p for p in found if p[-1] not in ("random", "simulators")])
        torch.save(mutated(value, path, how), file)
        fix_hash(last(folder), part)

    return damage


def parts(rng: random.Random, number: int) -> Iterator[tuple[str, Damage]]:
    ways = ("lost", "text", "list", "negative", "object", "tensor", "surplus")
    for index in range(number):
        part = ("training", "environment", "model", "training", "replay")[index % 5]
        how, seed = ways[index % len(ways)], rng.randrange(2**32)
        yield f"{part}: something is {how} ({seed})", mutate_part(part, seed, how)
    for part in ("model", "training", "environment", "replay"):
        yield f"{part}: its bytes are cut", lambda f, p=part: os.truncate(last(f) / f"{p}.pt", 99)
        yield f"{part}: a byte is flipped", lambda f, p=part: flip(last(f) / f"{p}.pt")
        yield f"{part}: is empty", lambda f, p=part: save_as(f, p, {})
        yield f"{part}: is a list", lambda f, p=part: save_as(f, p, [1, 2])
        if part != "replay":
            yield f"{part}: is lost", lambda f, p=part: (last(f) / f"{p}.pt").unlink()


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def save_as(folder: Path, part: str, value: Any) -> None:
    torch.save(value, last(folder) / f"{part}.pt")
    fix_hash(last(folder), part)


# Tables ------------------------------------------------------------------------------------------


def tables() -> Iterator[tuple[str, Damage]]:
    def cell(file: str, row: int, column: int, text: str) -> Damage:
        def damage(folder: Path) -> None:
            lines = (folder / file).read_text().splitlines()
            cells = lines[row].split(",")
            cells[column] = text
            lines[row] = ",".join(cells)
            (folder / file).write_text("\n".join(lines) + "\n")

        return damage

    def whole(file: str, data: bytes) -> Damage:
        return lambda folder: (folder / file).write_bytes(data)

    for column in (1, 3):
        yield f"eval.csv: an empty cell {column}", cell("eval.csv", 2, column, "")
    for file in ("eval.csv", "metrics.csv"):
        for text in ("good", "1_000", "0x10", "--1", "٣", "=1+1"):
            yield f"{file}: a cell is {text}", cell(file, 2, 1, text)
        for text in ("-5", "1e30", "", "nan", "1.5", "9" * 30, "0"):
            yield f"{file}: frames are {text or 'empty'}", cell(file, 2, 0, text)
        yield f"{file}: a column too many", cell(file, 1, 1, "1,2")
        for name, data in {
            "binary": bytes(range(256)) * 4,
            "NUL": b"frames,a\n\x00,\x00\n",
            "other header": b"step,loss\n1,2\n",
            "same names": b"frames,a,a\n1,2,3\n",
            "a quote": b'frames,a\n1,"2\n3,4\n',
            "UTF-16": "frames,a\n1,2\n".encode("utf-16"),
            "a long line": b"frames," + b"a" * 200_000 + b"\n1,2\n",
        }.items():
            yield f"{file}: {name}", whole(file, data)


# Settings ----------------------------------------------------------------------------------------


def settings() -> Iterator[tuple[str, Damage]]:
    def whole(text: str | bytes) -> Damage:
        data = text.encode() if isinstance(text, str) else text
        return lambda folder: (folder / "config.yaml").write_bytes(data)

    def change(name: str, value: Any) -> Damage:
        def damage(folder: Path) -> None:
            settings = yaml.safe_load((folder / "config.yaml").read_text())
            section = settings
            *sections, last_name = name.split(".")
            for part in sections:
                section = section[part]
            section[last_name] = value
            (folder / "config.yaml").write_text(yaml.safe_dump(settings))

        return damage

    bomb = "a0: &a0 [x]\n" + "".join(
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 30)
    )
    for name, text in {
        "an alias bomb": bomb,
        "deep flow": "algo: " + "[" * 100_000,
        "deep blocks": "".join(" " * i + "a:\n" for i in range(3000)),
        "deep mappings": "{a: " * 50_000,
        "a tag": "algo: !!python/object/apply:os.system ['touch ../outside/ran']\n",
        "another tag": "algo: !!python/name:os.system mpo\n",
        "an own tag": "algo: !x mpo\n",
        "empty": "",
        "a number": "5",
        "a list": "[mpo]",
        "a text": "mpo",
        "no algo": "seed: 1\n",
        "another algo": "algo: sac\n",
        "algo is a list": "algo: [mpo]\n",
        "the same name twice": "algo: mpo\nalgo: mpo\n",
        "two documents": "algo: mpo\n---\nalgo: mpo\n",
        "a tab": "algo:\n\t- mpo\n",
        "large": "# " + "x" * (1 << 21),
        "an interpolation": "algo: ${oc.env:HOME}\n",
        "half an interpolation": "algo: ${oc.env:\n",
        "a merge": "<<: {algo: mpo}\nseed: x\n",
    }.items():
        yield f"config.yaml: {name}", whole(text)
    yield "config.yaml: binary", whole(bytes(range(256)))
    for name, value in {
        "seed": "one",
        "total_frames": -5,
        "loss": [],
        "loss.gamma": 2.0,
        "network.actor_sizes": [-1],
        "env.name": "no-such-task",
        "env": None,
        "optim.lr_critic": "fast",
        "surplus": 1,
        "num_threads": 0,
    }.items():
        yield f"config.yaml: {name} is {value}", change(name, value)
    for name, value in {
        "env.name": "gym:evil_module:Task-v0",
        "env.factory": "evil_module:Task",
        "env.wrappers": ["evil_module:wrap"],
        "network.factory": "evil_module:make",
        "callbacks": ["evil_module:Callback"],
    }.items():

        def with_module(folder: Path, name: str = name, value: Any = value) -> None:
            change(name, value)(folder)
            change("trust", True)(folder)
            outside = folder.parent / "outside"
            code = f"open({str(outside / 'ran')!r}, 'w')\n"
            (folder.parent / "evil_module.py").write_text(code)
            sys.path.insert(0, str(folder.parent))

        yield f"config.yaml: names code in {name}", with_module


# Other kinds of files ----------------------------------------------------------------------------

FILES = [
    ".lock",
    "config.yaml",
    "eval.csv",
    "metrics.csv",
    "curve.png",
    "summary.json",
    "checkpoints",
    "videos",
    "LAST/manifest.json",
    "LAST/model.pt",
    "LAST/training.pt",
    "checkpoints/last",
]


def kinds() -> Iterator[tuple[str, Damage, bool]]:
    """Damages, each with whether acting is disturbed by it, too."""
    for name in FILES:
        for kind in ("a link", "a dangling link", "a pipe", "a folder", "a socket", "a far link"):
            if kind == "a folder" and name in ("checkpoints", "videos", "checkpoints/last"):
                continue
            needed = name == "config.yaml" or "checkpoints" in name or name.startswith("LAST")
            needed &= name != "LAST/training.pt" or kind != "nothing"
            yield f"{name} is {kind}", other_kind(name, kind), needed


def other_kind(name: str, kind: str) -> Damage:
    def damage(folder: Path) -> None:
        path = last(folder) / name[5:] if name.startswith("LAST/") else folder / name
        outside = folder.parent / "outside"
        target = outside / "important"
        if kind == "a far link" and os.path.lexists(path):
            target = outside / "moved"  # what it leads to is what should be there
            real = path.resolve() if path.is_symlink() else path
            os.rename(real, target)
        if path.is_symlink() or path.is_file():
            path.unlink()
        elif path.is_dir():
            shutil.rmtree(path)
        if kind == "a dangling link":
            target = outside / "nothing"
        if kind.endswith("link"):
            path.symlink_to(target)
        elif kind == "a pipe":
            os.mkfifo(path)
        elif kind == "a folder":
            path.mkdir()
        else:
            here = os.getcwd()
            os.chdir(path.parent)  # names of sockets are short
            with socket.socket(socket.AF_UNIX) as one:
                one.bind(path.name)
            os.chdir(here)

    return damage


# Pickles -----------------------------------------------------------------------------------------


class Payload:
    """Does something when it is unpickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def pickles() -> Iterator[tuple[str, Damage]]:
    def payloads(mark: Path) -> dict[str, Any]:
        return {
            "os.mkdir": Payload(os.mkdir, str(mark)),
            "os.system": Payload(os.system, f"touch {mark}"),
            "eval": Payload(eval, f"open({str(mark)!r}, 'w')"),
            "open": Payload(open, str(mark), "w"),
            "torch.load": Payload(torch.load, str(mark)),
            "getattr": Payload(getattr, str(mark), "upper"),
        }

    def damage(part: str, name: str, form: str) -> Damage:
        def write(folder: Path) -> None:
            value = {"loss": payloads(folder.parent / "outside" / "ran")[name]}
            file = last(folder) / f"{part}.pt"
            if form == "archive":
                torch.save(value, file)
            elif form == "old":
                torch.save(value, file, _use_new_zipfile_serialization=False)
            else:
                file.write_bytes(pickle.dumps(value))
            fix_hash(last(folder), part)

        return write

    for name in payloads(Path("x")):
        for part, form in (("model", "archive"), ("training", "old"), ("environment", "plain")):
            yield f"{part}: {form} pickle with {name}", damage(part, name, form)

    def compressed(folder: Path) -> None:
        file = last(folder) / "model.pt"
        with zipfile.ZipFile(file) as archive:
            entries = {entry.filename: archive.read(entry) for entry in archive.infolist()}
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in entries.items():
                archive.writestr(name, data)
        fix_hash(last(folder), "model")

    def repeated(folder: Path) -> None:
        file = last(folder) / "training.pt"
        value = torch.load(file, weights_only=True)
        state = next(v for v in value["hooks"]["optimization_stepper"].values() if "state" in v)
        first = next(iter(state["state"].values()))
        first["exp_avg"] = torch.zeros(1).expand(1 << 40)  # 4 TB, if it is copied
        torch.save(value, file)
        fix_hash(last(folder), "training")

    def laughs(folder: Path) -> None:
        value: Any = "ha"
        for _ in range(30):
            value = [value] * 10
        save_as(folder, "training", {"frames": 200, "hooks": value})

    yield "model: a compressed archive", compressed
    yield "training: a tensor that repeats itself", repeated
    yield "training: lists in lists in lists", laughs


# A folder that can't be written to ---------------------------------------------------------------


def read_only(place: Path) -> str | None:
    """Resume in a folder without permission to write."""
    folder = place / "mpo"
    shutil.copytree(base("mpo"), folder, symlinks=True)
    for directory, _, files in os.walk(folder):
        os.chmod(directory, 0o555)
        for name in files:
            if not os.path.islink(Path(directory, name)):
                os.chmod(Path(directory, name), 0o444)
    os.chmod(place, 0o755)
    before = listing(place)
    if os.getuid() == 0:  # to whom permissions mean nothing
        os.setresuid(65534, 65534, 65534)
    try:
        resume(folder)
    except CheckpointError as error:
        changed = " but it changed" if listing(place) != before else ""
        return f"refused{changed}: {error}" if changed or "Permission" not in str(error) else None
    return "it was accepted"


def full_disk(place: Path) -> str | None:
    """Begin a run where no checkpoint can be written."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (6_000, 6_000))
    try:
        trained.train(place / "run", "mpo")
    except CheckpointError as error:
        return None if "no checkpoint can be written" in str(error) else str(error)
    return "it trained without a checkpoint"


def full_disk_by_command(place: Path) -> str | None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (6_000, 6_000))
    try:
        _command("train", "mpo", f"run_dir={place / 'run'}", "total_frames=2000")
    except CheckpointError:
        return None
    return "exit status 0 without a checkpoint"


# All of them -------------------------------------------------------------------------------------


def cases(rng: random.Random, quick: bool) -> Iterator[Case]:
    for kind in ("mpo", "ppo"):
        base(kind)
    both = (resume, act)
    found: list[Case] = []

    def add(name: str, damage: Damage, use: Callable[[Path], None], kind: str = "mpo") -> None:
        found.append(Case(f"{use.__name__}: {name}", refused(kind, damage, use)))

    for name, damage in manifests():
        # What acting does not read does not disturb it.
        add(
            name, damage, resume if re.search("wall|best|rows|metadata", name) else rng.choice(both)
        )
    for name, damage in parts(rng, 12 if quick else 90):
        kind = "mpo" if "replay" in name else rng.choice(("mpo", "ppo"))
        add(name, damage, resume, kind)
    for name, damage in tables():
        add(name, damage, resume)
    for name, damage in settings():
        needed = "callbacks" not in name
        add(name, damage, rng.choice(both) if needed else resume)
    for name, damage, needed in kinds():
        add(name, damage, rng.choice(both) if needed and "training" not in name else resume)
    for name, damage in pickles():
        add(name, damage, resume)
    for name in ("config.yaml", "eval.csv", "summary.json"):
        for kind in ("a link", "a pipe", "a folder"):
            add(f"{name} is {kind}", other_kind(name, kind), report)
    some = rng.sample([*manifests(), *tables(), *settings(), *pickles()], 6)
    for name, damage in some:
        add(name, damage, resume_by_command)
    for name, damage in rng.sample([*pickles()], 3):
        part = "model"
        if name.startswith(part):
            add(name, damage, evaluate_by_command)
    if quick:
        found = rng.sample(found, 60)
    found += [
        Case("resume: read-only", read_only),
        Case("train: full disk from the start", full_disk),
        Case("train: full disk from the start, by command", full_disk_by_command),
    ]
    yield from found
