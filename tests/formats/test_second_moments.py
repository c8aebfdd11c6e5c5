"""Second moments in importance matrices: storage, shrinkage, merging, hostile files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quantkit.codegen import blas
from quantkit.errors import DataError, FormatError
from quantkit.formats import gguf, imatrix
from quantkit.formats.imatrix import Entry, Imatrix, SecondMoments, factors, second_moments
from quantkit.formats.imatrix.second_moments import merge, pack, shrinkage, stored_values, unpack

TOKENS = 1 << 40  # so many that there is no noise


@pytest.fixture(autouse=True)
def of_any_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Correlations hold for other texts as well, so that H is that of the vectors."""
    monkeypatch.setattr(second_moments, "OF_THE_TEXT", 0.0)


def vectors(count: int, n: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((count, n)) @ rng.standard_normal((n, n)) * np.exp(2 * rng.standard_normal(n))
    x[:, n // 2] = 0
    return np.float32(x)


def measured(x: np.ndarray, block: int, tokens: int = TOKENS) -> tuple[SecondMoments, np.ndarray]:
    """Second moments of vectors float32[count, n], and the importance of their columns."""
    n = x.shape[1]
    parts = [x[:, first : first + block] for first in range(0, n, block)]
    packed = pack([part.T @ part for part in parts])
    importance = np.float32((x.astype(np.float64) ** 2).mean(0))
    return SecondMoments(n, block, packed[None], np.array([tokens])), importance


@pytest.mark.parametrize("block", [1, 7, 32, 40, 64])
def test_what_is_stored_comes_back(block: int) -> None:
    x = vectors(300, 40)
    moments, importance = measured(x, block)
    assert moments.correlations.shape[1] == stored_values(40, block)
    assert moments.form == ("full" if block >= 40 else f"blocks:{block}")
    h = moments.dense(importance)
    expected = x.astype(np.float64).T @ x / len(x)
    same_block = np.arange(40)[:, None] // block == np.arange(40) // block
    scale = np.sqrt(np.outer(importance, importance))
    assert np.abs(h - np.where(same_block, expected, 0)).max() <= 2**-11 * scale.max()
    assert (np.abs(h - np.where(same_block, expected, 0)) <= 2**-11 * scale + 1e-30).all()
    np.testing.assert_allclose(np.diagonal(h), importance, rtol=1e-6)
    np.testing.assert_allclose(h, h.T, rtol=1e-6)


def test_packing_undoes_unpacking() -> None:
    packed = np.float32(np.random.default_rng(1).uniform(-1, 1, stored_values(50, 16)))
    c = unpack(packed, 50, 16)
    assert np.array_equal(c, c.T)
    triangles = [c[a : a + 16, a : a + 16][np.triu_indices(min(16, 50 - a))] for a in range(0, 50, 16)]
    assert np.array_equal(np.concatenate(triangles), packed)


@pytest.mark.parametrize("of_the_text", [0.0, 0.25])
def test_few_tokens_and_other_texts_shrink_correlations(of_the_text: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(second_moments, "OF_THE_TEXT", of_the_text)
    x = vectors(300, 40)
    many, importance = measured(x, 40)
    few = replace(many, tokens=np.array([120]))
    a = shrinkage(120, 40)
    assert a == 0.25 + 0.75 * of_the_text
    assert shrinkage(TOKENS, 40) == pytest.approx(of_the_text, abs=1e-9)
    assert shrinkage(0, 40) == 1
    off = ~np.eye(40, dtype=bool)
    kept = (1 - a) / (1 - of_the_text)
    np.testing.assert_allclose(few.dense(importance)[off], kept * many.dense(importance)[off], rtol=1e-5, atol=1e-30)
    np.testing.assert_allclose(np.diagonal(few.dense(importance)), importance, rtol=1e-6)
    nothing = replace(many, tokens=np.array([0])).dense(importance)
    assert not nothing[off].any()


def example(seed: int = 0) -> Imatrix:
    """Two weights with one input, one with its own, one in blocks, and a stack of three with two kinds of storage."""
    x, y = vectors(200, 32, seed), vectors(200, 48, seed + 1)
    (shared, a), (blocks, b) = measured(x, 32, 200), measured(y, 16, 200)
    one, values = measured(vectors(90, 32, seed + 2), 32, 90)
    stack = replace(one, correlations=np.repeat(one.correlations, 3, 0), tokens=np.array([30, 0, 60]))
    entries = {name: Entry(a[None], np.array([200]), 2) for name in ("blk.0.attn_q.weight", "blk.0.attn_k.weight")}
    entries["blk.0.ffn_down.weight"] = Entry(b[None], np.array([200]), 2)
    for kind in ("up", "down"):
        entries[f"blk.0.ffn_{kind}_exps.weight"] = Entry(np.repeat(values[None], 3, 0), np.array([30, 20, 40]), 2)
    entries["blk.0.none.weight"] = Entry(a[None], np.array([200]), 2)
    found = dict(zip(entries, (shared, shared, blocks, one, stack)))
    return Imatrix(entries, 2, "t", 100, second_moments=found)


def test_files_hold_them_once(tmp_path: Path) -> None:
    made = example()
    imatrix.write(tmp_path / "x.gguf", made)
    names = [n for n in gguf.open(tmp_path / "x.gguf").tensors if n.endswith(".correlations")]
    assert names == [f"blk.0.{n}.weight.correlations" for n in ("attn_q", "ffn_down", "ffn_up_exps", "ffn_down_exps")]
    back = imatrix.read(tmp_path / "x.gguf")
    assert back.second_moments.keys() == made.second_moments.keys()
    assert back.second_moments["blk.0.attn_q.weight"] is back.second_moments["blk.0.attn_k.weight"]
    for name, moments in made.second_moments.items():
        read = back.second_moments[name]
        assert (read.columns, read.block, read.form) == (moments.columns, moments.block, moments.form)
        assert read.sha256() == moments.sha256()
        for matrix in range(len(made[name].values)):
            row = made[name].values[matrix]
            assert np.array_equal(read.dense(row, matrix), moments.dense(row, matrix))
    imatrix.write(tmp_path / "y.gguf", back)
    assert (tmp_path / "y.gguf").read_bytes() == (tmp_path / "x.gguf").read_bytes()
    with pytest.raises(DataError, match="legacy format does not hold second moments"):
        imatrix.write(tmp_path / "x.dat", made)


def test_a_merge_is_that_of_all_vectors(tmp_path: Path) -> None:
    parts = [vectors(200, 32, 3), vectors(100, 32, 4) * np.float32(3)]
    matrices = []
    for x in parts:
        moments, importance = measured(x, 32, len(x))
        matrices.append(Imatrix({"w": Entry(importance[None], np.array([len(x)]), 1)}, 1, "t", 100,
                                second_moments={"w": moments}))  # fmt: skip
    merged = imatrix.merge(matrices)
    whole, importance = measured(np.concatenate(parts), 32, 300)
    np.testing.assert_allclose(merged["w"].values[0], importance, rtol=1e-5)
    assert merged.second_moments["w"].tokens.tolist() == [300]
    difference = np.abs(merged.second_moments["w"].correlation() - whole.correlation())
    assert difference.max() < 2**-9
    both = imatrix.merge([example(0), example(5)])
    assert both.second_moments["blk.0.attn_q.weight"] is both.second_moments["blk.0.attn_k.weight"]
    assert both.second_moments["blk.0.ffn_down_exps.weight"].tokens.tolist() == [60, 0, 120]
    without = replace(example(5), second_moments={})
    assert not imatrix.merge([example(0), without]).second_moments
    other, _ = measured(parts[0], 16, 200)
    with pytest.raises(DataError, match=r"w: second moments of form full .* and blocks:16 .* cannot be merged"):
        imatrix.merge([matrices[0], replace(matrices[1], second_moments={"w": other})])


def rewrite(
    source: Path, target: Path, lines: list[str] | None = None, drop: str = "", value: float | None = None
) -> Path:
    """A copy of an importance matrix with other lines of second moments, without a tensor, or another value in each."""
    file = gguf.open(source)
    if lines is not None:
        file.metadata.set("quantkit.imatrix.second_moments", lines, "str")
    kept = [t for t in file.tensors.values() if t.name != drop]
    with gguf.Writer(target, file.metadata, [gguf.TensorSpec(t.name, t.shape, t.type) for t in kept]) as writer:
        for t in kept:
            data = t.stored.copy()
            if value is not None and t.name.endswith((".correlations", ".factors")):
                data.view("<f2").reshape(-1)[5] = value
            writer.write(t.name, data)
    return target


@pytest.mark.parametrize(
    "line",
    ["blk.0.attn_q.weight 31 200", "blk.0.attn_q.weight 0 200", "blk.0.attn_q.weight -1 200", "blk.0.attn_q.weight 32",
     "blk.0.attn_q.weight 32 1,2", "blk.0.attn_q.weight 99999999999999999999 200", "blk.0.attn_q.weight 32 x",
     "blk.0.attn_q.weight 32 -200", "blk.0.attn_q.weight 32 99999999999999999",
     "nothing 32 200", "blk.0.attn_k.weight = nothing", "blk.0.attn_k.weight 32 200", "", "= ="],
)  # fmt: skip
def test_lines_that_do_not_fit_are_refused(tmp_path: Path, line: str) -> None:
    imatrix.write(tmp_path / "x.gguf", example())
    with pytest.raises(FormatError, match=r"x2\.gguf"):
        imatrix.read(rewrite(tmp_path / "x.gguf", tmp_path / "x2.gguf", [line]))


def test_other_hostile_files(tmp_path: Path) -> None:
    imatrix.write(tmp_path / "x.gguf", example())
    with pytest.raises(FormatError, match="does not fit the file's tensors"):
        imatrix.read(rewrite(tmp_path / "x.gguf", tmp_path / "a.gguf", drop="blk.0.attn_q.weight.correlations"))
    lines = ["blk.0.attn_q.weight 32 200", "blk.0.ffn_down.weight = blk.0.attn_q.weight"]
    with pytest.raises(FormatError, match="its second moments are of"):
        imatrix.read(rewrite(tmp_path / "x.gguf", tmp_path / "b.gguf", lines))
    bad = imatrix.read(rewrite(tmp_path / "x.gguf", tmp_path / "c.gguf", value=np.nan))
    with pytest.raises(DataError, match=r"c\.gguf: blk\.0\.attn_q\.weight\.correlations: 1 correlations are above 1"):
        bad.second_moments["blk.0.attn_q.weight"].dense(bad["blk.0.attn_q.weight"].values[0])
    good = example().second_moments["blk.0.attn_q.weight"]
    with pytest.raises(DataError, match="a column has a correlation of -1 with itself, which is 1"):
        replace(good, correlations=-good.correlations).correlation()


# ------------------------------------------------------------------------------------------------------------ of a rank


def few_directions(count: int, n: int, rank: int, seed: int = 0) -> np.ndarray:
    """Vectors within a space of `rank` dimensions; one column is always 0."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((count, rank)) @ rng.standard_normal((rank, n)) * np.exp(rng.standard_normal(n))
    x[:, n // 2] = 0
    return np.float32(x)


def factored(x: np.ndarray, rank: int, tokens: int = TOKENS) -> tuple[SecondMoments, np.ndarray]:
    """Second moments of a rank of vectors float32[count, n], and the importance of their columns."""
    length = np.sqrt((x.astype(np.float64) ** 2).sum(axis=0))
    packed = factors.pack(factors.fit((x / np.where(length > 0, length, 1)).T, rank))
    n = x.shape[1]
    importance = np.float32((x.astype(np.float64) ** 2).mean(0))
    return SecondMoments(n, n, packed[None], np.array([tokens]), rank=rank), importance


@pytest.mark.parametrize(("n", "rank"), [(5, 3), (40, 40), (129, 6), (200, 17), (300, 64)])
def test_enough_factors_are_exact(n: int, rank: int) -> None:
    x = few_directions(400, n, min(rank, n - 1))
    moments, importance = factored(x, rank)
    assert moments.form == f"rank:{rank}"
    h, expected = moments.dense(importance), x.astype(np.float64).T @ x / len(x)
    assert (np.abs(h - expected) <= 2e-3 * np.sqrt(np.outer(importance, importance)) + 1e-30).all()
    np.testing.assert_allclose(np.diagonal(h), importance, rtol=1e-6)
    c = moments.correlation()
    assert np.array_equal(c, c.T)


@pytest.mark.parametrize(("n", "rank"), [(1, 1), (7, 2), (128, 5), (131, 33), (257, 128)])
def test_expanding_is_the_product(n: int, rank: int) -> None:
    found = np.float32(np.random.default_rng(n).uniform(-1, 1, (n, rank)) / rank**0.5)
    expected = found.astype(np.float64) @ found.T
    np.fill_diagonal(expected, 1)
    np.testing.assert_allclose(factors.expand(found), expected, atol=1e-5)


def test_factors_fit_what_is_outside_the_diagonal() -> None:
    """Better than eigenvectors of C do; and the bits do not depend on the threads of BLAS."""
    x = vectors(900, 150) + 2 * np.random.default_rng(1).standard_normal((900, 150)).astype(np.float32)
    c = measured(x, 150)[0].correlation().astype(np.float64)
    values, directions = np.linalg.eigh(c)
    eigenvectors = directions[:, -10:] * np.sqrt(values[-10:])
    errors = []
    for found in (factored(x, 10)[0].correlation(), eigenvectors @ eigenvectors.T):
        difference = found - c
        np.fill_diagonal(difference, 0)
        errors.append(np.linalg.norm(difference))
    assert errors[0] < 0.97 * errors[1]
    functions = blas._functions()
    if functions is not None:
        threads, hashes = functions[0](), set()
        for count in (1, 2, 3):
            functions[1](count)
            hashes.add(factored(x, 10)[0].sha256())
        functions[1](threads)
        assert len(hashes) == 1


@pytest.mark.parametrize("tokens", [10, TOKENS])
def test_they_are_positive_semidefinite(tokens: int) -> None:
    """Whatever the factors are: those of inputs that hardly fit, random ones, and rows that are a little too long."""
    random = np.random.default_rng(0).standard_normal((60, 4))
    random *= (np.linspace(0, 1.009, 60) / np.linalg.norm(random, axis=1))[:, None]
    made = [factored(vectors(300, 60), 3)[0], factored(vectors(300, 60), 59)[0]]
    made.append(SecondMoments(60, 60, np.float16(random).reshape(1, -1), np.array([1]), rank=4))
    for moments in made:
        h = replace(moments, tokens=np.array([tokens])).dense(np.ones(60, np.float32))
        assert np.linalg.eigvalsh(h.astype(np.float64)).min() >= -1e-6
        assert np.abs(h).max() <= 1 + 1e-6


def with_factors(seed: int = 0) -> Imatrix:
    """Two weights with one input of a rank, one that is full, and a stack of experts with their own factors."""
    (shared, a), (full, b) = (
        factored(few_directions(200, 40, 4, seed), 4, 200),
        measured(vectors(200, 16, seed), 16, 200),
    )
    stack = replace(shared, correlations=np.repeat(shared.correlations, 3, 0), tokens=np.array([30, 0, 60]))
    entries = {name: Entry(a[None], np.array([200]), 2) for name in ("blk.0.attn_q.weight", "blk.0.attn_k.weight")}
    entries["blk.0.attn_output.weight"] = Entry(b[None], np.array([200]), 2)
    entries["blk.0.ffn_down_exps.weight"] = Entry(np.repeat(a[None], 3, 0), np.array([30, 0, 60]), 2)
    return Imatrix(entries, 2, "t", 100, second_moments=dict(zip(entries, (shared, shared, full, stack))))


def test_files_hold_factors(tmp_path: Path) -> None:
    made = with_factors()
    imatrix.write(tmp_path / "x.gguf", made)
    file = gguf.open(tmp_path / "x.gguf")
    assert file.tensors["blk.0.ffn_down_exps.weight.factors"].shape == (3, 40, 4)
    assert file.metadata["quantkit.imatrix.second_moments"] == [
        "blk.0.attn_q.weight rank:4 200",
        "blk.0.attn_k.weight = blk.0.attn_q.weight",
        "blk.0.attn_output.weight 16 200",  # as files without factors have it
        "blk.0.ffn_down_exps.weight rank:4 30,0,60",
    ]
    back = imatrix.read(tmp_path / "x.gguf")
    assert back.second_moments["blk.0.attn_q.weight"] is back.second_moments["blk.0.attn_k.weight"]
    for name, moments in made.second_moments.items():
        read = back.second_moments[name]
        assert (read.form, read.sha256()) == (moments.form, moments.sha256())
        row = made[name].values[-1]
        assert np.array_equal(
            read.dense(row, len(made[name].values) - 1), moments.dense(row, len(made[name].values) - 1)
        )
    imatrix.write(tmp_path / "y.gguf", back)
    assert (tmp_path / "y.gguf").read_bytes() == (tmp_path / "x.gguf").read_bytes()
    assert len({m.sha256() for m in (factored(few_directions(9, 8, 1), r)[0] for r in (1, 2))}) == 2


def test_merged_factors_are_those_of_all_vectors() -> None:
    parts = [few_directions(200, 40, 3, 3), few_directions(100, 40, 4, 4) * np.float32(3)]
    merged = merge("w", [(1, *with_importance(x)) for x in parts])
    whole, importance = factored(np.concatenate(parts), 7, 300)
    assert (merged.form, merged.tokens.tolist()) == ("rank:7", [300])
    np.testing.assert_allclose(merged.correlation(), whole.correlation(), atol=4e-3)
    both = imatrix.merge([with_factors(0), with_factors(5)])
    assert both.second_moments["blk.0.attn_q.weight"] is both.second_moments["blk.0.attn_k.weight"]
    assert both.second_moments["blk.0.ffn_down_exps.weight"].tokens.tolist() == [60, 0, 120]
    full, importance = measured(parts[1], 40)
    other = {"rank:6": with_importance(parts[1], 6), "full": (full, importance[None])}
    for form, measurement in other.items():
        with pytest.raises(DataError, match=rf"w: second moments of form rank:7 .* and {form} .* cannot be merged"):
            merge("w", [(1, *with_importance(parts[0])), (1, *measurement)])


@pytest.mark.parametrize("make", [example, with_factors])
def test_a_merge_of_one_changes_nothing(make: Callable[[], Imatrix]) -> None:
    """Neither time nor digits are spent on it: measured anew, factors of ten thousand experts would take hours."""
    given = make()
    merged = imatrix.merge([given], [3.0])
    assert merged.second_moments.keys() == given.second_moments.keys()
    assert all(merged.second_moments[name] is given.second_moments[name] for name in given.second_moments)


def with_importance(x: np.ndarray, rank: int = 7) -> tuple[SecondMoments, np.ndarray]:
    moments, importance = factored(x, rank, len(x))
    return moments, importance[None]


@pytest.mark.parametrize(
    "line",
    ["blk.0.attn_q.weight rank:3 200", "blk.0.attn_q.weight rank:0 200", "blk.0.attn_q.weight rank:-4 200",
     "blk.0.attn_q.weight rank:41 200", "blk.0.attn_q.weight rank: 200", "blk.0.attn_q.weight rank:x 200",
     "blk.0.attn_q.weight rank:4", "blk.0.attn_q.weight rank:4 1,2", "blk.0.attn_q.weight 40 200",
     "blk.0.attn_output.weight rank:4 200", "blk.0.ffn_down_exps.weight rank:12 30", "nothing rank:4 200"],
)  # fmt: skip
def test_lines_of_factors_that_do_not_fit_are_refused(tmp_path: Path, line: str) -> None:
    imatrix.write(tmp_path / "x.gguf", with_factors())
    with pytest.raises(FormatError, match=r"x2\.gguf"):
        imatrix.read(rewrite(tmp_path / "x.gguf", tmp_path / "x2.gguf", [line]))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1.02, -60000])
def test_hostile_factors_are_refused(tmp_path: Path, value: float) -> None:
    imatrix.write(tmp_path / "x.gguf", with_factors())
    bad = imatrix.read(rewrite(tmp_path / "x.gguf", tmp_path / "c.gguf", value=value))
    with pytest.raises(
        DataError, match=r"c\.gguf: blk\.0\.attn_q\.weight\.factors: the factors of a column are longer"
    ):
        bad.second_moments["blk.0.attn_q.weight"].dense(bad["blk.0.attn_q.weight"].values[0])
    for rank in (-1, 41):
        with pytest.raises(FormatError, match=f"rank {rank} of 40 columns"):
            SecondMoments(40, 40, np.zeros((1, 40), np.float16), np.array([1]), rank=rank)
