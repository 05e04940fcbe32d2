"""A folder that is complete or absent, whatever happens while it is written."""

from __future__ import annotations

import fcntl
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from drafters import make_checkpoint

from dspark.drafter.atomic import atomic_folder, check_output, check_space
from dspark.drafter.checkpoint import open_checkpoint
from dspark.drafter.errors import NotAvailableError, UsageError
from dspark.engines.backend import backend_from_name
from dspark.export.bundle import check_bundle_output
from dspark.export.contract import ExportOptions
from dspark.export.exporter import export_bundle

MB = 1 << 20


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """An output that exists already."""
    folder = tmp_path / "output"
    folder.mkdir()
    (folder / "old").write_text("old")
    return folder


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a tmpfs is not permitted here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def begin(output: Path, force: bool, error: BaseException) -> None:
    """Write half, then fail."""
    with atomic_folder(output, force) as staging:
        (staging / "half").write_text("half")
        raise error


def test_takes_its_place(tmp_path: Path) -> None:
    output = tmp_path / "made" / "output"
    with atomic_folder(output, force=False) as staging:
        (staging / "new").write_text("new")
        assert not output.exists()
    assert (output / "new").read_text() == "new"
    assert names(output.parent) == ["output"]


def test_force_replaces(old: Path) -> None:
    with atomic_folder(old, force=True) as staging:
        (staging / "new").write_text("new")
    assert names(old) == ["new"]
    assert names(old.parent) == ["output"]


def test_force_replaces_where_paths_cannot_be_swapped(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dspark.drafter.atomic._exchange", lambda one, other: False)
    with atomic_folder(old, force=True) as staging:
        (staging / "new").write_text("new")
    assert names(old) == ["new"]
    assert names(old.parent) == ["output"]


def test_force_replaces_what_a_link_points_at(old: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(old, target_is_directory=True)
    with atomic_folder(link, force=True) as staging:
        (staging / "new").write_text("new")
    assert link.is_symlink()
    assert names(old) == ["new"]
    assert names(tmp_path) == ["link", "output"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_exception_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error):
        begin(tmp_path / "output", False, error())
    assert names(tmp_path) == []


def test_an_exception_leaves_the_old_content(old: Path) -> None:
    with pytest.raises(ValueError, match="stop"):
        begin(old, True, ValueError("stop"))
    assert (old / "old").read_text() == "old"
    assert names(old.parent) == ["output"]


def test_an_output_that_exists_is_refused(old: Path) -> None:
    with pytest.raises(UsageError, match="--force"), atomic_folder(old, force=False):
        pytest.fail("the block was entered")
    assert names(old) == ["old"]


def test_an_output_that_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    output = tmp_path / "output"
    with pytest.raises(UsageError, match="--force"), atomic_folder(output, force=False):
        output.mkdir()
    assert names(output) == []
    assert names(tmp_path) == ["output"]


@pytest.mark.parametrize("force", [False, True])
def test_a_file_is_no_output(tmp_path: Path, force: bool) -> None:
    file = tmp_path / "output"
    file.write_text("theirs")
    with pytest.raises(UsageError):
        check_output(file, force)
    with pytest.raises(UsageError, match="no folder"):
        check_output(file / "below", force)
    assert file.read_text() == "theirs"


def test_a_live_staging_folder_is_kept_and_an_abandoned_one_removed(tmp_path: Path) -> None:
    live, abandoned = tmp_path / ".output[1].7.partial", tmp_path / ".output[1].8.partial"
    for folder in (live, abandoned):
        folder.mkdir()
        (folder / "half").write_text("half")
    # flock belongs to the open file, so a second descriptor stands for another process
    lock = os.open(live, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with atomic_folder(tmp_path / "output[1]", force=False):
        assert (live / "half").exists()
        assert not abandoned.exists()
    os.close(lock)
    assert names(tmp_path) == [".output[1].7.partial", "output[1]"]


def test_its_own_staging_folder_is_locked(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "output", force=False) as staging:
        other = os.open(staging, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(other)


def test_a_full_disk_while_writing(small_disk: Path) -> None:
    with (
        pytest.raises(NotAvailableError, match="no space left"),
        atomic_folder(small_disk / "output", False) as staging,
    ):
        (staging / "large").write_bytes(bytes(3 * MB))
    assert names(small_disk) == []


def test_a_full_disk_before_the_first_byte(small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,nr_inodes=1", str(small_disk)], check=True)
    with pytest.raises(NotAvailableError, match="no space left"), atomic_folder(small_disk / "output", False):
        pytest.fail("the block was entered")
    assert names(small_disk) == []


def test_an_export_onto_a_disk_that_fills_up(small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The space that the check has seen is taken by somebody else before the weights are written."""
    checkpoint = open_checkpoint(make_checkpoint(tmp_path / "checkpoint", vocab_size=8000, mask_token_id=1))
    monkeypatch.setattr("dspark.export.exporter.check_space", lambda output, needed: None)
    runner = backend_from_name("onnxruntime", threads=1)
    with pytest.raises(NotAvailableError, match="no space left"):
        export_bundle(checkpoint, small_disk / "deeper" / "bundle", ExportOptions(context=(64,)), runner)
    assert [path for path in small_disk.rglob("*") if path.name != "deeper"] == []


def test_check_space_says_both_numbers(small_disk: Path) -> None:
    check_space(small_disk / "output", MB)
    with pytest.raises(NotAvailableError, match=r"needs 3\.1 MB, 2\.1 MB are free"):
        check_space(small_disk / "output", 3 * MB)


WRITER = """
import sys
from pathlib import Path
from dspark.drafter.atomic import atomic_folder

number = 0
while True:
    with atomic_folder(Path(sys.argv[1]), force=True) as staging:
        for name in "abc":
            (staging / name).write_text(str(number))
    number += 1
"""


def test_a_killed_writer_leaves_old_or_new(tmp_path: Path) -> None:
    """Replaced over and over and killed anywhere: three files of one number, always."""
    output, random_delay = tmp_path / "output", random.Random(0)
    with atomic_folder(output, force=False) as staging:
        for name in "abc":
            (staging / name).write_text("first")
    interrupted = 0
    for _ in range(15):
        first = output.stat().st_ino
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(output)])
        while output.stat().st_ino == first and writer.poll() is None:
            time.sleep(0.001)  # until it is replacing
        time.sleep(random_delay.random() * 0.02)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        assert len({(output / name).read_text() for name in "abc"}) == 1
        interrupted += names(tmp_path) != ["output"]
        with atomic_folder(output, force=True) as staging:
            for name in "abc":
                (staging / name).write_text("first")
        assert names(tmp_path) == ["output"]
    assert interrupted  # else the writer was never hit at work


def test_folders_made_on_the_way_go_again(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        begin(tmp_path / "new" / "deep" / "output", False, RuntimeError())
    assert names(tmp_path) == []


def test_force_replaces_bundles_only(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("work of years")
    with pytest.raises(UsageError, match="is no bundle, --force does not replace it"):
        check_bundle_output(tmp_path, force=True)
    (tmp_path / "empty").mkdir()
    check_bundle_output(tmp_path / "empty", force=True)
