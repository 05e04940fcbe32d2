"""A process of its own that builds one plan with Polygraphy; its log is its stderr.

``engines.build`` starts it for every plan anew, with addresses that are not randomised, and with paths and an
environment that have the same lengths in every run. Its memory then lies the same way, and the bytes of the plan are
the same: TensorRT-RTX numbers a loop's values in an order that follows their addresses. The job comes on stdin as JSON;
what happens goes to stdout, one JSON object per line.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def main() -> None:
    """Parse the job's graph and, where it names a plan, build that; a failure is one ``error`` line."""
    job = json.load(sys.stdin)
    messages = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries print where they like

    def send(message: dict[str, Any]) -> None:
        messages.write(json.dumps(message) + "\n")

    os.environ["POLYGRAPHY_USE_TENSORRT_RTX"] = "1" if job["backend"] == "tensorrt-rtx" else "0"
    trt = importlib.import_module(job["module"])
    import polygraphy
    from polygraphy.backend.trt import network_from_onnx_path
    from polygraphy.exception import PolygraphyException
    from polygraphy.logger import G_LOGGER

    G_LOGGER.module_severity = G_LOGGER.EXTRA_VERBOSE if job["options"]["verbose"] else G_LOGGER.INFO
    begun = time.perf_counter()
    try:
        builder, network, parser = network_from_onnx_path(job["model"], strongly_typed=True)
        layers = network.num_layers
        if job["plan"] is not None:
            _build(trt, job, builder, network, parser, lambda share: send({"share": share}))
    except PolygraphyException as error:
        send({"error": str(error)})
        return
    versions = {job["module"]: trt.__version__, "polygraphy": polygraphy.__version__}
    send({"layers": layers, "seconds": round(time.perf_counter() - begun, 3), "versions": versions})


def _build(
    trt: Any, job: dict[str, Any], builder: Any, network: Any, parser: Any, report: Callable[[float], None]
) -> None:
    from polygraphy.backend.trt import engine_bytes_from_network

    config = _config(trt, job, report)(builder, network)
    if job["options"]["tf32"]:  # TensorRT has it on by default
        config.set_flag(trt.BuilderFlag.TF32)
    else:
        config.clear_flag(trt.BuilderFlag.TF32)
    cache = job["timing_cache"]  # none with RTX, where it is deprecated and asks for a GPU
    plan = engine_bytes_from_network((builder, network, parser), lambda *_: config, save_timing_cache=cache)
    Path(job["plan"]).write_bytes(plan)


def _config(trt: Any, job: dict[str, Any], report: Callable[[float], None]) -> Any:
    """Polygraphy's loader of a builder configuration; shapes are static, so there is no profile to give."""
    options = job["options"]
    common: dict[str, Any] = {
        "builder_optimization_level": options["optimization_level"],
        "version_compatible": options["version_compatible"],
        "strip_plan": options["strip"],
        "profiling_verbosity": trt.ProfilingVerbosity.DETAILED,
        "progress_monitor": _monitor(trt, report),
    }
    if options["workspace_bytes"] is not None:
        common["memory_pool_limits"] = {trt.MemoryPoolType.WORKSPACE: options["workspace_bytes"]}
    if options["hardware_compatible"] is not None:
        level = options["hardware_compatible"].upper()
        common["hardware_compatibility_level"] = getattr(trt.HardwareCompatibilityLevel, level)
    if job["backend"] == "tensorrt-rtx":
        from polygraphy.backend.tensorrt_rtx import CreateConfigRTX

        capabilities = [tuple(pair) for pair in job["compute_capabilities"]]
        return CreateConfigRTX(compute_capabilities=capabilities, **common)
    from polygraphy.backend.trt import CreateConfig

    return CreateConfig(
        load_timing_cache=job["timing_cache"] if Path(job["timing_cache"]).is_file() else None, **common
    )


def _monitor(trt: Any, report: Callable[[float], None]) -> Any:
    """TensorRT's progress monitor: phases nest, and a phase is one step of the phase around it."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.phases: dict[str, list[int]] = {}  # outermost first: steps done, steps in all

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self.phases[phase_name] = [0, max(num_steps, 1)]

        def phase_finish(self, phase_name: str) -> None:
            self.phases.pop(phase_name, None)

        def step_complete(self, phase_name: str, step: int) -> bool:
            if phase_name in self.phases:
                self.phases[phase_name][0] = step + 1
            share = 0.0
            for done, total in reversed(self.phases.values()):
                share = (min(done, total) + share) / (total + 1)
            report(share)
            return True

    return Monitor()


if __name__ == "__main__":
    main()
