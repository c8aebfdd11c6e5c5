"""Options of llama.cpp's tools that the commands know and refuse: the result would be another than is asked for.

Each message says what to do instead. The help does not list these options. `OPTIONS` are those of every command that
runs a model, `OF_COMMANDS` those that single commands take by name (`llama_options`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import typer


class _Option(NamedTuple):
    """An option: its flags, the type of its value, the remedy, and the values that ask for nothing."""

    flags: tuple[str, ...]
    kind: Any
    remedy: str
    harmless: tuple[str, ...] = ()

    def annotation(self) -> Any:
        """The option for typer. None stands for one that is not given."""
        return Annotated[self.kind | None, typer.Option(*self.flags, metavar="VALUE", hidden=True)]

    def check(self, value: Any) -> None:
        """Bad usage for an option that is given."""
        if value is not None and value not in self.harmless:
            raise typer.BadParameter(f"{self.flags[-1]}: {self.remedy}")


_ALL: dict[str, _Option] = {
    "override_kv": _Option(
        ("--override-kv",),
        str,
        "the keys of a model are read from its file; change them there: quantkit metadata set MODEL KEY=TYPE:VALUE",
    ),
    "chat_template": _Option(
        ("--chat-template",),
        str,
        "the chat template is the file's; put another one there: "
        "quantkit metadata set MODEL --from-file tokenizer.chat_template=FILE",
    ),
}
_ALL["chat_template_file"] = _ALL["chat_template"]._replace(flags=("--chat-template-file",))
OF_COMMANDS: dict[str, _Option] = {
    "interactive": _Option(
        ("-if", "--interactive-first", "-i", "--interactive"),
        bool,
        "generate answers one prompt and ends; for a dialogue run `quantkit serve MODEL` and a client of OpenAI's API",
    ),
    "prune_layers": _Option(
        ("--prune-layers",),
        str,
        "layers are left out in a run of their own: quantkit prune MODEL PRUNED --prune-layers L0,L1,…; then quantize "
        "PRUNED, with an importance matrix that was measured on it",
    ),
    "extra_output_tensor": _Option(
        ("--extra-output-tensor",),
        str,
        "quantkit writes no second output tensor; ik_llama.cpp makes one when it loads the model, with -mtprot TYPE",
    ),
    "symmetric_q40": _Option(
        ("--symmetric-q40",),
        bool,
        "Q4_0 here uses all codes from -8 to 7; drop the option: the scale with the smallest error is searched, and "
        "--effort best tries more of them",
    ),
    "vocab_only": _Option(
        ("--vocab-only",),
        bool,
        "a file has the weights too; `quantkit convert HF_DIR --dry-run` checks the tokenizer and writes nothing",
    ),
    "embeddings": _Option(
        ("-embd", "--embeddings"),
        str,
        "embeddings are not timed; drop the option, prompts and generation are timed with logits",
        ("0",),
    ),
    "output_err": _Option(
        ("-oe", "--output-err"),
        str,
        "there is one output; for a copy of it run `quantkit bench … -o FORMAT | tee FILE`",
        ("none",),
    ),
}
OPTIONS: dict[str, tuple[Any, Any]] = {name: (option.annotation(), None) for name, option in _ALL.items()}


def check(given: Mapping[str, Any]) -> None:
    """Bad usage for an option of `OPTIONS` that is given."""
    for name, option in _ALL.items():
        option.check(given.get(name))
