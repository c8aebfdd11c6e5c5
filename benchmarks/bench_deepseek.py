"""Convert an FP8 checkpoint with DeepSeek-V3's row sizes and three layers to BF16, and run it with each -mla mode.

    python benchmarks/bench_deepseek.py [--experts 16] [--tokens 136] [--directory DIR] [--threads 2]

One dense layer of 18432 and two layers with experts of 2048 and a shared expert; 128 heads, latents of 512 and 1536,
random FP8 in blocks of 128 x 128. 16 experts take about 9 GB of disk. `convert` runs as a process of its own, and its
peak memory (VmHWM) includes pages of mapped files. Then a prompt of --tokens runs as one batch (-mla 2 and 3 expand
the latents from 128 tokens on), followed by four single tokens. Numerics are exact. Fails if log-probabilities of -mla
1, 2 or 3 differ from those of -mla 0 by 1e-3 or more. The last line is JSON, times in seconds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import quantkit
from benchmarks import checkpoints, records
from benchmarks.records import Column, Table

TABLE = Table(
    "deepseek",
    "Do DeepSeek V3's row sizes work, and how long do they take?",
    (Column("step"), Column("seconds", "seconds", ".1f"), Column("difference", "largest difference", ".1e")),
    "The difference is that of log-probabilities from `-mla 0`.",
)

COMMAND = (
    "import sys; from quantkit.cli import main; status = main(); "
    "print(*[line for line in open('/proc/self/status') if line.startswith('VmHWM')]); sys.exit(status)"
)


def config(experts: int) -> dict[str, Any]:
    return {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 1024,
        "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 3,
        "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": experts,
        "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5,
        "norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "n_group": 8, "topk_group": 4,
        "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "attention_bias": False,
        "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0,
                         "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1},
        "hidden_act": "silu", "tie_word_embeddings": False,
    }  # fmt: skip


def run(path: Path, mla: int, tokens: list[int], threads: int | None) -> tuple[np.ndarray, float]:
    """Log-probabilities of a prompt in one batch and of four single tokens; and the seconds."""
    model = quantkit.load(path, mla=mla, threads=threads)
    started = time.perf_counter()
    cache = model.new_cache(len(tokens))
    parts = [model.forward(tokens[:-4], cache), *(model.forward([token], cache) for token in tokens[-4:])]
    x = np.concatenate(parts).astype(np.float64)
    x -= x.max(1, keepdims=True)
    return x - np.log(np.exp(x).sum(1, keepdims=True)), time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=16, help="a multiple of 8, at least 16")
    parser.add_argument("--tokens", type=int, default=136)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--directory", type=Path)
    records.add_option(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        source, out = Path(directory) / "hf", Path(directory) / "m.gguf"
        stored = checkpoints.write(source, config(options.experts), "FP8", 10**9)
        started = time.perf_counter()
        flags = [] if options.threads is None else ["--threads", str(options.threads)]
        done = subprocess.run(
            [sys.executable, "-c", COMMAND, "convert", str(source), str(out), "--outtype", "bf16", *flags],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        found: dict[str, Any] = {
            "checkpoint_bytes": stored,
            "gguf_bytes": out.stat().st_size,
            "convert_seconds": round(time.perf_counter() - started, 1),
            "convert_peak_mib": int(done.stdout.split()[-2]) >> 10,
        }
        print(f"{stored / 1e9:.2f} GB FP8 -> {found['gguf_bytes'] / 1e9:.2f} GB BF16 in {found['convert_seconds']} s, "
              f"peak {found['convert_peak_mib']} MiB")  # fmt: skip
        tokens = np.random.default_rng(2).integers(0, 1024, options.tokens + 4).tolist()
        wanted = None
        for mla in range(4):
            logits, seconds = run(out, mla, tokens, options.threads)
            wanted = logits if wanted is None else wanted
            worst = float(np.abs(logits - wanted).max())
            found |= {f"mla{mla}_seconds": round(seconds, 1), f"mla{mla}_difference": worst}
            print(f"-mla {mla}: {len(tokens)} tokens in {seconds:.1f} s, largest difference from -mla 0: {worst:.2g}")
            assert np.isfinite(logits).all()
            assert worst < 1e-3
        rows = [{"step": f"convert {stored / 1e9:.2f} GB of FP8 to BF16", "seconds": found["convert_seconds"]}]
        rows += [{"step": f"{len(tokens)} tokens, `-mla {mla}`", "seconds": found[f"mla{mla}_seconds"],
                  "difference": found[f"mla{mla}_difference"]} for mla in range(4)]  # fmt: skip
        records.save(TABLE, rows, options, found)
        print(json.dumps(found))


if __name__ == "__main__":
    main()
