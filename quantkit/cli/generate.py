"""`quantkit generate`: continue a prompt."""

from __future__ import annotations

import secrets
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from quantkit.cli._runtime import Launch, conditions, runs_a_model
from quantkit.cli._shared import Json, Threads, print_json
from quantkit.errors import QuantkitError


@runs_a_model
def generate(
    model: Annotated[Path, typer.Argument(help="GGUF file, or any shard of one.")],
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="Text to continue.", show_default=False)] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Prompt from a file.", show_default=False)] = None,
    n_predict: Annotated[
        int, typer.Option("--n-predict", "-n", help="Tokens at most; -1: until the reply or the context ends.", min=-1)
    ] = 128,
    chat: Annotated[
        bool, typer.Option("--chat/--no-chat", help="Put the prompt into the model's chat template.")
    ] = False,
    system: Annotated[str | None, typer.Option(help="With --chat: the system message.", show_default=False)] = None,
    temp: Annotated[float, typer.Option("--temp", help="Temperature; 0: the likeliest token.", min=0)] = 0.8,
    top_k: Annotated[int, typer.Option(help="Draw from so many tokens; 0: all.", min=0)] = 40,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest tokens of so much probability.")] = 0.95,
    min_p: Annotated[float, typer.Option(help="Draw from tokens at least so probable beside the likeliest.")] = 0.05,
    repeat_penalty: Annotated[float, typer.Option(help="Divide the logits of recent tokens; 1: off.")] = 1.0,
    repeat_last_n: Annotated[int, typer.Option(help="How many tokens are recent.", min=0)] = 64,
    seed: Annotated[
        int | None, typer.Option("--seed", "-s", help="Same seed, same text; default: a new one.", min=0)
    ] = None,
    ctx_size: Annotated[
        int | None, typer.Option("--ctx-size", "-c", help="Tokens of the cache; default: the model's context.", min=1)
    ] = None,
    numerics: Annotated[
        str, typer.Option(help="exact: float32 activations; fast: quantized where that is faster.")
    ] = "fast",
    threads: Threads = None,
    launch: Launch = None,  # type: ignore[assignment]  # the decorator gives it
    json: Json = False,
) -> None:
    """Continue a prompt, or answer it with --chat.

    The reply goes to stdout as it comes; the conditions and the speed of prompt and generation to stderr.
    """
    from quantkit.runtime.generate import Sampling

    text = _prompt(prompt, file)
    seed = secrets.randbits(32) if seed is None else seed
    sampling = Sampling(temp, top_k, top_p, min_p, repeat_penalty, repeat_last_n, seed)
    tokenizer, n_ctx_train = _read(model)
    tokens = _tokens(tokenizer, text, chat, system)
    n_ctx = ctx_size or n_ctx_train
    if ctx_size is None and n_predict >= 0:  # there need not be memory for the model's whole context
        n_ctx = max(1, min(n_ctx, len(tokens) + n_predict))
    loaded = launch.open(model, numerics=numerics, threads=threads, n_ctx=n_ctx, tokenizer=tokenizer)
    result = loaded.generate(tokens, n_predict, sampling, None if json else _show)
    if json:
        print_json(_record(model, loaded, result, sampling))
        return
    print()
    print(_summary(loaded, result, sampling), file=sys.stderr)


def _read(model: Path) -> tuple[Any, int]:
    """The tokenizer of a model and the context that it was trained with; the model is not opened."""
    from quantkit.archs.common import validate
    from quantkit.formats import gguf
    from quantkit.tokenizers.tokenizer import Tokenizer

    file = gguf.require_model(gguf.open(model))
    described = validate.described(file.metadata, file.tensors, file.path)
    return Tokenizer.from_gguf(file.metadata), described.hparams.n_ctx_train


def _prompt(text: str | None, file: Path | None) -> str:
    if (text is None) == (file is None):
        raise QuantkitError("generate needs one prompt: -p TEXT or -f FILE")
    if file is None:
        return str(text)
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise QuantkitError(f"{file}: offset {error.start}: not UTF-8 ({error.reason})") from None


def _tokens(tokenizer: Any, text: str, chat: bool, system: str | None) -> list[int]:
    if not chat:
        if system is not None:
            raise QuantkitError("--system goes with --chat; a plain prompt has no messages")
        return tokenizer.encode(text)
    messages = [{"role": "system", "content": system}] if system is not None else []
    rendered = tokenizer.apply_chat_template([*messages, {"role": "user", "content": text}])
    return tokenizer.encode(rendered, bos=False, special=True)


def _show(piece: str) -> None:
    print(piece, end="", flush=True)


def _summary(model: Any, result: Any, sampling: Any) -> str:
    plainly = "" if model.how.flash else ", plain attention"
    ended = {"end": "the reply ended", "length": "-n reached", "context": "the context is full (-c)"}[result.stopped]
    return (
        f"prompt {len(result.prompt_tokens)} tokens, {result.prompt_rate:.1f} tok/s; "
        f"generation {len(result.tokens)} tokens, {result.predict_rate:.1f} tok/s; {ended}\n"
        f"numerics {model.numerics}, cache {model.cache_type}{plainly}, threads {model.threads}, seed {sampling.seed}"
    )


def _record(path: Path, model: Any, result: Any, sampling: Any) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "model": path,
        "text": result.text,
        "tokens": result.tokens,
        "stopped": result.stopped,
        "prompt_tokens": len(result.prompt_tokens),
        "prompt_tokens_per_second": result.prompt_rate,
        "tokens_per_second": result.predict_rate,
        "conditions": {**conditions(model), "sampling": asdict(sampling)},
    }
