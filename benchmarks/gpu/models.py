"""Stage `models`: a llama of 8B's shape with random weights of each type, as `load(…, devices="cuda:0")` runs it.

tg, tg_of_copy    tokens/s of generation after `context` tokens; bytes of the weights that a token reads times
                  tokens/s, over the rate of copies (aim 0.6)
pp, pp_of_gemm    tokens/s of a prompt; operations/s over torch's bfloat16 product (aim 0.4)
token, prompt     seconds of the GPU and of the host without its waiting, of one token and of the whole prompt, from
                  torch's profiler (`trace.py`); both run at once, so that the longer one binds
"""

from __future__ import annotations

import math
from pathlib import Path

from benchmarks.gpu.run import Figures, Run, given, in_processes
from benchmarks.gpu.running import generate, n_ctx, on_gpu, prompt, times, traced_prompt, traced_tokens
from benchmarks.records import Column, Table
from benchmarks.synthetic import write
from quantkit import types
from quantkit.evaluate.bench import bytes_per_token

TABLE = Table(
    "gpu_models",
    "How fast are models on a GPU?",
    (
        Column("model"),
        Column("pp", "prompt, tokens/s", ".0f"),
        Column("of_gemm", "prompt of gemm", ".2f"),
        Column("tg", "generation, tokens/s", ".1f"),
        Column("of_copy", "generation of copy", ".2f"),
        Column("gpu_ms", "token: GPU, ms", ".2f"),
        Column("host_ms", "host, ms", ".2f"),
    ),
    "Random weights; a prompt of 2,048, generation after 512 tokens. Copy: bytes of the weights per token over torch's "
    "copy rate; gemm: operations over torch's bfloat16 product. A token's time on the GPU, and on the host without its "
    "waiting, from torch's profiler.",
)
MODEL_TYPES = ("q4_K", "iq4_k", "q8_0", "iq2_k", "iq4_ks", "iq4_kt")
WRITERS = 3  # processes that write models; more would fill the memory


def measure(run: Run) -> None:
    """Each model; the next ones are written, and their kernels compiled, while one is measured."""
    arguments = run.sizes.llama, run.folder, run.capability
    names = run.types_of_models(MODEL_TYPES)
    for name, path in in_processes(run, written, names, *arguments, processes=WRITERS):

        def task(got: Figures, path: object = path) -> None:
            dense_model(run, given(path), got)

        run.item(name, task, line)
        if isinstance(path, Path):
            path.unlink()


def written(name: str, shape: str, folder: Path, capability: tuple[int, int] | None) -> Path:
    """The file of a type's model; compiles its kernels to the cache on disk."""
    from quantkit.runtime.kernels.cuda import kernels

    if capability:
        for kernel in kernels.of_type(types.get(name).ggml_type):
            kernel.cubin(capability)
    return write(shape, name, folder / f"{shape}.{name}.gguf")


def line(got: Figures) -> str:
    """The rates and times in words."""
    return (
        f"TG {got['tg']:.1f} tokens/s, {100 * got['tg_of_copy']:.0f} % of copy (aim 60), {times(got['token'])}; "
        f"PP {got['pp']:.0f}, {100 * got['pp_of_gemm']:.0f} % of gemm (aim 40), {times(got['prompt'])}"
    )


def rows(figures: Figures) -> list[Figures]:
    """One row for each model."""
    return [
        {"model": f"llama 8B, {name}", "pp": got["pp"], "of_gemm": got["pp_of_gemm"], "tg": got["tg"],
         "of_copy": got["tg_of_copy"], "gpu_ms": None if got["token"]["gpu"] is None else 1e3 * got["token"]["gpu"],
         "host_ms": 1e3 * got["token"]["host"]}
        for name, got in figures.items() if "failed" not in got
    ]  # fmt: skip


def dense_model(run: Run, path: Path, got: Figures) -> None:
    """A dense model on the GPU. What was measured is saved before the profiler runs."""
    sizes, model = run.sizes, on_gpu(run, path)
    cache = model.new_cache(n_ctx(sizes))
    per_prompt, _ = prompt(model, sizes, cache, sizes.prompts)
    per_token, _ = generate(model, sizes, cache)
    nbytes = bytes_per_token(model, 0)
    embedding = model.weights[model.head.embedding]
    weights = sum(math.prod(t.shape) for t in model.weights.values() if t is not embedding)
    operations = 2 * (weights - math.prod(embedding.shape))  # the output matrix is used for the last token only
    pp, tg = sizes.prompt / per_prompt, 1 / per_token
    got |= {
        "pp": pp, "tg": tg, "bytes": nbytes, "tg_of_copy": tg * nbytes / run.peak["copy"],
        "pp_of_gemm": pp * operations / run.peak["gemm"],
    }  # fmt: skip
    run.save()
    got["token"] = traced_tokens(run, model, cache, sizes.traced).figures(sizes.traced)
    got["prompt"] = traced_prompt(run, model, cache).figures()
