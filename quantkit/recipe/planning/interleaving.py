"""Decide which tensors of a file to interleave, and the new general.file_type. Pure.

The file type becomes the interleaved one if most bytes of the tensors of its main type are interleaved, without the
embeddings, which never are. ik_llama.cpp decides by the file type alone: it renames a file after a pattern that
selected almost nothing, and IQ1_S files without any repacked tensor, and does not rename MXFP4, IQ3_M and others whose
tensors are all repacked. The previous file type is stored in another key, and unpacking restores it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from quantkit.errors import UnknownNameError
from quantkit.formats.gguf.metadata import Metadata
from quantkit.recipe.errors import RecipeError
from quantkit.recipe.planning.presets import FileType, file_type
from quantkit.recipe.rules.ecmascript import compile_pattern
from quantkit.repack import interleaved_form, row_form
from quantkit.repack.eligible import EMBEDDINGS, interleaved
from quantkit.types import QuantType
from quantkit.types.families.interleave import Interleaved

FILE_TYPE = "general.file_type"
FILE_TYPE_BEFORE = "quantkit.repack.file_type"  # u32: general.file_type of the file that was repacked

# The file type with the same mix, where that is not the name without the suffix.
_ROW_MIX = {"Q2_K_R4": "Q2_K_S", "Q3_K_R4": "Q3_K_S", "Q4_K_R4": "Q4_K_S", "Q5_K_R4": "Q5_K_S", "Q8_K_R8": "Q8_0",
            "Q4_0_4_4": "Q4_0", "Q4_0_4_8": "Q4_0", "Q4_0_8_8": "Q4_0"}  # fmt: skip

TypeChange = tuple[str, QuantType, QuantType, int]  # a tensor's name, its type before and after, its bytes


class Selection:
    """The tensors to interleave: those whose name matches a pattern (ECMAScript), or all without patterns.

    RecipeError for a pattern that matches no name; `where` is the file of the names.
    """

    def __init__(self, patterns: Sequence[str], names: Collection[str], where: str = ""):
        self.patterns = [compile_pattern(pattern, "--repack-pattern") for pattern in patterns]
        for text, pattern in zip(patterns, self.patterns):
            if not any(pattern.search(name) for name in names):
                place = f"{where}: " if where else ""
                raise RecipeError(f"{place}--repack-pattern '{text}' is found in none of {len(names)} tensor names")

    def form(self, name: str, shape: tuple[int, ...], kind: QuantType) -> tuple[Interleaved | None, str]:
        """The interleaved type that a tensor (shape in numpy's order) becomes, or None and the reason."""
        named = any(pattern.search(name) for pattern in self.patterns)
        form, reason = interleaved(name, shape, kind, named)
        if form and self.patterns and not named:
            return None, "no --repack-pattern matches"
        return form, reason


def repacked_type(main: FileType, tensors: Iterable[TypeChange]) -> FileType:
    """The interleaved file type of `main` if most bytes of its type were interleaved; else `main`."""
    form = interleaved_form(main.default) if main.default else None
    if form is None or form.file_type is None or not _most(tensors, main.default, form):
        return main
    return file_type(form.file_type)


def rename_repacked(metadata: Metadata, tensors: Iterable[TypeChange]) -> None:
    """Set the file type after repacking, and store the previous one."""
    main = _main(metadata)
    if main and (found := repacked_type(main, tensors)) is not main:
        metadata.set(FILE_TYPE_BEFORE, main.number, "u32")
        metadata.set(FILE_TYPE, found.number, "u32")


def rename_unpacked(metadata: Metadata, tensors: Iterable[TypeChange]) -> None:
    """Restore the file type from before repacking, or set the one with the same mix, if most bytes are unpacked."""
    main = _main(metadata)
    form = row_form(main.default) if main and main.default else None
    if not main or form is None or not _most(tensors, main.default, form):
        return
    before = metadata.pop(FILE_TYPE_BEFORE, None)
    if not isinstance(before, int) or isinstance(before, bool):
        before = file_type(_ROW_MIX.get(main.name) or main.name.rpartition("_R")[0]).number
    metadata.set(FILE_TYPE, before, "u32")


def _main(metadata: Metadata) -> FileType | None:
    """The file type in general.file_type; None if it is missing or unknown."""
    number = metadata.get(FILE_TYPE)
    if not isinstance(number, int) or isinstance(number, bool):
        return None
    try:
        return file_type(number)
    except UnknownNameError:
        return None


def _most(tensors: Iterable[TypeChange], old: QuantType | None, new: QuantType) -> bool:
    """Whether most bytes of type `old` became `new`."""
    done = left = 0
    for name, before, after, nbytes in tensors:
        if before is old and name not in EMBEDDINGS:
            done += nbytes if after is new else 0
            left += nbytes if after is not new else 0
    return done > left
