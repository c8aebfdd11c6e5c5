"""Which device holds which tensor: a pure function of the tensors, the rules and the devices there are.

    place({"blk.0.ffn_down.weight", …}, parse_rules("ffn_.*=CPU"), devices())

A rule is REGEX=DEVICE, as `-ot` takes it: the regex is searched for anywhere in the name, the first rule that matches
decides, and a tensor that no rule matches goes to the default device. Every tensor's device is explicit in the result,
and so is the number of tensors that each rule decided, because a rule that decides nothing is a mistake.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from quantkit.errors import DataError, UnsupportedError


@dataclass(frozen=True)
class Device:
    """Where tensors can live and be computed with."""

    name: str  # as `-ot` spells it: "CPU"


CPU = Device("CPU")


def devices() -> list[Device]:
    """The devices that this version runs on, the default one first."""
    return [CPU]


@dataclass(frozen=True)
class Rule:
    """Tensors whose name `pattern` finds go to the device called `device`."""

    pattern: str
    device: str

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise DataError(f"-ot {self}: '{self.pattern}' is not a regular expression: {error}") from None

    def __str__(self) -> str:
        return f"{self.pattern}={self.device}"


def parse_rules(text: str) -> list[Rule]:
    """Rules of `RE=DEVICE,RE=DEVICE`. A comma within a regex's braces or brackets does not end a rule."""
    rules = []
    for part in re.split(r",(?![^{\[]*[}\]])", text):
        if not part.strip():
            continue
        pattern, equals, device = part.strip().rpartition("=")
        if not equals or not pattern or not device:
            raise DataError(f"-ot '{part}': a rule is REGEX=DEVICE, for example 'ffn_.*_exps=CPU'")
        rules.append(Rule(pattern, device))
    return rules


@dataclass(frozen=True)
class Placement:
    """The device of every tensor, and how many tensors each rule decided."""

    devices: dict[str, Device]
    rules: tuple[Rule, ...] = ()
    decided: tuple[int, ...] = ()

    def __getitem__(self, name: str) -> Device:
        return self.devices[name]

    @property
    def idle(self) -> list[Rule]:
        """Rules that decided nothing: no name matches, or earlier rules took all that do."""
        return [rule for rule, count in zip(self.rules, self.decided) if count == 0]


def place(
    tensors: Iterable[str], rules: Sequence[Rule] = (), available: Collection[Device] = (CPU,), gpu_layers: int = 0
) -> Placement:
    """The device of every tensor. The first of `available` is the default.

    UnsupportedError when a rule names a device that is not there, or `gpu_layers` (-ngl) asks for a GPU.
    """
    by_name = {device.name.lower(): device for device in available}
    valid = f"valid devices: {', '.join(device.name for device in available)}"
    if gpu_layers > 0:
        raise UnsupportedError(f"-ngl {gpu_layers}: there is no GPU device to put layers on; {valid}; take -ngl 0")
    for rule in rules:
        if rule.device.lower() not in by_name:
            raise UnsupportedError(f"-ot {rule}: device '{rule.device}' is not there; {valid}")
    default = next(iter(available))
    decided = [0] * len(rules)
    found = {}
    for name in tensors:
        found[name] = default
        for i, rule in enumerate(rules):
            if re.search(rule.pattern, name):
                found[name] = by_name[rule.device.lower()]
                decided[i] += 1
                break
    return Placement(found, tuple(rules), tuple(decided))
