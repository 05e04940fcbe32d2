"""Linear layers for a verify step on the CPU: a few rows against a weight matrix that MKL has packed once.

PyTorch's fp32 linear is as fast as memory allows for up to three rows; from four rows on it takes two to three times
that, which is what makes verification dear. With a matrix packed for ``rows`` rows the time stays that of one row
(measured: ``benchmarks/packed_linear.py``). MKL packs for one number of rows, so fewer rows are padded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn

_FAST_ALREADY = 3  # rows up to which PyTorch's own linear is not slower


def pack_linear_layers(model: nn.Module, rows: int) -> int:
    """Make every fp32 CPU ``nn.Linear`` of ``model`` use a packed matrix for 4 … ``rows`` rows.

    The packed copy takes as much memory again as the matrices. Where PyTorch has no MKL, nothing is changed.

    Returns:
        number of layers packed.
    """
    import torch

    if not hasattr(torch.ops.mkl, "_mkl_linear") or rows <= _FAST_ALREADY:
        return 0
    packed = 0
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and _packable(module.weight):
            _pack(module, rows)
            packed += 1
    return packed


def _packable(weight: Tensor) -> bool:
    import torch

    return weight.dtype == torch.float32 and weight.device.type == "cpu"


def _pack(module: nn.Linear, rows: int) -> None:
    import torch

    weight = module.weight.detach()
    matrix = torch.ops.mkl._mkl_reorder_linear_weight(weight, rows)

    def forward(x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])  # [rows, in]
        given = flat.shape[0]
        if not _FAST_ALREADY < given <= rows:
            return torch.nn.functional.linear(x, module.weight, module.bias)
        if given < rows:
            flat = torch.nn.functional.pad(flat, (0, 0, 0, rows - given))
        y: Tensor = torch.ops.mkl._mkl_linear(flat, matrix, weight, module.bias, rows)
        return y[:given].view(*x.shape[:-1], -1)

    module.forward = forward  # type: ignore[method-assign,assignment]
