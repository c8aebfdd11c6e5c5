"""Feed-forward with experts: routing against a plain formula, the compiled passes against the exact model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quantkit import archs, cli, types
from quantkit.archs.common import blocks
from quantkit.codegen.jit import readonly
from quantkit.errors import DataError
from quantkit.evaluate.bench import bytes_per_token
from quantkit.formats import gguf
from quantkit.runtime.kernels import reference
from quantkit.runtime.loading import load
from tests.other_cpus import CPUS, is_other_cpu, run_tests
from tests.runtime.conftest import random_model, rewrite
from tests.runtime.test_step import by_steps, changed, spread

VOCAB, EMBD, FF, EXPERTS, USED = 320, 256, 256, 8, 3
TOKENS = np.random.default_rng(4).integers(0, VOCAB, 59)
NONE = readonly(np.zeros(0, np.float32))
ALL = {"qwen3moe.expert_used_count": (EXPERTS, "u32")}


# What compiles of kernels for another CPU is what takes time: there, tests that have kernels of their own, few types.
ELSEWHERE = ("test_routing_is_the_plain_formula", "test_routing_by_softplus_is_the_plain_formula",
             "test_softplus_and_a_table_of_experts", "test_all_tokens_on_the_same_experts", "test_gate_up_and_down",
             "test_quantized_experts_are_near_the_exact_model")  # fmt: skip


@pytest.fixture(autouse=True)
def _chosen(request: pytest.FixtureRequest) -> None:
    if is_other_cpu() and not request.node.name.startswith(ELSEWHERE):
        pytest.skip("run for this CPU only")


@pytest.fixture(scope="session")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random qwen3moe whose rows are multiples of 256, so that every type fits."""
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, EMBD), "output.weight": (VOCAB, EMBD)}
    for i in range(2):
        shapes |= {f"blk.{i}.{name}_norm.weight": (EMBD,) for name in ("attn", "ffn")}
        shapes |= {f"blk.{i}.attn_{name}_norm.weight": (64,) for name in "qk"}
        shapes |= {f"blk.{i}.attn_{name}.weight": (rows, EMBD) for name, rows in (("q", 256), ("k", 64), ("v", 64))}
        shapes |= {f"blk.{i}.attn_output.weight": (EMBD, 256), f"blk.{i}.ffn_gate_inp.weight": (EXPERTS, EMBD)}
        shapes |= {f"blk.{i}.ffn_{name}_exps.weight": (EXPERTS, FF, EMBD) for name in ("gate", "up")}
        shapes |= {f"blk.{i}.ffn_down_exps.weight": (EXPERTS, EMBD, FF)}
    shapes["output_norm.weight"] = (EMBD,)
    metadata = gguf.Metadata()
    metadata.set("general.architecture", "qwen3moe", "str")
    numbers = {
        "block_count": 2, "context_length": 128, "embedding_length": EMBD, "feed_forward_length": 512,
        "attention.head_count": 4, "attention.head_count_kv": 1, "attention.key_length": 64,
        "attention.value_length": 64, "expert_count": EXPERTS, "expert_used_count": USED,
        "expert_feed_forward_length": FF, "vocab_size": VOCAB,
    }  # fmt: skip
    for key, value in numbers.items():
        metadata.set(f"qwen3moe.{key}", value, "u32")
    metadata.set("qwen3moe.attention.layer_norm_rms_epsilon", 1e-6, "f32")
    path = tmp_path_factory.mktemp("moe") / "moe.gguf"
    return random_model(path, metadata, shapes, np.random.default_rng(6))


