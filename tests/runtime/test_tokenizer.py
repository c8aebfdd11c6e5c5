"""The runtime's tokenizer: golden ids, the reference's ids for every pre-tokenizer, text back from ids."""

from __future__ import annotations

import ctypes
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from quantkit.errors import DataError, FormatError, QuantkitError, UnknownNameError, UnsupportedError
from quantkit.formats.gguf import Metadata, TensorSpec, Writer
from quantkit.formats.gguf import open as open_gguf
from quantkit.tokenizers import pretokenizers, vocab
from quantkit.tokenizers.tokenizer import Tokenizer
from tests.archs.checkpoints import HARD, TEXT, byte_level, merging_across_words, sentencepiece, write_tokenizer
from tests.archs.tokenizer_files import BYTE_LEVEL, spaced, strings, trained


@pytest.fixture(scope="module")
def smollm2(smollm2_q4_1: Path) -> Metadata:
    return open_gguf(smollm2_q4_1).metadata


def metadata_of(tmp_path: Path, tokenizer: dict[str, Any], size: int, **config: Any) -> Metadata:
    write_tokenizer(tmp_path, tokenizer, **config)
    metadata = Metadata()
    for key, (value, kind) in vocab.read(tmp_path, {"vocab_size": size}).items():
        metadata.set(key, value, kind)
    return metadata


# --------------------------------------------------------------------------------------------------------------- golden


def test_golden_ids(smollm2: Metadata, golden: Path) -> None:
    text = (golden / "eval.txt").read_text(encoding="utf-8").removesuffix("\n")
    tokenizer = Tokenizer.from_gguf(smollm2)
    ids = tokenizer.encode(text)
    assert len(ids) == 5933
    assert tokenizer.decode(ids) == text
    base = (golden / "smollm2-135m-f16.c64.kld").read_bytes()
    np.testing.assert_array_equal(np.frombuffer(base, "<i4", 64, 20), ids[:64])


def test_same_ids_as_transformers(smollm2: Metadata, smollm2_q4_1: Path, golden: Path) -> None:
    import transformers

    theirs = transformers.AutoTokenizer.from_pretrained(str(smollm2_q4_1.parent), gguf_file=smollm2_q4_1.name)
    text = (golden / "eval.txt").read_text(encoding="utf-8")
    assert Tokenizer.from_gguf(smollm2).encode(text) == theirs(text, add_special_tokens=False).input_ids


