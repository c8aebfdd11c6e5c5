"""Memory of the evaluating commands: one model open at a time, room for the context that is run and no more."""

from __future__ import annotations

import gc
import json
import re
import shutil
import weakref
from collections import Counter
from pathlib import Path

import pytest

from quantkit.evaluate import compare
from quantkit.formats import gguf
from quantkit.formats.gguf import header
from quantkit.runtime import loading
from quantkit.runtime import model as runtime
from tests.evaluate import test_imatrix
from tests.runtime.conftest import rewrite

model, run, prose = test_imatrix.model, test_imatrix.run, test_imatrix.prose  # fixtures


class Opened:
    """Counts what is opened, and how many models are there when the next one is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.alive: list[weakref.ref[runtime.Model]] = []
        self.most = 0
        self.times: Counter[tuple[str, str]] = Counter()
        self.contexts: list[int | None] = []
        self._load = loading.load
        monkeypatch.setattr(loading, "load", self.load)

    def load(self, path: Path, **options: object) -> runtime.Model:
        self.most = max(self.most, 1 + sum(ref() is not None for ref in self.alive))
        self.times[path.name, str(options["numerics"])] += 1
        self.contexts.append(options["n_ctx"])  # type: ignore[arg-type]
        found = self._load(path, **options)  # type: ignore[arg-type]
        self.alive.append(weakref.ref(found))
        return found


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Opened:
    return Opened(monkeypatch)


@pytest.fixture(scope="module")
def candidates(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("candidates")
    return [rewrite(model, folder / f"{kind}.gguf", kind) for kind in ("q8_0", "q4_0")]


OPTIONS = ("-c", 32, "--chunks", 2, "-rtr")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Throughput by few tokens."""
    real = compare.throughput
    monkeypatch.setattr(compare, "throughput", lambda model: real(model, 8, 2, 1))


def test_compare_has_one_model_open(run, opened, quick, model, candidates, prose) -> None:
    args = ("compare", model, *candidates, "-f", prose, *OPTIONS, "--noise-floor", "q8_0", "--speed", "--profile")
    out = run(*args)
    assert opened.most == 1
    assert opened.times == {
        (model.name, "exact"): 2, (model.name, "fast"): 1,  # the noise floor is another run of the reference
        **{(path.name, numerics): 1 for path in candidates for numerics in ("exact", "fast")},
    }  # fmt: skip
    assert "q4_0" in out


def test_compare_opens_each_model_once_where_it_can(run, opened, quick, model, candidates, prose) -> None:
    """Fast numerics are those that are timed; tensors of --layers come from files that are not run."""
    args = ("compare", model, *candidates, "-f", prose, *OPTIONS, "--noise-floor", "off", "--json")
    record = json.loads(run(*args, "--speed", "--numerics", "fast", "--layers"))
    assert opened.most == 1
    assert opened.times == {(model.name, "fast"): 2, **{(path.name, "fast"): 1 for path in candidates}}
    assert all(found["prompt_tokens_per_second"] > 0 for found in record["models"])
    assert {row["type"] for row in record["layers"]["q4_0"]} == {"q4_0"}  # as the file has them


def test_bench_has_one_model_open(run, opened, candidates) -> None:
    gc.collect()
    run("bench", *candidates, "-p", 8, "-n", 2, "-r", 1, "-t", "1,2", "-rtr")
    assert opened.most == 1
    assert opened.contexts == [8] * 4


@pytest.fixture
def wide(model: Path, tmp_path: Path) -> Path:
    """The same model, said to be trained with a million tokens: a cache of 1 GiB in float32."""
    path = tmp_path / "wide.gguf"
    shutil.copy(model, path)
    header.rewrite(path, gguf.Metadata({"qwen3moe.context_length": 1 << 20}))
    return path


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    path = tmp_path / "tasks.txt"
    path.write_text("The sky is\n1\ngreen\nblue today\nold\nfast\n" * 2)
    return path


ROOM = ("--devices", "cpu:0=150MiB,cpu=150MiB")


def test_room_is_needed_for_the_context_that_is_run(run, opened, wide, prose, tasks, tmp_path) -> None:
    text = ("-f", prose, "-c", 64, "--chunks", 2)
    base, placed = tmp_path / "x.kld", (*ROOM, "-ngl", 99)
    run("perplexity", wide, *text, "--kl-divergence-base", base, *placed)
    run("perplexity", wide, "--kl-divergence", "--kl-divergence-base", base, *placed)
    run("perplexity", wide, *text, "--ppl-stride", 16, *placed)
    run("perplexity", wide, "--hellaswag", "-f", tasks, *placed)
    run("imatrix", wide, *text, "-o", tmp_path / "x.dat", *ROOM, "--fit", "--fit-margin", 1)
    run("compare", wide, wide, *text, "--noise-floor", "q8_0", *placed)
    run("generate", wide, "-p", "one two three four", "-n", 4, *placed)
    assert opened.contexts == [64, 64, 72, 5, 64, 64, 64, 64, 8]


def test_a_context_that_does_not_fit_is_refused_with_its_numbers(run, wide, prose, tmp_path) -> None:
    """1 KiB a token in float32: 131,072 tokens take 0.125 GiB beside the weights' 0.06."""
    placed = (*ROOM, "-ngl", 99)
    for args in (("perplexity", wide), ("imatrix", wide, "-o", tmp_path / "x")):
        said = run(*args, "-f", prose, "-c", 1 << 17, *placed, status=1)
        assert re.search(r"with a context of 131072 tokens, cpu:0 holds .*, 0\.125 cache.* and has 0\.146", said), said
    assert "with a context of 1048576 tokens" in run("generate", wide, "-p", "x", "-n", -1, *placed, status=1)
