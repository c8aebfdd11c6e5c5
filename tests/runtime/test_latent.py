"""Latent attention in the compiled plans, against the layer-by-layer model: layouts, sizes, caches, -mla, sequences."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from quantkit.codegen import cpu_target
from quantkit.formats import gguf
from quantkit.pipelines.conversion.convert import convert_checkpoint
from quantkit.placement import workspace
from quantkit.runtime.kernels.cpu import latent_batch, latent_rows
from quantkit.runtime.kernels.kv_rounding import FLOATS, QUANTIZED
from quantkit.runtime.loading import load
from quantkit.runtime.model import Model
from tests.archs.checkpoints import tiny
from tests.other_cpus import CPUS, is_other_cpu, run_tests
from tests.runtime.conftest import random_model, rewrite
from tests.runtime.test_noise import divergence
from tests.runtime.test_step import HALVES, ROUNDED, by_steps, spread

TOKENS = np.random.default_rng(4).integers(0, 320, 200)
FEW = is_other_cpu()  # one of each kind of kernel is enough there
LAYOUTS = {"all": (), "joint": ("attn_k_b", "attn_v_b"), "split": ("attn_kv_b",)}


def latent_model(
    path: Path, *, heads: int = 5, q_lora: int = 64, kv_lora: int = 96, nope: int = 64, rope: int = 32, v: int = 32,
    layout: str = "all",
) -> Path:  # fmt: skip
    """A random deepseek2 of float32: a dense layer, then one with groups of experts, a shared one, a biased router."""
    embd, ff, vocab, experts = 256, 64, 320, 8
    rng = np.random.default_rng(9)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab, embd), "output_norm.weight": (embd,)}
    for i in range(2):
        b = f"blk.{i}."
        shapes |= {f"{b}attn_norm.weight": (embd,), f"{b}ffn_norm.weight": (embd,)}
        q = heads * (nope + rope)
        if q_lora:
            shapes |= {f"{b}attn_q_a.weight": (q_lora, embd), f"{b}attn_q_a_norm.weight": (q_lora,)}
            shapes |= {f"{b}attn_q_b.weight": (q, q_lora)}
        else:
            shapes |= {f"{b}attn_q.weight": (q, embd)}
        shapes |= {f"{b}attn_kv_a_mqa.weight": (kv_lora + rope, embd), f"{b}attn_kv_a_norm.weight": (kv_lora,)}
        shapes |= {f"{b}attn_kv_b.weight": (heads * (nope + v), kv_lora), f"{b}attn_output.weight": (embd, heads * v)}
        if i == 0:
            shapes |= {f"{b}ffn_{n}.weight": (128, embd) for n in ("gate", "up")} | {f"{b}ffn_down.weight": (embd, 128)}
            continue
        shapes |= {f"{b}ffn_gate_inp.weight": (experts, embd), f"{b}exp_probs_b.bias": (experts,)}
        for stem, stack in (("_exps", (experts,)), ("_shexp", ())):
            shapes |= {f"{b}ffn_{n}{stem}.weight": (*stack, ff, embd) for n in ("gate", "up")}
            shapes |= {f"{b}ffn_down{stem}.weight": (*stack, embd, ff)}
    metadata = gguf.Metadata({"general.architecture": "deepseek2"})
    numbers = {"block_count": 2, "context_length": 512, "embedding_length": embd, "feed_forward_length": 128,
               "attention.head_count": heads, "attention.head_count_kv": heads, "attention.key_length": nope + rope,
               "attention.value_length": v, "attention.kv_lora_rank": kv_lora, "rope.dimension_count": rope,
               "vocab_size": vocab, "leading_dense_block_count": 1, "expert_count": experts, "expert_used_count": 3,
               "expert_feed_forward_length": ff, "expert_shared_count": 1, "expert_gating_func": 2,
               "expert_group_count": 4, "expert_group_used_count": 2}  # fmt: skip
    for key, value in (numbers | ({"attention.q_lora_rank": q_lora} if q_lora else {})).items():
        metadata.set(f"deepseek2.{key}", value, "u32")
    metadata.set("deepseek2.attention.layer_norm_rms_epsilon", 1e-6, "f32")
    metadata.set("deepseek2.expert_weights_scale", 2.5, "f32")
    metadata.set("deepseek2.expert_weights_norm", True, "bool")
    whole = random_model(path.with_name(f"whole-{path.name}"), metadata, shapes, rng)
    return with_layout(whole, path, layout, heads, nope, v)


def with_layout(source: Path, path: Path, layout: str, heads: int, nope: int, v: int) -> Path:
    """A copy of a file of kv_b, with the tensors of a layout (archs/deepseek2.py)."""
    file = gguf.open(source)
    values = {name: tensor.dequantize() for name, tensor in file.tensors.items()}
    bias = values["blk.1.exp_probs_b.bias"]
    bias[:] = 2.0 ** np.random.default_rng(2).permutation(len(bias)) * 4  # decides: rounding turns no choice
    for i in range(2):
        joint = values[f"blk.{i}.attn_kv_b.weight"]
        by_heads = joint.reshape(heads, nope + v, -1)
        values[f"blk.{i}.attn_k_b.weight"] = by_heads[:, :nope].transpose(0, 2, 1).reshape(-1, nope)
        values[f"blk.{i}.attn_v_b.weight"] = by_heads[:, nope:].reshape(heads * v, -1)
    kept = {name: x for name, x in values.items() if name.split(".")[-2] not in LAYOUTS[layout]}
    f32 = next(iter(file.tensors.values())).type
    with gguf.Writer(path, file.metadata, [gguf.TensorSpec(n, x.shape, f32) for n, x in kept.items()]) as writer:
        for name, x in kept.items():
            writer.write(name, np.ascontiguousarray(x.reshape(-1, x.shape[-1])).view(np.uint8))
    return path


@pytest.fixture(scope="session")
def latents(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`latent_model` by layout, made once."""
    directory, made = tmp_path_factory.mktemp("latent"), dict[str, Path]()

    def of(layout: str = "all") -> Path:
        if layout not in made:
            made[layout] = latent_model(directory / f"{layout}.gguf", layout=layout)
        return made[layout]

    return of