def test_same_ids_as_smollm2s_own_definition(smollm2: Metadata) -> None:
    """Digits one by one, then the pre-tokenizer of GPT-2, as the published tokenizer.json says it."""
    tokens = {token: i for i, token in enumerate(smollm2["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in smollm2["tokenizer.ggml.merges"]]
    theirs = tokenizers.Tokenizer(tokenizers.models.BPE(tokens, merges))
    steps = [tokenizers.pre_tokenizers.Digits(True), tokenizers.pre_tokenizers.ByteLevel(False)]
    theirs.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(steps)
    ours = Tokenizer.from_gguf(smollm2)
    for text in [*TEXT, HARD, "1234 12345 100000", "don't DON'T we'LL", "a  b\n \n c"]:
        assert ours.encode(text) == theirs.encode(text).ids


# ------------------------------------------------------------------------------------------------------------ reference


class ReferenceVocab:
    """Tokenizing with the reference's library; only the metadata are loaded."""

    def __init__(self, path: Path):
        self._c: Any = pytest.importorskip("ik_llama_cpp._ctypes_api", reason="the reference wheel is not installed")
        self._c._lib.llama_log_set(_QUIET, None)
        parameters = self._c.llama_model_default_params()
        parameters.vocab_only = True
        self._model = self._c.llama_model_load_from_file(str(path).encode(), parameters)
        assert self._model, f"the reference does not load {path}"

    def encode(self, text: str, special: bool = False) -> list[int]:
        data = text.encode()
        out = (ctypes.c_int32 * (len(data) + 8))()
        count = self._c.llama_tokenize(self._model, data, len(data), out, len(out), False, special)
        return list(out[:count])

    @property
    def adds_bos(self) -> bool:
        function = self._c._lib.llama_vocab_get_add_bos
        function.restype, function.argtypes = ctypes.c_bool, [ctypes.c_void_p]
        return function(self._c.llama_model_get_vocab(self._model))

    def close(self) -> None:
        self._c.llama_free_model(self._model)


_QUIET = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda level, text, data: None)


@pytest.fixture
def reference(tmp_path: Path, smollm2: Metadata) -> Iterator[Any]:
    """metadata of a tokenizer -> ReferenceVocab."""
    opened = []

    def load(metadata: Metadata) -> ReferenceVocab:
        path = tmp_path / "vocab.gguf"
        model = Metadata(smollm2)
        for key in list(model):
            if key.startswith("tokenizer."):
                del model[key]
        model.update(metadata)
        model.set("llama.vocab_size", len(metadata["tokenizer.ggml.tokens"]), "u32")
        with Writer(path, model, [TensorSpec("token_embd.weight", (1, 32), "f32")]) as writer:
            writer.write("token_embd.weight", np.zeros(128, np.uint8))
        opened.append(ReferenceVocab(path))
        return opened[-1]

    yield load
    for vocabulary in opened:
        vocabulary.close()


@pytest.fixture(scope="module")
def boundless(tmp_path_factory: pytest.TempPathFactory) -> Metadata:
    tokenizer = merging_across_words()
    size = len(tokenizer["model"]["vocab"])
    special = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
    metadata = metadata_of(tmp_path_factory.mktemp("boundless"), tokenizer, size, **special)
    del metadata["tokenizer.ggml.add_bos_token"]
    return metadata


def cut_as(name: str, metadata: Metadata) -> Metadata:
    made = metadata.copy()
    made.set("tokenizer.ggml.pre", name, "str")
    return made


def test_the_hard_text_tells_all_ways_of_cutting_apart(boundless: Metadata) -> None:
    result = {}
    for entry in pretokenizers.TABLE:
        ids = Tokenizer.from_gguf(cut_as(entry.names[0], boundless)).encode(HARD, bos=False)
        result.setdefault(tuple(ids), entry.splits)
        assert result[tuple(ids)] == entry.splits, entry.names[0]


@pytest.mark.parametrize("name", [name for entry in pretokenizers.TABLE for name in entry.names])
def test_same_ids_as_the_reference(boundless: Metadata, reference: Any, name: str) -> None:
    """HARD is in Unicode's composed form, which the reference takes for granted.

    For tekken, kimi-k2 and gpt-4o the reference does not count combining marks as letters, though their expressions do;
    for kimi-k2 it leaves words joined that its expression cuts before a capital letter.
    """
    marks = ("tekken", "kimi-k2", *next(entry.names for entry in pretokenizers.TABLE if "gpt-4o" in entry.names))
    metadata = cut_as(name, boundless)
    theirs, ours = reference(metadata), Tokenizer.from_gguf(metadata)
    hard = HARD.replace(" हिन्दी", "") if name in marks else HARD
    hard = hard.replace("CamelCaseWord", "") if name == "kimi-k2" else hard
    for text in (hard, "1234 12345 100000", "don't DON'T we'LL", "a  b\n \n c", "<|begin|>user"):
        assert ours.encode(text, bos=False) == theirs.encode(text), text
        assert ours.encode(text, bos=False, special=True) == theirs.encode(text, special=True), text
    assert ours.adds_bos == theirs.adds_bos


@pytest.mark.parametrize("kind", ["llama-bpe", "qwen2", "deepseek-v3", "gpt-4o", "smollm", "bpe", "unigram"])
def test_many_texts_as_the_reference(tmp_path: Path, reference: Any, kind: str) -> None:
    """Cases where the reference is known to differ are left out.

    Combining marks: it does not compose text for qwen2 and does not count them as letters for gpt-4o. Characters newer
    than its tables. It ends a text at a zero byte. T5's tokenizer.json takes line ends off a text, SentencePiece and
    the reference only spaces.
    """
    definition = trained(kind) if kind in BYTE_LEVEL else spaced(kind)
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    size = len(definition["model"]["vocab"]) + len(definition["added_tokens"])
    metadata = metadata_of(tmp_path / "hf", definition, size, **tokens)
    theirs, ours = reference(metadata), Tokenizer.from_gguf(metadata)
    compared = 0
    for text in strings(300):
        if any(unicodedata.category(c) in ("Mn", "Mc", "Me", "Cn") for c in text) or "\0" in text:
            continue
        text = text.rstrip() if kind == "unigram" else text
        compared += 1
        assert ours.encode(text, bos=False, special=True) == theirs.encode(text, special=True), text
    assert compared > 100


def test_sentencepiece_as_the_reference(tmp_path: Path, reference: Any) -> None:
    metadata = metadata_of(tmp_path / "hf", sentencepiece(), 400, bos_token="<s>", eos_token="</s>", add_bos_token=True)
    theirs, ours = reference(metadata), Tokenizer.from_gguf(metadata)
    for text in [*TEXT, HARD, "the", " the", "x</s>y"]:
        assert ours.encode(text, bos=False) == theirs.encode(text), text
        assert ours.encode(text, bos=False, special=True) == theirs.encode(text, special=True), text
    assert ours.adds_bos
    assert theirs.adds_bos


# ------------------------------------------------------------------------------------------------------------------ API


def test_bos_and_special(tmp_path: Path) -> None:
    tokens = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
    metadata = metadata_of(tmp_path, byte_level(), 320, add_bos_token=True, **tokens)
    tokenizer = Tokenizer.from_gguf(metadata)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (0, 1, 320)
    assert tokenizer.adds_bos
    plain = tokenizer.encode("the", bos=False)
    assert tokenizer.encode("the") == [0, *plain]
    assert tokenizer.encode("the", bos=True) == [0, *plain]
    assert tokenizer.encode("") == [0]
    assert tokenizer.encode("the<|end|>", bos=False, special=True) == [*plain, 1]
    assert 1 not in tokenizer.encode("the<|end|>")
    metadata.set("tokenizer.ggml.add_eos_token", True, "bool")
    assert Tokenizer.from_gguf(metadata).encode("the") == [0, *plain, 1]
    del metadata["tokenizer.ggml.bos_token_id"]
    with pytest.raises(DataError, match="no BOS"):
        Tokenizer.from_gguf(metadata).encode("the", bos=True)


def test_user_defined_tokens_are_always_found(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer["model"]["vocab"] = {t: i for t, i in tokenizer["model"]["vocab"].items() if i < 319}
    tokenizer["model"]["merges"] = [
        m for m in tokenizer["model"]["merges"] if "".join(m) in tokenizer["model"]["vocab"]
    ]
    added = {"id": 319, "content": "<tool>", "special": False, "normalized": False}
    tokenizer["added_tokens"].append(added | dict.fromkeys(("single_word", "lstrip", "rstrip"), False))
    made = Tokenizer.from_gguf(metadata_of(tmp_path, tokenizer, 320))
    assert made.encode("<tool>") == made.encode("<tool>", special=True) == [319]
    assert made.decode([319], special=False) == "<tool>"


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_decoding_is_the_inverse(tmp_path: Path, kind: str) -> None:
    tokenizer = byte_level() if kind == "gpt2" else sentencepiece()
    made = Tokenizer.from_gguf(metadata_of(tmp_path, tokenizer, 400))
    for text in [*TEXT, HARD, " leading", "trailing ", "\n"]:
        ids = made.encode(text, bos=False)
        assert made.decode(ids) == text
        stream = made.decode_stream()
        pieces = [stream.push(token) for token in ids] + [stream.finish()]
        assert "".join(pieces) == text
        assert "�" not in "".join(pieces)


def test_the_space_in_front_of_a_text_is_removed_at_its_beginning_only(tmp_path: Path) -> None:
    """An unknown token or a control token that is shown is the beginning; added tokens may have the space."""
    made = sentencepiece()
    size = len(made["model"]["vocab"])
    blank = dict.fromkeys(("single_word", "lstrip", "rstrip", "special"), False)
    made["added_tokens"].append({"id": size, "content": "<tool>", "normalized": True} | blank)
    tokenizer = Tokenizer.from_gguf(metadata_of(tmp_path, made, size + 1))
    the = tokenizer.encode("the", bos=False)
    assert tokenizer.decode(the) == "the"
    assert tokenizer.decode([0, *the]) == "<unk> the"
    assert tokenizer.decode([1, *the]) == "<s> the"
    assert tokenizer.decode([1, *the], special=False) == "the"
    for text in ("<tool>", " <tool>", "x <tool>y"):
        assert tokenizer.decode(tokenizer.encode(text, bos=False)) == text


def test_a_stream_waits_for_whole_characters(tmp_path: Path) -> None:
    made = Tokenizer.from_gguf(metadata_of(tmp_path, byte_level(), 320))
    ids = made.encode("😀", bos=False)
    assert len(ids) == 4
    stream = made.decode_stream()
    assert [stream.push(token) for token in ids] == ["", "", "", "😀"]
    assert stream.finish() == ""
    assert stream.push(ids[0]) == ""
    assert stream.finish() == "�"
    assert b"".join(map(made.token_bytes, ids)) == "😀".encode()


def test_control_tokens_can_be_left_out(smollm2: Metadata) -> None:
    tokenizer = Tokenizer.from_gguf(smollm2)
    ids = tokenizer.encode("<|im_start|>hello<|im_end|>", special=True)
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.decode(ids) == "<|im_start|>hello<|im_end|>"
    assert tokenizer.decode(ids, special=False) == "hello"
    assert tokenizer.eos_ids == {0, 2}


@pytest.mark.parametrize(("kind", "ends"), [(3, {0, 1}), (4, {0, 1}), (1, {0})])
def test_added_tokens_that_end_a_reply_are_known_by_name(tmp_path: Path, kind: int, ends: set[int]) -> None:
    """As in llama.cpp, also where a file calls them user-defined. An ordinary token may be a text's own </s>."""
    metadata = metadata_of(tmp_path, byte_level(), 320, eos_token="<|begin|>")
    types = list(metadata["tokenizer.ggml.token_type"])
    types[1] = kind  # <|end|>
    metadata.set("tokenizer.ggml.token_type", types, "i32")
    assert Tokenizer.from_gguf(metadata).eos_ids == ends


def test_chat_template(smollm2: Metadata) -> None:
    tokenizer = Tokenizer.from_gguf(smollm2)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert prompt.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    refusing = smollm2.copy()
    refusing["tokenizer.chat_template"] = "{{ raise_exception('only users') }}"
    with pytest.raises(QuantkitError, match="only users"):
        Tokenizer.from_gguf(refusing).apply_chat_template([])
    refusing["tokenizer.chat_template"] = "{{ ''.__class__.__mro__ }}"
    with pytest.raises(QuantkitError, match="unsafe"):
        Tokenizer.from_gguf(refusing).apply_chat_template([])
    refusing["tokenizer.chat_template"] = "{{ 'a' + 1 }}"
    with pytest.raises(QuantkitError, match="refuses these messages"):
        Tokenizer.from_gguf(refusing).apply_chat_template([])
    del refusing["tokenizer.chat_template"]
    with pytest.raises(UnsupportedError, match="no chat template"):
        Tokenizer.from_gguf(refusing).apply_chat_template([])


TEMPLATES = {
    "tools": "{%- if tools is not none %}{{ tools | tojson(indent=2) }}{% endif %}{{ eos_token }}{{ documents }}",
    "date": "{{ strftime_now('%Y') | length }}{% set ns = namespace(n=1) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}",
    "marked": (
        "{% for m in messages %}\n  {%- generation %}{{ m.content }}{% endgeneration %}\n"
        "{% if loop.first %}{% continue %}{% endif %}{{ pad_token }}{% endfor %}"
    ),
    "roles": (
        "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] | trim }}{{ dict(a=1)['a'] }}"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{{ '<é>' | tojson }}{% endif %}"
    ),
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("tools", [None, [{"name": "f", "parameters": {"x": "é"}}]], ids=["plain", "with tools"])
def test_chat_templates_render_as_in_transformers(tmp_path: Path, name: str, tools: Any) -> None:
    import transformers

    tokens = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "pad_token": "<|end|>"}
    metadata = metadata_of(tmp_path, byte_level(), 320, chat_template=TEMPLATES[name], **tokens)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), **tokens)
    messages = [{"role": "user", "content": " hi "}, {"role": "assistant", "content": "<b> & 'c'"}]
    ours = Tokenizer.from_gguf(metadata).apply_chat_template(messages, tools=tools)
    assert ours == theirs.apply_chat_template(
        messages, tools=tools, chat_template=TEMPLATES[name], tokenize=False, add_generation_prompt=True
    )


def test_the_variant_for_tools_is_taken_with_tools(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | length }} tools"}]
    tokenizer = Tokenizer.from_gguf(metadata_of(tmp_path, byte_level(), 320, chat_template=named))
    assert tokenizer.apply_chat_template([]) == "plain"
    assert tokenizer.apply_chat_template([], tools=[{}, {}]) == "2 tools"


