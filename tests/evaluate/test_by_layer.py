"""`imatrix --by-layer`: the bytes of a run without it, killed and resumed, memory, and what does not go with it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantkit.errors import OptionError, QuantkitError, UnsupportedError
from quantkit.evaluate.imatrix import by_layer, saved_run
from quantkit.evaluate.imatrix.run import ImatrixOptions, ImatrixRun, imatrix
from quantkit.evaluate.layers import layer_by_layer, saved_states
from quantkit.evaluate.layers.layer_by_layer import LayerStates
from quantkit.formats import atomic, gguf
from quantkit.pipelines.conversion.convert import convert_checkpoint
from quantkit.runtime.loading import load
from quantkit.runtime.model import Model
from tests.archs.checkpoints import GEMMA_E
from tests.archs.files import written
from tests.archs.mtp_checkpoints import mtp_checkpoint
from tests.evaluate import test_imatrix
from tests.test_architectures import OTHERS

run = test_imatrix.run  # fixture
CTX = 64  # above the positions that the indexer of glm-dsa selects
OPTIONS = ImatrixOptions(ctx_size=CTX, chunks=5, batch_size=2 * CTX, process_output=True, second_moments="full")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two texts, and models by their architecture."""
    path = tmp_path_factory.mktemp("by-layer")
    (path / "a.txt").write_text("the quick brown fox jumps over the lazy dog 0123456789 " * 12)
    (path / "b.txt").write_text("".join(chr(97 + i * i % 23) for i in range(1200)))
    for arch in ("llama", "qwen3moe", "deepseek2", "qwen3next", "glm-dsa", "deepseek4"):
        written(path / f"{arch}.gguf", arch, tokenizer=True)
    written(path / "gemma4-e.gguf", "gemma4", tokenizer=True, **GEMMA_E)
    written(path / "gemma3n.gguf", "gemma3n", tokenizer=True, **(OTHERS["gemma3n"] | {"vocab_size": 320}))
    (path / "hf").mkdir()
    convert_checkpoint(
        mtp_checkpoint(path / "hf", "deepseek2", 2, False).directory, path / "mtp.gguf", "f32", mtp="keep"
    )
    return path


def measured(folder: Path, arch: str, out: Path, options: ImatrixOptions, **more: Any) -> ImatrixRun:
    texts = [folder / "a.txt", folder / "b.txt"]
    return imatrix(folder / f"{arch}.gguf", texts, out, options, **more)


@pytest.mark.parametrize(
    "arch", ["llama", "qwen3moe", "deepseek2", "qwen3next", "glm-dsa", "deepseek4", "gemma4-e", "gemma3n", "mtp"]
)
def test_the_same_bytes(folder: Path, tmp_path: Path, arch: str) -> None:
    runs = [
        measured(folder, arch, tmp_path / f"{name}.gguf", replace(OPTIONS, by_layer=chosen))
        for name, chosen in (("whole", False), ("by-layer", True))
    ]
    assert runs[0].path.read_bytes() == runs[1].path.read_bytes()
    assert len(runs[1].matrix.second_moments) > 0
    for text, ppl in runs[0].perplexities.items():
        np.testing.assert_array_equal(ppl.nll, runs[1].perplexities[text].nll)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["by-layer.gguf", "whole.gguf"]