def compiled(path: Path, mla: int = 3, **how: object) -> Model:
    model = load(path, numerics="fast", mla=mla, **how)  # type: ignore[arg-type]
    assert model.fallback_reason is None
    return model


def long_steps(model: Model, cache_type: str | None = None) -> np.ndarray:
    """Logits of a prompt and, one by one, of the tokens after it: depths 0, 1 and past a block of latents."""
    cache = model.new_cache(len(TOKENS), cache_type)
    rows = [model.forward([token], cache) for token in TOKENS[:3]]
    rows.append(model.forward(TOKENS[3:150], cache))
    return np.concatenate([*rows, *(model.forward([token], cache) for token in TOKENS[150:160])])


@pytest.mark.parametrize("mla", (1, 3) if FEW else range(4))
@pytest.mark.parametrize("layout", ["all"] if FEW else LAYOUTS)
def test_layouts_and_modes_agree_with_the_exact_model(layout: str, mla: int, latents: Callable[..., Path]) -> None:
    expected = load(latents(), cache_type="f32").logits(TOKENS[:160])
    model = compiled(latents(layout), mla, cache_type="f32")
    assert model.new_cache(8).nbytes == 8 * 2 * 4 * (128 if mla else 5 * (96 + 32))
    assert spread(model.logits(TOKENS[:160]), expected) < 1e-5
    assert spread(long_steps(model), expected) < 1e-5
    plain = compiled(latents(layout), mla, cache_type="f32", flash_attention=False, attention_mib=1)
    assert spread(long_steps(plain), expected) < 1e-5


@pytest.mark.parametrize(
    "sizes",
    [
        {"heads": 1, "q_lora": 0, "kv_lora": 32, "nope": 32, "rope": 16, "v": 96},
        {"heads": 7, "q_lora": 32, "kv_lora": 160, "nope": 96, "rope": 48, "v": 64},
        {"heads": 4, "q_lora": 0, "kv_lora": 64, "nope": 32, "rope": 64, "v": 160},
    ],
)
@pytest.mark.parametrize("mla", [2] if FEW else [0, 1, 2])
def test_odd_sizes(sizes: dict[str, int], mla: int, tmp_path: Path) -> None:
    path = latent_model(tmp_path / "m.gguf", **sizes)  # type: ignore[arg-type]
    expected = load(path, cache_type="f32").logits(TOKENS[:160])
    model = compiled(path, mla, cache_type="f32")
    assert spread(long_steps(model), expected) < 1e-5


@pytest.mark.parametrize("kind", ("q8_0",) if FEW else FLOATS + QUANTIZED)
def test_cache_types(kind: str, latents: Callable[..., Path]) -> None:
    """Against the layer-by-layer model with the same rounding; now and then a code falls the other way."""
    path = latents()
    for mla in (1, 3):
        expected = load(path, cache_type=kind, mla=mla).logits(TOKENS[:160])
        assert spread(long_steps(compiled(path, mla), kind), expected) < (1e-5 if kind == "f32" else 5e-3)


@pytest.mark.parametrize("mla", [1, 3])
def test_rotated_latents(mla: int, tmp_path: Path) -> None:
    """Rotated by blocks of 64, which divide the latent and its values."""
    path = latent_model(tmp_path / "m.gguf", kv_lora=128, rope=64)
    for kind in ("f32 khad", "q8_0 khad"):
        expected = load(path, cache_type=kind, mla=mla).logits(TOKENS[:160])
        assert spread(long_steps(compiled(path, mla), kind), expected) < (1e-5 if kind[0] == "f" else 5e-3)


@pytest.mark.parametrize("threads", [3] if FEW else [1, 2, 3])
@pytest.mark.parametrize("mla", [1] if FEW else [0, 1, 2])
def test_any_number_of_threads(threads: int, mla: int, latents: Callable[..., Path]) -> None:
    expected = load(latents(), cache_type="f32").logits(TOKENS[:160])
    model = compiled(latents(), mla, cache_type="f32", threads=threads)
    assert spread(long_steps(model), expected) < 1e-5


