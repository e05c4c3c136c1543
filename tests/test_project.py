"""What the project says of itself is true: documents, tables and files agree with the code."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import decompose_k as dk
from decompose_k import settings

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
MODULES = sorted((ROOT / "src" / "decompose_k").rglob("*.py"))
TEXT_SUFFIXES = {".py", ".md", ".toml", ".txt", ".csv", ".json", ".jsonl", ".css", ".js", ".html", ".svg", ""}
MOST_LINES = 400
MOST_VARIABLES = 6


def project_files() -> list[Path]:
    """Files under version control or about to be; all of them where there is no git, as in an unpacked sdist."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
        files = [ROOT / name for name in listed]
    except (OSError, subprocess.CalledProcessError):
        folders = ("src", "tests", "environments", "results", "docs")
        files = [*ROOT.glob("*"), *(file for folder in folders for file in (ROOT / folder).rglob("*"))]
    return [file for file in files if file.is_file() and "__pycache__" not in file.parts]


def environment_names(tree: ast.AST) -> set[str]:
    """Names that code asks os.environ or os.getenv for."""
    source = ast.unparse(tree)
    return set(re.findall(r"""environ(?:\.get\(|\[|\.setdefault\(|\.pop\()['"](\w+)""", source)) | set(
        re.findall(r"""getenv\(['"](\w+)""", source)
    )


def table_rows(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("| `DECOMPOSE_K_")]


def test_the_table_of_variables_is_what_settings_reads():
    # XDG_CACHE_HOME is the desktop's variable, not ours: it says where any program's cache lies.
    read = environment_names(ast.parse(Path(settings.__file__).read_text())) - {"XDG_CACHE_HOME"}
    rows = table_rows(settings.__doc__)
    assert {re.match(r"\| `(\w+)`", row)[1] for row in rows} == read
    assert 0 < len(rows) <= MOST_VARIABLES
    assert table_rows(README) == rows


@pytest.mark.parametrize("file", [file for file in MODULES if file.name != "settings.py"], ids=lambda file: file.stem)
def test_variables_are_read_in_settings_alone(file):
    tree = ast.parse(file.read_text())
    assert environment_names(tree) == set()
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "environ"]


@pytest.mark.parametrize("name", [name for name in dk.__all__ if name != "__version__"])
def test_public_names_are_documented(name):
    public = getattr(dk, name)
    assert public.__doc__
    # A dataclass without a docstring gets its signature for one.
    assert not public.__doc__.startswith(f"{name}(")
    if inspect.isfunction(public):
        unsaid = [
            argument
            for argument in inspect.signature(public).parameters
            if not re.search(rf"\b{argument}\b", public.__doc__)
        ]
        assert unsaid == []
        assert ">>>" in public.__doc__


def test_all_is_what_there_is():
    public = {name for name, value in vars(dk).items() if not name.startswith("_") and not inspect.ismodule(value)}
    assert public - set(dk.__all__) == set()
    assert sorted(dk.__all__) == list(dk.__all__)


@pytest.mark.parametrize("file", MODULES, ids=lambda file: file.stem)
def test_docstring_examples_run(file):
    if ">>>" not in file.read_text():
        return
    name = ".".join(file.relative_to(ROOT / "src").with_suffix("").parts)
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0
    assert result.failed == 0


# In pieces, so that this file does not hold what it looks for.
FORBIDDEN = re.compile(
    "|".join(
        (
            r"/wor[k]/",
            r"/far[m]/",
            r"/\.librar[y]\b",
            r"shared/(?:prot[o]|note[s])",
            r"/roo[t]/",
            r"/hom[e]/\w",
            r"TOD[O]",
            r"FIXM[E]",
            r"pragma: no cove[r]",
            r"pypi\.or[g]",
            r"download\.pytorc[h]",
        )
    )
)


@pytest.mark.parametrize("file", project_files(), ids=lambda file: str(file.relative_to(ROOT)))
def test_no_file_speaks_of_one_machine_or_of_unfinished_work(file):
    if file.suffix in TEXT_SUFFIXES:
        found = [line for line in file.read_text(errors="replace").splitlines() if FORBIDDEN.search(line)]
        assert found == []


@pytest.mark.parametrize("file", MODULES, ids=lambda file: file.stem)
def test_no_module_asks_to_be_two(file):
    assert len(file.read_text().splitlines()) <= MOST_LINES


def test_the_changelog_has_the_version():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(rf"^## \[{re.escape(dk.__version__)}\]", changelog, re.MULTILINE)


def test_the_readme_code_runs():
    blocks = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert blocks
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "results/README.md"])
def test_links_in_documents_lead_somewhere(document):
    file = ROOT / document
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", file.read_text())
    assert [target for target in targets if not (file.parent / target).exists()] == []


def test_every_make_target_in_the_documents_exists():
    makefile = (ROOT / "Makefile").read_text()
    for document in ("README.md", "CONTRIBUTING.md"):
        named = set(re.findall(r"`make ([a-z-]+)", (ROOT / document).read_text()))
        assert named
        assert [name for name in named if not re.search(rf"^{name}:", makefile, re.MULTILINE)] == []


def test_the_readme_shows_what_the_records_say():
    command = [sys.executable, str(ROOT / "results" / "summarize.py"), "--check"]
    assert subprocess.run(command, check=False).returncode == 0, "run `make readme`"
