"""The engine store of a bundle (DESIGN §4): ``engines/<sku>/<backend>/`` holds plans and ``engine.json``.

A set is written whole or not at all, says of which graphs, versions and devices it is, and is believed only as far as
its hashes go: what does not match is refused with both values and never reaches a runtime.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.drafter.errors import IntegrityError, NotAvailableError
from dspark.export.bundle import Bundle, Graph
from dspark.export.weights import FILE as WEIGHTS_FILE

from .sku import Sku, capability_text

FOLDER = "engines"
RECORD = "engine.json"
SCHEMA_VERSION = 1
MODULES = {"onnxruntime": "onnxruntime", "tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}


class MismatchError(IntegrityError):
    """Sound engines, but of another device, version or graph."""


@dataclass(frozen=True, slots=True)
class EngineSet:
    """The engines of one bundle for one SKU on one backend, as their ``engine.json`` states them."""

    path: Path
    backend: str
    sku: Sku
    versions: Mapping[str, str]
    options: Mapping[str, Any]
    engines: tuple[Mapping[str, Any], ...]  # graph, file, sha256, bytes, source_sha256, seconds, inputs, outputs, …
    files: Mapping[str, Mapping[str, Any]]  # every other file: sha256, bytes

    @property
    def name(self) -> str:
        return f"{self.path.parent.name}/{self.path.name}"

    @property
    def version(self) -> str:
        """Version of the library that reads the engines."""
        return self.versions[MODULES[self.backend]]

    @property
    def size(self) -> int:  # bytes
        return sum(int(entry["bytes"]) for entry in self.engines)

    def to_json(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "backend": self.backend,
            "sku": self.sku.to_json(),
            "versions": dict(self.versions),
            "options": dict(self.options),
            "engines": [dict(entry) for entry in self.engines],
            "files": {name: dict(facts) for name, facts in self.files.items()},
        }

    def check(self, bundle: Bundle) -> None:
        """Check every file's hash, and that the engines are of the bundle's graphs.

        Raises:
            IntegrityError: a file is missing or changed. MismatchError: the graphs are others.
        """
        self.check_files()
        for graph in bundle.graphs:
            self.entry(bundle, graph)

    def check_files(self) -> None:
        """Check size and hash of every file; raises ``IntegrityError``."""
        for name, facts in [*((entry["file"], entry) for entry in self.engines), *self.files.items()]:
            file = self.path / name
            _check_size(file, facts)
            _check_hash(file, file_facts(file)["sha256"], facts)

    def entry(self, bundle: Bundle, graph: Graph) -> Mapping[str, Any]:
        """What is stated of the engine of a graph.

        Raises:
            MismatchError: there is none, or the graph or its weights are others than it was built of.
        """
        file = graph.spec.file
        found = next((entry for entry in self.engines if entry["graph"] == file), None)
        if found is None:
            raise MismatchError(f"{self.path}: holds no engine of {file}; build again with --force")
        for key, source in (("source_sha256", file), ("weights_sha256", WEIGHTS_FILE)):
            expected = bundle.manifest["files"][source]["sha256"]
            if found[key] != expected:
                raise MismatchError(
                    f"{self.path / found['file']}: was built of {source} with sha256 {found[key]}, the bundle's is "
                    f"{expected}; build again with --force",
                    found=found[key],
                    expected=expected,
                )
        return found

    def read(self, bundle: Bundle, graph: Graph) -> bytes:
        """The engine of a graph, checked: the bytes that were hashed are the bytes that are returned."""
        entry = self.entry(bundle, graph)
        return _checked(self.path / entry["file"], entry)

    def misfits(self, device: Sku, version: str) -> list[str]:
        """Why these engines may not run on a device with this version of the library; empty: they may."""
        faults = []
        if not self._reads(version):
            faults.append(f"built with {self.backend} {self.version}, installed is {version}")
        if self.backend == "onnxruntime":
            pairs = [(n, getattr(self.sku, n), getattr(device, n)) for n in ("machine", "device")]
            faults += [f"built for {name} {built}, this is {here}" for name, built, here in pairs if built != here]
            return faults
        (here,) = device.compute_capabilities
        built = ", ".join(map(capability_text, self.sku.compute_capabilities))
        hardware = self.options.get("hardware_compatible")
        if not (here >= (8, 0) if hardware == "ampere_plus" else here in self.sku.compute_capabilities):
            faults.append(f"built for compute capability {built}, this device has {capability_text(here)}")
        elif self.sku.device not in (None, device.device) and hardware is None:
            faults.append(f"built on {self.sku.device}, this device is {device.device}")
        return faults

    def _reads(self, version: str) -> bool:
        if not self.options.get("version_compatible"):
            return version == self.version
        built, here = (tuple(map(int, re.findall(r"\d+", text)[:3])) for text in (self.version, version))
        return built <= here and here[0] <= built[0] + 1  # a version-compatible plan of 10.x loads on 11


def engine_folder(bundle: Bundle, sku: Sku, backend: str) -> Path:
    return bundle.path / FOLDER / sku.slug / backend


def engine_sets(bundle: Bundle, backend: str | None = None) -> list[EngineSet]:
    """Every set in the bundle, or those of one backend, in order of their names; hashes of plans are not checked yet.

    Raises:
        IntegrityError: a record is missing or damaged.
    """
    folders = sorted((bundle.path / FOLDER).glob(f"[!.]*/{backend or '[!.]*'}"))
    return [open_engine_set(folder) for folder in folders if folder.is_dir()]


def open_engine_set(folder: Path) -> EngineSet:
    """Read ``engine.json`` and check it against the hash that it ends with.

    Raises:
        IntegrityError: it is missing, damaged, or of another schema version.
    """
    file = folder / RECORD
    try:
        text = file.read_bytes()
        data = json.loads(text)
        stated = data.pop("sha256")
        if text != _record_text(data) or stated != _record_hash(data):
            raise IntegrityError(f"{file}: was changed after the build: its own sha256 does not match; build again")
        if data["schema_version"] != SCHEMA_VERSION:
            raise IntegrityError(
                f"{file}: has schema version {data['schema_version']}, this tool reads {SCHEMA_VERSION}"
            )
        return EngineSet(
            folder,
            data["backend"],
            Sku.from_json(data["sku"]),
            data["versions"],
            data["options"],
            tuple(data["engines"]),
            data["files"],
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise IntegrityError(f"{file}: is damaged: {type(error).__name__} {error}; build again with --force") from error


def write_record(folder: Path, engines: EngineSet) -> None:
    """Write ``engine.json``, which ends with the hash of all that stands before it."""
    (folder / RECORD).write_bytes(_record_text(engines.to_json()))


def file_facts(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        return {"sha256": hashlib.file_digest(stream, "sha256").hexdigest(), "bytes": file.stat().st_size}


def engines_for(bundle: Bundle, backend: str, device: Sku, version: str) -> EngineSet | None:
    """The set that fits this device and version; one of this very device comes before one of its compute capability.

    Returns:
        ``None`` where nothing was built for the backend.

    Raises:
        MismatchError: engines are there, and none fits: why, for each. IntegrityError: a record is damaged.
    """
    sets = engine_sets(bundle, backend)
    if not sets:
        return None
    misfits = {engines.name: engines.misfits(device, version) for engines in sets}
    fitting = [engines for engines in sets if not misfits[engines.name]]
    if not fitting:
        reasons = "; ".join(f"{name}: {', '.join(faults)}" for name, faults in misfits.items())
        raise MismatchError(
            f"{bundle.path}: no engine fits: {reasons}; run dspark-export build {bundle.path} --backend {backend}",
            misfits=misfits,
        )
    return min(fitting, key=lambda engines: engines.sku.device is None)


def no_engines(bundle: Bundle, backend: str) -> NotAvailableError:
    return NotAvailableError(
        f"{bundle.path}: holds no engines for {backend}; run dspark-export build {bundle.path} --backend {backend}"
    )


@contextlib.contextmanager
def locked(folder: Path, waiting: Any = lambda: None) -> Iterator[None]:
    """One process at a time builds for a SKU; the lock is on the SKU's folder, and goes with the process.

    Args:
        folder: of an engine set. waiting: called once where another process holds the lock.
    """
    parent, told = folder.parent, False
    while True:
        parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(parent, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not told:
                waiting()
                told = True
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if parent.exists() and os.fstat(descriptor).st_ino == parent.stat().st_ino:
            break
        os.close(descriptor)  # it was removed by a build that failed
    try:
        yield
    finally:
        for made in (parent, parent.parent):
            with contextlib.suppress(OSError):
                made.rmdir()  # where nothing came to lie in it
        os.close(descriptor)


def _record_hash(data: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, indent=1).encode()).hexdigest()


def _record_text(data: Mapping[str, Any]) -> bytes:
    return (json.dumps({**data, "sha256": _record_hash(data)}, indent=1) + "\n").encode()


def _checked(file: Path, facts: Mapping[str, Any]) -> bytes:
    _check_size(file, facts)
    data = file.read_bytes()
    _check_hash(file, hashlib.sha256(data).hexdigest(), facts)
    return data


def _check_size(file: Path, facts: Mapping[str, Any]) -> None:
    if not file.is_file():
        raise IntegrityError(f"{file}: is missing; build again with --force", file=str(file))
    size = file.stat().st_size
    if size != facts["bytes"]:
        raise IntegrityError(
            f"{file}: has {size} bytes, {RECORD} says {facts['bytes']}; build again with --force", file=str(file)
        )


def _check_hash(file: Path, found: str, facts: Mapping[str, Any]) -> None:
    if found != facts["sha256"]:
        raise IntegrityError(
            f"{file}: sha256 is {found}, {RECORD} says {facts['sha256']}; it was changed after the build",
            file=str(file),
            found=found,
            expected=facts["sha256"],
        )
