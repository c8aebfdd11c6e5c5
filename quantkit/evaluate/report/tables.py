"""A comparison as text: the table's header and rows, verdicts in sentences, a block for a model card."""

from __future__ import annotations

from collections.abc import Sequence

from quantkit.errors import printable
from quantkit.evaluate.breakdown import Part
from quantkit.evaluate.comparison import Comparison, Paired
from quantkit.evaluate.statistics import MIN_UNITS
from quantkit.evaluate.task_flips import TaskComparison
from quantkit.evaluate.tasks import Score


def table_header(comparison: Comparison) -> list[str]:
    """The column titles of `table_rows`."""
    timed = any(c.throughput for c in comparison.candidates)
    return ["file", "GiB", "bpw", "PPL", "PPL - ref", "ln(PPL/ref)", "KLD mean", "median", "p90", "p99", "max",
            "same top %", "RMS Δp %", *(["PP t/s", "TG t/s"] if timed else []), "place"]  # fmt: skip


def table_rows(comparison: Comparison) -> list[list[str]]:
    """One row of text per candidate, and one for the noise floor; `±` is one standard error."""
    timed = any(c.throughput for c in comparison.candidates)
    places = {r.model + 1: str(r.place) for r in comparison.ranks}
    rows = []
    for i, c in enumerate(comparison.candidates):
        cells = [c.name, f"{c.size_bytes / 2**30:.3f}", f"{c.bits_per_weight:.3f}",
                 f"{c.ppl.value:.4f} ± {c.ppl.error:.4f}", *_paired_cells(c.paired)]  # fmt: skip
        if timed:
            speed = c.throughput
            cells += [f"{speed.prompt:.0f}", f"{speed.generation:.1f}"] if speed else ["-", "-"]
        rows.append([*cells, places.get(i, "-")])
    if comparison.noise is not None:
        d = comparison.noise.paired
        ppl = d.divergence.ppl
        cells = [f"noise floor: {comparison.noise.how}", "-", "-", f"{ppl.value:.4f} ± {ppl.error:.4f}"]
        rows.insert(1, [*cells, *_paired_cells(d), *(["-", "-"] if timed else []), "-"])
    return rows


def _paired_cells(paired: Paired | None) -> list[str]:
    """The cells from PPL - ref to RMS Δp."""
    if paired is None:
        return ["reference", *["-"] * 8]
    f, difference = paired.figures, paired.ppl_difference
    return [
        f"{difference.value:+.4f} ± {difference.error:.4f}",
        f"{f['ln_ratio'].value:+.5f} ± {f['ln_ratio'].error:.5f}",
        f"{f['kld'].value:.6f} ± {f['kld'].error:.6f}",
        *(f"{f[name].value:.6f}" for name in ("kld_median", "kld_p90", "kld_p99")),
        f"{paired.largest:.6f}",
        *(f"{100 * f[name].value:.2f} ± {100 * f[name].error:.2f}" for name in ("same_top", "rms_dp")),
    ]


