"""Checkpoints that are either complete or not there, and that run no code when they are loaded."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import re
import secrets
import shutil
import stat
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from minerva_torchrl.objectives.checks import check_choice, check_count
from minerva_torchrl.runs.atomic import TEMPORARY, check_kind, flush_folder, open_file
from minerva_torchrl.runs.manifest import (
    FORMAT,
    MANIFEST,
    PART_NAME,
    VERSION,
    CheckpointError,
    check_archive,
    package_versions,
    read_manifest,
    verify_part,
)

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CheckpointStore",
    "open_checkpoint",
]

# The links, and how the names of the folders that they point to begin.
_PREFIXES = {"last": "frames", "best": "best"}
_PLAIN_TYPES = (bool, float, complex, str, type(None), torch.Size, torch.dtype, torch.device)
# Longer integers are pickled in a way that a safe load does not know.
_MAX_INTEGER_BITS = 2039


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk, verified by :func:`open_checkpoint`."""

    path: Path
    """Folder of the checkpoint, not a link to it."""
    frames: int
    """Number of frames when it was saved."""
    metadata: dict[str, Any]
    """What was saved with it as JSON."""
    parts: tuple[str, ...]
    """Names of its parts."""
    versions: dict[str, str] = field(default_factory=dict)
    """The packages that it was made with; none if they are not known."""

    def other_versions(self) -> list[str]:
        """What is installed in another version now, such as ``"torch 2.6.0 (now 2.7.0)"``."""
        now = package_versions()
        return [
            f"{name} {version} (now {now[name]})"
            for name, version in self.versions.items()
            if name in now and now[name] != version
        ]

    def load(self, part: str) -> Any:
        """A part, with its tensors on the CPU. A file that would run code is refused."""
        if part not in self.parts:
            raise CheckpointError(
                f"{self.path}: has no part {part!r}, only {', '.join(self.parts) or 'none'}."
            )
        file = self.path / f"{part}.pt"
        try:
            with open_file(file) as stream:
                check_archive(stream)
                value = torch.load(stream, map_location="cpu", weights_only=True)
                _check_items(value, os.fstat(stream.fileno()).st_size)
                return value
        except (pickle.UnpicklingError, zipfile.BadZipFile):
            # PyTorch's message is long, and its advice is to load the file without safety.
            raise CheckpointError(
                f"{file}: refused, because it is not a file of tensors and plain values only."
            ) from None
        except Exception as error:
            reason = str(error).partition("\n")[0]
            raise CheckpointError(
                f"{file}: can't be loaded ({type(error).__name__}: {reason})."
            ) from None


