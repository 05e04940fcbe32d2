"""What an engine or a table was made for: the device's record and its slug (DESIGN §6)."""

from __future__ import annotations

import dataclasses
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.drafter.errors import UsageError

Capability = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Sku:
    """A kind of device. What is not known stays ``None``: a plan built without a GPU knows its capabilities only."""

    vendor: str  # "nvidia", or the CPU's vendor
    device: str | None = None  # as its driver or the kernel names it
    compute_capabilities: tuple[Capability, ...] = ()  # several: one plan for all of them
    memory_bytes: int | None = None
    power_limit_watts: float | None = None
    driver: str | None = None
    cuda: str | None = None  # of the driver
    machine: str | None = None  # CPU: x86_64, aarch64
    cores: int | None = None  # CPU: those this process may use

    @property
    def slug(self) -> str:
        """Names the SKU's folder, e.g. ``nvidia-h200-sm90``, ``sm89``, ``sm80-sm89``, ``cpu-amd-epyc-9654-2c``."""
        sms = [f"sm{major}{minor}" for major, minor in self.compute_capabilities]
        if not sms:
            return f"cpu-{_slug(self.device or self.machine or 'unknown')}-{self.cores}c"
        if self.device is None:
            return "-".join(sms)
        name = _slug(self.device)
        return "-".join([name if name.startswith(self.vendor) else f"{self.vendor}-{name}", *sms])

    def to_json(self) -> dict[str, Any]:
        data = dataclasses.asdict(self)
        data["compute_capabilities"] = [capability_text(capability) for capability in self.compute_capabilities]
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Sku:
        capabilities = tuple(capability_from_text(text) for text in data["compute_capabilities"])
        return cls(**{**data, "compute_capabilities": capabilities})


def capability_text(capability: Capability) -> str:
    return f"{capability[0]}.{capability[1]}"


def capability_from_text(text: str) -> Capability:
    """``8.9`` as (8, 9).

    Raises:
        UsageError: no compute capability.
    """
    found = re.fullmatch(r"(\d{1,2})\.(\d)", text.strip())
    if found is None:
        raise UsageError(f"compute capability {text!r} must be written like 8.9")
    return int(found[1]), int(found[2])


def gpu_without_device(capabilities: Sequence[Capability]) -> Sku:
    """Any GPU of these compute capabilities."""
    return Sku("nvidia", compute_capabilities=tuple(capabilities))


def this_cpu() -> Sku:
    """The processor that this process runs on."""
    name = _cpu_name()
    lowered = (name or "").lower()
    vendor = next((vendor for vendor in ("intel", "amd", "arm", "apple") if vendor in lowered), "cpu")
    return Sku(vendor, name, machine=platform.machine(), cores=usable_cores())


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_name() -> str | None:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or None
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.processor() or None


def _slug(name: str) -> str:
    """The words of a device's name that tell it from another: no trademark, frequency or filler."""
    name = re.sub(r"\((r|tm|c)\)|@.*$|\d+-core|with .*$", " ", name.lower())
    words = [word for word in re.split(r"[^a-z0-9.]+", name) if word not in ("", "cpu", "processor", "gpu", "geforce")]
    return "-".join(words) or "unknown"
