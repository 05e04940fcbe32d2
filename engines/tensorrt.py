"""The TensorRT backend: engines out of the store, run on one stream as CUDA graphs; TensorRT-RTX by the same class."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dspark.drafter.errors import DsparkError, IntegrityError, NotAvailableError
from dspark.export.bundle import Bundle, Graph
from dspark.export.contract import TensorSpec

from .backend import Array, Evaluator
from .cuda import Cuda, open_cuda
from .sku import Sku
from .store import MODULES, engine_sets, engines_for, no_engines

_DTYPES = {"float32": "FLOAT", "float16": "HALF", "bfloat16": "BF16", "int64": "INT64"}


class TensorRtBackend:
    """Engines of a bundle on this machine's GPU.

    Args:
        name: ``tensorrt`` or ``tensorrt-rtx``.
        cuda: memory and stream; by default torch's or cuda-python's.

    Raises:
        IntegrityError: a plan or its record was changed. MismatchError: no plan is for this device and version.
        NotAvailableError: the library is not installed, there is no device, or nothing was built.
    """

    def __init__(self, name: Literal["tensorrt", "tensorrt-rtx"], bundle: Bundle, cuda: Cuda | None = None) -> None:
        self.name: str = name
        self.library, self.bundle = name, bundle
        sets = engine_sets(bundle, name)
        if not sets:
            raise no_engines(bundle, name)
        try:
            self.trt = import_tensorrt(name)
            self.cuda = cuda or open_cuda()
            device = self.cuda.device()
        except NotAvailableError:
            for engines in sets:  # which of them it would be is not known, so all are checked: damage is worse news
                engines.check(bundle)
            raise
        found = engines_for(bundle, name, device, str(self.trt.__version__))
        assert found is not None
        self.engines, self.device = found, device
        self.log = _Log(self.trt)
        self.runtime = self.trt.Runtime(self.log.logger)
        self.scratch = self.zeros(TensorSpec("scratch", "int64", (0,)))
        self.evaluate = Evaluator(self)
        self.release = self.evaluate.release

    def supports(self, dtype: str) -> bool:
        return True

    def engine(self, graph: Graph, frugal: bool = False, exact: bool = False) -> TensorRtEngine:
        if graph.model is None:
            return TensorRtEngine(graph, self, self.engines.read(self.bundle, graph))
        from .build import build_plan

        return TensorRtEngine(graph, self, build_plan(graph, self.library, self.device))  # minutes, and not kept

    def synchronize(self) -> None:
        self.cuda.synchronize()

    def sku(self) -> Sku:
        return self.device

    def reserve(self, size: int) -> None:
        """Make the scratch memory at least ``size`` bytes: engines run one after the other, so they share it."""
        words = -(-size // 8)
        if words > self.scratch.shape[0]:
            self.scratch = self.zeros(TensorSpec("scratch", "int64", (words,)))

    def zeros(self, spec: TensorSpec) -> Array:
        return self.cuda.zeros(spec)

    def to_host(self, tensor: Array) -> NDArray[Any]:
        return tensor if isinstance(tensor, np.ndarray) else self.cuda.to_host(tensor)


class TensorRtEngine:
    """One plan, its context, and the CUDA graph of it."""

    def __init__(self, graph: Graph, backend: TensorRtBackend, plan: bytes) -> None:
        self.graph, self.backend, self.cuda, self.log = graph, backend, backend.cuda, backend.log
        self.engine = self.log.require(
            backend.runtime.deserialize_cuda_engine(plan), f"{backend.engines.name}: cannot load {graph.spec.file}"
        )
        if backend.engines.options["strip"] and graph.model is None:
            _refit(backend.trt, self.engine, graph, self.log)
        _check_tensors(backend.trt, self.engine, graph)
        by_us = backend.trt.ExecutionContextAllocationStrategy.USER_MANAGED  # out of torch's pool, where torch has one
        self.context = self.log.require(self.engine.create_execution_context(by_us), f"{graph.spec.file}: no context")
        backend.reserve(int(self.engine.device_memory_size_v2))
        self.scratch: Array = None
        self.bound: dict[str, Array] = {}
        self.warm = False
        self.replay: Callable[[], None] | None = None

    def bind(self, tensors: Mapping[str, Array]) -> None:
        for spec in (*self.graph.spec.inputs, *self.graph.spec.outputs):
            tensor = tensors.get(spec.name)
            if tensor is None or tensor is self.bound.get(spec.name):
                continue
            if tuple(tensor.shape) != spec.shape or not tensor.is_contiguous():
                raise DsparkError(f"{spec.name}: bound tensor is {tuple(tensor.shape)}, the graph takes {spec.shape}")
            self.bound[spec.name] = tensor  # TensorRT holds an address only
            if not self.context.set_tensor_address(spec.name, self.cuda.address(tensor)):
                raise DsparkError(f"{self.graph.spec.file}: TensorRT takes no address for {spec.name}; {self.log.last}")
            self._forget()

    def run(self) -> None:
        if self.scratch is not self.backend.scratch:  # a larger engine was loaded since
            self.scratch = self.backend.scratch
            self.context.set_device_memory(self.cuda.address(self.scratch), 8 * self.scratch.shape[0])
            self._forget()
        with self.cuda.ordered():
            if self.replay is None and self.warm and self._capturable():
                self.replay = self.cuda.captured(self._enqueue)
            if self.replay is not None:
                self.replay()
            else:
                self._enqueue()  # the first run may compile, allocate and load: nothing to capture
                self.warm = True

    def _forget(self) -> None:
        self.replay, self.warm = None, False  # a graph holds the addresses it was captured with

    def _enqueue(self) -> None:
        if not self.context.execute_async_v3(self.cuda.stream):
            raise NotAvailableError(f"{self.graph.spec.file}: TensorRT could not run it: {self.log.last}")

    def _capturable(self) -> bool:
        ask = getattr(self.context, "is_stream_capturable", None)  # TensorRT-RTX knows, TensorRT always can
        return True if ask is None else bool(ask(self.cuda.stream))


def import_tensorrt(name: str) -> Any:
    """The module of a backend.

    Raises:
        NotAvailableError: it is not installed, and how to install it.
    """
    try:
        return importlib.import_module(MODULES[name])
    except ImportError as error:
        raise not_installed(name) from error


def not_installed(name: str) -> NotAvailableError:
    title = {"tensorrt": "TensorRT", "tensorrt-rtx": "TensorRT-RTX"}[name]
    return NotAvailableError(f"{title} is not installed; pip install 'dspark-export[{name}]'", extra=name)


class _Log:
    """TensorRT's words, by thread: the last error is the reason that a call gives ``None``."""

    def __init__(self, trt: Any) -> None:
        last = self._last = threading.local()

        class Logger(trt.ILogger):  # type: ignore[misc]
            def __init__(self) -> None:
                trt.ILogger.__init__(self)

            def log(self, severity: Any, message: str) -> None:
                if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                    last.message = message

        self.logger = Logger()

    @property
    def last(self) -> str:
        return getattr(self._last, "message", "it gave no reason")

    def require(self, made: Any, what: str) -> Any:
        if made is None:
            raise NotAvailableError(f"{what}: {self.last}")
        return made


