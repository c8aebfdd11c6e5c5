"""What leaving experts or layers out of a mixture of experts costs, and what it gains to choose them by saliency.

    python benchmarks/bench_prune.py --train TEXT --calibrate TEXT --text TEXT [TEXT …] [--keep 14 12 8]
        [--seeds 2] [--drop 1 2] [--chunks N] [--steps N] [--folder DIR] [--save]

Trains the small Qwen3-MoE of benchmarks/trained.py on --train, some minutes; --folder keeps it. Saliencies, the tokens
that each expert gets and the similarities of layers are measured on --calibrate. For each number of --keep, the experts
that stay are those of highest saliency (`quantkit saliency`), those that get the most tokens, or drawn from a seed;
--drop leaves out the layers that change their input least. All files are compared with the whole model over the same
tokens of --text, which is in neither of the other two: errors are those of means over chunks, of paired differences.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import quantkit
from benchmarks import records, trained
from benchmarks.records import Column, Table
from quantkit.evaluate.compare import CompareOptions
from quantkit.evaluate.comparison import Candidate, Comparison
from quantkit.evaluate.layer_similarity import layer_similarity
from quantkit.evaluate.saliency import measure
from quantkit.evaluate.statistics import Interval, Sample
from quantkit.evaluate.text import Chunks, chunked
from quantkit.formats import gguf
from quantkit.pipelines.prune import most_salient, plan_prune

SHAPE = "qwen3moe"
CONTEXT = trained.CONTEXT
EXPERTS, LAYERS = (trained.SHAPES[SHAPE][key] for key in ("num_experts", "num_hidden_layers"))
WHOLE, SALIENCY, TOKENS = "whole model", "saliency", "tokens"
TABLE = Table(
    "prune",
    "What do pruned experts and layers cost?",
    (
        Column("choice", "chosen by"),
        Column("experts", f"experts of {EXPERTS}"),
        Column("layers", f"layers of {LAYERS}"),
        Column("share", "routed to them, %", ".1f"),
        Column("megabytes", "MB", ".2f"),
        Column("kld", "KLD", ".5f"),
        Column("kld_error", "±", ".5f"),
        Column("ratio", "PPL / whole", ".4f"),
        Column("ratio_error", "±", ".4f"),
        Column("above", "KLD above saliency's", ".5f"),
        Column("above_error", "±", ".5f"),
    ),
)
Scores = Mapping[int, Sequence[float]]  # of each expert, by layer


def prepare(options: argparse.Namespace) -> tuple[trained.Training, Path]:
    """The trained model as a GGUF file; what exists is kept."""
    folder: Path = options.folder
    schedule = replace(trained.SCHEDULES[SHAPE], steps=options.steps)
    model, training = trained.as_gguf(SHAPE, options.train, folder, schedule)
    return training, model


def scores(path: Path, options: argparse.Namespace) -> tuple[dict[str, Scores], list[float]]:
    """Scores of experts by how they are chosen, and the similarity of each layer's input and output."""
    model = quantkit.load(path, n_ctx=CONTEXT)
    text = chunked(model.tokenizer, options.calibrate, CONTEXT, options.calibrate_chunks)
    found = measure(model, text)
    chosen: dict[str, Scores] = {
        SALIENCY: {layer: found.of_layer(layer).tolist() for layer in found.sums},
        TOKENS: {layer: tokens.tolist() for layer, tokens in found.tokens.items()},
    }
    for seed in range(options.seeds):
        rng = np.random.default_rng(seed)
        chosen[f"chance, seed {seed}"] = {layer: rng.random(EXPERTS).tolist() for layer in sorted(found.sums)}
    return chosen, layer_similarity(model, text)


def pruned(path: Path, options: argparse.Namespace) -> dict[Path, dict[str, Any]]:
    """The pruned files, each with what its row says of the choice."""
    chosen, similar = scores(path, options)
    source, found = gguf.open(path), {}
    for keep in options.keep:
        for choice, by_layer in chosen.items():
            out = path.with_name(f"experts-{keep}-{choice.replace(', ', '-').replace(' ', '-')}.gguf")
            stay = most_salient(by_layer, keep)
            plan_prune(source, stay).write(out)
            shares = [np.sum(np.take(n, stay[layer])) / np.sum(n) for layer, n in chosen[TOKENS].items()]
            found[out] = {"choice": choice, "experts": keep, "layers": LAYERS, "share": 100 * float(np.mean(shares))}
    for count in options.drop:
        dropped = sorted(np.argsort(-np.asarray(similar), kind="stable")[:count].tolist())
        out = path.with_name(f"layers-{LAYERS - count}.gguf")
        plan_prune(source, drop_layers=dropped).write(out)
        names = ", ".join(map(str, dropped))
        found[out] = {"choice": f"similarity: without {names}", "experts": EXPERTS, "layers": LAYERS - count}
    return found


def row(candidate: Candidate, made: Mapping[str, Any], best: Candidate | None, sample: Sample) -> dict[str, Any]:
    """The figures of a file, beside those of the file of as many experts chosen by saliency."""
    assert candidate.paired is not None
    kld, ln_ratio = (candidate.paired.figures[name] for name in ("kld", "ln_ratio"))
    ratio = float(np.exp(ln_ratio.value))
    found = {**made, "megabytes": candidate.size_bytes / 1e6, "kld": kld.value, "kld_error": kld.error, "ratio": ratio,
             "ratio_error": ratio * ln_ratio.error}  # fmt: skip
    if best is not None and candidate.divergence is not None and best.divergence is not None:
        above: Interval = sample.mean(candidate.divergence.kld - best.divergence.kld)
        found |= {"above": above.value, "above_error": above.error}
    return found


def rows_of(compared: Comparison, files: Mapping[Path, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The table: the whole model, then the files."""
    whole, *others = compared.candidates
    salient = {files[c.path]["experts"]: c for c in others if files[c.path]["choice"] == SALIENCY}
    found: list[dict[str, Any]] = [
        {"choice": WHOLE, "experts": EXPERTS, "layers": LAYERS, "megabytes": whole.size_bytes / 1e6}
    ]
    for candidate in others:
        made = files[candidate.path]
        best = salient.get(made["experts"]) if made["choice"] != SALIENCY and made["layers"] == LAYERS else None
        found.append(row(candidate, made, best, compared.sample))
        print("  ".join(f"{k} {v:.4f}" if isinstance(v, float) else f"{v}" for k, v in found[-1].items()), flush=True)
    return found


def by_frequencies(path: Path, options: argparse.Namespace) -> float:
    """The perplexity of --text by the frequencies of tokens in --train."""
    tokenizer = quantkit.load(path).tokenizer
    ids = tokenizer.encode(options.train.read_text(encoding="utf-8"), bos=False)
    counts = np.maximum(np.bincount(ids, minlength=trained.VOCABULARY), 1)
    texts: list[Chunks] = [chunked(tokenizer, text, CONTEXT, options.chunks) for text in options.text]
    scored = np.concatenate([text.inputs[:, CONTEXT // 2 + 1 :].ravel() for text in texts])
    return float(np.exp(-np.log(counts / counts.sum())[scored].mean()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--calibrate", type=Path, required=True)
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    parser.add_argument("--keep", type=int, nargs="+", default=[14, 12, 8], help="experts of each layer")
    parser.add_argument("--seeds", type=int, default=2, help="draws of experts")
    parser.add_argument("--drop", type=int, nargs="+", default=[1, 2], help="layers left out")
    parser.add_argument("--chunks", type=int, default=24, help="of each text")
    parser.add_argument("--calibrate-chunks", type=int, default=64)
    parser.add_argument("--steps", type=int, default=trained.SCHEDULES[SHAPE].steps)
    parser.add_argument("--folder", type=Path, default=Path("build/bench_prune"))
    records.add_option(parser)
    options = parser.parse_args()
    training, model = prepare(options)
    files = pruned(model, options)
    wanted = CompareOptions(ctx_size=CONTEXT, chunks=options.chunks, noise_floor="off")
    compared = quantkit.compare(model, list(files), options.text, wanted)
    rows = rows_of(compared, files)
    perplexity, without = compared.candidates[0].ppl.value, by_frequencies(model, options)
    if perplexity > without / 2:
        sys.exit(
            f"perplexity {perplexity:.0f}, by token frequencies {without:.0f}: too little was learned; more --steps"
        )
    used = trained.SHAPES[SHAPE]["num_experts_per_tok"]
    about = (
        f"A Qwen3-MoE of {LAYERS} layers with {EXPERTS} experts, of which a token uses {used}, f16, trained for "
        f"{training.steps} steps on a text of {training.tokens:,} tokens: perplexity {perplexity:.0f} on texts that it "
        f"was not trained on, {without:.0f} by token frequencies. Experts stay that have most saliency or most tokens, "
        "or by chance; the layers that change their input least go. KL divergence from the whole model and ratio of "
        f"perplexities over {compared.positions:,} tokens, exact numerics; ± is a standard error over chunks, of "
        "paired differences. Nothing was trained after pruning. Routed to them: the share of the router's choices, on "
        "the text of the saliencies, that went to the experts that stay."
    )
    records.save(replace(TABLE, about=about), rows, options)


if __name__ == "__main__":
    main()
