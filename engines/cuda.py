"""CUDA memory, streams and graphs by torch or by cuda-python, whichever is there: one interface over both.

Arrays of either index, assign and slice as numpy's do, as far as the runtime needs it (basic indexing, and rows by an
array of numbers); what they hold stays on the device until ``to_host``.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import shutil
import subprocess
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dspark.drafter.errors import NotAvailableError
from dspark.export.contract import TensorSpec

from .sku import Sku

_HINTS = {
    2: "out of GPU memory; export with a smaller --context or --batch, or free the device",
    35: "the driver is older than this CUDA runtime wants; update it",
    100: "there is no CUDA device",
    209: "this build has no kernels for the device",
    700: "a kernel read or wrote outside its memory; run again with CUDA_LAUNCH_BLOCKING=1 and report it",
    802: "the device is not ready yet; on a fabric-linked machine the fabric manager must run",
    803: "driver and CUDA libraries do not go together; make their versions match",
}


_MAX_PITCH = 1 << 31  # bytes, of cudaMemcpy2D


class Cuda(Protocol):
    """Device memory, one stream that engines run on, and graphs of it."""

    stream: int  # handle, not the default stream

    def device(self) -> Sku: ...

    def zeros(self, spec: TensorSpec) -> Any:
        """A zeroed array on the device."""

    def address(self, array: Any) -> int: ...

    def to_host(self, array: Any) -> NDArray[Any]:
        """Its values, once all that was enqueued has been computed."""

    def ordered(self) -> contextlib.AbstractContextManager[None]:
        """What runs on ``stream`` inside sees all writes before it, and is seen by all reads after it."""

    def captured(self, enqueue: Callable[[], None]) -> Callable[[], None]:
        """Record what ``enqueue`` puts on the stream, without running it; returns what replays it."""

    def synchronize(self) -> None: ...


def open_cuda() -> Cuda:
    """torch's CUDA where it has a device, else cuda-python's.

    Raises:
        NotAvailableError: neither finds a device, and why.
    """
    import torch

    if torch.cuda.is_available():
        return TorchCuda()
    try:
        from cuda.bindings import runtime
    except ImportError as error:
        reason = "is a build without CUDA" if torch.version.cuda is None else "finds no CUDA device"
        raise NotAvailableError(
            f"no CUDA: torch {torch.__version__} {reason}, and cuda-python is not installed; "
            "on a machine with a GPU, pip install 'dspark-export[cuda]'"
        ) from error
    return CudaPython(runtime)


class TorchCuda:
    """Memory out of torch's pool; engines run on a stream of their own."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        with self.errors("opening the device"):
            self._stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.stream = int(self._stream.cuda_stream)

    def device(self) -> Sku:
        properties = self.torch.cuda.get_device_properties(self.torch.cuda.current_device())
        capability = (int(properties.major), int(properties.minor))
        return _sku(properties.name, capability, int(properties.total_memory), self.torch.version.cuda)

    def zeros(self, spec: TensorSpec) -> Any:
        with self.errors(f"allocating {spec.name} {list(spec.shape)}"):
            return self.torch.zeros(spec.shape, dtype=getattr(self.torch, spec.dtype), device="cuda")

    def address(self, array: Any) -> int:
        return int(array.data_ptr())

    def to_host(self, array: Any) -> NDArray[Any]:
        with self.errors("reading results"):
            host = array.float() if array.dtype == self.torch.bfloat16 else array
            return np.asarray(host.cpu())

    @contextlib.contextmanager
    def ordered(self) -> Iterator[None]:
        current = self.torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with self.errors("running an engine"), self.torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    def captured(self, enqueue: Callable[[], None]) -> Callable[[], None]:
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            enqueue()
        replay: Callable[[], None] = graph.replay
        return replay

    def synchronize(self) -> None:
        with self.errors("running an engine"):
            self.torch.cuda.synchronize()

    @contextlib.contextmanager
    def errors(self, doing: str) -> Iterator[None]:
        try:
            yield
        except self.torch.cuda.OutOfMemoryError as error:
            raise NotAvailableError(f"{doing}: {_HINTS[2]}") from error
        except RuntimeError as error:  # torch has no class of its own for what CUDA reports
            if "CUDA" not in str(error):
                raise
            raise NotAvailableError(f"{doing}: {str(error).splitlines()[0]}") from error


