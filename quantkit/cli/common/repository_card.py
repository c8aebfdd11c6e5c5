"""The README.md that `upload --card` writes: front matter, results, the card of each file, hashes."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.cli.common.card import card, cell
from quantkit.cli.common.evaluation import markdown
from quantkit.errors import FormatError, printable
from quantkit.inputs import json_input

if TYPE_CHECKING:
    from quantkit.formats.gguf import GGUF

_SCHEMA = "quantkit.compare/1"
_HUB_MODEL = re.compile(r"https://huggingface\.co/([\w.-]+/[\w.-]+)/?")


def repository_card(
    title: str,
    files: Sequence[GGUF],
    hashes: Mapping[str, str],
    results: Mapping[str, Any] | None = None,
    picture: str | None = None,
) -> str:
    """The text of a model card.

    files    the GGUF files of the repository, sets of shards joined
    hashes   SHA-256 of the uploaded files by name
    results  what `compare -o` wrote
    picture  the name of an uploaded picture of KLD against size, as `compare --plot` draws it
    """
    parts = [
        _front_matter(files),
        f"# {cell(title)}\n\nMade with quantkit. The files run in ik_llama.cpp, and "
        "in llama.cpp where it knows their types.",
    ]
    if results is not None or picture is not None:
        parts.append("## Quality")
    if picture is not None:
        parts.append(f"![Mean KL divergence against size](<{printable(picture)}>)")
    if results is not None:
        parts.append(_results(results))
    parts += [card(file).rstrip("\n") for file in files]
    rows = [(f"`{cell(name)}`", f"`{digest}`") for name, digest in hashes.items()]
    parts.append("## SHA-256\n\n" + markdown(("file", "SHA-256"), rows))
    return "\n\n".join(parts) + "\n"


def read_results(path: Path) -> dict[str, Any]:
    """The results that `compare -o` wrote; FormatError for another file."""
    found = json_input.read(path)
    models = found.get("models") if isinstance(found, dict) and found.get("schema") == _SCHEMA else None
    if not isinstance(models, list) or not all(isinstance(model, dict) for model in models):
        raise FormatError(f"{path}: not the results of a comparison; `quantkit compare … -o FILE` writes them")
    return dict(found)


def _front_matter(files: Sequence[GGUF]) -> str:
    """YAML that the Hub reads: licence, languages and base models as the files state them."""
    import yaml

    stated: dict[str, Any] = {}
    for file in files[:1]:
        m = file.metadata
        stated["license"] = m.get("general.license")
        stated["language"] = m.get("general.languages")
        urls = [str(m[key]) for key in m if re.fullmatch(r"general\.base_model\.\d+\.repo_url", key)]
        bases = [model[1] for url in urls if (model := _HUB_MODEL.fullmatch(url))]
        if bases:
            stated |= {"base_model": bases, "base_model_relation": "quantized"}
        tags = m.get("general.tags")
        stated["tags"] = ["gguf", "quantkit", *(tag for tag in tags if tag != "gguf")] if isinstance(tags, list) else [
            "gguf", "quantkit"]  # fmt: skip
    found = {key: value for key, value in stated.items() if value}
    return f"---\n{yaml.safe_dump(found, sort_keys=False, allow_unicode=True)}---"


def _results(results: Mapping[str, Any]) -> str:
    """The table of a comparison: size, bits per weight, perplexity, KL divergence."""
    rows = []
    for model in results["models"]:
        size, kld, top = (_number(model, key) for key in ("bytes", "kld", "same_top"))
        ppl, error = _number(model, "ppl"), _number(model, "kld_error_over_chunks")
        rows.append((
            cell(str(model.get("name", ""))), f"{size / 2**30:.3f}", f"{_number(model, 'bits_per_weight'):.3f}",
            f"{ppl:.4f}", "reference" if math.isnan(kld) else f"{kld:.5f} ± {error:.5f}",
            "" if math.isnan(top) else f"{100 * top:.2f} %",
        ))  # fmt: skip
    table = markdown(("model", "GiB", "BPW", "PPL", "mean KLD", "same top token"), rows)
    conditions = results.get("conditions")
    text = conditions.get("text") if isinstance(conditions, dict) else None
    about = f" of {cell(Path(str(text)).name)}" if text else ""
    counts = [model.get("positions") for model in results["models"] if isinstance(model, dict)]
    tokens = next((f"{count} tokens" for count in counts if isinstance(count, int)), "the tokens")
    return f"{table}\n\nOver {tokens}{about}; ± is one standard error of the mean over chunks."


def _number(model: object, key: str) -> float:
    value = model.get(key) if isinstance(model, dict) else None
    return float(value) if isinstance(value, (int, float)) and abs(value) <= sys.float_info.max else math.nan
