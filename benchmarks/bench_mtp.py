"""What quantizing MTP (multi-token prediction) layers costs: accepted tokens and KL divergence of their drafts.

    python benchmarks/bench_mtp.py --train TEXT --calibrate TEXT --text TEXT [TEXT …] [--chunks N]
        [--types Q8_0 Q4_K IQ4_KS] [--folder DIR] [--save]

Trains the small model of benchmarks/trained_mtp.py on --train, some minutes; --folder keeps it. Its MTP layer is
written alone and quantized to each type, all matrices alike, with an importance matrix over --calibrate. The trunk,
embedding and output stay bf16, so that only the layer differs. --text is in neither of the other two. From the second
half of each chunk, DRAFT tokens are drafted at each position; see quantkit/evaluate/mtp.py for the figures.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import quantkit
from benchmarks import records, trained_mtp
from benchmarks.records import Column, Table
from quantkit.evaluate.mtp import Drafting, Drafts, measure
from quantkit.evaluate.text import Chunks, chunked
from quantkit.formats import gguf
from quantkit.pipelines.mtp import plan_head
from quantkit.runtime.mtp import MtpHead

CONTEXT, DRAFT = 256, 3
TABLE = Table(
    "mtp",
    "What does quantizing an MTP layer cost?",
    (
        Column("type"),
        Column("bits", "bits/weight", ".2f"),
        Column("first", "1st token accepted, %", ".2f"),
        Column("second", "first 2, %", ".2f"),
        Column("length", f"mean length of {DRAFT}", ".4f"),
        Column("greedy", "the same, own text", ".4f"),
        Column("overlap", "accepted at T=1, %", ".2f"),
        Column("kld", "KLD", ".5f"),
    ),
    "",
)


def prepare(options: argparse.Namespace) -> tuple[trained_mtp.MtpTraining, Path, Path]:
    """The trained model in bf16, and its MTP layer alone; what exists is kept."""
    folder: Path = options.folder
    training = trained_mtp.train(options.train, folder / "hf", replace(trained_mtp.SCHEDULE, steps=options.steps))
    model, head = folder / "bf16.gguf", folder / "head-bf16.gguf"
    if not model.exists():
        quantkit.convert(folder / "hf", model, "bf16", quantkit.ConvertOptions(mtp="keep"))
    if not head.exists():
        plan_head(gguf.open(model)).write(head)
    matrix = folder / "imatrix.gguf"
    if not matrix.exists():
        wanted = quantkit.ImatrixOptions(no_ppl=True, ctx_size=CONTEXT, chunks=options.calibrate_chunks)
        quantkit.imatrix(model, options.calibrate, matrix, wanted)
    return training, model, head


def quantized(head: Path, kind: str) -> Path:
    """The file of the MTP layer with all its matrices of a type; "A, eh_proj B" gives that one another."""
    out = head.with_name(f"head-{kind.replace(', ', '-').replace(' ', '-')}.gguf")
    name, _, other = kind.partition(", eh_proj ")
    rules = [f"nextn\\.eh_proj={other}"] if other else []
    rules += ["token_embd=bf16", f"^blk={name}"]
    options = quantkit.QuantizeOptions(imatrix=head.with_name("imatrix.gguf"), custom_q=[",".join(rules)])
    quantkit.quantize(head, out, "Q8_0", options)
    return out


def bits(path: Path) -> float:
    """Bits per weight of the layer's matrices."""
    mine = [t for t in gguf.open(path).tensors.values() if t.name.startswith("blk.") and len(t.shape) > 1]
    return 8 * sum(t.nbytes for t in mine) / sum(int(np.prod(t.shape)) for t in mine)


def drafts(drafting: Drafting, base: Drafting, texts: list[Chunks], greedy: bool) -> Drafts:
    """The figures over all texts together."""
    found = [measure(drafting, text, steps=DRAFT, base=base, greedy=greedy) for text in texts]
    agrees, overlap, kld = (np.concatenate([getattr(x, name) for x in found]) for name in ("agrees", "overlap", "kld"))
    return Drafts(agrees, overlap, kld, np.concatenate([x.same_top for x in found if x.same_top is not None]), greedy)


def row(kind: str, path: Path, base: Drafting, texts: list[Chunks]) -> dict[str, Any]:
    """The figures of a head of a type."""
    drafting = Drafting(base.model, MtpHead(base.model, gguf.open(path)))
    own, written = (drafts(drafting, base, texts, greedy) for greedy in (False, True))
    first, second = own.of_step(0), own.of_step(1)
    made = {
        "type": kind, "bits": bits(path), "first": 100 * first["accepted"].value,
        "second": 100 * second["accepted"].value, "length": own.length(DRAFT).value,
        "length_error": own.length(DRAFT).error, "greedy": written.length(DRAFT).value,
        "greedy_error": written.length(DRAFT).error, "overlap": 100 * first["overlap"].value,
        "kld": first["kld"].value, "kld_error": first["kld"].error, "positions": len(own.agrees),
    }  # fmt: skip
    print("  ".join(f"{key} {value:.5f}" if isinstance(value, float) else f"{value}" for key, value in made.items()),
          flush=True)  # fmt: skip
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--calibrate", type=Path, required=True)
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    parser.add_argument("--types", nargs="+", default=["Q8_0", "Q4_K", "IQ4_KS", "IQ3_K", "IQ2_K",
                                                       "IQ2_K, eh_proj Q8_0"])  # fmt: skip
    parser.add_argument("--chunks", type=int, default=16, help="of each text")
    parser.add_argument("--calibrate-chunks", type=int, default=64)
    parser.add_argument("--steps", type=int, default=trained_mtp.SCHEDULE.steps)
    parser.add_argument("--folder", type=Path, default=Path("build/bench_mtp"))
    records.add_option(parser)
    options = parser.parse_args()
    training, path, head = prepare(options)
    model = quantkit.load(path, n_ctx=CONTEXT)
    base = Drafting(model, MtpHead(model))
    texts = [chunked(model.tokenizer, text, CONTEXT, options.chunks) for text in options.text]
    rows = [row("BF16", head, base, texts)]
    rows += [row(kind, quantized(head, kind), base, texts) for kind in options.types]
    about = (
        f"A DeepSeek-V3 of 4 layers with one MTP layer, trained for {training.steps} steps on {training.tokens:,} "
        f"tokens (losses {training.loss:.2f} and, of the next but one, {training.mtp_loss:.2f} nats; by token "
        f"frequencies {training.unigram:.2f}). The trunk stays bf16, the matrices of the MTP layer are quantized with "
        f"an importance matrix. {rows[0]['positions']:,} positions of texts that were used for neither; standard "
        f"errors of a length {rows[0]['length_error']:.4f}, on text that the trunk writes "
        f"{rows[0]['greedy_error']:.4f}."
    )
    records.save(replace(TABLE, about=about), rows, options)


if __name__ == "__main__":
    main()
