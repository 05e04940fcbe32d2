"""Build the engines of a bundle into its store: all of a SKU's or none, and nothing twice."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dspark.drafter.atomic import atomic_folder, check_space
from dspark.drafter.errors import CheckFailedError, NotAvailableError, UsageError
from dspark.export.bundle import Bundle, Graph
from dspark.export.version import tool_version
from dspark.export.weights import FILE as WEIGHTS_FILE

from .preflight import Finding, Preflight, preflight
from .sku import Capability, Sku, gpu_without_device, this_cpu
from .store import MODULES, EngineSet, engine_folder, file_facts, locked, open_engine_set, write_record

BackendName = Literal["onnxruntime", "tensorrt", "tensorrt-rtx"]
Progress = Callable[[str, int, int], None]  # stage, done, total
LOG, TIMING_CACHE = "build.log", "timing.cache"
_ORT_LIMIT = 2_000_000_000  # bytes: an ORT file is one flatbuffer
_NO_RANDOM_ADDRESSES = 0x0040000  # personality(2): ADDR_NO_RANDOMIZE
_ENVIRONMENT = ("PATH", "HOME", "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_VISIBLE_DEVICES")  # of the worker
_DIE_WITH_PARENT = (1, 9)  # prctl(2): PR_SET_PDEATHSIG, SIGKILL


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """How engines are built. Checked once, when it is made.

    Raises:
        UsageError: an option out of range, or one that the backend does not have.
    """

    backend: BackendName
    workspace_bytes: int | None = None  # None: as much as the device has
    optimization_level: int | None = None  # 0 … 5; None: TensorRT's own
    version_compatible: bool = False
    hardware_compatible: Literal["ampere_plus", "same_compute_capability"] | None = None
    strip: bool = False  # plans without weights, refitted from the bundle when loaded
    tf32: bool = False
    verbose: bool = False

    def __post_init__(self) -> None:
        if self.workspace_bytes is not None and self.workspace_bytes < 1:
            raise UsageError(f"workspace {self.workspace_bytes} must be at least 1 byte")
        if self.optimization_level is not None and not 0 <= self.optimization_level <= 5:
            raise UsageError(f"optimization level {self.optimization_level} is outside 0..5")
        if self.backend == "onnxruntime":
            changed = [f.name for f in dataclasses.fields(self) if f.name != "backend" and getattr(self, f.name)]
            if changed:
                raise UsageError(f"{', '.join(changed)}: options of TensorRT; onnxruntime has none of them")
        if self.backend == "tensorrt-rtx":
            if self.version_compatible:
                raise UsageError(
                    "TensorRT-RTX has no lean runtime, which version-compatible plans need; build per version"
                )
            if self.hardware_compatible:
                raise UsageError("TensorRT-RTX plans are for the compute capabilities named; name several instead")

    def to_json(self) -> dict[str, Any]:
        """What bears on the bytes of a plan."""
        data = dataclasses.asdict(self)
        return {key: value for key, value in data.items() if key not in ("backend", "verbose")}


@dataclass(frozen=True, slots=True)
class Built:
    """One SKU's engines, and whether they were there already."""

    engines: EngineSet
    built: bool


def preflights(bundle: Bundle, backend: str, skus: Sequence[Sku]) -> list[Preflight]:
    """What is known of every graph without the backend; nothing to say of ONNX Runtime, which proved the bundle."""
    if backend == "onnxruntime":
        return []
    capabilities = sorted({capability for sku in skus for capability in sku.compute_capabilities})
    return [preflight(graph, backend, capabilities) for graph in bundle.graphs]


def said_once(findings: Iterable[Finding]) -> list[str]:
    """What several graphs have in common is said once, with the graphs behind it."""
    graphs: dict[str, dict[str, None]] = {}
    for finding in findings:
        graphs.setdefault(finding.message, {})[finding.graph] = None
    return [f"{message} ({', '.join(names)})" for message, names in graphs.items()]


def require_preflight(checked: Sequence[Preflight]) -> None:
    """Raises ``CheckFailedError`` with every error found."""
    errors = [finding for one in checked for finding in one.findings if finding.severity == "error"]
    if errors:
        words = said_once(errors)
        raise CheckFailedError(
            f"{errors[0].backend} would not build this bundle: " + "; ".join(words[:5])
            + (f"; and {len(words) - 5} more" if len(words) > 5 else ""),
            findings=[dataclasses.asdict(finding) for finding in errors],
        )  # fmt: skip


