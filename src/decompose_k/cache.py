"""Remembered choices: found when a problem is planned, kept when it is tuned.

A choice is looked up in what this process was told, then in the user's files (`settings.cache_directory()`), then in
the files that come with the package. The user's files count only for the device, torch, Triton and kernels that they
were measured with; the package's are a starting point and count for the device's name and the kernels alone. Files are
read once per process, when the first problem of their class is planned.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import threading
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from decompose_k import settings, store
from decompose_k.device import Device
from decompose_k.entries import Entry, key_of
from decompose_k.forgetting import forget, forgettable
from decompose_k.store import Document, Header, RawEntries, UnreadableFileError, class_of, file_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from decompose_k.problem import Problem

TUNED = "tuned"
SHIPPED = "shipped"


@dataclass(frozen=True, slots=True)
class Remembered:
    """An entry and where it comes from: `tuned` on a machine of the user, or `shipped` with the package."""

    entry: Entry
    origin: str


@dataclass(frozen=True, slots=True)
class CacheFile:
    """A file of remembered choices; `problem` says why it counts for nothing here, None where it counts."""

    path: Path
    header: Header | None
    entries: tuple[Entry, ...]
    problem: str | None = None


class _Process:
    """What this process knows beyond the files: entries that no file could take."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        # By device and problem class. A sealed device's files are not read: the ranks of a job share one set.
        self.tables: dict[tuple[Device, str], RawEntries] = {}
        self.sealed: frozenset[Device] = frozenset()

    def add(self, device: Device, problem_class: str, entries: RawEntries) -> None:
        with self.lock:
            key = (device, problem_class)
            # A new table, so that a thread which looks something up meanwhile sees the old one whole.
            self.tables = self.tables | {key: self.tables.get(key, {}) | entries}

    def seal(self, device: Device) -> None:
        with self.lock:
            self.sealed |= {device}

    def drop(self, device: Device | None) -> None:
        with self.lock:
            self.tables = {key: table for key, table in self.tables.items() if device not in (None, key[0])}
            self.sealed = frozenset() if device is None else self.sealed - {device}


_PROCESS = _Process()


def remembered(problem: Problem, device: Device) -> tuple[Remembered, ...]:
    """What is remembered of a problem on a device, the user's own before the package's; makes no GPU call."""
    key = key_of(problem)
    return _found(problem, device, lambda table: [key] if key in table else [])


def remembered_kin(problem: Problem, device: Device) -> tuple[Remembered, ...]:
    """What is remembered of the same product with another bias or activation, which hardly change what is fastest."""
    bare = _without_epilogue(key_of(problem))
    return _found(problem, device, lambda table: sorted(key for key in table if _without_epilogue(key) == bare))


def _found(problem: Problem, device: Device, keys_in: Callable[[RawEntries], Sequence[str]]) -> tuple[Remembered, ...]:
    problem_class = class_of(problem)
    shipped = _file_entries(shipped_folder() / file_name(device, problem_class), device, shipped=True)
    found = []
    for origin, table in ((TUNED, _user_entries(device, problem_class)), (SHIPPED, shipped)):
        entries = (_checked(key, table[key]) for key in keys_in(table))
        found += [Remembered(entry, origin) for entry in entries if entry is not None]
    return tuple(found)


def _without_epilogue(key: str) -> str:
    return " ".join(word for word in key.split() if not word.startswith(("bias_dtype=", "activation=")))


def remember(entries: Sequence[Entry], device: Device, *, save: bool = True) -> bool:
    """Keep entries for this process, and in the user's files; False where these could not be written.

    With `save=False`, or in a home that cannot be written, they last as long as the process.
    """
    saved = True
    for problem_class, raw in _by_class(entries).items():
        is_saved = save and _save(device, problem_class, raw)
        if not is_saved or device in _PROCESS.sealed:
            _PROCESS.add(device, problem_class, raw)
        saved = saved and is_saved
    forget()
    return saved