class CudaPython:
    """Memory and one stream of the CUDA runtime, through ``cuda.bindings.runtime``."""

    def __init__(self, runtime: Any) -> None:
        self.runtime = runtime
        if self.call("looking for a device", "cudaGetDeviceCount") == 0:
            raise NotAvailableError(f"looking for a device: {_HINTS[100]}")
        self.stream = int(self.call("opening the device", "cudaStreamCreateWithFlags", runtime.cudaStreamNonBlocking))

    def device(self) -> Sku:
        number = self.call("reading the device", "cudaGetDevice")
        properties = self.call("reading the device", "cudaGetDeviceProperties", number)
        version = self.call("reading the device", "cudaDriverGetVersion")
        name = properties.name.decode() if isinstance(properties.name, bytes) else str(properties.name)
        capability = (int(properties.major), int(properties.minor))
        cuda = f"{version // 1000}.{version % 1000 // 10}"
        return _sku(name.rstrip("\0"), capability, int(properties.totalGlobalMem), cuda)

    def zeros(self, spec: TensorSpec) -> DeviceArray:
        storage = np.dtype("uint16" if spec.dtype == "bfloat16" else spec.dtype)
        size = max(1, math.prod(spec.shape) * storage.itemsize)
        doing = f"allocating {spec.name} {list(spec.shape)}"
        address = int(self.call(doing, "cudaMalloc", size))
        array = DeviceArray(self, _view(address, spec.shape, storage), spec.dtype == "bfloat16")
        weakref.finalize(array, self.runtime.cudaFree, address)
        self.call(doing, "cudaMemsetAsync", address, 0, size, self.stream)
        return array

    def address(self, array: DeviceArray) -> int:
        return array.address

    def to_host(self, array: DeviceArray) -> NDArray[Any]:
        host: NDArray[Any] = np.empty(array.shape, array.view.dtype)
        self.copy(host, array.view, self.runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost)
        self.synchronize()
        return (host.astype(np.uint32) << 16).view(np.float32) if array.bfloat16 else host

    @contextlib.contextmanager
    def ordered(self) -> Iterator[None]:
        yield  # all of it is on the one stream

    def captured(self, enqueue: Callable[[], None]) -> Callable[[], None]:
        doing, mode = "capturing a graph", self.runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self.call(doing, "cudaStreamBeginCapture", self.stream, mode)
        try:
            enqueue()
        finally:
            graph = self.call(doing, "cudaStreamEndCapture", self.stream)
        executable = self.call(doing, "cudaGraphInstantiate", graph, 0)
        self.call(doing, "cudaGraphDestroy", graph)
        return lambda: self.call("running an engine", "cudaGraphLaunch", executable, self.stream)

    def synchronize(self) -> None:
        self.call("running an engine", "cudaStreamSynchronize", self.stream)

    def call(self, doing: str, function: str, *arguments: Any) -> Any:
        """Call the CUDA runtime; its result, or an error that says what was done and what to do."""
        error, *results = getattr(self.runtime, function)(*arguments)
        if int(error) != 0:
            name = getattr(error, "name", str(error))
            hint = _HINTS.get(int(error), "see the CUDA runtime's documentation of this error")
            raise NotAvailableError(f"{doing}: {function} gave {name}: {hint}", cuda_error=int(error))
        return results[0] if results else None

    def copy(self, into: NDArray[Any], source: NDArray[Any], kind: Any) -> None:
        """Copy between equal shapes whose numpy views hold addresses of either side; enqueued on the stream."""
        for to, to_pitch, of, of_pitch, width, height in _rectangles(into, source):
            self.call("copying", "cudaMemcpy2DAsync", to, to_pitch, of, of_pitch, width, height, kind, self.stream)


