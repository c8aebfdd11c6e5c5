"""`quantkit generate`: continue a prompt."""

from __future__ import annotations

import re
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantkit import progress
from quantkit.cli.common.command import in_sections, takes_model
from quantkit.cli.common.evaluation import on_message
from quantkit.cli.common.hub import from_hub
from quantkit.cli.common.launch import Launch, runs_a_model, trained_context, warn_of_long_context
from quantkit.cli.common.llama_options import takes_llama_options
from quantkit.cli.common.options import FastNumerics, Json, Threads
from quantkit.cli.common.output import print_json
from quantkit.cli.common.progress_options import shows_progress
from quantkit.errors import OptionError

if TYPE_CHECKING:
    from quantkit.runtime.generate import Generated, Sampling
    from quantkit.runtime.model import Model
    from quantkit.tokenizers.tokenizer import Tokenizer


@shows_progress
@in_sections(Sampling=["temp", "top_k", "top_p", "min_p", "repeat_penalty", "repeat_last_n", "seed", "ignore_eos"])
@takes_llama_options("keep", "color", "single_turn", "interactive")
@takes_model()
@from_hub("model")
@runs_a_model
def generate(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            help="A GGUF file, any shard of a split one, or hf://ORG/NAME/FILE.gguf.",
            show_default=False,
        ),
    ],
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="Text to continue.", show_default=False)] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            "-f",
            metavar="FILE",
            help="Read the prompt from a file, without its last line break; - is stdin.",
            show_default=False,
        ),
    ] = None,
    escape: Annotated[
        bool,
        typer.Option(
            "--escape/--no-escape", "-e", help="Read \\n, \\r, \\t, \\', \\\", \\\\ and \\xHH in the prompt as in C."
        ),
    ] = False,
    n_predict: Annotated[
        int,
        typer.Option(
            "--n-predict",
            "--predict",
            "-n",
            help="Maximum number of tokens; -1: until the reply or the context ends.",
            min=-1,
        ),
    ] = 128,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat/--no-chat",
            "--conversation/--no-conversation",
            "-cnv/-no-cnv",
            help="Format the prompt with the model's chat template, for one reply.",
        ),
    ] = False,
    system: Annotated[
        str | None,
        typer.Option(
            "--system",
            "--system-prompt",
            "-sys",
            metavar="TEXT",
            help="System message, with --chat.",
            show_default=False,
        ),
    ] = None,
    display_prompt: Annotated[
        bool, typer.Option("--display-prompt/--no-display-prompt", help="Print the prompt before the reply.")
    ] = False,
    temp: Annotated[float, typer.Option("--temp", help="Temperature; 0: always the most likely token.", min=0)] = 0.8,
    top_k: Annotated[int, typer.Option(help="Sample from the K most likely tokens; 0: all.", min=0)] = 40,
    top_p: Annotated[
        float, typer.Option(help="Sample from the most likely tokens up to this total probability.")
    ] = 0.95,
    min_p: Annotated[float, typer.Option(help="Drop tokens below this fraction of the highest probability.")] = 0.05,
    repeat_penalty: Annotated[float, typer.Option(help="Penalty on recent tokens; 1: off.")] = 1.0,
    repeat_last_n: Annotated[int, typer.Option(help="Number of recent tokens for --repeat-penalty.", min=0)] = 64,
    seed: Annotated[
        int | None, typer.Option("--seed", "-s", help="Random seed; default, and -1: a new one.", min=-1)
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Never choose a token that ends the reply: go on up to -n.")
    ] = False,
    ctx_size: Annotated[
        int | None,
        typer.Option(
            "--ctx-size", "-c", help="Context size in tokens; 0: the model's; default: as many as are needed.", min=0
        ),
    ] = None,
    numerics: FastNumerics = "fast",
    threads: Threads = None,
    launch: Launch = None,  # type: ignore[assignment]  # the decorator gives it
    json: Json = False,
) -> None:
    """Continue a prompt, or answer it with --chat.

    The reply is streamed to stdout. Conditions and the speeds of prompt and generation go to stderr. Control tokens in
    the prompt are parsed, as by llama.cpp.
    """
    from quantkit.runtime.generate import Sampling

    text = _prompt(prompt, file)
    text = _unescaped(text) if escape else text
    seed = secrets.randbits(32) if seed is None or seed < 0 else seed
    sampling = Sampling(temp, top_k, top_p, min_p, repeat_penalty, repeat_last_n, seed, ignore_eos)
    tokenizer, n_ctx_train = _read(model)
    tokens = _tokens(tokenizer, text, chat, system)
    n_ctx = ctx_size or n_ctx_train
    warn_of_long_context(n_ctx, n_ctx_train)
    if ctx_size is None and n_predict >= 0:  # do not allocate the model's whole context
        n_ctx = max(1, min(n_ctx, len(tokens) + n_predict))
    loaded = launch.open(model, numerics=numerics, threads=threads, n_ctx=n_ctx, tokenizer=tokenizer)
    progress.end()  # the reply is printed piece by piece
    if display_prompt and not json:
        _show(text)
    result = loaded.generate(tokens, n_predict, sampling, None if json else _show)
    if json:
        print_json("quantkit.generate/1", _record(model, loaded, result, sampling))
        return
    print()
    on_message(_summary(loaded, result, sampling))


