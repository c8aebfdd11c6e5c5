"""Which tensors can be interleaved, by name, type and shape, and the reason why others cannot.

Three differences from ik_llama.cpp, each because the file would not run:

    BF16     only where it is chosen by name. ik_llama.cpp multiplies bf16_r16 where it was built for AVX512_BF16;
             other builds compute garbage silently. (It decides by the build that repacks, not by the one that runs.)
    F16      never: bf16_r16 has 7 of its 10 bits of mantissa. `quantize` to bf16_r16 does it.
    tables   position_embd, token_types and attn_rel_b are looked up row by row like the embeddings, and ssm_conv1d is
             not the matrix of a product; ik_llama.cpp repacks those that happen to be quantized.
"""

from __future__ import annotations

from collections.abc import Container

from quantkit.errors import DataError
from quantkit.repack import interleaved_form
from quantkit.types import QuantType
from quantkit.types.families.interleave import Interleaved

EMBEDDING, LAYER_EMBEDDING, OUTPUT = "token_embd.weight", "per_layer_token_embd.weight", "output.weight"
EMBEDDINGS = (EMBEDDING, LAYER_EMBEDDING)
_NOT_MULTIPLIED = ("position_embd.weight", "token_types.weight", "attn_rel_b.weight", "ssm_conv1d")
_INTERLEAVED_NAMES = ("_r4", "_r8", "_r16")


def looked_up(names: Container[str]) -> frozenset[str]:
    """The embeddings of which a token reads its row only: not one that is the output matrix of these tensors too."""
    return frozenset(EMBEDDINGS if OUTPUT in names else (LAYER_EMBEDDING,))


def interleaved(
    name: str, shape: tuple[int, ...], kind: QuantType, named: bool = False
) -> tuple[Interleaved | None, str]:
    """The interleaved type of a tensor (shape in numpy's order), or None and the reason why it has none.

    `named`: a --repack-pattern names the tensor, so that bf16 is interleaved too.
    """
    if name in EMBEDDINGS:
        return None, "embeddings are read row by row"
    if kind.interleave > 1 or kind.name.endswith(_INTERLEAVED_NAMES):
        return None, "interleaved already"
    form = interleaved_form(kind)
    if form is None:
        lossy = "; bf16_r16 would lose bits: if you want that, quantkit quantize IN OUT BF16_R16"
        return None, f"{kind.name} has no interleaved form here{lossy if kind.name == 'f16' else ''}"
    if any(part in name for part in _NOT_MULTIPLIED):
        return None, "not an operand of a matrix product"
    rows = shape[-2] if len(shape) > 1 else 1
    if rows % form.interleave:
        return None, f"{rows} rows are not a multiple of {form.interleave}"
    try:
        form.row_bytes(shape[-1])
    except DataError as error:
        return None, str(error)
    if kind.name == "bf16" and not named:
        return None, "only CPUs with AVX512_BF16 can use bf16_r16; for those, name it by --repack-pattern"
    return form, ""
