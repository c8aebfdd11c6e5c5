"""`quantkit perplexity`: perplexity, KL divergence base files, KL divergence, multiple-choice tasks."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
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
    result_conditions,
)
from quantkit.cli._runtime import Launch, runs_a_model
from quantkit.cli._shared import Json, Threads, print_json
from quantkit.errors import QuantkitError

Found = tuple[dict[str, Any], dict[str, Any]]  # a result and its n_ctx, chunks and text, for JSON

_MIN_POSITIONS = 100
_SAME_TOKENIZER = 0.98  # share of tokens that the same tokenizer gives again; other tokenizers give 0.9


@runs_a_model
def perplexity(
    model: Annotated[Path, typer.Argument(help="A GGUF file, or any shard of a split one.")],
    file: TextFile = None,
    ctx_size: Context = 512,
    chunks: ChunkLimit = None,
    batch_size: Batch = 2048,
    ppl_stride: Annotated[
        int,
        typer.Option(
            metavar="STRIDE",
            help="Windows of -c + STRIDE / 2 tokens, STRIDE apart; the last STRIDE tokens are scored.",
            min=0,
        ),
    ] = 0,
    jsonl: Annotated[
        Path | None,
        typer.Option(help="Write a JSON line per chunk; the same command resumes from it.", metavar="FILE"),
    ] = None,
    hellaswag: Annotated[bool, typer.Option("--hellaswag", help="Score HellaSwag tasks in -f: 6 lines each.")] = False,
    hellaswag_tasks: Annotated[
        int, typer.Option(metavar="N", help="Number of tasks, sampled as in llama-perplexity.", min=1)
    ] = 400,
    winogrande: Annotated[bool, typer.Option("--winogrande", help="Score Winogrande tasks in -f: CSV.")] = False,
    winogrande_tasks: Annotated[int, typer.Option(metavar="N", help="Use the first N tasks; 0: all.", min=0)] = 0,
    multiple_choice: Annotated[
        bool, typer.Option("--multiple-choice", help="Score multiple-choice tasks in -bf.")
    ] = False,
    multiple_choice_tasks: Annotated[int, typer.Option(metavar="N", help="Use the first N tasks; 0: all.", min=0)] = 0,
    binary_file: Annotated[
        Path | None, typer.Option("--binary-file", "-bf", metavar="FILE", help="Task file of --multiple-choice.")
    ] = None,
    ppl_output_type: Annotated[
        int, typer.Option(help="0: [chunk]PPL,… in one line; 1: one line per chunk.", min=0, max=1)
    ] = 0,
    kl_divergence_base: Annotated[
        Path | None,
        typer.Option(
            "--kl-divergence-base",
            "--save-all-logits",
            metavar="FILE",
            help="Base file to write, or to read with --kl-divergence.",
        ),
    ] = None,
    kl_divergence: Annotated[
        bool, typer.Option("--kl-divergence", help="Compute the KL divergence from the base file, on the text in it.")
    ] = False,
    kl_divergence_bound: Annotated[
        float,
        typer.Option(
            metavar="NATS", help="For a base file named .qkld: target error of the mean KLD, in nats.", min=1e-7
        ),
    ] = 1e-3,
    by_layer: Annotated[
        bool,
        typer.Option(
            "--by-layer", help="Run all chunks through one layer before the next, for models larger than memory."
        ),
    ] = False,
    numerics: Numerics = "exact",
    threads: Threads = None,
    launch: Launch = None,  # type: ignore[assignment]  # the decorator gives it
    json: Json = False,
) -> None:
    """Measure how well a model predicts a text, or how far it is from another model.

    Protocol, output and base files are those of llama-perplexity: the second half of each chunk of -c tokens is scored.
    A base file named .qkld has 1/20 of the size or less, and results from it include a bound on the error against an
    exact base. With --jsonl, an interrupted base file is resumed too.
    """
    from quantkit.formats.atomic import check_outputs

    chosen = [(name, limit) for name, wanted, limit in (
        ("hellaswag", hellaswag, hellaswag_tasks), ("winogrande", winogrande, winogrande_tasks),
        ("multiple-choice", multiple_choice, multiple_choice_tasks),
    ) if wanted]  # fmt: skip
    if len(chosen) + kl_divergence > 1:
        raise typer.BadParameter("--hellaswag, --winogrande, --multiple-choice and --kl-divergence: pass only one")
    written = [jsonl, None if kl_divergence else kl_divergence_base]
    check_outputs(written, [model, *filter(None, (file, binary_file, kl_divergence_base if kl_divergence else None))])
    job: _Tasks | _Divergence | _TextRun
    if chosen:
        name, limit = chosen[0]
        source = binary_file or file if name == "multiple-choice" else file
        job = _Tasks.read(name, required_text(source, name), limit, model)
    elif kl_divergence:
        if kl_divergence_base is None:
            raise QuantkitError("--kl-divergence needs the base to compare with: --kl-divergence-base FILE")
        job = _Divergence.read(kl_divergence_base, batch_size, jsonl)
    else:
        text = required_text(file, "perplexity")
        job = _TextRun(text, ctx_size, chunks, batch_size, ppl_stride, jsonl, kl_divergence_base, kl_divergence_bound,
                    ppl_output_type)  # fmt: skip
    loaded = launch.open(model, numerics=numerics, threads=threads, n_ctx=job.longest, tokenizer=job.tokenizer)
    result, facts = job.run(loaded, json, _chunk_runner(by_layer))
    how = conditions(loaded, facts["n_ctx"], facts["chunks"], facts["text"])
    if json:
        kind = "perplexity-tasks" if chosen else "perplexity-kl-divergence" if kl_divergence else "perplexity"
        print_json(f"quantkit.{kind}/1", {"model": model, **result, "conditions": how})
    else:
        print(conditions_line(how), file=sys.stderr)


@dataclass(frozen=True)
class _TextRun:
    """A perplexity run over a text: chunks, log and base file."""

    text: Path
    n_ctx: int
    limit: int | None
    n_batch: int
    stride: int
    jsonl: Path | None
    base: Path | None
    bound: float
    style: int
    tokenizer: None = None

    @property
    def longest(self) -> int:
        """Tokens per evaluated chunk."""
        return self.n_ctx + self.stride // 2

    def run(self, model: Any, quiet: bool, run_chunks: Any) -> Found:
        return _measure(model, self, quiet, run_chunks)

    def chunks(self, tokenizer: Any) -> Any:
        from quantkit.evaluate.text import chunked, windows

        if not self.stride:
            return chunked(tokenizer, self.text, self.n_ctx, self.limit)
        if self.base is not None:
            raise QuantkitError(
                "--ppl-stride and --kl-divergence-base exclude each other: base files contain second halves of chunks"
            )
        return windows(tokenizer, self.text, self.n_ctx, self.stride, self.limit)

    def log(self, model: Any, chunks: Any) -> Any:
        """The ChunkLog, or None."""
        if self.jsonl is None:
            return None
        settings: dict[str, Any] = {"stride": self.stride}
        if self.base is not None:
            settings |= {"base": self.base.suffix, "bound": self.bound}
        rows = chunks.rows
        return _log(self.jsonl, model, self.text, chunks.n_ctx, len(chunks), rows.stop - rows.start, self.n_batch,
                    settings)  # fmt: skip


def _log(path: Path, model: Any, text: Path, n_ctx: int, chunks: int, positions: int, n_batch: int,
         more: dict[str, Any]) -> Any:  # fmt: skip
    """The ChunkLog of a run over a text or a base file."""
    from quantkit.evaluate.chunk_log import ChunkLog
    from quantkit.evaluate.collect_imatrix import fingerprint
    from quantkit.formats import gguf

    how = conditions(model, n_ctx, chunks, str(text))
    settings = result_conditions(how) | {"n_batch": n_batch, **more}
    run = fingerprint([*gguf.open(model.path).paths, text], settings)
    return ChunkLog(path, run, positions, max(1, n_batch // n_ctx), how)


def _chunk_runner(by_layer: bool) -> Any:
    """The function that evaluates chunks."""
    if not by_layer:
        from quantkit.evaluate.perplexity import evaluate_chunks

        return evaluate_chunks
    from functools import partial

    from quantkit.evaluate.streamed import streamed_chunks

    def on_layer(done: int, layers: int) -> None:
        print(f"layer {done} of {layers}", file=sys.stderr, flush=True)

    return partial(streamed_chunks, on_layer=on_layer)


def _measure(model: Any, plan: _TextRun, quiet: bool, run_chunks: Any) -> Found:
    """Perplexity over a text; returns the result and its conditions, for JSON."""
    from quantkit.evaluate import perplexity as evaluation
    from quantkit.evaluate.divergence import base_writer
    from quantkit.formats.kld.chunk_file import LoggedChunks

    chunks = plan.chunks(model.tokenizer)
    n_ctx, title = chunks.n_ctx, f"perplexity over {len(chunks)} chunks of {chunks.n_ctx} tokens"
    print(f"{title}, batch {plan.n_batch}", file=sys.stderr)
    running = Running(len(chunks), n_ctx, plan.n_batch)
    with contextlib.ExitStack() as stack:
        log = plan.log(model, chunks)
        writer: Any = None
        if plan.base is not None:
            note = {"model": str(model.path), **conditions(model, n_ctx, len(chunks), str(plan.text))}
            logged = None if log is None else LoggedChunks(log.logged("base").tolist(), log.together)
            made = base_writer(plan.base, chunks.tokens, model.vocab_size, logged, target=plan.bound, note=note)
            writer = stack.enter_context(made)
            if log is not None:
                log.keep(writer.done)
        done = _resume_log(stack, log)

        def show(so_far: evaluation.Perplexity) -> None:
            index = len(so_far.nll)
            if log is not None:
                log.add(so_far.nll[-1], **({"base": writer.digest} if writer else {}))
            if quiet:
                running.tick(index)
            elif plan.style == 0:
                running.value(index, so_far.value)
            else:
                mean, error = so_far.nll.mean(), so_far.mean_error
                print(f"{(index - 1) * n_ctx:8d}  {so_far.value:.4f}  {mean:4f}  {error:4f}", flush=True)
                running.tick(index)

        found = evaluation.perplexity(
            model, chunks, n_batch=plan.n_batch, base=writer, on_chunk=show, done=done, run=run_chunks
        )
    if not quiet:
        estimate = f"Final estimate: PPL over {len(chunks)} chunks for n_ctx={n_ctx} = {found}"
        print(f"\n{estimate}" if not plan.stride else "")
    running_values = [found.after(i + 1).value for i in range(len(chunks))]
    result = {"ppl": found.value, "ppl_error": found.error, "running": running_values, "seconds": running.seconds}
    return result, {"n_ctx": n_ctx, "chunks": len(chunks), "text": str(plan.text)}


def _resume_log(stack: contextlib.ExitStack, log: Any) -> Any:
    """Open the log, if there is one, and return the chunks of an earlier run."""
    if log is None:
        return None
    stack.enter_context(log)
    if len(log.done):
        print(f"{len(log.done)} chunks are already in {log.path}", file=sys.stderr)
    return log.done


@dataclass(frozen=True)
class _Tasks:
    """A multiple-choice benchmark."""

    name: str
    path: Path
    tasks: Sequence[Any]
    tokenizer: Any
    longest: int

    @classmethod
    def read(cls, name: str, path: Path, limit: int, model: Path) -> _Tasks:
        """Read the tasks of a file, and count the tokens of the longest choice."""
        from quantkit.evaluate import tasks as evaluation
        from quantkit.formats import gguf
        from quantkit.tokenizers.tokenizer import Tokenizer

        read = {"hellaswag": evaluation.hellaswag, "winogrande": evaluation.winogrande,
                "multiple-choice": evaluation.multiple_choice}[name]  # fmt: skip
        tasks = read(path, limit)
        if not tasks:
            raise QuantkitError(f"{path} contains no tasks")
        tokenizer = Tokenizer.from_gguf(gguf.require_model(gguf.open(model)).metadata)
        longest = max(len(tokenizer.encode(text, bos=None)) for task in tasks for text in task.texts)
        return cls(name, path, tasks, tokenizer, longest)

    def run(self, model: Any, quiet: bool, run_chunks: Any) -> Found:
        return _score(model, self, quiet)


def _score(model: Any, job: _Tasks, quiet: bool) -> Found:
    """Returns the result and its conditions, for JSON."""
    from quantkit.evaluate import tasks as evaluation

    name, tasks = job.name, job.tasks
    print(f"{name}: {len(tasks)} tasks of {job.path}", file=sys.stderr)
    score = None
    for score in evaluation.evaluate(model, tasks):
        if not quiet:
            print(f"{score.tasks}\t{100 * score.accuracy:.8f}", flush=True)
    assert score is not None
    value, error = 100 * score.accuracy, 100 * score.error
    if not quiet and name == "winogrande" and score.tasks >= _MIN_POSITIONS:
        print(f"\nFinal Winogrande score({score.tasks} tasks): {value:.4f} +/- {error:.4f}")
    if not quiet and name == "multiple-choice":
        spread = 100 * (score.chance * (1 - score.chance) / max(1, score.tasks - 1)) ** 0.5
        print(f"\nFinal result: {value:.4f} +/- {error:.4f}")
        print(f"Random chance: {100 * score.chance:.4f} +/- {spread:.4f}")
    result = {"task": name, "accuracy": score.accuracy, "accuracy_error": score.error, "tasks": score.tasks,
              "chance": score.chance}  # fmt: skip
    return result, {"n_ctx": model.n_ctx_train, "chunks": len(tasks), "text": str(job.path)}


@dataclass(frozen=True)
class _Divergence:
    """KL divergence from a base file."""

    base: Any
    path: Path
    n_batch: int
    jsonl: Path | None
    tokenizer: None = None

    @classmethod
    def read(cls, path: Path, n_batch: int, jsonl: Path | None) -> _Divergence:
        from quantkit.evaluate.divergence import base_reader

        return cls(base_reader(path), path, n_batch, jsonl)

    @property
    def longest(self) -> int:
        return int(self.base.n_ctx)

    def run(self, model: Any, quiet: bool, run_chunks: Any) -> Found:
        return _diverge(model, self, quiet, run_chunks)


def _diverge(model: Any, job: _Divergence, quiet: bool, run_chunks: Any) -> Found:
    """Returns the result and its conditions, for JSON."""
    from quantkit.evaluate import divergence
    from quantkit.formats.kld.bounded_file import BoundedReader

    base, path, n_batch, jsonl = job.base, job.path, job.n_batch, job.jsonl
    print(f"KL divergence over {base.n_chunk} chunks of {base.n_ctx} tokens from {path}", file=sys.stderr)
    if (share := divergence.known_share(base.tokens, model.tokenizer)) < _SAME_TOKENIZER:
        print(
            f"warning: {path}: decoding its tokens and encoding them again with the tokenizer of {model.path} gives "
            f"{100 * share:.1f} % of the same tokens: the base file has another tokenizer or is not from a text",
            file=sys.stderr,
        )
    running, k, log = Running(base.n_chunk, base.n_ctx, n_batch), base.rows_per_chunk, None
    if jsonl is not None:
        log = _log(jsonl, model, path, base.n_ctx, base.n_chunk, k, n_batch, {})
    names = [name for name in divergence.RowFigures._fields if name != "doubts" or isinstance(base, BoundedReader)]

    def show(index: int, so_far: divergence.Divergence) -> None:
        if log is not None:
            log.add(**{name: getattr(so_far, name)[-k:] for name in names})
        if not quiet:
            if index == 1 + before:
                print(f"\n{divergence.CHUNK_HEADER}")
            print(divergence.chunk_line(index, so_far), flush=True)
        running.tick(index)

    with contextlib.ExitStack() as stack:
        done = _resume_log(stack, log)
        before = 0 if done is None else len(done)
        noted = {name: log.logged(name) for name in names} if log is not None and before else None
        found = divergence.divergence(model, base, n_batch=n_batch, on_chunk=show, run=run_chunks, done=noted)
    if not quiet:
        if len(found) >= _MIN_POSITIONS:
            print(f"\n{divergence.report(found)}")
        else:
            print(
                f"\nPPL of the base {found.ppl_base.value:.4f} ± {found.ppl_base.error:.4f}; {len(found)} positions, "
                f"the full report needs at least {_MIN_POSITIONS}"
            )
        if found.doubts is not None:
            low, high = found.limits
            span = f"from an exact base {low:.6f} to {high:.6f}"
            print(f"\nKLD {found.mean_kld.value:.6f}; {span}: within {found.bound:.6f}")
    result = {**divergence.summary(found), "seconds": running.seconds}
    return result, {"n_ctx": base.n_ctx, "chunks": base.n_chunk, "text": f"of {path}"}
