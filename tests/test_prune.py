"""Experts by measured saliency, and layers, left out of a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quantkit
from quantkit.cli import main
from quantkit.errors import DataError, UnsupportedError
from quantkit.evaluate.saliency import measure
from quantkit.evaluate.text import cut
from quantkit.formats import gguf
from quantkit.pipelines.conversion.convert import convert_checkpoint
from quantkit.pipelines.prune import most_salient, plan_prune
from tests.archs.checkpoints import tiny
from tests.archs.files import written
from tests.runtime.conftest import rewrite

TOKENS = np.random.default_rng(3).integers(2, 300, 40)


def converted(folder: Path, arch: str, **config: Any) -> Path:
    tiny(folder / "hf", "float32", arch, **config)
    convert_checkpoint(folder / "hf", folder / "model.gguf", "f32")
    return folder / "model.gguf"


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return converted(tmp_path_factory.mktemp("moe"), "qwen3moe")


def contents(path: Path) -> dict[str, Any]:
    return {name: (t.type.name, t.shape, t.stored.tobytes()) for name, t in gguf.open(path).tensors.items()}


def test_saliency_is_the_mean_of_weighted_norms(moe: Path) -> None:
    model = quantkit.load(moe)
    chunks = cut(model.tokenizer, TOKENS.tolist() * 2, "text", 16)
    found = measure(model, chunks)
    seen: list[np.ndarray] = []
    model.observer = lambda name, x, *_: seen.append(x.copy()) if name == "blk.1.ffn_gate_inp.weight" else None
    for chunk in chunks.inputs:
        model.logits(chunk)
    x = np.concatenate(seen).astype(np.float64)
    router, gate, up, down = (
        model.weights[f"blk.1.ffn_{part}.weight"].dequantize().astype(np.float64)
        for part in ("gate_inp", "gate_exps", "up_exps", "down_exps")
    )
    p = np.exp(x @ router.T)
    p /= p.sum(1, keepdims=True)
    used = model.hparams.n_expert_used
    lowest = np.sort(p, axis=1)[:, -used, None]
    w = np.where(p >= lowest, p, 0)
    w /= w.sum(1, keepdims=True)
    for e in range(len(router)):
        a = x @ gate[e].T
        norms = np.linalg.norm((a / (1 + np.exp(-a)) * (x @ up[e].T)) @ down[e].T, axis=1)
        there = w[:, e] > 0
        assert found.tokens[1][e] == there.sum()
        expected = (w[:, e] * norms)[there].mean() if there.any() else 0
        np.testing.assert_allclose(found.of_layer(1)[e], expected, rtol=1e-4)


@pytest.mark.parametrize(("arch", "kind"), [("qwen3moe", "q4_0"), ("gpt-oss", "f32"), ("glm4moe", "f32")])
def test_pruned_experts_are_never_selected(tmp_path: Path, arch: str, kind: str) -> None:
    """The pruned file computes what the whole one does if the router never selects the other experts."""
    path = rewrite(converted(tmp_path, arch), tmp_path / "typed.gguf", kind, bias="f32", exp_probs="f32")
    whole = quantkit.load(path)
    layers = [block.layer for block in whole.blocks if hasattr(block.parts[1], "router")]
    keep = {layer: [0, 2, 3, 5] if layer % 2 else [1, 2, 3, 4] for layer in layers}
    plan_prune(gguf.open(path), keep).write(tmp_path / "pruned.gguf")
    pruned = quantkit.load(tmp_path / "pruned.gguf")
    assert pruned.hparams.n_expert == 4
    route = whole.route

    def without(part: Any, logits: np.ndarray, given: np.ndarray | None = None) -> Any:
        others = np.setdiff1d(np.arange(part.count), keep[int(part.router.weight.split(".")[1])])
        logits[:, others] = -1e9
        return route(part, logits, given)

    whole.route = without  # type: ignore[method-assign]
    np.testing.assert_allclose(pruned.logits(TOKENS), whole.logits(TOKENS), atol=1e-5)
    one = contents(tmp_path / "pruned.gguf")["blk.1.ffn_up_exps.weight"]
    before = gguf.open(path).tensors["blk.1.ffn_up_exps.weight"]
    stored = before.stored.reshape(before.shape[0], -1)[[0, 2, 3, 5]]
    assert one == (before.type.name, (4, *before.shape[1:]), stored.tobytes())


def test_layers(tmp_path: Path) -> None:
    path = converted(tmp_path, "llama", num_hidden_layers=4)
    plan_prune(gguf.open(path), None, [1]).write(tmp_path / "pruned.gguf")
    pruned, whole = quantkit.load(tmp_path / "pruned.gguf"), quantkit.load(path)
    assert pruned.hparams.n_layer == 3
    whole.blocks = [block for block in whole.blocks if block.layer != 1]
    np.testing.assert_array_equal(pruned.logits(TOKENS), whole.logits(TOKENS))
    (tmp_path / "three").mkdir()
    three = gguf.open(converted(tmp_path / "three", "llama", num_hidden_layers=3)).metadata["general.size_label"]
    labels = [gguf.open(p).metadata["general.size_label"] for p in (tmp_path / "pruned.gguf", path)]
    assert labels[0] == three != labels[1]
    with pytest.raises(DataError, match="layers 0 to 3"):
        plan_prune(gguf.open(path), None, [4])
    with pytest.raises(DataError, match="leaves no layer"):
        plan_prune(gguf.open(path), None, range(4))
    with pytest.raises(UnsupportedError, match="no experts"):
        plan_prune(gguf.open(path), {0: [1]})


def test_layers_whose_number_decides(tmp_path: Path) -> None:
    path = converted(tmp_path, "gpt-oss", num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2)
    with pytest.raises(UnsupportedError, match=r"blk\.1 would become blk\.0"):
        plan_prune(gguf.open(path), None, [0])
    plan_prune(gguf.open(path), None, [0, 1]).write(tmp_path / "pruned.gguf")
    assert len(quantkit.load(tmp_path / "pruned.gguf").blocks) == 2


def test_layers_whose_number_decides_what_tensors_they_have(tmp_path: Path) -> None:
    """Every fourth layer of qwen35 has attention; the file is not at fault."""
    file = gguf.open(written(tmp_path / "model.gguf", "qwen35", num_hidden_layers=4))
    with pytest.raises(UnsupportedError, match=r"if 3 layers stay and are numbered anew; .* periods of layers$"):
        plan_prune(file, None, [1])
    plan_prune(file, None, [3])


def test_norms_of_routers_stay_whole(tmp_path: Path) -> None:
    """Gemma 4's ffn_gate_inp.scale has an element for each column, ffn_down_exps.scale one for each expert."""
    path = written(tmp_path / "model.gguf", "gemma4", tokenizer=True)
    plan_prune(gguf.open(path), dict.fromkeys(range(4), (0, 2, 3, 7))).write(tmp_path / "pruned.gguf")
    tensors, whole = gguf.open(tmp_path / "pruned.gguf").tensors, gguf.open(path).tensors
    assert tensors["blk.1.ffn_gate_inp.scale"].shape == whole["blk.1.ffn_gate_inp.scale"].shape
    scales = whole["blk.1.ffn_down_exps.scale"].dequantize().reshape(-1)
    np.testing.assert_array_equal(tensors["blk.1.ffn_down_exps.scale"].dequantize().reshape(-1), scales[[0, 2, 3, 7]])
    assert np.isfinite(quantkit.load(tmp_path / "pruned.gguf").logits(TOKENS)).all()


