"""Checkpoint to bundle: weights, graphs, parity, manifest; complete or absent."""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.drafter.atomic import atomic_folder, check_space
from dspark.drafter.checkpoint import Checkpoint
from dspark.drafter.config import DrafterConfig
from dspark.drafter.errors import UsageError
from dspark.drafter.model import ReferenceDrafter, reference_from_tensors
from dspark.drafter.target import tokenizer_identity
from dspark.drafter.tensors import SHARED_TENSORS, tensor_shapes

from .bundle import Bundle, Graph, check_bundle_output, open_bundle, write_manifest
from .contract import Dtype, ExportOptions, GraphSpec, graph_specs
from .graphs import identity_of, model_from_spec, write_graph
from .parity import ParityReport, Runner, check_parity
from .quantization import Quantization, quantized_load, quantized_names
from .quantization_report import AcceptanceTrial, QuantizationReport
from .version import library_versions, tool_version
from .weights import (
    FILE as WEIGHTS_FILE,
    WeightPlan,
    plan_weights,
    read_tensor,
    row_pieces,
    stored_dtype,
    write_weights,
)

if TYPE_CHECKING:
    import torch

    from dspark.drafter.parameters import Load

Progress = Callable[[str, int, int], None]  # stage, done, total
_GRAPH_BYTES = 1 << 20  # generous estimate of one graph file without its weights


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """What an export would write, known before any weight is converted."""

    options: ExportOptions
    graphs: tuple[GraphSpec, ...]
    weights: WeightPlan

    def to_json(self) -> dict[str, Any]:
        return {
            "dtype": self.options.dtype,
            "opset": self.options.opset,
            "markov": self.options.markov,
            "graphs": [{"file": spec.file, **spec.to_json()} for spec in self.graphs],
            "weight_bytes": self.weights.bytes,
            "head_tied_to_embedding": self.weights.tied,
            **_quantization(self.options),
        }


def plan_export(checkpoint: Checkpoint, options: ExportOptions) -> ExportPlan:
    """Check that options and checkpoint fit, and lay out graphs and weights.

    Raises:
        UsageError, BadInputError: the options do not fit the drafter, or a tensor has to come from a target.
    """
    options.check_fit(checkpoint.config)
    weights = plan_weights(checkpoint.config, options.dtype, _head_is_embedding(checkpoint), options.quantization)
    return ExportPlan(options, graph_specs(checkpoint.config, options), weights)


def export_bundle(
    checkpoint: Checkpoint,
    output: Path,
    options: ExportOptions,
    runner: Runner,
    force: bool = False,
    progress: Progress = lambda stage, done, total: None,
    trial: AcceptanceTrial | None = None,
) -> tuple[Bundle, ParityReport]:
    """Write the bundle and prove that its graphs compute what the reference model computes.

    Quantised, it is exported twice: as it would be without, and as it is to be; the bundle says what that cost.

    Args:
        runner: runs a graph of the staged bundle; parity compares what it gives.
        trial: of a quantised export, which is never made without one.

    Raises:
        CheckFailedError: parity does not hold, or quantisation costs too much acceptance; no bundle is left.
        UsageError, BadInputError, NotAvailableError: found before or while writing; nothing is left.
    """
    if options.quantization is not None and trial is None:
        raise UsageError("a quantised export measures what it costs; give it a target and prompts")
    check_bundle_output(output, force)
    plan = plan_export(checkpoint, options)
    plain = None
    if options.quantization is not None:
        plain = plan_export(checkpoint, dataclasses.replace(options, quantization=None))
    plans = [plan] if plain is None else [plain, plan]
    check_space(output, sum(each.weights.bytes + _GRAPH_BYTES * len(each.graphs) for each in plans))
    with atomic_folder(output, force) as staging:
        if plain is None or trial is None:
            staged = _stage(checkpoint, staging, plan, runner, progress)
            manifest = staged.bundle.manifest
        else:
            aside = staging / "unquantized"
            before = _stage(checkpoint, aside, plain, runner, progress)
            staged = _stage(checkpoint, staging, plan, runner, progress)
            record = _tried(before, staged, trial)
            shutil.rmtree(aside)
            manifest = {**staged.bundle.manifest, "quantization": record.to_json()}
        write_manifest(staging, manifest, {WEIGHTS_FILE: staged.weights_sha256})
    return open_bundle(output), staged.report


@dataclass(frozen=True, slots=True)
class _Staged:
    """Graphs and weights that are written and proven, and the manifest that is not yet."""

    bundle: Bundle
    plan: ExportPlan
    report: ParityReport
    weights_sha256: str


def _stage(checkpoint: Checkpoint, folder: Path, plan: ExportPlan, runner: Runner, progress: Progress) -> _Staged:
    config, options = checkpoint.config, plan.options
    (folder / "graphs").mkdir(parents=True)
    weights_sha256 = write_weights(
        plan.weights,
        checkpoint.load,
        folder / WEIGHTS_FILE,
        lambda done, total: progress("weights", done, total),
    )

    def stored(name: str, rows: slice | Sequence[int] | None = None) -> torch.Tensor:
        return read_tensor(folder / WEIGHTS_FILE, plan.weights.tensors, name, rows)

    checkpoint_sha256 = checkpoint.sha256()
    identity = identity_of(config, options, checkpoint_sha256)
    graphs = []
    for number, spec in enumerate(plan.graphs):
        progress("graphs", number, len(plan.graphs))
        write_graph(model_from_spec(spec, config, options, plan.weights, identity), folder / spec.file)
        graphs.append(Graph(spec, folder / spec.file))
    references = references_of(config, checkpoint.load, options.quantization, options.dtype)
    report = prove(references, graphs, rounding_reference(references.wanted, options.dtype, stored), runner, progress)
    manifest = _manifest(checkpoint, plan, checkpoint_sha256, report)
    return _Staged(Bundle(folder, manifest, config, tuple(graphs)), plan, report, weights_sha256)


