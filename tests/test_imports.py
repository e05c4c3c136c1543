"""Imports point one way, heavy packages stay where they belong, and importing the package does nothing else."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import decompose_k

SOURCE = Path(__file__).parents[1] / "src" / "decompose_k"

# A module may import those before it. `kernels` and `bench` are packages: inside them any order without a circle will
# do.
ORDER = (
    *("_version", "dtypes", "epilogue", "overlap", "problem", "config", "device", "settings", "shapes"),
    *(
        "reference",
        "kernels",
        "registers",
        "legality",
        "torch_costs",
        "long_k_costs",
        "costs",
        "heuristics",
        "timing",
        "arguments",
        "entries",
        "forgetting",
        "store",
    ),
    *(
        "cache",
        "plan",
        "explain",
        "record",
        "execute",
        "guards",
        "calls",
        "accuracy",
        "search",
        "compiling",
        "tuner",
        "warm",
    ),
    *("autograd", "ops", "api", "contract", "verify", "inductor", "__init__", "bench", "cli", "__main__"),
)
# Where a package may be imported as a module is: elsewhere it would make `import decompose_k` heavy, or need an extra.
HOMES = {
    "triton": ("kernels",),
    "matplotlib": ("bench",),
    "rich": ("bench", "cli"),
    "typer": ("cli",),
}
MODULES = sorted(SOURCE.rglob("*.py"))


@dataclass(frozen=True)
class Import:
    """One imported name: `at_start` if the module's own import makes it, not a call or a type."""

    name: str
    line: int
    at_start: bool


def name_of(file: Path) -> str:
    """`bench.rows` for src/decompose_k/bench/rows.py."""
    parts = file.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1]) if len(parts) > 1 and parts[-1] == "__init__" else ".".join(parts)


def imports_of(tree: ast.AST, at_start: bool = True) -> Iterator[Import]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, at_start) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            yield from (Import(f"{node.module}.{alias.name}", node.lineno, at_start) for alias in node.names)
        else:
            is_lazy = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            is_for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            yield from imports_of(node, at_start and not is_lazy and not is_for_types)


def own_module(name: str, modules: set[str]) -> str | None:
    """The module of this package that `name` (a module, or something in one) comes from; None for other packages."""
    package, _, inside = name.partition(".")
    if package != "decompose_k":
        return None
    while inside and inside not in modules:
        inside = inside.rpartition(".")[0]
    return inside or "__init__"


IMPORTS = {name_of(file): list(imports_of(ast.parse(file.read_text()))) for file in MODULES}
NAMES = set(IMPORTS)


def top(module: str) -> str:
    return module.partition(".")[0]


def edges(module: str) -> dict[str, int]:
    """Modules of this package that a module imports, anywhere in it, each with a line that does so."""
    found = ((own_module(item.name, NAMES), item.line) for item in IMPORTS[module])
    return {name: line for name, line in found if name is not None}


def test_every_module_has_a_place_in_the_order():
    assert {top(module) for module in NAMES} - set(ORDER) == set()


@pytest.mark.parametrize("module", sorted(NAMES))
def test_no_import_points_back(module):
    place = ORDER.index(top(module))
    back = {
        name: line
        for name, line in edges(module).items()
        if top(name) != top(module) and ORDER.index(top(name)) >= place
    }
    assert back == {}, f"{module} imports what comes after it (name: line)"


def test_no_circle():
    list(TopologicalSorter({module: edges(module) for module in NAMES}).static_order())


@pytest.mark.parametrize("module", sorted(NAMES))
def test_heavy_packages_stay_at_home(module):
    strays = [
        item
        for item in IMPORTS[module]
        if item.at_start and top(module) not in HOMES.get(top(item.name), (top(module),))
    ]
    assert strays == []


@pytest.mark.parametrize("module", sorted(name for name in NAMES if top(name) != "kernels"))
def test_kernels_are_imported_when_they_are_launched(module):
    assert [item for item in IMPORTS[module] if item.at_start and item.name.startswith("decompose_k.kernels")] == []


PROBE = """
import json, sys
import decompose_k, torch
print(json.dumps({
    "modules": sorted({name.partition(".")[0] for name in sys.modules}),
    "cuda": torch.cuda.is_initialized(),
    "inductor": "decompose_k.inductor" in sys.modules,
}))
"""


@pytest.fixture(scope="module")
def bare_import(tmp_path_factory):
    """What `import decompose_k` leaves behind in a process and in a home directory of its own."""
    home = tmp_path_factory.mktemp("home")
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    environment = kept | {"HOME": str(home), "PYTHONPATH": str(SOURCE.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", PROBE]
    run = subprocess.run(command, env=environment, cwd=home, check=True, capture_output=True, text=True)
    return json.loads(run.stdout), home


@pytest.mark.parametrize("package", HOMES)
def test_import_brings_in_no_heavy_package(bare_import, package):
    left, _ = bare_import
    assert "torch" in left["modules"]
    assert package not in left["modules"]


def test_import_touches_no_gpu(bare_import):
    left, _ = bare_import
    assert left["cuda"] is False


def test_the_compiler_part_is_imported_when_it_is_asked_for(bare_import):
    left, _ = bare_import
    assert left["inductor"] is False
    assert decompose_k.inductor.enable.__module__ == "decompose_k.inductor.switch"
    with pytest.raises(AttributeError, match=r"^module 'decompose_k' has no attribute 'inducer'"):
        decompose_k.inducer  # noqa: B018 - the access is the test


def test_import_makes_no_file(bare_import):
    _, home = bare_import
    assert list(home.rglob("*")) == []
