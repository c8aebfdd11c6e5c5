"""Jobs: what ended early goes on where it was, what stays the same is taken over, what is stale is not."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quantkit
from quantkit import recipe, types
from quantkit.cli import main
from quantkit.errors import QuantkitError
from quantkit.formats import gguf, imatrix, journal, provenance
from quantkit.formats.gguf import TensorSpec, Writer
from quantkit.pipelines import resume
from quantkit.pipelines.pieces import Encoded, Piece
from quantkit.pipelines.quantize import Written, quantize_with_plan
from quantkit.pipelines.repack_file import plan_repack, write_repacked
from quantkit.pipelines.verify import verify_gguf
from tests.archs.files import changed

COUNT, ROWS, COLUMNS = 8, 64, 256
NAMES = [f"blk.{i}.ffn_up.weight" for i in range(COUNT - 2)] + ["output_norm.weight", "output.weight"]


def write_model(path: Path, changed: tuple[str, ...] = (), count: int = COUNT, rows: int = ROWS) -> Path:
    """Matrices and a norm in f32; those that are `changed` have other values."""
    names = NAMES if count == COUNT else [f"blk.{i}.ffn_up.weight" for i in range(count)]
    shapes = {name: (COLUMNS,) if "norm" in name else (rows, COLUMNS) for name in names}
    specs = [TensorSpec(name, shape, types.get("f32")) for name, shape in shapes.items()]
    metadata = gguf.Metadata({"general.architecture": "llama", "general.type": "tensors"})  # of a model, no whole one
    metadata.set("llama.block_count", len(names), "u32")
    with Writer(path, metadata, specs) as writer:
        for i, spec in enumerate(specs):
            x = np.random.default_rng([i, spec.name in changed]).standard_normal(spec.shape, np.float32)
            writer.write(spec.name, x.reshape(-1).view(np.uint8))
    return path


def importance(changed: tuple[str, ...] = ()) -> imatrix.Imatrix:
    entries = {}
    for i, name in enumerate(NAMES[:-2]):
        values = np.random.default_rng([i, name in changed]).random((1, COLUMNS), np.float32)
        entries[name] = imatrix.Entry(values, np.ones(1, np.int64), 1)
    return imatrix.Imatrix(entries, 1, "text")


def make(
    model: Path,
    out: Path,
    rules: str = "",
    matrix: imatrix.Imatrix | None = None,
    target: str = "IQ4_NL",
    **options: Any,
) -> Written:
    file = quantkit.open(model)
    plan = recipe.plan(file.tensors.values(), target, recipe.parse(rules), metadata=file.metadata, imatrix=matrix)
    return quantize_with_plan(file, out, plan, imatrix=matrix, threads=1, **options)


class Encodings:
    """The names of the tensors that were encoded; an interrupt at the piece `stop`, if any."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.names: list[str] = []
        self.stop: int | None = None
        encode = Piece.encode

        def counted(piece: Any) -> Encoded:
            if self.stop is not None and len(self.names) >= self.stop:
                raise KeyboardInterrupt
            self.names.append(piece.planned.name)
            return encode(piece)

        monkeypatch.setattr(Piece, "encode", counted)

    def of(self, run: Callable[[], Any]) -> set[str]:
        self.names = []
        run()
        return set(self.names)


@pytest.fixture
def encodings(monkeypatch: pytest.MonkeyPatch) -> Encodings:
    return Encodings(monkeypatch)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "in.gguf")


@pytest.fixture
def whole(model: Path, tmp_path: Path) -> bytes:
    """What an undisturbed run writes."""
    make(model, tmp_path / "whole.gguf")
    return (tmp_path / "whole.gguf").read_bytes()


def interrupt(encodings: Encodings, pieces: int, *arguments: Any, **options: Any) -> int:
    """Begin a run that is interrupted after so many pieces, and count what it noted as done."""
    encodings.names, encodings.stop = [], pieces
    with pytest.raises(KeyboardInterrupt):
        make(*arguments, **options)
    encodings.stop = None
    left = resume.unfinished(arguments[1])
    return left[0] if left else 0


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("out*"))


