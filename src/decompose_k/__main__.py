"""The command `decompose-k`, also as `python -m decompose_k`: the command line, or one line on how to get it."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; where its packages are missing, say which and how to install them (exit code 1)."""
    try:
        from decompose_k.cli import main as run
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich", "matplotlib"):
            raise
        sys.exit(f"decompose-k: the command line needs {error.name}; pip install 'decompose-k[cli]' brings it")
    run()


if __name__ == "__main__":
    main()
