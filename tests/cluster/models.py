"""Small inputs, and what tests of clusters do with them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import quantkit
from quantkit import recipe, types
from quantkit.formats import gguf, imatrix
from quantkit.formats.gguf import TensorSpec, Writer
from quantkit.pipelines.quantize import Written, quantize_with_plan

if TYPE_CHECKING:
    from distributed import Client

EXPERTS, ROWS, COLUMNS = 3, 48, 256
TYPES = ("q4_0", "q8_0", "q4_K", "q6_K", "iq2_xxs", "iq3_s", "iq4_nl", "iq2_ks", "iq4_k", "iq2_kt", "iq4_kt", "mxfp4",
         "iq4_k_r4")  # fmt: skip
RULES = ",".join(f"blk\\.{i}\\.={name}" for i, name in enumerate(TYPES))


def write_model(path: Path, layers: int = len(TYPES), rows: int = ROWS, columns: int = COLUMNS) -> Path:
    """A matrix and experts in each layer, in f32, and a norm."""
    shapes: dict[str, tuple[int, ...]] = {"output_norm.weight": (columns,)}
    for i in range(layers):
        shapes[f"blk.{i}.attn_q.weight"] = (rows, columns)
        shapes[f"blk.{i}.ffn_up_exps.weight"] = (EXPERTS, ROWS, columns)
    specs = [TensorSpec(name, shape, types.get("f32")) for name, shape in shapes.items()]
    metadata = gguf.Metadata({"general.architecture": "llama"})
    metadata.set("llama.block_count", layers, "u32")
    with Writer(path, metadata, specs) as writer:
        for i, spec in enumerate(specs):
            x = np.random.default_rng(i).standard_normal(spec.shape, np.float32)
            writer.write(spec.name, x.reshape(-1).view(np.uint8))
    return path


def importance(layers: int = len(TYPES)) -> imatrix.Imatrix:
    """Of matrices one, of experts one each."""
    rng, entries = np.random.default_rng(1), {}
    for i in range(layers):
        for name, n in (("attn_q", 1), ("ffn_up_exps", EXPERTS)):
            values = rng.random((1, n * COLUMNS), np.float32)
            entries[f"blk.{i}.{name}.weight"] = imatrix.Entry(values, np.ones(1, np.int64), 1)
    return imatrix.Imatrix(entries, 1, "text")


def make(
    model: Path,
    out: Path,
    client: Client | None = None,
    rules: str = "",
    target: str = "Q8_0",
    matrix: imatrix.Imatrix | None = None,
    **options: Any,
) -> Written:
    """Quantize a file, on a cluster or here."""
    file = quantkit.open(model)
    plan = recipe.plan(file.tensors.values(), target, recipe.parse(rules), metadata=file.metadata, imatrix=matrix)
    return quantize_with_plan(file, out, plan, imatrix=matrix, threads=1, client=client, **options)


def contents(*paths: Path) -> list[bytes]:
    return [path.read_bytes() for path in paths]
