"""The manifest of a checkpoint: what must be in it, and how its files are verified."""

from __future__ import annotations

import hashlib
import json
import os
import re
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from importlib import metadata as packages
from pathlib import Path
from typing import Any, BinaryIO

from minerva_torchrl.runs.atomic import check_kind, open_file, read_file

__all__ = [
    "FORMAT",
    "MANIFEST",
    "PART_NAME",
    "VERSION",
    "CheckpointError",
    "check_archive",
    "is_count",
    "mismatch",
    "package_versions",
    "read_manifest",
    "verify_part",
]

FORMAT = "minerva_torchrl checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
_LARGEST_MANIFEST = 1 << 20
_LARGEST_COUNT = 2**63 - 1
# What the numbers in a run depend on.
_PACKAGES = ("minerva_torchrl", "torch", "torchrl", "tensordict", "mujoco")
PART_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
"""What parts may be called."""


class CheckpointError(Exception):
    """A checkpoint can't be read. The message is one line that names the path and the reason."""


@cache
def package_versions() -> dict[str, str]:
    """Versions of what the numbers in a run depend on; what is not installed is left out."""
    found = {}
    for name in _PACKAGES:
        with suppress(packages.PackageNotFoundError):
            found[name] = packages.version(name)
    return found


def read_manifest(folder: Path) -> dict[str, Any]:
    """What the manifest in the folder of a checkpoint says; an error if it is not well-formed.

    Args:
        folder (Path): the folder.
    """
    file = folder / MANIFEST
    try:
        data = read_file(file, limit=_LARGEST_MANIFEST)
        manifest = json.loads(data, parse_constant=_refuse, object_pairs_hook=_without_duplicates)
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder}: has no {MANIFEST}, so it is incomplete or not a checkpoint."
        ) from None
    except (ValueError, RecursionError):
        raise CheckpointError(f"{file}: is not JSON, so it is damaged or foreign.") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{file}: is not the manifest of a {FORMAT}.")
    version = manifest.get("version")
    if type(version) is int and version > VERSION:
        raise CheckpointError(
            f"{file}: has version {version}, newer than version {VERSION} that this "
            "minerva_torchrl can read; update it."
        )
    problem = mismatch(manifest, _MANIFEST_FIELDS, optional=("versions",))
    for part, entry in manifest["parts"].items() if problem is None else ():
        # Other names could lead out of the folder.
        if not PART_NAME.fullmatch(part) or (entry or {}).get("file", "") != f"{part}.pt":
            problem = f"the part {part!r} is not allowed"
        elif inside := mismatch(entry, _PART_FIELDS):
            problem = f"of the part {part!r}, {inside}"
    if problem is not None:
        raise CheckpointError(f"{file}: is not what a {FORMAT} has: {problem}.")
    return manifest


def is_count(value: object) -> bool:
    """Whether a value is an integer of at least 0, that fits into 64 bits."""
    return type(value) is int and 0 <= value <= _LARGEST_COUNT


def mismatch(
    values: Any, fields: Mapping[str, Callable[[Any], bool]], optional: tuple[str, ...] = ()
) -> str | None:
    """What is wrong with a JSON object whose fields must satisfy conditions; ``None`` if nothing.

    Args:
        values (Any): what was found in place of the object.
        fields (mapping): conditions by name. There may be no other field.
        optional (tuple of str): fields that may be missing. Defaults to none.

    Examples:
        >>> mismatch({"frames": -5}, {"frames": is_count})
        "frames is '-5'"
    """
    if type(values) is not dict:
        return f"there is {str(values)[:40]!r} in place of an object"
    for name in fields.keys() - values.keys() - {*optional}:
        return f"{name} is missing"
    for name, value in values.items():
        if name not in fields:
            return f"there is an unknown {name[:40]!r}"
        if not fields[name](value):
            return f"{name} is {str(value)[:40]!r}"
    return None


def _are_versions(value: Any) -> bool:
    return type(value) is dict and all(
        type(version) is str
        and re.fullmatch(r"\w{1,40}", name)
        and re.fullmatch(r"[\w.+!-]{1,80}", version)
        for name, version in value.items()
    )


_MANIFEST_FIELDS: dict[str, Callable[[Any], bool]] = {
    "format": lambda value: value == FORMAT,
    "version": lambda value: type(value) is int and value == VERSION,
    "frames": is_count,
    "metadata": lambda value: type(value) is dict,
    "parts": lambda value: type(value) is dict and all(type(e) is dict for e in value.values()),
    "versions": _are_versions,
}
_PART_FIELDS: dict[str, Callable[[Any], bool]] = {
    "file": lambda value: type(value) is str,
    "bytes": is_count,
    "sha256": lambda value: type(value) is str and bool(re.fullmatch("[0-9a-f]{64}", value)),
}


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON.")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a name is there twice.")
    return values


def check_archive(stream: BinaryIO) -> None:
    """Raise unless a file is an archive as PyTorch writes it, which unpacks to its own size."""
    with zipfile.ZipFile(stream) as archive:
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
            raise zipfile.BadZipFile
    stream.seek(0)


def verify_part(file: Path, size: int, sha256: str) -> None:
    """Raise unless a file is as it was when it was saved.

    Args:
        file (Path): the file.
        size (int): bytes that it had.
        sha256 (str): its SHA-256.
    """
    if not check_kind(file):
        raise CheckpointError(f"{file}: is missing; use another checkpoint.")
    actual = hashlib.sha256()
    with open_file(file) as stream:
        found = os.fstat(stream.fileno()).st_size
        if found != size:
            problem = f"has {found} bytes instead of {size}"
            raise CheckpointError(f"{file}: {problem}; use another checkpoint.")
        while chunk := stream.read(1 << 20):
            actual.update(chunk)
    if actual.hexdigest() != sha256:
        problem = "is corrupt, its SHA-256 is not that of the manifest"
        raise CheckpointError(f"{file}: {problem}; use another checkpoint.")
