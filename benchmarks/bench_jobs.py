"""Quantize an FP8 checkpoint directly; interrupt and resume it; change one rule; measure the time of hashing.

    python benchmarks/bench_jobs.py [--size 6] [--small 0.3] [--kills 20] [--detour] [--threads 2] [--directory DIR]

The checkpoint is random: DeepSeek V3's shapes in two layers, one of them dense, with as many experts as give --size GB
(10^9 bytes), F8_E4M3 codes of normal weights with a random scale for each 128 x 128. It is quantized to IQ4_K with
IQ3_K for ffn_gate_exps and ffn_up_exps, and q8_0 for attention and shared experts. The process is sampled twenty times
a second:

    anonymous  peak of its own memory (RssAnon of /proc/PID/status)
    mapped     peak of resident pages of mapped files (RssFile): the checkpoint, which the system may evict, the program
               and its libraries
    peak       peak of both together, as counted by the kernel (VmHWM)
    temporary  files next to the output during the run, and in its TMPDIR

--detour also converts the checkpoint to BF16, quantizes that and compares the files, which takes three times its size
of disk.

A checkpoint of --small GB is interrupted: SIGKILL at a random moment, then the same command again. "done" is the number
of tensors in the journal after the kill, "resumed" the number that the second run reports; the outputs are compared
with that of an uninterrupted run. Then one rule is changed, and the file is written again with --partial-requant.

The time of hashing is the CPU time of a run compared with one without hashes, medians of --repeat. The last line is
JSON.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import records
from benchmarks.records import Column, Table
from quantkit.formats.safetensors import CheckpointSpec, CheckpointWriter
from quantkit.pipelines import resume

TABLE = Table(
    "jobs",
    "What do interrupted and repeated jobs cost?",
    (Column("what"), Column("result")),
    "A checkpoint with DeepSeek V3's layout in FP8 to IQ4_K and IQ3_K.",
)
RULES = r"ffn_down_exps=iq4_k,ffn_(gate|up)_exps=iq3_k,(attn|shexp|token_embd|^output\.)=q8_0"
OTHER_RULES = RULES.replace("ffn_down_exps=iq4_k", "ffn_down_exps=iq5_k")
VOCABULARY = 16384
BLOCK = 128
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "torch_dtype": "bfloat16",
    "vocab_size": VOCABULARY, "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_hidden_layers": 2, "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5,
    "norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "n_group": 1, "topk_group": 1,
    "num_nextn_predict_layers": 0, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "attention_bias": False, "hidden_act": "silu", "tie_word_embeddings": False,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                            "weight_block_size": [BLOCK, BLOCK]},
}  # fmt: skip
# The same layout with smaller sizes, for repeated runs.
SMALL = {"hidden_size": 2048, "intermediate_size": 4096, "moe_intermediate_size": 1024, "num_attention_heads": 16,
         "num_key_value_heads": 16, "q_lora_rank": 768, "vocab_size": 2048}  # fmt: skip
RUN = "import sys; from quantkit.cli import main; sys.exit(main())"
RUN_WITHOUT_HASHES = f"from quantkit.formats import provenance; provenance.of_piece = lambda data: bytes(32); {RUN}"


# ------------------------------------------------------------------------------------------------------- the checkpoint


def matrices(config: dict[str, Any]) -> Iterator[tuple[str, int, int]]:
    """Names and shapes of the FP8 matrices."""
    n, heads = config["hidden_size"], config["num_attention_heads"]
    key, value = config["qk_nope_head_dim"] + config["qk_rope_head_dim"], config["v_head_dim"]
    latent = config["kv_lora_rank"]
    for i in range(config["num_hidden_layers"]):
        attention, mlp = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
        yield f"{attention}q_a_proj", config["q_lora_rank"], n
        yield f"{attention}q_b_proj", heads * key, config["q_lora_rank"]
        yield f"{attention}kv_a_proj_with_mqa", latent + config["qk_rope_head_dim"], n
        yield f"{attention}kv_b_proj", heads * (config["qk_nope_head_dim"] + value), latent
        yield f"{attention}o_proj", n, heads * value
        dense = i < config["first_k_dense_replace"]
        ff = config["intermediate_size" if dense else "moe_intermediate_size"]
        experts = [""] if dense else ["shared_experts.", *(f"experts.{e}." for e in range(config["n_routed_experts"]))]
        for expert in experts:
            yield from ((f"{mlp}{expert}{name}_proj", ff, n) for name in ("gate", "up"))
            yield f"{mlp}{expert}down_proj", n, ff


def specs(config: dict[str, Any]) -> list[CheckpointSpec]:
    n, vocabulary = config["hidden_size"], config["vocab_size"]
    found = [CheckpointSpec("model.embed_tokens.weight", (vocabulary, n), "BF16")]
    for name, rows, columns in matrices(config):
        found.append(CheckpointSpec(f"{name}.weight", (rows, columns), "F8_E4M3"))
        grid = (-(-rows // BLOCK), -(-columns // BLOCK))
        found.append(CheckpointSpec(f"{name}.weight_scale_inv", grid, "F32"))
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        for norm, size in (("input_layernorm", n), ("post_attention_layernorm", n),
                           ("self_attn.q_a_layernorm", config["q_lora_rank"]),
                           ("self_attn.kv_a_layernorm", config["kv_lora_rank"])):  # fmt: skip
            found.append(CheckpointSpec(f"{layer}{norm}.weight", (size,), "BF16"))
        if i >= config["first_k_dense_replace"]:
            found.append(CheckpointSpec(f"{layer}mlp.gate.weight", (config["n_routed_experts"], n), "BF16"))
            bias = f"{layer}mlp.gate.e_score_correction_bias"
            found.append(CheckpointSpec(bias, (config["n_routed_experts"],), "F32"))
    found.append(CheckpointSpec("model.norm.weight", (n,), "BF16"))
    return [*found, CheckpointSpec("lm_head.weight", (vocabulary, n), "BF16")]


def make(directory: Path, gigabytes: float, changes: dict[str, Any]) -> dict[str, Any]:
    """Write a checkpoint with the number of experts, at least two, that comes nearest to a size."""
    config = CONFIG | changes | {"n_routed_experts": 0}
    rest = sum(spec.nbytes for spec in specs(config))
    expert = 3 * config["hidden_size"] * config["moe_intermediate_size"]
    config["n_routed_experts"] = max(8, round((gigabytes * 1e9 - rest) / expert))
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    tokens = {chr(0x100 + i) if i < 256 else f"t{i}": i for i in range(config["vocab_size"])}
    tokenizer: dict[str, Any] = {
        "version": "1.0", "added_tokens": [], "normalizer": None, "decoder": {"type": "ByteLevel"},
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
        "model": {"type": "BPE", "vocab": tokens, "merges": []},
    }  # fmt: skip
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    (directory / "tokenizer_config.json").write_text("{}")
    rng = np.random.default_rng(0)
    normal = rng.standard_normal(1 << 24, np.float32)
    pool = {"F8_E4M3": fp8(normal * 60), "BF16": (normal.view("<u4") >> 16).astype("<u2").view(np.uint8)}
    with CheckpointWriter(directory, specs(config), {}, 2 * 10**9) as writer:
        for spec in specs(config):
            if spec.dtype == "F32":
                writer.write(spec.name, rng.uniform(1e-4, 3e-4, spec.shape).astype("<f4").reshape(-1).view(np.uint8))
                continue
            left = spec.nbytes
            while left:
                start = int(rng.integers(0, 1 << 20)) * 2
                piece = pool[spec.dtype][start : start + left]
                writer.write(spec.name, piece)
                left -= piece.size
    return config


def fp8(x: np.ndarray) -> np.ndarray:
    """The nearest codes of E4M3."""
    code = np.arange(127)
    values = np.where(code < 8, code * 2.0**-9, (8 + code % 8) * 2.0 ** (code // 8 - 10.0))
    nearest = np.searchsorted((values[1:] + values[:-1]) / 2, np.abs(x)).astype(np.uint8)
    codes: np.ndarray = nearest | (x < 0).astype(np.uint8) << 7
    return codes


# --------------------------------------------------------------------------------------------------------- watched runs


def command(source: Path, out: Path, threads: int, rules: str = RULES, run: str = RUN) -> list[str]:
    return [sys.executable, "-c", run, "quantize", str(source), str(out), "IQ4_K", "--custom-q", rules,
            "--pre", "gpt-2", "--json", "-t", str(threads)]  # fmt: skip


def watched(arguments: Sequence[str], out: Path, temporary: Path) -> dict[str, Any]:
    """Run to the end and watch memory and files."""
    temporary.mkdir(exist_ok=True)
    before = {path.name for path in out.parent.iterdir()}
    most = {"RssAnon": 0, "RssFile": 0, "VmHWM": 0}
    files: set[str] = set()
    started = time.perf_counter()
    environment = os.environ | {"TMPDIR": str(temporary)}
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, env=environment)
    while process.poll() is None:
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
        except OSError:
            break
        for name, kibibytes in re.findall(r"(RssAnon|RssFile|VmHWM):\s+(\d+) kB", status):
            most[name] = max(most[name], int(kibibytes) * 1024)
        files.update(path.name for folder in (out.parent, temporary) for path in folder.iterdir())
        time.sleep(0.05)
    seconds = time.perf_counter() - started
    if process.wait():
        raise SystemExit(f"{' '.join(arguments)}: status {process.returncode}")
    seen = sorted(re.sub(r"[a-f0-9-]{30,}|\d{4,}", "N", name) for name in files - before - {temporary.name})
    return {"seconds": seconds, "anonymous": most["RssAnon"], "mapped": most["RssFile"], "peak": most["VmHWM"],
            "files": sorted(set(seen)), "size": out.stat().st_size}  # fmt: skip


def digest(path: Path) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def direct(folder: Path, gigabytes: float, threads: int, detour: bool) -> dict[str, Any]:
    """Quantize the large checkpoint to its final types."""
    source, out = folder / "fp8", folder / "direct.gguf"
    config = make(source, gigabytes, {})
    size = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    print(f"checkpoint: {size / 1e9:.2f} GB, {config['n_routed_experts']} experts", flush=True)
    found = watched(command(source, out, threads), out, folder / "tmp") | {"input": size}
    mib = {name: f"{found[name] / 2**20:.0f} MiB" for name in ("anonymous", "mapped", "peak")}
    print(f"direct: {found['seconds']:.0f} s, {found['size'] / 1e9:.2f} GB, " + json.dumps(mib), flush=True)
    print(f"files during the run: {', '.join(found['files'])}", flush=True)
    if detour:
        bf16, other = folder / "bf16.gguf", folder / "detour.gguf"
        subprocess.run([sys.executable, "-c", RUN, "convert", str(source), str(bf16), "--pre", "gpt-2", "--json"],
                       check=True, stdout=subprocess.DEVNULL)  # fmt: skip
        subprocess.run(command(bf16, other, threads), check=True, stdout=subprocess.DEVNULL)
        found["same as by the detour"] = digest(other) == digest(out)
        print(f"the detour gives the same file: {found['same as by the detour']}", flush=True)
        bf16.unlink()
        other.unlink()
    out.unlink()
    shutil.rmtree(source)
    return found


# ----------------------------------------------------------------------------------------------------------- interrupts


def kill_and_resume(
    arguments: Sequence[str], out: Path, expected: str, moments: Sequence[float]
) -> list[dict[str, Any]]:
    """Kill a run after each of these numbers of seconds, and resume it."""
    rows = []
    for moment in moments:
        process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(moment)
        process.send_signal(signal.SIGKILL)
        process.wait()
        unfinished = resume.unfinished(out)
        too_late = out.exists()  # the run finished before the kill
        out.unlink(missing_ok=True)
        finished = json.loads(subprocess.run(arguments, check=True, capture_output=True).stdout)
        row = {"after": round(moment, 2), "done": unfinished[0] if unfinished else 0, "resumed": finished["resumed"],
               "same": digest(out) == expected, "over": too_late}  # fmt: skip
        rows.append(row)
        print(json.dumps(row), flush=True)
        out.unlink()
    return rows


def interrupted(folder: Path, gigabytes: float, threads: int, kills: int, repeat: int) -> dict[str, Any]:
    source, out = folder / "small", folder / "out.gguf"
    make(source, gigabytes, SMALL)
    arguments = command(source, out, threads)
    subprocess.run(arguments, check=True, stdout=subprocess.DEVNULL)  # compiles
    times = []
    for _ in range(2):
        started = time.perf_counter()
        subprocess.run([*arguments, "--fresh"], check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - started)
    seconds, whole = min(times), digest(out)
    out.unlink()
    rng = random.Random(1)
    rows = kill_and_resume(arguments, out, whole, [rng.uniform(0.2, 1) * seconds for _ in range(kills)])
    good = sum(row["same"] and row["done"] == row["resumed"] for row in rows)
    print(f"killed {kills} times: {good} are identical, without repeated tensors", flush=True)

    found = {"kills": rows, "seconds": seconds, "rule": change_one_rule(source, out, threads)}
    costs: dict[str, list[float]] = {"hashed": [], "not hashed": []}
    for _ in range(repeat):
        for name, run in (("hashed", RUN), ("not hashed", RUN_WITHOUT_HASHES)):
            costs[name].append(cpu_seconds(command(source, out, threads, RULES, run)))
            out.unlink()
    found["cpu"] = {name: statistics.median(times) for name, times in costs.items()}
    print(f"CPU seconds: {json.dumps(found['cpu'])}", flush=True)
    shutil.rmtree(source)
    return found


def change_one_rule(source: Path, out: Path, threads: int) -> dict[str, Any]:
    """Quantize, change one rule and requantize: counts, seconds, and whether a fresh run writes the same file."""
    seconds, reports = {}, {}
    for name, rules, flags in (("all", RULES, []), ("one rule", OTHER_RULES, ["--partial-requant"]),
                               ("from nothing", OTHER_RULES, ["--fresh"])):  # fmt: skip
        started = time.perf_counter()
        done = subprocess.run([*command(source, out, threads, rules), *flags], check=True, capture_output=True)
        seconds[name], reports[name] = time.perf_counter() - started, json.loads(done.stdout)
        if name == "one rule":
            first = digest(out)
    count, reused = len(reports["one rule"]["tensors"]), reports["one rule"]["reused"]
    found = {"tensors": count, "reused": reused, "seconds": seconds, "same": digest(out) == first}
    print(f"one rule: {json.dumps(found)}", flush=True)
    out.unlink()
    return found


def cpu_seconds(arguments: Sequence[str]) -> float:
    before = os.times()
    subprocess.run(arguments, check=True, stdout=subprocess.DEVNULL)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def summary(found: dict[str, Any]) -> list[dict[str, str]]:
    """The rows of the table."""
    rows = []
    if large := found.get("large"):
        rows.append({"what": f"{large['input'] / 1e9:.2f} GB of FP8 to {large['size'] / 1e9:.2f} GB",
                     "result": f"peak {large['peak'] / 2**20:.0f} MiB resident, {large['anonymous'] / 2**20:.0f} MiB "
                               f"of it anonymous; files: {', '.join(large['files'])}"})  # fmt: skip
        if "same as by the detour" in large:
            same = "the same file" if large["same as by the detour"] else "another file"
            rows.append({"what": "the same through a BF16 GGUF", "result": same})
    if small := found.get("small"):
        kills, rule, cpu = small["kills"], small["rule"], small["cpu"]
        good = sum(row["same"] and row["done"] == row["resumed"] for row in kills)
        rows.append({"what": "SIGKILL at a random moment, then resumed",
                     "result": f"{good} of {len(kills)} byte-identical, no finished tensor repeated"})  # fmt: skip
        same = "the same file as a fresh run" if rule["same"] else "another file than a fresh run"
        rows.append({"what": "one rule changed, `--partial-requant`",
                     "result": f"{rule['reused']} of {rule['tensors']} tensors reused, {same}"})  # fmt: skip
        rows.append({"what": "CPU time of hashing",
                     "result": f"{cpu['hashed'] - cpu['not hashed']:.2f} s of {cpu['hashed']:.2f} s"})  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=float, default=6, help="GB of the large checkpoint; 0 leaves it out")
    parser.add_argument("--small", type=float, default=0.3, help="GB of the one that is killed; 0 leaves it out")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--detour", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--directory", help="where the files are made; default: a folder of TMPDIR")
    records.add_option(parser)
    options = parser.parse_args()
    found: dict[str, Any] = {"threads": options.threads}
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        folder = Path(name)
        if options.small:
            found["small"] = interrupted(folder, options.small, options.threads, options.kills, options.repeat)
        if options.size:
            found["large"] = direct(folder, options.size, options.threads, options.detour)
    records.save(TABLE, summary(found), options, found)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
