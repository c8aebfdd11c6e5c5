"""Text <-> token ids, from GGUF metadata alone; the work is done by the `tokenizers` library.

    t = Tokenizer.from_gguf(metadata)
    t.encode("Hello")                      ids, BOS first where the model wants one
    t.decode(ids)                          text
    decoder = t.decode_stream()            decoder.push(id) -> the text that became complete; decoder.finish()

Two kinds of token are found in a text before it is cut into words: user-defined ones always, control tokens
(<|im_start|> and the like) only with `special=True`. ik_llama.cpp's perplexity tool does not look for them either.
"""

from __future__ import annotations

import codecs
import functools
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from quantkit.errors import DataError, FormatError, UnknownNameError, UnsupportedError, printable
from quantkit.inputs import arguments
from quantkit.inputs.json_input import Json
from quantkit.tokenizers import hf_tokenizer, tiktoken


@functools.cache
def _byte_of_character() -> dict[str, int]:
    """GPT-2's printable alphabet, back to bytes."""
    return {character: byte for byte, character in enumerate(tiktoken.byte_alphabet())}


class Tokenizer:
    """A model's tokenizer. Ids and flags are those of the file; see `from_gguf`."""

    def __init__(self, metadata: Mapping[str, object]):
        self._metadata = metadata
        definition = hf_tokenizer.tokenizer_json(metadata)
        self._model = json.dumps(definition)
        self._normalized = [token["id"] for token in definition["added_tokens"] if token["normalized"]]
        self._tokens = hf_tokenizer.token_texts(metadata)
        self._types = hf_tokenizer.token_types(metadata)
        self._byte_level = metadata["tokenizer.ggml.model"] == "gpt2"
        self._strips_space = not self._byte_level and metadata.get("tokenizer.ggml.add_space_prefix", True)
        self.bos_id = hf_tokenizer.special_id(metadata, "bos")
        self.eos_id = hf_tokenizer.special_id(metadata, "eos")
        self.adds_bos = hf_tokenizer.adds_token(metadata, "bos") and self.bos_id is not None
        self.adds_eos = hf_tokenizer.adds_token(metadata, "eos") and self.eos_id is not None

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object], path: str | os.PathLike[str] | None = None) -> Tokenizer:
        """The tokenizer of a GGUF file's metadata; errors name the file's `path`, where it is given.

        FormatError when keys are missing or contradict each other; UnsupportedError, and without a path
        UnknownNameError, name a tokenizer.ggml.model or tokenizer.ggml.pre that is not handled.
        """
        if path is None:
            return cls(metadata)
        try:
            found = cls(metadata)
            _ = found._engines  # the library checks its own part when it is built
        except FormatError as error:
            raise FormatError(f"{path}: {error}") from None
        except (UnsupportedError, UnknownNameError) as error:
            raise UnsupportedError(f"{path}: {error}") from None
        return found

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        return len(self._tokens)

    @functools.cached_property
    def turn_end_ids(self) -> frozenset[int]:
        """Tokens that end a message: EOS, EOT and EOM as the file names them, and added tokens known to mean that.

        Files of models that got the token in fine-tuning often call it user-defined.
        """
        keys = ("eos", "eot", "eom")
        named = [self._metadata.get(f"tokenizer.ggml.{key}_token_id") for key in keys] + [self.eos_id]
        added = (hf_tokenizer.CONTROL, hf_tokenizer.USER_DEFINED)
        ends = hf_tokenizer.KNOWN_ENDS
        known = {i for i, kind in enumerate(self._types) if kind in added and self._tokens[i] in ends}
        return frozenset(known.union(i for i in named if isinstance(i, int)))

    @functools.cached_property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end a reply: those that end a message, but not gpt-oss's <|end|>.

        A reply of gpt-oss has several messages: <|end|> ends its analysis, and <|return|> or <|call|> the last one.
        """
        texts = {self._tokens[i] for i in self.turn_end_ids}
        if not {"<|return|>", "<|call|>"} <= texts:
            return self.turn_end_ids
        return frozenset(i for i in self.turn_end_ids if self._tokens[i] != "<|end|>" or i == self.eos_id)

    # --------------------------------------------------------------------------------------------------------- encode

    @functools.cached_property
    def _engines(self) -> dict[bool, Any]:
        """`tokenizers` objects: key True finds control tokens in the text, False does not."""
        import tokenizers

        with _library_errors("the tokenizer in the metadata is inconsistent"):
            plain, special = (tokenizers.Tokenizer.from_str(self._model) for _ in range(2))
        plain.encode_special_tokens = True
        return {False: plain, True: special}

    def encode(self, text: str | bytes, bos: bool | None = None, special: bool = False) -> list[int]:
        """Token ids of a text; bytes are UTF-8. DataError for invalid UTF-8, including half a surrogate pair.

        `bos` says whether BOS comes first; None leaves it to the model (`adds_bos`), which also decides on EOS at the
        end. `special` finds control tokens written out in the text.
        """
        if bos and self.bos_id is None:
            raise DataError("the model has no BOS token (tokenizer.ggml.bos_token_id); encode with bos=False")
        text = _valid(text)
        engine = self._engines[special]
        with _library_errors("the tokenizer in the metadata fails on this text"):
            ids = engine.encode(text, add_special_tokens=False).ids if text else []
        if self.adds_bos if bos is None else bos:
            ids = [self.bos_id, *ids]
        if bos is None and self.adds_eos:
            ids = [*ids, self.eos_id]
        return ids

    def encode_prompt(self, text: str) -> tuple[list[int], bool]:
        """Token ids of a text that a model continues, and whether the first is a BOS that is not part of the text.

        Control tokens written out in the text are found. BOS comes first where the model wants one and the text does
        not begin with it. EOS is not added, since it would end what is to be continued.
        """
        ids = self.encode(text, bos=self.adds_bos, special=True)
        if self.adds_bos and ids[:2] == [self.bos_id] * 2:
            return ids[1:], False
        return ids, self.adds_bos

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[int], list[int]]:
        """Token ids of a text with control tokens written out, without BOS; and where each begins and ends.

        The offsets are in characters and never decrease.
        """
        text = _valid(text)
        with _library_errors("the tokenizer in the metadata fails on this text"):
            found = self._engines[True].encode(text, add_special_tokens=False)
        starts, ends = (list(itertools.accumulate((offset[k] for offset in found.offsets), max)) for k in range(2))
        return found.ids, starts, ends

    # --------------------------------------------------------------------------------------------------------- decode

    @functools.cached_property
    def _normalized_texts(self) -> dict[int, bytes]:
        """Added tokens that are matched in the normalized text, as they stand there: with a space in front, perhaps."""
        texts = {token: self._engines[True].id_to_token(token) for token in self._normalized}
        return {token: text.replace(hf_tokenizer.SPACE, " ").encode() for token, text in texts.items()}

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a token's text; for a control token, of its name."""
        token = arguments.integer(token, "a token")
        if not 0 <= token < len(self._tokens):
            raise DataError(f"token {token} is not in the vocabulary of {len(self._tokens)}")
        text, kind = self._tokens[token], self._types[token]
        if self._normalized and token in self._normalized_texts:
            return self._normalized_texts[token]
        if kind == hf_tokenizer.BYTE and hf_tokenizer.BYTE_TOKEN.fullmatch(text):
            return bytes([int(text[3:5], 16)])
        if kind not in (hf_tokenizer.NORMAL, hf_tokenizer.BYTE):
            return text.encode()
        if not self._byte_level:
            return text.replace(hf_tokenizer.SPACE, " ").encode()
        table = _byte_of_character()
        if all(character in table for character in text):
            return bytes(table[character] for character in text)
        return text.encode()  # a word added to the vocabulary as it is

    def is_control(self, token: int) -> bool:
        """Whether a token is a control, unknown or unused token, which has no text."""
        return self._types[token] in (hf_tokenizer.CONTROL, hf_tokenizer.UNKNOWN, hf_tokenizer.UNUSED)

    def decode(self, ids: Iterable[int], special: bool = True) -> str:
        """The text of token ids; bytes that are not UTF-8 become U+FFFD. `special=False` leaves control tokens out."""
        decoder = self.decode_stream(special)
        return "".join([*map(decoder.push, ids), decoder.finish()])

    def decode_stream(self, special: bool = True) -> Decoder:
        """A decoder for one token at a time, which returns a character once all of its bytes have arrived."""
        return Decoder(self, special)

    # ----------------------------------------------------------------------------------------------------------- chat

    @property
    def chat_template(self) -> str | None:
        """The model's chat template (jinja2); None if the file has none. FormatError if it is not a string."""
        return self._template("tokenizer.chat_template")

    def _template(self, key: str) -> str | None:
        found = self._metadata.get(key)
        if found is not None and not isinstance(found, str):
            raise FormatError(f"metadata key {key}: the model's chat template is {type(found).__name__}, not text")
        return found

    def apply_chat_template(
        self, messages: Sequence[Json], add_generation_prompt: bool = True, **variables: object
    ) -> str:
        """The prompt that the model's own template makes of messages with "role" and "content".

        The template sees what transformers shows it: `messages`, `tools`, `documents`, the special tokens by name, and
        `variables`. With `tools`, the variant "tool_use" is used if there is one. The template runs in jinja2's
        sandbox, in a process with limits of time and memory (chat_template.py); a QuantkitError says what it exceeds.
        Encode the result with `bos=False, special=True`.
        """
        template = self.chat_template
        if variables.get("tools"):
            template = self._template("tokenizer.chat_template.tool_use") or template
        if template is None:
            raise UnsupportedError("the model has no chat template (tokenizer.chat_template); pass a plain prompt")
        ids = {name: hf_tokenizer.special_id(self._metadata, name) for name in hf_tokenizer.SPECIAL}
        values: dict[str, Any] = {f"{name}_token": self._tokens[i] for name, i in ids.items() if i is not None}
        values |= {"tools": None, "documents": None}
        values |= {"messages": messages, "add_generation_prompt": add_generation_prompt} | variables
        from quantkit.tokenizers.chat_template import render

        return render(template, values)


