"""Where the tests run: `--device cuda` sends the contract suite, unchanged, to a GPU and to the Triton engine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from decompose_k import api, cache, calls
from decompose_k import device as processors
from decompose_k.calls import CALLS

sys.path.insert(0, str(Path(__file__).parent))

from pages_for_tests import find_browser


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", help="torch device that the contract tests run on: cpu or cuda")
    parser.addoption("--shard", default="0/1", help="I/N: run every Nth test from the Ith, to spread them by hand")


def pytest_collection_modifyitems(config, items):
    index, count = map(int, config.getoption("--shard").split("/"))
    missing = set() if config.getoption("--device") != "cpu" else {"gpu"}
    missing |= set() if find_browser() else {"browser"}
    kept = [item for item in items if not any(map(item.get_closest_marker, missing))][index::count]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept


def pytest_report_header():
    browser = find_browser()
    return f"report: parsed, and {f'shown by {browser}' if browser else 'not shown: no Chromium here'}"


def pytest_generate_tests(metafunc):
    if "backend" in metafunc.fixturenames:
        device = torch.device(metafunc.config.getoption("--device"))
        metafunc.parametrize("backend", ["auto", "torch"] + (["triton"] if device.type == "cuda" else []))


@pytest.fixture(scope="session")
def device(request):
    """The torch device of the contract tests."""
    chosen = torch.device(request.config.getoption("--device"))
    return torch.device(chosen.type, torch.cuda.current_device()) if chosen.type == "cuda" else chosen


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """Memory that the library takes holds NaN or the largest integer: what nobody writes cannot look right."""
    monkeypatch.setattr(torch, "empty", _poisoning(torch.empty))
    CALLS.cache_clear()


@pytest.fixture(autouse=True)
def no_remembered_choices(monkeypatch, tmp_path_factory):
    """No test sees or changes what is remembered on this machine or shipped with the package."""
    nowhere = tmp_path_factory.getbasetemp() / "nowhere"
    monkeypatch.setenv("DECOMPOSE_K_CACHE_DIR", str(nowhere))
    monkeypatch.setattr(cache, "shipped_folder", lambda: nowhere)
    cache.forget()
    yield
    cache._PROCESS.drop(None)
    cache.forget()


@pytest.fixture
def run_command(capsys):
    """Run the command line; returns its exit code, output and error output."""

    def run(*arguments):
        from decompose_k import cli

        with pytest.raises(SystemExit) as exit_:
            cli.main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return exit_.value.code or 0, captured.out, captured.err

    return run


@pytest.fixture
def plain_cpu(monkeypatch):
    """Choices as on a CPU without instructions for halves, whatever this one has."""
    monkeypatch.setattr(processors, "half_instructions", lambda flags: ())
    processors._cpu.cache_clear()
    cache.forget()
    yield
    processors._cpu.cache_clear()
    cache.forget()


@pytest.fixture(autouse=True)
def default_precision():
    """Every test starts from and leaves behind torch's default precision."""
    before = torch.backends.cuda.matmul.fp32_precision
    yield
    assert torch.backends.cuda.matmul.fp32_precision == before


def _poisoning(empty):
    def poisoned(*args, **kwargs):
        tensor = empty(*args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return _poison(tensor) if caller.startswith("decompose_k") else tensor

    return poisoned


def _poison(tensor):
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.fill_(float("nan"))
    return tensor.fill_(torch.iinfo(tensor.dtype).max)


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """The user's cache directory, which does not exist yet."""
    monkeypatch.setenv("DECOMPOSE_K_CACHE_DIR", str(tmp_path / "cache"))
    cache.forget()
    return tmp_path / "cache"


@pytest.fixture
def shipped(monkeypatch, tmp_path):
    """A folder in the place of the package's own."""
    monkeypatch.setattr(cache, "shipped_folder", lambda: tmp_path / "shipped")
    cache.forget()
    return tmp_path / "shipped"


@pytest.fixture(params=["by_a_shortcut", "directly"])
def either_way(request, monkeypatch):
    """Calls that do not depend on a setting go to torch's function directly. On a CPU all depend on one."""
    if request.param == "directly":
        for name in ("cpu_precision", "default_precision"):
            monkeypatch.setattr(calls, name, lambda: None)


@pytest.fixture
def keys(monkeypatch):
    """Every key that was asked for: a call recognised by its guards asks for none."""
    asked = []

    def ask(*arguments):
        asked.append(calls.call_key(*arguments))
        return asked[-1]

    monkeypatch.setattr(api, "call_key", ask)
    return asked
