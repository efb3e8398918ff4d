"""Videos as mp4 files."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from minerva_torchrl.objectives.checks import check_count
from minerva_torchrl.runs.atomic import replace_path

__all__ = ["require_video_support", "write_video"]


def require_video_support() -> None:
    """Raise an error that says what to install if videos cannot be written.

    A run calls it before it begins, because its first video may come hours later.

    Examples:
        >>> require_video_support()
    """
    try:
        importlib.import_module("imageio")
        ffmpeg = importlib.import_module("imageio_ffmpeg")
    except ImportError as error:
        raise ImportError(
            "videos need imageio and imageio-ffmpeg: "
            f'pip install "minerva_torchrl[video]" ({error}).'
        ) from error
    ffmpeg.get_ffmpeg_exe()  # raises an error of its own, which says the same about the program


def write_video(
    path: str | os.PathLike[str],
    frames: Sequence[NDArray[np.uint8]],
    fps: int,
    *,
    progress: bool = False,
) -> None:
    """Write pictures as a video that browsers play: mp4, H.264, 4:2:0 colours.

    The file appears when it is complete, in place of one that was there before. Missing
    directories are made. Colours are halved in resolution, for which sizes must be even: an odd
    height or width becomes one larger, by repeating the last row or column.

    Args:
        path (str or path): where to, with the ending ``.mp4``.
        frames (sequence of arrays): pictures, uint8 ``[height, width, 3]``, at least one and all
            of the same size.
        fps (int): frames per second.

    Keyword Args:
        progress (bool): show how far it is, on a terminal. Defaults to ``False``.

    Examples:
        >>> import tempfile
        >>> frames = [np.full((64, 96, 3), grey, np.uint8) for grey in (0, 80, 160)]
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     path = Path(directory) / "videos" / "fade.mp4"
        ...     write_video(path, frames, fps=30)
        ...     path.exists()
        True
    """
    path = Path(path)
    _check(path, frames, fps)
    require_video_support()
    import imageio.v2 as imageio

    path.parent.mkdir(parents=True, exist_ok=True)
    with replace_path(path) as unfinished:
        writer: Any = imageio.get_writer(
            unfinished,
            format="FFMPEG",
            fps=fps,
            codec="libx264",
            pixelformat="yuv420p",
            macro_block_size=2,  # else frames would be resized to multiples of 16
            output_params=["-movflags", "+faststart"],  # plays while it is loading
        )
        with closing(writer):  # by itself it would go on writing after an error
            for frame in tqdm(
                frames, f"writing {path.name}", unit="pictures", disable=None if progress else True
            ):
                writer.append_data(_with_even_sides(frame))


def _check(path: Path, frames: Sequence[NDArray[np.uint8]], fps: int) -> None:
    check_count("fps", fps)
    if path.suffix != ".mp4":
        raise ValueError(f"path must end in .mp4, got {path}.")
    if len(frames) == 0:
        raise ValueError("frames must have at least one picture.")
    shape = frames[0].shape
    for frame in frames:
        if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[-1] != 3:
            raise ValueError(
                "frames must be of uint8 and of shape [height, width, 3], "
                f"got {frame.dtype} and {list(frame.shape)}."
            )
        if frame.shape != shape:
            raise ValueError(
                f"frames must all have the same size, got {list(shape)} and {list(frame.shape)}."
            )


def _with_even_sides(frame: NDArray[np.uint8]) -> NDArray[np.uint8]:
    height, width, _ = frame.shape
    return np.pad(frame, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")
