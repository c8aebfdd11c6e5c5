"""When a GPU takes part in products with weights that stay on the CPU: pure, for plans and profiles.

Weights that live on the CPU can be copied to a GPU for one large batch, which then multiplies there. That pays once
copying is the smaller part: a matrix of its own from THRESHOLD tokens on, matrices of experts from
THRESHOLD * experts / used on, where each expert gets THRESHOLD tokens on average. Below, prompts run on the CPU, which
is why they are so much slower in small batches (field-notes.md 2). `-op` forbids it for operations by name.

Runs copy experts of layers that are on a GPU, as a whole: forbidding either operation OF_EXPERTS keeps them on the CPU.
Other matrices on the CPU are multiplied with there in this version, whatever the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from quantkit.errors import DataError, UnknownNameError

THRESHOLD = 32
OPS = {"MUL_MAT": 27, "MUL_MAT_ID": 28, "FUSED_UP_GATE": 30, "MOE_FUSED_UP_GATE": 31}  # their numbers in ik_llama.cpp
OF_EXPERTS = ("MUL_MAT_ID", "MOE_FUSED_UP_GATE")


@dataclass(frozen=True)
class Offload:
    """Whether operations may be offloaded.

    threshold   tokens that a matrix must get
    forbidden   names of operations that stay on the CPU whatever the batch
    """

    threshold: int = THRESHOLD
    forbidden: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.threshold < 1:
            raise DataError(f"--offload-threshold {self.threshold}: a batch has at least 1 token")

    def least_tokens(self, op: str, experts: int = 0, used: int = 0) -> int | None:
        """The smallest batch that is offloaded; None where it never is."""
        if op not in OPS:
            raise UnknownNameError("operation", op, OPS)
        if op in self.forbidden:
            return None
        if op in OF_EXPERTS and experts and used:
            return -(-self.threshold * experts // used)
        return self.threshold

    def least_of_experts(self, experts: int, used: int) -> int | None:
        """The smallest batch for which experts are copied, as a whole; None where an operation of theirs never is."""
        found = [self.least_tokens(op, experts, used) for op in OF_EXPERTS]
        return None if None in found else max(least for least in found if least)

    def offloads_experts(self, tokens: int, experts: int, used: int) -> bool:
        least = self.least_of_experts(experts, used)
        return least is not None and tokens >= least


def parse_ops(text: str, threshold: int = THRESHOLD) -> Offload:
    """What `-op MUL_MAT_ID,0,MUL_MAT,1` says: pairs of an operation and 1 or 0; -1 or ALL stands for all of them.

    Operations are spelled by name, or by the numbers that ik_llama.cpp has now, which change with its versions.
    """
    parts = [part.strip() for part in text.replace("=", ",").split(",") if part.strip()]
    if len(parts) % 2:
        raise DataError(f"-op '{text}': pairs of an operation and 0 or 1, for example MUL_MAT_ID,0")
    by_number = {str(number): name for name, number in OPS.items()}
    forbidden: set[str] = set()
    for op, allowed in zip(parts[::2], parts[1::2]):
        if allowed not in ("0", "1"):
            raise DataError(f"-op '{text}': after {op} stands 0 or 1, not {allowed}")
        name = by_number.get(op, op.upper())
        if name not in OPS and name not in ("-1", "ALL"):
            raise UnknownNameError("operation of -op", op, OPS)
        names = set(OPS) if name in ("-1", "ALL") else {name}
        forbidden = forbidden - names if allowed == "1" else forbidden | names
    return Offload(threshold, frozenset(forbidden))
