"""The `quantize` command of a model card, pasted into a shell, gives the types that the file has."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from quantkit import types
from quantkit.cli import main
from quantkit.errors import QuantkitError
from quantkit.formats import gguf, imatrix
from quantkit.formats.gguf import header
from quantkit.recipe import Options

EMBD, FF = 256, 512


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in BF16 and an importance matrix, named as a card names them."""
    made = tmp_path_factory.mktemp("card")
    rng = np.random.default_rng(4)
    shapes = {"token_embd.weight": (EMBD, EMBD), "output.weight": (EMBD, EMBD), "output_norm.weight": (EMBD,)}
    for i in range(3):
        shapes |= {f"blk.{i}.attn_{name}.weight": (EMBD, EMBD) for name in ("q", "k", "v", "output")}
        shapes |= {f"blk.{i}.ffn_{name}.weight": (FF, EMBD) for name in ("gate", "up")}
        shapes |= {f"blk.{i}.ffn_down.weight": (EMBD, FF), f"blk.{i}.attn_norm.weight": (EMBD,)}
    metadata = gguf.Metadata({"general.architecture": "llama", "llama.block_count": 3})
    specs = [gguf.TensorSpec(n, s, types.layout("bf16" if len(s) > 1 else "f32")) for n, s in shapes.items()]
    entries = {}
    with gguf.Writer(made / "MODEL-BF16.gguf", metadata, specs) as writer:
        for spec in specs:
            x = rng.standard_normal(spec.shape).astype(np.float32)
            writer.write(spec.name, spec.type.quantize(x) if len(spec.shape) > 1 else x.view(np.uint8))
            entries[spec.name] = imatrix.Entry(np.ones((1, spec.shape[-1]), np.float32), np.array([64]), 2)
    for name in ("i m'.dat", "IMATRIX.dat"):
        imatrix.write(made / name, imatrix.Imatrix(entries, 2, "t", 32))
    bin = made / "bin"
    bin.mkdir()
    (bin / "quantkit").write_text("#!/bin/sh\nprintf '%s\\0' \"$@\" > words\n")
    (bin / "quantkit").chmod(0o755)
    return made


COMMENTED = """# for small models
# ' " $HOME `id` 4
down := q5_1
blk.{1-2}.ffn_down.weight=${down}  # "the last" ones; $(touch pwned)

# all others
attn_(k|v)\\.weight$=q8_0
"""
CASES = {
    "plain": (["Q4_0"], "q.gguf"),
    "a mix": (["Q4_K_M", "--imatrix", "i m'.dat"], "q.gguf"),
    "a recipe with comments": (["Q4_0", "--recipe", "mine.recipe"], "q.gguf"),
    "one rule": (["Q4_0", "--custom-q", "ffn_up=q8_0"], "q.gguf"),
    "several rules": (["Q4_0", "--custom-q", "ffn_up\\.weight$=q8_0 , attn_k=q5_1,blk.{0-1}.ffn=q6_0"], "1.gguf"),
    "flags, a name with blanks": (["Q4_0", "--attn-v-type", "q8_0", "--output-tensor-type", "q6_0"], "a 'b' $c.gguf"),
    "a name like an option": (["Q5_0", "--pure"], "-q.gguf"),
    "repacked by a pattern": (["Q4_0", "--repack-pattern", "(up|gate)\\.weight$,attn_[q'\"]"], "q.gguf"),
    "very low bits": (["IQ2_XXS", "--imatrix", "i m'.dat", "--effort", "fast"], "q.gguf"),
    "importance that is not named": (["Q2_K_S", "--imatrix", "i m'.dat", "--hide-imatrix"], "q.gguf"),
    "the recipe of another file": (["Q5_0", "--custom-q", "attn_q=q4_1", "--recipe", "old.gguf"], "q.gguf"),
}  # fmt: skip


def quantized(folder: Path, name: str, *args: object) -> Path:
    out = folder / name
    assert main(["quantize", str(folder / "MODEL-BF16.gguf"), str(out), *map(str, args)]) == 0
    return out


