"""The demo: export the shipped drafter, validate the bundle, answer three prompts speculatively and plainly.

Both ways run in one process on one target. Texts must be equal token for token; figures are printed as they are and
left in ``build/demo/result.json``, the bundle in ``build/demo/bundle``.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from dspark.engines.backend import backend_from_name
from dspark.export.bundle import open_bundle
from dspark.runtime.drafting import Drafting
from dspark.runtime.generation import Generation, Request, generate
from dspark.runtime.targets import target_folder
from dspark.runtime.targets.transformers import TransformersTarget, TransformersTokenizer

CHECKPOINT = Path(__file__).parent / "smollm2-dspark-2l"
OUTPUT = Path(__file__).parents[1] / "build" / "demo"
TOKENS, REPEATS = 128, 3
PROMPTS = {
    "maths": "A shop sells pens at 3 dollars each. Tom buys 12 pens and pays with a 50 dollar note. "
    "How much change does he get? Reason step by step.",
    "code": "Write a Python function that returns the n-th Fibonacci number.",
    "chat": "What should I pack for a weekend of hiking in autumn?",
}


def main() -> int:
    bundle_folder = OUTPUT / "bundle"
    checkpoint = ["--target", "smollm2"]
    command("export", str(CHECKPOINT), *checkpoint, "-o", str(bundle_folder), "--force")
    command("validate", str(bundle_folder), "--checkpoint", str(CHECKPOINT), *checkpoint, "--quiet")

    bundle, folder = open_bundle(bundle_folder), target_folder("smollm2")
    target = TransformersTarget(folder, bundle.config.target_layer_ids, bundle.config.proposals + 1)
    tokenizer, drafting = TransformersTokenizer(folder), Drafting(bundle, backend_from_name("onnxruntime"))
    results = [answer(domain, prompt, target, tokenizer, drafting) for domain, prompt in PROMPTS.items()]
    summary(results)
    (OUTPUT / "result.json").write_text(json.dumps({"bundle": str(bundle_folder), "runs": results}, indent=1) + "\n")
    if not all(result["equal_to_plain"] for result in results):
        print("a speculative text differs from plain decoding", file=sys.stderr)
        return 4
    return 0


def command(*arguments: str) -> None:
    """Run ``dspark-export`` as a user would."""
    print(f"$ dspark-export {' '.join(arguments)}", flush=True)
    subprocess.run([str(Path(sys.executable).parent / "dspark-export"), *arguments], check=True)


def answer(
    domain: str, prompt: str, target: TransformersTarget, tokenizer: TransformersTokenizer, drafting: Drafting
) -> dict[str, Any]:
    """One prompt both ways, repeated in turn; speeds are medians."""
    request = Request(tokenizer.encode_chat([{"role": "user", "content": prompt}]), max_new_tokens=TOKENS)
    pairs: list[tuple[Generation, Generation]] = []
    for _ in range(REPEATS):
        pairs.append((generate(target, None, request), generate(target, drafting, request)))
    fast = pairs[-1][1]
    print(f"\n[{domain}] {prompt}\n{tokenizer.stream().add(fast.token_ids)}")
    return {
        "domain": domain,
        "prompt": prompt,
        "tokens": len(fast.token_ids),
        "equal_to_plain": all(a.token_ids == b.token_ids for a, b in pairs),
        "rounds": fast.rounds,
        "acceptance_length": fast.acceptance_length,
        "accepted_per_position": fast.accepted_per_position,
        "tokens_per_second": statistics.median(f.tokens_per_second for _, f in pairs),
        "plain_tokens_per_second": statistics.median(p.tokens_per_second for p, _ in pairs),
        "ratio_to_plain": statistics.median(f.tokens_per_second / p.tokens_per_second for p, f in pairs),
    }


def summary(results: list[dict[str, Any]]) -> None:
    print("\ndomain  equal  tokens per round  tokens/s  plain  ratio  accepted per position")
    for r in results:
        speeds = f"{r['tokens_per_second']:8.1f}  {r['plain_tokens_per_second']:5.1f}  {r['ratio_to_plain']:5.2f}"
        positions = " ".join(f"{share:.2f}" for share in r["accepted_per_position"])
        equal = "yes" if r["equal_to_plain"] else "NO"
        print(f"{r['domain']:6}  {equal:5}  {r['acceptance_length']:16.2f}  {speeds}  {positions}")


if __name__ == "__main__":
    sys.exit(main())
