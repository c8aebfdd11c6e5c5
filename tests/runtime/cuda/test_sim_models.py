"""Models with parts on GPUs give the logits of the CPU: tiny ones, in the simulator or on a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantkit.archs.common import blocks
from quantkit.errors import DataError
from quantkit.formats import gguf
from quantkit.placement.offload import Offload
from quantkit.runtime.blocks import experts, latent
from quantkit.runtime.blocks.block_runner import BlockRunner
from quantkit.runtime.cuda import gpu_latent
from quantkit.runtime.cuda.gpu_decode import HostExperts
from quantkit.runtime.loading import load
from quantkit.runtime.model import Model
from tests.archs import checkpoints
from tests.runtime.conftest import rewrite
from tests.runtime.cuda.conftest import SIMULATED
from tests.runtime.cuda.simulated import by_torch

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::RuntimeWarning")]
TOKENS = np.random.default_rng(2).integers(0, 320, 6)
SMALL: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1},
    "qwen3moe": {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1},
    "gpt-oss": {"sliding_window": 4},
    "gemma2": {"sliding_window": 4},
    "gemma4": {"sliding_window": 4, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    "llama4": {"attention_chunk_size": 3},
    "nemotron_h_moe": {"moe_latent_size": 32},
    "deepseek32": {"index_topk": 3},
    "glm-dsa": {"index_topk": 3},
    "mistral-large4": {"index_topk": 3},
}
Make = Callable[..., Path]


@pytest.fixture(scope="session")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """A random model of an architecture, in float32 or with matrices of a type."""
    from quantkit.pipelines.conversion.convert import convert_checkpoint

    made: dict[str, Path] = {}

    def model(arch: str, kind: str = "f32", **others: str) -> Path:
        if arch not in made:
            directory = tmp_path_factory.mktemp(arch)
            checkpoints.tiny(directory / "hf", "float32", arch, **SMALL.get(arch, {}))
            convert_checkpoint(directory / "hf", directory / "model.gguf", "f32")
            made[arch] = directory / "model.gguf"
        if kind == "f32":
            return made[arch]
        return rewrite(made[arch], tmp_path_factory.mktemp(arch) / "model.gguf", kind, **others)

    return model


def check(path: Path, tolerance: float = 1e-4, tokens: np.ndarray = TOKENS, **how: Any) -> Model:
    """A model run so gives the logits of the CPU: a prompt at once, then one token."""
    same = ("mla", "cache_type", "numerics", "expert_reduction")
    expected = load(path, **{key: how[key] for key in same if key in how}).logits(tokens)
    model = load(path, **how)
    cache = model.new_cache(len(tokens))
    prompt = model.forward(tokens[:-1], cache)
    result = np.concatenate([prompt, model.forward(tokens[-1:], cache)])
    assert np.abs(result - expected).max() < tolerance * max(1.0, float(np.std(expected)))
    return model


def test_a_model_on_a_gpu(gpus: int, make: Make) -> None:
    model = check(make("llama"), devices="cuda:0", tokens=TOKENS[:4])
    assert model.split is not None
    message = model.split.describe()
    assert message["devices"] == {"CPU": 1, "CUDA0": 20}  # embeddings are gathered on the CPU
    assert set(message["gpus"]) == {"CUDA0"}
    moved = model.split.ledger.bytes
    assert moved["CPU", "CUDA0"] == 4 * model.weights["token_embd.weight"].row_bytes  # gathered rows, as stored
    assert moved["CUDA0", "CPU"] == 4 * 4 * model.vocab_size
    if SIMULATED:
        launched = model.split._workers["CUDA0"].gpu.launched  # type: ignore[attr-defined]
        assert {"rms_norm", "rope", "swiglu", "merge"} < launched.keys()


def test_prompts_run_in_larger_batches_where_a_gpu_has_the_memory(gpus: int, make: Make, monkeypatch: Any) -> None:
    """And in batches of the usual size where it has memory for weights alone."""
    from quantkit.runtime import model as module

    monkeypatch.setattr(module, "BATCH_TOKENS", 2)
    monkeypatch.setattr(module, "GPU_BATCH_TOKENS", 4)
    expected = load(make("llama")).logits(TOKENS[:4])
    model = load(make("llama"), devices="cuda:0")
    assert model.split is not None
    worker: Any = model.split._workers["CUDA0"]
    weights = sum(t.nbytes for name, t in model.weights.items() if model.placement[name].name == "CUDA0")
    for free, passes in ((2 << 30, 1), ((1 << 30) + weights, 2)):
        monkeypatch.setattr(worker.gpu, "free_bytes", lambda free=free: free)
        assert worker.spare_bytes() == free - weights
        model.split.ledger.clear()
        assert np.abs(model.logits(TOKENS[:4]) - expected).max() < 1e-4
        assert (model.split.ledger.passes, model.split.ledger.tokens) == (passes, 4)
        worker._matrices.clear()


def test_feed_forwards_of_many_tokens_are_rounded_once(gpus: int, make: Make) -> None:
    """The activations are made as bfloat16, as which they are multiplied: the results are those of two steps."""
    model = load(make("llama"), devices="cuda:0", numerics="fast")
    assert model.split is not None
    worker: Any = model.split._workers["CUDA0"]
    part = model.blocks[0].parts[1]
    assert isinstance(part, blocks.FeedForward)
    x = np.random.default_rng(3).standard_normal((9, model.hparams.n_embd)).astype(np.float32)
    result = worker.gated(part, worker.gpu.array(x)).cpu().numpy()
    np.testing.assert_array_equal(result, BlockRunner.gated(worker, part, worker.gpu.array(x)).cpu().numpy())
    if SIMULATED:
        assert {"swiglu", "swiglu_bf16"} <= worker.gpu.launched.keys()


def test_what_no_kernel_has_is_not_left_out(gpus: int, make: Make) -> None:
    """The factor of a norm's weight, and a router's gating that the kernel does not know: as on the CPU."""
    path = make("qwen3moe")
    host, model = load(path), load(path, devices="cuda:0")
    assert model.split is not None
    worker: Any = model.split._workers["CUDA0"]
    mixture = host.blocks[0].parts[1]
    assert isinstance(mixture, blocks.Experts)
    rng = np.random.default_rng(4)
    norm, x = replace(mixture.norm, factor=3.0), rng.standard_normal((2, host.hparams.n_embd)).astype(np.float32)
    np.testing.assert_allclose(worker.rms_norm(worker.gpu.array(x), norm).cpu().numpy(), host.rms_norm(x, norm), 1e-5)
    part, logits = replace(mixture, gating="sqrtsoftplus"), rng.standard_normal((2, mixture.count)).astype(np.float32)
    (chosen, weights), right = worker.route(part, worker.gpu.array(logits)), host.route(part, logits)
    np.testing.assert_array_equal(chosen, right[0])
    np.testing.assert_allclose(weights.cpu().numpy(), right[1], 1e-5)


def test_experts_on_the_cpu_and_the_rest_on_gpus(gpus: int, make: Make) -> None:
    how = {"devices": "cuda:0,cuda:1", "tensor_split": (1, 2)} if gpus > 1 else {"devices": "cuda:0"}
    model = check(make("qwen3moe"), override_tensor="exps=CPU", tokens=TOKENS[:3], profile=True, **how)
    assert model.split is not None
    ledger = model.split.ledger
    assert ledger.seconds["CPU"].keys() == {"experts", "transfer"}
    assert {"products", "attention", "norms"} <= ledger.seconds["CUDA0"].keys()
    assert model.placement["blk.1.ffn_up_exps.weight"].name == "CPU"
    assert model.placement["blk.1.attn_q.weight"].name == f"CUDA{min(1, gpus - 1)}"


def test_what_is_on_the_cpu_is_compiled(gpus: int, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fast numerics: experts that the GPU routes to, and whole layers, do not run layer by layer."""

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("layer by layer")

    path = make("qwen3moe")
    expected = load(path, numerics="fast").logits(TOKENS[:2])
    monkeypatch.setattr(experts, "run", forbidden)
    rules = "exps=CPU,output=CPU,attn=CPU"
    model = load(path, devices="cuda:0", numerics="fast", override_tensor=rules, gpu_layers=1, kv_on_cpu=True)
    cache = model.new_cache(2)
    result = np.concatenate([model.forward(TOKENS[:1], cache), model.forward(TOKENS[1:2], cache)])
    assert np.abs(result - expected).max() < 0.05 * np.std(expected)
    assert model.split is not None
    assert [worker and worker.device.name for worker, _ in model.split.runs] == ["CPU", None]


