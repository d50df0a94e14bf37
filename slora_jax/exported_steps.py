"""Lowered steps on disk: an engine that starts again neither traces nor lowers them again.

Both are Python, and take seconds for a step of Pallas kernels, one shape after the other. XLA's own cache
(`compile_cache`) is only asked with the result. A file here is that result: StableHLO, kernels included,
as `jax.export` serializes it. Its name is a digest of all that it is made of.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.metadata
import logging
import os
import pathlib
import threading
import time
import zlib
from collections.abc import Hashable, Sequence
from typing import Any

import jax
from jax import export

logger = logging.getLogger(__name__)

# Whatever a step's modules import: what it is traced from, and more.
_PACKAGES = (
    "slora_jax",
    "slora_jax.lora",
    "slora_jax.memory",
    "slora_jax.models",
    "slora_jax.pallas_kernels",
    "slora_jax.scheduling",
    "slora_jax.sharding",
)
_DISTRIBUTIONS = ("slora-jax", "jax", "jaxlib", "flax")
# Settings of JAX whose names have these words change no step.
_UNRELATED = ("cache", "dump", "log", "mtls", "platform", "proxy", "timeout", "traceback", "trans", "visible")
# Calls whose formats jax does not promise to keep: versions are part of the name.
_UNSTABLE = tuple(export.DisabledSafetyCheck.custom_call(f"mosaic_gpu_v{n}") for n in (1, 2, 3))
_DIGEST = hashlib.sha256
_UNUSED_DAYS = 60  # after which a file is deleted


class ExportedSteps:
    """The files of one engine's steps in `folder`; safe in any thread.

    `identity`: all that a step's function closes over beside the package's own source, told apart by `repr`.
    `platforms`, in jax.export's words: what steps are lowered for (None: where this process computes).
    """

    def __init__(
        self, folder: pathlib.Path, identity: Sequence[object], platforms: Sequence[str] | None = None
    ) -> None:
        self._folder, self._platforms = folder, platforms
        made_of = [platforms, _versions(), _settings(), *identity]
        self._identity = _SOURCES + repr(made_of).encode()
        self._failed = threading.Event()
        self._delete_unused()

    def lower(self, part: Hashable, step: Any, args: Any, donate: Sequence[int]) -> Any:
        """`step`, a jitted function that donates these of its arguments, lowered for abstract `args`: from
        what was kept; or it is kept from now on.

        `part` names it among the engine's.
        """
        try:
            exported = self._exported(part, step, args)
            return jax.jit(exported.call, donate_argnums=tuple(donate)).lower(*args)
        except ValueError as error:  # such as a call whose format jax does not promise to keep
            self._complain("a step cannot be exported: %s", error)
            return step.lower(*args)

    def _exported(self, part: Hashable, step: Any, args: Any) -> export.Exported:
        leaves, tree = jax.tree.flatten(args)
        described = [(a.shape, a.dtype.name, a.sharding.spec) for a in leaves]
        precision = jax.config.jax_default_matmul_precision
        name = _DIGEST(self._identity + repr((part, str(tree), described, precision)).encode()).hexdigest()
        path = self._folder / name
        found = self._read(path)
        if found is None:
            found = export.export(step, platforms=self._platforms, disabled_checks=_UNSTABLE)(*args)
            if _sources() == _SOURCES:  # else it is of code that is not on disk any more
                self._write(path, found)
        return found

    def _read(self, path: pathlib.Path) -> export.Exported | None:
        """None where there is no such file, or none that can be used."""
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._complain("%s cannot be read: %s", path, error.strerror)
            return None
        digest, packed = content[: _DIGEST().digest_size], content[_DIGEST().digest_size :]
        if _DIGEST(packed).digest() != digest:
            logger.warning("%s is damaged: the step is lowered again", path)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # it is used
        return export.deserialize(bytearray(zlib.decompress(packed)))

    def _write(self, path: pathlib.Path, step: export.Exported) -> None:
        """Whole or not at all, whoever else writes it."""
        packed = zlib.compress(step.serialize(), 1)
        part = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            part.write_bytes(_DIGEST(packed).digest() + packed)
            part.replace(path)
        except OSError as error:
            self._complain("%s cannot be written: %s", path, error.strerror)
        finally:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)

    def _delete_unused(self) -> None:
        before = time.time() - _UNUSED_DAYS * 86400
        with contextlib.suppress(OSError):
            for path in list(self._folder.iterdir()):
                if path.stat().st_mtime < before:
                    path.unlink(missing_ok=True)

    def _complain(self, message: str, *args: object) -> None:
        """Once: what cannot be kept is lowered at each start."""
        if not self._failed.is_set():
            self._failed.set()
            logger.warning(f"{message}; steps are lowered anew at each start", *args)


def _versions() -> list[tuple[str, str]]:
    return [(name, importlib.metadata.version(name)) for name in _DISTRIBUTIONS]


def _settings() -> list[tuple[str, Any]]:
    values = jax.config.values.items()
    return sorted((name, value) for name, value in values if not any(word in name for word in _UNRELATED))


def _sources() -> bytes:
    """A digest of the package's code that steps are traced from, as it lies on disk."""
    digest = _DIGEST()
    for package in _PACKAGES:
        for folder in importlib.import_module(package).__path__:
            for path in sorted(pathlib.Path(folder).glob("*.py*")):
                digest.update(f"{package}/{path.name}".encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.digest()


_SOURCES = _sources()  # as they are imported