@contextmanager
def _library_errors(what: str) -> Iterator[None]:
    """FormatError for what the `tokenizers` library raises: bare Exception, and its panics, which are no Exception.

    Their class, PanicException, cannot be imported.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise FormatError(f"{what}: {printable(str(error)[:500])}") from None


def _valid(text: str | bytes) -> str:
    if not isinstance(text, (str, bytes)):
        raise DataError(f"the text is a {type(text).__name__}; pass str, or bytes in UTF-8")
    try:
        if isinstance(text, bytes):
            return text.decode()
        text.encode()
    except UnicodeError as error:
        raise DataError(f"the text is not valid UTF-8 ({error}); re-encode it, or leave those bytes out") from None
    return text


class Decoder:
    """Text of a stream of tokens. The space that encoding puts before a text is removed.

    As in transformers, it is removed from the beginning of what is returned: after a control token that is shown, the
    space stays.
    """

    def __init__(self, tokenizer: Tokenizer, special: bool = True):
        self._tokenizer = tokenizer
        self._special = special
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._at_start = tokenizer._strips_space

    def push(self, token: int) -> str:
        """The text that this token completes, often "" inside a character of several tokens."""
        data = self._tokenizer.token_bytes(token)
        if self._tokenizer.is_control(token) and not self._special:
            return ""
        if self._at_start:
            self._at_start = False
            data = data.removeprefix(b" ")
        return self._utf8.decode(data)

    def finish(self) -> str:
        """What is left of an unfinished character."""
        return self._utf8.decode(b"", final=True)