class CheckpointStore:
    """Checkpoints in one folder, with the links ``last`` and ``best`` to those in use.

    A process that is killed at any moment, or a full disk, leaves ``last`` and ``best`` at complete
    checkpoints: a new one is written under a temporary name, flushed to the disk, renamed and only
    then linked to. Older ones go after that, so there must be room for one more than is kept.

    Only one process at a time may save into a folder.

    Args:
        folder (Path or str): folder of the checkpoints. The first save makes it.

    Keyword Args:
        keep (int): number of checkpoints to keep, the newest, besides those that are linked to.
            Defaults to ``1``.

    Examples:
        >>> import tempfile
        >>> store = CheckpointStore(Path(tempfile.mkdtemp()) / "checkpoints")
        >>> path = store.save({"policy": {"scale": torch.ones(2)}}, frames=20_000)
        >>> path.name
        'frames-000020000'
        >>> checkpoint = open_checkpoint(store.folder / "last")
        >>> checkpoint.frames, checkpoint.parts
        (20000, ('policy',))
        >>> checkpoint.load("policy")
        {'scale': tensor([1., 1.])}
    """

    def __init__(self, folder: Path | str, *, keep: int = 1) -> None:
        check_count("keep", keep)
        self.folder = Path(folder).resolve()
        self.keep = keep

    def save(
        self,
        parts: Mapping[str, Any],
        *,
        frames: int,
        metadata: Mapping[str, Any] = {},
        name: Literal["last", "best"] = "last",
    ) -> Path:
        """Save a checkpoint, link to it, and remove those that are not kept.

        After an error, and Ctrl-C is one, everything is as it was before.

        Args:
            parts (Mapping): values by name, one file each. A value is a dense tensor, a number, a
                string, ``None``, or a list, tuple or dict of values with keys that are strings or
                integers. Anything else raises a ``TypeError`` that says where it is. Tensors come
                back without gradients, and without the memory that they shared.

        Keyword Args:
            frames (int): number of frames so far.
            metadata (Mapping): anything that JSON can hold, and JSON has neither NaN nor infinity;
                for what is read without the parts.
            name (str): the link to set, ``"last"`` (default) or ``"best"``.

        Returns:
            The folder of the checkpoint.
        """
        check_choice("name", name, _PREFIXES)
        if type(frames) is not int or frames < 0:
            raise ValueError(f"frames must be an integer of at least 0, got {frames!r}.")
        for part in parts:
            if not PART_NAME.fullmatch(part):
                raise ValueError(
                    f"the name of a part must be letters, digits, '_', '.' or '-', got {part!r}."
                )
        safe_parts = {part: _safe_value(value, (part,)) for part, value in parts.items()}
        json_metadata = json.loads(json.dumps(dict(metadata), allow_nan=False))

        self.folder.mkdir(parents=True, exist_ok=True)
        self._turn_into_link(name)
        temporary = self._temporary_path()
        final = self._new_path(name, frames)
        try:
            _write_checkpoint(temporary, safe_parts, frames, json_metadata)
            os.rename(temporary, final)
            flush_folder(self.folder)
            self._link(name, final)
        except BaseException:
            # If the link was set already, the new checkpoint is complete and in use.
            if final not in self._linked():
                self._remove(final)
            self._remove_temporary()
            raise
        self._rotate()
        return final

    def find(self, name: str = "last") -> Path | None:
        """The folder that ``last`` or ``best`` points to, or ``None`` if there is no such link.

        A link to a folder that is gone is a :class:`CheckpointError`: whoever takes it for a new
        run starts over by mistake.
        """
        check_choice("name", name, _PREFIXES)
        link = self.folder / name
        return _follow(link) if os.path.lexists(link) else None

    def clean(self) -> None:
        """Remove what killed processes left: files under temporary names, folders never linked to.

        If ``last`` or ``best`` itself is lost, complete checkpoints of its kind all stay.
        """
        self._remove_temporary()
        folders, linked = self._folders("last"), self._linked()
        unwanted = [folder for folder in folders if not (folder / MANIFEST).exists()]
        last = self._target("last")
        if last in folders:
            # Newer than the last one: its process was killed before it could set the link.
            unwanted += folders[folders.index(last) + 1 :]
        for folder in unwanted:
            if folder not in linked:
                self._remove(folder)
        self._rotate()

    def _rotate(self) -> None:
        linked = self._linked()
        for name in _PREFIXES:
            folders = self._folders(name)
            # Without the link nothing tells which ones are in use.
            if self._target(name) in folders:
                for folder in folders[: -self.keep] if name == "last" else folders:
                    if folder not in linked:
                        self._remove(folder)

    def _folders(self, name: str) -> list[Path]:
        """Checkpoints of a kind, oldest first."""
        pattern = re.compile(_PREFIXES[name] + r"-(\d+)(?:\.(\d+))?")
        found = []
        for path in self.folder.glob(f"{_PREFIXES[name]}-*"):
            match = pattern.fullmatch(path.name)
            if match and path.is_dir() and not path.is_symlink():
                found.append((int(match[1]), int(match[2] or 0), path))
        return [path for *_, path in sorted(found)]

    def _new_path(self, name: str, frames: int) -> Path:
        """A name that is not taken, and newer than all others of the same frames."""
        stem = f"{_PREFIXES[name]}-{frames:09d}"
        taken = [path for path in self._folders(name) if path.name.partition(".")[0] == stem]
        if not taken:
            return self.folder / stem
        return self.folder / f"{stem}.{int(taken[-1].name.partition('.')[2] or 0) + 1}"

    def _target(self, name: str) -> Path | None:
        link = self.folder / name
        return Path(os.path.realpath(link)) if link.is_symlink() else None

    def _linked(self) -> set[Path | None]:
        return {self._target(name) for name in _PREFIXES}

    def _link(self, name: str, folder: Path) -> None:
        temporary = self._temporary_path()
        os.symlink(folder.name, temporary)
        os.replace(temporary, self.folder / name)
        flush_folder(self.folder)

    def _turn_into_link(self, name: str) -> None:
        """Undo what programs do that copy a folder in place of a link to it, such as ``scp -r``."""
        link = self.folder / name
        if link.is_dir() and not link.is_symlink():
            folder = self._new_path(name, read_manifest(link)["frames"])
            os.rename(link, folder)
            self._link(name, folder)

    def _temporary_path(self) -> Path:
        return self.folder / f"{TEMPORARY}{secrets.token_hex(8)}"

    def _remove(self, folder: Path) -> None:
        # Renamed first, so that half a checkpoint never looks like a whole one. What can't be
        # removed now, because it is being read over a network for example, clean() tries again.
        temporary = self._temporary_path()
        with suppress(OSError):
            os.rename(folder, temporary)
            shutil.rmtree(temporary)

    def _remove_temporary(self) -> None:
        for path in self.folder.glob(f"{TEMPORARY}*"):
            with suppress(OSError):
                if path.is_symlink():
                    path.unlink()
                else:
                    shutil.rmtree(path)


