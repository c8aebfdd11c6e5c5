"""The public names of `quantkit`: listed, documented, imported when used, and each run on a tiny model."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import quantkit
from benchmarks import checkpoints
from quantkit import archs
from quantkit.errors import FormatError, OptionError, QuantkitError
from quantkit.formats import imatrix
from quantkit.pipelines import options as public_options
from quantkit.pipelines import planning

FUNCTIONS = [name for name in quantkit.__all__ if inspect.isfunction(getattr(quantkit, name))]
OPTIONS = [name for name in quantkit.__all__ if name.endswith("Options")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint, HF_DIR, and its GGUF file, bf16.gguf."""
    folder = tmp_path_factory.mktemp("api")
    checkpoints.write(folder / "HF_DIR", archs.get("llama").EXAMPLE, "BF16")
    made = quantkit.convert(folder / "HF_DIR", folder / "bf16.gguf")
    assert made.paths == [folder / "bf16.gguf"]
    return folder


def test_names_are_listed_and_importable() -> None:
    assert quantkit.__all__ == sorted(quantkit.__all__)
    assert quantkit.__all__ == [name for name in dir(quantkit) if not name.startswith("__")]
    for name in quantkit.__all__:
        assert getattr(quantkit, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        _ = quantkit.missing  # type: ignore[attr-defined]  # that is the test


def test_repack_is_a_package_and_unpack_its_function() -> None:
    assert quantkit.repack is importlib.import_module("quantkit.repack")
    assert quantkit.unpack is quantkit.repack.unpack


def test_names_load_their_part_only() -> None:
    """In a new process: `dir` imports nothing; only what runs models imports numba before it is called, none torch."""
    code = """
import sys
import quantkit
before = set(sys.modules)
dir(quantkit)
assert set(sys.modules) == before
for name in quantkit.__all__:
    if not quantkit._MODULE_OF[name].startswith(("quantkit.evaluate", "quantkit.runtime")):
        getattr(quantkit, name)
        assert "numba" not in sys.modules, name
for name in quantkit.__all__:
    getattr(quantkit, name)
    assert "torch" not in sys.modules, name
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_docstrings_name_the_parameters(name: str) -> None:
    function = getattr(quantkit, name)
    text = inspect.getdoc(function) or ""
    missing = [p for p in inspect.signature(function).parameters if p not in text]
    assert not missing, f"the docstring of quantkit.{name} does not mention {missing}"


@pytest.mark.parametrize("name", OPTIONS)
def test_options_are_frozen_and_document_their_fields(name: str) -> None:
    kind = getattr(quantkit, name)
    text = "\n".join(inspect.getdoc(base) or "" for base in kind.__mro__[:-1])
    missing = [field.name for field in dataclasses.fields(kind) if field.name not in text]
    assert not missing, f"the docstring of {name} does not mention {missing}"
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(kind(), dataclasses.fields(kind)[0].name, None)


def test_convert_and_export(folder: Path, tmp_path: Path) -> None:
    planned = quantkit.convert(folder / "HF_DIR", tmp_path / "x.gguf", "f16", quantkit.ConvertOptions(dry_run=True))
    assert planned.outtype.name == "f16"
    assert not (tmp_path / "x.gguf").exists()
    exported = quantkit.export(folder / "bf16.gguf", tmp_path / "HF")
    assert tmp_path / "HF" / "model.safetensors" in exported.paths
    quantkit.convert(tmp_path / "HF", tmp_path / "again.gguf")
    first, second = quantkit.open(folder / "bf16.gguf"), quantkit.open(tmp_path / "again.gguf")
    for name, tensor in first.tensors.items():
        assert np.array_equal(tensor.data, second.tensors[name].data), name


def test_plan(folder: Path) -> None:
    options = quantkit.PlanOptions(custom_q="ffn_down=q8_0", ctx_size=64, vram=(2,), placement="-ngl 1")
    for source in (folder / "bf16.gguf", folder / "HF_DIR", folder / "HF_DIR" / "config.json"):
        found = quantkit.plan(source, "Q4_0", options)
        kinds = {t.name: t.type.name for t in found.plan.tensors}
        assert (kinds["blk.0.ffn_down.weight"], kinds["blk.0.ffn_up.weight"]) == ("q8_0", "q4_0")
        assert found.devices is not None
        assert [load.device for load in found.devices.loads] == ["CPU", "CUDA0"]
        assert found.to_json()["budget"]["fits"]
    assert quantkit.plan(folder / "bf16.gguf").devices is None
    with pytest.raises(OptionError, match="TYPE is missing"):
        quantkit.plan(folder / "bf16.gguf", None, options)


def test_a_plan_is_strict(folder: Path) -> None:
    strict = quantkit.PlanOptions(custom_q=["nothing=q8_0"], strict=True)
    assert quantkit.plan(folder / "bf16.gguf", "Q4_0", dataclasses.replace(strict, strict=False)).plan.warnings
    with pytest.raises(QuantkitError, match="nothing"):
        quantkit.plan(folder / "bf16.gguf", "Q4_0", strict)


def test_quantize_follows_a_plan_and_reports_progress(folder: Path, tmp_path: Path) -> None:
    source, reports = folder / "bf16.gguf", []
    options = quantkit.QuantizeOptions(custom_q=["attn_v=q8_0"], effort="fast")

    def progress(done: int, total: int, label: str) -> None:
        reports.append((done, total, label))

    result = quantkit.quantize(source, tmp_path / "a.gguf", "Q4_0", options, progress=progress)
    assert result.paths == [tmp_path / "a.gguf"]
    assert result.bytes == (tmp_path / "a.gguf").stat().st_size
    assert reports[-1][0] == reports[-1][1] == result.plan.bytes_after
    assert [done for done, _, _ in reports] == sorted(done for done, _, _ in reports)
    assert {label for _, _, label in reports} == {t.name for t in result.plan.tensors}
    document = quantkit.plan(source, "Q4_0", quantkit.PlanOptions(custom_q=["attn_v=q8_0"])).to_json()
    (tmp_path / "plan.json").write_text(json.dumps(document))
    for plan in (document, tmp_path / "plan.json"):
        followed = quantkit.QuantizeOptions(plan=plan, effort="fast")
        quantkit.quantize(quantkit.open(source), tmp_path / "b.gguf", None, followed)
        assert (tmp_path / "b.gguf").read_bytes() == (tmp_path / "a.gguf").read_bytes()
    assert quantkit.quantize(
        source, tmp_path / "a.gguf", "Q4_0", dataclasses.replace(options, partial_requant=True)
    ).reused == len(result.plan.tensors)


def test_quantize_with_an_importance_matrix(folder: Path, tmp_path: Path) -> None:
    """A matrix that was read gives the same tensors as its file."""
    source = folder / "bf16.gguf"
    matrix = planning.complete_imatrix(list(quantkit.open(source).tensors.values()))
    imatrix.write(tmp_path / "i.dat", matrix)
    for name, given in (("a", tmp_path / "i.dat"), ("b", imatrix.read(tmp_path / "i.dat"))):
        quantkit.quantize(source, tmp_path / f"{name}.gguf", "IQ4_NL", quantkit.QuantizeOptions(imatrix=given))
    a, b = quantkit.open(tmp_path / "a.gguf"), quantkit.open(tmp_path / "b.gguf")
    assert a.metadata["quantize.imatrix.file"] == str(tmp_path / "i.dat")
    for name, tensor in a.tensors.items():
        assert np.array_equal(tensor.data, b.tensors[name].data), name
    found = quantkit.verify(tmp_path / "a.gguf", quantkit.VerifyOptions(source=source, imatrix=tmp_path / "i.dat"))
    assert (found.damage, found.changes, found.rerun) == ([], {}, True)


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        (None, {}, "TYPE is missing"),
        ("Q4_0", {"plan": {}}, "--plan decides every type"),
        (None, {"plan": {}, "pure": True}, "--plan decides every type"),
        ("Q4_0", {"include_weights": "a"}, "pass --imatrix"),
        ("Q4_0", {"include_weights": "a", "exclude_weights": "b"}, "contradict each other"),
        ("Q4_0", {"settings": {"a": "q8_0"}}, "pass --recipe"),
        ("Q4_0", {"partial_requant": True, "reuse": "x"}, "pass one of them"),
    ],
)
def test_options_that_contradict_each_other(
    folder: Path, tmp_path: Path, kind: str | None, options: dict[str, object], said: str
) -> None:
    with pytest.raises(OptionError, match=said):
        quantkit.quantize(folder / "bf16.gguf", tmp_path / "x.gguf", kind, quantkit.QuantizeOptions(**options))  # type: ignore[arg-type]  # of several fields
    assert not list(tmp_path.iterdir())


def test_quantize_needs_weights(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="contains no weights"):
        quantkit.quantize(folder / "HF_DIR" / "config.json", tmp_path / "x.gguf", "Q4_0")


def test_repack_and_unpack_files(folder: Path, tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("q.gguf", "r.gguf", "back.gguf", "none.gguf")]
    quantkit.quantize(folder / "bf16.gguf", paths[0], "Q8_0")
    repacked = quantkit.repack_file(paths[0], paths[1])
    assert repacked.paths == [paths[1]]
    assert any(change.type.name == "q8_0_r8" for change in repacked.job.changed)
    back = quantkit.unpack_file(quantkit.open(paths[1]), paths[2])
    assert back.bytes == sum(t.nbytes for t in quantkit.open(paths[2]).tensors.values())
    assert paths[2].read_bytes() == paths[0].read_bytes()
    assert quantkit.unpack_file(paths[0], paths[3]).paths == []
    on_gpu = quantkit.RepackOptions(placement="-ngl 99", dry_run=True)
    assert not quantkit.repack_file(paths[0], paths[3], on_gpu).job.changed
    assert not paths[3].exists()


def test_load_and_open(folder: Path) -> None:
    model = quantkit.load(folder / "bf16.gguf")
    assert model.logits([1, 2]).shape == (2, quantkit.open(folder / "bf16.gguf").tensors["token_embd.weight"].shape[0])


@pytest.fixture
def text(folder: Path, tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("A text of some words, said again and again. " * 60, encoding="utf-8")
    return path


def test_imatrix_and_quantize(folder: Path, tmp_path: Path, text: Path) -> None:
    reports: list[int] = []
    run = quantkit.imatrix(
        folder / "bf16.gguf", text, tmp_path / "i.dat", quantkit.ImatrixOptions(ctx_size=64, chunks=2),
        progress=lambda report: reports.append(report.done),
    )  # fmt: skip
    assert run.path == tmp_path / "i.dat"
    assert reports == [1, 2]
    assert run.perplexities[str(text)].nll.shape[0] == 2
    options = quantkit.QuantizeOptions(imatrix=run.matrix)
    assert quantkit.quantize(folder / "bf16.gguf", tmp_path / "q.gguf", "IQ4_NL", options).bytes > 0


def test_perplexity_and_divergence(folder: Path, tmp_path: Path, text: Path) -> None:
    """A base file and a model as base give the same; a model from itself has none; perplexities agree."""
    base, q = folder / "bf16.gguf", tmp_path / "q.gguf"
    quantkit.quantize(base, q, "Q4_0")
    saved = tmp_path / "base.dat"
    ppl = quantkit.PerplexityOptions(ctx_size=64, chunks=2)
    wanted = quantkit.perplexity(base, text, dataclasses.replace(ppl, kl_divergence_base=saved))
    options = quantkit.DivergenceOptions(ctx_size=64, chunks=2)
    by_model = quantkit.divergence(q, base, text, options)
    by_file = quantkit.divergence(q, saved)
    assert by_model.mean_kld.value > 1e-6
    assert by_file.mean_kld.value == pytest.approx(by_model.mean_kld.value, rel=1e-2)
    assert np.exp(by_model.nll_base.mean()) == pytest.approx(wanted.value, rel=1e-5)
    assert np.exp(by_model.nll.mean()) == pytest.approx(quantkit.perplexity(q, text, ppl).value, rel=1e-5)
    assert quantkit.divergence(quantkit.load(base), base, text, options).mean_kld.value == pytest.approx(0, abs=1e-6)


def test_compare(folder: Path, tmp_path: Path, text: Path) -> None:
    quantkit.quantize(folder / "bf16.gguf", tmp_path / "q.gguf", "Q8_0")
    options = quantkit.CompareOptions(ctx_size=64, chunks=2, noise_floor="off")
    found = quantkit.compare(folder / "bf16.gguf", [tmp_path / "q.gguf"], text, options)
    assert [c.path.name for c in found.candidates] == ["bf16.gguf", "q.gguf"]
    assert found.conditions["n_ctx"] == 64


def test_every_option_has_a_flag() -> None:
    """The commands take every field of the options: under the same name, or one that is listed here."""
    from quantkit.cli import parser

    renamed = {"settings": "set", "split_max_size": "split_max_size", "max_shard_size": "max_shard_size",
               "placement": "gpu_layers"}  # fmt: skip
    commands = {"convert": "ConvertOptions", "export": "ExportOptions", "plan": "PlanOptions",
                "quantize": "QuantizeOptions", "verify": "VerifyOptions"}  # fmt: skip
    for command, kind in commands.items():
        flags = {name.lstrip("-").replace("-", "_") for p in parser(command).params for name in p.opts}
        for field in dataclasses.fields(getattr(public_options, kind)):
            assert renamed.get(field.name, field.name) in flags, f"{command}: {field.name}"
