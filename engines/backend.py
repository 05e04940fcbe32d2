"""What every engine backend offers; the runtime cannot tell them apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dspark.drafter.errors import NotAvailableError, UsageError
from dspark.export.bundle import Bundle, Graph
from dspark.export.contract import TensorSpec
from dspark.export.weights import FILE as WEIGHTS_FILE

from .sku import Sku

_LARGE = 1 << 30  # bytes of weights from which on they are not held twice
_LENT = 1 << 20  # bytes of an input that is bound as it is, not copied
Array = Any  # numpy on the host, torch's or our own on a device: all index, assign and slice alike
BACKENDS = ("onnxruntime", "onnxruntime-cuda", "tensorrt", "tensorrt-rtx")


class Engine(Protocol):
    """One graph, ready to run on tensors that are bound once and stay where they are."""

    def bind(self, tensors: Mapping[str, Array]) -> None:
        """Bind inputs and outputs by name; later runs read and write these very tensors."""

    def run(self) -> None:
        """Run once on the bound tensors."""


class Backend(Protocol):
    """Makes engines of graphs, and the memory that they work on."""

    name: str

    def supports(self, dtype: str) -> bool:
        """Whether graphs of this dtype run here."""

    def engine(self, graph: Graph, frugal: bool = False, exact: bool = False) -> Engine:
        """Load a graph.

        Args:
            frugal: weights stay in their file, at the cost of speed.
            exact: products with quantised weights keep their other operand as it is, at the cost of speed.
        """

    def zeros(self, spec: TensorSpec) -> Array:
        """A zeroed tensor in this backend's memory."""

    def to_host(self, tensor: Array) -> NDArray[Any]:
        """The tensor as a numpy array; not a copy where it already is one."""

    def evaluate(self, graph: Graph, inputs: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Run a graph once on host arrays, for parity."""

    def release(self, graph: Graph) -> None:
        """Forget a graph that was evaluated."""

    def synchronize(self) -> None:
        """Wait for all that runs."""

    def sku(self) -> Sku:
        """The device that engines run on."""


class Evaluator:
    """``evaluate`` for any backend: engines and their tensors are kept by graph."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.loaded: dict[Graph, tuple[Engine, dict[str, Array]]] = {}

    def __call__(self, graph: Graph, inputs: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        if graph not in self.loaded:
            specs = (*graph.spec.inputs, *graph.spec.outputs)
            tensors = {spec.name: self.backend.zeros(spec) for spec in specs}
            weights = graph.path.parent / Path(WEIGHTS_FILE).name
            frugal = weights.is_file() and weights.stat().st_size > _LARGE
            engine = self.backend.engine(graph, frugal, exact=True)
            engine.bind(tensors)
            self.loaded[graph] = engine, tensors
        engine, tensors = self.loaded[graph]
        for spec in graph.spec.inputs:
            values = inputs[spec.name]
            if values.nbytes > _LENT and _bindable(tensors[spec.name], values):
                tensors[spec.name] = values  # a cache is read where it is
                engine.bind({spec.name: values})
            else:
                assign(tensors[spec.name], values)
        engine.run()
        return {spec.name: np.array(self.backend.to_host(tensors[spec.name])) for spec in graph.spec.outputs}

    def release(self, graph: Graph) -> None:
        self.loaded.pop(graph, None)


def _bindable(tensor: Array, values: NDArray[Any]) -> bool:
    same = isinstance(tensor, np.ndarray) and tensor.dtype == values.dtype and tensor.shape == values.shape
    return same and values.flags.c_contiguous


def assign(tensor: Array, values: NDArray[Any]) -> None:
    """Write host values into a bound tensor, wherever it is."""
    if isinstance(tensor, np.ndarray):
        tensor[...] = values
    elif hasattr(tensor, "copy_"):
        import torch

        tensor.copy_(torch.from_numpy(np.ascontiguousarray(values)))
    else:
        tensor.assign(values)


def backend_from_name(name: str, threads: int | None = None, bundle: Bundle | None = None) -> Backend:
    """One of ``BACKENDS``.

    Args:
        bundle: whose engines are used where its store has any that fit; TensorRT runs nothing else.

    Raises:
        UsageError: no such backend. NotAvailableError: it is not installed, there is no such device, or nothing was
            built for it. IntegrityError: an engine is damaged, or for another device, version or graph.
    """
    from .onnxruntime import OnnxRuntimeBackend

    if name in ("onnxruntime", "onnxruntime-cuda"):
        return OnnxRuntimeBackend("cuda" if name.endswith("cuda") else "cpu", threads, bundle)
    if name in ("tensorrt", "tensorrt-rtx") and bundle is not None:
        from .tensorrt import TensorRtBackend

        return TensorRtBackend(name, bundle)  # type: ignore[arg-type]
    raise UsageError(f"backend {name!r} is none of {', '.join(BACKENDS)}")


def backend_or_fallback(name: str, fallback: str | None, bundle: Bundle, note: Callable[[str], None]) -> Backend:
    """The backend, or ``fallback`` where it is not available or its engines are for another device or version.

    Args:
        note: told once that the fallback runs, and why.

    Raises:
        IntegrityError: an engine is damaged; nothing falls back from that.
    """
    from .store import MismatchError

    try:
        return backend_from_name(name, bundle=bundle)
    except (NotAvailableError, MismatchError) as error:
        if fallback is None or fallback == name:
            raise
        backend = backend_from_name(fallback, bundle=bundle)
        note(f"warning: {name} cannot run here, {fallback} runs instead: {error.message}")
        return backend
