"""Imports run one way, server -> slora_jax -> {sharding, pallas_kernels} -> jax; all others are declared."""

from __future__ import annotations

import ast
import dataclasses
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = {"slora_jax": "slora_jax"} | {
    folder: f"slora_jax.{folder}" for folder in ("pallas_kernels", "sharding", "server")
}
OUTSIDE = ("tests", "benchmarks", "examples")
LAZY_SERVER_IMPORT = "slora_jax.cli.serve"  # the one place below the server that may start it


@dataclasses.dataclass(frozen=True)
class Import:
    importer: str  # module
    imported: str  # module, or module.name for `from module import name`
    lazy: bool  # inside a function
    where: str  # file:line

    def reaches(self, package: str) -> bool:
        return self.imported == package or self.imported.startswith(package + ".")


def _module(path: Path) -> str:
    folder, *rest = path.relative_to(ROOT).with_suffix("").parts
    parts = [PACKAGES.get(folder, folder), *rest]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(path: Path) -> Iterator[Import]:
    tree = ast.parse(path.read_text(), str(path))
    lazy = {
        id(inner)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for inner in ast.walk(function)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write the import absolutely"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        where = f"{path.relative_to(ROOT)}:{node.lineno}"
        yield from (Import(_module(path), name, id(node) in lazy, where) for name in names)


def _all_imports(*folders: str) -> list[Import]:
    return [found for folder in folders for path in (ROOT / folder).rglob("*.py") for found in _imports(path)]


@pytest.mark.parametrize("folder", ["pallas_kernels", "sharding"])
def test_the_lowest_layers_know_nothing_of_each_other_or_of_the_engine(folder: str) -> None:
    wrong = [i for i in _all_imports(folder) if i.reaches("slora_jax") and not i.reaches(PACKAGES[folder])]
    assert not wrong


def test_the_engine_does_not_know_the_server() -> None:
    wrong = [
        i
        for i in _all_imports("slora_jax")
        if i.reaches("slora_jax.server") and not (i.importer == LAZY_SERVER_IMPORT and i.lazy)
    ]
    assert not wrong


def test_packages_do_not_import_what_stands_outside_them() -> None:
    wrong = [i for i in _all_imports(*PACKAGES) if any(i.reaches(folder) for folder in OUTSIDE)]
    assert not wrong


def test_benchmarks_reach_the_server_over_http_only() -> None:
    assert not [i for i in _all_imports("benchmarks") if i.reaches("slora_jax.server")]


def test_nothing_imports_a_test_module() -> None:
    """What tests share lies beside them, in modules without tests."""
    wrong = [i for i in _all_imports(*OUTSIDE) if re.match(r"tests\.(\w+\.)*test_", i.imported)]
    assert not wrong


def test_nothing_imports_a_mapped_folder_by_its_bare_name() -> None:
    bare = ("pallas_kernels", "sharding", "server")
    wrong = [i for i in _all_imports(*PACKAGES, *OUTSIDE) if any(i.reaches(name) for name in bare)]
    assert not wrong


def test_every_subpackage_is_listed_in_pyproject() -> None:
    found = {_module(path) for folder in PACKAGES for path in (ROOT / folder).rglob("__init__.py")}
    homeless = {
        str(path.relative_to(ROOT))
        for folder in PACKAGES
        for path in (ROOT / folder).rglob("*.py")
        if not (path.parent / "__init__.py").exists()
    }
    assert sorted(PYPROJECT["tool"]["setuptools"]["packages"]) == sorted(found)
    assert not homeless, "these lie in a folder without __init__.py, so no wheel would hold them"


def test_every_third_party_import_is_a_declared_dependency() -> None:
    declared = {_normal(re.split(r"[\s<>=!~;\[]", d)[0]) for d in PYPROJECT["project"]["dependencies"]}
    declared |= {"jaxlib"}  # jax pins it
    providers = importlib.metadata.packages_distributions()
    undeclared = {
        i.where: i.imported
        for i in _all_imports(*PACKAGES)
        if (top := i.imported.split(".")[0]) not in sys.stdlib_module_names
        and top != "slora_jax"
        and not declared & {_normal(name) for name in providers.get(top, ())}
    }
    assert not undeclared


def _normal(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def test_imports_leave_the_root_logger_to_the_program() -> None:
    """Else its logging.basicConfig, which the README suggests, would do nothing."""
    program = "import logging, slora_jax.server.serve, slora_jax.cli.main, slora_jax.engine\n"
    program += "assert not logging.root.handlers, logging.root.handlers"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)
