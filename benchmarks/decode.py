"""Speculative against plain decoding on one target, in one process, by domain, with where a round's time goes.

    python benchmarks/decode.py BUNDLE --target smollm2 --prompts FILE.jsonl --per-domain 20 --tokens 128

Each prompt is answered by plain decoding and by each policy in turn. Greedy texts must be equal; where they part, the
gap of the two logits at that place is printed, and a gap of 1e-4 or more is a fault (exit code 4).
Ratios are medians over prompts of (speculative ÷ plain tokens per second), decoding only.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path

import click

from dspark.engines.backend import backend_from_name
from dspark.export.bundle import open_bundle
from dspark.runtime.drafting import Drafting
from dspark.runtime.generation import Generation, Request, generate
from dspark.runtime.lossless import parting
from dspark.runtime.sampling import Sampling
from dspark.runtime.scheduler import policy_from_name
from dspark.runtime.targets import target_folder
from dspark.runtime.targets.transformers import TransformersTarget, TransformersTokenizer

PARTS = ("context", "block", "markov", "scheduler", "verify", "sampling")


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--target", default="smollm2", show_default=True)
@click.option("--prompts", type=click.Path(path_type=Path), required=True)
@click.option("--per-domain", type=int, default=20, show_default=True)
@click.option("--tokens", type=int, default=128, show_default=True)
@click.option("--policy", "policies", multiple=True, default=("fixed:3",), show_default=True)
@click.option("--temperature", type=float, default=0.0, show_default=True)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the figures as JSON.")
def main(
    bundle: Path,
    target: str,
    prompts: Path,
    per_domain: int,
    tokens: int,
    policies: tuple[str, ...],
    temperature: float,
    output: Path | None,
) -> None:
    opened, folder = open_bundle(bundle), target_folder(target)
    model = TransformersTarget(folder, opened.config.target_layer_ids, opened.config.proposals + 1)
    tokenizer = TransformersTokenizer(folder)
    drafting = Drafting(opened, backend_from_name("onnxruntime"), opened.batches[0])
    sampling = Sampling(temperature)
    runs: defaultdict[tuple[str, str], list[tuple[Generation, Generation]]] = defaultdict(list)
    unequal = []
    for domain, prompt in chosen_prompts(prompts, per_domain):
        request = Request(tokenizer.encode_chat([{"role": "user", "content": prompt}]), sampling, tokens)
        plain = generate(model, None, request)
        for policy in policies:
            fast = generate(model, drafting, request, policy_from_name(policy))
            runs[domain, policy].append((plain, fast))
            if temperature == 0 and (where := parting(model, request, plain, fast)) is not None:
                unequal.append((domain, policy, where))
    figures = [summary(domain, policy, pairs) for (domain, policy), pairs in runs.items()]
    print_table(figures)
    for domain, policy, where in unequal:
        click.echo(f"{domain} {policy}: texts part at token {where.place}, logits differ by {where.gap:.2e}")
    total = sum(len(pairs) for pairs in runs.values())
    click.echo(f"{total - len(unequal)} of {total} texts equal plain decoding")
    if output:
        parted = [(domain, policy, where.place, where.gap) for domain, policy, where in unequal]
        output.write_text(json.dumps({"runs": figures, "parted": parted}, indent=1))
    if not all(where.near_tie for *_, where in unequal):
        sys.exit(4)


def chosen_prompts(file: Path, per_domain: int) -> list[tuple[str, str]]:
    """The first prompts of each domain, domains in turn."""
    by_domain: defaultdict[str, list[str]] = defaultdict(list)
    for line in file.read_text().splitlines():
        data = json.loads(line)
        by_domain[data.get("domain", "-")].append(data["prompt"])
    return [(d, prompts[i]) for i in range(per_domain) for d, prompts in by_domain.items() if i < len(prompts)]


def summary(domain: str, policy: str, pairs: list[tuple[Generation, Generation]]) -> dict[str, object]:
    fast = [f for _, f in pairs]
    rounds, seconds = sum(f.rounds for f in fast), sum(f.decode_seconds for f in fast)
    parts = {part: 1e3 * sum(f.seconds[part] for f in fast) / rounds for part in PARTS}
    plain_steps = sum(p.rounds for p, _ in pairs)
    survival = [
        sum(sum(a > k for a in f.accepted) for f in fast) / max(1, sum(sum(p > k for p in f.proposed) for f in fast))
        for k in range(max(max(f.proposed, default=0) for f in fast))
    ]
    return {
        "domain": domain,
        "method": policy,
        "prompts": len(pairs),
        "ratio_to_plain": statistics.median(f.tokens_per_second / p.tokens_per_second for p, f in pairs),
        "tokens_per_second": statistics.median(f.tokens_per_second for f in fast),
        "plain_tokens_per_second": statistics.median(p.tokens_per_second for p, _ in pairs),
        "plain_step_ms": 1e3 * sum(p.decode_seconds for p, _ in pairs) / plain_steps,
        "acceptance_length": sum(sum(f.committed) for f in fast) / rounds,
        "survival": survival,
        "round_ms": {**parts, "rest": 1e3 * seconds / rounds - sum(parts.values()), "total": 1e3 * seconds / rounds},
    }


def print_table(figures: list[dict[str, object]]) -> None:
    header = ("domain", "method", "prompts", "ratio", "tok/s", "plain", "τ", "plain step")
    click.echo("  ".join(f"{h:>10}" for h in (*header, *PARTS, "rest", "round")) + "   (ms)")
    for f in figures:
        ms: dict[str, float] = f["round_ms"]  # type: ignore[assignment]
        cells = [f["domain"], f["method"], f["prompts"]]
        for key in ("ratio_to_plain", "tokens_per_second", "plain_tokens_per_second", "acceptance_length"):
            cells.append(f"{f[key]:.2f}")
        cells += [f"{f['plain_step_ms']:.1f}", *(f"{ms[p]:.2f}" for p in (*PARTS, "rest", "total"))]
        click.echo("  ".join(f"{c!s:>10}" for c in cells))


if __name__ == "__main__":
    main()
