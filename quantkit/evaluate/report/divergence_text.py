"""The report of ik_llama.cpp's llama-perplexity on a KL divergence, with its labels, which other tools parse."""

from __future__ import annotations

from quantkit.evaluate.divergence import Divergence, Estimate
from quantkit.evaluate.statistics import at_share

CHUNK_HEADER = (
    "chunk             PPL               ln(PPL(Q)/PPL(base))          KL Divergence"
    "              Δp RMS            Same top p"
)


def chunk_line(index: int, so_far: Divergence) -> str:
    """The line that llama-perplexity prints after each chunk: running values."""
    ppl, ratio, kld, rms, top = so_far.ppl, so_far.ln_ratio, so_far.mean_kld, so_far.rms_dp, so_far.top_agreement
    return (
        f"{index:4d}    {ppl.value:9.4f} ± {ppl.error:9.4f}    {ratio.value:10.5f} ± {ratio.error:10.5f}"
        f"    {kld.value:10.5f} ± {kld.error:10.5f}    {100 * rms.value:6.3f} ± {100 * rms.error:6.3f} %"
        f"    {100 * top.value:6.3f} ± {100 * top.error:6.3f} %"
    )


def _bound_line(d: Divergence) -> str:
    low, high = d.limits
    return f"Bound of KLD: {d.bound:9.6f} (an exact base gives {low:.6f} to {high:.6f})"


def report(d: Divergence) -> str:
    """The final report of llama-perplexity, with the same labels, which other tools parse."""

    def with_error(label: str, e: Estimate) -> str:
        return f"{label:<30}: {e.value:10.6f} ± {e.error:10.6f}"

    kld, dp = d.sorted_kld(), 100 * d.sorted_dp()
    lines = [
        "====== Perplexity statistics ======",
        with_error("Mean PPL(Q)", d.ppl),
        with_error("Mean PPL(base)", d.ppl_base),
        f"{'Cor(ln(PPL(Q)), ln(PPL(base)))':<30}: {100 * d.correlation:6.2f}%",
        with_error("Mean ln(PPL(Q)/PPL(base))", d.ln_ratio),
        with_error("Mean PPL(Q)/PPL(base)", d.ratio),
        with_error("Mean PPL(Q)-PPL(base)", d.difference),
        "",
        "====== KL divergence statistics ======",
        f"Mean    KLD: {d.mean_kld.value:10.6f} ± {d.mean_kld.error:10.6f}",
        *([] if d.bound_terms is None else [_bound_line(d)]),
        f"Maximum KLD: {kld[-1]:10.6f}",
        *(f"{100 * f:4.1f}%   KLD: {at_share(kld, f):10.6f}" for f in (0.999, 0.99, 0.95, 0.9)),
        f"Median  KLD: {at_share(kld, 0.5):10.6f}",
        *(f"{100 * f:4.1f}%   KLD: {at_share(kld, f):10.6f}" for f in (0.1, 0.05, 0.01, 0.001)),
        f"Minimum KLD: {kld[0]:10.6f}",
        "",
        "====== Token probability statistics ======",
        f"Mean    Δp: {100 * d.mean_dp.value:6.3f} ± {100 * d.mean_dp.error:5.3f} %",
        f"Maximum Δp: {dp[-1]:6.3f}%",
        *(f"{100 * f:4.1f}%   Δp: {at_share(dp, f):6.3f}%" for f in (0.999, 0.99, 0.95, 0.9, 0.75)),
        f"Median  Δp: {at_share(dp, 0.5):6.3f}%",
        *(f"{100 * f:4.1f}%   Δp: {at_share(dp, f):6.3f}%" for f in (0.25, 0.1, 0.05, 0.01, 0.001)),
        f"Minimum Δp: {dp[0]:6.3f}%",
        f"RMS Δp    : {100 * d.rms_dp.value:6.3f} ± {100 * d.rms_dp.error:5.3f} %",
        f"Same top p: {100 * d.top_agreement.value:6.3f} ± {100 * d.top_agreement.error:5.3f} %",
    ]
    return "\n".join(lines)