def open_checkpoint(path: Path | str, name: str = "last") -> Checkpoint:
    """Find a checkpoint and verify that all of it is there and unchanged, before any is loaded.

    Args:
        path (Path or str): a checkpoint, a link to one, a folder of checkpoints or the folder of a
            run. If the link to the last one is lost, the newest one is taken.
        name (str): which one of a folder of checkpoints or of a run, ``"last"`` (default) or
            ``"best"``.

    Returns:
        The checkpoint, of which nothing is loaded yet.

    Raises:
        CheckpointError: if there is none, or if it is incomplete, damaged, or not a checkpoint.

    Examples:
        >>> import tempfile
        >>> open_checkpoint(tempfile.mkdtemp())
        Traceback (most recent call last):
        ...
        minerva_torchrl.runs.manifest.CheckpointError: ...
    """
    path = Path(path)
    try:
        folder = _locate(path, name)
        manifest = read_manifest(folder)
        for entry in manifest["parts"].values():
            verify_part(folder / entry["file"], entry["bytes"], entry["sha256"])
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise CheckpointError(f"{error.filename or path}: can't be read ({reason}).") from None
    return Checkpoint(
        folder,
        manifest["frames"],
        manifest["metadata"],
        tuple(manifest["parts"]),
        manifest.get("versions", {}),
    )


# Reading -----------------------------------------------------------------------------------------


def _locate(path: Path, name: str) -> Path:
    if not os.path.lexists(path):
        raise CheckpointError(f"{path}: there is no such folder.")
    folder = _follow(path)
    if not folder.is_dir():
        raise CheckpointError(f"{path}: is a file, but a checkpoint is a folder.")
    if os.path.lexists(folder / MANIFEST):
        return folder
    inside = folder / "checkpoints"
    check_kind(inside, stat.S_IFDIR)
    for link in (folder / name, inside / name):
        if os.path.lexists(link):
            return _follow(link)
    for store in (CheckpointStore(folder), CheckpointStore(inside)) if name in _PREFIXES else ():
        complete = [path for path in store._folders(name) if (path / MANIFEST).exists()]
        if complete:
            return complete[-1]
    if path.is_symlink() or any(folder.glob("*.pt")):
        return folder  # a checkpoint without its manifest, which is what the error will be
    raise CheckpointError(
        f"{path}: there is no checkpoint in it: no {MANIFEST}, '{name}' or 'checkpoints/{name}'."
    )


def _follow(link: Path) -> Path:
    if link.is_symlink():
        target = os.readlink(link)
        if not link.exists():
            raise CheckpointError(f"{link}: is a link to {target}, which does not exist.")
        # Those that a run makes lead to a folder beside them. Any other is the user's own.
        if link.name in _PREFIXES and (os.sep in target or (link.parent / target).is_symlink()):
            raise CheckpointError(f"{link}: is a link to {target}, which is not beside it.")
    return link.resolve()


