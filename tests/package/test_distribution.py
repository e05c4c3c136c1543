"""The wheel and the sdist: built, installed with their dependencies in an empty environment, and used from there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

import pytest

from decompose_k import __version__

ROOT = Path(__file__).parents[2]
CONSTRAINTS = ROOT / "environments" / "development.txt"

USE = """
import decompose_k as dk, torch
a, b = torch.randn(16, 8192), torch.randn(8192, 16)
difference = dk.matmul(a, b, activation="relu") - torch.relu(a @ b)
assert difference.abs().max() < 1e-2, difference
print(dk.__version__, dk.__file__)
"""


@pytest.fixture(scope="session")
def distributions(tmp_path_factory):
    """Path of the wheel and of the sdist; the wheel is built from the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return next(folder.glob("*.whl")), next(folder.glob("*.tar.gz"))


@pytest.fixture(scope="session")
def installed(distributions):
    """The `bin` folder of an environment that holds the wheel, what it depends on and nothing more."""
    wheel, _ = distributions
    # Large, and so removed at once rather than kept with the latest few temporary folders of pytest.
    with tempfile.TemporaryDirectory(prefix="decompose-k-") as folder:
        venv.create(folder, with_pip=True)
        scripts = Path(folder) / "bin"
        command = [scripts / "python", "-m", "pip", "install", "--quiet", "--constraint", CONSTRAINTS, wheel]
        subprocess.run(command, check=True, env=clean_environment())
        yield scripts


def clean_environment() -> dict[str, str]:
    """This process's environment without what would let the checkout shine through."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}


def run(command: list[object], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=clean_environment())


def test_the_wheel_holds_the_package_alone(distributions):
    names = zipfile.ZipFile(distributions[0]).namelist()
    info = f"decompose_k-{__version__}.dist-info"
    assert {name.partition("/")[0] for name in names} == {"decompose_k", info}
    package = ROOT / "src" / "decompose_k"
    files = [*package.rglob("*.py"), *(file for file in (package / "data").rglob("*") if file.is_file())]
    sources = {str(file.relative_to(ROOT / "src")) for file in files}
    assert {"decompose_k/py.typed", "decompose_k/data/shapes.csv", f"{info}/licenses/LICENSE"} | sources <= set(names)


def test_the_sdist_can_be_tested(distributions):
    top = f"decompose_k-{__version__}"
    with tarfile.open(distributions[1]) as archive:
        names = archive.getnames()
    wanted = ("Makefile", "README.md", "tests/conftest.py", "environments/development.txt", "src/decompose_k/py.typed")
    assert {f"{top}/{name}" for name in wanted} <= set(names)


def test_the_installed_package_multiplies(installed, tmp_path):
    result = run([installed / "python", "-c", USE], tmp_path)
    assert result.returncode == 0, result.stderr
    version, file = result.stdout.split()
    assert version == __version__
    assert Path(file).is_relative_to(installed.parent)


def test_its_metadata_has_the_version(installed, tmp_path):
    code = "import importlib.metadata as m; print(m.version('decompose-k'))"
    assert run([installed / "python", "-c", code], tmp_path).stdout.strip() == __version__


@pytest.mark.parametrize("command", [["decompose-k"], ["python", "-m", "decompose_k"]], ids=["script", "module"])
def test_without_the_extra_the_command_says_how_to_get_it(installed, tmp_path, command):
    result = run([installed / command[0], *command[1:], "info"], tmp_path)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    # A torch without NumPy may say so first.
    *_, last = result.stderr.splitlines()
    assert re.fullmatch(r"decompose-k: .*pip install 'decompose-k\[cli\]'.*", last)


def test_the_environment_is_consistent(installed, tmp_path):
    result = run([installed / "python", "-m", "pip", "check"], tmp_path)
    assert result.returncode == 0, result.stdout
