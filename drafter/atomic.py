"""A folder that is complete or absent: written beside its place, flushed, and renamed."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import glob
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from .errors import NotAvailableError, UsageError

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def check_output(output: Path, force: bool) -> None:
    """Refuse an output that exists, or whose parent is no writable folder, before any work.

    Raises:
        UsageError: it exists and ``force`` is not set, or it cannot be created there.
    """
    if output.exists() and not force:
        raise UsageError(f"{output}: exists already; add --force to replace it", path=str(output))
    if output.exists() and not output.is_dir():
        raise UsageError(f"{output}: is no folder; give another --output", path=str(output))
    parent = output.resolve().parent
    existing = next(folder for folder in [parent, *parent.parents] if folder.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise UsageError(f"{output}: {existing} is no folder that can be written to", path=str(output))


def check_space(output: Path, needed: int) -> None:
    """Raises ``NotAvailableError`` where the disk of ``output`` has fewer than ``needed`` bytes left."""
    parent = output.resolve().parent
    free = shutil.disk_usage(next(folder for folder in [parent, *parent.parents] if folder.exists())).free
    if free < needed:
        raise NotAvailableError(
            f"{output}: needs {needed / 1e6:.1f} MB, {free / 1e6:.1f} MB are free", needed=needed, free=free
        )


@contextlib.contextmanager
def atomic_folder(output: Path, force: bool) -> Iterator[Path]:
    """A staging folder that takes the place of ``output`` when the block ends without an error.

    A process that is killed leaves ``output`` as it was; what it left beside it is removed by the next run.

    Raises:
        UsageError: ``output`` exists and ``force`` is not set.
        NotAvailableError: no space left.
    """
    check_output(output, force)
    output = output.resolve()  # of a link, what it points at is replaced
    try:
        with _parents(output):
            _remove_abandoned(output)
            with _staging(output) as staging:
                yield staging
                _flush(staging)
                _take_place(staging, output, force)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NotAvailableError(f"{output}: no space left on the disk; nothing was written") from error
        raise


@contextlib.contextmanager
def _parents(output: Path) -> Iterator[None]:
    """The folders that ``output`` lies in; those made for it go again where nothing came to lie in them."""
    missing = [folder for folder in output.parents if not folder.exists()]  # innermost first
    output.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        if not output.exists():
            with contextlib.suppress(OSError):
                for folder in missing:
                    folder.rmdir()


@contextlib.contextmanager
def _staging(output: Path) -> Iterator[Path]:
    """A locked folder beside ``output``; whatever has this name at the end is removed."""
    folder = output.parent / f".{output.name}.{os.getpid()}.partial"
    folder.mkdir()
    lock = _lock(folder)
    try:
        yield folder
    finally:
        os.close(lock)
        shutil.rmtree(folder, ignore_errors=True)
        _flush_folder(output.parent)


def _take_place(staging: Path, output: Path, force: bool) -> None:
    if not output.exists():
        staging.rename(output)
        return
    if not force:  # it appeared meanwhile
        raise UsageError(f"{output}: exists already; add --force to replace it", path=str(output))
    if not _exchange(staging, output):
        aside = staging.with_suffix(".replaced")
        output.rename(aside)
        staging.rename(output)
        aside.rename(staging)
    # The old folder is now the staging folder, which is removed at the end.


def _exchange(one: Path, other: Path) -> bool:
    """Swap two paths in one step, where the system can (Linux ``renameat2``)."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    arguments = (_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)
    return bool(rename(*arguments) == 0)


def _remove_abandoned(output: Path) -> None:
    """Staging folders of this output whose process is gone: their lock is free."""
    for folder in output.parent.glob(f".{glob.escape(output.name)}.*.partial"):
        try:
            lock = _lock(folder)
        except OSError:
            continue
        os.close(lock)
        shutil.rmtree(folder, ignore_errors=True)


def _lock(folder: Path) -> int:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _flush(folder: Path) -> None:
    for root, _, files in os.walk(folder):
        for name in files:
            descriptor = os.open(Path(root) / name, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
        _flush_folder(Path(root))


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
