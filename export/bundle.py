"""The bundle (DESIGN §4): a folder of graphs, one weight file and a manifest that states all of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.drafter.atomic import check_output
from dspark.drafter.config import DrafterConfig
from dspark.drafter.errors import BadInputError, IntegrityError, UsageError

from .contract import Dtype, GraphSpec
from .quantization import Quantization
from .weights import FILE as WEIGHTS_FILE, WeightRegion, read_tensor

if TYPE_CHECKING:
    import torch

MANIFEST = "manifest.json"
SCHEMA_VERSION = 2
_PARTS = {"tool", "drafter", "checkpoint", "target", "export", "graphs", "weights", "parity", "files"}


@dataclass(frozen=True, slots=True)
class Graph:
    """A graph of a bundle and the file that holds it.

    ``model`` replaces the file's content where a graph was derived from it; weights stay beside ``path``.
    """

    spec: GraphSpec
    path: Path
    model: bytes | None = None


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle as its manifest states it."""

    path: Path
    manifest: dict[str, Any]
    config: DrafterConfig
    graphs: tuple[Graph, ...]

    @property
    def dtype(self) -> Dtype:
        dtype: Dtype = self.manifest["export"]["dtype"]
        return dtype

    @property
    def quantization(self) -> Quantization | None:
        data = self.manifest["export"].get("quantization")
        return None if data is None else Quantization.from_json(data)

    @property
    def batches(self) -> tuple[int, ...]:
        return tuple(sorted({graph.spec.batch for graph in self.graphs}))

    def sizes(self, name: str, batch: int) -> tuple[int, ...]:
        """Ascending sizes of a graph: N of ``context``, C of ``block``."""
        return tuple(sorted(g.spec.size for g in self.graphs if g.spec.name == name and g.spec.batch == batch))

    def graph(self, name: str, batch: int, size: int = 0) -> Graph:
        for graph in self.graphs:
            if (graph.spec.name, graph.spec.batch, graph.spec.size) == (name, batch, size):
                return graph
        raise BadInputError(f"{self.path}: holds no graph {name} for batch {batch}, size {size}")

    def load(self, name: str, rows: slice | Sequence[int] | None = None) -> torch.Tensor:
        """A canonical tensor, or some of its rows, out of the weight file: in its stored dtype, or dequantised."""
        regions = {data["name"]: WeightRegion.from_json(data) for data in self.manifest["weights"]}
        return read_tensor(self.path / WEIGHTS_FILE, regions, name, rows)


def open_bundle(path: Path) -> Bundle:
    """Read a bundle and check every file's size and sha256 against the manifest.

    Raises:
        BadInputError: no bundle there, or one of another schema version.
        IntegrityError: a file is missing or differs from what was exported.
    """
    file = path / MANIFEST
    if not file.is_file():
        what = "holds no manifest.json, so it is no bundle" if path.is_dir() else "no such folder"
        raise BadInputError(f"{path}: {what}", path=str(path))
    try:
        manifest = json.loads(file.read_bytes())
        version = manifest["schema_version"]
        if version != SCHEMA_VERSION:
            raise BadInputError(
                f"{path}: has schema version {version}, this tool reads {SCHEMA_VERSION}", version=version
            )
        if absent := _PARTS - set(manifest):
            raise IntegrityError(f"{file}: is damaged: states no {', '.join(sorted(absent))}; export again")
        config = DrafterConfig.from_json(manifest["drafter"])
        graphs = tuple(Graph(GraphSpec.from_json(data), path / data["file"]) for data in manifest["graphs"])
        files = {name: (data["sha256"], data["bytes"]) for name, data in manifest["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise IntegrityError(f"{file}: is damaged: {type(error).__name__} {error}; export again") from error
    for name, (sha256, size) in files.items():
        _check_file(path / name, sha256, size)
    missing = {str(g.path.relative_to(path)) for g in graphs} - set(files)
    if missing:
        raise IntegrityError(f"{file}: states no hash for {', '.join(sorted(missing))}; export again")
    return Bundle(path, manifest, config, graphs)


def check_bundle_output(output: Path, force: bool) -> None:
    """Before any work: ``output`` can be written, and ``force`` replaces nothing but a bundle or an empty folder.

    Raises:
        UsageError: otherwise.
    """
    check_output(output, force)
    if output.is_dir() and any(output.iterdir()) and not (output / MANIFEST).is_file():
        raise UsageError(f"{output}: holds something that is no bundle, --force does not replace it", path=str(output))


def write_manifest(path: Path, manifest: dict[str, Any], hashes: dict[str, str]) -> None:
    """Add hash and size of every file of the folder, and write ``manifest.json``.

    Args:
        hashes: sha256 of files that are known already.
    """
    files = {}
    for file in sorted(_files(path)):
        name = str(file.relative_to(path))
        files[name] = {"sha256": hashes.get(name) or _sha256(file), "bytes": file.stat().st_size}
    text = json.dumps({"schema_version": SCHEMA_VERSION, **manifest, "files": files}, indent=1) + "\n"
    (path / MANIFEST).write_text(text)


def _files(path: Path) -> Iterable[Path]:
    return (file for file in path.rglob("*") if file.is_file() and file.name != MANIFEST)


def _check_file(file: Path, sha256: str, size: int) -> None:
    if not file.is_file():
        raise IntegrityError(f"{file}: is missing; export again", file=str(file))
    found = file.stat().st_size
    if found != size:
        raise IntegrityError(f"{file}: has {found} bytes, the manifest says {size}; export again", file=str(file))
    digest = _sha256(file)
    if digest != sha256:
        raise IntegrityError(
            f"{file}: sha256 is {digest}, the manifest says {sha256}; it was changed after export",
            file=str(file),
            found=digest,
            expected=sha256,
        )


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
