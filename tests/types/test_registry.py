"""The registry: the table in `types/layouts.py` and the modules of `quantkit/types` name each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantkit.types import base

TYPES = Path(base.__file__).parent
NOT_TYPES = {"__init__", "base", "layouts"}


def test_every_module_of_a_type_is_in_the_table() -> None:
    """A module without a line in `layouts._TABLE` would never be imported, and its type not found."""
    modules = {path.stem for path in TYPES.glob("*.py")} - NOT_TYPES
    assert modules == set(base.codec_modules.values())


def test_every_type_in_the_table_has_the_codec_that_it_names() -> None:
    for ggml_type in base.codec_modules:
        assert base.by_id(ggml_type).has_codec, base.by_id(ggml_type).name


def test_a_module_without_the_type_that_the_table_promises_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(base.codec_modules, base.ids["i8"], "q4_0")
    with pytest.raises(TypeError, match=r"quantkit\.types\.q4_0 defines no QuantType with ggml_type = 24"):
        base.by_id(base.ids["i8"])
