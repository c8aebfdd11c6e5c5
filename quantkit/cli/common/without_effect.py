"""Options of llama.cpp's tools that the commands accept so that pasted lines run, and that change nothing in quantkit.

None is silent: `notes` gives the line that says why. An option belongs here only if the result without it is what the
other program would give with it. What a command cannot do is in `refused`; anything else is an unknown option.

`OPTIONS` are those of every command that runs a model, `OF_COMMANDS` those that single commands take by name
(`llama_options`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple

import typer

PANEL = "Accepted from llama.cpp, without effect"


class _Option(NamedTuple):
    """An option: its flags, the type of its value, its metavar, and why it has no effect."""

    flags: tuple[str, ...]
    kind: Any
    metavar: str | None
    reason: str

    def annotation(self) -> Any:
        """The option for typer. None stands for one that is not given."""
        about = typer.Option(
            *self.flags, metavar=self.metavar, help=self.reason, show_default=False, rich_help_panel=PANEL
        )
        return Annotated[self.kind | None, about]

    def note(self, value: Any) -> str:
        """The line about the option if it has this value."""
        positive, _, negative = self.flags[-1].partition("/")
        return line(
            {True: positive, False: negative}[value] if self.kind is bool else f"{positive} {value}", self.reason
        )


TOKENS_AT_A_TIME = "quantkit chooses how many tokens it computes at a time."
_NO_LOG_LEVELS = "quantkit has no log levels."
_FUSED = "quantkit's plan of operations is fixed; the numbers are the same."
_OFFLOAD = "It only changes when weights are copied to a GPU; the numbers are the same."
_BOUNDED_MEMORY = "Memory use does not grow with the model."
_ALL: dict[str, _Option] = {
    "batch_size": _Option(("--batch-size", "-b"), int, "N", TOKENS_AT_A_TIME),
    "ubatch_size": _Option(("--ubatch-size", "-ub"), int, "N", TOKENS_AT_A_TIME),
    "threads_batch": _Option(
        ("--threads-batch", "-tb"), int, "N", "Prompts and generation use the threads of -t; evaluations use -tb."
    ),
    "numa": _Option(
        ("--numa",),
        Literal["distribute", "isolate", "numactl"],
        None,
        "quantkit leaves threads and pages to the operating system; run it under numactl.",
    ),
    "merge_up_gate": _Option(("--merge-up-gate-experts", "-muge"), bool, None, _FUSED),
    "merge_qkv": _Option(("--merge-qkv", "-mqkv"), bool, None, _FUSED),
    "no_fused_up_gate": _Option(("--no-fused-up-gate", "-no-fug"), bool, None, _FUSED),
    "no_fused_mul_multiadd": _Option(("--no-fused-mul-multiadd", "-no-mmad"), bool, None, _FUSED),
    "graph_reuse": _Option(("--graph-reuse", "-gr"), bool, None, _FUSED),
    "no_graph_reuse": _Option(("--no-graph-reuse", "-no-gr"), bool, None, _FUSED),
    "graph_scheduling": _Option(("--split-mode-graph-scheduling", "-smgs"), bool, None, _FUSED),
    "active_experts": _Option(("--offload-only-active-experts", "-ooae"), bool, None, _OFFLOAD),
    "no_active_experts": _Option(("--no-offload-only-active-experts", "-no-ooae"), bool, None, _OFFLOAD),
    "cuda_params": _Option(("--cuda-params", "-cuda"), str, "KEY=VALUE,…", "quantkit's kernels have no such settings."),
    "parallel": _Option(
        ("--parallel", "-np"), int, "N", "quantkit chooses how many sequences it computes at a time; serve: one."
    ),
    "cache_ram": _Option(("--cache-ram", "-cram"), int, "MIB", "Prompts are not cached."),
    "jinja": _Option(("--jinja",), bool, None, "Chat templates are always read as Jinja."),
    "verbose": _Option(("--verbose", "-v"), bool, None, _NO_LOG_LEVELS),
    "verbosity": _Option(("--verbosity", "-lv"), int, "N", _NO_LOG_LEVELS),
    "log_disable": _Option(("--log-disable",), bool, None, "quantkit writes no log; -q leaves out messages."),
    "seed": _Option(("--seed", "-s"), int, "N", "Nothing is sampled at random."),
    "warmup": _Option(
        ("--warmup/--no-warmup",), bool, None, "Only bench and sweep-bench have a warm-up run that can be left out."
    ),
    "grouped_routing": _Option(
        ("--grouped-expert-routing", "-ger"), bool, None, "Experts are selected by groups wherever the file says so."
    ),
    "rope_cache": _Option(("--rope-cache", "-rcache"), bool, None, _FUSED),
    "scheduler_async": _Option(("--scheduler-async", "-sas"), bool, None, _FUSED),
    "priority": _Option(
        ("--prio",), int, "N", "quantkit leaves its priority to the operating system; run it under nice."
    ),
}
# Options of single commands.
OF_COMMANDS: dict[str, _Option] = {
    "keep": _Option(("--keep",), int, "N", "The context is not shifted: generation ends when it is full."),
    "color": _Option(("--color", "-co"), bool, None, "The reply is not coloured."),
    "single_turn": _Option(
        ("--single-turn", "-st"), bool, None, "A command gives one reply; --chat uses the template."
    ),
    "slow_iq2ks": _Option(
        ("--slow-iq2ks",), bool, None, "quantkit has a search of its own; --effort best tries more scales."
    ),
    "use_temp_file": _Option(("--use-temp-file",), bool, None, _BOUNDED_MEMORY),
    "no_lazy": _Option(("--no-lazy",), bool, None, _BOUNDED_MEMORY),
    "remote": _Option(("--remote",), bool, None, "A checkpoint on the Hub is always streamed."),
    "verbose": _Option(("--verbose",), bool, None, _NO_LOG_LEVELS),
}
OPTIONS: dict[str, tuple[Any, Any]] = {name: (option.annotation(), None) for name, option in _ALL.items()}
# Flags that llama-bench writes with a value: `-ger 1`. It has no effect either.
SWITCHES = frozenset(
    flag for option in _ALL.values() if option.kind is bool for flag in option.flags if flag[1] != "-" and len(flag) > 2
)


def notes(given: Mapping[str, Any]) -> Iterator[str]:
    """A line for each option of `OPTIONS` that is given."""
    for name, option in _ALL.items():
        if given.get(name) is not None:
            yield option.note(given[name])


def line(flag: str, reason: str) -> str:
    """What is said about an option that is given; `reason` is its help, a sentence."""
    return f"{flag} has no effect: {reason[0].lower()}{reason[1:].rstrip('.')}"
