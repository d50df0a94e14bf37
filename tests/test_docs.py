"""What README.md and docs/*.md name exists: links, headings, files, names of the code, commands."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib.util
import re
from collections import defaultdict
from pathlib import Path

import pytest

from slora_jax import EngineConfig, SamplingParams
from slora_jax.server.config import ServerConfig

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = (
    "slora_jax",
    "pallas_kernels",
    "sharding",
    "server",
    "tests",
    "benchmarks",
    "examples",
    "docs",
    ".ci",
)
FOREIGN = {"atom.add", "max_loras"}  # PTX; vLLM
HISTORY = "experiments.md"  # names what was dropped, too
FENCED = re.compile(r"^( *)```.*?^\1```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FILE = re.compile(r"[\w./*-]+\.(?:py|jsonl?|md|toml|html|js)")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
TARGET = re.compile(r"(?:`|^ +)make ([a-z][a-z-]*)", re.MULTILINE)
MODULE = re.compile(r"python -m ([\w.]+)")
NAME = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*")
ONLY_IN_CODE = re.compile(r"_\w+|\w+_\w+|.*[a-z][A-Z].*|\w+\..*")  # no word of plain English

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def code_spans(page: Path) -> list[str]:
    """What stands in backticks, those that go on in the next line included."""
    text = re.sub(r"\s*\n\s*", " ", FENCED.sub("", page.read_text()))
    return re.findall(r"`([^`]+)`", text)


def anchors(page: Path) -> set[str]:
    """Those that GitHub gives a page's headings."""
    found = set[str]()
    for heading in re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text()), re.MULTILINE):
        text = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        found.add(next(a for n in range(100) if (a := f"{text}-{n}" if n else text) not in found))
    return found


@functools.cache
def files() -> list[str]:
    """Files of the repository, from its root."""
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    return [str(path.relative_to(ROOT)) for path in (*paths, *ROOT.iterdir())]


def identifiers(tree: ast.AST) -> set[str]:
    """Names that code has or uses, and strings without spaces: keys, options."""
    found = set[str]()
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name", "value"):
            value = getattr(node, field, None)
            if isinstance(value, str) and " " not in value:
                without_version = value.removesuffix("_v2")  # as CUDA's driver names functions
                found |= set(re.findall(r"\w+", without_version))
    return found


@functools.cache
def members() -> dict[str, set[str]]:
    """The identifiers inside each module, by its name without folders, and each class; "": of all."""
    found = defaultdict[str, set[str]](set)
    for path in (ROOT / name for name in files() if name.endswith(".py")):
        tree = ast.parse(path.read_text())
        found[""] |= (inside := identifiers(tree) | {path.stem, path.parent.name})
        found[path.stem] |= inside
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found[node.name] |= identifiers(node)
    return found


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in LINK.findall(FENCED.sub("", page.read_text())):
        target, _, anchor = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        if "://" not in link and not (path.exists() and (not anchor or anchor in anchors(path))):
            broken.append(link)
    assert not broken


@each_page
def test_files_exist(page: Path) -> None:
    """By their path, or the end of it; `*` is any part of a name."""
    missing = []
    for code in filter(FILE.fullmatch, code_spans(page)):
        pattern = re.compile("(.*/)?" + re.escape(code).replace(r"\*", "[^/]*"))
        if not any(pattern.fullmatch(name) for name in files()):
            missing.append(code)
    assert not missing


@pytest.mark.parametrize("page", [p for p in PAGES if p.name != HISTORY], ids=lambda page: page.name)
def test_names_occur_in_the_code(page: Path) -> None:
    """A member in its class or module, where that is ours."""
    unknown = []
    for code in code_spans(page):
        name = code.removesuffix("()")
        if name in FOREIGN or FILE.fullmatch(name) or not NAME.fullmatch(name):
            continue
        parts = name.split(".")
        owned = zip(["", *parts], parts, strict=False)
        if ONLY_IN_CODE.fullmatch(name) and any(
            part not in (members().get(owner) or members()[""]) for owner, part in owned
        ):
            unknown.append(name)
    assert not unknown


@functools.cache
def flags() -> set[str]:
    """Those that some parser has: spelled in the code, or made from the fields of a dataclass."""
    fields = {f.name for cls in (EngineConfig, SamplingParams, ServerConfig) for f in dataclasses.fields(cls)}
    made = {f"--{no}{name.replace('_', '-')}" for name in fields for no in ("", "no-")}
    trees = (ast.parse((ROOT / name).read_text()) for name in files() if name.endswith(".py"))
    nodes = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant))
    spelled = {node.value for node in nodes if isinstance(node.value, str) and FLAG.fullmatch(node.value)}
    return made | spelled | {flag.replace("--", "--no-", 1) for flag in spelled}


@each_page
def test_commands_have_the_flags_targets_and_modules_that_are_named(page: Path) -> None:
    text = page.read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(TARGET.findall(text)) <= targets
    assert [m for m in MODULE.findall(text) if importlib.util.find_spec(m) is None] == []
    assert set(FLAG.findall(text)) - flags() == set()
