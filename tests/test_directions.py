"""The directions of inputs that weights and importance tell: which tensors, which norms, and whether they are right."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

import quantkit
from quantkit import directions, recipe, types, verify
from quantkit.cli import main
from quantkit.errors import DataError
from quantkit.files import provenance
from quantkit.files.gguf import Metadata, TensorSpec, Writer
from quantkit.files.imatrix import Entry, Imatrix
from quantkit.quantize import quantize
from quantkit.types import QuantType

WIDTH, FF = 64, 96


@dataclass
class Tensor:
    """A tensor in memory, as a source has it."""

    values: np.ndarray
    path: str = "model.gguf"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def type(self) -> QuantType:
        return types.get("f32")

    def rows(self, start: int, stop: int) -> np.ndarray:
        return self.values.reshape(-1, self.shape[-1])[start:stop].view(np.uint8)


def model(rng: np.random.Generator, blocks: int = 3, experts: int = 0, **more: np.ndarray) -> dict[str, Tensor]:
    """A llama of `blocks` blocks, or one of experts; a few neurons of each write much."""
    made: dict[str, np.ndarray] = {}
    for i in range(blocks):
        b = f"blk.{i}."
        for norm in ("attn_norm", "ffn_norm"):
            made[b + norm] = rng.uniform(0.5, 2, WIDTH)
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            made[b + name] = rng.standard_normal((WIDTH, WIDTH))
        names, of = (("ffn_gate", "ffn_up", "ffn_down"), ()) if not experts else (
            ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"), (experts,))  # fmt: skip
        for name in names:
            made[b + name] = rng.standard_normal((*of, WIDTH, FF) if "down" in name else (*of, FF, WIDTH))
        made[b + names[2]][..., :3] *= 20
    made |= more
    return {f"{name}.weight": Tensor(np.ascontiguousarray(v, np.float32)) for name, v in made.items() if v.size}


def importance(rng: np.random.Generator, tensors: dict[str, Tensor]) -> Imatrix:
    matrix = Imatrix(entries={}, chunks=1, chunk_size=512)
    for name, tensor in tensors.items():
        if len(tensor.shape) > 1:
            matrices = tensor.shape[0] if len(tensor.shape) == 3 else 1
            values = rng.gamma(1, size=(matrices, tensor.shape[-1])).astype(np.float32)
            matrix.entries[name] = Entry(values, np.arange(matrices, dtype=np.int64)[::-1] + 5, 1)
    return matrix


def moments(tensors, matrix, writers, scale=None):
    """sum of W diag(q) W^T over matrices, in full."""
    total = np.zeros((WIDTH, WIDTH))
    for name in writers:
        w = tensors[f"{name}.weight"].values.astype(np.float64)
        q = matrix.entries[f"{name}.weight"].values[0].astype(np.float64) if matrix else np.ones(w.shape[-1])
        part = (w * q) @ w.T
        total += part if scale is None else np.outer(scale, scale) * part / (np.trace(part) / WIDTH)
    return total


def largest(moments, gain, count):
    return np.linalg.eigh(np.outer(gain, gain) * moments)[1][:, ::-1][:, :count]


def share(found, expected):
    """How much of the span of one the other's holds, 1 for all."""
    return float(((found.astype(np.float64) @ expected) ** 2).sum() / expected.shape[1])


@pytest.mark.parametrize("with_importance", [True, False])
def test_they_are_eigenvectors_of_what_was_written(rng, with_importance):
    tensors = model(rng)
    matrix = importance(rng, tensors) if with_importance else None
    found = directions.find(tensors, {}, matrix, set(tensors), count=3)
    assert set(found) == {name for name in tensors if name.split(".")[2] in ("ffn_gate", "ffn_up")} | {
        f"blk.{i}.attn_{x}.weight" for i in (1, 2) for x in "qkv"}  # fmt: skip
    before = [f"blk.{i}.{name}" for i in range(2) for name in ("attn_output", "ffn_down")]
    for name, writers in (("attn_k", before), ("ffn_up", [*before, "blk.2.attn_output"])):
        v, gain = found[f"blk.2.{name}.weight"], tensors[f"blk.2.{name[:3].replace('att', 'attn')}_norm.weight"]
        assert v.shape == (3, WIDTH)
        assert v.dtype == np.float32
        np.testing.assert_allclose(v @ v.T, np.eye(3), atol=1e-3)
        assert share(v, largest(moments(tensors, matrix, writers), gain.values, 3)) > 0.95


