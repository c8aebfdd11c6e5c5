"""The minimum batch size for offload: when weights on the CPU are copied to a GPU for a batch. Pure functions.

A GPU can multiply a large batch with weights that are copied from the CPU for that batch. This pays if the copy takes
less time than the product: from THRESHOLD tokens for a single matrix, and from THRESHOLD * experts / used tokens for
stacked experts, so that each expert gets THRESHOLD tokens on average. Smaller batches run on the CPU, which makes
prompts in small batches much slower. `-op` disables offload for operations by name.

The runtime copies the experts of GPU layers as a whole: disabling either operation of OF_EXPERTS keeps them on the CPU.
In this version products with other matrices on the CPU always run on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from quantkit.errors import OptionError, UnknownNameError

THRESHOLD = 32  # tokens per matrix
OPS = {"MUL_MAT": 27, "MUL_MAT_ID": 28, "FUSED_UP_GATE": 30, "MOE_FUSED_UP_GATE": 31}  # their numbers in ik_llama.cpp
OF_EXPERTS = ("MUL_MAT_ID", "MOE_FUSED_UP_GATE")


@dataclass(frozen=True)
class Offload:
    """Which operations may be offloaded.

    threshold   minimum number of tokens per matrix
    forbidden   names of operations that always stay on the CPU
    """

    threshold: int = THRESHOLD
    forbidden: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.threshold < 1:
            raise OptionError(f"--offload-threshold {self.threshold}: a batch has at least 1 token")

    def min_tokens(self, op: str, experts: int = 0, used: int = 0) -> int | None:
        """The smallest batch, in tokens, for which an operation is offloaded; None if it never is."""
        if op not in OPS:
            raise UnknownNameError("operation", op, OPS)
        if op in self.forbidden:
            return None
        if op in OF_EXPERTS and experts and used:
            return -(-self.threshold * experts // used)
        return self.threshold

    def min_tokens_of_experts(self, experts: int, used: int) -> int | None:
        """The smallest batch, in tokens, for which experts are offloaded; None if one of their operations never is."""
        minimums = [self.min_tokens(op, experts, used) for op in OF_EXPERTS]
        return None if None in minimums else max(minimum for minimum in minimums if minimum)

    def offloads_experts(self, tokens: int, experts: int, used: int) -> bool:
        """Whether a batch of this many tokens runs the experts that are on the CPU on a GPU."""
        minimum = self.min_tokens_of_experts(experts, used)
        return minimum is not None and tokens >= minimum


def parse_ops(text: str, threshold: int = THRESHOLD) -> Offload:
    """Parse `-op MUL_MAT_ID,0,MUL_MAT,1`: pairs of an operation and 1 or 0; -1 or ALL means all operations.

    An operation is a name, or its number in the current ik_llama.cpp; the numbers change between its versions.
    """
    parts = [part.strip() for part in text.replace("=", ",").split(",") if part.strip()]
    if len(parts) % 2:
        raise OptionError(f"-op '{text}': write pairs of an operation and 0 or 1, for example MUL_MAT_ID,0")
    by_number = {str(number): name for name, number in OPS.items()}
    forbidden: set[str] = set()
    for op, allowed in zip(parts[::2], parts[1::2]):
        if allowed not in ("0", "1"):
            raise OptionError(f"-op '{text}': {op} must be followed by 0 or 1, not {allowed}")
        name = by_number.get(op, op.upper())
        if name not in OPS and name not in ("-1", "ALL"):
            raise UnknownNameError("operation of -op", op, OPS)
        names = set(OPS) if name in ("-1", "ALL") else {name}
        forbidden = forbidden - names if allowed == "1" else forbidden | names
    return Offload(threshold, frozenset(forbidden))