@pytest.fixture(scope="session")
def dense(moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All experts used, so the result does not depend on which of two nearly equal ones is chosen."""
    return changed(moe, tmp_path_factory.mktemp("dense") / "dense.gguf", ALL, {})


# ------------------------------------------------------------------------------------------------------------- routing


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize(
    ("used", "least", "share"), [(1, 1, 0), (3, 3, 0), (8, 8, 0), (4, 2, 0.5), (4, 1, 1), (8, 3, 0.0)]
)
def test_routing_is_the_plain_formula(
    used: int, least: int, share: float, normalise: bool, rng: np.random.Generator
) -> None:
    for _ in range(50):
        logits = rng.standard_normal(8).astype(np.float32)
        p = np.exp(logits.astype(np.float64))
        p /= p.sum()
        order = np.argsort(-p, kind="stable")[:used]
        kept = [e for rank, e in enumerate(order) if rank < least or p[e] > share * p[order[0]]]
        expected = p[kept] / (p[kept].sum() if normalise else 1) * 2.5
        chosen, weights = np.full(used, -7, np.int64), np.zeros(used, np.float32)
        count = reference.route(
            logits, NONE, False, 1, 1, used, least, np.float32(share), normalise, np.float32(2.5), chosen, weights
        )
        assert list(chosen[:count]) == kept
        np.testing.assert_allclose(weights[:count], expected, rtol=1e-5)


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("source", ["scores", "bias", "table"])
@pytest.mark.parametrize(("used", "least", "share"), [(1, 1, 0), (3, 3, 0), (7, 7, 0), (4, 2, 0.9), (4, 1, 1)])
def test_routing_by_softplus_is_the_plain_formula(
    used: int, least: int, share: float, source: str, normalise: bool, rng: np.random.Generator
) -> None:
    for scale in (1, 1, 1, 10, 25):
        logits = (scale * rng.standard_normal(7)).astype(np.float32)
        p = np.sqrt(np.logaddexp(0, logits.astype(np.float64)))
        bias = rng.standard_normal(7).astype(np.float32) if source == "bias" else NONE
        given = rng.permutation(7)[:used] if source == "table" else np.zeros(0, np.int64)
        selected = given if source == "table" else np.argsort(-(p + bias if source == "bias" else p))[:used]
        order = selected[np.argsort(-p[selected])]
        kept = [e for rank, e in enumerate(order) if rank < least or p[e] > share * p[order[0]]]
        expected = p[kept] / (p[kept].sum() if normalise else 1) * 2.5
        chosen, weights = np.full(used, -7, np.int64), np.full(used, np.nan, np.float32)
        count = reference.route_softplus(
            logits, bias, given, used, least, np.float32(share), normalise, np.float32(2.5), chosen, weights
        )
        assert list(chosen[:count]) == kept
        np.testing.assert_allclose(weights[:count], expected, rtol=1e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_routing_of_what_is_not_finite_is_within_bounds_and_shows(bad: float) -> None:
    logits = np.array([1, bad, 2, 3], np.float32)
    chosen, weights = np.full(3, -7, np.int64), np.zeros(3, np.float32)
    count = reference.route(logits, NONE, False, 1, 1, 3, 3, np.float32(0), True, np.float32(1), chosen, weights)
    assert count == 3
    assert sorted(set(chosen)) == sorted(chosen)
    assert set(chosen) <= {0, 1, 2, 3}
    assert np.isnan(weights).any()


def test_equal_probabilities_take_the_first() -> None:
    chosen, weights = np.zeros(2, np.int64), np.zeros(2, np.float32)
    reference.route(
        np.zeros(5, np.float32), NONE, False, 1, 1, 2, 2, np.float32(0), True, np.float32(1), chosen, weights
    )
    assert list(chosen) == [0, 1]
    assert list(weights) == [0.5, 0.5]


# ------------------------------------------------------------------------------------------------- the compiled passes


def check(path: Path, limit: float, **options: object) -> None:
    """The fast model against the exact one: prompts of several odd lengths, and token by token."""
    expected = load(path, cache_type="f32", expert_reduction=options.get("expert_reduction")).logits(TOKENS)  # type: ignore[arg-type]
    fast = load(path, numerics="fast", cache_type="f32", **options)  # type: ignore[arg-type]
    assert fast.fallback_reason is None
    for count in (2, 7, 59):
        assert spread(fast.logits(TOKENS[:count]), expected[:count]) < limit
    assert spread(by_steps(fast, TOKENS), expected) < limit


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("used", [1, USED, EXPERTS])
def test_float_weights_agree_with_the_exact_model(used: int, fused: bool, moe: Path, tmp_path: Path) -> None:
    path = changed(moe, tmp_path / "m.gguf", {"qwen3moe.expert_used_count": (used, "u32")}, {})
    check(path, 1e-5, fused_experts=fused)


@pytest.mark.parametrize("used", [1, USED])
def test_all_tokens_on_the_same_experts(used: int, moe: Path, tmp_path: Path) -> None:
    """Routers of zeros: the first experts get every token, the others none."""
    zeros = {f"blk.{i}.ffn_gate_inp.weight": np.zeros((EXPERTS, EMBD), np.float32) for i in range(2)}
    path = changed(moe, tmp_path / "m.gguf", {"qwen3moe.expert_used_count": (used, "u32")}, zeros)
    check(path, 1e-5)


def test_weights_that_are_not_normalised(moe: Path, tmp_path: Path) -> None:
    check(changed(moe, tmp_path / "m.gguf", {"qwen3moe.expert_weights_norm": (False, "bool")}, {}), 1e-5)


def test_softplus_and_a_table_of_experts(moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layer takes the experts of a token from a table, the second selects them by biased scores."""
    arch, rng = archs.get("qwen3moe"), np.random.default_rng(9)
    table = np.array([rng.permutation(EXPERTS)[:USED] for _ in range(VOCAB)], "<i4")
    extra = {"blk.0.table": table, "blk.1.bias": rng.standard_normal(EXPERTS).astype(np.float32)}
    path, own = changed(moe, tmp_path / "m.gguf", {}, extra), arch.block

    def block(hp: blocks.HParams, i: int) -> blocks.Block:
        attention, part = own(hp, i).parts
        assert isinstance(part, blocks.Experts)
        bias, table = ("blk.1.bias", None) if i else (None, "blk.0.table")
        return blocks.Block(i, (attention, replace(part, gating="sqrtsoftplus", choice_bias=bias, table=table)))

    monkeypatch.setattr(arch, "block", block)
    check(path, 1e-5)
    check(path, 1e-5, threads=3, expert_reduction=(1, 0.9))
    caches = [model.new_cache(64) for model in [load(path, numerics="fast", cache_type="f32")] * 2]
    model = load(path, numerics="fast", cache_type="f32")
    ends = model.forward_batch([(TOKENS[:5], caches[0]), (TOKENS[30:], caches[1])])
    for found, ids in zip(ends, (TOKENS[:5], TOKENS[30:])):
        assert spread(found[None], load(path, cache_type="f32").logits(ids)[-1:]) < 1e-5
    table[TOKENS[3], 1] = EXPERTS
    bad = load(changed(moe, tmp_path / "bad.gguf", {}, extra), numerics="fast")
    for ids in (TOKENS[:7], TOKENS[3:4]):
        with pytest.raises(DataError, match="none of 0 to 7"):
            bad.logits(ids)


@pytest.mark.parametrize("threads", [1, 3])
def test_any_number_of_threads(threads: int, moe: Path) -> None:
    check(moe, 1e-5, threads=threads)


KINDS = ["q4_0", "iq4_k", "bf16", "f16", "q8_0", "q4_K", "q8_0_r8", "q4_K_r4", "iq4_k_r4"]
FURTHER = ["iq2_xxs", "iq3_k", "iq4_ks", "iq4_kt", "mxfp4", "iq1_m", "iq4_xs_r8"]


@pytest.mark.parametrize(
    "kind",
    [*(KINDS[:2] if is_other_cpu() else KINDS), *(pytest.param(kind, marks=pytest.mark.full) for kind in FURTHER)],
)
def test_quantized_experts_are_near_the_exact_model(kind: str, dense: Path, tmp_path: Path) -> None:
    path = rewrite(dense, tmp_path / "m.gguf", "f32", _exps=kind)
    assert gguf.open(path).tensors["blk.1.ffn_up_exps.weight"].type is types.get(kind)
    check(path, 1e-3 if "f16" in kind else 0.02)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kinds", [("q4_0", "f32", "q4_0"), ("f32", "f32", "q4_0"), ("iq4_k", "iq4_k", "f16")])
def test_gate_up_and_down_of_several_types(
    kinds: tuple[str, str, str], fused: bool, dense: Path, tmp_path: Path
) -> None:
    """Float rows and tiles of integers side by side; gate and up of two types run unfused, also with `fused`."""
    others = dict(zip(("gate_exps", "up_exps", "down_exps"), kinds))
    check(rewrite(dense, tmp_path / "m.gguf", "f32", **others), 0.02, fused_experts=fused)


def test_experts_reduced(moe: Path) -> None:
    check(moe, 1e-5, expert_reduction=(1, 0.6))
    exact = [load(moe, expert_reduction=given).logits(TOKENS) for given in (None, (1, 0.0), (1, 0.6))]
    assert np.array_equal(exact[0], exact[1])
    assert spread(exact[2], exact[0]) > 0.01


def test_one_expert_whatever_its_share(moe: Path, tmp_path: Path) -> None:
    """t = 1 leaves exactly K: with K = 1 and weights that are divided by their sum, a model of one expert a token."""
    one = changed(moe, tmp_path / "m.gguf", {"qwen3moe.expert_used_count": (1, "u32")}, {})
    np.testing.assert_allclose(
        load(moe, expert_reduction=(1, 1.0)).logits(TOKENS), load(one).logits(TOKENS), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    ("given", "message"), [((3, 0.5), "below the 3"), ((0, 0.5), "at least 1"), ((1, 1.5), "0 to 1")]
)
def test_reductions_that_make_no_sense(given: tuple[int, float], message: str, moe: Path) -> None:
    with pytest.raises(DataError, match=message):
        load(moe, expert_reduction=given)


def test_no_experts_to_reduce(tiny: Path) -> None:
    with pytest.raises(DataError, match="no experts"):
        load(tiny, expert_reduction=(1, 0.5))


@pytest.mark.parametrize(("kind", "form"), [("q4_K", "q4_K_r4"), ("q8_0", "q8_0_r8")])
def test_repacked_at_load(kind: str, form: str, dense: Path, tmp_path: Path) -> None:
    path = rewrite(dense, tmp_path / "m.gguf", "f32", _exps=kind)
    plain, repacked = (load(path, numerics="fast", repack=again) for again in (False, True))
    assert repacked.fallback_reason is None
    assert repacked.weights["blk.0.ffn_down_exps.weight"].type is types.get(form)
    assert spread(repacked.logits(TOKENS), plain.logits(TOKENS)) < 0.02
    assert spread(by_steps(repacked, TOKENS[:9]), by_steps(plain, TOKENS[:9])) < 0.02
    exact = [load(path, repack=again).logits(TOKENS) for again in (False, True)]
    np.testing.assert_allclose(exact[0], exact[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tokens", [[3], [3, 4, 5]])
def test_the_tripwire_names_the_tensor(tokens: list[int], moe: Path, tmp_path: Path) -> None:
    router = gguf.open(moe).tensors["blk.1.ffn_gate_inp.weight"].dequantize().copy()
    router[5, 7] = np.nan
    path = changed(moe, tmp_path / "bad.gguf", {}, {"blk.1.ffn_gate_inp.weight": router})
    with pytest.raises(DataError, match=r"blk\.1\.ffn_gate_inp\.weight"):
        load(path, numerics="fast").forward(tokens, load(path).new_cache(16))


def test_the_observer_sees_what_enters_each_expert(moe: Path) -> None:
    """Which tokens an expert gets follows from what enters the router; what leaves it enters the down projection."""
    model, seen = load(moe), {}
    model.observer = lambda name, x, expert=None, experts=1: seen.setdefault((name, expert), (x, experts))
    expected = load(moe).logits(TOKENS[:7])
    assert np.array_equal(model.logits(TOKENS[:7]), expected)
    y, _ = seen["blk.1.ffn_gate_inp.weight", None]
    router, gate, up = (
        model.weights[f"blk.1.ffn_{name}.weight"].dequantize() for name in ("gate_inp", "gate_exps", "up_exps")
    )
    chosen = np.argsort(-(y @ router.T), axis=1, kind="stable")[:, :USED]
    for expert in range(EXPERTS):
        tokens = np.flatnonzero((chosen == expert).any(axis=1))
        if not len(tokens):
            assert ("blk.1.ffn_up_exps.weight", expert) not in seen
            continue
        for name in ("gate", "up"):
            x, experts = seen[f"blk.1.ffn_{name}_exps.weight", expert]
            assert experts == EXPERTS
            np.testing.assert_array_equal(x, y[tokens])
        g, u = y[tokens] @ gate[expert].T, y[tokens] @ up[expert].T
        x, _ = seen["blk.1.ffn_down_exps.weight", expert]
        np.testing.assert_allclose(x, g / (1 + np.exp(-g)) * u, rtol=2e-3, atol=2e-3)


def test_what_a_token_reads_are_the_experts_it_uses(moe: Path) -> None:
    model = load(moe)
    rows = sum(t.nbytes for name, t in model.weights.items() if "_exps" not in name and "token_embd" not in name)
    experts = sum(t.nbytes for name, t in model.weights.items() if "_exps" in name)
    assert bytes_per_token(model, 0) == rows + experts // EXPERTS * USED + 4 * EMBD
    assert bytes_per_token(load(moe, expert_reduction=(1, 0.5)), 0) == rows + experts // EXPERTS + 4 * EMBD


@pytest.mark.parametrize("given", ["2", "a,b", "1,2,3"])
def test_reductions_that_cannot_be_read_are_bad_usage(
    given: str, moe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", str(moe), "-p", "2", "-n", "0", "-ser", given]) == 2
    assert "write K,T" in capsys.readouterr().err


def test_a_reduction_is_among_the_conditions(moe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["-p", "2", "-n", "0", "-r", "1", "-ser", "1,0.5", "-no-fmoe", "--json"]
    assert cli.main(["bench", str(moe), *options]) == 0
    assert '"1,0.5"' in capsys.readouterr().out
    assert cli.main(["bench", str(moe), "-p", "2", "-n", "0", "-r", "1", "-ser", "3,0.5"]) == 1
    assert "below the 3 experts used" in capsys.readouterr().err


def test_stacks_of_the_wrong_shape_are_refused(moe: Path, tmp_path: Path) -> None:
    path = changed(moe, tmp_path / "m.gguf", {"qwen3moe.expert_count": (EXPERTS - 1, "u32")}, {})
    with pytest.raises(Exception, match=r"shape \(8, 256\), the metadata say \(7, 256\)"):
        load(path)


@pytest.mark.full  # test_same_bits.py compares their logits with this CPU's, which are tested here
@pytest.mark.parametrize("isa", CPUS)
def test_on_other_cpus(isa: str) -> None:
    run_tests(__file__, isa)
