"""The transformers target: taps, caches that are cut back, ragged batches, streamed text."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from dspark.drafter.errors import BadInputError
from dspark.runtime.target import RaggedBatch
from dspark.runtime.targets.packed_linear import pack_linear_layers
from dspark.runtime.targets.transformers import TransformersTarget, TransformersTokenizer, stop_ids

TOKENS = [5, 9, 44, 71, 13, 8, 90, 33, 21, 6]


@pytest.fixture(scope="module")
def target(target_path: Path) -> TransformersTarget:
    return TransformersTarget(target_path, (-1, 0, 2))


def test_features_are_the_outputs_of_the_tapped_layers(target: TransformersTarget) -> None:
    """hidden_states[id + 1] of transformers; −1 is the embedding output."""
    rows = target.prefill(0, TOKENS)
    with torch.inference_mode():
        outputs = target.model(torch.tensor([TOKENS]), output_hidden_states=True)
    wanted = torch.cat([outputs.hidden_states[i] for i in (0, 1, 3)], dim=-1)[0]
    np.testing.assert_allclose(rows.features, wanted.numpy(), atol=1e-5)
    np.testing.assert_allclose(rows.logits[0], outputs.logits[0, -1].numpy(), atol=1e-4)


@pytest.mark.parametrize("accepted", [0, 1, 3])
def test_a_rejected_row_leaves_no_trace(target: TransformersTarget, accepted: int) -> None:
    """After commit, rows see what a fresh prefill of the committed tokens would have left."""
    target.prefill(0, TOKENS[:5])
    target.verify(RaggedBatch.of({0: (5, TOKENS[5 : 6 + accepted] + [130] * (3 - accepted))}))
    target.commit(0, accepted)
    end = 6 + accepted
    again = target.verify(RaggedBatch.of({0: (end, [77])}))
    fresh = target.prefill(1, [*TOKENS[:end], 77])
    np.testing.assert_allclose(again.logits[0], fresh.logits[0], atol=1e-4)
    assert again.features is not None
    assert fresh.features is not None
    np.testing.assert_allclose(again.features[0], fresh.features[-1], atol=1e-4)


def test_a_ragged_batch_is_each_request_alone(target: TransformersTarget) -> None:
    for slot, prompt in ((0, TOKENS[:4]), (1, TOKENS[2:9]), (2, TOKENS[:2])):
        target.prefill(slot, prompt)
    requests = {0: (4, [1, 2, 3]), 1: (7, [4]), 2: (2, [5, 6])}
    rows = target.verify(RaggedBatch.of(requests))
    assert rows.logits.shape == (6, 131)
    for slot in requests:
        target.commit(slot, -1)  # drop every row
    at = 0
    for slot, (start, tokens) in requests.items():
        single = target.verify(RaggedBatch.of({slot: (start, tokens)}))
        np.testing.assert_allclose(rows.logits[at : at + len(tokens)], single.logits, atol=1e-5)
        assert rows.features is not None
        np.testing.assert_allclose(rows.features[at : at + len(tokens)], single.features, atol=1e-5)
        at += len(tokens)


def test_packed_layers_give_the_same_numbers() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Linear(96, 32, bias=False))
    inputs = [torch.randn(1, rows, 64) for rows in (1, 3, 4, 6, 8, 9)]
    wanted = [model(x) for x in inputs]
    if not pack_linear_layers(model, 8):
        pytest.skip("this build of PyTorch has no MKL")
    for x, y in zip(inputs, wanted, strict=True):
        torch.testing.assert_close(model(x), y, atol=1e-5, rtol=0)


def test_stop_ids_of_every_spelling(tmp_path: Path) -> None:
    assert stop_ids(tmp_path, 7) == (7,)
    assert stop_ids(tmp_path, None) == ()
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4]}))
    assert stop_ids(tmp_path, 7) == (3, 4)


def test_text_streams_by_whole_characters(target_path: Path) -> None:
    """Two bytes of one character come out together, when the second is there."""
    tokenizer = TransformersTokenizer(target_path)
    ids = tokenizer.encode_chat([{"role": "user", "content": "a~"}])
    stream = tokenizer.stream()
    assert [stream.add([i]) for i in ids] == ["a", "~"]


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="transformers cannot load"):
        TransformersTarget(tmp_path)