@pytest.mark.parametrize(
    "changes",
    [{"second_moments": "rank:8", "no_ppl": True}, {"second_moments": "blocks:32", "shares": (1, 3), "from_chunk": 1},
     {"second_moments": "", "process_output": False, "batch_size": 4096}],
)  # fmt: skip
def test_the_same_bytes_with_other_options(folder: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    options = replace(OPTIONS, **changes)
    for name, chosen in (("a", False), ("b", True)):
        measured(folder, "qwen3moe", tmp_path / f"{name}.gguf", replace(options, by_layer=chosen))
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def test_a_batch_of_mtp_layers_is_that_of_a_run_without_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of more sequences than run at a time: their MTP layers are observed at once."""
    monkeypatch.setattr(layer_by_layer, "SEQUENCE_TOKENS", 2 * CTX)
    monkeypatch.setattr("quantkit.runtime.model.SEQUENCE_TOKENS", 2 * CTX)
    monkeypatch.setattr("quantkit.runtime.mtp.SEQUENCE_TOKENS", 2 * CTX)
    for name, chosen in (("a", False), ("b", True)):
        measured(folder, "mtp", tmp_path / f"{name}.gguf", replace(OPTIONS, by_layer=chosen, batch_size=4 * CTX))
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


class Stop(Exception):
    pass


def stopped(folder: Path, arch: str, out: Path, after: int) -> None:
    """Run until some layers are done, each of which is saved."""

    def stop(done: int, layers: int) -> None:
        if done == after:
            raise Stop

    with pytest.raises(Stop):
        measured(folder, arch, out, replace(OPTIONS, by_layer=True), on_layer=stop)


@pytest.fixture
def saves_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer is saved, however long it takes."""
    monkeypatch.setattr(by_layer, "_SAVING", 1.0)


@pytest.mark.usefixtures("saves_always")
@pytest.mark.parametrize(
    ("arch", "after", "saved"),
    [
        ("llama", 1, 1),
        ("qwen3next", 3, 3),
        ("glm-dsa", 1, 1),
        ("glm-dsa", 2, 1),
        ("deepseek4", 2, 2),
        ("gemma4-e", 5, 5),
        ("gemma3n", 1, 1),
        ("gemma3n", 4, 4),
        ("mtp", 2, 2),
    ],
)
def test_an_interrupted_run_resumes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: str, after: int, saved: int
) -> None:
    """Layers whose states are saved do not run again. (Of glm-dsa, the third takes what the second has selected. Of
    gemma4-e and gemma3n, the last read the keys of layers that have run before.)"""
    whole, out = tmp_path / "whole.gguf", tmp_path / "out.gguf"
    measured(folder, arch, whole, OPTIONS)
    stopped(folder, arch, out, after)
    assert sorted(path.name for path in tmp_path.glob("out*")) == ["out.gguf.resume", "out.gguf.states"]
    assert saved_run.SavedRun.load(tmp_path / "out.gguf.resume").layers == saved
    ran: set[int] = set()
    real = Model.run_block_checked
    monkeypatch.setattr(
        Model, "run_block_checked", lambda self, block, *rest: ran.add(block.layer) or real(self, block, *rest)
    )
    measured(folder, arch, out, replace(OPTIONS, by_layer=True))
    assert min(ran) == saved
    assert out.read_bytes() == whole.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.gguf", "whole.gguf"]


@pytest.mark.usefixtures("saves_always")
@pytest.mark.parametrize("states", ["older", "missing", "short", "not ours", "changed"])
def test_sums_without_their_states_are_not_measured_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, states: str
) -> None:
    """As a kill between both files, or somebody, leaves them."""
    out, left = tmp_path / "out.gguf", tmp_path / "out.gguf.states"
    measured(folder, "llama", tmp_path / "whole.gguf", OPTIONS)
    real = saved_states.save_states
    if states == "older":
        only_first = lambda path, run, layers, states: real(path, run, layers, states) if layers == 1 else None  # noqa: E731
        monkeypatch.setattr(by_layer, "save_states", only_first)
    stopped(folder, "llama", out, 2)
    if states == "missing":
        left.unlink()
    elif states == "short":
        left.write_bytes(left.read_bytes()[:-1])
    elif states == "not ours":
        left.write_bytes(b"{}\n")
    elif states == "changed":
        data = bytearray(left.read_bytes())
        data[-100] ^= 64
        left.write_bytes(data)
    monkeypatch.setattr(by_layer, "save_states", real)
    messages: list[str] = []
    measured(folder, "llama", out, replace(OPTIONS, by_layer=True), on_message=messages.append)
    assert any("resumed after 2 layers" in line for line in messages)
    assert out.read_bytes() == (tmp_path / "whole.gguf").read_bytes()


