"""``dspark-export generate``: answer one prompt, as a stream."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from .common import BACKENDS, Console, backend_option, command as dspark_command


@dspark_command("generate")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--target", required=True, help="Folder, hub id, or smollm2.")
@click.option("--prompt", required=True, help="What the user says; the target's chat template is applied.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=256, show_default=True)
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-p", type=float, default=1.0, show_default=True)
@click.option("--top-k", type=int, default=0, show_default=True, help="0: all tokens.")
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed gives the same text.")
@click.option("--policy", default="fixed", show_default=True, help="fixed or fixed:k, tokens verified per round.")
@backend_option
@click.option("--fallback", type=click.Choice(BACKENDS), help="Where --backend cannot run here, run this one instead.")
def command(
    console: Console,
    bundle: Path,
    target: str,
    prompt: str,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    top_k: int,
    seed: int,
    policy: str,
    backend: str,
    fallback: str | None,
) -> None:
    """Answer --prompt with the drafter of BUNDLE and the target, losslessly; text streams as it is committed.

    \b
    Example:
      dspark-export generate bundle --target smollm2 --prompt "What is 7 times 8?"
    """
    from dspark.drafter.errors import BadInputError
    from dspark.drafter.target import identity_differences, open_target, tokenizer_identity
    from dspark.engines.backend import backend_or_fallback
    from dspark.export.bundle import open_bundle
    from dspark.runtime.drafting import Drafting
    from dspark.runtime.generation import Request, generate
    from dspark.runtime.sampling import Sampling
    from dspark.runtime.scheduler import policy_from_name
    from dspark.runtime.targets import target_folder
    from dspark.runtime.targets.transformers import TransformersTarget, TransformersTokenizer

    sampling, chosen = Sampling(temperature, top_k, top_p, seed), policy_from_name(policy)
    if not prompt.strip():
        raise BadInputError("the prompt is empty")
    opened = open_bundle(bundle)
    folder = target_folder(target)
    identity = opened.manifest["target"]
    differing, warnings = identity_differences(identity, tokenizer_identity(folder), str(folder))
    faults = [*open_target(folder).faults(opened.config), *differing]
    if faults:
        raise BadInputError(f"{bundle}: " + "; ".join(faults), faults=faults)
    for warning in warnings:
        console.note(f"warning: {warning}")
    engines = backend_or_fallback(backend, fallback, opened, console.note)
    tokenizer = TransformersTokenizer(folder)
    request = Request(tokenizer.encode_chat([{"role": "user", "content": prompt}]), sampling, max_new_tokens)
    drafting = Drafting(opened, engines, opened.batches[0])
    model = TransformersTarget(folder, opened.config.target_layer_ids, opened.config.proposals + 1)

    stream, parts = tokenizer.stream(), list[str]()
    streaming = not console.as_json and not console.quiet

    def emit(tokens: list[int]) -> None:
        parts.append(stream.add(tokens))
        if streaming:
            sys.stdout.write(parts[-1])
            sys.stdout.flush()

    result = generate(model, drafting, request, chosen, emit)
    text = "".join(parts)
    if streaming:
        click.echo()
    elif not console.as_json:
        click.echo(text)
    data = {
        "prompt_tokens": result.prompt_tokens,
        "token_ids": result.token_ids,
        "text": text,
        "stop_reason": result.stop_reason,
        "rounds": result.rounds,
        "acceptance_length": result.acceptance_length,
        "accepted_per_position": result.accepted_per_position,
        "tokens_per_second": result.tokens_per_second,
    }
    console.result(data, "")
    console.note(
        f"{len(result.token_ids)} tokens in {result.rounds} rounds, {result.acceptance_length:.2f} per round, "
        f"{result.tokens_per_second:.1f} tokens/s, ended by {result.stop_reason}"
    )
