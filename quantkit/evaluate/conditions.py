"""The conditions of a run: everything besides the file that its figures depend on, to print and for JSON."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from quantkit.codegen import cpu_target

if TYPE_CHECKING:
    from quantkit.formats.kld.scored_tokens import ScoredTokens
    from quantkit.runtime.model import Model

Conditions = Mapping[str, object]

_WITHOUT_EFFECT = ("text", "threads", "cpu", "isa", "python")


def run_conditions(model: Model) -> dict[str, object]:
    """The conditions of any run of a model: options, CPU, version of quantkit."""
    from quantkit import __version__

    conditions: dict[str, object] = {
        "numerics": model.numerics,
        "cache_type": model.cache_type,
        "flash_attention": "on" if model.attention.flash else f"off, -amb {model.attention.work_mib}",
        "threads": model.threads,
        "cpu": cpu_name(),
        "isa": cpu_target.isa(),
        "quantkit": __version__,
    }
    if model.has_latents:
        conditions["mla"] = model.mla
    if model.repacked is not None:
        conditions["repacked"] = len(model.repacked)
    if model.expert_reduction is not None:
        count, threshold = model.expert_reduction
        conditions["expert reduction"] = f"{count},{threshold:g}"
    if model.split is not None:
        conditions |= model.split.describe()
    return conditions | ({"layer_by_layer": model.fallback_reason} if model.fallback_reason else {})


def evaluation_conditions(
    model: Model, n_ctx: int, chunks: int, text: str, scored: ScoredTokens | None = None
) -> dict[str, object]:
    """The conditions of an evaluation over a text: `run_conditions`, the text, and versions of the libraries.

    `scored` are the scored tokens where they are not the second halves of chunks.
    """
    return {
        "text": text,
        "n_ctx": n_ctx,
        "chunks": chunks,
        **({} if scored is None else {"scored": scored.about}),
        **run_conditions(model),
        "numpy": importlib.metadata.version("numpy"),
        "numba": importlib.metadata.version("numba"),
        "python": platform.python_version(),
    }


def result_conditions(conditions: Conditions) -> dict[str, object]:
    """The conditions that can change the bits of a result. (The text's contents can, its name cannot.)"""
    return {key: value for key, value in conditions.items() if key not in _WITHOUT_EFFECT}


def conditions_line(conditions: Conditions) -> str:
    """The conditions in one line: `text wiki.txt, n_ctx 512, …`."""
    shown = {key: len(value) if isinstance(value, Mapping) else value for key, value in conditions.items()}  # workers
    return ", ".join(f"{key} {value}" for key, value in shown.items())


def cpu_name() -> str:
    """The CPU's model name."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
