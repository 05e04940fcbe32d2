"""Every kind of drafter through the runtime: its drafts are the reference's, and the text is the target's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drafters import make_config, random_tensors, write_layout

from dspark.drafter.checkpoint import Checkpoint, open_checkpoint
from dspark.drafter.model import reference_from_tensors
from dspark.drafter.rope import Rope
from dspark.drafter.target import open_target
from dspark.engines.backend import backend_from_name
from dspark.export.bundle import Bundle
from dspark.export.contract import ExportOptions, cache_rows, default_context
from dspark.export.exporter import export_bundle
from dspark.runtime.drafting import Drafting
from dspark.runtime.generation import Request, generate
from dspark.runtime.sampling import Sampling
from dspark.runtime.targets.transformers import TransformersTarget

WINDOW = 24
LAYOUTS: dict[str, dict[str, Any]] = {
    "fill-in": {"layout": "speculators", "sample_from_anchor": False},
    "reduced": {"layout": "speculators", "draft_vocab_size": 50},
    "reduced fill-in": {"layout": "speculators", "draft_vocab_size": 97, "sample_from_anchor": False},
    "ring, anchored": {"layout": "speculators", "layer_windows": (WINDOW, WINDOW), "layer_causal": (True, True)},
    "ring, moving": {
        "layout": "specforge",
        "layer_windows": (WINDOW, WINDOW),
        "layer_causal": (True, True),
        "window_moves": True,
    },
    "one window": {"layout": "speculators", "layer_windows": (None, WINDOW), "layer_causal": (False, True)},
    "sinks": {"layout": "speculators", "attention_sinks": True},
    "llama": {"layout": "speculators", "architecture": "llama", "rope": Rope(theta=500.0, interleaved=True)},
    "padded": {"layout": "speculators", "draft_vocab_size": 140},
    "dflash": {
        "layout": "z-lab",
        "sample_from_anchor": False,
        "markov_rank": 0,
        "markov_head_type": "none",
        "confidence_head": False,
        "confidence_head_with_markov": False,
    },
}


@pytest.fixture(scope="module", params=list(LAYOUTS))
def made(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, target_path: Path
) -> tuple[Checkpoint, Bundle]:
    folder = tmp_path_factory.mktemp("layout")
    config = make_config(**LAYOUTS[request.param])
    write_layout(folder / "drafter", config, random_tensors(config))
    checkpoint = open_checkpoint(folder / "drafter", open_target(target_path))
    assert checkpoint.config == config
    context = default_context(config) if config.ring else (64, 256)
    options = ExportOptions(context=context, prefill=16)
    bundle, report = export_bundle(checkpoint, folder / "bundle", options, backend_from_name("onnxruntime", 1))
    assert report.passed
    return checkpoint, bundle


@pytest.mark.parametrize("markov", ["loop", "step"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_are_the_reference_s(made: tuple[Checkpoint, Bundle], markov: Any, temperature: float) -> None:
    """Context in pieces of every size, the first longer than a window; drafts in between."""
    checkpoint, bundle = made
    config, model = checkpoint.config, reference_from_tensors(checkpoint.config, checkpoint.load)
    drafting = Drafting(bundle, backend_from_name("onnxruntime", 1), markov=markov)
    random = np.random.default_rng(0)
    start = 0
    k_cache = v_cache = torch.zeros(0)
    for count in (61, 1, 6, 2, 40, 5, 3):
        features = random.standard_normal((count, config.feature_size)).astype(np.float32)
        drafting.append({0: features})
        with torch.inference_mode():
            k, v = model.context(torch.from_numpy(features)[None], torch.arange(start, start + count)[None])
            if start == 0:
                shape = (*k.shape[:3], config.ring or 256, config.head_dim)
                k_cache, v_cache = torch.zeros(shape), torch.zeros(shape)
            into, new = cache_rows(start, count, k_cache.shape[3])
            k_cache[..., into, :], v_cache[..., into, :] = k[..., new, :], v[..., new, :]
            start += count
            noise = random.random(config.proposals, dtype=np.float32)
            anchor = int(random.integers(config.vocab_size))
            base, hidden = model.block(torch.tensor([anchor]), torch.tensor([start]), k_cache, v_cache)
            tokens, q, *_ = model.markov_loop(
                torch.tensor([anchor]), base, hidden, torch.from_numpy(noise)[None], torch.tensor([temperature])
            )
        draft = drafting.draft({0: anchor}, {0: noise}, {0: Sampling(temperature)})
        assert draft.tokens[0].tolist() == tokens[0].tolist()
        np.testing.assert_allclose(draft.q[0], q[0].numpy(), atol=2e-5)
        for token, law in zip(draft.tokens[0], draft.q[0], strict=True):
            assert drafting.target_law(law)[token] > 0, "tokens are target ids"


def test_greedy_equals_plain_decoding(made: tuple[Checkpoint, Bundle], target_path: Path) -> None:
    _, bundle = made
    target = TransformersTarget(target_path, bundle.config.target_layer_ids, bundle.config.proposals + 1)
    drafting = Drafting(bundle, backend_from_name("onnxruntime", 1))
    request = Request([5, 9, 44, 71, 13, 8], max_new_tokens=70, stop_ids=())
    wanted = generate(target, None, request)
    assert generate(target, drafting, request).token_ids == wanted.token_ids


def test_sampling_with_top_k_ends_and_stays_in_the_vocabulary(
    made: tuple[Checkpoint, Bundle], target_path: Path
) -> None:
    _, bundle = made
    target = TransformersTarget(target_path, bundle.config.target_layer_ids, bundle.config.proposals + 1)
    drafting = Drafting(bundle, backend_from_name("onnxruntime", 1))
    request = Request([5, 9, 44], Sampling(1.0, top_k=20, top_p=0.9, seed=3), max_new_tokens=40, stop_ids=())
    result = generate(target, drafting, request)
    assert len(result.token_ids) == 40
    assert all(0 <= token < 131 for token in result.token_ids)
    assert generate(target, drafting, request).token_ids == result.token_ids