def test_experts_of_the_cpu_are_streamed_for_large_batches(gpus: int, make: Make) -> None:
    """From 3 tokens on: each of the 6 experts gets one of them."""
    rules = "exps=CPU,output=CPU,attn=CPU"
    how = {"devices": "cuda:0", "override_tensor": rules, "gpu_layers": 1, "kv_on_cpu": True}
    model = load(make("qwen3moe"), offload=Offload(threshold=1), **how)
    expected = load(make("qwen3moe")).logits(TOKENS[:3])
    assert np.abs(model.logits(TOKENS[:3]) - expected).max() < 1e-4
    assert model.split is not None
    part = model.blocks[1].parts[1]
    assert isinstance(part, blocks.Experts)
    expert = 3 * 4 * part.ff * model.hparams.n_embd
    assert 2 * expert < model.split.ledger.bytes["CPU", "CUDA0"] < 7 * expert
    assert model.split.describe()["offload_threshold"] == 1
    never = load(make("qwen3moe"), offload=Offload(1, frozenset({"MUL_MAT_ID"})), **how)
    assert never.split is not None
    workers: list[Any] = [m.split._workers["CUDA0"] for m in (model, never) if m.split is not None]
    assert [[worker._offloads(part, tokens) for tokens in (2, 3)] for worker in workers] == [[False, True], [False] * 2]


