"""Peak memory and time of an export of a large drafter, against the size of its checkpoint.

    python benchmarks/export_memory.py --work FOLDER [--dtype bf16] [--checkpoint FOLDER]

Without --checkpoint a drafter of Qwen3-4B's size with random weights is written first (2.8 GB, bf16). Memory is
sampled from /proc: all resident pages (files that are mapped count), and anonymous ones alone.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch

from dspark.drafter.config import DrafterConfig
from dspark.drafter.formats import deepspec
from dspark.drafter.rope import Rope
from dspark.drafter.tensor_folder import write_safetensors
from dspark.drafter.tensors import tensor_shapes

LAYERS = 5
QWEN3_4B = DrafterConfig(
    layout="deepspec", architecture="qwen3", hidden_size=2560, intermediate_size=9728, num_hidden_layers=LAYERS,
    num_attention_heads=32, num_key_value_heads=8, head_dim=128, vocab_size=151936, draft_vocab_size=151936,
    block_size=7, sample_from_anchor=True, mask_token_id=151669, target_layer_ids=(1, 9, 17, 25, 33),
    num_target_layers=36, target_hidden_size=2560, rms_norm_eps=1e-6, rope=Rope(theta=1e6),
    max_position_embeddings=40960, attention_bias=False, attention_sinks=False, k_eq_v=False,
    layer_windows=(None,) * LAYERS, layer_causal=(False,) * LAYERS, window_moves=False, embed_scale=1.0,
    final_logit_softcapping=None, logit_scale=1.0, markov_head_type="vanilla", markov_rank=256, confidence_head=True,
    confidence_head_with_markov=True,
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--dtype", default="bf16")
    options = parser.parse_args()
    checkpoint = options.checkpoint or write_drafter(options.work / "drafter")
    size = (checkpoint / "model.safetensors").stat().st_size
    bundle = options.work / "bundle"
    command = [Path(sys.executable).parent / "dspark-export", "export", checkpoint, "-o", bundle, "--force", "--json",
               "--dtype", options.dtype]  # fmt: skip
    begun = time.monotonic()
    process = subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE)
    peaks = watch(process.pid)
    output = process.communicate()[0]
    seconds = time.monotonic() - begun
    result = {
        "dtype": options.dtype,
        "exit_code": process.returncode,
        "seconds": round(seconds, 1),
        "checkpoint_bytes": size,
        "peak_resident_ratio": round(peaks["VmRSS"] / size, 3),
        "peak_anonymous_ratio": round(peaks["RssAnon"] / size, 3),
        "parity_passed": all(row["passed"] for row in json.loads(output).get("parity", [{"passed": False}])),
        "bundle_bytes": sum(file.stat().st_size for file in bundle.rglob("*") if file.is_file()),
    }
    print(json.dumps(result, indent=1))
    shutil.rmtree(bundle, ignore_errors=True)


def watch(pid: int) -> dict[str, int]:
    """Peaks in bytes until the process ends."""
    peaks = {"VmRSS": 0, "RssAnon": 0}
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except OSError:
            break
        values = {key: value for key, _, value in (line.partition(":") for line in lines)}
        for name in peaks:
            if name in values:
                peaks[name] = max(peaks[name], int(values[name].split()[0]) * 1024)
        time.sleep(0.02)
    return peaks


def write_drafter(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(deepspec.config_to_json(QWEN3_4B)))
    shapes = tensor_shapes(QWEN3_4B)
    torch.manual_seed(0)

    def values(name: str, shape: tuple[int, ...]) -> list[memoryview]:
        scale = 0.02 if len(shape) > 1 else 0.1
        tensor = torch.empty(shape, dtype=torch.bfloat16).normal_(std=scale) + (1 if "norm" in name else 0)
        return [tensor.view(torch.uint8).numpy().data.cast("B")]

    write_safetensors(
        folder / "model.safetensors",
        [(name, "BF16", shape) for name, shape in shapes.items()],
        (values(name, shape) for name, shape in shapes.items()),
    )
    return folder


if __name__ == "__main__":
    main()
