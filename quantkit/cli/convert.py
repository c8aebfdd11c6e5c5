"""`quantkit convert`: a Hugging Face directory to GGUF."""

from __future__ import annotations

import dataclasses
import os
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from quantkit.cli.common.cluster import Cluster, SharedOutput, check_cluster, connected, print_workers, worker_rows
from quantkit.cli.common.hub import Disk, KeepShards, is_on_hub
from quantkit.cli.common.llama_options import takes_llama_options
from quantkit.cli.common.options import (
    Json,
    MetadataFile,
    ModelName,
    MtpPolicy,
    SplitMaxSize,
    SplitMaxTensors,
    Threads,
    parse_size,
)
from quantkit.cli.common.output import gib, print_json, print_left_out, print_table, print_unfinished
from quantkit.cli.common.plan_options import Dialect
from quantkit.cli.common.positional import refuse_type
from quantkit.cli.common.progress_options import shows_progress
from quantkit.errors import UnsupportedError

if TYPE_CHECKING:
    from quantkit.pipelines.conversion.plan import Conversion
    from quantkit.pipelines.options import ConvertOptions


def _print_models(value: bool) -> None:
    """Print the architectures as config.json names them, for --print-supported-models."""
    if value:
        from quantkit import archs

        for arch in archs.all():
            print(f"{arch.name}: {', '.join(arch.hf)}")
        raise typer.Exit