def _tried(before: _Staged, after: _Staged, trial: AcceptanceTrial) -> QuantizationReport:
    """The record of a quantisation; raises ``CheckFailedError`` where it costs too much."""
    how = after.plan.options.quantization
    assert how is not None
    record = QuantizationReport(
        how,
        quantized_names(after.bundle.config),
        before.plan.weights.bytes,
        after.plan.weights.bytes,
        before.report,
        after.report,
        tuple(trial.measure(before.bundle, after.bundle)),
        trial.max_loss,
    )
    record.require()
    return record


@dataclass(frozen=True, slots=True)
class References:
    """The model that graphs must equal, and, where that has quantised weights, the one with the original ones."""

    wanted: ReferenceDrafter
    original: ReferenceDrafter | None


def references_of(config: DrafterConfig, load: Load, how: Quantization | None, dtype: Dtype) -> References:
    """Reference models of a checkpoint's weights; quantised anew, not read back from a bundle."""
    plain = reference_from_tensors(config, load)
    if how is None:
        return References(plain, None)
    return References(reference_from_tensors(config, quantized_load(load, config, how, dtype)), plain)


def rounding_reference(reference: ReferenceDrafter, dtype: Dtype, stored: Load) -> ReferenceDrafter:
    """The model that rounds where graphs of ``dtype`` round, with the bundle's ``stored`` weights."""
    import torch

    if dtype == "float32":
        return reference
    rounded = getattr(torch, dtype)

    def load(name: str, rows: slice | Sequence[int] | None = None) -> torch.Tensor:
        tensor = stored(name, rows)  # a dequantised one is fp32, where a graph has it rounded
        return tensor.to(rounded) if stored_dtype(name, dtype) == dtype else tensor

    return reference_from_tensors(reference.config, load, rounded)


def prove(
    references: References,
    graphs: Sequence[Graph],
    rounding: ReferenceDrafter,
    runner: Runner,
    progress: Progress,
) -> ParityReport:
    """Parity of all graphs; raises ``CheckFailedError`` with the table where it does not hold."""
    report = check_parity(
        references.wanted,
        graphs,
        rounding,
        runner,
        progress=lambda done, total: progress("parity", done, total),
        original=references.original,
    )
    report.require()
    return report


def _head_is_embedding(checkpoint: Checkpoint) -> bool:
    """Whether head and embedding hold the same numbers, so that they are stored once."""
    import torch

    shapes = tensor_shapes(checkpoint.config)
    first, second = SHARED_TENSORS
    for name in SHARED_TENSORS:
        checkpoint.load(name, slice(0, 1))  # refuses a tensor that nobody holds
    if shapes[first] != shapes[second]:
        return False
    pieces = row_pieces(shapes[first], 4 * math.prod(shapes[first]))
    return all(torch.equal(checkpoint.load(first, rows), checkpoint.load(second, rows)) for rows in pieces)


def _manifest(checkpoint: Checkpoint, plan: ExportPlan, checkpoint_sha256: str, report: ParityReport) -> dict[str, Any]:
    config, options = checkpoint.config, plan.options
    target: dict[str, Any] = {
        "hidden_size": config.target_hidden_size,
        "num_hidden_layers": config.num_target_layers,
        "vocab_size": config.vocab_size,
        "target_layer_ids": list(config.target_layer_ids),
        "tap": "output of decoder layer id, before the final norm; -1 is the embedding output",
    }
    # Who knows the tokenizer: the target itself, else the files that came with the checkpoint
    target |= checkpoint.target_said | tokenizer_identity(checkpoint.path)
    if checkpoint.target is not None:
        target |= {"sha256": checkpoint.target.sha256(), **tokenizer_identity(checkpoint.target.path)}
    return {
        "tool": {"name": "dspark-export", "version": tool_version(), "libraries": library_versions()},
        "drafter": config.to_json(),
        "checkpoint": {
            "sha256": checkpoint_sha256,
            "from_target": list(checkpoint.missing_shared),
            "origins": checkpoint.origins,
            "warnings": list(checkpoint.warnings),
        },
        "target": target,
        "export": {
            "dtype": options.dtype,
            "batch": list(options.batch),
            "context": list(options.context),
            "prefill": options.prefill,
            "markov": options.markov,
            "opset": options.opset,
            **_quantization(options),
        },
        "graphs": [{"file": spec.file, **spec.to_json()} for spec in plan.graphs],
        "weights": [region.to_json() for region in plan.weights.tensors.values()],
        "parity": report.to_json(),
    }


def _quantization(options: ExportOptions) -> dict[str, Any]:
    return {} if options.quantization is None else {"quantization": options.quantization.to_json()}
