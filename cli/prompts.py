"""A prompts file: JSON lines with ``prompt`` or ``messages``, and optionally ``domain`` and ``max_new_tokens``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.drafter.errors import BadInputError

TOKENS = 64  # of an answer, where a line does not say
NO_DOMAIN = "-"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One conversation that the assistant is to answer."""

    messages: list[dict[str, str]]
    domain: str = NO_DOMAIN
    max_new_tokens: int = TOKENS


def read_prompts(file: Path) -> list[Prompt]:
    """Every line of a prompts file.

    Raises:
        BadInputError: no such file, no prompt in it, or a line that is none, by number.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is no UTF-8 text"
        raise BadInputError(f"{file}: {reason}", path=str(file)) from error
    prompts = [_prompt(f"{file}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise BadInputError(f"{file}: holds no prompt", path=str(file))
    return prompts


def _prompt(place: str, line: str) -> Prompt:
    try:
        data = json.loads(line)
    except ValueError as error:
        raise BadInputError(f"{place}: is no JSON: {error}") from error
    if not isinstance(data, dict) or ("prompt" in data) == ("messages" in data):
        raise BadInputError(f'{place}: is no object with "prompt" or "messages"')
    messages = data["messages"] if "messages" in data else [{"role": "user", "content": data["prompt"]}]
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise BadInputError(f"{place}: a prompt is a text; messages are objects with the texts role and content")
    if not messages[-1]["content"].strip():
        raise BadInputError(f"{place}: the prompt is empty")
    domain, tokens = data.get("domain", NO_DOMAIN), data.get("max_new_tokens", TOKENS)
    if not isinstance(domain, str):
        raise BadInputError(f"{place}: domain {domain!r} is no text")
    if type(tokens) is not int or tokens < 1:
        raise BadInputError(f"{place}: max_new_tokens {tokens!r} is no number of at least 1")
    return Prompt([{"role": m["role"], "content": m["content"]} for m in messages], domain, tokens)


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