def skus_to_build(options: BuildOptions, capabilities: Sequence[Capability], portable: bool) -> list[Sku]:
    """The SKUs of one call: this machine's, or those of the compute capabilities named.

    Args:
        portable: one set of plans for all of them, not one for each.

    Raises:
        UsageError, NotAvailableError: they cannot be built for here.
    """
    backend = options.backend
    _library_version(backend)
    if backend == "onnxruntime":
        if capabilities or portable:
            raise UsageError("--compute-capability and --portable are of GPUs; onnxruntime builds for this processor")
        return [this_cpu()]
    if backend == "tensorrt-rtx":
        if portable and len(capabilities) < 2:
            raise UsageError("--portable joins several compute capabilities; name two or more")
        if capabilities:
            unique = sorted(set(capabilities))
            return [gpu_without_device(unique)] if portable else [gpu_without_device([one]) for one in unique]
        return [
            gpu_without_device(_device("name the GPUs to build for with --compute-capability").compute_capabilities)
        ]
    if portable:
        raise UsageError("--portable is of TensorRT-RTX; tensorrt has --hardware-compatible")
    device = _device("TensorRT builds on the GPU that it builds for; without one, build with --backend tensorrt-rtx")
    if capabilities and tuple(capabilities) != device.compute_capabilities:
        raise NotAvailableError(
            f"TensorRT builds for the device that it runs on, {device.device} of compute capability "
            f"{device.compute_capabilities}, not for {list(capabilities)}"
        )
    return [device]


def build_engines(
    bundle: Bundle,
    options: BuildOptions,
    skus: Sequence[Sku],
    force: bool = False,
    progress: Progress = lambda stage, done, total: None,
    note: Callable[[str], None] = lambda text: None,
) -> list[Built]:
    """Build what is not there yet, SKU by SKU; each is complete or absent.

    Raises:
        UsageError: a SKU was built with other options, and ``force`` is not set.
        IntegrityError: what is there is damaged or of other graphs, and ``force`` is not set.
        CheckFailedError: the builder refuses a graph, with its reason.
        NotAvailableError: the library is not installed, or no space is left.
    """
    version = _library_version(options.backend)
    weights = [preflight(graph, "tensorrt").weight_bytes for graph in bundle.graphs]
    if options.backend == "onnxruntime" and max(weights) > _ORT_LIMIT:
        raise NotAvailableError(
            f"{bundle.path}: a graph of {max(weights)} bytes, and an ORT file holds 2 GB; run the graphs themselves"
        )
    if options.strip and options.backend == "tensorrt-rtx":
        _device("TensorRT-RTX compiles refittable plans with the driver; build without --strip")
    if not force:
        for sku in skus:  # all before the first minute of work
            _existing(bundle, options, sku, version)
    results = []
    for sku in skus:
        folder = engine_folder(bundle, sku, options.backend)
        with locked(folder, lambda slug=sku.slug: note(f"another process builds for {slug}; waiting")):
            there = None if force else _existing(bundle, options, sku, version)
            if there is None:
                check_space(folder, 2 * sum(weights))
                with atomic_folder(folder, force) as staging:
                    _build_set(bundle, options, sku, version, staging, folder, progress)
            results.append(Built(there or open_engine_set(folder), there is None))
    return results


def build_plan(graph: Graph, backend: BackendName, sku: Sku) -> bytes:
    """The plan of one graph, also of one in memory, that goes into no store.

    Raises:
        CheckFailedError: the builder refuses the graph.
    """
    with tempfile.TemporaryDirectory() as folder:
        graphs = Path(folder) / "graphs"
        graphs.mkdir()
        for file in graph.path.parent.iterdir():
            (graphs / file.name).symlink_to(file.resolve())
        if graph.model is not None:
            (graphs / graph.path.name).unlink(missing_ok=True)
            (graphs / graph.path.name).write_bytes(graph.model)
        _work(graph, "plan", BuildOptions(backend), sku.compute_capabilities, Path(folder), lambda share: None)
        return (Path(folder) / "plan").read_bytes()