# ----------------------------------------------------------------------------------------------- a run that ended early


@pytest.mark.parametrize("limit", [None, 3])
def test_a_run_goes_on_where_it_was(model: Path, tmp_path: Path, encodings: Encodings, limit: int | None) -> None:
    """In one file and in shards; done tensors are neither made again nor miscounted."""
    make(model, tmp_path / "whole.gguf", split_max_tensors=limit)
    out, options = tmp_path / "out.gguf", {"split_max_tensors": limit}
    done = interrupt(encodings, 6, model, out, **options)
    assert 0 < done <= 6
    assert not list(tmp_path.glob("out*.gguf"))
    said: list[str] = []
    again = encodings.of(lambda: make(model, out, on_message=said.append, **options))
    assert len(again) == COUNT - done
    assert said == [f"resumed: {done} of {COUNT} tensors were done"]
    written = sorted(tmp_path.glob("out*"))
    assert [path.read_bytes() for path in written] == [path.read_bytes() for path in sorted(tmp_path.glob("whole*"))]
    assert all(path.suffix == ".gguf" for path in written)


def test_an_interrupt_before_anything_is_done_leaves_nothing(model: Path, tmp_path: Path, encodings: Encodings) -> None:
    assert interrupt(encodings, 0, model, tmp_path / "out.gguf") == 0
    assert left(tmp_path) == []


def test_fresh_starts_anew(model: Path, tmp_path: Path, encodings: Encodings, whole: bytes) -> None:
    out = tmp_path / "out.gguf"
    interrupt(encodings, 6, model, out)
    assert len(encodings.of(lambda: make(model, out, fresh=True))) == COUNT
    assert out.read_bytes() == whole
    assert left(tmp_path) == ["out.gguf"]


def test_a_source_that_was_only_touched_is_read_and_not_encoded(
    model: Path, tmp_path: Path, encodings: Encodings, whole: bytes
) -> None:
    out = tmp_path / "out.gguf"
    done = interrupt(encodings, 6, model, out)
    os.utime(model)
    assert len(encodings.of(lambda: make(model, out))) == COUNT - done
    assert out.read_bytes() == whole


def test_a_source_that_changed_is_read_anew(model: Path, tmp_path: Path, encodings: Encodings) -> None:
    """The tensors that did not change are still done."""
    out = tmp_path / "out.gguf"
    done = interrupt(encodings, 7, model, out)
    assert done > 2
    write_model(model, changed=(NAMES[1],))
    made = encodings.of(lambda: make(model, out))
    assert NAMES[1] in made
    assert len(made) == COUNT - done + 1
    make(model, tmp_path / "whole.gguf")
    assert out.read_bytes() == (tmp_path / "whole.gguf").read_bytes()


def test_bytes_that_rotted_in_the_partial_file_are_made_anew(
    model: Path, tmp_path: Path, encodings: Encodings, whole: bytes
) -> None:
    out = tmp_path / "out.gguf"
    done = interrupt(encodings, 7, model, out)
    tensor = quantkit.open(tmp_path / "whole.gguf").tensors[NAMES[2]]
    with open(tmp_path / "out.gguf.partial-job", "r+b") as stream:
        stream.seek(tensor.offset + 5)
        stream.write(bytes([whole[tensor.offset + 5] ^ 1]))
    made = encodings.of(lambda: make(model, out))
    assert NAMES[2] in made
    assert len(made) == COUNT - done + 1
    assert out.read_bytes() == whole


@pytest.mark.parametrize(
    "tail", [b'{"name": "blk.5', b"\0" * 99, b"[1]\n", b'{"name": "output.weight", "source": 3}\n']
)
def test_what_a_crash_leaves_of_the_last_line_counts_for_nothing(
    model: Path, tmp_path: Path, encodings: Encodings, whole: bytes, tail: bytes
) -> None:
    out = tmp_path / "out.gguf"
    done = interrupt(encodings, 6, model, out)
    with open(tmp_path / "out.gguf.partial-job.journal", "ab") as stream:
        stream.write(tail)
    interrupt(encodings, 1, model, out)
    assert len(encodings.of(lambda: make(model, out))) <= COUNT - done
    assert out.read_bytes() == whole


