"""Versions of this tool and of what it was run with."""

from __future__ import annotations

from importlib import metadata


def tool_version() -> str:
    return metadata.version("dspark-export")


def library_versions() -> dict[str, str]:
    """Versions of the libraries that shape a bundle, where they are installed."""
    versions = {}
    for name in ("torch", "onnx", "onnxruntime", "numpy", "safetensors"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions
