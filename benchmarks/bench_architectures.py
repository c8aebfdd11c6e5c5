"""What is known of each architecture: logits beside transformers' and ik_llama.cpp's, and sizes from config.json.

    python benchmarks/bench_architectures.py [--only gemma4,step35] [--save]

For each architecture a tiny random model of its EXAMPLE, in float32, 2 x 256 tokens; also of the VARIANTS, whose blocks
no EXAMPLE has. Differences are the largest of log-probabilities from transformers:

    exact     exact numerics, a prompt
    prompt    fast numerics, a prompt; steps: token by token. Both as compiled plans, or the reason why not
    plan      whether tensors and sizes from config.json alone are those of the converted file
    ik        ik_llama.cpp from transformers, for 8 of 10 tokens, as its cache is f16 and turns near ties of experts;
              "-" where it does not load the model or ends its process

Speeds of architectures are in bench_model.py.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import records
from benchmarks.records import Column, Table
from tests.archs.checkpoints import GEMMA_E, log_probabilities, tiny

TABLE = Table(
    "architectures",
    "What is known of each architecture?",
    (
        Column("arch", "architecture"),
        Column("hf", "class"),
        Column("exact", "exact", ".0e"),
        Column("prompt", "compiled, prompt", ".0e"),
        Column("steps", "compiled, steps", ".0e"),
        Column("plan", "size from config.json"),
        Column("ik", "ik_llama.cpp", ".0e"),
    ),
    "Largest difference of log-probabilities from transformers, tiny random models, 512 tokens; of ik_llama.cpp for 8 "
    "of 10 tokens, - where it does not run the model. A difference of 0.1 or more is ik_llama.cpp's alone: it leaves "
    "out a part of the model, or its f16 cache turns near ties. All convert, and all but step35 export.",
)
# By name in the table: the architecture, and what differs from its EXAMPLE.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {"gemma4 E2B": ("gemma4", GEMMA_E)}
TOKENS = np.random.default_rng(3).integers(2, 320, (2, 256))


def measure(name: str, directory: Path) -> dict[str, Any]:
    """The figures of one architecture but ik_llama.cpp's; what transformers computes goes into wanted.npy."""
    import torch

    import quantkit
    from quantkit import archs
    from quantkit.formats import gguf
    from quantkit.pipelines.conversion.convert import convert_checkpoint
    from quantkit.recipe import from_config, read_config

    arch, changes = VARIANTS.get(name, (name, {}))
    reference = tiny(directory / "hf", arch=arch, **changes)
    path = directory / "m.gguf"
    convert_checkpoint(directory / "hf", path, "f32")
    with torch.no_grad():
        wanted = log_probabilities(reference(torch.tensor(TOKENS)).logits.numpy())
    np.save(directory / "wanted.npy", wanted[0])
    exact, fast = quantkit.load(path), quantkit.load(path, numerics="fast", cache_type="f32")
    cache = fast.new_cache(TOKENS.shape[1])
    steps = np.concatenate([fast.forward([token], cache) for token in TOKENS[0]])
    planned = {spec.name: spec.shape for spec in from_config(read_config(directory / "hf"))[0]}
    stored = {tensor.name: tensor.shape for tensor in gguf.open(path).tensors.values()}

    def worst(logits: np.ndarray, expected: np.ndarray) -> float:
        return float(np.abs(log_probabilities(logits) - expected).max())

    return {
        "arch": name,
        "hf": archs.get(arch).hf[0],
        "exact": max(worst(exact.logits(tokens), expected) for tokens, expected in zip(TOKENS, wanted)),
        "prompt": fast.fallback_reason or worst(fast.logits(TOKENS[0]), wanted[0]),
        "steps": fast.fallback_reason or worst(steps, wanted[0]),
        "plan": "equal" if planned == stored else "differs",
    }


def of_the_reference(name: str, directory: Path) -> float:
    """The difference of ik_llama.cpp, in a process that it may end."""
    from quantkit.formats import gguf
    from tests.conformance import libllama

    path = directory / "m.gguf"
    arch = VARIANTS.get(name, (name,))[0]
    grouped = int(gguf.open(path).metadata.get(f"{arch}.expert_group_count", 1)) > 1
    with libllama.Llama(path, n_ctx=256, threads=1, grouped_experts=grouped) as llama:
        theirs = log_probabilities(llama.logits(TOKENS[0]))
    return float(np.quantile(np.abs(theirs - np.load(directory / "wanted.npy")).max(1), 0.8))


def run(step: str, name: str, directory: Path) -> Any:
    """What a step prints as its last line; None if its process fails."""
    words = [sys.executable, __file__, "--step", step, "--only", name, "--directory", str(directory)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "2"})
    if done.returncode and step == "measure":
        raise SystemExit(f"{name}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None


def main() -> None:
    from quantkit import archs

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names separated by commas; all without")
    parser.add_argument("--step", choices=("measure", "reference"), help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    records.add_option(parser)
    options = parser.parse_args()
    names = options.only.split(",") if options.only else sorted([arch.name for arch in archs.all()] + [*VARIANTS])
    if options.step:
        print(json.dumps((measure if options.step == "measure" else of_the_reference)(names[0], options.directory)))
        return
    rows = []
    for name in names:
        with tempfile.TemporaryDirectory() as directory:
            row = run("measure", name, Path(directory))
            found = run("reference", name, Path(directory))
        rows.append(row | {"ik": "-" if found is None else found})
        print(" ".join(f"{value:.1e}" if isinstance(value, float) else str(value) for value in rows[-1].values()))
    records.save(TABLE, rows, options)


if __name__ == "__main__":
    main()