def _refit(trt: Any, engine: Any, graph: Graph, log: _Log) -> None:
    """Give a stripped plan the weights of its graph."""
    refitter = trt.Refitter(engine, log.logger)
    if not trt.OnnxParserRefitter(refitter, log.logger).refit_from_file(str(graph.path)):
        raise NotAvailableError(f"{graph.path}: TensorRT cannot refit its stripped plan: {log.last}")
    if not refitter.refit_cuda_engine():
        raise NotAvailableError(f"{graph.path}: TensorRT cannot refit its stripped plan: {log.last}")


def _check_tensors(trt: Any, engine: Any, graph: Graph) -> None:
    """The plan's tensors are the contract's: names, types and shapes."""
    found = {}
    for i in range(engine.num_io_tensors):
        name = engine.get_tensor_name(i)
        found[name] = (engine.get_tensor_dtype(name), tuple(engine.get_tensor_shape(name)))
    for spec in (*graph.spec.inputs, *graph.spec.outputs):
        wanted = (getattr(trt.DataType, _DTYPES[spec.dtype]), spec.shape)
        if found.get(spec.name) != wanted:
            raise IntegrityError(
                f"{graph.spec.file}: {spec.name} is {found.get(spec.name)} in the plan, {wanted} in the manifest"
            )
