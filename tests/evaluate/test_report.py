"""The reference's report, line by line, against plain Python that knows only spec/tools.md 4.2 and 4.3."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest

from quantkit.evaluate import divergence
from quantkit.evaluate.report import divergence_text
from quantkit.formats.kld.base_file import BaseReader, BaseWriter
from tests.evaluate.fake import FakeModel

N_CTX, VOCAB, CHUNKS = 64, 31, 5


def plain_rows(data, model):
    """Yield (base log-probabilities, model log-probabilities, target) as lists of Python floats."""
    n_ctx, vocab, chunks = struct.unpack_from("<iii", data, 8)
    tokens = struct.unpack_from(f"<{chunks * n_ctx}i", data, 20)
    at, first = 20 + 4 * chunks * n_ctx, n_ctx // 2
    for c in range(chunks):
        text = tokens[c * n_ctx : (c + 1) * n_ctx]
        logits = model.hidden_sequences(np.array([text]), slice(None))[0]
        for position in range(first, n_ctx - 1):
            scale, low = struct.unpack_from("<ff", data, at)
            codes = struct.unpack_from(f"<{vocab}H", data, at + 8)
            at += 8 + 4 * ((vocab + 1) // 2)
            row = [float(x) for x in logits[position]]
            top = max(row)
            total = math.fsum(math.exp(x - top) for x in row)
            log_q = [x - top - math.log(total) for x in row]
            yield [scale * c + low for c in codes], log_q, text[position + 1]
    assert at == len(data)


def mean(x):
    return math.fsum(x) / len(x)


def err(x):
    v = mean([a * a for a in x]) - mean(x) ** 2
    return math.sqrt(v / (len(x) - 1)) if len(x) > 10 and v > 0 else 0.0


def cov(x, y):
    return (mean([a * b for a, b in zip(x, y)]) - mean(x) * mean(y)) / (len(x) - 1)


def at_share(values, f):
    v = sorted(struct.unpack("<f", struct.pack("<f", x))[0] for x in values)
    x = f * (len(v) - 1)
    k = int(x)
    return (1 - (x - k)) * v[k] + (x - k) * v[min(k + 1, len(v) - 1)]


def plain_report(rows):
    nll, nll_b, div, same, dp = [], [], [], [], []
    for log_b, log_q, target in rows:
        nll.append(-log_q[target])
        nll_b.append(-log_b[target])
        div.append(math.fsum(math.exp(b) * (b - q) for b, q in zip(log_b, log_q) if b > -16))
        same.append(log_b.index(max(log_b)) == log_q.index(max(log_q)))
        dp.append(math.exp(log_q[target]) - math.exp(log_b[target]))
    n, e, eb, c = len(nll), err(nll), err(nll_b), cov(nll, nll_b)
    p, pb = math.exp(mean(nll)), math.exp(mean(nll_b))
    d = mean(nll) - mean(nll_b)
    er = math.sqrt(e * e + eb * eb - 2 * c)
    ed = math.sqrt((p * e) ** 2 + (pb * eb) ** 2 - 2 * p * pb * c)
    squares = [x * x for x in dp]
    rms = math.sqrt(mean(squares))
    share = sum(same) / n
    share_err = math.sqrt(share * (1 - share) / (n - 1))
    two = "%10.6f ± %10.6f"
    expected = ["====== Perplexity statistics ======",
                f"Mean PPL(Q)                   : {two % (p, p * e)}",
                f"Mean PPL(base)                : {two % (pb, pb * eb)}",
                f"Cor(ln(PPL(Q)), ln(PPL(base))): {100 * c / (e * eb):6.2f}%",
                f"Mean ln(PPL(Q)/PPL(base))     : {two % (d, er)}",
                f"Mean PPL(Q)/PPL(base)         : {two % (math.exp(d), math.exp(d) * er)}",
                f"Mean PPL(Q)-PPL(base)         : {two % (p - pb, ed)}",
                "", "====== KL divergence statistics ======",
                f"Mean    KLD: {two % (mean(div), err(div))}",
                f"Maximum KLD: {max(div):10.6f}"]  # fmt: skip
    expected += [f"{name}   KLD: {at_share(div, f):10.6f}"
                 for name, f in (("99.9%", 0.999), ("99.0%", 0.99), ("95.0%", 0.95), ("90.0%", 0.9))]  # fmt: skip
    expected += [f"Median  KLD: {at_share(div, 0.5):10.6f}"]
    expected += [f"{name}   KLD: {at_share(div, f):10.6f}"
                 for name, f in (("10.0%", 0.1), (" 5.0%", 0.05), (" 1.0%", 0.01), (" 0.1%", 0.001))]  # fmt: skip
    expected += [f"Minimum KLD: {min(div):10.6f}", "", "====== Token probability statistics ======"]
    expected += [f"Mean    Δp: {100 * mean(dp):6.3f} ± {100 * err(dp):5.3f} %", f"Maximum Δp: {100 * max(dp):6.3f}%"]
    shares = (("99.9%", 0.999), ("99.0%", 0.99), ("95.0%", 0.95), ("90.0%", 0.9), ("75.0%", 0.75), ("Median ", 0.5),
              ("25.0%", 0.25), ("10.0%", 0.1), (" 5.0%", 0.05), (" 1.0%", 0.01), (" 0.1%", 0.001))  # fmt: skip
    expected += [f"{name}{'' if name == 'Median ' else '  '} Δp: {100 * at_share(dp, f):6.3f}%" for name, f in shares]
    expected += [f"Minimum Δp: {100 * min(dp):6.3f}%",
                 f"RMS Δp    : {100 * rms:6.3f} ± {100 * err(squares) / (2 * rms):5.3f} %",
                 f"Same top p: {100 * share:6.3f} ± {100 * share_err:5.3f} %"]  # fmt: skip
    return expected


@pytest.mark.parametrize("noise", [0.02, 0.5])
def test_every_line_is_a_plain_implementation_s(rng, tmp_path, noise):
    reference, candidate = FakeModel(), FakeModel(noise=noise)
    tokens = rng.integers(0, VOCAB, (CHUNKS, N_CTX)).astype(np.int32)
    path = tmp_path / "x.kld"
    with BaseWriter(path, tokens, VOCAB) as writer:
        for chunk in tokens:
            writer.write(reference.hidden_sequences(chunk[None], slice(N_CTX // 2, N_CTX - 1))[0])
    found = divergence.divergence_from_base(candidate, BaseReader(path))
    assert divergence_text.report(found).split("\n") == plain_report(plain_rows(path.read_bytes(), candidate))
