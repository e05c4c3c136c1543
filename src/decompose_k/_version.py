"""The versions, in the one place that the build, the records and the command line read them from."""

from __future__ import annotations

import importlib.metadata

__version__ = "0.1.0"
# Of the kernels and of what a config's fields mean: timings under another one say nothing. CONTRIBUTING says when to
# raise it.
KERNEL_VERSION = "2"


def triton_version() -> str | None:
    """Version of the installed Triton, without importing it; None where there is none."""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None
