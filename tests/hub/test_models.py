"""Models on the Hub in place of paths: addresses, GGUF files, headers, errors, and the commands that take them."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

import quantkit
from quantkit.cli import main
from quantkit.errors import OptionError, QuantkitError
from quantkit.hub import address, models
from quantkit.hub.address import Address
from tests.hub.fake import FakeHub, Fault


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("hf://org/name", Address("org/name")),
        ("hf:/org/name/", Address("org/name")),  # what pathlib makes of it
        ("hf://org/name@v1.0", Address("org/name", "v1.0")),
        ("hf://org/name@refs/pr/3/a.gguf", Address("org/name", "refs/pr/3", "a.gguf")),
        ("hf://org/name@a%2Fb/dir/a b.gguf", Address("org/name", "a/b", "dir/a b.gguf")),
        ("hf://org/n_a.m-e/x@y.gguf", Address("org/n_a.m-e", None, "x@y.gguf")),
    ],
)
def test_addresses(text: str, found: Address) -> None:
    assert address.find(text) == address.find(Path(text)) == found
    assert address.parse(str(found)) == found


@pytest.mark.parametrize(
    "text", ["hf://", "hf://org", "hf://org/name@", "hf://org/name/../x", "hf://org/name//x", "hf://o g/n"]
)
def test_malformed_addresses(text: str) -> None:
    with pytest.raises(OptionError, match=r"write hf://ORG/NAME\[@REVISION\]\[/FILE\]"):
        address.find(text)


def test_a_local_path_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert address.find("org/name") == Address("org/name", given="org/name")
    assert address.find("org/name@v1") == Address("org/name", "v1", given="org/name@v1")
    for text in ("org/name.gguf", "org/config.json", "name", "./org/name", "/org/name", "a/b/c", "../org/name"):
        assert address.find(text) is None
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert address.find("org/name") is None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GGUF files as repositories have them: one, and a set of shards."""
    from tests.archs.checkpoints import tiny

    made = tmp_path_factory.mktemp("gguf")
    tiny(made / "hf", "bfloat16", hidden_size=256, intermediate_size=512, head_dim=64)
    quantkit.convert(made / "hf", made / "repo" / "m-bf16.gguf")
    options = quantkit.ConvertOptions(split_max_tensors=5)
    quantkit.convert(made / "hf", made / "repo" / "sub" / "s-{ftype}.gguf", options=options)
    return made