def fingerprint() -> str:
    """A hash of all that is remembered beside the package's own choices: equal ones choose alike."""
    digest = hashlib.sha256(_files_fingerprint(directory()).encode())
    for (device, problem_class), table in sorted(_PROCESS.tables.items(), key=str):
        digest.update(json.dumps([device.to_json(), problem_class, table], sort_keys=True).encode())
    digest.update(repr(sorted(device.name for device in _PROCESS.sealed)).encode())
    return digest.hexdigest()[:16]


def user_entries(device: Device) -> tuple[Entry, ...]:
    """Every entry of the user's that counts on a device."""
    classes = {problem_class for owner, problem_class in _PROCESS.tables if owner == device}
    classes |= {store.class_in(path.name) for path in store.choice_files(directory(), device)}
    raw = [item for name in sorted(classes) for item in sorted(_user_entries(device, name).items())]
    checked = (_checked(key, values) for key, values in raw)
    return tuple(entry for entry in checked if entry is not None)


def files(device: Device) -> tuple[CacheFile, ...]:
    """The user's files and the package's, each with whether it counts on a device."""
    own = [_described(path, device, shipped=False) for path in store.choice_files(directory())]
    return (*own, *(_described(path, device, shipped=True) for path in store.choice_files(shipped_folder())))


def clear(device: Device | None = None) -> tuple[Path, ...]:
    """Remove the user's files, and what this process remembers beyond them; returns the files removed.

    Args:
        device: whose; None for all devices.

    Raises:
        OSError: a file cannot be removed.
    """
    removed = store.choice_files(directory(), device, with_aside=True)
    for path in removed:
        path.unlink(missing_ok=True)
    _PROCESS.drop(device)
    forget()
    return removed


def export(folder: Path, device: Device, *, most_timings: int | None = None) -> tuple[Path, ...]:
    """Write the user's entries that count on a device into a folder, in the form in which the package ships them.

    Args:
        folder: where to; made if it is not there.
        device: whose.
        most_timings: how many timings of an entry are written, the fastest and torch's; all by default.

    Raises:
        OSError: the folder cannot be written.
    """
    written = []
    kept = [entry if most_timings is None else entry.shortened(most_timings) for entry in user_entries(device)]
    for problem_class, raw in _by_class(kept).items():
        path = folder / file_name(device, problem_class)
        store.write(path, Document(Header.of(device), raw))
        written.append(path)
    return tuple(written)


def install(path: Path, *, adopt: bool = False) -> tuple[Entry, ...]:
    """Add the entries of an exported file to the user's, for the device that the file names.

    Args:
        path: the file.
        adopt: take entries of other torch or Triton versions as if they had been measured with these.

    Raises:
        ValueError: the file is broken, of other kernels, or of other versions without `adopt`.
        OSError: it cannot be read, or the cache not be written.
    """
    try:
        document = store.read(path)
    except UnreadableFileError as error:
        raise ValueError(f"{path} holds no remembered choices: {error}") from error
    if document is None:
        raise FileNotFoundError(errno.ENOENT, "no such file", str(path))
    here = Header.of(document.header.device)
    if document.header.kernel != here.kernel:
        raise ValueError(f"{path} was measured with kernels {document.header.kernel}; these are {here.kernel}")
    mismatch = document.header.mismatch(here)
    if mismatch is not None and not adopt:
        raise ValueError(f"{path} was measured with other versions ({mismatch}); adopting it takes it as it is")
    entries = [_strict(key, raw, path) for key, raw in document.entries.items()]
    for problem_class, raw in _by_class(entries).items():
        store.merge(_writable_directory() / file_name(here.device, problem_class), Document(here, raw))
    forget()
    return tuple(entries)


def synchronize(group: Any = None, device: Device | torch.device | str | None = None) -> None:
    """Make every rank of a process group use the choices that its first rank remembers, for the life of the process.

    To be called by all ranks together, before the first product whose result the ranks compare: different choices give
    results that differ by rounding.

    Args:
        group: a torch.distributed process group; None is the default one.
        device: whose choices; by default the current GPU, or the CPU where there is none.

    Raises:
        RuntimeError: torch.distributed is not initialised.
    """
    place = Device.of("cuda" if torch.cuda.is_available() else "cpu") if device is None else device
    here = place if isinstance(place, Device) else Device.of(place)
    entries = broadcast_from_first(list(user_entries(here)), group)
    _PROCESS.drop(here)
    _PROCESS.seal(here)
    remember(entries, here, save=False)


