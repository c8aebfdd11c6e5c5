"""Stage `streamed`: experts on the CPU that are copied to the GPU for a prompt, in the models of the stage `hybrid`.

pp           tokens/s of a prompt
bytes        what a prompt copies to the GPU
bytes_rate   bytes over the time of the whole prompt
of_bus       bytes_rate over the rate of the bus, which the stage `rates` measures (aim 0.7 at least)
prompt       seconds of the GPU, copies included, and of the host without its waiting, from torch's profiler
error        of the logits against the CPU's, the median of all tokens
"""

from __future__ import annotations

from benchmarks.gpu.run import Figures, Run, median_error
from benchmarks.gpu.running import (
    EXPERTS,
    EXPERTS_TOLERANCE,
    each_with_experts,
    n_ctx,
    on_cpu,
    on_gpu,
    prompt,
    prompt_logits,
    times,
    traced_prompt,
)
from benchmarks.records import Column, Table
from quantkit.placement.devices import CPU
from quantkit.placement.offload import Offload

TABLE = Table(
    "gpu_streamed",
    "How fast are prompts when experts stay on the CPU?",
    (
        Column("model"),
        Column("pp", "prompt, tokens/s", ".0f"),
        Column("gb", "copied, GB", ".2f"),
        Column("gb_s", "GB/s", ".1f"),
        Column("of_bus", "of the bus", ".2f"),
    ),
    "A few layers with random weights, a prompt of 2,048. Experts are copied to the GPU for the prompt; their bytes "
    "over the time of the prompt, in all and as a share of what the bus reaches.",
)


def measure(run: Run) -> None:
    """Each shape in each type."""
    each_with_experts(run, measure_model, line)


def rows(figures: Figures) -> list[Figures]:
    """One row for each model."""
    return [
        {"model": name, "pp": got["pp"], "gb": got["bytes"] / 1e9, "gb_s": got["bytes_rate"] / 1e9,
         "of_bus": got["of_bus"]}
        for name, got in figures.items() if "failed" not in got
    ]  # fmt: skip


def line(got: Figures) -> str:
    """The rates in words."""
    return (
        f"PP {got['pp']:.0f} tokens/s, {got['bytes'] / 1e9:.2f} GB at {got['bytes_rate'] / 1e9:.1f} GB/s, "
        f"{100 * got['of_bus']:.0f} % of the bus (aim 70); {times(got['prompt'])}; logits {got['error']:.1e} from the "
        "CPU's"
    )


def measure_model(run: Run, shape: str, kind: str, got: Figures) -> None:
    """The rates of one model; what was measured is saved before what takes long or may fail."""
    path, sizes = run.file(shape, kind), run.sizes
    model = on_gpu(run, path, override_tensor=EXPERTS, offload=Offload(1))
    assert model.split is not None
    cache = model.new_cache(n_ctx(sizes))
    model.split.ledger.clear()
    per_prompt, _ = prompt(model, sizes, cache, sizes.prompts)
    copied = model.split.ledger.bytes[CPU.name, f"CUDA{run.gpu.index}"] // (1 + sizes.prompts)
    rate = copied / per_prompt
    got |= {"pp": sizes.prompt / per_prompt, "bytes": copied, "bytes_rate": rate, "of_bus": rate / run.peak["bus"]}
    run.save()
    got["prompt"] = traced_prompt(run, model, cache).figures()
    got["error"] = median_error(prompt_logits(model, sizes, cache), prompt_logits(*on_cpu(run, path)))
    got["right"] = got["error"] < EXPERTS_TOLERANCE
