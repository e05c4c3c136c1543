"""Every environment variable that the library reads, in one table.

| variable | meaning | default |
|---|---|---|
| `DECOMPOSE_K_BACKEND` | what `backend="auto"` stands for: auto, torch or triton; read once per kind of call | auto |
| `DECOMPOSE_K_CACHE_DIR` | where remembered choices are kept | the user's cache directory + `decompose-k` |
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

BACKENDS = ("auto", "torch", "triton")


def default_backend() -> str:
    """What `backend="auto"` stands for in this process; raises ValueError for an unknown name."""
    name = os.environ.get("DECOMPOSE_K_BACKEND", "auto")
    if name not in BACKENDS:
        raise ValueError(f"DECOMPOSE_K_BACKEND must be one of {', '.join(BACKENDS)}; got {name!r}")
    return name


def cache_directory() -> Path:
    """Where remembered choices are kept; the directory is not created here."""
    chosen = os.environ.get("DECOMPOSE_K_CACHE_DIR")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "decompose-k"


@contextlib.contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Set variables that other libraries read, in this process and those that it starts, until the end."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
