"""JAX's persistent compilation cache: a second start of the same engine compiles nothing."""

from __future__ import annotations

import os
import pathlib

import jax


def enable_compile_cache(directory: str | None) -> None:
    """Keep compiled steps in `directory`; None: JAX's own or `$XDG_CACHE_HOME/slora-jax/xla`; "": off.

    Raises ValueError where there can be no such folder.
    """
    if directory == "" or (directory is None and jax.config.jax_compilation_cache_dir):
        return
    home = os.environ.get("XDG_CACHE_HOME")
    path = directory or f"{home or '~/.cache'}/slora-jax/xla"
    try:
        folder = pathlib.Path(path).expanduser()
        str(folder).encode()  # which JAX's cache needs
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError, ValueError) as error:
        # RuntimeError: a ~ that is nobody's home; ValueError: a NUL character, or none of UTF-8
        reason = getattr(error, "strerror", None) or error
        reason = "there is no such home folder" if isinstance(error, RuntimeError) else reason
        origin = "environment variable XDG_CACHE_HOME" if home else "the default"
        named = f"compile_cache_dir '{path}'" if directory else f"the compile cache '{path}' ({origin})"
        raise ValueError(
            f"{named} cannot be made: {reason}; name another folder with compile_cache_dir, or '' to keep no "
            "compiled steps"
        ) from error
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def steps_folder(directory: str | None) -> pathlib.Path | None:
    """Where an engine of this `compile_cache_dir` keeps lowered steps, beside JAX's cache; None: nowhere.

    A cache that is no local folder has none.
    """
    folder = jax.config.jax_compilation_cache_dir
    if directory == "" or not folder or "://" in folder or not jax.config.jax_enable_compilation_cache:
        return None
    return pathlib.Path(folder) / "steps"