def test_killed_while_files_get_their_names(model: Path, tmp_path: Path, encodings: Encodings) -> None:
    """Shards that have their names already are taken from under those."""
    out, options = tmp_path / "out.gguf", {"split_max_tensors": 3}
    make(model, tmp_path / "whole.gguf", **options)
    expected = [path.read_bytes() for path in sorted(tmp_path.glob("whole*"))]
    interrupt(encodings, COUNT - 1, model, out, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quantkit.formats.atomic.AtomicFile.replace", _replace_and_die(2))
        with pytest.raises(SystemExit):
            make(model, out, **options)
    assert len(list(tmp_path.glob("out*.gguf"))) == 2
    assert encodings.of(lambda: make(model, out, **options)) == set()
    assert [path.read_bytes() for path in sorted(tmp_path.glob("out*"))] == expected


def _replace_and_die(count: int) -> Callable[[Any], None]:
    """AtomicFile.replace, of which the process dies before the call after `count`."""
    calls: list[Path] = []

    def replace(file: Any) -> None:
        if len(calls) == count:
            raise SystemExit
        calls.append(file.path)
        os.replace(file.temporary, file.path)
        file.stream.close()

    return replace


def test_a_run_with_other_options_takes_over_what_stays_the_same(
    model: Path, tmp_path: Path, encodings: Encodings
) -> None:
    """Said, not silently; also after one more interrupt."""
    out, rules = tmp_path / "out.gguf", r"blk\.1\.=q8_0"
    make(model, tmp_path / "whole.gguf", rules)
    done = interrupt(encodings, 6, model, out)
    interrupt(encodings, 1, model, out, rules)
    assert (tmp_path / "out.gguf.partial-old").exists()
    said: list[str] = []
    made = encodings.of(lambda: make(model, out, rules, on_message=said.append))
    assert len(made) <= COUNT - done + 1
    assert any("partial-old" in line for line in said)
    assert out.read_bytes() == (tmp_path / "whole.gguf").read_bytes()
    assert left(tmp_path) == ["out.gguf"]


def test_a_stale_job_is_resumed_when_its_options_come_back(
    model: Path, tmp_path: Path, encodings: Encodings, whole: bytes
) -> None:
    """After a command that was not meant."""
    out = tmp_path / "out.gguf"
    done = interrupt(encodings, 6, model, out)
    interrupt(encodings, 3, model, out, target="Q8_0")
    said: list[str] = []
    assert len(encodings.of(lambda: make(model, out, on_message=said.append))) == COUNT - done
    assert said == [f"resumed: {done} of {COUNT} tensors were done"]
    assert out.read_bytes() == whole
    assert left(tmp_path) == ["out.gguf"]


def test_other_importance_is_never_passed_over(model: Path, tmp_path: Path, encodings: Encodings) -> None:
    out = tmp_path / "out.gguf"
    interrupt(encodings, 6, model, out, "", importance())
    made = encodings.of(lambda: make(model, out, "", importance((NAMES[0],))))
    assert NAMES[0] in made
    assert NAMES[1] not in made
    make(model, tmp_path / "whole.gguf", "", importance((NAMES[0],)))
    assert out.read_bytes() == (tmp_path / "whole.gguf").read_bytes()


def test_two_at_once(model: Path, tmp_path: Path) -> None:
    with Writer(tmp_path / "out.gguf", {}, [TensorSpec("x", (4,), "f32")], resumable=True) as writer:
        writer.write("x", np.zeros(16, np.uint8))
        with pytest.raises(QuantkitError, match="another writer"):
            make(model, tmp_path / "out.gguf")
        with pytest.raises(QuantkitError, match="another writer"):
            make(model, tmp_path / "out.gguf", fresh=True)


def test_a_journal_that_cannot_be_written_ends_the_run(tmp_path: Path) -> None:
    def sync() -> None:
        raise OSError(28, "No space left on device")

    made = journal.Journal(tmp_path / "j", {}, sync)
    made.add({"name": "a"})
    with pytest.raises(QuantkitError, match="No space left"):
        made.close()
    found = journal.read(tmp_path / "j")
    assert found is not None
    assert found.entries == {}


def kill_at_random_moments(tmp_path: Path, kills: int) -> list[int]:
    """Kill runs of one job at random moments of it; each time go on, or begin anew after one that was whole.

    Asserts that what was noted is what is resumed, and the bytes; returns the numbers of done tensors met with.
    """
    model, out = write_model(tmp_path / "big.gguf", count=24, rows=1024), tmp_path / "out.gguf"
    command = [sys.executable, "-m", "quantkit", "quantize", str(model), str(out), "IQ4_NL", "1", "--json"]
    subprocess.run(command, check=True, capture_output=True)
    whole = out.read_bytes()
    out.unlink()
    moments, met = random.Random(5), []
    for number in range(kills):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        least = moments.randrange(-1, 4) if number else 1  # tensors done; -1: perhaps before it has begun to write
        while process.poll() is None and (resume.unfinished(out) or (-1, 0))[0] < least:
            time.sleep(0.005)
        time.sleep(moments.uniform(0, 0.5) if number else 0)
        process.send_signal(signal.SIGKILL)
        if process.wait() != -signal.SIGKILL:
            assert out.read_bytes() == whole
        found = resume.unfinished(out)
        done = found[0] if found else 0
        if out.exists():
            assert out.read_bytes() == whole
            out.unlink()
        finished = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        assert finished["resumed"] == done
        assert out.read_bytes() == whole
        assert left(tmp_path) == ["out.gguf"]
        out.unlink()
        met.append(done)
    return met


def test_killed_and_gone_on_with(tmp_path: Path) -> None:
    assert max(kill_at_random_moments(tmp_path, 2)) > 0


def test_killed_after_the_output_has_its_name(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The journal that is left tells of no unfinished run, and the next run neither trips over it nor keeps it."""
    out = tmp_path / "out.gguf"
    with monkeypatch.context() as patch:
        patch.setattr(resume.ResumableJob, "remove_leftovers", lambda self: None)
        make(model, out)
    whole, left = out.read_bytes(), out.with_name(f"{out.name}.partial-job.journal")
    assert left.exists()
    assert resume.unfinished(out) is None
    out.unlink()
    make(model, out)
    assert out.read_bytes() == whole
    assert not left.exists()


@pytest.mark.full
def test_killed_at_twenty_moments(tmp_path: Path) -> None:
    assert sum(done > 0 for done in kill_at_random_moments(tmp_path, 20)) > 5


# ------------------------------------------------------------------------------------------------------ partial requant


def test_one_rule_redoes_only_its_tensors(model: Path, tmp_path: Path, encodings: Encodings) -> None:
    out, rules = tmp_path / "out.gguf", r"blk\.[13]\.=q6_0"
    make(model, out)
    said: list[str] = []
    made = encodings.of(lambda: make(model, out, rules, partial_requant=True, on_message=said.append))
    assert made == {NAMES[1], NAMES[3]}
    assert said == [f"reused: {COUNT - 2} of {COUNT} tensors are in {out}"]
    make(model, tmp_path / "whole.gguf", rules)
    assert out.read_bytes() == (tmp_path / "whole.gguf").read_bytes()


def test_only_what_changed_is_redone(
    model: Path, tmp_path: Path, encodings: Encodings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A source, the importance of a tensor, the encoder of a type; and then nothing."""
    out, rules = tmp_path / "out.gguf", r"blk\.2\.=f16,blk\.4\.=q4_0"

    def changed(matrix: imatrix.Imatrix) -> set[str]:
        return encodings.of(lambda: make(model, out, rules, matrix, partial_requant=True))

    assert len(changed(importance())) == COUNT
    write_model(model, changed=(NAMES[0], NAMES[6]))
    assert changed(importance()) == {NAMES[0], NAMES[6]}
    # f16 is the same with any importance
    assert changed(importance((NAMES[1], NAMES[2]))) == {NAMES[1]}
    codec = provenance.codec
    monkeypatch.setattr(provenance, "codec", lambda name, *rest: "f" * 16 if name == "q4_0" else codec(name, *rest))
    assert changed(importance((NAMES[1], NAMES[2]))) == {NAMES[4]}
    assert changed(importance((NAMES[1], NAMES[2]))) == set()


def test_another_old_file(model: Path, tmp_path: Path, encodings: Encodings) -> None:
    """One that was quantized elsewhere, one that says nothing, one whose bytes rotted, a run that ended early."""
    old, out = tmp_path / "old.gguf", tmp_path / "out.gguf"
    make(model, old)
    with_rule = r"blk\.1\.=q8_0"
    assert encodings.of(lambda: make(model, out, with_rule, old=resume.open_old_file(old))) == {NAMES[1]}
    data = bytearray(old.read_bytes())
    data[quantkit.open(old).tensors[NAMES[3]].offset] ^= 1
    old.write_bytes(data)
    assert encodings.of(lambda: make(model, out, with_rule, old=resume.open_old_file(old))) == {NAMES[1], NAMES[3]}
    said: list[str] = []
    assert len(encodings.of(lambda: make(model, out, old=resume.open_old_file(model), on_message=said.append))) == COUNT
    assert said == [
        f"reused: 0 of {COUNT} tensors are in {model}, which has no record of what its tensors were made from"
    ]
    done = interrupt(encodings, 6, model, old)
    partial = resume.open_old_file(tmp_path / "old.gguf.partial-job")
    assert len(encodings.of(lambda: make(model, out, old=partial))) == COUNT - done


def test_shards_that_are_missing_are_made_again(model: Path, tmp_path: Path, encodings: Encodings) -> None:
    """What the reference's flag does with --keep-split; and without an output, all is made."""
    out = tmp_path / "out.gguf"
    options: dict[str, Any] = {"split_max_tensors": 3, "partial_requant": True}
    assert len(encodings.of(lambda: make(model, out, **options))) == COUNT
    shards = sorted(tmp_path.glob("out*"))
    whole = [path.read_bytes() for path in shards]
    shards[1].unlink()
    assert encodings.of(lambda: make(model, out, **options)) == set(NAMES[3:6])
    assert [path.read_bytes() for path in shards] == whole


def test_a_hidden_importance_matrix_stays_hidden(model: Path, tmp_path: Path, encodings: Encodings) -> None:
    out, options = tmp_path / "out.gguf", {"hide_imatrix": True, "partial_requant": True}
    make(model, out, "", importance(), **options)
    metadata = quantkit.open(out).metadata
    assert provenance.IMATRIX not in metadata
    assert provenance.of_importance(importance()[NAMES[0]].values) not in str(dict(metadata))
    assert encodings.of(lambda: make(model, out, "", importance(), **options)) == set(NAMES[:-2])


# --------------------------------------------------------------------------------------------------------------- hashes


def test_what_an_output_carries(model: Path, tmp_path: Path) -> None:
    import hashlib

    out = tmp_path / "out.gguf"
    make(model, out, "", importance())
    file, source = quantkit.open(out), quantkit.open(model)
    made = provenance.records(file.metadata)
    assert list(made) == NAMES
    for name, record in made.items():
        x = source.tensors[name]
        digest = hashlib.sha256(b"f32\n" + hashlib.sha256(x.data.tobytes()).digest()).hexdigest()[:32]
        assert (record.source, record.type) == (digest, file.tensors[name].type.name)
        assert (record.codec == "copy") == ("norm" in name)
        assert (record.importance == "-") == (name in NAMES[-2:])
    listed = "".join(f"{name} {record.source}\n" for name, record in made.items())
    assert file.metadata[provenance.SOURCE] == hashlib.sha256(listed.encode()).hexdigest()
    assert file.metadata[provenance.IMATRIX] == provenance.of_imatrix(importance())
    make(out, tmp_path / "copy.gguf", target="COPY")
    assert provenance.records(quantkit.open(tmp_path / "copy.gguf").metadata) == made


@pytest.mark.parametrize("shape", [(5,), (1, 5), (3, 40, 7), (64, 1 << 15), (2, 2, 33, 1 << 14)])
def test_pieces_cover_every_row_of_one_matrix_at_a_time(shape: tuple[int, ...]) -> None:
    pieces = list(provenance.row_pieces(shape))
    rows = shape[-2] if len(shape) > 1 else 1
    assert [row for start, stop in pieces for row in range(start, stop)] == list(range(int(np.prod(shape[:-1]))))
    assert all(start // rows == (stop - 1) // rows and start % rows % 16 == 0 for start, stop in pieces)


def test_codecs_have_versions() -> None:
    """One each, that does not depend on the run; another for another effort where there is a search."""
    names = ["f16", "q4_0", "iq4_nl", "q4_K", "iq3_k"]
    normal = [provenance.codec(name, "normal") for name in names]
    provenance.codec.cache_clear()
    assert normal == [provenance.codec(name, "normal") for name in names]
    assert len(set(normal)) == len(names)
    assert provenance.codec("f16", "best") == normal[0]
    assert provenance.codec("iq3_k", "best") != normal[-1]


@pytest.mark.full
@pytest.mark.parametrize("cpu", ["haswell", "generic"])
def test_codecs_have_the_same_versions_on_other_cpus(cpu: str) -> None:
    names = [
        "q8_0",
        "q4_K",
        "q6_K",
        "iq2_xs",
        "iq3_s",
        "iq2_k",
        "iq4_k",
        "iq5_ks",
        "iq2_kl",
        "iq3_kt",
        "mxfp4",
        "iq1_m",
    ]
    code = (
        "import sys; from quantkit.formats import provenance\n"
        "for name in sys.argv[1:]: print(name, provenance.codec(name, 'normal'))"
    )
    done = subprocess.run([sys.executable, "-c", code, *names], env=os.environ | {"NUMBA_CPU_NAME": cpu},
                          check=True, capture_output=True, text=True)  # fmt: skip
    assert dict(line.split() for line in done.stdout.splitlines()) == {n: provenance.codec(n, "normal") for n in names}


# --------------------------------------------------------------------------------------------------------------- verify


@pytest.fixture
def made(model: Path, tmp_path: Path) -> Path:
    make(model, tmp_path / "out.gguf", r"blk\.0\.=f16", importance())
    return tmp_path / "out.gguf"


def test_a_sound_file_and_its_rerun(made: Path, model: Path) -> None:
    file, source = quantkit.open(made), quantkit.open(model)
    found = verify_gguf(file, source, importance())
    assert (found.damage, found.changes, found.notes, found.rerun) == ([], {}, [], True)
    assert (found.decoded, found.hashed, found.recorded) == (COUNT, COUNT, COUNT)
    blind = verify_gguf(file, source)
    assert blind.rerun is None
    assert "pass --imatrix" in blind.notes[0]
    assert "pass --source" in verify_gguf(file).notes[0]


def test_what_a_rerun_would_change(made: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(model, changed=(NAMES[2],))
    monkeypatch.setattr(provenance, "codec", lambda name, *rest: "f" * 16 if name == "f16" else _CODEC(name, *rest))
    found = verify_gguf(quantkit.open(made), quantkit.open(model), importance((NAMES[4],)))
    assert found.damage == []
    assert found.rerun is False
    reasons = {name: " ".join(why) for name, why in found.changes.items()}
    assert list(reasons) == [NAMES[0], NAMES[2], NAMES[4]]
    for name, said in ((NAMES[0], "the codec of f16 has changed"), (NAMES[2], "source"), (NAMES[4], "importance")):
        assert said in reasons[name]


def test_an_unknown_architecture_is_noted(made: Path, tmp_path: Path) -> None:
    keys = {"general.architecture": "novel", "general.type": "model"}
    described = {key: (value, "str") for key, value in keys.items()} | {"novel.block_count": (1, "u32")}
    changed(made, tmp_path / "m.gguf", described)
    notes = verify_gguf(quantkit.open(tmp_path / "m.gguf")).notes
    assert "quantkit does not know novel, so the tensors were not compared with the metadata" in notes
    assert not any("does not know" in note for note in verify_gguf(quantkit.open(made)).notes)


_CODEC = provenance.codec


@pytest.mark.parametrize(("tensor", "value", "said"), [(3, 1, "the hash differs"), (0, 0x7E, "nan")])
def test_damage_is_found(made: Path, tensor: int, value: int, said: str, capsys: Any) -> None:
    """A flipped bit of a code, and a half that turned NaN."""
    data = bytearray(made.read_bytes())
    data[quantkit.open(made).tensors[NAMES[tensor]].offset + (1 if value == 0x7E else 7)] ^= value
    if value == 0x7E:
        data[quantkit.open(made).tensors[NAMES[tensor]].offset + 1] = value
    made.write_bytes(data)
    found = verify_gguf(quantkit.open(made))
    assert len(found.damage) == 1
    assert found.damage[0].startswith(f"{made}: {NAMES[tensor]}: ")
    assert said in found.damage[0]
    assert main(["verify", str(made)]) == 1
    assert f"damaged: {made}: {NAMES[tensor]}" in capsys.readouterr().out


def test_files_that_were_made_otherwise(made: Path, model: Path, tmp_path: Path) -> None:
    """Without records; repacked and unpacked since."""
    found = verify_gguf(quantkit.open(model), quantkit.open(model))
    assert (found.damage, found.recorded, found.rerun) == ([], 0, None)
    assert "no record" in found.notes[0]
    write_repacked(plan_repack(quantkit.open(made)), tmp_path / "r4.gguf")
    repacked = quantkit.open(tmp_path / "r4.gguf")
    assert repacked.tensors[NAMES[1]].type.name == "iq4_nl_r4"
    found = verify_gguf(repacked, quantkit.open(model), importance())
    assert (found.damage, found.hashed, found.rerun) == ([], COUNT, True)


def test_the_commands(model: Path, tmp_path: Path, capsys: Any) -> None:
    """quantize, one rule more with --partial-requant, verify as JSON; what contradicts itself."""
    out = tmp_path / "out.gguf"
    args = ["quantize", str(model), str(out), "IQ4_NL", "2"]
    assert main([*args, "--fresh"]) == 0
    assert main([*args, "--partial-requant", "--custom-q", r"blk\.1\.=q8_0"]) == 0
    assert f"reused: {COUNT - 1} of {COUNT} tensors" in capsys.readouterr().out
    assert main([*args, "--json", "--reuse", str(out)]) == 0
    assert json.loads(capsys.readouterr().out)["reused"] == COUNT - 1
    assert main(["verify", str(out), "--source", str(model), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["rerun"], found["hashed"]) == (True, COUNT)
    assert main(["verify", str(out), "--source", str(model)]) == 0
    assert "a rerun would give the same bytes" in capsys.readouterr().out
    assert main([*args, "--partial-requant", "--reuse", str(out)]) == 2


def test_an_interrupt_says_how_to_go_on(model: Path, tmp_path: Path, encodings: Encodings, capsys: Any) -> None:
    args = ["quantize", str(model), str(tmp_path / "out.gguf"), "IQ4_NL", "1"]
    encodings.stop = 6
    assert main(args) == 130
    said = capsys.readouterr().err
    assert f"of {COUNT} tensors are done and saved in {tmp_path / 'out.gguf'}.partial-job" in said
    encodings.stop = None
    assert main(args) == 0
    assert "resumed: " in capsys.readouterr().out
    shutil.rmtree(tmp_path)
