"""convert and quantize of a checkpoint of 2 GB on the Hub with --disk 300M, each killed once and resumed.

    python benchmarks/bench_hub.py [--folder DIR] [--disk 300M] [--shard 700M] [--save]

The Hub is a fake one on the loopback interface (tests/hub/fake.py). The folder needs 11 GB. Shards of 700 MB are larger
than the bound. The peak of the disk is that beside the output, of the cache and of the headers, measured ten times a
second. The bytes are compared with those of a run on the directory. Exit status 1 if a peak exceeds the bound or bytes
differ.
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
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import records
from benchmarks.records import Column, Table
from quantkit.cli.common.options import parse_size
from quantkit.formats.safetensors import CheckpointSpec, CheckpointWriter
from tests.archs.checkpoints import byte_level, write_tokenizer
from tests.hub.fake import FakeHub
from tests.hub.test_stream import used

TABLE = Table(
    "hub",
    "How much disk does a checkpoint on the Hub take while it is converted or quantized?",
    (
        Column("command"),
        Column("checkpoint", "checkpoint, MB", ",.0f"),
        Column("disk", "--disk"),
        Column("peak", "peak beside the output, MB", ".1f"),
        Column("killed", "killed after, s", ".1f"),
        Column("resumed", "resumed, s", ".1f"),
        Column("same", "bytes as from a directory"),
    ),
    "A llama of 1 B parameters in BF16, in three shards, on a fake Hub on the same machine. Each command is killed by "
    "SIGKILL and given again.",
)
COMMANDS = {"convert": [], "quantize": ["Q4_0"]}  # and what follows OUT
LINES = 60  # of the journal, after which a run is killed
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


class Peak:
    """The largest number of bytes that paths take together, as long as the context is open."""

    def __init__(self, out: Path, *folders: Path):
        self.out, self.folders, self.nbytes = out, folders, 0
        self._done, self._watcher = threading.Event(), threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._done.wait(0.1):
            beside = [path for path in self.out.iterdir() if "partial-hub" in path.name]
            self.nbytes = max(self.nbytes, sum(used(path) for path in (*beside, *self.folders)))

    def __enter__(self) -> Peak:
        self._watcher.start()
        return self

    def __exit__(self, *args: object) -> None:
        self._done.set()
        self._watcher.join()


def measure(name: str, source: Path, work: Path, disk: str) -> dict[str, Any]:
    """Kill a command on the Hub's checkpoint, resume it, and compare with the directory's."""
    out, temporary, cache = (work / folder for folder in ("out", "tmp", "hf"))
    for folder in (out, temporary, cache):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    made, local = out / "hub.gguf", out / "local.gguf"
    command = [sys.executable, "-m", "quantkit", name]
    with FakeHub() as hub, Peak(out, temporary, cache) as peak:
        hub.add("org/Llama-1B", source)
        environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1"}
        environment |= {"TMPDIR": str(temporary)}
        words = [*command, "hf://org/Llama-1B", str(made), *COMMANDS[name], "--disk", disk]
        started = time.monotonic()
        running = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL)
        journal = made.with_name(made.name + ".partial-job.journal")
        while running.poll() is None and not (journal.exists() and journal.read_bytes().count(b"\n") > LINES):
            time.sleep(0.05)
        assert running.poll() is None, f"{name} ended with status {running.poll()} before it was killed"
        running.kill()
        running.wait()
        killed, started = time.monotonic() - started, time.monotonic()
        subprocess.run(words, env=environment, stdout=subprocess.DEVNULL, check=True)
        resumed = time.monotonic() - started
    subprocess.run([*command, str(source), str(local), *COMMANDS[name]], check=True, stdout=subprocess.DEVNULL)
    size = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    return {"command": name, "checkpoint": size / 1e6, "disk": disk, "peak": peak.nbytes / 1e6, "killed": killed,
            "resumed": resumed, "same": filecmp.cmp(made, local, shallow=False)}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/quantkit-hub-bench"))
    parser.add_argument("--disk", default="300M")
    parser.add_argument("--shard", default="700M")
    records.add_option(parser)
    options = parser.parse_args()
    source = options.folder / "Llama-1B"
    if not source.exists():
        make(source, parse_size(options.shard, "--shard"))
    rows = []
    for name in COMMANDS:
        rows.append(measure(name, source, options.folder, options.disk))
        print(rows[-1], flush=True)
    records.save(TABLE, rows, options, rows)
    print(json.dumps({"bench": "hub", "rows": rows}))
    limit = parse_size(options.disk, "--disk") / 1e6
    return 0 if all(row["same"] and row["peak"] <= limit for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
