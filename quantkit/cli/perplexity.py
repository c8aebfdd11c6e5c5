"""`quantkit perplexity`: perplexity, base files of KL divergence, and KL divergence from them."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from quantkit.cli._evaluation import (
    Batch,
    ChunkLimit,
    Context,
    Numerics,
    Running,
    TextFile,
    conditions,
    conditions_line,
    required_text,
)
from quantkit.cli._runtime import Launch, runs_a_model
from quantkit.cli._shared import Json, Threads, print_json
from quantkit.errors import QuantkitError

_ENOUGH_FOR_A_REPORT = 100


@runs_a_model
def perplexity(
    model: Annotated[Path, typer.Argument(help="GGUF file, or any shard of one.")],
    file: TextFile = None,
    ctx_size: Context = 512,
    chunks: ChunkLimit = None,
    batch_size: Batch = 2048,
    ppl_output_type: Annotated[int, typer.Option(help="0: [chunk]PPL, … 1: one line a chunk.", min=0, max=1)] = 0,
    kl_divergence_base: Annotated[
        Path | None,
        typer.Option(
            "--kl-divergence-base", "--save-all-logits", help="Base file: written, or read with --kl-divergence."
        ),
    ] = None,
    kl_divergence: Annotated[
        bool, typer.Option("--kl-divergence", help="Compare with the base file, over its own text.")
    ] = False,
    kl_divergence_bound: Annotated[
        float, typer.Option(help="Of a base that ends in .qkld: error of a mean KLD to aim at, nats.", min=1e-7)
    ] = 1e-3,
    numerics: Numerics = "exact",
    threads: Threads = None,
    launch: Launch = None,  # type: ignore[assignment]  # the decorator gives it
    json: Json = False,
) -> None:
    """Measure how well a model predicts a text, or how far it is from another model.

    Protocol, printed form and base files are those of llama-perplexity: chunks of -c tokens, the second half of each
    is scored. A base whose name ends in .qkld is a twentieth of the size, and what is computed from it says how far
    from an exact base's it may be.
    """
    loaded = launch.open(model, numerics=numerics, threads=threads)
    quiet = json
    if kl_divergence:
        if kl_divergence_base is None:
            raise QuantkitError("--kl-divergence needs the base to compare with: --kl-divergence-base FILE")
        result, facts = _diverge(loaded, kl_divergence_base, batch_size, quiet)
    else:
        text = required_text(file, "perplexity")
        base = (kl_divergence_base, kl_divergence_bound)
        result, facts = _measure(loaded, text, ctx_size, chunks, batch_size, base, ppl_output_type, quiet)
    said = conditions(loaded, facts["n_ctx"], facts["chunks"], facts["text"])
    if json:
        print_json({"model": model, **result, "conditions": said})
    else:
        print(conditions_line(said), file=sys.stderr)


def _measure(
    model: Any,
    text: Path,
    n_ctx: int,
    limit: int | None,
    n_batch: int,
    base: tuple[Path | None, float],
    style: int,
    quiet: bool,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Perplexity over a text; returns the result and what it depended on, for JSON."""
    from quantkit.evaluate import perplexity as evaluation
    from quantkit.evaluate.kld import base_writer
    from quantkit.evaluate.text import chunked

    chunks = chunked(model.tokenizer, text, n_ctx, limit)
    print(f"perplexity over {len(chunks)} chunks of {n_ctx} tokens, batch {n_batch}", file=sys.stderr)
    running = Running(len(chunks), n_ctx, n_batch)

    def show(so_far: evaluation.Perplexity) -> None:
        index = len(so_far.nll)
        if quiet:
            running.tick(index)
        elif style == 0:
            running.value(index, so_far.value)
        else:
            mean, error = so_far.nll.mean(), so_far.mean_error
            print(f"{(index - 1) * n_ctx:8d}  {so_far.value:.4f}  {mean:4f}  {error:4f}", flush=True)
            running.tick(index)

    with contextlib.ExitStack() as stack:
        writer: Any = None
        if base[0] is not None:
            note = {"model": str(model.path), **conditions(model, n_ctx, len(chunks), str(text))}
            made = base_writer(base[0], chunks.tokens, model.vocab_size, target=base[1], note=note)
            writer = stack.enter_context(made)
        found = evaluation.perplexity(model, chunks, n_batch=n_batch, base=writer, on_chunk=show)
    if not quiet:
        print(f"\nFinal estimate: PPL over {len(chunks)} chunks for n_ctx={n_ctx} = {found}")
    running_values = [found.after(i + 1).value for i in range(len(chunks))]
    result = {"ppl": found.value, "ppl_error": found.error, "running": running_values, "seconds": running.seconds}
    return result, {"n_ctx": n_ctx, "chunks": len(chunks), "text": str(text)}


def _diverge(model: Any, path: Path, n_batch: int, quiet: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """KL divergence from a base file; returns the result and what it depended on, for JSON."""
    from quantkit.evaluate import kld

    base = kld.base_reader(path)
    print(f"KL divergence over {base.n_chunk} chunks of {base.n_ctx} tokens from {path}", file=sys.stderr)
    running = Running(base.n_chunk, base.n_ctx, n_batch)

    def show(index: int, so_far: kld.Divergence) -> None:
        if not quiet:
            if index == 1:
                print(f"\n{kld.CHUNK_HEADER}")
            print(kld.chunk_line(index, so_far), flush=True)
        running.tick(index)

    found = kld.divergence(model, base, n_batch=n_batch, on_chunk=show)
    if not quiet:
        if len(found) >= _ENOUGH_FOR_A_REPORT:
            print(f"\n{kld.report(found)}")
        else:
            print(
                f"\nPPL of the base {found.ppl_base.value:.4f} ± {found.ppl_base.error:.4f}; {len(found)} positions, "
                f"the full report takes at least {_ENOUGH_FOR_A_REPORT}"
            )
        if found.low is not None:
            print(f"\nKLD {found.mean_kld.value:.6f}: an exact base gives a mean within {found.bound:.6f} of it")
    result = {**kld.summary(found), "seconds": running.seconds}
    return result, {"n_ctx": base.n_ctx, "chunks": base.n_chunk, "text": f"of {path}"}
