"""`quantkit serve`: an OpenAI-compatible server for one model."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from quantkit import progress
from quantkit.cli.common.command import in_sections, takes_model
from quantkit.cli.common.dialect import knows_dialect
from quantkit.cli.common.evaluation import on_message
from quantkit.cli.common.launch import Launch, runs_a_model, trained_context, warn_of_long_context
from quantkit.cli.common.options import FastNumerics, Threads
from quantkit.cli.common.progress_options import shows_progress
from quantkit.errors import UnsupportedError

_CONTEXT = 4096


@shows_progress
@in_sections(Server=["host", "port", "api_key", "alias", "queue"])
@takes_model()
@knows_dialect
@runs_a_model
def serve(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            help="A GGUF file, any shard of a split one, or hf://ORG/NAME/FILE.gguf.",
            show_default=False,
        ),
    ],
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Address to listen on; needs an API key unless it is loopback.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any free one.", min=0, max=65535)] = 8080,
    api_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            help="Key that clients must send. The variable keeps it out of the list of processes.",
            envvar="QUANTKIT_API_KEY",
            show_default=False,
        ),
    ] = None,
    alias: Annotated[
        str | None,
        typer.Option(
            "--alias", "-a", metavar="NAME", help="Name of the model; default: the file's.", show_default=False
        ),
    ] = None,
    queue: Annotated[int, typer.Option(help="Requests that may wait; further ones are refused with 429.", min=1)] = 64,
    ctx_size: Annotated[
        int | None,
        typer.Option(
            "--ctx-size",
            "-c",
            help="Tokens of a prompt and its reply; 0: the model's context length; default: that, up to 4096.",
            min=0,
            show_default=False,
        ),
    ] = None,
    numerics: FastNumerics = "fast",
    threads: Threads = None,
    launch: Launch = None,  # type: ignore[assignment]  # the decorator gives it
) -> None:
    """Serve a model by OpenAI's HTTP API, for benches and harnesses.

    It has /v1/models, /v1/completions with log-probabilities of prompts, and /v1/chat/completions. It is no production
    server: one sequence is computed at a time. Ctrl-C or SIGTERM ends it.
    """
    try:
        from quantkit.serve.server import ApiServer, Listener
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("starlette", "uvicorn"):
            raise
        raise UnsupportedError(f"serve needs {error.name}: pip install 'quantkit[serve]'") from None
    from quantkit.formats import gguf
    from quantkit.hub import models

    # The address is taken first: loading can take minutes.
    with _interrupted_by_sigterm(), contextlib.closing(Listener(host, port, api_key)) as listener:
        model = models.model_file(model)
        trained = trained_context(gguf.require_model(gguf.open(model)))
        n_ctx = min(_CONTEXT, trained) if ctx_size is None else ctx_size
        warn_of_long_context(n_ctx, trained)
        loaded = launch.open(model, numerics=numerics, threads=threads, n_ctx=n_ctx)
        server = ApiServer(loaded, alias or model.name, listener, waiting=queue)
        progress.end()
        attention = "" if loaded.attention.flash else ", flash attention off"
        on_message(
            f"numerics {loaded.numerics}, cache {loaded.cache_type}{attention}, threads {loaded.threads}, "
            f"context {loaded.n_ctx} tokens, queue {queue}"
        )
        print(f"{alias or model.name} at {server.url} (no production server; Ctrl-C ends it)", flush=True)
        server.run()
    on_message("stopped")


@contextlib.contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """A context in which SIGTERM, with which containers and services are stopped, does what Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():  # only that one may set handlers
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
