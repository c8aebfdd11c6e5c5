"""Write a GGUF file with tasks that each compute and write a piece of a tensor: convert, repack and convert-mla.

Several threads run the tasks. Each writes its piece at its offset, so no thread waits for another. The output is not
synced to disk before it gets its name, because a sync takes as long as the rest of the run and the file can be
regenerated from its input; `cp` does not sync either (`formats/stream.py`). `quantize` takes longer and its output is
synced: it has its own loop.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from quantkit.errors import OptionError
from quantkit.formats.gguf import TensorSpec, Writer
from quantkit.formats.gguf.writer import refuse_outputs
from quantkit.formats.pipeline import Progress, spread

WriteTask = Callable[[], int]  # computes and writes a piece; returns its size in bytes


def write_gguf(
    out: str | os.PathLike[str],
    metadata: Mapping[str, object],
    specs: Sequence[TensorSpec],
    tasks: Callable[[Writer], Iterable[WriteTask]],
    *,
    inputs: Sequence[Path],
    split_max_bytes: int | None = None,
    split_max_tensors: int | None = None,
    shards: Sequence[int] | None = None,
    threads: int | None = None,
    progress: Progress | bool = False,
) -> list[Path]:
    """Write the tensors `specs` to `out` and return the paths of the files, which appear when they are complete.

    tasks   called with the writer; the tasks that it returns write every byte of every tensor once, in any order
    inputs  the files that the tasks read; QuantkitError if the output would replace one of them
    shards  number of tensors in each shard; with it, or with a limit, the paths are `PREFIX-00001-of-0000N.gguf`
    """
    total = sum(spec.nbytes for spec in specs)
    with Writer(out, metadata, specs, split_max_bytes, split_max_tensors, shards, durable=False) as writer:
        refuse_outputs(writer.paths, inputs)
        spread(tasks(writer), total, threads=threads, progress=progress)
        return list(writer.paths)


def filled_name(out: str | os.PathLike[str], source: str | os.PathLike[str], file_type: str | None = None) -> Path:
    """The name of an output: in `out`, {name} is the source's name, {ftype} and {outtype} are the type of its matrices.

    The name of a file is without .gguf and the number of a shard. {FTYPE} and {OUTTYPE} are the type in capitals, as in
    convert_hf_to_gguf.py. OptionError for another word in braces, and for a type where an output has none of its own.
    """
    name = re.sub(r"(-\d{5}-of-\d{5})?\.gguf$", "", Path(os.fspath(source)).resolve().name)
    values = {"name": name}
    if file_type is not None:
        values |= {key: file_type.lower() for key in ("ftype", "outtype")}
        values |= {key: file_type.upper() for key in ("FTYPE", "OUTTYPE")}
    text = os.fspath(out)
    for word in re.findall(r"\{(\w+)\}", text):
        if word not in values:
            known = ", ".join(f"{{{key}}}" for key in values)
            raise OptionError(f"output {text}: {{{word}}} is not a placeholder; known: {known}")
    return Path(re.sub(r"\{(\w+)\}", lambda match: values[match[1]], text))