def _read(model: Path) -> tuple[Tokenizer, int]:
    """The tokenizer and the trained context length of a model, without loading it."""
    from quantkit.formats import gguf
    from quantkit.tokenizers.tokenizer import Tokenizer

    file = gguf.require_model(gguf.open(model))
    return Tokenizer.from_gguf(file.metadata, file.path), trained_context(file)


def _prompt(text: str | None, file: Path | None) -> str:
    if (text is None) == (file is None):
        raise OptionError("generate needs exactly one prompt: -p TEXT or -f FILE")
    if file is None:
        return str(text)
    from quantkit.evaluate.corpus import read_text

    return read_text(file)


_ESCAPES = {b"n": b"\n", b"r": b"\r", b"t": b"\t", b"'": b"'", b'"': b'"', b"\\": b"\\"}


def _unescaped(text: str) -> str:
    r"""The prompt with its escapes replaced as llama.cpp's -e does; others stay as they are.

    \xHH is a byte of UTF-8. The tokenizer refuses a text in which bytes are left that are no characters.
    """
    data = re.sub(
        rb"\\(?:x([0-9a-fA-F]{2})|([nrt'\"\\]))",
        lambda found: bytes([int(found[1], 16)]) if found[1] else _ESCAPES[found[2]],
        text.encode(errors="surrogateescape"),
    )
    return data.decode(errors="surrogateescape")


def _tokens(tokenizer: Tokenizer, text: str, chat: bool, system: str | None) -> list[int]:
    if not chat:
        if system is not None:
            raise OptionError("--system needs --chat; a prompt without a chat template has no messages")
        return tokenizer.encode_prompt(text)[0]
    messages = [{"role": "system", "content": system}] if system is not None else []
    rendered = tokenizer.apply_chat_template([*messages, {"role": "user", "content": text}])
    return tokenizer.encode(rendered, bos=False, special=True)


def _show(piece: str) -> None:
    print(piece, end="", flush=True)


def _summary(model: Model, result: Generated, sampling: Sampling) -> str:
    attention = "" if model.attention.flash else ", flash attention off"
    ended = {"end": "the reply ended", "length": "-n reached", "context": "the context is full (-c)"}[result.stopped]
    return (
        f"prompt {len(result.prompt_tokens)} tokens, {result.prompt_rate:.1f} tok/s; "
        f"generation {len(result.tokens)} tokens, {result.predict_rate:.1f} tok/s; {ended}\n"
        f"numerics {model.numerics}, cache {model.cache_type}{attention}, threads {model.threads}, seed {sampling.seed}"
    )


def _record(path: Path, model: Model, result: Generated, sampling: Sampling) -> dict[str, Any]:
    from dataclasses import asdict

    from quantkit.evaluate.conditions import run_conditions

    return {
        "path": path,
        "text": result.text,
        "tokens": result.tokens,
        "stopped": result.stopped,
        "prompt_tokens": len(result.prompt_tokens),
        "prompt_tokens_per_second": result.prompt_rate,
        "tokens_per_second": result.predict_rate,
        "conditions": {**run_conditions(model), "sampling": asdict(sampling)},
    }
