"""The wheel holds the packages and nothing else, and runs from anywhere; no file names a registry."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAPPED = ("pallas_kernels", "sharding", "server")
PACKAGES = ("slora_jax", *MAPPED)
REGISTRY_HOSTS = tuple(
    ".".join(parts)
    for parts in (
        ("pypi", "org"),
        ("pythonhosted", "org"),
        ("npmjs", "org"),
        ("npmjs", "com"),
        ("anaconda", "org"),
        ("proxy", "golang", "org"),
        ("deb", "debian", "org"),
        ("download", "pytorch", "org"),
    )
)


def _run(*command: str | Path, cwd: Path, **environment: str) -> str:
    result = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert result.returncode == 0, f"{command} failed:\n{result.stdout}"
    return result.stdout


@pytest.fixture(scope="session")
def source_files() -> list[PurePosixPath]:
    """The files of the repository, as a clone would have them once they are committed."""
    listed = _run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    return [PurePosixPath(name) for name in listed.split("\0") if name and (ROOT / name).is_file()]


@pytest.fixture(scope="session")
def wheel(source_files: list[PurePosixPath], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the sources, so that leftovers in build/ cannot slip in."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in source_files:
        if name.parts[0] in (*PACKAGES, "pyproject.toml", "README.md"):
            target = folder / "source" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target)
    build = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-index", "--no-build-isolation")
    _run(*build, "-w", folder, "./source", cwd=folder)
    (path,) = folder.glob("*.whl")
    return path


def test_the_wheel_holds_every_file_of_the_packages_and_no_other(
    wheel: Path, source_files: list[PurePosixPath]
) -> None:
    expected = {
        str("slora_jax" / path if path.parts[0] in MAPPED else path)
        for path in source_files
        if path.parts[0] in PACKAGES
    }
    found = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    assert found == expected


def test_the_wheel_runs_from_an_empty_directory(wheel: Path, tmp_path: Path) -> None:
    environment, empty = tmp_path / "environment", tmp_path / "empty"
    empty.mkdir()
    _run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=tmp_path)
    python = environment / "bin" / "python"
    install = (sys.executable, "-m", "pip", "-q", "--python", python, "install", "--no-deps", "--no-index")
    _run(*install, wheel, cwd=tmp_path)
    # Dependencies are borrowed, the editable slora-jax is not: path files in a borrowed folder are not read.
    site = Path(
        _run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=empty).strip()
    )
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib"))

    code = """
import importlib, pkgutil, slora_jax
from slora_jax import Engine, EngineConfig, SamplingParams
names = [m.name for m in pkgutil.walk_packages(slora_jax.__path__, "slora_jax.")]
for name in names: importlib.import_module(name)
print(slora_jax.__file__)
"""
    assert str(site) in _run(python, "-c", code, cwd=empty, JAX_PLATFORMS="cpu", PYTHONPATH="")
    command = environment / "bin" / "slora-jax"
    assert "generate" in _run(command, "--help", cwd=empty, PYTHONPATH="")
    assert "slora-jax" in _run(command, "--version", cwd=empty, PYTHONPATH="")


def test_no_file_names_a_registry(source_files: list[PurePosixPath]) -> None:
    naming = [
        f"{path}: {host}"
        for path in source_files
        for host in REGISTRY_HOSTS
        if host.encode() in (ROOT / path).read_bytes()
    ]
    assert not naming, "leave hosts to pip's own configuration"
