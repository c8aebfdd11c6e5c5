"""Interleaving the tensors of a file, decided: which ones, and what general.file_type says afterwards. Pure.

The file type names an interleaved one when most of what the file type was about is interleaved: of the tensors of its
main type, embeddings apart, which never are. It goes by what was done, where the reference goes by the number alone:
it renames after a pattern that left nearly all as it was, and IQ1_S files of which nothing was repacked; and it leaves
MXFP4, IQ3_M and others as they are though all was. The number there was is kept beside, and unpacking restores it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from quantkit.errors import UnknownNameError
from quantkit.formats.gguf.metadata import Metadata
from quantkit.recipe.ecmascript import compile_pattern
from quantkit.recipe.errors import RecipeError
from quantkit.recipe.presets import FileType, file_type
from quantkit.repack import interleaved_form, row_form
from quantkit.repack.eligible import EMBEDDINGS, interleaved
from quantkit.types import QuantType
from quantkit.types.families.interleave import Interleaved

FILE_TYPE = "general.file_type"
FILE_TYPE_BEFORE = "quantkit.repack.file_type"  # u32: general.file_type of the file that was repacked

# Whose mix a file type of interleaved types has, where that is not its own name without the suffix.
_ROW_MIX = {"Q2_K_R4": "Q2_K_S", "Q3_K_R4": "Q3_K_S", "Q4_K_R4": "Q4_K_S", "Q5_K_R4": "Q5_K_S", "Q8_K_R8": "Q8_0",
            "Q4_0_4_4": "Q4_0", "Q4_0_4_8": "Q4_0", "Q4_0_8_8": "Q4_0"}  # fmt: skip

Became = tuple[str, QuantType, QuantType, int]  # a tensor's name, its type before and after, its bytes


class Selection:
    """The tensors to interleave: those in whose name some pattern (ECMAScript) is found, all where there is none.

    RecipeError for a pattern that is found in none of the names; `where` is the file they are from.
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


def repacked_type(main: FileType, tensors: Iterable[Became]) -> FileType:
    """The file type of the interleaved form of `main`'s type, if that is what most of it became; else `main`."""
    form = interleaved_form(main.default) if main.default else None
    if form is None or form.file_type is None or not _most(tensors, main.default, form):
        return main
    return file_type(form.file_type)


def rename_repacked(metadata: Metadata, tensors: Iterable[Became]) -> None:
    """Set the file type that tensors were repacked to, and remember the one there was."""
    main = _main(metadata)
    if main and (found := repacked_type(main, tensors)) is not main:
        metadata.set(FILE_TYPE_BEFORE, main.number, "u32")
        metadata.set(FILE_TYPE, found.number, "u32")


def rename_unpacked(metadata: Metadata, tensors: Iterable[Became]) -> None:
    """Set the file type there was before repacking, or that of the row-by-row mix, if most of the main type is that."""
    main = _main(metadata)
    form = row_form(main.default) if main and main.default else None
    if not main or form is None or not _most(tensors, main.default, form):
        return
    before = metadata.pop(FILE_TYPE_BEFORE, None)
    if not isinstance(before, int) or isinstance(before, bool):
        before = file_type(_ROW_MIX.get(main.name) or main.name.rpartition("_R")[0]).number
    metadata.set(FILE_TYPE, before, "u32")


def _main(metadata: Metadata) -> FileType | None:
    """What general.file_type names, None where it is missing or names nothing."""
    number = metadata.get(FILE_TYPE)
    if not isinstance(number, int) or isinstance(number, bool):
        return None
    try:
        return file_type(number)
    except UnknownNameError:
        return None


def _most(tensors: Iterable[Became], old: QuantType | None, new: QuantType) -> bool:
    """Whether most bytes of type `old` became `new`."""
    done = left = 0
    for name, before, after, nbytes in tensors:
        if before is old and name not in EMBEDDINGS:
            done += nbytes if after is new else 0
            left += nbytes if after is not new else 0
    return done > left
