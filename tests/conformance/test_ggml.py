"""The oracle itself: ids that the reference wheel does not know fail a test instead of aborting the process."""

from __future__ import annotations

import pytest

from quantkit import types
from tests.conformance import ggml


@pytest.mark.parametrize("ggml_type", [-1, 4, 160, 399 + 1, 10**6])
def test_an_unknown_id_fails_with_a_message(ggml_type: int) -> None:
    with pytest.raises(pytest.fail.Exception, match=f"q6_x has id {ggml_type}, which .* does not know"):
        ggml.require_known(ggml_type, "q6_x")


def test_an_id_of_another_type_is_named() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"q6_x has id 2, which .* calls q4_0"):
        ggml.require_known(2, "q6_x")


def test_encoding_and_decoding_check_the_id_first(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unknown:
        name, ggml_type = "q6_x", 160

    monkeypatch.setattr(types, "layout", lambda name: Unknown)
    for use in (lambda: ggml.quantize("q6_x", None), lambda: ggml.dequantize("q6_x", None, 32)):  # type: ignore[arg-type]
        with pytest.raises(pytest.fail.Exception, match="has id 160"):
            use()
