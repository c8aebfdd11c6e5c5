"""Uploads: files, model card, private repositories, pull requests, what is refused."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

import quantkit
from quantkit.cli import main
from quantkit.formats import front_matter
from tests.archs.checkpoints import TEXT, tiny
from tests.hub.fake import FakeHub, Fault, Repo


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("upload")
    tiny(made / "hf", "bfloat16", hidden_size=256, intermediate_size=512, head_dim=64)
    (made / "hf" / "README.md").write_text(
        "---\nlicense: apache-2.0\nlanguage: [en]\nbase_model: org/Base\n---\n", encoding="utf-8"
    )
    options = quantkit.QuantizeOptions(split_max_tensors=9)
    quantkit.quantize(made / "hf", made / "q.gguf", "Q4_0", options)
    quantkit.quantize(made / "hf", made / "one.gguf", "Q8_0")
    (made / "text.txt").write_text(" ".join(TEXT) * 4, encoding="utf-8")
    quantkit.convert(made / "hf", made / "bf16.gguf")
    words = [made / "bf16.gguf", made / "one.gguf", "-f", made / "text.txt", "-c", "64", "--chunks", "3"]
    assert main(["compare", *map(str, words), "-o", str(made / "results.json")]) == 0
    (made / "kld.png").write_bytes(b"\x89PNG\r\n")
    return made


def test_files_and_card(hub: FakeHub, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One commit, all shards of a set; the card is read as the Hub reads it and has all hashes."""
    shards = sorted(folder.glob("q-*.gguf"))
    about = ["--card", "--results", str(folder / "results.json"), "--picture", str(folder / "kld.png"), "--private"]
    words = [str(shards[1]), str(folder / "one.gguf"), "hf://org/Made-GGUF"]
    assert main(["upload", *words, *about]) == 0
    assert f"{hub.url}/org/Made-GGUF/commit/" in capsys.readouterr().out
    assert len(hub.commits) == 1
    assert hub.repos["org/Made-GGUF"].private
    sent = [*shards, folder / "one.gguf", folder / "kld.png"]
    assert {name: data for name, data in hub.uploads.items() if name != "README.md"} == {
        path.name: path.read_bytes() for path in sent
    }
    text = hub.uploads["README.md"].decode()
    kld = json.loads((folder / "results.json").read_text(encoding="utf-8"))["models"][1]
    for path in sent:
        assert f"| `{path.name}` | `{hashlib.sha256(path.read_bytes()).hexdigest()}` |" in text
    for part in (
        "## one ",
        "## q ",
        "quantkit quantize MODEL-BF16.gguf OUT.gguf Q8_0",
        f" | {kld['kld']:.5f} ± {kld['kld_error_over_chunks']:.5f} | ",
        " | reference | ",
        f"Over {kld['positions']} tokens of text.txt",
        "![Mean KL divergence against size](<kld.png>)",
    ):
        assert part in text
    (tmp_path / "README.md").write_text(text, encoding="utf-8")
    front = front_matter.read(tmp_path / "README.md")
    assert front["license"] == "apache-2.0"
    assert front["base_model"] == ["org/Base"]
    assert front["tags"][:2] == ["gguf", "quantkit"]


def test_a_card_is_not_replaced(hub: FakeHub, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (repo := Repo()).files["README.md"] = folder / "hf" / "README.md"
    hub.repos["org/Made"] = repo
    words = ["upload", str(folder / "one.gguf"), "hf://org/Made", "--card"]
    assert main(words) == 1
    assert "hf://org/Made/README.md: the repository has a model card" in capsys.readouterr().err
    assert not hub.commits
    hub.faults.append(Fault("/api/models/org/Made", status=503, retry_after=0))
    assert main([*words, "--create-pr"]) == 0
    assert hub.commits[0]["is_pr"]
    assert capsys.readouterr().out.endswith(f"{hub.url}/org/Made/discussions/1\n")


def test_bad_usage(hub: FakeHub, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = str(folder / "one.gguf")
    (tmp_path / "kld.png").write_bytes(b"")
    for words, message in (
        ([one], "the repository last"),
        ([one, "org/Made"], "the repository last"),
        ([one, "hf://org/Made/x.gguf"], "files keep their names"),
        ([one, "hf://org/Made", "--results", "x.json"], "add --card"),
        ([str(folder / "kld.png"), str(tmp_path / "kld.png"), "hf://org/Made"], "two files are called kld.png"),
        ([str(tmp_path / "none.txt"), "hf://org/Made"], "no such file"),
    ):
        assert main(["upload", *words]) == 2
        assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert main(["upload", one, "hf://org/Made", "--card", "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith("---\n")
    assert main(["upload", one, "hf://org/Made", "--create-pr"]) == 1
    assert "no such repository to open a pull request in" in capsys.readouterr().err
    assert not hub.commits
