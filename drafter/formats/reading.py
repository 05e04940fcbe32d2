"""What every layout's reader shares: values with their origin, and all faults in one message."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..config import DrafterConfig
from ..errors import BadInputError
from ..rope import KINDS, Rope, yarn_attention_factor
from ..tensor_folder import TensorEntry
from .fields import Fields

_MAX_LAYERS = 1024
_REQUIRED: Any = object()


@dataclass(frozen=True, slots=True)
class Settled:
    """What the user says where a checkpoint leaves it open; ``None``: the checkpoint must say."""

    sample_from_anchor: bool | None = None
    target_layer_ids: tuple[int, ...] | None = None
    d2t: Literal["offset", "absolute"] | None = None


OPEN = Settled()


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint before it is understood: where it lies, its configuration, the headers of its tensors."""

    path: Path
    file: str  # of the configuration, for messages
    data: dict[str, Any]
    entries: dict[str, TensorEntry]  # by stored name without a container's prefix
    settled: Settled = OPEN

    @property
    def fields(self) -> Fields:
        return Fields(self.data, self.file)

    def architectures(self) -> Sequence[Any]:
        value = self.data.get("architectures")
        return value if isinstance(value, list) else ()


@dataclass(frozen=True, slots=True)
class Reading:
    """What a layout says: the configuration, the origin of every value, and what deserves a word."""

    config: DrafterConfig
    origins: dict[str, str]
    warnings: tuple[str, ...]
    target: dict[str, Any]  # what the checkpoint says of the target: name, …


@dataclass
class Reader:
    """Collects canonical values; a fault is kept, and all are raised together by :meth:`reading`."""

    layout: str
    source: Source
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    target: dict[str, Any] = field(default_factory=dict)
    ambiguous: list[str] = field(default_factory=list)  # options that would settle what is open

    def set(self, name: str, value: Any, origin: str) -> None:
        self.values[name], self.origins[name] = value, origin

    def take(
        self, name: str, places: Fields | Sequence[Fields | None], kind: str, key: str = "", default: Any = _REQUIRED
    ) -> Any:
        """Read ``key`` (else ``name``) from the first place that has it; places that disagree are a fault.

        Returns:
            the value, or ``None`` after a fault.
        """
        key = key or name
        listed = [places] if isinstance(places, Fields) else [place for place in places if place is not None]
        holding = [place for place in listed if place.has(key)]
        try:
            if not holding:
                if default is _REQUIRED:
                    raise BadInputError(f"{self.source.file}: the key {_any_of(listed, key)} is missing", key=key)
                self.set(name, default, "default of the layout")
                return default
            found = [getattr(place, kind)(key) for place in holding]
            for place, value in zip(holding[1:], found[1:], strict=True):
                if value != found[0]:
                    place.refuse(key, value, f"equal to {holding[0].where(key)}, which is {found[0]!r}")
            self.set(name, found[0], holding[0].where(key))
            return found[0]
        except BadInputError as error:
            self.faults.append(error.message)
            return None

    def object(self, fields: Fields | None, key: str) -> Fields | None:
        """A nested object; a wrong type is a fault."""
        try:
            return None if fields is None else fields.object(key)
        except BadInputError as error:
            self.faults.append(error.message)
            return None

    def leave_open(self, option: str, message: str) -> None:
        """A fault that the user can settle with an option."""
        self.ambiguous.append(option)
        self.faults.append(message)

    def reading(self) -> Reading:
        """Raises ``BadInputError`` with everything that is wrong."""
        if self.faults:
            details: dict[str, Any] = {"file": self.source.file, "layout": self.layout, "faults": self.faults}
            if self.ambiguous:
                details["settle_with"] = self.ambiguous
            raise BadInputError("; ".join(self.faults), **details)
        names = [item.name for item in dataclasses.fields(DrafterConfig)]
        self.set("layout", self.layout, self.source.file)
        config = DrafterConfig(**{name: self.values[name] for name in names})
        origins = {name: self.origins[name] for name in names}
        return Reading(config, origins, tuple(self.warnings), self.target)