def test_experts_that_a_table_names(tmp_path: Path) -> None:
    path = written(tmp_path / "model.gguf", "deepseek4")
    with pytest.raises(UnsupportedError, match=r"blk\.0\.ffn_gate_tid2eid\.weight names the experts of each token"):
        plan_prune(gguf.open(path), dict.fromkeys(range(4), range(6)))


def test_groups_of_experts(tmp_path: Path) -> None:
    """A token selects groups first, so as many experts of each have to stay."""
    file = gguf.open(written(tmp_path / "model.gguf", "bailingmoe2", n_group=2, topk_group=1))
    layers = [int(name.split(".")[1]) for name in file.tensors if name.endswith(".ffn_gate_inp.weight")]
    groups, count = (file.metadata[f"bailingmoe2.expert{key}"] for key in ("_group_count", "_count"))
    each = count // groups
    assert groups > file.metadata["bailingmoe2.expert_group_used_count"]
    balanced = [group * each + i for group in range(groups) for i in range(each - 1)]
    plan_prune(file, dict.fromkeys(layers, balanced))
    first = range(len(balanced))
    with pytest.raises(DataError, match=rf"{each} experts of one group of blk\.{layers[0]} stay and 2 of another"):
        plan_prune(file, dict.fromkeys(layers, first))


