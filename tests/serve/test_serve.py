"""The server, over real connections: the client of OpenAI's package, log-probabilities, bounds, hostile requests."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from benchmarks import checkpoints
from quantkit import archs, cli
from quantkit.errors import OptionError, QuantkitError
from quantkit.formats import gguf
from quantkit.runtime.generate import Sampling
from quantkit.runtime.loading import load
from quantkit.runtime.model import Model
from quantkit.serve import app, generation, requests
from quantkit.serve.api_error import ApiError
from quantkit.serve.generation import Piece
from quantkit.serve.server import ApiServer, Listener, require_key
from quantkit.serve.worker import Job, Worker
from quantkit.tokenizers.tokenizer import Tokenizer

N_CTX = 256
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama whose tokens are bytes."""
    folder = tmp_path_factory.mktemp("serve")
    checkpoints.write(folder / "hf", archs.get("llama").EXAMPLE, "BF16")
    assert cli.main(["convert", str(folder / "hf"), str(folder / "tiny.gguf"), "--json"]) == 0
    return folder / "tiny.gguf"


def tokenizer(path: Path, **keys: object) -> Tokenizer:
    """The file's tokenizer with a chat template and other keys."""
    return Tokenizer.from_gguf(
        dict(gguf.open(path).metadata.items())
        | {"tokenizer.chat_template": TEMPLATE}
        | {f"tokenizer.ggml.{name}": value for name, value in keys.items()}
    )


@pytest.fixture(scope="module")
def model(path: Path) -> Model:
    return load(path, numerics="exact", threads=1, n_ctx=N_CTX, tokenizer=tokenizer(path))


@contextlib.contextmanager
def running(model: Any, api_key: str | None = None, **options: Any) -> Iterator[ApiServer]:
    server = ApiServer(model, "tiny", Listener(port=0, api_key=api_key), **options)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(90)
    assert not thread.is_alive()


@pytest.fixture(scope="module")
def server(model: Model) -> Iterator[ApiServer]:
    with running(model) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: ApiServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=60)


def post(server: ApiServer, body: object, path: str = "completions", **headers: str) -> httpx.Response:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} | {name.replace("_", "-"): text for name, text in headers.items()}
    return httpx.post(f"{server.url}/{path}", content=data, headers=headers, timeout=60)


POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def connected(server: ApiServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", httpx.URL(server.url).port), timeout=30)


def read_answer(connection: socket.socket) -> bytes:
    """An answer with a length; fewer bytes where the server has closed the connection."""
    found = b""
    while part := connection.recv(1 << 20):
        found += part
        head, end, content = found.partition(b"\r\n\r\n")
        if end and len(content) >= int(re.search(rb"content-length: (\d+)", head)[1]):
            break
    return found


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))


# ---------------------------------------------------------------------------------------------------- what it answers


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "quantkit"
    with pytest.raises(openai.NotFoundError, match="no model 'other'"):
        client.models.retrieve("other")


