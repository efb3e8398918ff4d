"""The release: what is built works without the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the source archive, and the wheel that is built from it."""
    pytest.importorskip("build")
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "build", "--outdir", folder, ROOT], check=True)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    [file] = built.glob("*.whl")
    return file


def test_source_archive(built: Path) -> None:
    [file] = built.glob("*.tar.gz")
    with tarfile.open(file) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "minerva_torchrl/py.typed"} <= names


def test_contents(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    sources = {p.relative_to(ROOT).as_posix() for p in (ROOT / "minerva_torchrl").rglob("*.py")}
    assert sources <= set(names)
    assert "minerva_torchrl/py.typed" in names
    assert not [name for name in names if name.startswith(("tests/", "docs/", "benchmarks/"))]


def test_trains_in_a_clean_environment(wheel: Path, tmp_path: Path) -> None:
    """Dependencies are those of this environment, the package is installed from the wheel."""
    variables = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    variables |= {"OMP_NUM_THREADS": "1"}
    home = tmp_path / "venv"
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    install = [python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", wheel]
    # With the checkout on its path pip would find the package installed already.
    subprocess.run(install, cwd=tmp_path, env=variables, check=True)
    # A .pth file makes packages importable without running the .pth files beside them, among which
    # is that of the editable install of the checkout.
    (Path(site) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def run(*arguments: str) -> str:
        command = [str(python), *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = run(
        "-c", "import minerva_torchrl; minerva_torchrl.MPOLoss; print(minerva_torchrl.__file__)"
    )
    assert Path(where.strip()).is_relative_to(home)
    run("-m", "minerva_torchrl", "train", "mpo", "total_frames=2000", "run_dir=run")
    assert (tmp_path / "run" / "summary.json").is_file()