def broadcast_from_first(value: Any, group: Any = None) -> Any:
    """The first rank's value on every rank of a process group."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError("torch.distributed must be initialised before choices are shared among ranks")
    holder = [value]
    dist.broadcast_object_list(holder, src=0 if group is None else dist.get_global_rank(group, 0), group=group)
    return holder[0]


def directory() -> Path | None:
    """The folder of the user's files, which need not exist; None where the user has no home."""
    try:
        return settings.cache_directory()
    except RuntimeError:
        return None


def _user_entries(device: Device, problem_class: str) -> RawEntries:
    own = _PROCESS.tables.get((device, problem_class), {})
    folder = directory()
    if folder is None or device in _PROCESS.sealed:
        return own
    return _file_entries(folder / file_name(device, problem_class), device, shipped=False) | own


# Once, as the choices themselves.
@forgettable(8)
def _files_fingerprint(folder: Path | None) -> str:
    digest = hashlib.sha256()
    for path in store.choice_files(folder):
        with contextlib.suppress(OSError):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


@forgettable(256)
def _file_entries(path: Path, device: Device, *, shipped: bool) -> RawEntries:
    try:
        document = store.read(path)
    except (OSError, UnreadableFileError) as error:
        _warn(f"the remembered choices in {path} cannot be read and are left out: {error}")
        return {}
    return {} if document is None or _mismatch(document.header, device, shipped) else document.entries


def _mismatch(header: Header, device: Device, shipped: bool) -> str | None:
    """Why a file counts for nothing on a device; None where it counts."""
    here = Header.of(device)
    if not shipped:
        return header.mismatch(here)
    fits = (header.device.name, header.kernel) == (device.name, here.kernel)
    return None if fits else f"of {header.device.name} and kernels {header.kernel}"


def shipped_folder() -> Path:
    """The folder of the files that come with the package, which need not exist."""
    return Path(__file__).parent / "data" / "tuned"


def _save(device: Device, problem_class: str, entries: RawEntries) -> bool:
    try:
        store.merge(_writable_directory() / file_name(device, problem_class), Document(Header.of(device), entries))
    except OSError as error:
        _warn(f"choices are remembered for this process alone, because they cannot be saved: {error}")
        return False
    return True


def _writable_directory() -> Path:
    folder = directory()
    if folder is None:
        raise FileNotFoundError(errno.ENOENT, "the user has no home directory")
    return folder


def _by_class(entries: Iterable[Entry]) -> dict[str, RawEntries]:
    found: dict[str, RawEntries] = {}
    for entry in entries:
        found.setdefault(class_of(entry.problem), {})[entry.key] = entry.to_json()
    return found


def _strict(key: str, raw: dict[str, Any], where: object) -> Entry:
    try:
        entry = Entry.from_json(raw)
        if entry.key != key:
            raise ValueError(f"it describes {entry.key}")
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise ValueError(f"{where} holds a broken entry for {key}: {type(error).__name__}: {error}") from error
    return entry


def _checked(key: str, raw: dict[str, Any]) -> Entry | None:
    try:
        return _strict(key, raw, "the cache")
    except ValueError as error:
        _warn(f"a remembered choice is left out: {error}")
        return None


def _described(path: Path, device: Device, *, shipped: bool) -> CacheFile:
    try:
        document = store.read(path)
        if document is None:
            return CacheFile(path, None, (), "it was removed")
        entries = tuple(_strict(key, raw, path.name) for key, raw in document.entries.items())
    except (OSError, ValueError) as error:
        return CacheFile(path, None, (), str(error))
    return CacheFile(path, document.header, entries, _mismatch(document.header, device, shipped))


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=2)