def read_geometry(reader: Reader, places: Sequence[Fields | None]) -> None:
    """Sizes and norms of a transformer's configuration, Qwen3's key names."""
    for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
                 "max_position_embeddings"):  # fmt: skip
        reader.take(name, places, "integer")
    values = reader.values
    reader.take("num_key_value_heads", places, "integer", default=values.get("num_attention_heads"))
    heads, hidden = values.get("num_attention_heads"), values.get("hidden_size")
    reader.take("head_dim", places, "integer", default=hidden // heads if heads and hidden else 0)
    reader.take("rms_norm_eps", places, "number")
    reader.take("attention_bias", places, "boolean", default=False)
    reader.take("num_target_layers", places, "integer", default=None)
    reader.take("draft_vocab_size", places, "integer", default=values.get("vocab_size"))
    reader.set("attention_sinks", _any_tensor(reader.source, "self_attn.sinks"), "tensors")
    reader.set("k_eq_v", False, "default of the architecture")
    reader.set("embed_scale", 1.0, "default of the architecture")
    reader.take("final_logit_softcapping", places, "number", default=None)
    reader.take("logit_scale", places, "number", default=1.0)
    activation = reader.take("hidden_act", places, "string", default="silu")
    if activation not in ("silu", "swish", None):
        reader.faults.append(f"{reader.origins['hidden_act']} is {activation!r}, it must be 'silu'")
    if reader.take("mlp_bias", places, "boolean", default=False):
        reader.faults.append(f"{reader.origins['mlp_bias']} is true; MLP biases are not read")


def read_architecture(reader: Reader, places: Sequence[Fields | None]) -> None:
    """qwen3 or llama, by ``model_type``."""
    kind = reader.take("model_type", places, "string")
    known = {"qwen3": "qwen3", "llama": "llama", "lfm2": "qwen3", "lfm2_moe": "qwen3"}
    if kind is not None and kind not in known:
        reader.faults.append(f"{reader.origins['model_type']} is {kind!r}, read are {', '.join(known)}")
    reader.set("architecture", known.get(kind, "qwen3"), reader.origins.get("model_type", ""))


def read_rope(reader: Reader, places: Sequence[Fields | None]) -> None:
    """``rope_parameters`` (transformers 5), or ``rope_theta`` and ``rope_scaling``; refused if they disagree."""
    parameters = scaling = None
    for place in places:
        parameters = parameters or reader.object(place, "rope_parameters")
        scaling = scaling or reader.object(place, "rope_scaling")
    nested = [place for place in (parameters, scaling) if place is not None]
    theta = reader.take("rope_theta", [*nested, *places], "number")
    kind = _rope_kind(reader, parameters, scaling)
    partial = reader.take("partial_rotary_factor", [*nested, *places], "number", default=1.0)
    neox = reader.take("is_neox_style", [*nested, *places], "boolean", default=True)
    values: dict[str, Any] = {"interleaved": not neox}
    if kind in ("linear", "yarn", "llama3"):
        values["factor"] = reader.take("rope factor", nested, "number", "factor")
    if kind in ("yarn", "llama3"):
        key = "original_max_position_embeddings"
        values[key] = reader.take(key, [*nested, *places], "integer")
    if kind == "llama3":
        for key in ("low_freq_factor", "high_freq_factor"):
            values[key] = reader.take(key, nested, "number")
    if kind == "yarn":
        for key, default in (("beta_fast", 32.0), ("beta_slow", 1.0)):
            values[key] = reader.take(key, nested, "number", default=default)
        values["truncate"] = reader.take("truncate", nested, "boolean", default=True)
        scales = [reader.take(key, nested, "number", default=None) for key in ("mscale", "mscale_all_dim")]
        factor = values["factor"] if values["factor"] else 1.0
        default = yarn_attention_factor(factor, *scales)
        values["attention_factor"] = reader.take("attention_factor", nested, "number", default=default)
    if theta is None or partial is None or kind is None or None in values.values():
        return
    where = parameters.where("")[:-1] if parameters else reader.origins["rope_theta"]
    reader.set("rope", Rope(theta=theta, kind=kind, partial_rotary_factor=partial, **values), where)


def _rope_kind(reader: Reader, parameters: Fields | None, scaling: Fields | None) -> Any:
    """``rope_type``, or its older name ``type``; both objects must agree."""
    found: dict[str, str] = {}
    for place in (parameters, scaling):
        for key in ("rope_type", "type"):
            if place is not None and place.has(key):
                kind = reader.take("rope_type", place, "string", key)
                if kind is None:
                    return None
                found[place.where(key)] = kind
    if scaling is not None and scaling.has("factor") and not (scaling.has("rope_type") or scaling.has("type")):
        reader.faults.append(f"{scaling.where('factor')} is stated, but no rope_type")
    if len(set(found.values())) > 1:
        reader.faults.append(" but ".join(f"{where} is {kind!r}" for where, kind in found.items()))
        return None
    kind = next(iter(found.values()), "default")
    if kind not in KINDS or kind == "proportional":
        reader.faults.append(f"{next(iter(found))} is {kind!r}, read are default, linear, yarn, llama3")
        return None
    return kind


def read_windows(reader: Reader, places: Sequence[Fields | None], moves: bool, causal: bool | None) -> None:
    """Sliding windows per layer.

    A window that is null, 0, absent or not smaller than the context is none.

    Args:
        moves: whether the layout's window moves with the slot.
        causal: whether layers with a window are causal inside the block; None: the layout has no windows.
    """
    layers = reader.values.get("num_hidden_layers")
    window = reader.take("sliding_window", places, "integer", default=None)
    kinds = reader.take("layer_types", places, "strings", default=None)
    wanted = reader.take("use_sliding_window", places, "boolean", default=kinds is not None)
    if layers is None or not 0 < layers <= _MAX_LAYERS or reader.values.get("max_position_embeddings") is None:
        layers = 0
    unknown = {kind for kind in kinds or () if kind not in ("full_attention", "sliding_attention")}
    if unknown:
        reader.faults.append(f"{reader.origins['layer_types']} holds {', '.join(sorted(unknown))}, which is not read")
    if kinds is not None and layers and len(kinds) != layers:
        reader.faults.append(f"{reader.origins['layer_types']} has {len(kinds)} entries for {layers} layers")
    limit = reader.values.get("max_position_embeddings") or 0
    effective = window if window and 0 < window < limit else None
    if window is not None and window < 0:
        reader.faults.append(f"{reader.origins['sliding_window']} is {window}, it must be a width, 0 or null")
    if kinds is None and wanted and effective:
        first = reader.take("max_window_layers", places, "integer", default=0) or 0
        kinds = tuple("sliding_attention" if layer >= first else "full_attention" for layer in range(layers))
    windows = tuple(
        effective if kinds is not None and layer < len(kinds) and kinds[layer] == "sliding_attention" else None
        for layer in range(layers)
    )
    if causal is None and any(windows):
        reader.faults.append(
            f"{reader.source.file}: layer_types: this layout's sliding windows are not settled by any public code"
        )
    where = reader.origins.get("layer_types", "layer_types") if any(windows) else "no layer has a window"
    reader.set("layer_windows", windows, where)
    reader.set("layer_causal", tuple(bool(causal) and window is not None for window in windows), where)
    reader.set("window_moves", moves and any(windows), where)


def read_taps(reader: Reader, places: Sequence[Fields | None], key: str = "target_layer_ids", shift: int = 0) -> None:
    """Tapped layers; ``shift`` is added once, where a layout counts boundaries instead of layers."""
    settled = reader.source.settled.target_layer_ids
    stated = any(place is not None and place.has(key) for place in places)
    if not stated and settled is None:
        listed = [place for place in places if place is not None]
        reader.leave_open(
            "--target-layer-ids",
            f"{reader.source.file}: the key {_any_of(listed, key)} is missing, and no rule for it is safe; "
            "give the layers that the drafter was trained on with --target-layer-ids",
        )
    elif not stated:
        reader.set("target_layer_ids", settled, "--target-layer-ids")
    else:
        ids = reader.take("target_layer_ids", places, "integers", key)
        if ids is not None:
            shifted = tuple(i + shift for i in ids)
            origin = reader.origins["target_layer_ids"]
            reader.set("target_layer_ids", shifted, f"{origin}, minus {-shift}" if shift else origin)
            if settled is not None and settled != shifted:
                reader.faults.append(f"--target-layer-ids {list(settled)} contradicts {origin}, {list(shifted)}")


def read_layout_flag(
    reader: Reader, places: Sequence[Fields | None], family: bool | None, keys: Sequence[str] = ()
) -> None:
    """``sample_from_anchor``, however it is spelt; ``family`` is what the layout means where none is stated."""
    stated: dict[str, bool] = {}
    for key in ("sample_from_anchor", "query_zero_predicts_next", *keys):
        for place in places:
            if place is not None and place.has(key):
                value = reader.take(key, place, "boolean")
                if value is None:
                    return
                stated[place.where(key)] = value
    settled = reader.source.settled.sample_from_anchor
    if settled is not None:
        stated["--sample-from-anchor"] = settled
    if len(set(stated.values())) > 1:
        reader.faults.append(" but ".join(f"{where} is {str(value).lower()}" for where, value in stated.items()))
    elif stated:
        where, value = next(iter(stated.items()))
        reader.set("sample_from_anchor", value, where)
    elif family is not None:
        reader.set("sample_from_anchor", family, f"the {reader.layout} layout")
    else:
        reader.leave_open(
            "--sample-from-anchor",
            f"{reader.source.file}: the key {keys[0] if keys else 'sample_from_anchor'} is missing, and this layout "
            "was written both ways: settle it with --sample-from-anchor yes|no, or with --target T --probe",
        )


def read_heads(reader: Reader, places: Sequence[Fields | None], confidence: str = "enable_confidence_head") -> None:
    """Markov and confidence head by their keys; checked against the tensors afterwards."""
    rank = reader.take("markov_rank", places, "integer")
    if rank:
        kind = reader.take("markov_head_type", places, "string")
        reader.set("markov_head_type", kind.lower() if kind else "none", reader.origins.get("markov_head_type", ""))
    else:
        reader.set("markov_head_type", "none", reader.origins.get("markov_rank", ""))
    enabled = reader.take("confidence_head", places, "boolean", confidence)
    if enabled:
        inferred = _confidence_takes_markov(reader)
        if inferred is None:
            reader.take("confidence_head_with_markov", places, "boolean", default=False)
        else:
            reader.take("confidence_head_with_markov", places, "boolean", default=inferred)
            if reader.origins.get("confidence_head_with_markov") == "default of the layout":
                reader.origins["confidence_head_with_markov"] = "width of the confidence head's weight"
    else:
        reader.set("confidence_head_with_markov", False, reader.origins.get("confidence_head", ""))


def no_heads(reader: Reader) -> None:
    """A layout without Markov and confidence head."""
    for name, value in (("markov_rank", 0), ("markov_head_type", "none"), ("confidence_head", False),
                        ("confidence_head_with_markov", False)):  # fmt: skip
        reader.set(name, value, f"the {reader.layout} layout")


def _confidence_takes_markov(reader: Reader) -> bool | None:
    """By the width of the head's weight, h + r or h; None where the tensor does not tell."""
    for name in ("confidence_head.proj.weight", "confidence_proj.weight"):
        entry = reader.source.entries.get(name)
        hidden, rank = reader.values.get("hidden_size"), reader.values.get("markov_rank")
        if entry is not None and len(entry.shape) == 2 and hidden and rank is not None:
            return {hidden + rank: rank > 0, hidden: False}.get(entry.shape[1])
    return None


def _any_of(places: Sequence[Fields], key: str) -> str:
    return " or ".join(dict.fromkeys(f"{place.path}{key}" for place in places)) or key


def _any_tensor(source: Source, suffix: str) -> bool:
    return any(name.endswith(suffix) for name in source.entries)