def test_runs_with_and_without_it_do_not_resume_each_other(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    stopped(folder, "llama", out, 1)
    with pytest.raises(QuantkitError, match="another model, text, version or options"):
        measured(folder, "llama", out, OPTIONS)
    measured(folder, "llama", out, replace(OPTIONS, restart=True))
    assert [path.name for path in tmp_path.iterdir()] == ["out.gguf"]


def test_what_was_measured_is_kept_where_experts_are_missing(folder: Path, tmp_path: Path) -> None:
    options = replace(OPTIONS, by_layer=True, chunks=1, ctx_size=4, missing_experts="error")
    out = tmp_path / "x.gguf"
    with pytest.raises(QuantkitError, match="measurements are saved"):
        measured(folder, "qwen3moe", out, options)
    layers: list[int] = []
    measured(
        folder, "qwen3moe", out, replace(options, missing_experts="weight-one"),
        on_layer=lambda done, _: layers.append(done),
    )  # fmt: skip
    assert layers == []
    assert out.exists()


@pytest.mark.parametrize("arch", ["qwen3moe", "gemma4-e"])
def test_memory_is_that_of_the_message(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: str
) -> None:
    """Hidden states, the largest layer and sums have the printed sizes; weights are released layer by layer."""
    monkeypatch.setattr(layer_by_layer, "IN_MEMORY", 0)
    held: list[set[int]] = []
    taken: set[int] = set()
    run_block, release = Model.run_block_checked, layer_by_layer.release_block

    def running(self: Model, block: Any, *rest: Any) -> np.ndarray:
        taken.add(block.layer)
        held.append(set(taken))
        return run_block(self, block, *rest)

    def releasing(model: Model, block: Any) -> None:
        taken.discard(block.layer)
        release(model, block)

    monkeypatch.setattr(Model, "run_block_checked", running)
    monkeypatch.setattr(layer_by_layer, "release_block", releasing)
    messages: list[str] = []
    states: list[LayerStates] = []
    real = by_layer.LayerSaves.after_layer
    monkeypatch.setattr(
        by_layer.LayerSaves, "after_layer",
        lambda self, layers, now: states.append(now) or real(self, layers, now),
    )  # fmt: skip
    options = replace(OPTIONS, by_layer=True, process_output=False)
    found = measured(folder, arch, tmp_path / "x.gguf", options, on_message=messages.append)
    (line,) = (line for line in messages if line.startswith("layer by layer"))
    sizes = [float(n) for n in re.findall(r"([\d.]+) MB", line)]
    hidden, shared = states[0]
    stored = [hidden, shared] if arch == "gemma4-e" else [hidden]
    assert ("in temporary files in" if len(stored) > 1 else "in a temporary file in") in line
    assert all(isinstance(each, np.memmap) for each in stored)
    tensors = gguf.open(folder / f"{arch}.gguf").tensors.values()
    model = load(folder / f"{arch}.gguf")
    cache, sources = model.layer_cache(CTX), {2, 3} if arch == "gemma4-e" else set()
    assert shared.nbytes == len(hidden) * sum(x[i].nbytes for x in (cache.k, cache.v) for i in sources)
    layers = range(len(model.blocks))
    weights = max(sum(t.nbytes for t in tensors if t.name.startswith(f"blk.{i}.")) for i in layers)
    moments = {id(m): m for m in found.matrix.second_moments.values()}
    sums = 8 * sum(entry.values.size for entry in found.matrix.entries.values())
    sums += 4 * sum(len(m.tokens) * m.columns**2 for m in moments.values())
    for printed, wanted in zip(sizes, (*(each.nbytes for each in stored), weights, 2 * sums), strict=True):
        assert printed == pytest.approx(wanted / 1e6, rel=0.02, abs=0.051)
    assert all(len(now) == 1 for now in held)


def test_a_full_disk_is_noticed_before_the_run(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_by_layer, "IN_MEMORY", 0)
    usage = atomic.shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(atomic.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(QuantkitError, match=r"the hidden states of all chunks take .* set TMPDIR"):
        measured(folder, "llama", tmp_path / "x.gguf", replace(OPTIONS, by_layer=True))


def test_what_does_not_go_with_it(folder: Path, tmp_path: Path) -> None:
    for changes, error, said in (
        ({"save_frequency": 2}, OptionError, "all chunks end together"),
        ({"numerics": "fast"}, UnsupportedError, "exact numerics only; remove --numerics fast"),
    ):
        with pytest.raises(error, match=said):
            measured(folder, "llama", tmp_path / "x.gguf", replace(OPTIONS, by_layer=True, **changes))  # type: ignore[arg-type]


def test_the_command_takes_it(run: Any, folder: Path, tmp_path: Path) -> None:
    args = ("imatrix", folder / "llama.gguf", "-f", folder / "a.txt", "-c", CTX, "-b", 2 * CTX, "-o")
    outputs = [run(*args, tmp_path / "a.gguf"), run(*args, tmp_path / "b.gguf", "--by-layer")]
    estimates = [re.findall(r"Final estimate: .*", out) for out in outputs]
    assert estimates[0] == estimates[1] != []
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()
