"""The ONNX Runtime backend: CPU, and CUDA by the same class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark.drafter.errors import DsparkError, NotAvailableError
from dspark.export.bundle import Bundle, Graph
from dspark.export.contract import TensorSpec

from .backend import Array, Evaluator
from .cuda import TorchCuda
from .sku import Sku, this_cpu, usable_cores
from .store import engines_for

_FEW_ROWS = 32
_PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}


class OnnxRuntimeBackend:
    """Sessions on one device. Host memory is numpy's; CUDA memory is torch's, bound by address.

    Args:
        bundle: whose store is looked into: graphs built there for this processor are loaded in their place.

    Raises:
        NotAvailableError: ONNX Runtime, its CUDA provider, or a CUDA build of torch is not installed.
    """

    def __init__(self, device: str = "cpu", threads: int | None = None, bundle: Bundle | None = None) -> None:
        self.runtime = import_onnxruntime()
        self.device = device
        self.name = "onnxruntime" if device == "cpu" else f"onnxruntime-{device}"
        self.threads = threads or usable_cores()
        self.bundle = bundle
        version = str(self.runtime.__version__)
        self.engines = engines_for(bundle, self.name, this_cpu(), version) if bundle and device == "cpu" else None
        self.evaluate = Evaluator(self)
        self.release = self.evaluate.release
        if _PROVIDERS[device] not in self.runtime.get_available_providers():
            raise NotAvailableError(
                f"ONNX Runtime {self.runtime.__version__} has no {_PROVIDERS[device]}; "
                "install dspark-export[onnxruntime-gpu] on a machine with a GPU"
            )
        if device == "cuda":
            _require_cuda_torch()

    def supports(self, dtype: str) -> bool:
        return dtype != "bfloat16" or self.device == "cuda"  # the CPU has no bf16 MatMul kernel

    def engine(self, graph: Graph, frugal: bool = False, exact: bool = False) -> OnnxRuntimeEngine:
        dtypes = {tensor.dtype for tensor in (*graph.spec.inputs, *graph.spec.outputs)}
        if "bfloat16" in dtypes and not self.supports("bfloat16"):
            raise NotAvailableError(
                "ONNX Runtime has no bf16 kernels on the CPU; run this bundle on a GPU, or export with --dtype fp32"
            )
        built = None
        if self.engines is not None and self.bundle is not None and graph.model is None:
            built = self.engines.read(self.bundle, graph)
        return OnnxRuntimeEngine(graph, self, built, frugal, exact)

    def zeros(self, spec: TensorSpec) -> Array:
        if self.device == "cpu":
            return np.zeros(spec.shape, dtype=spec.dtype)
        import torch

        return torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype), device=self.device)

    def synchronize(self) -> None:
        """Nothing to wait for: ``run`` ends when its outputs are there."""

    def sku(self) -> Sku:
        return this_cpu() if self.device == "cpu" else TorchCuda().device()

    def to_host(self, tensor: Array) -> NDArray[Any]:
        if isinstance(tensor, np.ndarray):
            return tensor
        import torch

        return np.asarray((tensor.float() if tensor.dtype == torch.bfloat16 else tensor).cpu())


class OnnxRuntimeEngine:
    """One session and its binding."""

    def __init__(
        self, graph: Graph, backend: OnnxRuntimeBackend, built: bytes | None, frugal: bool, exact: bool
    ) -> None:
        self.graph, self.device, self.runtime = graph, backend.device, backend.runtime
        options = session_options(self.runtime)
        # The few rows of a round are too little work to wait for a second thread, which after a verify step of PyTorch
        # finds its core taken for some milliseconds.
        few_rows = graph.spec.name == "context" and graph.spec.batch * graph.spec.size <= _FEW_ROWS
        options.intra_op_num_threads = 1 if few_rows else backend.threads
        # Threads spin inside a run, where operators are short, and stop with it: between runs they would take the cores
        # from the target's threads (measured: a verify step takes twice as long).
        options.add_session_config_entry("session.force_spinning_stop", "1")
        if graph.model is not None:
            options.add_session_config_entry(
                "session.model_external_initializers_file_folder_path", str(graph.path.parent)
            )
        if exact:  # else rows are rounded to int8 for products with quantised weights, which is 2 to 14 × faster
            options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
        if frugal:  # no packed copies, no weights widened at load, nothing kept between runs
            options.add_session_config_entry("session.disable_prepacking", "1")
            options.enable_cpu_mem_arena = options.enable_mem_pattern = False
        folded = ["ConstantFolding"] if frugal else []
        source = built or (str(graph.path) if graph.model is None else graph.model)
        try:
            self.session = self.runtime.InferenceSession(
                source, options, providers=[_PROVIDERS[self.device]], disabled_optimizers=folded
            )
        except Exception as error:  # ONNX Runtime raises classes of its own, with no common base
            raise NotAvailableError(
                f"{graph.path}: ONNX Runtime {self.runtime.__version__} cannot load it: {error}"
            ) from error
        self.binding = self.session.io_binding()
        self.bound: dict[str, Array] = {}

    def bind(self, tensors: Mapping[str, Array]) -> None:
        for side, specs in ((self.binding.bind_input, self.graph.spec.inputs),
                            (self.binding.bind_output, self.graph.spec.outputs)):  # fmt: skip
            for spec in specs:
                if spec.name in tensors:
                    tensor = tensors[spec.name]
                    self.bound[spec.name] = tensor  # the binding holds an address only
                    side(
                        spec.name,
                        self.device,
                        0,
                        _element_type(spec.dtype),
                        spec.shape,
                        _address(tensor, spec),
                    )

    def run(self) -> None:
        if self.device == "cuda":  # torch writes the inputs on a stream of its own
            import torch

            torch.cuda.current_stream().synchronize()
        self.session.run_with_iobinding(self.binding)
        if self.device == "cuda":
            self.binding.synchronize_outputs()


def _address(tensor: Array, spec: TensorSpec) -> int:
    contiguous = tensor.flags.c_contiguous if isinstance(tensor, np.ndarray) else tensor.is_contiguous()
    if tuple(tensor.shape) != spec.shape or not contiguous:
        raise DsparkError(f"{spec.name}: bound tensor is {tuple(tensor.shape)}, the graph takes {spec.shape}")
    return int(tensor.ctypes.data if isinstance(tensor, np.ndarray) else tensor.data_ptr())


def _element_type(dtype: str) -> Any:
    if dtype == "bfloat16":
        from onnx import TensorProto

        return TensorProto.BFLOAT16
    return np.dtype(dtype).type


def import_onnxruntime() -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise NotAvailableError("ONNX Runtime is not installed; pip install 'dspark-export[onnxruntime]'") from error
    return onnxruntime


def _require_cuda_torch() -> None:
    import torch

    if not torch.cuda.is_available():
        raise NotAvailableError("no CUDA device: torch.cuda.is_available() is false")


def session_options(runtime: Any) -> Any:
    options = runtime.SessionOptions()
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return options
