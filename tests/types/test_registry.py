"""What must hold for every type that is registered, now or later."""

from __future__ import annotations

import pickle
import subprocess
import sys

import numpy as np
import pytest

from quantkit import types
from quantkit.errors import DataError, FormatError, UnknownNameError, UnsupportedError
from quantkit.types import base, layouts

ALL = types.all()
by_type = pytest.mark.parametrize("t", ALL, ids=lambda t: t.name)


def test_the_first_types_are_there():
    names = {t.name for t in ALL}
    assert names >= {"f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q6_0", "iq4_nl", "q4_K", "q6_K"}
    assert names >= {"iq4_k", "q8_0_r8", "iq4_k_r4"}


def test_names_and_ids_are_unique():
    records = base.layouts()
    assert len({t.name.lower() for t in records}) == len(records) == len({t.ggml_type for t in records})
    file_types = [t.file_type for t in ALL if t.file_type is not None]
    assert len(set(file_types)) == len(file_types)


@by_type
def test_record(t):
    assert types.get(t.name.upper()) is types.get(t.name.lower()) is types.from_id(t.ggml_type) is t
    assert pickle.loads(pickle.dumps(t)) is t
    assert t.block_bytes > 0
    assert t.block_size > 0
    n = 4 * t.block_size
    assert t.row_bytes(n) == t.row_meta_bytes + 4 * t.block_bytes
    assert t.bits_per_weight(n) == pytest.approx(8 * t.row_bytes(n) / n)
    assert not t.requires_imatrix or t.uses_imatrix


@by_type
def test_sizes_agree_with_the_table_of_layouts(t):
    lines = [line.split() for line in layouts._TABLE.split("\n") if line]
    (line,) = [line for line in lines if int(line[0]) == t.ggml_type]
    assert line[1] == t.name
    meta = int(line[4]) if len(line) > 4 else 0
    assert (int(line[2]), int(line[3]), meta) == (t.block_size, t.block_bytes, t.row_meta_bytes)


@by_type
def test_interleaved_types_name_their_base(t):
    encodings_of_their_own = ("iq1_s_r4", "iq1_m_r4")
    assert (t.interleave > 1) == (t.base is not None or t.name in encodings_of_their_own)
    if t.base is not None:
        assert types.layout(t.base).interleave == 1


@by_type
def test_sizes_agree_with_the_gguf_package(t):
    import gguf

    try:
        kind = gguf.GGMLQuantizationType(t.ggml_type)
    except ValueError:
        pytest.skip(f"the gguf package does not know id {t.ggml_type}")
    assert gguf.GGML_QUANT_SIZES[kind] == (t.block_size, t.block_bytes)
    assert kind.name.lower() == {"q1_0_g128": "q1_0"}.get(t.name, t.name.lower())


def test_an_unknown_name_lists_the_nearest():
    with pytest.raises(UnknownNameError, match="q4_0") as caught:
        types.get("q4_00")
    assert "q4_0" in caught.value.near
    with pytest.raises(UnknownNameError):
        types.layout("")


def test_an_unknown_id_is_an_error():
    with pytest.raises(FormatError, match="9999"):
        types.from_id(9999)


def test_a_type_without_codec_still_has_sizes():
    record = types.layout("i32")
    assert record.row_bytes(5) == 20
    with pytest.raises(UnsupportedError, match="i32"):
        types.get("i32")
    with pytest.raises(UnsupportedError, match="i32"):
        record.dequantize(np.zeros((1, 20), np.uint8), 5)
    with pytest.raises(UnsupportedError, match="i32"):
        record.quantize(np.zeros((1, 5), np.float32))


def test_a_contradicting_record_is_refused():
    with pytest.raises(TypeError, match="block_bytes"):

        class Wrong(base.QuantType):
            name, ggml_type = "iq1_bn", 134
            block_size, block_bytes, row_meta_bytes = 64, 14, 2

    with pytest.raises(TypeError, match="already registered"):

        class Again(base.QuantType):
            name, ggml_type = "q4_0", 2
            block_size, block_bytes = 32, 18


@by_type
def test_shapes_that_do_not_fit_are_errors(t):
    n = 2 * t.block_size
    x = np.zeros((t.interleave, n), np.float32)
    good = np.zeros((t.interleave, t.row_bytes(n)), np.uint8)
    if t.block_size > 1:
        with pytest.raises(DataError, match=rf"{n + 1} elements .* {t.block_size}"):
            t.row_bytes(n + 1)
    with pytest.raises(DataError, match=str(t.row_bytes(n))):
        t.dequantize(good[:, :-1], n)
    with pytest.raises(DataError, match="out="):
        t.dequantize(good, n, out=np.empty((t.interleave, n), np.float64))
    with pytest.raises(DataError, match="not contiguous"):
        t.dequantize(good, n, out=np.empty((t.interleave, 2 * n), np.float32)[:, ::2])
    with pytest.raises(DataError, match="read-only"):
        t.dequantize(good, n, out=np.frombuffer(bytes(4 * t.interleave * n), np.float32).reshape(t.interleave, n))
    for other in (good.astype(np.float32), good.astype(np.int16) - 1, good.astype(np.int16) + 256):
        with pytest.raises(DataError, match="expected bytes, uint8"):
            t.dequantize(other, n)
    if t.encode_rows is None:
        with pytest.raises(UnsupportedError, match="cannot encode"):
            t.quantize(x)
        return
    with pytest.raises(DataError, match=r"float32\[rows, n\]"):
        t.quantize(x[0])
    with pytest.raises(DataError, match="importance"):
        t.quantize(x, np.ones(n + 1, np.float32))
    if t.interleave > 1:
        with pytest.raises(DataError, match=f"multiple of the {t.interleave}"):
            t.quantize(np.zeros((t.interleave + 1, n), np.float32))


def test_asking_for_a_type_reads_its_file_alone():
    code = """
import sys
from quantkit import types
types.layout("iq4_k"), types.from_id(12), types.names()
files = ("iq4_k", "q4_k", "iq2_k", "floats", "activation")
print([file for file in files if f"quantkit.types.{file}" in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "['iq4_k', 'q4_k']\n"


def test_every_type_is_found_by_threads_that_ask_at_once():
    code = """
import threading
from quantkit import types
start, found = threading.Barrier(8), []
def ask():
    start.wait()
    found.append([types.layout(name) for name in types.names()])
threads = [threading.Thread(target=ask) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(len(found), all(a is b for each in found for a, b in zip(each, found[0])), sum(t.has_codec for t in found[0]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"8 True {sum(t.has_codec for t in base.layouts())}\n"
