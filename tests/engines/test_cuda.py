"""Device arrays of cuda-python, over a CUDA runtime that is host memory."""

from __future__ import annotations

import gc
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from fake_gpu import STREAM, FakeCuda

from dspark.drafter.errors import NotAvailableError
from dspark.engines import cuda as cuda_module
from dspark.engines.cuda import CudaPython, open_cuda
from dspark.export.contract import TensorSpec

RANDOM = np.random.default_rng(0)


def filled(cuda: CudaPython, shape: tuple[int, ...], dtype: str = "float32") -> tuple[object, np.ndarray]:
    """An array on the device and the same values on the host."""
    values = RANDOM.integers(-99, 99, shape).astype("float32" if dtype == "bfloat16" else dtype)
    array = cuda.zeros(TensorSpec("x", dtype, shape))
    array.assign(values)
    return array, values


@pytest.mark.parametrize(
    "key",
    [
        (),
        (1,),
        (slice(None), 1),
        (slice(None), 1, slice(None), slice(2, 5)),
        (slice(None), slice(None), slice(None), slice(0, 3)),
        (Ellipsis, slice(1, 4), slice(None)),
        (1, 0, 2, 3, 4),
    ],
)
def test_slices_read_and_write_as_in_numpy(key: tuple[object, ...]) -> None:
    cuda = CudaPython(FakeCuda())
    array, values = filled(cuda, (2, 3, 4, 6, 5))
    np.testing.assert_array_equal(cuda.to_host(array[key]), values[key])
    other, others = filled(cuda, (2, 3, 4, 6, 5))
    array[key] = other[key]  # within the device
    values[key] = others[key]
    np.testing.assert_array_equal(cuda.to_host(array), values)
    array[key] = others[key] + 1  # from the host
    values[key] = others[key] + 1
    np.testing.assert_array_equal(cuda.to_host(array), values)


def test_rows_of_a_ring_wrap_around() -> None:
    """The cache's rows as ``cache_rows`` gives them: two runs, and what lies between stays."""
    cuda = CudaPython(FakeCuda())
    cache, values = filled(cuda, (2, 3, 4, 8, 5))
    new, rows = filled(cuda, (2, 3, 4, 6, 5))
    into = np.array([6, 7, 0, 1])
    cache[:, 1][:, :, into] = new[:, 1][:, :, slice(2, 6)]
    values[:, 1][:, :, into] = rows[:, 1][:, :, 2:6]
    np.testing.assert_array_equal(cuda.to_host(cache), values)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int64"])
def test_every_type_goes_up_and_comes_down(dtype: str) -> None:
    cuda = CudaPython(FakeCuda())
    array, values = filled(cuda, (3, 7), dtype)
    found = cuda.to_host(array)
    assert found.dtype == values.dtype
    np.testing.assert_array_equal(found, values)
    empty = cuda.zeros(TensorSpec("x", dtype, (3, 7)))
    assert not cuda.to_host(empty).any()


def test_bfloat16_rounds_to_nearest() -> None:
    cuda = CudaPython(FakeCuda())
    array = cuda.zeros(TensorSpec("x", "bfloat16", (3,)))
    array.assign(np.array([1.00390625, 1.01171875, -3.1415927], np.float32))  # ties go to even
    assert cuda.to_host(array).tolist() == [1.0, 1.015625, -3.140625]


def test_rows_of_a_cache_take_one_copy() -> None:
    fake = FakeCuda()
    cuda = CudaPython(fake)
    cache, _ = filled(cuda, (4, 1, 8, 64, 16))
    new, _ = filled(cuda, (4, 1, 8, 8, 16))
    copies = []
    real = fake.cudaMemcpy2DAsync
    fake.cudaMemcpy2DAsync = lambda *call: copies.append(call[4:6]) or real(*call)  # type: ignore[method-assign,assignment]
    cache[:, 0][:, :, slice(10, 13)] = new[:, 0][:, :, slice(0, 3)]
    assert copies == [(3 * 16 * 4, 4 * 8)]


def test_memory_is_freed_with_the_last_view() -> None:
    fake = FakeCuda()
    cuda = CudaPython(fake)
    array, _ = filled(cuda, (4, 4))
    view = array[1]
    del array
    gc.collect()
    assert fake.blocks
    del view
    gc.collect()
    assert not fake.blocks


def test_a_captured_graph_replays_and_does_not_run_before() -> None:
    fake = FakeCuda()
    cuda = CudaPython(fake)
    source, values = filled(cuda, (8,))
    into = cuda.zeros(TensorSpec("y", "float32", (8,)))

    def enqueue() -> None:
        into[...] = source

    replay = cuda.captured(enqueue)
    assert not cuda.to_host(into).any()
    replay()
    np.testing.assert_array_equal(cuda.to_host(into), values)
    source.assign(values + 1)
    replay()
    np.testing.assert_array_equal(cuda.to_host(into), values + 1)
    assert fake.launches == 2
    assert cuda.stream == STREAM


def test_errors_say_what_was_done_and_what_to_do() -> None:
    with pytest.raises(NotAvailableError, match=r"no CUDA device") as caught:
        CudaPython(FakeCuda(devices=0))
    assert caught.value.exit_code == 5
    cuda = CudaPython(FakeCuda(memory=1000))
    with pytest.raises(
        NotAvailableError,
        match=r"allocating k_cache \[2, 999\]: cudaMalloc gave cudaErrorMemoryAllocation: out of GPU memory; export",
    ):
        cuda.zeros(TensorSpec("k_cache", "float32", (2, 999)))


def test_the_device_is_recorded() -> None:
    sku = CudaPython(FakeCuda(capability=(9, 0))).device()
    assert (sku.slug, sku.memory_bytes, sku.cuda) == ("nvidia-rtx-6000-sm90", 48 << 30, "13.2")


def test_without_torch_or_cuda_python_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setitem(sys.modules, "cuda", None)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(NotAvailableError, match=r"cuda-python is not installed.*dspark-export\[cuda\]"):
        open_cuda()
    bindings = SimpleNamespace(runtime=FakeCuda())
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace(bindings=bindings))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    assert isinstance(open_cuda(), cuda_module.CudaPython)
