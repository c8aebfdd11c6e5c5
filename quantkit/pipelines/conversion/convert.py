"""Convert a Hugging Face directory to a GGUF: plan the output, then write it in small pieces.

    convert_checkpoint("SmolLM2-135M", "smollm2-bf16.gguf", "bf16")

`quantkit.convert` (`pipelines.api`) is the public function: it takes `ConvertOptions` and calls this one.
"""

from __future__ import annotations

import os

from quantkit.errors import UnknownNameError, UnsupportedError
from quantkit.formats.gguf import dialects
from quantkit.formats.pipeline import Progress
from quantkit.pipelines.conversion.plan import Conversion, plan_conversion
from quantkit.pipelines.output import filled_name, write_gguf
from quantkit.types import DIALECTS
from quantkit.types.base import LLAMA_CPP


def convert_checkpoint(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    outtype: str = "auto",
    *,
    pre: str | None = None,
    mtp: str = "auto",
    metadata: str | os.PathLike[str] | None = None,
    model_name: str | None = None,
    fuse_gate_up: bool = False,
    merge_lora: str | os.PathLike[str] | None = None,
    split_max_bytes: int | None = None,
    split_max_tensors: int | None = None,
    dry_run: bool = False,
    threads: int | None = None,
    progress: Progress | bool = False,
    dialect: str | None = None,
) -> Conversion:
    """Write the checkpoint in directory `source` as the GGUF `out`, or as shards of at most `split_max_bytes` or
    `split_max_tensors`.

    `out` may be a template (`filled_name`). `pre` names the pre-tokenizer if it is not recognised. `mtp` says whether
    MTP (multi-token prediction) layers are kept: "keep", "drop", or "auto" for the architecture's default. `metadata`,
    a JSON file, and `model_name` override `general.*` keys. `fuse_gate_up` writes gate and up of experts as one tensor.
    `merge_lora` is the directory of a PEFT adapter that is added to the weights.
    Image and audio encoders are skipped. The file appears under its name when it is complete. Types that the program of
    `dialect` does not read are refused. With `dry_run` everything is checked and nothing is written. A
    QuantkitError names the file, the tensor or the setting that cannot be converted.
    """
    conversion = plan_conversion(
        source, outtype, pre, mtp, metadata, model_name, fuse_gate_up=fuse_gate_up, merge_lora=merge_lora
    )
    refuse_foreign_specs(conversion, dialect)
    if not dry_run:
        paths = write_gguf(
            filled_name(out, source, conversion.outtype.name),
            conversion.metadata,
            conversion.specs,
            conversion.tasks,
            inputs=conversion.checkpoint.paths,
            split_max_bytes=split_max_bytes,
            split_max_tensors=split_max_tensors,
            threads=threads,
            progress=progress,
        )
        conversion.paths.extend(paths)
    return conversion


def refuse_foreign_specs(conversion: Conversion, dialect: str | None) -> None:
    """UnsupportedError for a tensor whose type the program does not read; the metadata get the key of the dialect.

    Without a dialect they get llama.cpp's if only that program reads a type.
    """
    if dialect is None:
        if any(spec.type.readers == (LLAMA_CPP,) for spec in conversion.specs):
            conversion.metadata.set(dialects.KEY, LLAMA_CPP, "str")
        return
    if dialect not in DIALECTS:
        raise UnknownNameError("dialect", dialect, DIALECTS)
    foreign = [spec for spec in conversion.specs if dialect not in spec.type.readers]
    if foreign:
        raise UnsupportedError(
            f"{conversion.source}: {foreign[0].name} and {len(foreign) - 1} more become {foreign[0].type.name}, which "
            f"--dialect {dialect} does not read; choose another --outtype, or drop --dialect"
        )
    conversion.metadata.set(dialects.KEY, dialect, "str")