@pytest.mark.parametrize("small_pieces", [False, True])
def test_logprobs_of_a_prompt(
    small_pieces: bool, client: openai.OpenAI, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    if small_pieces:
        monkeypatch.setattr(generation, "LOGITS_BYTES", 3 * 4 * model.vocab_size)
    text = "The läst one."
    tokens = model.tokenizer.encode(text)
    expected = log_softmax(model.logits(tokens))
    found = client.completions.create(model="tiny", prompt=text, max_tokens=0, echo=True, logprobs=3)
    choice = found.choices[0]
    assert (choice.text, choice.finish_reason) == (text, "length")
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (len(tokens), 0)
    scores = choice.logprobs
    assert len(scores.tokens) == len(scores.text_offset) == len(scores.top_logprobs) == len(tokens)
    assert scores.token_logprobs[0] is None
    assert scores.top_logprobs[0] is None
    np.testing.assert_allclose(scores.token_logprobs[1:], expected[range(len(tokens) - 1), tokens[1:]], atol=1e-4)
    for row, top in zip(expected, scores.top_logprobs[1:]):
        np.testing.assert_allclose(sorted(top.values())[-3:], np.sort(row)[-3:], atol=1e-4)
    characters = text.replace("ä", "\0\0")  # of two bytes, hence of two tokens
    assert scores.tokens == [
        one if one != "\0" else f"bytes:\\x{byte:02x}" for one, byte in zip(characters, text.encode())
    ]
    assert scores.text_offset == [len(text.encode()[:i].decode(errors="ignore")) for i in range(len(tokens))]


def test_prompts_may_be_texts_or_tokens(client: openai.OpenAI, model: Model) -> None:
    """What lm-evaluation-harness sends: lists of tokens, one more token, the most likely token for greedy decoding."""
    texts = ["One", "Another"]
    tokens = [model.tokenizer.encode(text) for text in texts]
    options = {"model": "tiny", "max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 0, "seed": 1234}
    by_text = client.completions.create(prompt=texts, **options)
    by_token = client.completions.create(prompt=tokens, **options)
    assert [choice.index for choice in by_token.choices] == [0, 1]
    assert [choice.model_dump() for choice in by_text.choices] == [choice.model_dump() for choice in by_token.choices]
    one = client.completions.create(prompt=tokens[0], **options)
    assert one.choices[0].model_dump() == by_token.choices[0].model_dump()
    for ids, choice in zip(tokens, by_token.choices):
        assert len(choice.logprobs.token_logprobs) == len(ids) + 1
        best = log_softmax(model.logits(ids)).max(axis=1)
        np.testing.assert_allclose(
            [max(top.values()) for top in choice.logprobs.top_logprobs[1:]], best, atol=1e-4
        )  # fmt: skip


def test_completions_are_what_generate_gives(client: openai.OpenAI, model: Model) -> None:
    expected = model.generate("Once", 12, Sampling(temperature=0))
    found = client.completions.create(model="tiny", prompt="Once", max_tokens=12, temperature=0)
    assert (found.choices[0].text, found.choices[0].finish_reason) == (expected.text, "length")
    assert found.usage.completion_tokens == 12
    sampled = Sampling(0.9, 7, 0.8, 0.01, 1.1, 5, seed=3)
    settings = {"top_k": 7, "min_p": 0.01, "repeat_penalty": 1.1, "repeat_last_n": 5}
    found = client.completions.create(
        model="tiny", prompt="Once", max_tokens=12, temperature=0.9, top_p=0.8, seed=3, extra_body=settings
    )
    assert found.choices[0].text == model.generate("Once", 12, sampled).text


def test_top_p_0_takes_the_likeliest(client: openai.OpenAI, model: Model) -> None:
    found = client.completions.create(model="tiny", prompt="Once", max_tokens=8, top_p=0)
    assert found.choices[0].text == model.generate("Once", 8, Sampling(temperature=0)).text


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI, model: Model) -> None:
    text = model.generate("Once", 40, Sampling(temperature=0)).text
    at = next(i for i in range(4, len(text)) if text.find(text[i : i + 3]) == i)
    options = {"model": "tiny", "prompt": "Once", "max_tokens": 40, "temperature": 0}
    for stop in (text[at : at + 3], ["never", text[at : at + 3]]):
        found = client.completions.create(**options, stop=stop, logprobs=0).choices[0]
        assert (found.text, found.finish_reason) == (text[:at], "stop")
        assert all(offset < at for offset in found.logprobs.text_offset)
        parts = list(client.completions.create(**options, stop=stop, stream=True))
        assert "".join(part.choices[0].text for part in parts) == text[:at]
        assert parts[-1].choices[0].finish_reason == "stop"


def test_chats_stream(client: openai.OpenAI, model: Model) -> None:
    messages = [{"role": "system", "content": "Be."}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    prompt = "system: Be.\nuser: Hi\nassistant:"
    expected = model.generate(prompt, 20, Sampling(temperature=0))
    options: dict[str, Any] = {"model": "tiny", "messages": messages, "max_tokens": 20, "temperature": 0}
    whole = client.chat.completions.create(**options)
    assert whole.choices[0].message.content == expected.text
    assert whole.usage.prompt_tokens == len(model.tokenizer.encode(prompt))
    parts = list(
        client.chat.completions.create(
            **options, stream=True, stream_options={"include_usage": True}, logprobs=True, top_logprobs=2
        )
    )
    assert parts[0].choices[0].delta.role == "assistant"
    assert len(parts) > 5
    assert "".join(part.choices[0].delta.content or "" for part in parts[:-1]) == expected.text
    assert parts[-2].choices[0].finish_reason == "length"
    assert parts[-1].usage.completion_tokens == 20
    scored = [one for part in parts[:-1] if part.choices[0].logprobs for one in part.choices[0].logprobs.content]
    assert len(scored) == 20
    assert [bytes(one.bytes) for one in scored] == [model.tokenizer.token_bytes(one) for one in expected.tokens]
    rows = log_softmax(model.logits([*expected.prompt_tokens, *expected.tokens[:-1]]))[-20:]
    np.testing.assert_allclose([one.logprob for one in scored], rows.max(axis=1), atol=1e-4)
    assert all(len(one.top_logprobs) == 2 and one.top_logprobs[0].logprob == one.logprob for one in scored)
    until_full = client.chat.completions.create(model="tiny", messages=messages)
    assert until_full.usage.total_tokens <= N_CTX


def test_parts_of_a_message_are_lines() -> None:
    parts = [{"type": "text", "text": text} for text in ("What is this?", "Ulm")]
    found = requests.chat(json.dumps({"messages": [{"role": "user", "content": parts}]}).encode(), "tiny")
    assert found.messages == [{"role": "user", "content": "What is this?\nUlm"}]


def pieces(model: Model, path: Path, prompt: str, keys: dict[str, object], **options: object) -> list[Piece]:
    """What generation makes of a prompt with another tokenizer."""
    model = load(path, numerics="exact", threads=1, n_ctx=N_CTX, tokenizer=tokenizer(path, **keys))
    request = requests.completion(json.dumps({"prompt": prompt, "temperature": 0} | options).encode(), "tiny")
    prepared = generation.prepare(model, request)[0]
    return list(generation.complete(model, model.new_cache(), prepared, request, lambda: False))


def test_a_token_that_ends_the_reply_has_a_logprob_and_no_text(model: Model, path: Path) -> None:
    """lm-evaluation-harness drops one entry for the token that it asks for, whatever it is."""
    first = model.generate("Once", 1, Sampling(temperature=0)).tokens[0]
    found = pieces(model, path, "Once", {"eos_token_id": first}, max_tokens=1, echo=True, logprobs=1)
    assert [piece.text for piece in found] == ["Once", ""]
    assert (found[-1].finish, found[-1].generated) == ("stop", 1)
    assert [len(piece.tokens) for piece in found] == [4, 1]
    assert found[-1].tokens[0].offset == 4


def test_bos_comes_first_once_and_is_no_text(model: Model, path: Path) -> None:
    types = list(gguf.open(path).metadata["tokenizer.ggml.token_type"])
    bos = model.tokenizer.encode("~")[0]
    types[bos] = 3  # control
    keys = {"bos_token_id": bos, "add_bos_token": True, "token_type": types}
    for prompt, length in (("ab", 2), ("~ab", 3)):
        found = pieces(model, path, prompt, keys, max_tokens=0, echo=True, logprobs=0)
        assert found[0].text == prompt
        assert [one.data for one in found[0].tokens] == [b"~", b"a", b"b"]
        assert [one.offset for one in found[0].tokens] == [0, length - 2, length - 1]


def test_stop_strings_hold_back_what_may_begin_one() -> None:
    stops = generation._StopStrings(("abc", "bd"))
    assert [stops.push(text) for text in ("xa", "b", "b", "x", "ab", "d..")] == ["x", "", "ab", "bx", "", "a"]
    assert stops.found
    stops = generation._StopStrings(("abc",))
    assert (stops.push("ab"), stops.found, stops.finish()) == ("", False, "ab")


# ---------------------------------------------------------------------------------------------------- what it refuses

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
WRONG = [
    ("completions", {}, 400, "prompt is missing"),
    ("completions", {"prompt": []}, 400, "prompt is missing"),
    ("completions", {"prompt": [[]]}, 400, "at least one"),
    ("completions", {"prompt": ""}, 400, "no tokens"),
    ("completions", {"prompt": "\ud800"}, 400, "not valid UTF-8"),
    ("completions", {"prompt": [1, True]}, 400, "whole numbers"),
    ("completions", {"prompt": [1, 10**30]}, 400, "is not below 320"),
    ("completions", {"prompt": [-1]}, 400, "not from 0 to 319"),
    ("completions", {"prompt": ["a"] * 129}, 400, "129 prompts; at most 128"),
    ("completions", {"prompt": "a" * 300}, 400, "300 tokens and max_tokens is 16; the context holds 256"),
    ("completions", {"prompt": "a", "max_tokens": 256}, 400, "1 tokens and max_tokens is 256; the context holds 256"),
    ("completions", {"prompt": "a", "max_tokens": -1}, 400, "max_tokens is -1"),
    ("completions", {"prompt": "a", "max_tokens": 1.5}, 400, "max_tokens is 1.5"),
    ("completions", {"prompt": "a", "logprobs": True}, 400, "logprobs is True"),
    ("completions", {"prompt": "a", "logprobs": 21}, 400, "from 0 to 20"),
    ("completions", {"prompt": "a", "temperature": float("nan")}, 400, "temperature is nan"),
    ("completions", {"prompt": "a", "temperature": -1}, 400, "temperature is -1"),
    ("completions", {"prompt": "a", "top_p": 1.5}, 400, "top_p is 1.5; it must be a number from 0 to 1"),
    ("completions", {"prompt": "a", "seed": -1}, 400, "seed is -1"),
    ("completions", {"prompt": "a", "seed": 10**3000}, 400, "seed is 1000"),
    ("completions", {"prompt": "a", "n": 2}, 400, "only 1 is supported"),
    ("completions", {"prompt": "a", "n": True}, 400, "only 1 is supported"),
    ("completions", {"prompt": "a", "stop": ""}, 400, "stop is a text"),
    ("completions", {"prompt": "a", "stop": ["x" * 300]}, 400, "of 1 to 256"),
    ("completions", {"prompt": "a", "stop": ["x"] * 17}, 400, "17 stop strings"),
    ("completions", {"prompt": "a", "stream": "yes"}, 400, "stream is 'yes'"),
    ("completions", {"prompt": "a", "stream_options": []}, 400, "stream_options"),
    ("completions", {"prompt": "a", "temprature": 1}, 400, "'temprature' is not known"),
    ("completions", {"prompt": "a", "frequency_penalty": 0.5}, 400, "only 0 is supported"),
    ("completions", {"prompt": "a", "model": "other"}, 404, "no model 'other'"),
    ("completions", {"prompt": "a", "model": {}}, 404, "no model {}"),
    ("chat/completions", {}, 400, "messages is missing"),
    ("chat/completions", {"messages": ["Hi"]}, 400, "a message is an object"),
    ("chat/completions", {"messages": [{"role": "user"}]}, 400, "content of a message"),
    ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "content of a"),
    ("chat/completions", {"messages": [{"role": "user", "content": "", "tool_calls": [1]}]}, 400, "tool_calls"),
    ("chat/completions", {"messages": [{"role": "tool", "content": ""}]}, 400, "no tools"),
    ("chat/completions", CHAT | {"tools": [{}]}, 400, "only [] is supported"),
    ("chat/completions", CHAT | {"top_logprobs": 1}, 400, "needs logprobs"),
    ("chat/completions", CHAT | {"max_tokens": 1, "max_completion_tokens": 2}, 400, "give one of them"),
    ("chat/completions", CHAT | {"max_tokens": 0}, 400, "from 1 to"),
    ("completions", b"", 400, "not JSON"),
    ("completions", b"{", 400, "not JSON"),
    ("completions", b"\xff", 400, "not JSON"),
    ("completions", b"[1]", 400, "must be an object"),
    ("completions", b"[" * 100000, 400, "nested deeper"),
    ("completions", b'{"seed": 1' + b"0" * 9999 + b"}", 400, "not JSON"),
    ("completions", b" " * (2 << 20), 413, "at most 1048576"),
    ("embeddings", {}, 404, "Not Found"),
    ("models", {}, 405, "Method Not Allowed"),
]  # fmt: skip


@pytest.mark.parametrize(("place", "body", "status", "said"), WRONG, ids=range(len(WRONG)))
def test_malformed_requests(server: ApiServer, place: str, body: object, status: int, said: str) -> None:
    found = post(server, body, place)
    assert found.status_code == status, found.text
    assert found.json()["error"].keys() == {"message", "type", "param", "code"}
    assert said in found.json()["error"]["message"]
    assert len(found.text) < 1000
    if isinstance(body, dict):
        assert post(server, {"stream": True} | body, place).status_code == status


def test_logprobs_of_an_answer_are_bounded(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "MAX_LOGPROBS", 20)
    assert post(server, {"prompt": ["ab"] * 2, "max_tokens": 3, "echo": True, "logprobs": 1}).status_code == 200
    found = post(server, {"prompt": ["ab"] * 2, "max_tokens": 4, "echo": True, "logprobs": 1})
    assert found.status_code == 400
    assert "12 tokens with 2 log-probabilities each; at most 20" in found.json()["error"]["message"]


def test_a_chunked_body_is_bounded_too(server: ApiServer) -> None:
    """Also a long one: the client sends all of it and then reads the answer."""

    def parts(count: int) -> Iterator[bytes]:
        for _ in range(count):
            yield b" " * 100_000

    headers = {"Content-Type": "application/json"}
    for count in (40, 400):
        found = httpx.post(f"{server.url}/completions", content=parts(count), headers=headers, timeout=60)
        assert found.status_code == 413
        assert re.search(r"has \d+ or more bytes; at most 1048576", found.json()["error"]["message"])


@pytest.mark.parametrize("length", [(1 << 20) + 1, 10**9, 99999999999999999999])
def test_a_long_body_is_refused_before_it_arrives(server: ApiServer, length: int) -> None:
    with connected(server) as connection:
        connection.sendall(POST + b"Content-Length: %d\r\n\r\n{" % length)
        found = read_answer(connection)
        assert found.startswith(b"HTTP/1.1 413")
        assert b"has %d bytes; at most 1048576" % length in found


def test_the_longest_body_is_read(server: ApiServer) -> None:
    found = post(server, b"{" + b" " * ((1 << 20) - 1))
    assert found.status_code == 400
    assert "not JSON" in found.json()["error"]["message"]


def test_a_body_has_to_arrive_in_time(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "READ_SECONDS", 0.2)
    with connected(server) as connection:
        connection.sendall(POST + b"Content-Length: 100\r\n\r\n{")
        assert connection.recv(1000).startswith(b"HTTP/1.1 408")


def test_web_pages_cannot_use_a_server_without_a_key(server: ApiServer) -> None:
    """By a name that resolves to this machine, or by requests that browsers send to any host."""
    for host in ("localhost", "LOCALHOST:80", "127.0.0.1:8080", "127.1.2.3", "[::1]:8080"):
        assert httpx.get(f"{server.url}/models", headers={"Host": host}).status_code == 200
    for host in ("evil.example", "localhost.evil.example:8080", "192.168.0.1", "", "127.0.0.1.evil", "[::2]:80"):
        found = httpx.get(f"{server.url}/models", headers={"Host": host})
        assert found.status_code == 403
        assert "loopback" in found.json()["error"]["message"]
    assert post(server, {"prompt": "a"}, Content_Type="text/plain").status_code == 415


def test_api_key(model: Model) -> None:
    with running(model, api_key="sécret") as keyed:
        for header in ({}, {"Authorization": "Bearer"}, {"Authorization": "Bearer secret"}, {"Authorization": "x"}):
            found = httpx.get(f"{keyed.url}/models", headers=header)
            assert (found.status_code, found.json()["error"]["code"]) == (401, "invalid_api_key")
            assert found.headers["WWW-Authenticate"] == "Bearer"
        headers = {"Authorization": "Bearer sécret".encode()}
        assert httpx.get(f"{keyed.url}/models", headers=headers).status_code == 200  # type: ignore[arg-type]
    with running(model, api_key="secret") as keyed:
        headers = {"Authorization": "Bearer secret", "Host": "a.example"}
        assert httpx.get(f"{keyed.url}/models", headers=headers).status_code == 200


def test_other_machines_need_a_key() -> None:
    for host in ("127.0.0.1", "localhost", "::1", "[::1]"):
        require_key(host, None)
    for host in ("0.0.0.0", "::", "192.168.0.1", "example.com", ""):
        with pytest.raises(OptionError, match=r"--api-key KEY or set QUANTKIT_API_KEY"):
            require_key(host, None)
        require_key(host, "secret")
    with pytest.raises(OptionError, match="empty"):
        require_key("127.0.0.1", " ")


# ------------------------------------------------------------------------------------------------------------- bounds


class Slow:
    """A model whose forward passes wait for `go`, and are counted."""

    def __init__(self, model: Model):
        self._model, self.go, self.passes = model, threading.Event(), 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, *args: Any) -> np.ndarray:
        self.passes += 1
        assert self.go.wait(60)
        return self._model.forward(*args)