def test_inspect_and_plan_read_headers(hub: FakeHub, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hub.add("org/m-GGUF", folder / "repo")
    single = folder / "repo" / "m-bf16.gguf"
    shard = next((folder / "repo" / "sub").glob("s-*-00002-of-*.gguf"))
    for path, name in ((single, "m-bf16.gguf"), (shard, f"sub/{shard.name}")):
        for words in (["inspect", "--json"], ["plan", "--json"], ["metadata", "--json"], ["inspect", "--card"]):
            assert main([words[0], str(path), *words[1:]]) == 0
            expected = capsys.readouterr().out
            assert main([words[0], f"hf://org/m-GGUF/{name}", *words[1:]]) == 0
            found = capsys.readouterr().out
            if "--json" in words:
                wanted, got = json.loads(expected), json.loads(found)
                for record in (wanted, got):
                    record.pop("path", None), record.pop("paths", None)
                assert got == wanted
            else:
                assert found == expected
    assert hub.sent("m-bf16.gguf") < single.stat().st_size
    assert all(request.sent <= 1 << 18 for request in hub.requests)


def test_a_header_longer_than_the_first_request(hub: FakeHub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from quantkit.hub import headers

    monkeypatch.setattr(headers, "_FIRST", 1000)
    hub.add("org/m-GGUF", folder / "repo")
    found = quantkit.open(models.header_file("hf://org/m-GGUF/m-bf16.gguf"))
    local = quantkit.open(folder / "repo" / "m-bf16.gguf")
    assert dict(found.metadata) == dict(local.metadata)
    assert [(t.name, t.offset) for t in found.tensors.values()] == [(t.name, t.offset) for t in local.tensors.values()]


def test_commands_run_files_of_the_hub(hub: FakeHub, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fetched once into the cache, with all shards of a set."""
    hub.add("org/m-GGUF", folder / "repo")
    words = ["-p", "The", "-n", "2", "--temp", "0", "--json"]
    assert main(["generate", str(folder / "repo" / "m-bf16.gguf"), *words]) == 0
    expected = json.loads(capsys.readouterr().out)
    shards = sorted(path.name for path in (folder / "repo" / "sub").iterdir())
    for name in ("m-bf16.gguf", f"sub/{shards[1]}"):
        assert main(["generate", f"hf://org/m-GGUF/{name}", *words]) == 0
        assert json.loads(capsys.readouterr().out)["text"] == expected["text"]
    hub.requests.clear()
    assert main(["generate", "-m", "hf://org/m-GGUF/m-bf16.gguf", *words]) == 0
    assert not hub.sent(".gguf")
    assert main(["diff", "hf://org/m-GGUF/m-bf16.gguf", str(folder / "repo" / "m-bf16.gguf")]) == 0


def test_a_download_goes_on_after_faults(hub: FakeHub, folder: Path) -> None:
    hub.add("org/m-GGUF", folder / "repo")
    hub.faults += [
        Fault("m-bf16.gguf", status=503, retry_after=0, method="HEAD"),
        Fault("cdn/org/m-GGUF/m-bf16.gguf", cut=300_000),
        Fault("cdn/org/m-GGUF/m-bf16.gguf", status=429, retry_after=0),
    ]
    found = models.model_file("hf://org/m-GGUF/m-bf16.gguf")
    assert found.read_bytes() == (folder / "repo" / "m-bf16.gguf").read_bytes()
    assert not any(fault.times for fault in hub.faults)


def test_errors_say_what_was_tried(hub: FakeHub, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    hub.add("org/m-GGUF", folder / "repo")
    hub.add("org/gated", folder / "hf").gated = True
    hub.add("org/empty", tmp_path)
    for given, message in {
        "org/none": f"^org/none: no such file or directory here, so it was looked for at {hub.url}: .* has no model "
        "org/none that you may see; for a private one log in with",
        "hf://org/none/a.gguf": "^hf://org/none/a.gguf: .* has no model org/none",
        "hf://org/m-GGUF@v9/m-bf16.gguf": "^hf://org/m-GGUF@v9/m-bf16.gguf: org/m-GGUF has no revision v9",
        "hf://org/m-GGUF/m.gguf": r"^hf://org/m-GGUF/m.gguf: no such file; the repository has m-bf16.gguf, ",
        "hf://org/m-GGUF": r"^hf://org/m-GGUF: 2 GGUF files; write hf://org/m-GGUF/FILE with one of m-bf16.gguf, sub/s",
        "hf://org/gated/a.gguf": "access to org/gated has to be granted",
        "hf://org/empty": "^hf://org/empty: no .gguf file in the repository",
    }.items():
        with pytest.raises(QuantkitError, match=message):
            models.model_file(given)
    for given, message in {
        "hf://org/m-GGUF": r"no \*.safetensors in the repository; .* hf download org/m-GGUF --local-dir m-GGUF",
        "org/none": "^org/none: no such file or directory here",
    }.items():
        with pytest.raises(QuantkitError, match=message):
            quantkit.convert(given, tmp_path / "x.gguf")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with pytest.raises(QuantkitError, match="no such file"):
        models.model_file("hf://org/gated/a.gguf")
    assert hub.requests[-1].token == "Bearer hf_secret"


def test_a_mistyped_path_without_a_network_fails_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    started = time.monotonic()
    with pytest.raises(
        QuantkitError, match=r"^no/such: no such file or directory here, so .* if no/such is on the Hub"
    ):
        models.model_file("no/such")
    assert time.monotonic() - started < 5


def test_python_loads_from_the_hub(hub: FakeHub, folder: Path) -> None:
    hub.add("org/m-GGUF", folder / "repo")
    local = quantkit.load(folder / "repo" / "m-bf16.gguf").logits([1, 2, 3])
    assert (quantkit.load("hf://org/m-GGUF/m-bf16.gguf").logits([1, 2, 3]) == local).all()


def test_nothing_is_imported_for_local_files() -> None:
    import subprocess
    import sys

    code = (
        "import sys\nfrom quantkit.cli import main\nmain(['convert', '--help'])\n"
        "print('huggingface_hub' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("False\n")