@shows_progress
@takes_llama_options("use_temp_file", "no_lazy", "remote", "verbose", "vocab_only")
def convert(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="HF_DIR",
            help="Directory with config.json, tokenizer files and weights, or hf://ORG/NAME[@REVISION].",
            show_default=False,
        ),
    ],
    out: Annotated[
        str | None,
        typer.Argument(
            metavar="OUT.gguf",
            help="The output file; default: {name}-{FTYPE}.gguf in HF_DIR. {name} is the directory's name, {ftype} the "
            "type of matrices (bf16), {FTYPE} the same in capitals.",
            show_default=False,
        ),
    ] = None,
    outfile: Annotated[
        str | None, typer.Option(metavar="OUT.gguf", help="Same as the argument.", show_default=False)
    ] = None,
    outtype: Annotated[
        Literal["auto", "bf16", "f16", "f32", "q8_0", "stored"],
        typer.Option(
            help="Type of matrices; auto: the first 16-bit type of the checkpoint; stored: without loss, so float32 "
            "and NVFP4 stay, and other quantized matrices get the 16-bit type of their format.",
            case_sensitive=False,
        ),
    ] = "auto",
    split_max_size: SplitMaxSize = None,
    split_max_tensors: SplitMaxTensors = None,
    pre: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Value of tokenizer.ggml.pre, if the tokenizer is not recognised."),
    ] = None,
    mtp: MtpPolicy = "auto",
    fuse_gate_up: Annotated[
        bool,
        typer.Option(
            "--fuse-gate-up",
            "--fuse-gate-up-exps",
            help="Write gate and up of experts as one tensor, ffn_gate_up_exps; see fuse-gate-up.",
        ),
    ] = False,
    merge_lora: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Add a PEFT adapter (LoRA) to the weights.", show_default=False)
    ] = None,
    lora: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Convert this PEFT adapter (LoRA) for HF_DIR, instead of the model.", show_default=False
        ),
    ] = None,
    mmproj: Annotated[
        bool,
        typer.Option("--mmproj", help="Convert the image encoder alone, to a file that llama.cpp loads with --mmproj."),
    ] = False,
    disk: Disk = None,
    keep_shards: KeepShards = False,
    cluster: Cluster = None,
    shared_output: SharedOutput = False,
    metadata: MetadataFile = None,
    model_name: ModelName = None,
    dialect: Dialect = None,
    vision: Annotated[
        str,
        typer.Option(metavar="POLICY", help="Image and audio encoders: only drop is supported."),
    ] = "drop",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, show the plan and write nothing.")
    ] = False,
    threads: Threads = None,
    print_supported_models: Annotated[
        bool,
        typer.Option(
            "--print-supported-models", help="List the architectures and exit.", callback=_print_models, is_eager=True
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Convert a Hugging Face checkpoint to GGUF.

    Matrices get the outtype; norms, biases and vectors are f32. A float32 checkpoint becomes f16 unless you say
    --outtype f32. Memory use does not grow with the model's size. The output file appears only when it is complete.

    A checkpoint on the Hub is streamed: its tensors are fetched while others are converted, and removed from the disk
    when they are done. The hash of every file is checked. To resume an interrupted run, give the same command again.

    With --cluster, the workers of a dask cluster read HF_DIR and convert; OUT has the same bytes, and a run is resumed
    in the same way. Its workers must find HF_DIR under the same name, or reach the Hub.
    """
    from quantkit.pipelines import api
    from quantkit.pipelines.options import ConvertOptions

    check_cluster(cluster)
    if out is not None and outfile not in (None, out):
        raise typer.BadParameter(f"the output is given twice: {out} and --outfile {outfile}; drop one of them")
    target = outfile or out or ("" if is_on_hub(source) else f"{source}{os.sep}") + "{name}-{FTYPE}.gguf"
    refuse_type(target, "OUT.gguf", "the type of the matrices is --outtype")
    if vision != "drop":
        raise UnsupportedError(
            f"--vision {vision}: a model's file has no encoders; --mmproj writes the image encoder alone"
        )
    size = None if split_max_size is None else parse_size(split_max_size, "--split-max-size")
    started = time.monotonic()
    bound = None if disk is None else parse_size(disk, "--disk")
    options = ConvertOptions(
        pre, mtp, size, dry_run, threads, metadata, model_name, split_max_tensors, bound, keep_shards,
        fuse_gate_up, merge_lora, shared_output, dialect,
    )  # fmt: skip
    if mmproj:
        _convert_mmproj(source, str(target), outtype, options, cluster is not None or lora is not None, json)
        return
    if lora is not None:
        if cluster is not None:
            raise UnsupportedError("--lora converts a small adapter on this machine: remove --cluster")
        _convert_adapter(lora, source, outfile or out, outtype, options, json)
        return
    tell = (lambda line: None) if json else print
    try:
        with connected(cluster, tell) as client:
            done = api.convert(source, target, outtype, options, client=client, progress=True, on_message=tell)
    except BaseException:
        print_unfinished(Path(target))
        raise
    record = _record(done, time.monotonic() - started)
    if json:
        print_json("quantkit.convert/1", record)
        return
    print_workers(done.workers)
    rows = [(row["type"], row["tensors"], gib(row["bytes"])) for row in record["types"]]
    print_table(("type", "tensors", "size"), rows)
    print(
        f"{done.arch.name}, {record['parameters'] / 1e6:.2f} M parameters, {len(done.specs)} tensors, "
        f"{gib(done.nbytes)}, {8 * done.nbytes / done.n_params:.3f} bits per weight, "
        f"tokenizer {record['tokenizer']}"
    )
    print_left_out(done.left_out, done.warnings)
    if done.n_mtp_layers:
        print(f"kept: {done.n_mtp_layers} MTP (multi-token prediction) layer(s); `quantkit mtp` measures their drafts")
    if done.fallbacks:
        listed = ", ".join(done.fallbacks[:3]) + (", …" if done.fallbacks[3:] else "")
        print(
            f"warning: rows of {len(done.fallbacks)} tensor(s) are not a multiple of {done.outtype.block_size}, so "
            f"they are f16 instead of {done.outtype.name}: {listed}"
        )
    for path in done.paths:
        print(f"wrote {path} in {record['seconds']:.1f} s")


def _convert_mmproj(source: Path, out: str, outtype: str, options: ConvertOptions, others: bool, json: bool) -> None:
    """Write the image encoder of the checkpoint in `source`."""
    from quantkit.pipelines.conversion.mmproj import plan_mmproj
    from quantkit.pipelines.options import ConvertOptions

    if is_on_hub(source):
        raise UnsupportedError(
            f"{source}: --mmproj reads a directory; fetch it with `hf download ORG/NAME --local-dir DIR`"
        )
    own = dataclasses.replace(options, dry_run=False, threads=None, metadata=None, model_name=None)
    if others or own != ConvertOptions():
        raise UnsupportedError("--mmproj writes one file on this machine: leave out options of the language model")
    started = time.monotonic()
    job = plan_mmproj(source, outtype, options.metadata, options.model_name)
    name = out if not out.endswith("{name}-{FTYPE}.gguf") else out.replace("{name}", "mmproj-{name}")
    paths = [] if options.dry_run else job.write(name, threads=options.threads, progress=True)
    seconds, counts = time.monotonic() - started, Counter(spec.type.name for spec in job.specs)
    if json:
        record = {"projector": job.tower.projector, "tensors": len(job.specs), "types": counts, "paths": paths}
        record |= {"bytes": sum(s.nbytes for s in job.specs), "left_out": job.left_out, "warnings": job.warnings}
        print_json("quantkit.convert-mmproj/1", record | {"seconds": seconds})
        return
    kinds = ", ".join(f"{count} {name}" for name, count in counts.items())
    print(f"{job.tower.projector}: {len(job.specs)} tensors ({kinds}), {gib(sum(s.nbytes for s in job.specs))}")
    print_left_out({"unused": job.left_out} if job.left_out else {}, job.warnings)
    for path in paths:
        print(f"wrote {path} in {seconds:.1f} s")


def _convert_adapter(
    lora: Path, source: Path, out: str | None, outtype: str, options: ConvertOptions, json: bool
) -> None:
    """Write a PEFT adapter of the model in `source` as an adapter in GGUF."""
    from quantkit.pipelines.conversion.lora import adapter_type, plan_adapter
    from quantkit.pipelines.conversion.plan import plan_conversion
    from quantkit.pipelines.options import ConvertOptions
    from quantkit.pipelines.output import filled_name

    if is_on_hub(source):
        raise UnsupportedError(
            f"{source}: --lora reads a directory; fetch it with `hf download ORG/NAME --local-dir DIR`"
        )
    if dataclasses.replace(options, pre=None, dry_run=False, threads=None) != ConvertOptions():
        raise UnsupportedError(
            "--lora writes one adapter alone: leave out options of the model, other than --pre, --outtype and --threads"
        )
    kind = adapter_type(outtype)
    base = plan_conversion(source, pre=options.pre)
    made = plan_adapter(lora, base.checkpoint, list(base.pieces.values()), base.arch, kind)
    path = filled_name(out or lora / "{name}-{FTYPE}.gguf", lora, kind.name)
    paths = [] if options.dry_run else made.write(path, progress=True)
    if json:
        print_json("quantkit.convert-lora/1", {"paths": paths, "tensors": len(made.specs), "type": kind.name})
        return
    print(f"adapter of {len(made.specs) // 2} matrices, {kind.name}")
    for path in paths:
        print(f"wrote {path}")


def _record(done: Conversion, seconds: float) -> dict[str, Any]:
    counts, sizes = Counter(s.type.name for s in done.specs), Counter[str]()
    for spec in done.specs:
        sizes[spec.type.name] += spec.nbytes
    metadata = done.metadata
    return {
        "architecture": done.arch.name,
        "outtype": done.outtype.name,
        "parameters": done.n_params,
        "tensors": len(done.specs),
        "bytes": done.nbytes,
        "types": [{"type": name, "tensors": counts[name], "bytes": sizes[name]} for name in counts],
        "fallbacks": done.fallbacks,
        "left_out": done.left_out,
        "warnings": done.warnings,
        "nextn_predict_layers": done.n_mtp_layers,
        "tokenizer": f"{metadata['tokenizer.ggml.model']}/{metadata['tokenizer.ggml.pre']}",
        "paths": done.paths,
        "seconds": seconds,
    } | ({"workers": worker_rows(done.workers)} if done.workers else {})
