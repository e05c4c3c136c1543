"""Files of remembered choices: one readable JSON file for each device and problem class, written atomically.

A file says what it was measured with; what another version measured is not believed. Writers in several processes merge
under a lock, and a reader sees the old file or the new one, never a part.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from decompose_k._version import KERNEL_VERSION, triton_version
from decompose_k.device import Device
from decompose_k.dtypes import SUPPORTED, dtype_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import IO

    from decompose_k.problem import Problem

FORMAT = 1
SUFFIX = ".json"
ASIDE_SUFFIX = ".old"
# A writer holds the lock for milliseconds. One that was stopped while it held it must not stop the others.
MOST_LOCK_SECONDS = 5.0
_LOCK_POLL_SECONDS = 0.01
_LEFTOVER_SECONDS = 60.0

RawEntries = dict[str, dict[str, Any]]


class UnreadableFileError(ValueError):
    """A file that holds no choices in this format: broken, or made by another version of the library."""


@dataclass(frozen=True, slots=True)
class Header:
    """What choices were measured with."""

    device: Device
    kernel: str
    torch: str
    triton: str | None

    @classmethod
    def of(cls, device: Device) -> Header:
        """This process's versions, on a device."""
        return cls(device, KERNEL_VERSION, str(torch.__version__), triton_version())

    def mismatch(self, here: Header) -> str | None:
        """In what these choices do not fit `here`; None where they do. Facts that drivers round are not compared."""
        pairs = {
            "device": (_described(self.device), _described(here.device)),
            "kernels": (self.kernel, here.kernel),
            "torch": (self.torch, here.torch),
            "triton": (self.triton, here.triton),
        }
        differing = [f"{name} {theirs}, here {ours}" for name, (theirs, ours) in pairs.items() if theirs != ours]
        return "; ".join(differing) or None


@dataclass(frozen=True, slots=True)
class Document:
    """A file's content: its header, and entries in plain JSON values, which are checked when they are looked up."""

    header: Header
    entries: RawEntries


def file_name(device: Device, problem_class: str) -> str:
    """The file of a device's choices for a class of problems.

    >>> file_name(Device("NVIDIA H200"), "bf16-fp32")
    'nvidia-h200.bf16-fp32.json'
    """
    return f"{_slug(device)}.{problem_class}{SUFFIX}"


def class_of(problem: Problem) -> str:
    """The class of a problem, by which choices are spread over files: the dtypes of its operands."""
    return f"{dtype_name(problem.a_dtype)}-{dtype_name(problem.b_dtype)}"


def class_in(name: str) -> str:
    """The problem class in a file's name."""
    return name.split(".")[1]


def choice_files(folder: Path | None, device: Device | None = None, *, with_aside: bool = False) -> tuple[Path, ...]:
    """The files of choices in a folder, by their names: of one device or of all, those kept aside too if asked."""
    slug = "[a-z0-9-]+" if device is None else re.escape(_slug(device))
    dtype = "|".join(map(dtype_name, SUPPORTED))
    aside = f"({re.escape(ASIDE_SUFFIX)})?" if with_aside else ""
    pattern = re.compile(rf"{slug}\.({dtype})-({dtype}){re.escape(SUFFIX)}{aside}")
    try:
        found = [] if folder is None else sorted(folder.iterdir())
    except OSError:
        return ()
    return tuple(path for path in found if pattern.fullmatch(path.name))


def parse(text: str) -> Document:
    """The document in a file's text; raises UnreadableFileError where there is none."""
    try:
        return _document_of(json.loads(text))
    except UnreadableFileError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UnreadableFileError(f"{type(error).__name__}: {error}") from error


