"""Scores of lm-evaluation-harness with quantkit's models, compared with its own hf model on the exported checkpoint.

    python benchmarks/bench_lm_eval.py model.gguf --text tests/golden/eval.txt [--documents 40] [--numerics exact]

lm_eval has to be installed (`pip install 'quantkit[lm-eval]' 'lm_eval[hf]'`). Nothing is loaded from the network: the
tasks are made of a text. The model is exported to a Hugging Face directory in float32, which is lossless.

    choice     four continuations of a passage, one of them the text's own: acc, acc_norm
    rolling    passages: word_perplexity, byte_perplexity, bits_per_byte
    generate   the most probable continuation up to a line's end: exact_match of its first word

The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks import records
from benchmarks.records import Column, Table

TABLE = Table(
    "lm_eval",
    "Does lm-evaluation-harness give the same scores with quantkit's models?",
    (
        Column("task"),
        Column("metric"),
        Column("hf", "hf", ".6f"),
        Column("quantkit", "quantkit", ".6f"),
        Column("difference", "largest difference of a document", ".2g"),
    ),
    "hf is lm_eval's model on the checkpoint that `quantkit export` makes of the same file, in float32. The difference "
    "is that of log-likelihoods in nats, or the share of replies that differ.",
)
TASKS = ("choice", "rolling", "generate")
METRICS = {"choice": ("acc", "acc_norm"), "rolling": ("word_perplexity", "byte_perplexity", "bits_per_byte"),
           "generate": ("exact_match",)}  # fmt: skip
FILTERS = {"choice": "none", "rolling": "none", "generate": "first-word"}
_COMMON = """\
task: quantkit_{name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
"""
_BODY = {
    "choice": """\
output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list:
  - metric: acc
  - metric: acc_norm
""",
    "rolling": """\
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - metric: word_perplexity
  - metric: byte_perplexity
  - metric: bits_per_byte
""",
    "generate": """\
output_type: generate_until
doc_to_text: "{{context}}"
doc_to_target: "{{target}}"
generation_kwargs:
  until: ["\\n", "."]
  max_gen_toks: 24
filter_list:
  - name: first-word
    filter:
      - function: regex
        regex_pattern: '(\\S+)'
        group_select: 0
      - function: take_first
metric_list:
  - metric: exact_match
""",
}


def write_tasks(folder: Path, text: str, documents: int, seed: int = 1) -> None:
    """Write the three tasks, made of a text, as YAML and JSON lines."""
    rng = np.random.default_rng(seed)
    words = text.split()
    starts = rng.integers(0, len(words) - 80, documents)

    def passage(start: int, length: int) -> str:
        return " ".join(words[start : start + length])

    data: dict[str, list[dict[str, Any]]] = {name: [] for name in TASKS}
    for at in map(int, starts):
        answer = int(rng.integers(4))
        choices = [" " + passage(int(rng.integers(0, len(words) - 80)), int(rng.integers(1, 9))) for _ in range(4)]
        choices[answer] = " " + passage(at + 30, int(rng.integers(1, 9)))
        data["choice"].append({"context": passage(at, 30), "choices": choices, "answer": answer})
        data["rolling"].append({"text": passage(at, int(rng.integers(5, 80)))})
        data["generate"].append({"context": passage(at, 30), "target": words[at + 30]})
    for name in TASKS:
        file = folder / f"{name}.jsonl"
        file.write_text("\n".join(map(json.dumps, data[name])) + "\n")
        (folder / f"{name}.yaml").write_text(_COMMON.format(name=name, data=file) + _BODY[name])


def evaluate(
    model: str, arguments: dict[str, Any], folder: Path, name: str, batch: str
) -> tuple[dict[str, Any], float]:
    """lm_eval's results and samples of one task, and the seconds that they took, with opening the model."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    started = time.perf_counter()
    found = lm_eval.simple_evaluate(
        model=model, model_args=arguments, tasks=[f"quantkit_{name}"], batch_size=batch, device="cpu",
        task_manager=TaskManager(include_path=str(folder), include_defaults=False), log_samples=True,
        bootstrap_iters=0,
    )  # fmt: skip
    return found, time.perf_counter() - started


def difference(ours: dict[str, Any], theirs: dict[str, Any], name: str) -> float:
    """The largest difference of a log-likelihood, or the share of replies that differ."""
    pairs = []
    for samples in (ours, theirs):
        of_task = sorted(samples["samples"][f"quantkit_{name}"], key=lambda sample: sample["doc_id"])
        pairs.append([response for sample in of_task for request in sample["resps"] for response in request])
    if name == "generate":
        return float(np.mean([a != b for a, b in zip(*pairs)]))
    values = [[r[0] if isinstance(r, (tuple, list)) else r for r in responses] for responses in pairs]
    return float(np.abs(np.subtract(*np.asarray(values, np.float64))).max())


def rows(model: Path, checkpoint: Path, folder: Path, batch: str = "8", **options: Any) -> list[dict[str, Any]]:
    """A row for each metric of each task. The checkpoint is the exported model."""
    from quantkit.evaluate import harness

    harness.register()
    found = []
    for name in TASKS:
        hf = {"pretrained": str(checkpoint), "dtype": "float32"}
        theirs, hf_seconds = evaluate("hf", hf, folder, name, batch)
        ours, seconds = evaluate("quantkit", {"path": str(model), **options}, folder, name, batch)
        for metric in METRICS[name]:
            a, b = (r["results"][f"quantkit_{name}"][f"{metric},{FILTERS[name]}"] for r in (theirs, ours))
            found.append({"task": name, "metric": metric, "hf": a, "quantkit": b,
                          "difference": difference(ours, theirs, name), "hf_seconds": hf_seconds,
                          "seconds": seconds})  # fmt: skip
    return found


def main() -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before lm_eval is imported
    os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
    """Export, evaluate with both and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--documents", type=int, default=40)
    parser.add_argument("--numerics", default="exact")
    parser.add_argument("--batch", default="8")
    records.add_option(parser)
    options = parser.parse_args()
    from quantkit.pipelines import api

    with tempfile.TemporaryDirectory(prefix="bench-lm-eval-") as name:
        folder = Path(name)
        api.export(options.model, folder / "hf")
        (folder / "tasks").mkdir()
        write_tasks(folder / "tasks", options.text.read_text(encoding="utf-8"), options.documents)
        found = rows(options.model, folder / "hf", folder / "tasks", options.batch, numerics=options.numerics)
    for row in found:
        print(f"{row['task']:9} {row['metric']:16} {row['hf']:12.6f} {row['quantkit']:12.6f} "
              f"{row['difference']:9.2g} {row['hf_seconds']:7.1f} {row['seconds']:7.1f}")  # fmt: skip
    records.save(TABLE, found, options)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