def test_shared_experts_run_while_the_cpu_has_the_others(gpus: int, make: Make) -> None:
    how: dict[str, Any] = {"devices": "cuda:0", "override_tensor": "_exps=CPU,^output=CPU", "gpu_layers": 1}
    model = check(make("qwen35moe"), tokens=TOKENS[:2], **how)
    assert model.split is not None
    worker: Any = model.split._workers["CUDA0"]
    host, order = model.split._workers["CPU"], []
    shared, routed = worker._shared, host.run_experts
    worker._shared = lambda *given: (order.append("shared"), shared(*given))[1]
    host.run_experts = lambda *given: (order.append("routed"), routed(*given))[1]  # type: ignore[method-assign]
    model.logits(TOKENS[:1])
    assert order[-2:] == ["shared", "routed"]


@pytest.mark.parametrize("arch", ["qwen3moe", "gpt-oss"])
def test_fused_experts_on_a_gpu(gpus: int, make: Make, tmp_path: Path, arch: str) -> None:
    """Gate and up in one tensor give the logits of two: on the GPU, offloaded, and with down elsewhere."""
    from quantkit.pipelines.fuse_experts import plan_fuse

    plan_fuse(gguf.open(make(arch))).write(tmp_path / "fused.gguf")
    expected = load(make(arch)).logits(TOKENS[:3])
    for how in (
        {},
        {"override_tensor": "exps=CPU", "offload": Offload(threshold=1)},
        {"override_tensor": "down_exps=CPU"},
    ):
        model = load(tmp_path / "fused.gguf", devices="cuda:0", **how)
        assert np.abs(model.logits(TOKENS[:3]) - expected).max() < 1e-4


def test_packed_weights_on_a_gpu(gpus: int, make: Make) -> None:
    """Fast numerics: activations are rounded to bytes here, and elsewhere on the CPU. One layer is on the GPU."""
    path = make("llama", "q8_0", ffn="iq4_nl")
    model = load(path, devices="cuda:0", numerics="fast", gpu_layers=1)
    assert {name for name in model.placement.devices if not model.placement.on_cpu(name)} == {
        name for name in model.weights if name.startswith("blk.1.")
    }
    expected = load(path).logits(TOKENS[:1])
    assert np.abs(model.logits(TOKENS[:1]) - expected).max() < 0.05 * np.std(expected)
    assert "layer by layer" in (model.fallback_reason or "")