def parse_graphs(
    bundle: Bundle, backend: BackendName, progress: Progress = lambda stage, done, total: None
) -> dict[str, int]:
    """Parse every graph with the backend's own parser.

    Returns:
        layers of the network, by graph file.

    Raises:
        CheckFailedError: the parser refuses a graph. NotAvailableError: the backend is not installed.
    """
    _library_version(backend)
    options, layers = BuildOptions(backend), {}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "graphs").symlink_to((bundle.path / "graphs").resolve())
        for number, graph in enumerate(bundle.graphs):
            progress("parsing", number, len(bundle.graphs))
            done = _work(graph, None, options, (), Path(folder), lambda share: None)
            layers[graph.spec.file] = int(done["layers"])
    return layers


def _existing(bundle: Bundle, options: BuildOptions, sku: Sku, version: str) -> EngineSet | None:
    """The SKU's engines where they are sound and just what would be built; ``None`` where there are none."""
    folder = engine_folder(bundle, sku, options.backend)
    if not folder.exists():
        return None
    there = open_engine_set(folder)
    there.check(bundle)
    wanted = {**options.to_json(), "version": version}
    found = {**there.options, "version": there.version}
    differing = [
        f"{key} {found.get(key)!r}, here {value!r}" for key, value in wanted.items() if found.get(key) != value
    ]
    if differing:
        raise UsageError(f"{folder}: was built with {'; '.join(differing)}; add --force to replace it")
    return there


def _build_set(
    bundle: Bundle, options: BuildOptions, sku: Sku, version: str, staging: Path, folder: Path, progress: Progress
) -> None:
    engines, versions = list[dict[str, Any]](), {"dspark-export": tool_version(), MODULES[options.backend]: version}
    link = staging / "graphs"
    link.symlink_to((bundle.path / "graphs").resolve())
    if options.backend == "tensorrt" and (folder / TIMING_CACHE).is_file():  # replaced with --force
        (staging / TIMING_CACHE).write_bytes((folder / TIMING_CACHE).read_bytes())
    sources = bundle.manifest["files"]
    for number, graph in enumerate(bundle.graphs):
        stage = f"{sku.slug} {graph.path.stem}"

        def report(share: float, stage: str = stage, number: int = number) -> None:
            progress(stage, int(100 * (number + share)), 100 * len(bundle.graphs))

        report(0.0)
        name = graph.path.stem + (".ort" if options.backend == "onnxruntime" else ".plan")
        if options.backend == "onnxruntime":
            done = _save_ort(graph, staging / name)
        else:
            done = _work(graph, name, options, sku.compute_capabilities, staging, report)
            versions |= done["versions"]
        entry = {"graph": graph.spec.file, "file": name, **file_facts(staging / name)}
        entry |= {
            "source_sha256": sources[graph.spec.file]["sha256"],
            "weights_sha256": sources[WEIGHTS_FILE]["sha256"],
        }
        entry |= {key: done[key] for key in ("seconds", "layers", "addresses_randomised") if key in done}
        engines.append(entry | graph.spec.to_json())
    link.unlink()
    others = {file.name: file_facts(file) for file in sorted(staging.iterdir()) if file.name in (LOG, TIMING_CACHE)}
    write_record(staging, EngineSet(staging, options.backend, sku, versions, options.to_json(), tuple(engines), others))


def _work(
    graph: Graph,
    plan: str | None,
    options: BuildOptions,
    capabilities: Sequence[Capability],
    folder: Path,
    report: Callable[[float], None],
) -> dict[str, Any]:
    """Run the worker on one graph in ``folder``, and return its last word."""
    with tempfile.TemporaryDirectory(prefix="dspark-") as place:
        # A way to the folder whose length is the same in every run, as addresses hang on it.
        (Path(place) / "at").symlink_to(folder.resolve())
        return _work_at(f"{place}/at", graph, plan, options, capabilities, folder, report)


