"""A name to a local path: a folder or file here, or a repository of the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from .errors import BadInputError, NotAvailableError

_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.gguf"]


def local_path(name: str, kind: str) -> Path:
    """The path, or the downloaded snapshot of a hub id ``owner/name``.

    Args:
        kind: what it is, for messages: "checkpoint", "target".

    Raises:
        BadInputError: no such path, and not a hub id.
        NotAvailableError: the hub cannot be reached, or has no such repository.
    """
    try:
        if Path(name).exists():
            return Path(name)
    except (OSError, ValueError) as error:
        raise BadInputError(f"{ascii(name)[:200]}: is no path: {error}") from error
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name):
        return _snapshot(name)
    raise BadInputError(f"{name}: no such file or folder; a {kind} is a path or a hub id", path=name)


def _snapshot(name: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise NotAvailableError(
            f"{name}: no such folder here, and huggingface_hub is not installed; pip install 'dspark-export[hub]'"
        ) from error
    try:
        return Path(snapshot_download(name, allow_patterns=_PATTERNS))
    except Exception as error:  # the hub client has many classes for: offline, unknown, no access
        raise NotAvailableError(
            f"{name}: no such folder here, and the hub did not give it ({type(error).__name__}); "
            "download it first and give its folder"
        ) from error