def read(path: Path) -> Document | None:
    """The document in a file, None where there is no file; raises UnreadableFileError and OSError."""
    try:
        return parse(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except UnicodeDecodeError as error:
        raise UnreadableFileError(f"not text: {error}") from error


def write(path: Path, document: Document) -> None:
    """Replace a file in one step: a reader, or a writer that is killed, finds the old file or the new one.

    Raises OSError where it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("x", encoding="utf-8") as file:
            file.write(render(document))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def merge(path: Path, document: Document) -> None:
    """Add entries to a file, in place of those with the same key; other processes may do so at the same time.

    A file that is broken or of other versions is not added to: it is kept beside the new one, with `.old` at its end.
    Raises OSError where the folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with lock(path):
        found = _mergeable(path, document.header)
        write(path, Document(document.header, found | document.entries))


def render(document: Document) -> str:
    """A document as text: a line for each fact and each timing, entries in the order of their keys."""
    header = document.header
    facts = {
        "format": FORMAT,
        "kernel": header.kernel,
        "torch": header.torch,
        "triton": header.triton,
        "device": header.device.to_json(),
    }
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in facts.items()]
    entries = [f"  {json.dumps(key)}: {_rendered_entry(entry)}" for key, entry in sorted(document.entries.items())]
    lines.append('"entries": {\n' + ",\n".join(entries) + "\n }" if entries else '"entries": {}')
    return "{\n " + ",\n ".join(lines) + "\n}\n"


@contextlib.contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold the inter-process lock of a file while it is changed.

    Where the system has no such locks, or nobody lets go for seconds, it goes on without: a change by another process
    at the same moment may then be lost, and no file is broken.
    """
    with contextlib.ExitStack() as opened:
        with contextlib.suppress(ImportError, OSError):
            file = opened.enter_context(path.with_name(f".{path.name}.lock").open("a"))
            if _take(file):
                _remove_leftovers(path)
        yield


def _take(file: IO[str]) -> bool:
    """Lock an open file until it is closed; False where that takes too long. Raises ImportError without such locks."""
    import fcntl

    deadline = time.monotonic() + MOST_LOCK_SECONDS
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOCK_POLL_SECONDS)


def _document_of(values: dict[str, Any]) -> Document:
    if values["format"] != FORMAT:
        raise UnreadableFileError(f"its format is {values['format']!r}, not {FORMAT}")
    device = Device.from_json(values["device"])
    kernel, torch_version, triton = values["kernel"], values["torch"], values["triton"]
    if not all(isinstance(text, str) for text in (device.name, kernel, torch_version, triton or "")):
        raise UnreadableFileError("its device and versions are not text")
    if len(device.capability) != 2:
        raise UnreadableFileError(f"its capability is {device.capability}")
    entries = values["entries"]
    if not all(isinstance(entry["timings"], list) for entry in entries.values()):
        raise UnreadableFileError("its timings are not lists")
    return Document(Header(device, kernel, torch_version, triton), entries)


def _mergeable(path: Path, header: Header) -> RawEntries:
    try:
        found = read(path)
        if found is None:
            return {}
        if found.header.mismatch(header) is None:
            return found.entries
    except UnreadableFileError:
        pass
    path.replace(path.with_name(path.name + ASIDE_SUFFIX))
    return {}


def _remove_leftovers(path: Path) -> None:
    """Remove what writers that were killed left behind; a younger file may be of one that goes on without the lock."""
    for leftover in path.parent.glob(f".{path.name}.*.tmp"):
        with contextlib.suppress(OSError):
            if time.time() - leftover.stat().st_mtime > _LEFTOVER_SECONDS:
                leftover.unlink()


def _rendered_entry(entry: Mapping[str, Any]) -> str:
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in entry.items() if name != "timings"]
    timings = ",\n    ".join(map(json.dumps, entry["timings"]))
    lines.append(f'"timings": [\n    {timings}\n   ]')
    return "{\n   " + ",\n   ".join(lines) + "\n  }"


def _slug(device: Device) -> str:
    return re.sub(r"[^a-z0-9]+", "-", device.name.lower()).strip("-") or device.type


def _described(device: Device) -> str:
    major, minor = device.capability
    return f"{device.name} ({device.vendor} {device.type} {major}.{minor}, {device.multiprocessors} multiprocessors)"