def _work_at(
    at: str,
    graph: Graph,
    plan: str | None,
    options: BuildOptions,
    capabilities: Sequence[Capability],
    folder: Path,
    report: Callable[[float], None],
) -> dict[str, Any]:
    job = {
        "backend": options.backend,
        "module": MODULES[options.backend],
        "model": f"{at}/graphs/{graph.path.name}",
        "plan": plan and f"{at}/{plan}",
        "timing_cache": f"{at}/{TIMING_CACHE}" if options.backend == "tensorrt" else None,
        "compute_capabilities": list(capabilities),
        "options": {**options.to_json(), "verbose": options.verbose},
    }
    last: dict[str, Any] = {}
    with (folder / LOG).open("ab") as log:
        begun = log.tell()
        process, fixed = _start_worker(log)
        with process:  # closes its pipes, and waits
            try:
                assert process.stdin is not None
                assert process.stdout is not None
                with contextlib.suppress(BrokenPipeError), process.stdin as stdin:  # it died: its exit code says so
                    stdin.write(json.dumps(job).encode())
                for line in process.stdout:
                    last = json.loads(line)
                    if "share" in last:
                        report(last["share"])
                code = process.wait()
            finally:
                process.kill()
    if "seconds" in last and code == 0:
        return {**last, "addresses_randomised": not fixed}
    reason = last.get("error") or f"the builder ended with {_exit_text(code)}"
    raise CheckFailedError(
        f"{graph.spec.file}: {options.backend} does not {'parse' if plan is None else 'build'} it: "
        f"{'; '.join([*_said(folder / LOG, begun), reason])}",
        graph=graph.spec.file,
    )


def _start_worker(log: Any) -> tuple[subprocess.Popen[bytes], bool]:
    """The worker, with addresses that are the same in every run where the system lets them be."""
    libc = ctypes.CDLL(None, use_errno=True)
    current = libc.personality(0xFFFFFFFF)
    fixed = current >= 0 and _may_fix_addresses(libc, current)

    def prepare() -> None:
        libc.prctl(*_DIE_WITH_PARENT)
        if fixed:
            libc.personality(current | _NO_RANDOM_ADDRESSES)

    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "dspark.engines.build_worker"],  # -P: the folder's name is not in sys.path
        cwd="/",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        preexec_fn=prepare,
        env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ} | {"PYTHONHASHSEED": "0"},
    )
    return process, fixed


def _may_fix_addresses(libc: ctypes.CDLL, current: int) -> bool:
    """A container's seccomp filter may refuse it; asked of a process that is about to end."""
    child = os.fork()
    if child == 0:
        os._exit(0 if libc.personality(current | _NO_RANDOM_ADDRESSES) >= 0 else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _said(log: Path, start: int) -> list[str]:
    """What the library itself called an error, from a place in its log on; the last two."""
    with log.open("rb") as stream:
        stream.seek(start)
        lines = stream.read().decode(errors="replace").splitlines()
    return [line.removeprefix("[E]").strip() for line in lines if line.startswith("[E]")][-2:]


def _exit_text(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _save_ort(graph: Graph, output: Path) -> dict[str, Any]:
    """The graph as ONNX Runtime has optimised it for this processor, in its own format."""
    from .onnxruntime import import_onnxruntime, session_options

    runtime = import_onnxruntime()
    options, begun = session_options(runtime), time.perf_counter()
    options.optimized_model_filepath = str(output)
    options.add_session_config_entry("session.save_model_format", "ORT")
    try:
        runtime.InferenceSession(str(graph.path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime raises classes of its own, with no common base
        raise CheckFailedError(f"{graph.spec.file}: ONNX Runtime does not build it: {error}") from error
    return {"seconds": round(time.perf_counter() - begun, 3)}


def _library_version(backend: BackendName) -> str:
    """The installed version, without importing what takes seconds where it is missing."""
    from .onnxruntime import import_onnxruntime
    from .tensorrt import import_tensorrt, not_installed

    if backend == "onnxruntime":
        return str(import_onnxruntime().__version__)
    version = str(import_tensorrt(backend).__version__)
    if importlib.util.find_spec("polygraphy") is None:
        raise not_installed(backend)
    return version


def _device(otherwise: str) -> Sku:
    from .cuda import open_cuda

    try:
        return open_cuda().device()
    except NotAvailableError as error:
        raise NotAvailableError(f"{error.message}; {otherwise}") from error