def test_what_is_not_wanted_is_not_read(rng):
    tensors = model(rng)
    assert directions.find(tensors, {}, None, set()) == {}
    tensors["blk.1.ffn_down.weight"].values[5, 7] = np.nan  # written after the last reader that is asked for
    assert set(directions.find(tensors, {}, None, {"blk.1.ffn_up.weight"})) == {"blk.1.ffn_up.weight"}
    with pytest.raises(DataError, match=r"model.gguf: blk.1.ffn_down.weight: row 5, column 7 is nan"):
        directions.find(tensors, {}, None, {"blk.2.attn_q.weight"})


def test_norms_behind_attention_and_before_experts(rng):
    tensors = model(rng, 2)
    for i in range(2):
        for name in ("post_attention_norm", "post_ffw_norm"):
            tensors[f"blk.{i}.{name}.weight"] = Tensor(rng.uniform(0.1, 9, WIDTH).astype(np.float32))
    found = directions.find(tensors, {}, None, set(tensors), count=1)
    after = tensors["blk.0.post_attention_norm.weight"].values
    expected = largest(moments(tensors, None, ["blk.0.attn_output"], after), tensors["blk.0.ffn_norm.weight"].values, 1)
    assert share(found["blk.0.ffn_up.weight"], expected) > 0.9
    del tensors["blk.0.ffn_norm.weight"]  # then it is the norm before the experts
    assert [half.norm for half in directions.halves(tensors)][:2] == [
        "blk.0.attn_norm.weight", "blk.0.post_attention_norm.weight"]  # fmt: skip
    assert next(iter(directions.halves(tensors))).after is None


def test_experts_that_saw_most_are_read(rng):
    tensors = model(rng, 2, experts=directions.EXPERTS + 4)
    matrix = importance(rng, tensors)
    down = tensors["blk.0.ffn_down_exps.weight"].values
    wanted = {"blk.1.attn_q.weight", "blk.1.ffn_gate_exps.weight"}
    metadata = {"general.architecture": "qwen3moe", "qwen3moe.expert_used_count": 4}
    found = directions.find(tensors, metadata, matrix, wanted)
    assert set(found) == wanted
    down[directions.EXPERTS :] = np.nan  # those of the smallest counts
    again = directions.find(tensors, metadata, matrix, wanted)
    assert all(np.array_equal(found[name], again[name]) for name in wanted)
    entry = matrix.entries["blk.0.ffn_down_exps.weight"]
    legacy = Imatrix(matrix.entries | {"blk.0.ffn_down_exps.weight": Entry(entry.values, np.ones(1, np.int64), 1)}, 1)
    assert set(directions.find(tensors, metadata, legacy, wanted)) == wanted
    seen, total = entry.counts[: directions.EXPERTS], moments(tensors, matrix, ["blk.0.attn_output"])
    for e, count in enumerate(seen):
        total += (down[e] * entry.values[e].astype(np.float64)) @ down[e].T * (count / seen.sum() / 4)
    assert share(found["blk.1.attn_q.weight"], largest(total, tensors["blk.1.attn_norm.weight"].values, 4)) > 0.9


def test_writers_that_the_importance_lacks_are_left_out(rng):
    tensors = model(rng, 2)
    matrix = importance(rng, tensors)
    del matrix.entries["blk.0.attn_output.weight"]
    found = directions.find(tensors, {}, matrix, set(tensors), count=2)
    assert "blk.0.ffn_up.weight" not in found
    gain = tensors["blk.1.attn_norm.weight"].values
    assert share(found["blk.1.attn_q.weight"], largest(moments(tensors, matrix, ["blk.0.ffn_down"]), gain, 2)) > 0.95


def test_weights_of_nothing_are_no_directions(rng):
    tensors = model(rng, 2)
    for name in ("attn_output", "ffn_down"):
        tensors[f"blk.0.{name}.weight"].values[:] = 0
    found = directions.find(tensors, {}, None, set(tensors))
    assert set(found) == {"blk.1.ffn_gate.weight", "blk.1.ffn_up.weight"}


