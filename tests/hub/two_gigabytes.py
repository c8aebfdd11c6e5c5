"""By hand: a checkpoint of 2 GB from the fake Hub with --disk 300M, killed once and resumed.

    python -m tests.hub.two_gigabytes FOLDER [--disk 300M] [--shard 700M]

FOLDER needs 7 GB. Shards of 700 MB are larger than the bound. It prints the peak of the disk beside the output, of the
cache and of the headers, measured ten times a second, and the time; then it compares the bytes with those of a run on
the directory. Exit status 1 if the peak exceeds the bound or the bytes differ.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np

from quantkit.cli.common.options import parse_size
from quantkit.formats.safetensors import CheckpointSpec, CheckpointWriter
from tests.archs.checkpoints import byte_level, write_tokenizer
from tests.hub.fake import FakeHub
from tests.hub.test_stream import used

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192,
          "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "num_hidden_layers": 16,
          "vocab_size": 320, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
          "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16"}  # fmt: skip


def make(directory: Path, shard: int) -> None:
    """Write a llama of 1 B parameters in BF16, with random weights."""
    directory.mkdir(parents=True)
    n, ff = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    shapes = {"model.embed_tokens.weight": (320, n), "lm_head.weight": (320, n), "model.norm.weight": (n,)}
    for i in range(int(CONFIG["num_hidden_layers"])):  # type: ignore[call-overload]
        layer = f"model.layers.{i}."
        shapes |= {f"{layer}self_attn.{x}_proj.weight": (n if x in "qo" else 512, n) for x in "qkvo"}
        shapes |= {f"{layer}mlp.{x}_proj.weight": (ff, n) for x in ("gate", "up")}
        shapes |= {f"{layer}mlp.down_proj.weight": (n, ff)}
        shapes |= {f"{layer}{x}_layernorm.weight": (n,) for x in ("input", "post_attention")}
    specs = [CheckpointSpec(name, shape, "BF16") for name, shape in sorted(shapes.items())]  # type: ignore[arg-type]
    rng = np.random.default_rng(1)
    with CheckpointWriter(directory, specs, {"format": "pt"}, max_shard_bytes=shard) as writer:
        for spec in specs:
            x = rng.standard_normal(spec.nbytes // 2, np.float32) * np.float32(0.02)
            writer.write(spec.name, (x.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8))
    (directory / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    write_tokenizer(directory, byte_level(320), bos_token="<|begin|>", eos_token="<|end|>")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--disk", default="300M")
    parser.add_argument("--shard", default="700M")
    options = parser.parse_args()
    work = options.folder / "two-gigabytes"
    source, out, temporary = work / "Llama-1B", work / "out", work / "tmp"
    if not source.exists():
        make(source, parse_size(options.shard, "--shard"))
    shutil.rmtree(out, ignore_errors=True)
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.rmtree(work / "hf", ignore_errors=True)
    for folder in (out, temporary):
        folder.mkdir()
    peak = 0
    with FakeHub() as hub:
        hub.add("org/Llama-1B", source)
        environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(work / "hf"), "HF_HUB_DISABLE_XET": "1"}
        environment |= {"TMPDIR": str(temporary)}
        command = [sys.executable, "-m", "quantkit", "quantize", "hf://org/Llama-1B", str(out / "hub.gguf"), "Q4_0"]
        command += ["--disk", options.disk]
        done = threading.Event()

        def watch() -> None:
            nonlocal peak
            while not done.wait(0.1):
                beside = [path for path in out.iterdir() if "partial-hub" in path.name]
                peak = max(peak, sum(used(path) for path in (*beside, temporary, work / "hf")))

        watcher = threading.Thread(target=watch)
        watcher.start()
        started = time.monotonic()
        running = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
        journal = out / "hub.gguf.partial-job.journal"
        while running.poll() is None and not (journal.exists() and journal.read_bytes().count(b"\n") > 60):
            time.sleep(0.05)
        print(f"killed after {time.monotonic() - started:.1f} s, exit status {running.poll()}")
        running.kill()
        running.wait()
        started = time.monotonic()
        finished = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
        print(finished.stdout[-1500:], f"resumed: {time.monotonic() - started:.1f} s, status {finished.returncode}")
        done.set()
        watcher.join()
    subprocess.run([*command[:4], str(source), str(out / "local.gguf"), "Q4_0"], check=True, stdout=subprocess.DEVNULL)
    size = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    same = filecmp.cmp(out / "hub.gguf", out / "local.gguf", shallow=False)
    print(f"checkpoint {size / 1e6:.0f} MB, --disk {options.disk}, peak {peak / 1e6:.1f} MB, same bytes: {same}")
    return 0 if same and peak <= parse_size(options.disk, "--disk") else 1


if __name__ == "__main__":
    raise SystemExit(main())
