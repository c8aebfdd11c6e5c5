"""`quantkit quantize`: plan, show the plan, write."""

from __future__ import annotations

import math
import re
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantkit.cli._shared import (
    Json,
    KeepSplit,
    RepackPattern,
    SplitMaxSize,
    SplitMaxTensors,
    Threads,
    comma_separated,
    gib,
    mib,
    print_json,
    split_limit,
    table,
)
from quantkit.errors import QuantkitError

if TYPE_CHECKING:
    from quantkit.files.imatrix import Imatrix
    from quantkit.quantize import Written
    from quantkit.recipe import Options, Plan, Recipe

_Type = Annotated[str | None, typer.Option(metavar="T", show_default=False)]


def quantize(
    source: Annotated[
        Path, typer.Argument(metavar="IN", help="A GGUF file, or any shard of a set.", show_default=False)
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The file to write.", show_default=False)],
    file_type: Annotated[
        str, typer.Argument(metavar="TYPE", help="File type, as Q4_K_M, its number, or COPY.", show_default=False)
    ],
    thread_count: Annotated[
        int | None, typer.Argument(metavar="THREADS", help="As --threads.", show_default=False)
    ] = None,
    imatrix: Annotated[Path | None, typer.Option(help="Importance matrix.", metavar="FILE")] = None,
    custom_q: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RULES", help="Rules 're=type,…', or a file of them. Repeatable; the first match decides."
        ),
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", help="A recipe; its rules come after those of --custom-q.")
    ] = None,
    pure: Annotated[bool, typer.Option("--pure", help="TYPE for every tensor, no mix.")] = False,
    output_tensor_type: _Type = None,
    token_embedding_type: _Type = None,
    ffn_gate_inp_type: _Type = None,
    attn_q_type: _Type = None,
    attn_k_type: _Type = None,
    attn_v_type: _Type = None,
    attn_qkv_type: _Type = None,
    attn_output_type: _Type = None,
    ffn_gate_type: _Type = None,
    ffn_down_type: _Type = None,
    ffn_up_type: _Type = None,
    leave_output_tensor: Annotated[
        bool, typer.Option("--leave-output-tensor", help="Keep output.weight as it is.")
    ] = False,
    allow_requantize: Annotated[
        bool, typer.Option("--allow-requantize", help="Also quantize tensors that are quantized already.")
    ] = False,
    ignore_imatrix_rules: Annotated[
        bool, typer.Option("--ignore-imatrix-rules", help="Allow very low-bit types without importance.")
    ] = False,
    include_weights: Annotated[
        list[str] | None, typer.Option(metavar="S", help="Use only imatrix entries whose name holds S. Repeatable.")
    ] = None,
    exclude_weights: Annotated[
        list[str] | None, typer.Option(metavar="S", help="Use no imatrix entry whose name holds S. Repeatable.")
    ] = None,
    effort: Annotated[
        str, typer.Option(metavar="E", help="What the search for codes may cost: fast, normal or best.")
    ] = "normal",
    override_kv: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=TYPE:VALUE", help="Set a metadata key; TYPE int, float, bool or str. Repeatable."),
    ] = None,
    repack: Annotated[
        bool, typer.Option("--repack", help="Interleave every tensor that can be, in the type that was decided.")
    ] = False,
    repack_pattern: RepackPattern = None,
    split_max_size: SplitMaxSize = None,
    split_max_tensors: SplitMaxTensors = None,
    keep_split: KeepSplit = False,
    strict: Annotated[bool, typer.Option("--strict", help="Take warnings about the plan for errors.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and write nothing.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show every tensor and why it has its type.")
    ] = False,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Quantize a GGUF file by file type, rules and flags.

    What decides a tensor's type, strongest first: --token-embedding-type and --output-tensor-type; the first matching
    rule of --custom-q and --recipe; --attn-q-type and its kin; the mix of TYPE; its default. Rows that do not fit a
    type fall back to a narrower one. Rules that do nothing are warned about; the output carries its recipe.
    --repack and --repack-pattern do in one pass what `quantkit repack` would do to the output; the pattern alone is
    enough. Types that are interleaved, as IQ4_K_R4, can also be asked for like any other.
    """
    import quantkit
    from quantkit.quantize import Override
    from quantkit.quantize import quantize as run
    from quantkit.recipe import plan
    from quantkit.types import effort_level

    if source.is_dir():
        raise QuantkitError(f"{source}: a directory; make a GGUF of it first: quantkit convert {source} model.gguf")
    effort_level(effort)  # refused before anything is read
    file = quantkit.open(source)
    matrix = _read_imatrix(imatrix, include_weights, exclude_weights)
    class_types = {
        "attn_q": attn_q_type, "attn_k": attn_k_type, "attn_v": attn_v_type, "attn_qkv": attn_qkv_type,
        "attn_output": attn_output_type, "ffn_gate": ffn_gate_type, "ffn_down": ffn_down_type, "ffn_up": ffn_up_type,
    }  # fmt: skip
    exact = (output_tensor_type, token_embedding_type, ffn_gate_inp_type)
    switches = (leave_output_tensor, allow_requantize, ignore_imatrix_rules, repack)
    options = _options(pure, exact, class_types, *switches, tuple(comma_separated(repack_pattern)))
    overrides = [Override.parse(text) for text in override_kv or []]
    size = split_limit(split_max_size, split_max_tensors, keep_split)
    made = plan(
        file.tensors.values(),
        file_type,
        _rules(custom_q, recipe),
        metadata=file.metadata,
        imatrix=matrix,
        options=options,
    )
    made.require_codecs()
    if strict:
        made.require_clean()
    if not json:
        print_plan(made, verbose)
    if dry_run:
        if json:
            print_json(made.to_json())
        return
    started = time.perf_counter()
    written = run(
        file,
        out,
        made,
        imatrix=matrix,
        imatrix_file=str(imatrix or ""),
        overrides=overrides,
        effort=effort,
        threads=threads or _positive(thread_count),
        split_max_bytes=size,
        split_max_tensors=split_max_tensors,
        keep_split=keep_split,
        progress=True,
    )
    _report(made, written, time.perf_counter() - started, json)


def _positive(threads: int | None) -> int | None:
    """Zero and less mean all CPUs, as in the reference."""
    return threads if threads and threads > 0 else None


def _read_imatrix(path: Path | None, include: list[str] | None, exclude: list[str] | None) -> Imatrix | None:
    if include and exclude:
        raise typer.BadParameter("--include-weights and --exclude-weights contradict each other")
    if path is None:
        if include or exclude:
            raise typer.BadParameter(
                "--include-weights and --exclude-weights filter an importance matrix: pass --imatrix"
            )
        return None
    from quantkit.files import imatrix

    matrix = imatrix.read(path)
    if include:
        matrix.entries = {k: v for k, v in matrix.entries.items() if any(s in k for s in include)}
    if exclude:
        matrix.entries = {k: v for k, v in matrix.entries.items() if not any(s in k for s in exclude)}
    return matrix


def _rules(custom_q: list[str] | None, named: str | None) -> Recipe:
    """The rules of all --custom-q in order, then those of --recipe."""
    from quantkit.recipe import Recipe, find, parse

    found = Recipe()
    for text in custom_q or []:
        found += parse(text, "--custom-q") if "=" in text else find(text)
    return found + find(named) if named else found


def _options(
    pure: bool,
    exact: tuple[str | None, ...],
    class_types: dict[str, str | None],
    leave: bool,
    again: bool,
    ignore_rules: bool,
    repack: bool,
    patterns: tuple[str, ...],
) -> Options:
    from quantkit import types
    from quantkit.recipe import Options

    output, embedding, router = (types.layout(name) if name else None for name in exact)
    chosen = {name: types.layout(t) for name, t in class_types.items() if t}
    return Options(pure, output, embedding, router, chosen, leave, again, ignore_rules, repack, patterns)


# ------------------------------------------------------------------------------------------------------------- printing


def print_plan(plan: Plan, verbose: bool = False) -> None:
    """Classes of tensors by type, what each rule did, warnings, sizes."""
    if verbose:
        each = [(t.name, "x".join(map(str, t.shape)), t.source.name, t.type.name, t.reason, mib(t.bytes_after))
                for t in plan.tensors]  # fmt: skip
        print(table(("tensor", "shape", "from", "to", "why", "size"), each, left=5), end="\n\n")
    print(table(("tensors", "from", "to", "why", "count", "size"), _classes(plan), left=4), end="\n\n")
    if plan.rules:
        rows = [(i, str(use.rule), len(use.matched), len(use.decided)) for i, use in enumerate(plan.rules, 1)]
        print(table(("rule", "regex=type", "matches", "decides"), rows, left=2), end="\n\n")
    for warning in plan.warnings:
        print(f"warning: {warning}")
    print(
        f"{_names(plan)}: {len(plan.tensors)} tensors, {gib(plan.bytes_before)} -> {gib(plan.bytes_after)}, "
        f"{plan.bits_per_weight:.3f} bits per weight"
    )


def _names(plan: Plan) -> str:
    """The file type asked for, and the one that the output names where that is another."""
    name, written = plan.file_type.name, plan.written_type.name
    return name if name == written else f"{name}, written as {written}"


def _classes(plan: Plan) -> list[tuple[Any, ...]]:
    """Tensors that differ only in their layer, source, type and reason, as one line each."""
    grouped: dict[tuple[str, str, str, str], list[int]] = defaultdict(list)
    for t in plan.tensors:
        name = re.sub(r"^blk\.\d+\.", "blk.*.", t.name)
        grouped[name, t.source.name, t.type.name, t.reason].append(t.bytes_after)
    return [(*key, len(sizes), mib(math.fsum(sizes))) for key, sizes in grouped.items()]


def _report(plan: Plan, written: Written, seconds: float, json: bool) -> None:
    if json:
        print_json(plan.to_json() | {"paths": written.paths, "size": written.size, "seconds": seconds})
        return
    for path in written.paths:
        print(f"wrote {path}")
    speed = plan.bytes_before / max(seconds, 1e-9) / 2**20
    print(f"{gib(written.size)} in {seconds:.1f} s, {speed:.0f} MiB/s of input")