def test_few_large_columns_are_the_importances_affair(rng):
    """Axes of a model's own, of which one is large, and the same model turned."""
    tensors = model(rng, 2)
    for name in ("attn_output", "ffn_down"):
        tensors[f"blk.0.{name}.weight"].values[5] *= 100
    assert directions.find(tensors, {}, None, {"blk.1.attn_q.weight"}) == {}
    turned = np.linalg.qr(rng.standard_normal((WIDTH, WIDTH)))[0].astype(np.float32)
    for name in ("attn_output", "ffn_down"):
        tensors[f"blk.0.{name}.weight"].values[:] = turned @ tensors[f"blk.0.{name}.weight"].values
    tensors["blk.1.attn_norm.weight"].values[:] = 1
    found = directions.find(tensors, {}, None, {"blk.1.attn_q.weight"})["blk.1.attn_q.weight"]
    assert abs(float(found[0] @ turned[:, 5])) > 0.99


# ------------------------------------------------------------------------------------------------------------- in files


def write(path, tensors):
    metadata = Metadata({"general.architecture": "llama"})
    metadata.set("llama.block_count", 2, "u32")
    specs = [TensorSpec(name, tensor.shape, types.get("f32")) for name, tensor in tensors.items()]
    with Writer(path, metadata, specs) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor.values.reshape(-1).view(np.uint8))
    return path


def test_files_hold_what_types_make_of_them(rng, tmp_path):
    tensors = model(rng, 2)
    matrix = importance(rng, tensors)
    source = quantkit.open(write(tmp_path / "in.gguf", tensors))
    found = directions.find(source.tensors, source.metadata, matrix, set(tensors))
    rules = recipe.parse("attn_k=q8_0,attn_v=q4_0_r8")
    plan = recipe.plan(source.tensors.values(), "Q4_0", rules, imatrix=matrix, metadata=source.metadata)
    for out, count in (("usual", directions.COUNT), ("none", 0)):
        quantize(source, tmp_path / out, plan, imatrix=matrix, directions=count)
    usual, none = quantkit.open(tmp_path / "usual"), quantkit.open(tmp_path / "none")
    for planned in plan.tensors:
        if len(planned.shape) < 2:
            continue
        name, x, q = planned.name, tensors[planned.name].values, matrix.entries[planned.name].values[0]
        along = found.get(name) if planned.type.nudges else None
        assert np.array_equal(usual.tensors[name].data, planned.type.quantize(x, q, directions=along).reshape(-1)
                              .reshape(usual.tensors[name].data.shape))  # fmt: skip
        assert np.array_equal(
            none.tensors[name].data, planned.type.quantize(x, q).reshape(none.tensors[name].data.shape)
        )
        moved = not np.array_equal(usual.tensors[name].data, none.tensors[name].data)
        assert moved == (along is not None)
        assert ("+" in provenance.records(usual.metadata)[name].importance) == moved
    assert "quantkit.directions" not in usual.metadata
    assert none.metadata["quantkit.directions"] == 0
    assert verify.verify(usual, source=source, imatrix=matrix).rerun is True


def test_a_file_without_importance_needs_none_to_be_verified(rng, tmp_path):
    source = quantkit.open(write(tmp_path / "in.gguf", model(rng, 2)))
    plan = recipe.plan(source.tensors.values(), "Q4_0", metadata=source.metadata)
    quantize(source, tmp_path / "out.gguf", plan)
    out = quantkit.open(tmp_path / "out.gguf")
    assert any(r.importance.startswith("-+") for r in provenance.records(out.metadata).values())
    assert verify.verify(out, source=source).rerun is True


def test_the_command(rng, tmp_path, capsys):
    path, out = write(tmp_path / "in.gguf", model(rng, 2)), tmp_path / "out.gguf"
    assert main(["quantize", str(path), str(out), "Q4_0", "--directions", "2"]) == 0
    assert quantkit.open(out).metadata["quantkit.directions"] == 2
    assert main(["inspect", str(out), "--card"]) == 0
    assert "--directions 2" in capsys.readouterr().out
    assert main(["quantize", str(path), str(out), "Q4_0", "--directions", "-1"]) == 1
    assert "-1 directions: pass 0 for none" in capsys.readouterr().err