# --------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("stated", ["{", "3", 7])
def test_what_is_stated_exactly_must_be_json(tmp_path: Path, stated: Any) -> None:
    metadata = metadata_of(tmp_path, byte_level(), 320)
    metadata["quantkit.tokenizer"] = stated
    with pytest.raises(FormatError, match=r"quantkit\.tokenizer(: not JSON| is )"):
        Tokenizer.from_gguf(metadata)


def test_what_is_missing_or_unknown_is_named(smollm2: Metadata) -> None:
    def changed(key: str, value: Any = None) -> Metadata:
        made = smollm2.copy()
        if value is None:
            del made[key]
        else:
            made[key] = value
        return made

    with pytest.raises(UnsupportedError, match="'wpm'"):
        Tokenizer.from_gguf(changed("tokenizer.ggml.model", "wpm"))
    with pytest.raises(UnknownNameError, match=r"smolm.*did you mean smollm"):
        Tokenizer.from_gguf(changed("tokenizer.ggml.pre", "smolm"))
    with pytest.raises(FormatError, match=r"tokenizer\.ggml\.merges is missing"):
        Tokenizer.from_gguf(changed("tokenizer.ggml.merges"))
    with pytest.raises(FormatError, match="merges tokens that are not in"):
        Tokenizer.from_gguf(changed("tokenizer.ggml.merges", ["xyzzy plugh"]))
    with pytest.raises(FormatError, match="merges tokens that are not in"):
        Tokenizer.from_gguf(changed("tokenizer.ggml.merges", ["xyzzy"]))
    with pytest.raises(FormatError, match="merges = 'x'; it has to be a list of strings"):
        Tokenizer.from_gguf(changed("tokenizer.ggml.merges", "x"))
    with pytest.raises(FormatError, match="token_type has 1 entries for 49152"):
        Tokenizer.from_gguf(changed("tokenizer.ggml.token_type", [1]))
    with pytest.raises(FormatError, match="eos_token_id is 99999"):
        Tokenizer.from_gguf(changed("tokenizer.ggml.eos_token_id", 99999))
    tokenizer = Tokenizer.from_gguf(smollm2)
    with pytest.raises(DataError, match="token 49152 is not in the vocabulary"):
        tokenizer.decode([49152])