def replayed(model: Model, turns: int) -> np.ndarray:
    """Logits of tokens one by one in caches of their own lengths, the first of which is emptied again."""
    caches = [model.new_cache(12), model.new_cache(40)]
    saved, made = caches[0].save(), []
    for number in range(turns):
        cache = caches[number % 3 // 2]
        made += [model.forward(TOKENS[i : i + 1], cache) for i in (number, 2, 0)]
        if number == 2:
            caches[0].restore(saved)
    return np.concatenate(made)


def check_replayed(path: Path, turns: int, **how: Any) -> None:
    model = load(path, devices="cuda:0", **how)
    expected = replayed(load(path, numerics=model.numerics), turns)
    tolerance = 1e-4 if model.numerics == "exact" else 3e-2
    assert np.abs(replayed(model, turns) - expected).max() < tolerance * max(1.0, float(np.std(expected)))
    assert model.split is not None
    assert sum(worker is not None for worker, _ in model.split.runs) == 1
    worker: Any = model.split._workers["CUDA0"]
    embeds = not model.placement.on_cpu("blk.0.attn_norm.weight")  # the embedding is decoded where layer 0 begins
    assert not SIMULATED or worker.gpu.captured == min(2, turns) + embeds


@pytest.mark.parametrize("arch", ["llama", "mistral3"])
def test_steps_are_replayed(arch: str, gpus: int, make: Make) -> None:
    """A replayed graph must not use values of the host from the token that was recorded; mistral3's queries are scaled
    by position."""
    check_replayed(make(arch), 1, gpu_layers=1, override_tensor="^output=CPU")


def test_steps_are_fused(gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fast numerics: of matrices of two types, where q and k are one product, and with the head."""
    from quantkit.pipelines.conversion.convert import convert_checkpoint

    if SIMULATED:
        by_torch(monkeypatch)
    checkpoints.tiny(tmp_path / "hf", "float32", "llama", **SMALL["llama"], head_dim=32)
    convert_checkpoint(tmp_path / "hf", tmp_path / "f32.gguf", "f32")
    path = rewrite(tmp_path / "f32.gguf", tmp_path / "model.gguf", "q8_0", attn_v="q4_0")
    model = load(path, devices="cuda:0", numerics="fast")
    cache = model.new_cache(4)
    by_launches = [model.forward(TOKENS[:1], cache)]
    cache.truncate(0)
    fused = [model.forward(TOKENS[i : i + 1], cache) for i in range(3)]
    by_launches.append(model.forward_batch([(TOKENS[:2], model.new_cache(4))]))
    np.testing.assert_allclose(fused[:2], by_launches, atol=2e-3)
    assert model.split is not None
    worker: Any = model.split._workers["CUDA0"]
    assert {len(names) for names in worker._stacks} == {2}
    assert ("blk.0.attn_q.weight", "blk.0.attn_k.weight") in worker._stacks
    again = model.forward(TOKENS[3:4], cache)
    worker.drop_cached(["blk.0.attn_k.weight"])
    assert ("blk.0.attn_q.weight", "blk.0.attn_k.weight") not in worker._stacks
    cache.truncate(3)
    np.testing.assert_allclose(model.forward(TOKENS[3:4], cache), again, atol=1e-3)
    if SIMULATED:
        assert {"add_norm_1", "swiglu_quantized", "merge_quantized"} < worker.gpu.launched.keys()
        assert any(name.startswith("rope_append") for name in worker.gpu.launched)


@pytest.mark.parametrize("arch", ["qwen3moe", "deepseek2"])
def test_steps_with_experts_on_the_cpu(arch: str, gpus: int, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """They compute between two graphs, with shared experts beside them (deepseek2): as by launches."""
    if SIMULATED:
        by_torch(monkeypatch)
    model = load(make(arch), devices="cuda:0", numerics="fast", override_tensor="_exps=CPU")
    assert model.split is not None
    (worker,) = {worker for worker, _ in model.split.runs}
    assert worker is model.split._workers["CUDA0"]
    cache = model.new_cache(4)
    by_launches = [model.forward(TOKENS[:1], cache), model.forward_batch([(TOKENS[:2], model.new_cache(4))])]
    cache.truncate(0)
    calls: list[HostExperts] = []
    compute, roused = HostExperts.run, list[int]()
    monkeypatch.setattr(model.split._workers["CPU"], "rouse", lambda: roused.append(len(calls)))
    monkeypatch.setattr(HostExperts, "run", lambda experts: (calls.append(experts), compute(experts))[1])
    model.split.ledger.clear()
    replayed = [model.forward(TOKENS[i : i + 1], cache) for i in range(2)]
    np.testing.assert_allclose(replayed, by_launches, atol=2e-3)
    moved = model.split.ledger.bytes
    assert moved["CPU", "CUDA0"] > 2 * 4 * model.hparams.n_embd
    assert moved["CUDA0", "CPU"] > 2 * 4 * (model.hparams.n_embd + model.vocab_size)
    layers = sum(isinstance(part, blocks.Experts) for block in model.blocks for part in block.parts)
    assert len(calls) == (2 + 1) * layers  # once more when they are captured
    assert roused == list(range(len(calls)))  # before the GPU computes what enters them
    graphs = 2 * layers if arch == "deepseek2" else layers
    assert not SIMULATED or worker.gpu.captured == graphs + 2  # before the first experts, and the embedding


@pytest.mark.parametrize("arch", ["llama", "qwen3moe", "deepseek2", "gpt-oss", "qwen35moe"])
def test_steps_of_architectures_are_replayed(arch: str, gpus: int, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    if SIMULATED:
        by_torch(monkeypatch)
    rule = "blk.0.ffn=CPU" if arch == "llama" else ()  # of qwen35moe the layers that are not recurrent
    check_replayed(make(arch), 4, numerics="fast", override_tensor=rule)


PLACES: list[tuple[str, dict[str, Any]]] = [
    ("qwen3moe", {"kv_on_cpu": True, "cache_type": "q8_0/q4_0 khad"}),
    ("deepseek2", {"override_tensor": "attn_v_b=CPU,shexp=CPU"}),
    ("glm-dsa", {"override_tensor": "_exps=CPU"}),
    *((arch, {}) for arch in (
        "qwen3moe", "deepseek2", "deepseek32", "qwen35moe", "kimi-linear", "lfm2", "gpt-oss", "cohere2_moe", "gemma2",
        "gemma4", "step35", "llama4", "phi3", "apertus", "nemotron_h_moe", "mistral-large4",
    )),
]  # fmt: skip
MORE_PLACES: list[tuple[str, dict[str, Any]]] = [
    ("qwen3moe", {"n_cpu_moe": 1}),
    ("qwen3moe", {"expert_reduction": (1, 0.5)}),
    ("qwen3moe", {"override_tensor": "down_exps=CPU"}),
    ("qwen3moe", {"gpu_layers": 0, "override_tensor": "exps=CUDA0,attn_q=CUDA0"}),
    ("qwen3moe", {"cache_type": "bf16/q8_0"}),
    ("llama", {"gpu_layers": 1, "cache_type": "f16"}),
    ("llama", {"split_mode": "none"}),
    *(("deepseek2", {"mla": mla}) for mla in range(3)),
    ("deepseek2", {"kv_on_cpu": True}),
    ("deepseek2", {"override_tensor": "_exps=CPU"}),
    ("deepseek32", {"mla": 1, "cache_type": "q8_0/f16"}),
    ("glm-dsa", {"gpu_layers": 2}),
    ("glm-dsa", {"kv_on_cpu": True}),
    ("qwen3next", {"gpu_layers": 2}),
    ("kimi-linear", {"gpu_layers": 2, "mla": 0}),
    ("lfm2moe", {"gpu_layers": 2}),
    ("cohere2", {}),
    ("gemma4", {"n_cpu_moe": 4}),
    ("llama4", {"n_cpu_moe": 5}),
    ("nemotron_h", {}),
    ("nemotron_h", {"gpu_layers": 2}),
    ("nemotron_h_moe", {"override_tensor": "_exps=CPU"}),
]


@pytest.mark.parametrize(
    ("arch", "how"), [*PLACES, *(pytest.param(*case, marks=pytest.mark.full) for case in MORE_PLACES)], ids=str
)
def test_ways_to_place(arch: str, how: dict[str, Any], gpus: int, make: Make) -> None:
    tolerance = 2e-2 if "cache_type" in how else 1e-4  # a key near a tie of two codes may round apart
    if arch == "qwen35moe":
        tolerance = 2e-4  # 1.04e-4 was seen
    check(make(arch), tolerance, devices="cuda:0", **how)


@pytest.mark.parametrize("kinds", ["f32", "f16"])
def test_prompts_expand_latents(kinds: str, gpus: int, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values of one head at a time; a prompt, another after it, and one token, which is absorbed."""
    calls = []
    expanded = gpu_latent.GpuHeadProjections.expanded

    def counted(self: Any, latents: Any, first: int, stop: int) -> Any:
        calls.append((first, stop))
        return expanded(self, latents, first, stop)

    monkeypatch.setattr(latent, "EXPAND", 3)
    monkeypatch.setattr(gpu_latent, "EXPANDED", 1)
    monkeypatch.setattr(gpu_latent.GpuHeadProjections, "expanded", counted)
    path = make("deepseek2")
    right = load(path, mla=1, cache_type=kinds).logits(TOKENS)
    model = load(path, devices="cuda:0", cache_type=kinds)
    cache = model.new_cache(6)
    result = np.concatenate([model.forward(part, cache) for part in (TOKENS[:3], TOKENS[3:5], TOKENS[5:])])
    np.testing.assert_allclose(result, right, atol=1e-4 if kinds == "f32" else 1e-2)
    heads = model.hparams.n_head
    assert calls == [(head, head + 1) for head in range(heads)] * model.hparams.n_layer


def test_scaled_head_projections(gpus: int, make: Make) -> None:
    """Numbers that matrices between latents and heads are multiplied by, as on the CPU."""
    path = make("deepseek2")
    host, model = load(path, mla=1), load(path, devices="cuda:0", mla=1)
    assert model.split is not None
    worker: Any = model.split._workers["CUDA0"]
    part = host.blocks[0].parts[0]
    assert isinstance(part, blocks.LatentAttention)
    assert part.k_b is not None
    assert part.v_b is not None
    part = replace(part, k_b=replace(part.k_b, factor=2.0), v_b=replace(part.v_b, factor=3.0))
    here, there = host.head_projections(part), worker.local_head_projections(part)
    rng = np.random.default_rng(3)
    q = rng.standard_normal((2, part.heads, part.head_dim_k)).astype(np.float32)
    attended = rng.standard_normal((2, part.heads * part.kv_lora)).astype(np.float32)
    latents = rng.standard_normal((5, part.latent)).astype(np.float32)
    upload = worker.gpu.array
    np.testing.assert_allclose(there.queries(upload(q)).cpu(), here.queries(q), atol=1e-5)
    np.testing.assert_allclose(there.values(upload(attended)).cpu(), here.values(attended), atol=1e-5)
    for mine, right in zip(there.expanded(upload(latents), 0, 2), here.expanded(latents, 0, 2)):
        np.testing.assert_allclose(mine.cpu(), right, atol=1e-5)


@pytest.mark.parametrize(("arch", "kinds"), [("llama", "f32"), ("llama", "f16/bf16"), ("gpt-oss", "f32")])
def test_prompts_attend_over_what_is_there(arch: str, kinds: str, gpus: int, make: Make) -> None:
    """More tokens than a product from packed weights takes; then as many again, and sequences side by side."""
    tokens = np.random.default_rng(5).integers(0, 320, 20)
    plain = load(make(arch), cache_type=kinds)
    model = load(make(arch), cache_type=kinds, devices="cuda:0", override_tensor="^output=CPU", gpu_layers=1)
    result = []
    for each in (plain, model):
        cache = each.new_cache(24)
        first, then = each.forward(tokens[:10], cache), each.forward(tokens[10:], cache)
        result.append(np.concatenate([first, then, each.forward_sequences(tokens.reshape(2, 10), slice(None))[1]]))
    assert np.abs(result[0] - result[1]).max() < (1e-4 if kinds == "f32" else 2e-2) * max(1.0, float(np.std(result[0])))


@pytest.mark.parametrize("seed", range(3))
def test_random_maps_of_tensors(seed: int, gpus: int, make: Make) -> None:
    rng = np.random.default_rng(seed)
    for arch in ("llama", "qwen3moe", "deepseek2"):
        there = ("CPU", "CUDA0", f"CUDA{gpus - 1}", "cpu:0")
        rules = [f"^{re.escape(name)}$={there[rng.integers(4)]}" for name in gguf.open(make(arch)).tensors]
        devices = ",".join(sorted({"cpu:0", *there[1:3]}))
        check(make(arch), devices=devices, override_tensor=rules, kv_on_cpu=bool(rng.integers(2)), tokens=TOKENS[:3])


@pytest.mark.full
@pytest.mark.parametrize("kind", ["q4_0", "f16", "bf16", "iq4_nl"])
def test_types_of_weights(kind: str, gpus: int, make: Make) -> None:
    """Exact numerics: weights decoded as on the CPU."""
    check(make("llama", kind), 1e-4, TOKENS[:3], devices="cuda:0")
    check(make("qwen3moe", kind), 1e-4, TOKENS[:2], devices="cuda:0")


@pytest.mark.parametrize("arch", ["llama", "qwen35moe", "nemotron_h"])
def test_caches_forget_and_go_on(arch: str, gpus: int, make: Make) -> None:
    model = load(make(arch), devices="cuda:0")
    expected = load(make(arch)).logits(TOKENS)
    cache, other = model.new_cache(16), model.new_cache(8)
    model.forward(TOKENS[:4], cache)
    saved = cache.save()
    cache.mark()
    model.forward(TOKENS[1:3], cache)
    cache.truncate(4)
    assert np.abs(model.forward(TOKENS[4:5], cache) - expected[4]).max() < 1e-4
    other.restore(saved)
    ends = model.forward_batch([(TOKENS[4:5], other), (TOKENS[5:6], cache)])
    assert np.abs(ends - expected[4:6]).max() < 1e-4
    pair = model.forward_sequences(TOKENS.reshape(2, 3), slice(None))
    assert np.abs(pair[0] - expected[:3]).max() < 1e-4


def test_what_enters_matrices_is_seen(gpus: int, make: Make) -> None:
    for arch in ("qwen3moe", "deepseek2"):
        result: list[dict[Any, np.ndarray]] = []
        for how in ({}, {"devices": "cuda:0"}):
            model, seen = load(make(arch), **how), {}  # type: ignore[arg-type,var-annotated]
            model.observer = lambda name, x, *which, seen=seen: seen.setdefault((name, *which), np.array(x))
            model.logits(TOKENS[:3])
            result.append(seen)
        assert result[0].keys() == result[1].keys()
        assert all(np.abs(result[0][key] - result[1][key]).max() < 1e-4 for key in result[0])


def test_a_replayed_step_that_is_not_finite_is_named(gpus: int, make: Make, tmp_path: Path) -> None:
    """The logits of a graph need not show it: products turn what enters them to bytes."""
    from tests.runtime.test_model import edited, put

    path = rewrite(make("llama"), tmp_path / "packed.gguf", "q8_0", token_embd="f32")
    path = edited(path, tmp_path / "bad.gguf", "token_embd.weight", put(7, 5, np.inf))
    model = load(path, devices="cuda:0", numerics="fast")
    cache = model.new_cache(4)
    for _ in range(2):
        model.forward(TOKENS[:1], cache)
    with pytest.raises(DataError, match=r"token_embd.weight made inf"):
        model.forward([7], cache)
    assert cache.length == 2


def test_a_bad_tensor_is_named(gpus: int, make: Make, tmp_path: Path) -> None:
    from tests.runtime.test_model import edited, put

    path = edited(make("llama"), tmp_path / "bad.gguf", "blk.1.ffn_up.weight", put(3, 5, np.nan))
    with pytest.raises(DataError, match=r"blk.1.ffn_up.weight made nan"):
        load(path, devices="cuda:0").logits(TOKENS[:2])
