"""`quantkit lm-eval`: EleutherAI's lm-evaluation-harness with quantkit's models."""

from __future__ import annotations

from typing import Annotated

import typer

PASSES_ON = True  # words are not read here, options among them


def lm_eval(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="ARGUMENTS…", help="The arguments of lm_eval, as they are.", show_default=False),
    ] = None,
) -> None:
    """Run EleutherAI's lm-evaluation-harness with quantkit's models.

    The arguments are those of lm_eval, which knows `--model quantkit` in addition: `quantkit lm-eval --model quantkit
    --model_args path=model.gguf --tasks arc_easy --batch_size auto`. `quantkit lm-eval run --help` shows all of
    lm_eval's. Further --model_args: numerics=exact or fast, max_length, add_bos_token, and the keywords of
    `quantkit.load`, such as threads and devices. Installed with `pip install 'quantkit[lm-eval]'`.
    """
    from quantkit.evaluate import harness

    harness.run(arguments or [])
