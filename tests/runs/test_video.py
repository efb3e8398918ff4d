from __future__ import annotations

import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from minerva_torchrl.runs.video import require_video_support, write_video


def read(path: Path) -> tuple[np.ndarray, dict]:
    import imageio.v2 as imageio

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # the reader leaves its pipes open
        with imageio.get_reader(path) as reader:
            return np.stack([np.asarray(frame) for frame in reader]), reader.get_meta_data()


def fade(height: int, width: int, count: int = 10) -> list[np.ndarray]:
    """Red on the left, blue on the right, and more and more green."""
    frames = np.zeros((count, height, width, 3), np.uint8)
    frames[:, :, : width // 2, 0] = 200
    frames[:, :, width // 2 :, 2] = 200
    frames[..., 1] = np.linspace(0, 180, count).astype(np.uint8)[:, None, None]
    return list(frames)


@pytest.fixture
def ffmpeg() -> None:
    pytest.importorskip("imageio_ffmpeg")


@pytest.mark.usefixtures("ffmpeg")
@pytest.mark.parametrize(
    ("height", "width"), [(240, 320), (50, 70), (51, 70), (50, 71), (51, 71), (1, 1)]
)
def test_what_is_written_is_read(tmp_path: Path, height: int, width: int) -> None:
    frames = fade(height, width)
    write_video(tmp_path / "video.mp4", frames, fps=25)
    video, meta = read(tmp_path / "video.mp4")
    assert video.shape == (10, height + height % 2, width + width % 2, 3)
    assert (meta["codec"], meta["fps"]) == ("h264", 25.0)
    assert meta["pix_fmt"].startswith("yuv420p")
    error = np.abs(video[:, :height, :width].astype(float) - np.stack(frames))
    middle = slice(width // 2 - 2, width // 2 + 2)  # where colours of half the resolution mix
    error[:, :, middle] = 0
    assert error.max() < 12
    assert np.array_equal(np.diff(video[:, 0, 0, 1].astype(int)) > 10, [True] * 9)  # in order


@pytest.mark.usefixtures("ffmpeg")
def test_repeats_the_edge_of_odd_sizes(tmp_path: Path) -> None:
    write_video(tmp_path / "video.mp4", fade(51, 71), fps=25)
    video, _ = read(tmp_path / "video.mp4")
    assert np.abs(video[:, -1].astype(float) - video[:, -2]).max() < 12
    assert np.abs(video[:, :, -1].astype(float) - video[:, :, -2]).max() < 12


@pytest.mark.usefixtures("ffmpeg")
def test_replaces_a_file_and_makes_directories(tmp_path: Path) -> None:
    path = tmp_path / "videos" / "eval" / "video.mp4"
    write_video(str(path), fade(16, 16), fps=30)
    write_video(path, np.stack(fade(32, 48, count=3)), fps=30)
    assert read(path)[0].shape == (3, 32, 48, 3)
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.usefixtures("ffmpeg")
def test_a_failure_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "video.mp4"
    path.write_text("as before")
    remaining = iter(fade(16, 16))

    def fail_at_the_fourth(frame: np.ndarray, *args, **kwargs) -> np.ndarray:
        if not np.array_equal(frame, next(remaining)) or frame[0, 0, 1] > 50:
            raise RuntimeError("out of frames")
        return frame

    monkeypatch.setattr(np, "pad", fail_at_the_fourth)
    with pytest.raises(RuntimeError, match="out of frames"):
        write_video(path, fade(16, 16), fps=30)
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_text() == "as before"


@pytest.mark.usefixtures("ffmpeg")
def test_a_failure_of_ffmpeg_is_raised(tmp_path: Path) -> None:
    (tmp_path / "video.mp4").mkdir()
    with pytest.raises(OSError, match=r"video\.mp4"):
        write_video(tmp_path / "video.mp4", fade(16, 16), fps=30)
    assert [path.name for path in tmp_path.iterdir()] == ["video.mp4"]


@pytest.mark.parametrize(
    ("path", "frames", "fps", "error", "message"),
    [
        ("video.gif", fade(16, 16), 30, ValueError, r"must end in \.mp4, got video\.gif"),
        ("video.mp4", [], 30, ValueError, "at least one picture"),
        ("video.mp4", fade(16, 16), 0, ValueError, "fps must be at least 1"),
        ("video.mp4", fade(16, 16), 29.97, TypeError, "fps must be an integer"),
        ("video.mp4", fade(16, 16) + fade(16, 18), 30, ValueError, r"\[16, 16, 3\] and \[16, 18"),
        ("video.mp4", [np.zeros((16, 16, 3))], 30, ValueError, "uint8 .* got float64"),
        ("video.mp4", [np.zeros((16, 16), np.uint8)], 30, ValueError, r"got uint8 and \[16, 16\]"),
        ("video.mp4", [np.zeros((16, 16, 4), np.uint8)], 30, ValueError, r"\[16, 16, 4\]"),
    ],
)
def test_bad_arguments(path: str, frames, fps, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        write_video(path, frames, fps)


@pytest.mark.parametrize("module", ["imageio", "imageio_ffmpeg"])
def test_tells_what_to_install(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    message = r'imageio-ffmpeg: pip install "minerva_torchrl\[video\]"'
    with pytest.raises(ImportError, match=message):
        require_video_support()
    with pytest.raises(ImportError, match=message):
        write_video(tmp_path / "videos" / "video.mp4", fade(16, 16), fps=30)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("ffmpeg")
def test_support_is_there() -> None:
    require_video_support()