@pytest.mark.parametrize("mla", [3] if FEW else range(4))
def test_several_sequences(mla: int, latents: Callable[..., Path]) -> None:
    """Each of its own length, some absorbed and some expanded, in one batch."""
    model = compiled(latents(), mla, cache_type="f32")
    alone = model.logits(TOKENS)
    caches = [model.new_cache(room) for room in (200, 201, 260)]
    done = [0, 0, 0]
    for counts in ((1, 140, 17), (1, 1, 1), (150, 3, 2)):
        parts = [(TOKENS[d : d + n], cache) for d, n, cache in zip(done, counts, caches)]
        result = model.forward_batch(parts)
        done = [d + n for d, n in zip(done, counts)]
        assert spread(result, alone[[d - 1 for d in done]]) < 1e-5


@pytest.mark.parametrize("kind", ["q4_0_r8"] if FEW else ["q8_0", "iq4_nl", "bf16", "q4_0_r8"])
@pytest.mark.parametrize("layout", ["joint"] if FEW else LAYOUTS)
def test_quantized_weights(kind: str, layout: str, latents: Callable[..., Path], tmp_path: Path) -> None:
    """Prompts decode the matrices of heads; single tokens multiply them with rounded activations, or transposed."""
    path = rewrite(latents(layout), tmp_path / "m.gguf", kind, ffn="f32")
    base = rewrite(latents(layout), tmp_path / "base.gguf", kind.removesuffix("_r8"), ffn="f32")
    for mla in (0, 1, 3):  # kv_b and its halves are rounded each for itself
        expected = load(base, cache_type="f32", mla=mla).logits(TOKENS[:160])
        model = compiled(path, mla, cache_type="f32")
        assert spread(model.logits(TOKENS[:160]), expected) < HALVES
        expected = load(base, cache_type="f32", mla=min(mla, 1)).logits(TOKENS[:40])
        assert spread(by_steps(model, TOKENS[:40], "f32"), expected) < ROUNDED


def test_what_has_no_kernel_is_named(tmp_path: Path) -> None:
    for sizes, message in (({"nope": 48}, "nope is 48"), ({"v": 16}, "head_dim_v is 16"), ({"rope": 8}, "RoPE of 8")):
        path = latent_model(tmp_path / "m.gguf", **sizes)  # type: ignore[arg-type]
        assert message in (load(path, numerics="fast").fallback_reason or "")


def test_the_form_follows_the_cost() -> None:
    """Long prompts are expanded, few tokens over a long cache absorbed."""
    s = latent_rows.Sizes(16, 128, 64, 512, 128, 2, 1)
    is_expanded = latent_batch._is_expanded
    by_cost = latent_batch.BY_COST
    assert is_expanded(s, by_cost, 512, 0)
    assert is_expanded(s, by_cost, 512, 4096)
    assert not is_expanded(s, by_cost, 16, 4096)
    assert not is_expanded(s, by_cost, 1, 0)
    assert not is_expanded(s, latent_batch.ABSORBED, 512, 0)
    assert is_expanded(s, latent_batch.FROM_TOKENS, 128, 9)
    assert not is_expanded(s, latent_batch.FROM_TOKENS, 127, 9)


@pytest.mark.skipif(not cpu_target.isa().startswith("avx512"), reason="tiles are those of AVX-512")
@pytest.mark.parametrize(("mla", "threads", "layout"), [(3, 1, "all"), (1, 2, "joint"), (0, 2, "all"), (2, 2, "split")])
def test_predicted_memory(mla: int, threads: int, layout: str, latents: Callable[..., Path], tmp_path: Path) -> None:
    path = rewrite(latents(layout), tmp_path / "m.gguf", "q8_0")
    file = gguf.open(path)
    predicted = workspace.work_bytes(file.tensors, file.metadata, 100, threads, mla=mla)
    model = compiled(path, mla, threads=threads, n_ctx=100)
    cache = model.new_cache(100)
    model.forward(np.arange(5), cache)
    model.forward([7], cache)
    assert model._fast is not None
    assert predicted is not None
    assert abs(predicted / model._fast.work_bytes - 1) < 0.02, (predicted, model._fast.work_bytes)


def test_the_example_runs_as_a_plan(tmp_path: Path) -> None:
    """All experts are used, so that rounding turns no choice."""
    tiny(tmp_path / "hf", arch="deepseek2", num_experts_per_tok=8)
    convert_checkpoint(tmp_path / "hf", tmp_path / "m.gguf", "q8_0")
    expected = load(tmp_path / "m.gguf", cache_type="f16").logits(TOKENS[:100])
    model = compiled(tmp_path / "m.gguf")
    assert divergence(expected, model.logits(TOKENS[:100])) < 1e-4
    assert divergence(expected, by_steps(model, TOKENS[:100])) < 1e-3


@pytest.mark.full  # test_same_bits.py compares their logits with this CPU's, which are tested here
@pytest.mark.parametrize("isa", CPUS)
def test_other_code_paths(isa: str) -> None:
    run_tests(__file__, isa)