@pytest.mark.parametrize(
    ("keep", "message"),
    [({0: [0, 1], 1: [0, 1], 7: [0, 1]}, r"experts of blk\.7 are listed, and the file has none there: .* in 2 layers"),
     ({0: [0, 1, 1], 1: [0, 1, 2]}, r"expert 1 of blk\.0 is listed twice"),
     ({0: [0, 6], 1: [0, 1]}, r"blk\.0 has experts 0 to 5, not 6"), ({0: [-1, 1], 1: [0, 1]}, "0 to 5, not -1"),
     ({0: [], 1: []}, r"none of the 6 experts of blk\.0 stays"), ({0: [1, 2]}, r"which experts of blk\.1 stay")],
)  # fmt: skip
def test_lists_that_do_not_fit_the_file(moe: Path, keep: dict[int, list[int]], message: str) -> None:
    with pytest.raises(DataError, match=message):
        plan_prune(gguf.open(moe), keep)


def test_most_salient() -> None:
    assert most_salient({3: [1, 5, 5, 2]}, 2) == {3: [1, 2]}
    assert most_salient({3: [9, 8, 1, 2]}, 2, groups=2) == {3: [0, 3]}
    with pytest.raises(DataError, match="4 experts"):
        most_salient({3: [1, 5, 5, 2]}, 5)
    with pytest.raises(DataError, match="multiple of 2"):
        most_salient({3: [1, 5, 5, 2]}, 3, groups=2)


def test_commands(moe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, scores, out = tmp_path / "text", tmp_path / "s.json", tmp_path / "out.gguf"
    text.write_text("".join(chr(97 + i * i % 26) for i in range(600)))
    assert main(["saliency", "-m", str(moe), "-f", str(text), "-o", str(scores), "-c", "64"]) == 0
    capsys.readouterr()
    assert main(["prune", str(moe), str(out), "--prune-experts", "4", "--saliency", str(scores), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["bytes"] < record["bytes_before"]
    measured = json.loads(scores.read_text())["layers"]["0"]["saliency"]
    assert record["experts"]["0"] == sorted(np.argsort(measured)[-4:].tolist())
    listed = tmp_path / "keep.json"
    listed.write_text(json.dumps({"keep": record["experts"]}))
    assert main(["prune", str(moe), str(tmp_path / "same.gguf"), "--prune-experts", str(listed)]) == 0
    assert contents(tmp_path / "same.gguf") == contents(out)
    assert main(["compare", str(moe), str(out), "-f", str(text), "-c", "64"]) == 0
    assert "KLD" in capsys.readouterr().out
    document = json.loads(scores.read_text())
    document["layers"]["0"]["saliency"].append(1.0)
    (more := tmp_path / "more.json").write_text(json.dumps(document))
    for wrong, status, message in (
        (["--prune-experts", "4"], 2, "--saliency"),
        (["--prune-experts", "4", "--saliency", str(more)], 1, "layer 0 has 7 saliencies, the model has 6 experts"),
        (["--prune-experts", "²", "--saliency", str(scores)], 2, "--saliency"),
        (["--prune-experts", "1", "--saliency", str(scores)], 1, "a token uses"),
        (["--prune-experts", str(scores)], 1, "expected"),
        (["--prune-layers", "1-x"], 2, "--prune-layers '1-x': layers are numbers and ranges"),
        (["--prune-layers", ""], 2, "--prune-layers ''"),
        ([], 2, "--prune-layers"),
    ):
        assert main(["prune", str(moe), str(tmp_path / "x.gguf"), *wrong]) == status
        assert message in capsys.readouterr().err
    assert not (tmp_path / "x.gguf").exists()
    for kept in (moe, text):
        before = kept.read_bytes()
        assert main(["saliency", "-m", str(moe), "-f", str(text), "-o", str(kept), "-c", "64"]) == 1
        assert "this is the input; write to another name" in capsys.readouterr().err
        assert kept.read_bytes() == before
    dense = written(tmp_path / "dense.gguf", "llama")
    assert main(["prune", str(dense), str(tmp_path / "x.gguf"), "--prune-experts", "4", "--saliency", str(scores)]) == 1
    assert "dense.gguf: the file has no experts to prune" in capsys.readouterr().err