def until(condition: Any, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_32_clients_at_once(model: Model) -> None:
    """Each one has its answer, or 429 where the queue is full; the answers are those of one client."""
    slow = Slow(model)
    expected = model.generate("Client 7", 8, Sampling(temperature=0)).text
    with running(slow, waiting=4) as server:

        def ask(i: int) -> httpx.Response:
            return post(server, {"prompt": "Client 7", "max_tokens": 8, "temperature": 0, "stream": i % 2 == 0})

        with ThreadPoolExecutor(32) as pool:
            answers = [pool.submit(ask, i) for i in range(32)]
            until(lambda: sum(answer.done() for answer in answers) == 27)  # one runs, four wait
            slow.go.set()
            found = [answer.result() for answer in answers]
        assert sorted(answer.status_code for answer in found) == [200] * 5 + [429] * 27
        for answer in found:
            if answer.status_code == 429:
                assert answer.headers["Retry-After"] == "1"
                assert answer.json()["error"]["type"] == "rate_limit_error"
            elif answer.headers["Content-Type"].startswith("text/event-stream"):
                events = answer.text.removesuffix("\n\n").split("\n\n")
                assert events[-1] == "data: [DONE]"
                parts = [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events[:-1]]
                assert "".join(parts) == expected
            else:
                assert answer.json()["choices"][0]["text"] == expected


def test_clients_that_leave_free_the_model_and_the_queue(model: Model) -> None:
    slow = Slow(model)
    with running(slow, waiting=2) as server:
        body = json.dumps({"prompt": "a", "max_tokens": 200, "stream": True}).encode()
        connections = []
        for count in (1, 2, 3):  # one that runs, two that wait
            connections.append(connected(server))
            connections[-1].sendall(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            until(lambda: (slow.passes, len(server.worker._queue)) == (1, count - 1))  # noqa: B023  runs at once
        assert post(server, {"prompt": "a"}).status_code == 429
        for connection in connections:
            connection.close()
        until(lambda: not server.worker._queue)
        slow.go.set()
        until(lambda: server.worker._running is None)
        assert slow.passes < 10
        assert post(server, {"prompt": "a", "max_tokens": 1}).status_code == 200


def test_memory_stays(server: ApiServer) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def use() -> None:
        assert post(server, b"[" + b"0," * (600 << 10)).status_code == 413
        assert post(server, b"[" + b"0," * (400 << 10)).status_code == 400
        assert post(server, {"prompt": "a" * 250, "max_tokens": 0, "echo": True, "logprobs": 20}).status_code == 200

    if not Path("/proc/self/statm").exists():
        pytest.skip("no /proc: the resident memory is not known")
    for _ in range(5):
        use()
    before = resident()
    for _ in range(20):
        use()
    assert resident() - before < 16 << 20  # the bodies have 38 MiB


def test_connections_are_bounded(model: Model) -> None:
    """Connections whose requests were taken; here their bodies are not complete."""
    with running(model, waiting=1) as server, contextlib.ExitStack() as stack:
        for _ in range(1 + 1 + 64):
            connection = stack.enter_context(connected(server))
            connection.sendall(POST + b"Expect: 100-continue\r\nContent-Length: 100\r\n\r\n")
            assert connection.recv(1000).startswith(b"HTTP/1.1 100")
        assert httpx.get(f"{server.url}/models").status_code == 503
        stack.close()

        def is_free() -> bool:
            return httpx.get(f"{server.url}/models").status_code == 200

        until(is_free)


def is_closed(connection: socket.socket) -> bool:
    """Whether the server has closed a connection, which has nothing to read."""
    connection.settimeout(0)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def test_silent_connections_lock_nobody_out(model: Model) -> None:
    """The oldest ones are closed for new clients, long before their time is over."""
    with running(model, waiting=1, idle_seconds=3600) as server, contextlib.ExitStack() as stack:
        user = stack.enter_context(httpx.Client(base_url=server.url))
        assert user.get("/models").status_code == 200
        silent = [stack.enter_context(connected(server)) for _ in range(140)]
        assert httpx.get(f"{server.url}/models").status_code == 200
        assert [is_closed(one) for one in silent] == [True] * 76 + [False] * 64  # two are the clients'
        assert user.get("/models").status_code == 200


def test_a_header_has_to_arrive_in_time(model: Model) -> None:
    """Also one that arrives a byte at a time, and one after another request."""
    with running(model, idle_seconds=1) as server, contextlib.ExitStack() as stack:
        slow = []
        for i in range(30):
            slow.append(stack.enter_context(connected(server)))
            if i < 10:
                slow[i].sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert read_answer(slow[i]).startswith(b"HTTP/1.1 200")
        head = iter(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 2000)
        start = time.monotonic()
        while not all(is_closed(connection) for connection in slow):
            assert time.monotonic() < start + 30
            byte = bytes([next(head)])
            for connection in slow[:20]:  # the others stay silent
                with contextlib.suppress(ConnectionError):
                    connection.sendall(byte)
            time.sleep(0.05)
        assert time.monotonic() > start + 0.5
        assert httpx.get(f"{server.url}/models").status_code == 200


def test_an_answer_may_take_longer_than_a_header(model: Model) -> None:
    slow = Slow(model)
    with running(slow, idle_seconds=0.5) as server, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(post, server, {"prompt": "a", "max_tokens": 1})
        until(lambda: slow.passes)
        time.sleep(1)
        slow.go.set()
        assert answer.result().status_code == 200


def test_an_answer_may_be_read_late(model: Model) -> None:
    """Later than the connection may be idle: it is closed when all is sent."""
    body = json.dumps({"prompt": ["a" * 250] * 128, "max_tokens": 0, "echo": True, "logprobs": 20}).encode()
    with running(model, idle_seconds=0.5) as server, connected(server) as connection:
        connection.settimeout(300)  # 32,000 tokens on a busy machine
        connection.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        found = connection.recv(1)
        time.sleep(1)
        found += read_answer(connection)
        head, _, content = found.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert len(content) > 16 << 20  # more than the kernel's buffers hold
        assert len(json.loads(content)["choices"]) == 128


def test_refused_requests_do_not_hold_a_connection(model: Model) -> None:
    with running(model, api_key="secret", idle_seconds=1) as server, connected(server) as connection:
        start = time.monotonic()
        count = 0
        with contextlib.suppress(ConnectionError):
            while True:
                connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
                if not (found := read_answer(connection)):
                    break
                assert found.startswith(b"HTTP/1.1 401")
                count += 1
                assert time.monotonic() < start + 30
                time.sleep(0.05)
        assert count > 1


def test_a_bug_in_a_handler_answers_500(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def failing(request: object) -> bytes:
        raise ZeroDivisionError("secret")

    with monkeypatch.context() as patch:
        patch.setattr(app, "_body", failing)
        found = post(server, {"prompt": "a"})
    assert found.status_code == 500
    assert found.json()["error"]["message"] == "the server failed: ZeroDivisionError; its output has the traceback"
    assert post(server, {"prompt": "a"}).status_code == 200


def test_a_bug_answers_500_and_does_not_end_the_server(model: Model, capfd: pytest.CaptureFixture[str]) -> None:
    class Failing(Slow):
        def forward(self, *args: Any) -> np.ndarray:
            if self.passes:
                return super().forward(*args)
            self.passes += 1
            raise ZeroDivisionError("secret")

    failing = Failing(model)
    failing.go.set()
    with running(failing) as server:
        found = post(server, {"prompt": "a"})
        assert (found.status_code, found.json()["error"]["type"]) == (500, "server_error")
        assert "secret" not in found.text
        assert post(server, {"prompt": "a"}).status_code == 200
    assert "ZeroDivisionError: secret" in capfd.readouterr().err


def test_a_stopped_worker_refuses(model: Model) -> None:
    slow, events = Slow(model), list[Any]()
    request = requests.completion(b'{"prompt": "a"}', "tiny")
    worker = Worker(slow, 2)
    for _ in range(2):
        worker.put(Job(request, events.append))
    until(lambda: slow.passes)
    worker.stop()
    slow.go.set()
    worker.join()
    assert [event.status for event in events if isinstance(event, ApiError)] == [503, 503]
    with pytest.raises(ApiError, match="the server stops"):
        worker.put(Job(request, events.append))


# ------------------------------------------------------------------------------------------------------------ command


def test_the_command_ends_by_ctrl_c(path: Path) -> None:
    """Also while it generates; the client is told."""
    command = [sys.executable, "-m", "quantkit", "serve", str(path), "--port", "0", "-a", "mine", "-t", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.match(r"mine at (http://127\.0\.0\.1:\d+/v1) ", line)
        assert found, line + process.communicate()[1]
        client = openai.OpenAI(base_url=found[1], api_key="none", max_retries=0, timeout=60)
        stream = client.completions.create(
            model="mine", prompt=["a"] * 128, max_tokens=250, stream=True, temperature=0
        )  # fmt: skip
        next(stream)
        process.send_signal(signal.SIGINT)
        with pytest.raises(openai.APIError, match="the server stops"):
            list(stream)
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out) == (0, "")
        lines = err.splitlines()
        assert "numerics fast, cache f16, threads 1, context 256 tokens, queue 64" in lines
        assert lines[-1] == "stopped"
        assert "Traceback" not in err


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_the_command(path: Path, sent: signal.Signals) -> None:
    command = [sys.executable, "-m", "quantkit", "serve", str(path), "--port", "0", "-c", "300"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = re.search(r" at (http://\S+) ", process.stdout.readline())
        assert found
        assert httpx.get(f"{found[1]}/models").status_code == 200  # the handlers of signals are set
        process.send_signal(sent)
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out, err.splitlines()[-1]) == (0, "", "stopped")
        assert "Traceback" not in err
        assert err.startswith("warning: -c 300: the model was trained with 256 tokens")


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_the_command_while_it_loads(path: Path, sent: signal.Signals) -> None:
    code = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell runs in the background ignores it\n"
        "from quantkit import cli\n"
        "from quantkit.runtime import loading\n"
        "def load(*given, **options):\n"
        "    print('loading', flush=True)\n"
        "    time.sleep(60)\n"
        "loading.load = load\n"
        "sys.exit(cli.main(['serve', sys.argv[1], '--port', '0']))\n"
    )
    command = [sys.executable, "-W", "default::ResourceWarning", "-c", code, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "loading\n"
        process.send_signal(sent)
        assert process.communicate(timeout=30) == ("", "\ninterrupted\n")
        assert process.returncode == 130


@pytest.mark.parametrize(("host", "text"), [("127.0.0.1", "127.0.0.1"), ("[::1]", "[::1]")])
def test_a_port_in_use_is_found_before_the_model_is_loaded(
    host: str, text: str, path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = list[Any]()
    monkeypatch.setattr("quantkit.runtime.loading.load", lambda *given, **options: loaded.append(given))
    try:
        first = Listener(host, 0)
    except QuantkitError as error:
        pytest.skip(str(error))  # a machine without IPv6
    with contextlib.closing(first):
        port = str(httpx.URL(first.url).port)
        assert cli.main(["serve", str(path), "--host", host, "--port", port]) == 1
    assert not loaded
    assert capsys.readouterr().err == (
        f"error: --host {text} --port {port}: Address already in use; "
        "end the program that listens there, or give another --port (0: any free one)\n"
    )


def test_addresses_that_cannot_be_listened_on() -> None:
    for host in ("192.0.2.1", "no-such-host.invalid", "a..b"):  # RFC 5737 and RFC 2606 reserve the first two
        with pytest.raises(QuantkitError, match=rf"--host {host} --port 0: .*; --host must be an address of this"):
            Listener(host, 0, api_key="secret")


def test_a_failed_load_frees_the_port(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.closing(Listener(port=0)) as listener:
        port = httpx.URL(listener.url).port
    for _ in range(2):
        assert cli.main(["serve", str(tmp_path / "none.gguf"), "--port", str(port)]) == 1
        assert "none.gguf" in capsys.readouterr().err


def test_the_command_needs_its_extra(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [name for name in sys.modules if name.startswith("quantkit.serve.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert cli.main(["serve", str(path)]) == 1
    assert capsys.readouterr().err == "error: serve needs uvicorn: pip install 'quantkit[serve]'\n"


def test_the_command_needs_a_key_for_other_machines(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", str(path), "--host", "0.0.0.0"]) == 2
    assert "--api-key" in capsys.readouterr().err


def test_help_does_not_import_the_server() -> None:
    code = (
        "import sys; from quantkit.cli import main; main(['--help']); main(['serve', '--help']); "
        "print(sorted({'starlette', 'uvicorn', 'quantkit.serve'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("\n[]\n")