def pasted(folder: Path, path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The words that a shell makes of the command of a file's card."""
    monkeypatch.chdir(folder)
    capsys.readouterr()
    assert main(["inspect", str(path), "--card"]) == 0
    block = re.search(r"```bash\n(.*?)```", capsys.readouterr().out, re.DOTALL)
    assert block is not None
    line = next(line for line in block[1].splitlines() if line.startswith("quantkit quantize "))
    env = os.environ | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    (folder / "words").unlink(missing_ok=True)
    done = subprocess.run(["sh", "-c", line], cwd=folder, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), line
    assert not (folder / "pwned").exists()
    return (folder / "words").read_text().split("\0")[:-1]


def types_of(path: Path) -> dict[str, str]:
    return {t.name: t.type.name for t in gguf.open(path).tensors.values()}


def planned(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """The types that a command gives."""
    assert main([*words, "--dry-run", "--json"]) == 0
    return {t["name"]: t["type"] for t in json.loads(capsys.readouterr().out)["tensors"]}


@pytest.mark.parametrize("case", CASES)
def test_a_pasted_command_gives_the_same_types(folder, capsys, monkeypatch, case) -> None:
    monkeypatch.chdir(folder)
    (folder / "mine.recipe").write_text(COMMENTED)
    args, name = CASES[case]
    if "old.gguf" in args:
        quantized(folder, "old.gguf", "Q4_0", "--recipe", "mine.recipe")
    path = quantized(folder, name, *args)
    words = pasted(folder, path, capsys, monkeypatch)
    assert words[:3] == ["quantize", "MODEL-BF16.gguf", "OUT.gguf"]
    assert ("--imatrix" in words) == ("--imatrix" in args)
    assert ("--effort" in words) == ("--effort" in args)
    assert planned(words, capsys) == types_of(path)


def test_a_file_that_changed_since_and_one_that_says_nothing(folder, capsys, monkeypatch) -> None:
    path, packed = quantized(folder, "r.gguf", "Q4_0", "--custom-q", "ffn_up=q5_0"), folder / "packed.gguf"
    assert main(["repack", str(path), str(packed)]) == 0
    assert set(types_of(packed).values()) & {"q4_0_r8", "q5_0_r4"}
    assert planned(pasted(folder, packed, capsys, monkeypatch), capsys) == types_of(packed)
    header.rewrite(path, gguf.Metadata(), ["quantkit.recipe"])
    assert planned(pasted(folder, path, capsys, monkeypatch), capsys) == types_of(path)


@pytest.mark.parametrize("text", [
    "# quantkit quantize Q4_0 ; touch pwned\nffn_up=q5_0\n", "# quantkit quantize $(touch pwned)\nffn_up=q5_0\n",
    "# quantkit quantize Q4_0 --override-kv a=int:1\n", "# quantkit quantize Q4_0\nffn_up = = q5_0\n",
    "# quantkit quantize Q4_0 --repack-pattern 'a\n", "# quantkit quantize Q6_K --attn-q-type\n", "hello",
])  # fmt: skip
def test_what_a_file_says_is_not_believed(folder, capsys, monkeypatch, text) -> None:
    """A rule for each class of tensors where the text is no command, or one that gives other types."""
    path = quantized(folder, "h.gguf", "Q4_0", "--custom-q", "ffn_up=q5_0")
    header.rewrite(path, gguf.Metadata({"quantkit.recipe": text}))
    assert planned(pasted(folder, path, capsys, monkeypatch), capsys) == types_of(path)


def test_flags_are_read_as_they_are_written() -> None:
    q8_0 = types.layout("q8_0")
    for options in (
        Options(), Options(pure=True, leave_output=True), Options(ignore_imatrix_rules=True, repack=True),
        Options(output_type=q8_0, embedding_type=q8_0, router_type=q8_0, class_types={"attn_qkv": q8_0}),
        Options(layer_embedding_type=q8_0),
        Options(repack_patterns=("a b", "c'd\"$e\\.")),
    ):  # fmt: skip
        assert Options.parse(str(options)) == options
    assert Options.parse(r"--repack-pattern ffn_.*\.weight$").repack_patterns == (r"ffn_.*\.weight$",)
    for text in ("x", "--pure x", "--attn-q-type", "--attn-q-type q9", "--threads 4", "'"):
        with pytest.raises(QuantkitError):
            Options.parse(text)
