"""`CacheType`: the types of keys and values of a KV cache, and whether they are rotated (-ctk, -ctv, -khad, -vhad)."""

from __future__ import annotations

from dataclasses import dataclass

from quantkit.errors import UnknownNameError, UnsupportedError
from quantkit.runtime.kernels.kv_rounding import FLOATS, QUANTIZED, rotation_block

_NAMES = {name.lower(): name for name in FLOATS + QUANTIZED}


@dataclass(frozen=True)
class CacheType:
    """The types of keys and values, and whether each are rotated. Its text is read back by `parse`:

    "f16"                   both
    "q8_0/q4_0"             keys, values
    "q4_0/q4_0 khad vhad"   rotated
    """

    k: str
    v: str
    khad: bool = False
    vhad: bool = False

    def __post_init__(self) -> None:
        for side, name in (("k", self.k), ("v", self.v)):
            if name.lower() not in _NAMES:
                error = UnknownNameError("cache type", name, _NAMES.values())
                error.args = (f"{error}; caches can be {', '.join(_NAMES.values())}",) if error.near else error.args
                raise error
            object.__setattr__(self, side, _NAMES[name.lower()])

    def __str__(self) -> str:
        pair = self.k if self.k == self.v else f"{self.k}/{self.v}"
        return pair + " khad" * self.khad + " vhad" * self.vhad

    @classmethod
    def parse(cls, text: str) -> CacheType:
        """The CacheType of a text. UnknownNameError for another text."""
        if not isinstance(text, str):
            raise UnknownNameError("cache type", text, _NAMES.values())
        pair, *marks = text.split() or [""]
        if unknown := set(marks) - {"khad", "vhad"}:
            raise UnknownNameError("mark of a cache type", unknown.pop(), ("khad", "vhad"))
        k, _, v = pair.partition("/")
        return cls(k, v or k, "khad" in marks, "vhad" in marks)

    def rotations(self, dim_k: int, dim_v: int) -> tuple[int, int]:
        """How many elements of a key and of a value are rotated together; 0: not rotated.

        UnsupportedError where these dimensions allow none, or do not fit the types.
        """
        blocks = []
        for side, name, dim, rotated in (("k", self.k, dim_k, self.khad), ("v", self.v, dim_v, self.vhad)):
            if name in QUANTIZED and dim % 32:
                raise UnsupportedError(
                    f"-ct{side} {name}: its blocks of 32 do not fit heads of {dim} elements; "
                    f"caches of this model can be {', '.join(FLOATS)}"
                )
            block = rotation_block(dim) if rotated and dim else 0
            if block is None:
                raise UnsupportedError(
                    f"-{side}had: heads of {dim} elements cannot be rotated: no power of two, nor a multiple of 64; "
                    f"leave -{side}had out"
                )
            blocks.append(block)
        return blocks[0], blocks[1]