def domain_rows(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """A header, and one row per text and model; no rows for a single text."""
    header = ["text", "file", "tokens", "PPL", "PPL - ref", "ln(PPL/ref)", "KLD mean", "median", "p90", "p99", "max",
              "same top %", "RMS Δp %"]  # fmt: skip
    rows = []
    for domain in comparison.domains if len(comparison.domains) > 1 else ():
        for c in comparison.candidates:
            if c.paired is not None:
                part = c.paired.of(domain)
                ppl = part.divergence.ppl
                rows.append([domain.name, c.name, str(len(part.divergence)), f"{ppl.value:.4f} ± {ppl.error:.4f}",
                             *_paired_cells(part)])  # fmt: skip
    return header, rows


def part_table(models: Sequence[tuple[str | None, Sequence[Part]]]) -> tuple[list[str], list[list[str]]]:
    """A header, and one row for each part of each model: bins of positions, or categories.

    All models have the same parts. A name of None has no column.
    """
    named = any(name is not None for name, _ in models)
    is_position = any(part.high for _, parts in models for part in parts)
    header = ["position" if is_position else "category", *(["file"] if named else []), "sequences", "tokens",
              "KLD mean", "95 % interval", "top-1 flips %"]  # fmt: skip
    rows = []
    for same in zip(*(parts for _, parts in models)):
        for (name, _), part in zip(models, same):
            kld, flips = part.kld, part.flips
            rows.append([
                printable(part.name), *([name or ""] if named else []), str(part.sequences), str(part.tokens),
                f"{kld.value:.6f} ± {kld.error:.6f}", f"{kld.low:.6f} to {kld.high:.6f}",
                f"{100 * flips.value:.2f} ± {100 * flips.error:.2f}",
            ])  # fmt: skip
    return header, rows


def position_rows(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """A header, and one row for each bin of positions and each model."""
    return part_table([(c.name, c.paired.by_position) for c in comparison.candidates if c.paired is not None])


def flip_table(found: TaskComparison) -> tuple[list[str], list[list[str]]]:
    """A header, and one row for the reference and for each model: its accuracy and the answers that change."""
    header = ["file", "tasks", "accuracy %", "accuracy - ref", "right to wrong", "wrong to right", "changed", "p"]
    rows = [
        [printable(found.path.stem), str(found.reference.tasks), _percent(found.reference), "reference", *["-"] * 4]
    ]
    for m in found.models:
        difference = f"{100 * m.difference:+.2f} ± {100 * m.error:.2f}"
        rows.append([m.name, str(m.score.tasks), _percent(m.score), difference, str(m.lost), str(m.gained),
                     str(m.changed), f"{m.p_value:.3g}"])  # fmt: skip
    return header, rows


def _percent(score: Score) -> str:
    return f"{100 * score.accuracy:.2f} ± {100 * score.error:.2f}"


def verdicts(comparison: Comparison) -> list[str]:
    """Sentences: which model is closer, which are indistinguishable, and which are within the noise floor."""
    lines, names = [], [c.name for c in comparison.candidates[1:]]
    for r, following in zip(comparison.ranks, comparison.ranks[1:]):
        a, b, s = names[r.model], names[following.model], r.to_next
        assert s is not None
        margin = f"{s.difference.value:.6f} ± {s.difference.error:.6f} nats a token"
        if s.separated:
            lines.append(f"{a} is closer to the reference than {b}: by {margin}")
        elif s.more_tokens:
            lines.append(
                f"{a} and {b} are indistinguishable: {margin}; about {s.more_tokens:,} more tokens would separate them"
            )
        else:
            lines.append(f"{a} and {b} are indistinguishable: {margin}; even 100 times the tokens would not suffice")
    if comparison.noise is not None:
        floor = max(0.0, comparison.noise.paired.figures["kld"].value)  # a base that rounds gives tiny negatives
        lines += [
            f"{c.name} is within the noise floor of {floor:.6f} nats: other numerics change the reference as much"
            for c in comparison.candidates
            if c.paired is not None and c.paired.figures["kld"].value <= floor
        ]
    if comparison.chunks < MIN_UNITS:
        lines.append(
            f"errors are too small: {comparison.chunks} chunks do not show how passages differ; use {MIN_UNITS} or "
            "more (--chunks, shorter chunks with -c, or a longer text)"
        )
    return lines


def model_card(comparison: Comparison, conditions: str) -> str:
    """A Markdown block for a model card: sizes, quality figures and all their conditions."""
    lines = []
    for c in comparison.candidates[1:]:
        lines += [f"## {c.name} {c.size_bytes / 2**30:.3f} GiB ({c.bits_per_weight:.3f} BPW)", ""]
        lines += [f"Final estimate: PPL = {c.ppl.value:.4f} +/- {c.ppl.error:.5f}", ""]
        assert c.paired is not None
        f = c.paired.figures
        low, high = f["kld"].low, f["kld"].high
        lines += [
            f"KLD from {comparison.candidates[0].name}: {f['kld'].value:.6f} (95 %: {low:.6f} to {high:.6f}), "
            f"p99 {f['kld_p99'].value:.6f}, same top token {100 * f['same_top'].value:.2f} %, "
            f"RMS Δp {100 * f['rms_dp'].value:.2f} %",
            "",
        ]
    lines += [f"- {line}" for line in verdicts(comparison)]
    return "\n".join([*lines, "", f"Measured over {comparison.positions} tokens; {conditions}."])