def _check_items(value: Any, most: int) -> None:
    """Raise if there are more items than bytes they came from: lists that hold others twice."""
    waiting, count = [value], 0
    while waiting:
        item = waiting.pop()
        if isinstance(item, (list, tuple, dict)):
            count += len(item)
            if count > most:
                raise pickle.UnpicklingError
            waiting += item.values() if isinstance(item, dict) else item


# Writing -----------------------------------------------------------------------------------------


class _HashingFile(io.BufferedWriter):
    """A file that hashes what is written to it. PyTorch writes from start to end."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "xb"))
        self.size = 0
        self.sha256 = hashlib.sha256()

    def write(self, data: Any, /) -> int:
        self.sha256.update(data)
        self.size += len(data)
        return super().write(data)

    def flush_to_disk(self) -> None:
        self.flush()
        os.fsync(self.fileno())


def _write_checkpoint(
    folder: Path, parts: dict[str, Any], frames: int, metadata: dict[str, Any]
) -> None:
    folder.mkdir()
    entries = {}
    for part, value in parts.items():
        path = folder / f"{part}.pt"
        with _HashingFile(path) as file:
            _torch_save(value, file)
            file.flush_to_disk()
        entries[part] = {"file": path.name, "bytes": file.size, "sha256": file.sha256.hexdigest()}
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "frames": frames,
        "metadata": metadata,
        "parts": entries,
        "versions": package_versions(),
    }
    with _HashingFile(folder / MANIFEST) as file:
        file.write(json.dumps(manifest, indent=2).encode())
        file.flush_to_disk()
    flush_folder(folder)


def _torch_save(value: Any, file: io.BufferedWriter) -> None:
    try:
        torch.save(value, file)
    except RuntimeError as error:
        # After an error in write(), PyTorch can't close the archive either, and raises that.
        if isinstance(error.__context__, (OSError, KeyboardInterrupt)):
            raise error.__context__ from None
        raise


def _safe_value(value: Any, path: tuple[str | int, ...]) -> Any:
    """The value as it is saved, if a load that runs no code can restore it."""
    kind = type(value)
    if kind in _PLAIN_TYPES or (kind is int and value.bit_length() <= _MAX_INTEGER_BITS):
        return value
    if isinstance(value, Tensor):
        return _safe_tensor(value, path)
    if kind in (list, tuple):
        return kind([_safe_value(item, (*path, index)) for index, item in enumerate(value)])
    if kind in (dict, OrderedDict):
        copy = kind()
        for key, item in value.items():
            if type(key) not in (str, int):
                raise TypeError(f"{_as_code(path)}: keys must be str or int, got {key!r}.")
            copy[_safe_value(key, (*path, key))] = _safe_value(item, (*path, key))
        if kind is OrderedDict:  # the state of a module keeps its versions in an attribute
            vars(copy).update(_safe_value(vars(value), path))
        return copy
    if kind is int:
        raise _unsafe(value, path, f"it has more than {_MAX_INTEGER_BITS} bits")
    if kind.__module__.partition(".")[0] == "numpy" or kind in (bytes, bytearray):
        raise _unsafe(value, path, "use a tensor")
    raise _unsafe(value, path, "use tensors, numbers, strings, lists, tuples and dicts")


def _safe_tensor(tensor: Tensor, path: tuple[str | int, ...]) -> Tensor:
    plain = tensor.detach()  # takes off gradients, and attributes that could hold anything
    is_dense = plain.layout is torch.strided and not (plain.is_quantized or plain.is_nested)
    if type(plain) is not Tensor or plain.is_meta or not is_dense:
        raise _unsafe(tensor, path, "use a dense, plain tensor")
    # Of a view, PyTorch would save all the memory behind it.
    is_view = plain.untyped_storage().nbytes() > plain.numel() * plain.element_size()
    return plain.clone() if is_view else plain


def _unsafe(value: Any, path: tuple[str | int, ...], advice: str) -> TypeError:
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    return TypeError(f"{_as_code(path)}: {name} can't be loaded safely; {advice}.")


def _as_code(path: tuple[str | int, ...]) -> str:
    part, *keys = path
    steps = (f".{key}" if str(key).isidentifier() else f"[{key!r}]" for key in keys)
    return f"{part}{''.join(steps)}"
