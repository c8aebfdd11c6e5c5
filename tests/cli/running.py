"""Commands run in this process."""

from __future__ import annotations

import pytest

from quantkit.cli import main


def printed(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    assert main([str(arg) for arg in args]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *args: object, status: int = 1) -> str:
    assert main([str(arg) for arg in args]) == status
    return capsys.readouterr().err
