"""Two GGUF files of one drafter in the real llama.cpp: this tool's, and its own converter's; tokens per round.

    python benchmarks/llama_cpp.py --binary llama-speculative-simple --target target.gguf \\
        --ours drafter.gguf --theirs theirs.gguf --prompts prompts.jsonl --template smollm2 --per-domain 3

Both are run greedily on the same prompts; an equal drafter accepts equally often, prompt by prompt.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("binary", "target", "ours", "theirs", "prompts"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--template", default="smollm2", help="Target whose chat template is applied.")
    parser.add_argument("--per-domain", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--draft", type=int, default=7)
    options = parser.parse_args()
    counts: dict[str, dict[str, list[int]]] = defaultdict(lambda: {"ours": [0, 0], "theirs": [0, 0]})
    differing = 0
    for domain, text in prompts(options):
        both = {name: run(options, getattr(options, name), text) for name in ("ours", "theirs")}
        differing += both["ours"] != both["theirs"]
        for name, (drafted, accepted) in both.items():
            counts[domain][name][0] += drafted
            counts[domain][name][1] += accepted
    rows = [
        {"domain": domain, **{f"{name}_{what}": pair[i] for name, pair in by_name.items()
                              for i, what in enumerate(("drafted", "accepted"))}}
        for domain, by_name in counts.items()
    ]  # fmt: skip
    print(json.dumps({"rows": rows, "prompts_that_differ": differing}, indent=1))


def prompts(options: argparse.Namespace) -> list[tuple[str, str]]:
    from transformers import AutoTokenizer

    from dspark.runtime.targets import target_folder

    tokenizer = AutoTokenizer.from_pretrained(target_folder(options.template), local_files_only=True)
    taken: defaultdict[str, int] = defaultdict(int)
    texts = []
    for line in options.prompts.read_text().splitlines():
        data: dict[str, Any] = json.loads(line)
        domain = data.get("domain", "all")
        if taken[domain] < options.per_domain:
            taken[domain] += 1
            messages = data.get("messages") or [{"role": "user", "content": data["prompt"]}]
            text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            texts.append((domain, text))
    return texts


def run(options: argparse.Namespace, drafter: Path, text: str) -> tuple[int, int]:
    """Drafted and accepted tokens."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(text + "\n")  # the program drops the last newline
        file.flush()
        command = [
            options.binary, "-m", options.target, "-md", drafter, "--spec-type", "draft-dspark",
            "--spec-draft-n-max", options.draft, "-f", file.name, "-n", options.tokens, "--temp", 0, "-t", 2,
            "-c", 2048,
        ]  # fmt: skip
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    output = done.stdout + done.stderr
    found = {name: re.search(rf"{name}\s*=\s*(\d+)", output) for name in ("n_drafted", "n_accept")}
    if done.returncode or not all(found.values()):
        raise SystemExit(f"{options.binary} failed on {drafter}: {output[-2000:]}")
    drafted, accepted = (int(match[1]) for match in found.values() if match)
    return drafted, accepted


if __name__ == "__main__":
    main()