class DeviceArray:
    """Device memory that slices as a numpy array does: ``view`` does the arithmetic and is never read."""

    def __init__(self, cuda: CudaPython, view: NDArray[Any], bfloat16: bool, owner: DeviceArray | None = None) -> None:
        self.cuda, self.view, self.bfloat16, self.owner = cuda, view, bfloat16, owner

    @property
    def shape(self) -> tuple[int, ...]:
        return self.view.shape

    @property
    def address(self) -> int:
        return int(self.view.__array_interface__["data"][0])

    def is_contiguous(self) -> bool:
        return bool(self.view.flags.c_contiguous)

    def __getitem__(self, key: Any) -> DeviceArray:
        parts = key if isinstance(key, tuple) else (key,)
        if not any(part is Ellipsis for part in parts):
            parts = (*parts, ...)  # so that a single element too is a view, and is not read
        view = self.view[parts]
        return DeviceArray(self.cuda, view, self.bfloat16, self.owner or self)

    def __setitem__(self, key: Any, values: DeviceArray | NDArray[Any]) -> None:
        for place, share in _contiguous_runs(key if isinstance(key, tuple) else (key,)):
            part = values if share is None else values[share]
            into = self[place]
            if isinstance(part, DeviceArray):
                self.cuda.copy(into.view, part.view, self.cuda.runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice)
            else:
                into.assign(part)

    def assign(self, values: NDArray[Any]) -> None:
        """Write host values of the same shape, converted to this array's type."""
        host = _as_bfloat16(values) if self.bfloat16 else np.asarray(values, self.view.dtype)
        host = np.ascontiguousarray(np.broadcast_to(host, self.shape)).reshape(self.shape)
        self.cuda.copy(self.view, host, self.cuda.runtime.cudaMemcpyKind.cudaMemcpyHostToDevice)


def _view(address: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """A numpy array over an address that is not the host's: for its views' shapes, strides and addresses only."""

    class Memory:
        __array_interface__ = {"data": (address, False), "shape": shape, "typestr": dtype.str, "version": 3}  # noqa: RUF012

    return np.asarray(Memory())


def _contiguous_runs(key: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], tuple[Any, ...] | None]]:
    """A key with an array of row numbers as keys with slices, each with the share of the values that goes there."""
    places = [i for i, part in enumerate(key) if isinstance(part, np.ndarray)]
    if not places:
        yield key, None
        return
    (axis,) = places
    rows = key[axis]
    edges = [0, *(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)]
    for start, stop in itertools.pairwise(edges):
        place = slice(int(rows[start]), int(rows[stop - 1]) + 1)
        share = tuple(slice(None) for part in key[:axis] if not isinstance(part, int))
        yield (*key[:axis], place, *key[axis + 1 :]), (*share, slice(start, stop))


def _rectangles(into: NDArray[Any], source: NDArray[Any]) -> Iterator[tuple[int, int, int, int, int, int]]:
    """Two views of one shape as (address, pitch, address, pitch, width, height), all in bytes but the height."""
    if into.shape != source.shape:
        raise ValueError(f"cannot copy {source.shape} into {into.shape}")
    if not into.size:
        return
    axes = [(n, a, b) for n, a, b in zip(into.shape, into.strides, source.strides, strict=True) if n > 1]
    width = into.dtype.itemsize
    while axes and axes[-1][1] == axes[-1][2] == width:  # contiguous on both sides
        width *= axes.pop()[0]
    merged: list[tuple[int, int, int]] = []
    for n, a, b in axes:  # an axis that continues the one before it
        if merged and merged[-1][1:] == (n * a, n * b):
            merged[-1] = (merged[-1][0] * n, a, b)
        else:
            merged.append((n, a, b))
    fits = merged and max(merged[-1][1:]) < _MAX_PITCH
    height, to_pitch, of_pitch = merged.pop() if fits else (1, width, width)
    to, of = (int(view.__array_interface__["data"][0]) for view in (into, source))
    for place in np.ndindex(*(n for n, _, _ in merged)):
        down = sum(i * a for i, (_, a, _) in zip(place, merged, strict=True))
        along = sum(i * b for i, (_, _, b) in zip(place, merged, strict=True))
        yield to + down, to_pitch, of + along, of_pitch, width, height


def _as_bfloat16(values: NDArray[Any]) -> NDArray[np.uint16]:
    import ml_dtypes

    return np.asarray(values).astype(ml_dtypes.bfloat16).view(np.uint16)


def _sku(name: str, capability: tuple[int, int], memory: int, cuda: str | None) -> Sku:
    driver, power = _of_driver()
    return Sku("nvidia", name, (capability,), memory, power, driver, cuda)


def _of_driver() -> tuple[str | None, float | None]:
    """Driver version and power limit by nvidia-smi, where it is."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None, None
    query = [tool, "--query-gpu=driver_version,power.limit", "--format=csv,noheader,nounits", "--id=0"]
    try:
        text = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
        driver, power = (part.strip() for part in text.splitlines()[0].split(","))
        return driver, float(power)
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None, None
