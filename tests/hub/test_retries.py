"""Requests that fail for a while: how long is waited, how often it is tried, and what the error says."""

from __future__ import annotations

import time
from email.utils import formatdate
from pathlib import Path
from types import SimpleNamespace

import pytest

from quantkit.hub import client
from quantkit.hub.address import parse
from quantkit.hub.client import ATTEMPTS, FIRST_WAIT, MAX_WAIT, HubError, Repository
from tests.hub.fake import COMMIT, FakeHub, Fault

NAME, FILE, CONTENT = "org/small", "model.safetensors", bytes(range(200))
BACK_OFF = [min(MAX_WAIT, FIRST_WAIT * 2**i) for i in range(ATTEMPTS - 1)]


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch, hub: FakeHub, tmp_path: Path) -> list[float]:
    """The seconds that would have been waited."""
    found: list[float] = []
    monkeypatch.setattr(client, "FIRST_WAIT", FIRST_WAIT)
    monkeypatch.setattr(client, "time", SimpleNamespace(sleep=found.append, time=time.time))
    (tmp_path / FILE).write_bytes(CONTENT)
    hub.add(NAME, tmp_path)
    return found


def test_429_without_a_time_is_tried_six_times(hub: FakeHub, waits: list[float]) -> None:
    """With waits that double. The error names the URL without what may be a token, and the attempts."""
    repository = Repository.open(parse(f"hf://{NAME}"))
    for path, url in (
        (f"/resolve/{COMMIT}/", f"{hub.url}/{NAME}/resolve/{COMMIT}/{FILE}"),
        ("/cdn/", f"{hub.cdn}/cdn/{NAME}/{FILE}"),
    ):
        hub.faults = [Fault(path, status=429, times=99)]
        hub.requests.clear()
        with pytest.raises(HubError, match=rf"^hf://{NAME}/{FILE}: {url} answers 429 .* \({ATTEMPTS} attempts\); run "):
            repository.read(FILE, 0, 100)
        assert sum(path in request.path for request in hub.requests) == ATTEMPTS
    hub.faults = [Fault("/api/models/", status=429, times=99)]
    with pytest.raises(HubError, match=rf"{hub.url}/api/models/{NAME} answers 429 .* \({ATTEMPTS} attempts\)"):
        Repository.open(parse(f"hf://{NAME}"))
    assert waits == 3 * BACK_OFF
    assert max(waits) <= MAX_WAIT


def test_attempts_are_counted_from_the_last_byte(hub: FakeHub, waits: list[float]) -> None:
    """A storm that ends in time costs nothing but time."""
    hub.faults = [
        Fault("/cdn/", status=429, times=ATTEMPTS - 1),
        Fault("/cdn/", cut=50),
        Fault("/cdn/", status=429, times=ATTEMPTS - 2),
    ]
    assert Repository.open(parse(f"hf://{NAME}")).read(FILE, 0, 200) == CONTENT
    assert waits == [*BACK_OFF, BACK_OFF[0], *BACK_OFF[:-1]]


@pytest.mark.parametrize(("seconds", "low", "high"), [(40, 38, 41), (-1000, 0, 0)])
def test_503_with_a_date(hub: FakeHub, waits: list[float], seconds: int, low: float, high: float) -> None:
    hub.faults = [Fault("/cdn/", status=503, retry_after=formatdate(time.time() + seconds, usegmt=True))]
    assert Repository.open(parse(f"hf://{NAME}")).read(FILE, 10, 20) == CONTENT[10:20]
    (waited,) = waits
    assert low <= waited <= high


def test_a_date_that_is_far_away_ends_the_command(hub: FakeHub, waits: list[float]) -> None:
    hub.faults = [Fault("/cdn/", status=503, retry_after=formatdate(time.time() + 86400, usegmt=True))]
    with pytest.raises(HubError, match=r"answers 503 .* \(1 attempt; the server asks to wait 86\d\d\d s\); run"):
        Repository.open(parse(f"hf://{NAME}")).read(FILE, 0, 100)
    assert waits == []


def test_a_text_that_is_no_time_is_ignored(hub: FakeHub, waits: list[float]) -> None:
    hub.faults = [Fault("/cdn/", status=503, retry_after="soon")]
    assert Repository.open(parse(f"hf://{NAME}")).read(FILE, 0, 100) == CONTENT[:100]
    assert waits == BACK_OFF[:1]
