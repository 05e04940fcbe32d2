"""A CUDA runtime over host memory, and a TensorRT whose plans name ONNX graphs that ONNX Runtime runs.

They keep the rules that a GPU would enforce: addresses must lie in what was allocated, work enqueued while a stream is
being captured is recorded and not run, and a graph replays the addresses it was captured with.
"""

from __future__ import annotations

import ctypes
import enum
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime

from dspark.engines.sku import Sku
from dspark.engines.store import MODULES, EngineSet, file_facts, write_record
from dspark.export.bundle import Bundle
from dspark.export.weights import FILE as WEIGHTS_FILE

STREAM = 77
VERSION = "11.4.0"


class CudaError(enum.IntEnum):
    cudaSuccess = 0
    cudaErrorInvalidValue = 1
    cudaErrorMemoryAllocation = 2
    cudaErrorNoDevice = 100


class FakeCuda:
    """``cuda.bindings.runtime`` as far as it is used; every function gives (error, result)."""

    cudaStreamNonBlocking = 1
    cudaMemcpyKind = SimpleNamespace(
        cudaMemcpyHostToDevice="up", cudaMemcpyDeviceToHost="down", cudaMemcpyDeviceToDevice="on"
    )
    cudaStreamCaptureMode = SimpleNamespace(cudaStreamCaptureModeThreadLocal=1)

    def __init__(self, devices: int = 1, memory: int = 1 << 40, capability: tuple[int, int] = (8, 9)) -> None:
        self.devices, self.memory, self.capability = devices, memory, capability
        self.blocks: dict[int, np.ndarray] = {}
        self.bytes: Counter[str] = Counter()  # copied up, down and on the device
        self.captured: list[Callable[[], None]] | None = None
        self.launches = 0

    def cudaGetDeviceCount(self) -> tuple[Any, int]:
        return (CudaError.cudaSuccess, self.devices) if self.devices else (CudaError.cudaErrorNoDevice, 0)

    def cudaGetDevice(self) -> tuple[Any, int]:
        return CudaError.cudaSuccess, 0

    def cudaGetDeviceProperties(self, number: int) -> tuple[Any, Any]:
        major, minor = self.capability
        return CudaError.cudaSuccess, SimpleNamespace(
            name=b"NVIDIA RTX 6000", major=major, minor=minor, totalGlobalMem=48 << 30
        )

    def cudaDriverGetVersion(self) -> tuple[Any, int]:
        return CudaError.cudaSuccess, 13020

    def cudaStreamCreateWithFlags(self, flags: int) -> tuple[Any, int]:
        return CudaError.cudaSuccess, STREAM

    def cudaMalloc(self, size: int) -> tuple[Any, int]:
        if size > self.memory:
            return CudaError.cudaErrorMemoryAllocation, 0
        block = np.full(size + 256, 0xAB, np.uint8)  # rubbish, as a device has
        address = -(-block.ctypes.data // 256) * 256
        self.blocks[address] = block
        return CudaError.cudaSuccess, address

    def cudaFree(self, address: int) -> tuple[Any]:
        del self.blocks[address]
        return (CudaError.cudaSuccess,)

    def cudaMemsetAsync(self, address: int, value: int, size: int, stream: int) -> tuple[Any]:
        return self.enqueue(stream, lambda: ctypes.memset(address, value, size))

    def cudaMemcpy2DAsync(
        self, to: int, to_pitch: int, of: int, of_pitch: int, width: int, height: int, kind: str, stream: int
    ) -> tuple[Any]:
        for side, address, pitch in (("down", to, to_pitch), ("up", of, of_pitch)):
            if width > pitch or (kind != side and not self.holds(address, pitch * (height - 1) + width)):
                return (CudaError.cudaErrorInvalidValue,)
        self.bytes[kind] += width * height

        def copy() -> None:
            for row in range(height):
                ctypes.memmove(to + row * to_pitch, of + row * of_pitch, width)

        return self.enqueue(stream, copy)

    def cudaStreamSynchronize(self, stream: int) -> tuple[Any]:
        return (CudaError.cudaSuccess,)

    def cudaStreamBeginCapture(self, stream: int, mode: int) -> tuple[Any]:
        self.captured = []
        return (CudaError.cudaSuccess,)

    def cudaStreamEndCapture(self, stream: int) -> tuple[Any, Any]:
        graph, self.captured = self.captured, None
        return CudaError.cudaSuccess, graph

    def cudaGraphInstantiate(self, graph: Any, flags: int) -> tuple[Any, Any]:
        return CudaError.cudaSuccess, list(graph)

    def cudaGraphDestroy(self, graph: Any) -> tuple[Any]:
        return (CudaError.cudaSuccess,)

    def cudaGraphLaunch(self, executable: Any, stream: int) -> tuple[Any]:
        self.launches += 1
        for work in executable:
            work()
        return (CudaError.cudaSuccess,)

    def enqueue(self, stream: int, work: Callable[[], Any]) -> tuple[Any]:
        if stream != STREAM:
            return (CudaError.cudaErrorInvalidValue,)
        if self.captured is None:
            work()
        else:
            self.captured.append(work)
        return (CudaError.cudaSuccess,)

    def holds(self, address: int, size: int) -> bool:
        return any(
            start <= address and address + size <= start + len(block) - 256 for start, block in self.blocks.items()
        )


def fake_tensorrt(cuda: FakeCuda, version: str = VERSION, scratch: int = 1000) -> Any:
    """The module ``tensorrt`` as far as the runner uses it."""

    class ILogger:
        class Severity(enum.Enum):
            INTERNAL_ERROR, ERROR, WARNING = range(3)

    class Runtime:
        def __init__(self, logger: Any) -> None:
            self.logger = logger

        def deserialize_cuda_engine(self, plan: bytes) -> Any:
            try:
                return _Engine(cuda, scratch, json.loads(plan))
            except ValueError:
                self.logger.log(ILogger.Severity.ERROR, "the magic tag does not match")
                return None

    return SimpleNamespace(
        __version__=version,
        ILogger=ILogger,
        Runtime=Runtime,
        DataType=SimpleNamespace(FLOAT="float32", HALF="float16", BF16="bfloat16", INT64="int64"),
        ExecutionContextAllocationStrategy=SimpleNamespace(USER_MANAGED="ours"),
    )


class _Engine:
    def __init__(self, cuda: FakeCuda, scratch: int, plan: dict[str, Any]) -> None:
        self.cuda, self.plan = cuda, plan
        self.tensors = [*plan["inputs"], *plan["outputs"]]
        self.num_io_tensors = len(self.tensors)
        self.device_memory_size_v2 = scratch * len(self.tensors)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(plan["model"], options, providers=["CPUExecutionProvider"])

    def get_tensor_name(self, number: int) -> str:
        return str(self.tensors[number]["name"])

    def get_tensor_dtype(self, name: str) -> str:
        return str(self._of(name)["dtype"])

    def get_tensor_shape(self, name: str) -> list[int]:
        return list(self._of(name)["shape"])

    def create_execution_context(self, strategy: str) -> _Context:
        assert strategy == "ours"
        return _Context(self)

    def _of(self, name: str) -> dict[str, Any]:
        return next(tensor for tensor in self.tensors if tensor["name"] == name)


class _Context:
    def __init__(self, engine: _Engine) -> None:
        self.engine, self.addresses = engine, dict[str, int]()
        self.scratch = 0

    def set_tensor_address(self, name: str, address: int) -> bool:
        tensor = self.engine._of(name)
        if not self.engine.cuda.holds(address, _size(tensor)):
            return False
        self.addresses[name] = address
        return True

    def set_device_memory(self, address: int, size: int) -> None:
        assert size >= self.engine.device_memory_size_v2
        assert self.engine.cuda.holds(address, size)
        assert address % 256 == 0
        self.scratch = address

    def execute_async_v3(self, stream: int) -> bool:
        if set(self.addresses) != {tensor["name"] for tensor in self.engine.tensors} or not self.scratch:
            return False
        bound, cuda, plan = dict(self.addresses), self.engine.cuda, self.engine.plan

        def run() -> None:
            inputs = {tensor["name"]: _array(bound[tensor["name"]], tensor) for tensor in plan["inputs"]}
            names = [tensor["name"] for tensor in plan["outputs"]]
            for tensor, value in zip(plan["outputs"], self.engine.session.run(names, inputs), strict=True):
                _array(bound[tensor["name"]], tensor)[...] = value

        cuda.enqueue(stream, run)
        return True


def _size(tensor: dict[str, Any]) -> int:
    return int(np.prod(tensor["shape"])) * np.dtype(tensor["dtype"]).itemsize


def _array(address: int, tensor: dict[str, Any]) -> np.ndarray:
    buffer = (ctypes.c_char * _size(tensor)).from_address(address)
    return np.frombuffer(buffer, tensor["dtype"]).reshape(tensor["shape"])


def write_fake_plans(
    bundle: Bundle, sku: Sku, backend: str = "tensorrt", version: str = VERSION, **options: Any
) -> Path:
    """An engine set whose plans the fake TensorRT runs."""
    folder = bundle.path / "engines" / sku.slug / backend
    folder.mkdir(parents=True)
    engines = []
    for graph in bundle.graphs:
        file = folder / f"{graph.path.stem}.plan"
        spec = graph.spec.to_json()
        file.write_text(json.dumps({"model": str(graph.path), **spec}))
        files = bundle.manifest["files"]
        sources = {"source_sha256": files[graph.spec.file]["sha256"], "weights_sha256": files[WEIGHTS_FILE]["sha256"]}
        engines.append(
            {"graph": graph.spec.file, "file": file.name, **file_facts(file), **sources, "seconds": 1.0, **spec}
        )
    stated = {"strip": False, "version_compatible": False, "hardware_compatible": None, **options}
    write_record(folder, EngineSet(folder, backend, sku, {MODULES[backend]: version}, stated, tuple(engines), {}))
    return folder
