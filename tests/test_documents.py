"""Documents that quantkit reads: any value replaced by one of another type ends in an error of ours, or is taken.

A document is JSON of known form, written as its own program writes it. Each place in it gets each of VALUES in turn,
and is taken out; then the command's functions read it.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quantkit
from quantkit.cli.common.repository_card import read_results, repository_card
from quantkit.errors import QuantkitError
from quantkit.evaluate.chunk_log import ChunkLog
from quantkit.evaluate.corpus import conversations as read_conversations
from quantkit.evaluate.corpus import texts_by_category
from quantkit.evaluate.imatrix import collect as collecting
from quantkit.evaluate.imatrix import saved_run
from quantkit.formats import gguf
from quantkit.formats.safetensors import open_checkpoint
from quantkit.formats.safetensors.peft_adapter import open_adapter
from quantkit.formats.safetensors.quantized import unscaled
from quantkit.inputs import json_input
from quantkit.pipelines import prune
from quantkit.pipelines.conversion.metadata import general_keys
from quantkit.placement.allocation import costs
from quantkit.recipe.planning.replay import replay
from quantkit.serve import requests
from quantkit.serve.requests import ApiError
from quantkit.tokenizers import vocab
from quantkit.tokenizers.tokenizer import Tokenizer
from tests.archs.checkpoints import byte_level, sentencepiece, tiny, write_tokenizer
from tests.archs.files import written

VALUES: tuple[Any, ...] = (0, 1, -1, 1 << 31, 10**400, 0.5, float("nan"), True, "", "x", "\ud800", None, [], [0], ["x"],
                           [[1]], {}, {"x": 1}, {"content": 5})  # fmt: skip
_ABSENT = object()
_MANY, _CHILDREN = 16, 4  # of a larger list or object the first few are changed: the others are like them
Reader = Callable[[Any], object]


def mutants(document: Any) -> Iterator[Any]:
    """Copies of a document with one value changed or taken out."""

    for path in _places(document, ()):
        for value in (*VALUES, _ABSENT):
            changed = copy.deepcopy(document)
            *way, last = path
            parent = changed
            for key in way:
                parent = parent[key]
            if value is _ABSENT:
                del parent[last]
            else:
                parent[last] = value
            yield changed


def _places(node: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    keys = list(node) if isinstance(node, dict) else list(range(len(node))) if isinstance(node, list) else []
    for key in keys[: _CHILDREN if len(keys) > _MANY else None]:
        yield (*path, key)
        yield from _places(node[key], (*path, key))


def in_file(path: Path, read: Callable[[], object]) -> Reader:
    """A reader of a file that holds the document."""

    def reader(document: Any) -> object:
        path.write_text(json.dumps(document))
        return read()

    return reader


# ------------------------------------------------------------------------------------------------------------ documents


def tokenizer(tmp_path: Path, name: str, kind: str) -> tuple[Any, Reader]:
    original = sentencepiece() if kind == "llama" else byte_level()
    original["added_tokens"].append(
        original["added_tokens"][0] | {"id": len(original["model"]["vocab"]), "content": "<x>", "special": False}
    )
    written_as = {
        "tokenizer_config.json": {
            "bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>", "add_bos_token": True,
            "chat_template": [{"name": "default", "template": "{{ messages }}"}], "tokenizer_class": "LlamaTokenizer",
            "added_tokens_decoder": {"0": {"content": "<unk>", "special": True}},
            "additional_special_tokens": ["<s>"],
        },
        "special_tokens_map.json": {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "unk_token": "<unk>"},
        "generation_config.json": {"bos_token_id": 1, "eos_token_id": [1, 2], "temperature": 0.5, "top_k": 3},
        "chat_template.json": {"chat_template": "{{ messages }}"},
    }  # fmt: skip
    write_tokenizer(tmp_path / "t", original)
    for file, document in written_as.items():
        (tmp_path / "t" / file).write_text(json.dumps(document))

    def read() -> None:
        made = vocab.read(tmp_path / "t", {"vocab_size": 410, "bos_token_id": 1})
        Tokenizer.from_gguf({key: value for key, (value, _) in made.items()}).encode("a b<x>")

    return (original if name == "tokenizer.json" else written_as[name]), in_file(tmp_path / "t" / name, read)


def overrides(tmp_path: Path, kind: str) -> tuple[Any, Reader]:
    """The key of a GGUF that holds what the tokenizer's other keys cannot express."""
    original = sentencepiece() if kind == "llama" else byte_level()
    write_tokenizer(tmp_path, original)
    metadata = {key: value for key, (value, _) in vocab.read(tmp_path, {"vocab_size": 410}).items()}
    document = {"normalizer": original["normalizer"] or {"type": "NFC"}, "unmerged": [300], "ignore_merges": True,
                "byte_fallback": True, "added_tokens": {"1": {"lstrip": True, "normalized": False}}}  # fmt: skip

    def read(changed: Any) -> None:
        Tokenizer.from_gguf(metadata | {vocab.OVERRIDES: json.dumps(changed)}).encode("a b<s>")

    return document, read


def merges(tmp_path: Path, name: str) -> tuple[Any, Reader]:
    model = byte_level()["model"]
    files = {
        "vocab.json": model["vocab"],
        "added_tokens.json": {"<x>": len(model["vocab"])},
        "special_tokens_map.json": {"eos_token": {"content": "<|end|>"}, "additional_special_tokens": ["<x>"]},
        "tokenizer_config.json": {"tokenizer_class": "GPT2Tokenizer", "added_tokens_decoder": {"0": {"content": "a"}}},
    }
    for file, document in files.items():
        (tmp_path / file).write_text(json.dumps(document))
    pairs = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    (tmp_path / "merges.txt").write_text("\n".join(pairs))
    return files[name], in_file(tmp_path / name, lambda: vocab.read(tmp_path, {"vocab_size": 410}))


def costs_file(tmp_path: Path) -> tuple[Any, Reader]:
    tensor = costs.TensorCost((64, 32), 0.1, 0.01, 1.0, {"q4_0": (0.5, 0.1), "q8_0": (0.01, 0.001)})
    document = costs.Costs({"blk.0.ffn_up.weight": tensor}, {"model": "m", "types": ["q4_0"]}).to_json()
    return document, lambda changed: costs.from_json(changed).to_json()


def plan(tmp_path: Path) -> tuple[Any, Reader]:
    path = written(tmp_path / "m.gguf", "llama", tokenizer=True)
    document = quantkit.plan(path, "Q4_0", quantkit.PlanOptions(recipe="ffn_down=q6_0")).to_json()
    tensors = list(gguf.open(path).tensors.values())
    return document, lambda changed: replay(changed, tensors).to_json()


def adapter(tmp_path: Path) -> tuple[Any, Reader]:
    from tests.test_lora import save_adapter

    model = tiny(tmp_path / "hf", "float32", "llama")
    save_adapter(tmp_path / "a", model, {"rank_pattern": {"v_proj": 2}, "alpha_pattern": {"v_proj": 3}})
    path = tmp_path / "a" / "adapter_config.json"
    return json.loads(path.read_text()), in_file(path, lambda: open_adapter(tmp_path / "a"))


def imatrix_run(tmp_path: Path) -> tuple[Any, Reader]:
    saved_run.SavedRun("run", [collecting.TextState(collecting.Collector())]).save(tmp_path / "r")
    with np.load(tmp_path / "r") as file:
        arrays = dict(file)

    def read(document: Any) -> None:
        arrays["about"] = np.frombuffer(json.dumps(document).encode(), np.uint8)
        with (tmp_path / "r").open("wb") as stream:
            np.savez(stream, **arrays)
        saved_run.SavedRun.load(tmp_path / "r")

    return json.loads(arrays["about"].tobytes()), read


def chunk_log(tmp_path: Path) -> tuple[Any, Reader]:
    path = tmp_path / "log.jsonl"
    with ChunkLog(path, "run", 2, 1, {"n_ctx": 16}) as log:
        for _ in range(2):
            log.add(np.ones(2), top=np.ones(2), of="x")

    def read(lines: Any) -> None:
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        found = ChunkLog(path, "run", 2, 1, {"n_ctx": 16})
        found.numbers("top")
        found.texts("of")

    return [json.loads(line) for line in path.read_text().splitlines()], read


def conversations(tmp_path: Path) -> tuple[Any, Reader]:
    document = {"messages": [{"role": "user", "content": "x"}, {"from": "gpt", "value": "y"}], "category": "c"}
    return document, in_file(tmp_path / "c.jsonl", lambda: read_conversations(tmp_path / "c.jsonl"))


def categories(tmp_path: Path) -> tuple[Any, Reader]:
    path = tmp_path / "c.jsonl"
    return {"text": "x", "category": "c"}, in_file(path, lambda: texts_by_category(path))


def results(tmp_path: Path) -> tuple[Any, Reader]:
    path, model = tmp_path / "r.json", written(tmp_path / "m.gguf", "llama", tokenizer=True)
    row = {"name": "x", "bytes": 5, "kld": 0.1, "kld_error_over_chunks": 0.1, "same_top": 0.5, "ppl": 3.0,
           "bits_per_weight": 4.5, "positions": 7}  # fmt: skip
    document = {"schema": "quantkit.compare/1", "models": [row], "conditions": {"text": "a.txt"}}
    return document, in_file(path, lambda: repository_card("t", [gguf.open(model)], {}, read_results(path)))


def saliencies(tmp_path: Path) -> tuple[Any, Reader]:
    layers = {"0": {"saliency": [1.0, 2.0]}, "1": {"saliency": [1.0, 2.0]}}
    path, document = tmp_path / "s.json", {"schema": prune.SALIENCY, "layers": layers}
    read = in_file(path, lambda: prune.most_salient(prune.saliencies(json_input.read_object(path), path, 2), 1))
    return document, read


def experts(tmp_path: Path) -> tuple[Any, Reader]:
    path, model = tmp_path / "e.json", gguf.open(written(tmp_path / "m.gguf", "qwen3moe", tokenizer=True))
    layers = range(int(str(model.metadata.get("qwen3moe.block_count"))))

    def read() -> None:
        prune.plan_prune(model, prune.kept_experts(json_input.read_object(path), path), ())

    return {"keep": {str(layer): [0, 1] for layer in layers}}, in_file(path, read)


def stated(tmp_path: Path, name: str) -> tuple[Any, Reader]:
    """What describes a model: `--metadata`, the same of an export, and the sampling parameters."""
    document = {"general.author": "a", "general.tags": ["x"], "general.base_model.count": 1, "general.version": "1",
                "general.base_model.0.name": "b", "general.sampling.top_k": 3,
                "general.sampling.temp": 0.5}  # fmt: skip
    if name == "generation_config.json":
        document = {"temperature": 0.5, "top_k": 3, "top_p": 0.5, "repetition_penalty": 1.1}
    option = tmp_path / name if name == "m.json" else None

    def read() -> None:
        kind = quantkit.types.get("f16")
        keys = general_keys(tmp_path, {"_name_or_path": "o/m"}, "llama", [], kind, [], option, None)
        for key, (value, form) in keys.items():
            gguf.Metadata().set(key, value, form)

    return document, in_file(tmp_path / name, read)


def served(tmp_path: Path, name: str) -> tuple[Any, Reader]:
    common = {"model": "m", "temperature": 0.5, "max_tokens": 3, "stop": ["x"], "stream": True, "seed": 1,
              "stream_options": {"include_usage": True}, "top_p": 0.5, "top_k": 3}  # fmt: skip
    if name == "chat":
        content = [{"type": "text", "text": "x"}]
        document = common | {"messages": [{"role": "user", "content": "x"}, {"role": "user", "content": content}]}
        return document, lambda changed: requests.chat(json.dumps(changed).encode(), "m")
    document = common | {"prompt": ["x"], "echo": True}
    return document, lambda changed: requests.completion(json.dumps(changed).encode(), "m")


def quantized(tmp_path: Path, kind: str) -> tuple[Any, Reader]:
    """Files of settings beside a checkpoint, and the state of NF4."""
    from tests.formats.checkpoints import written_in_shards
    from tests.formats.quantized import test_awq, test_bitsandbytes

    rng = np.random.default_rng(1)
    if kind == "awq":
        tensors, _ = test_awq.layer(rng, "gemm", 48, 64, 32)
        directory = written_in_shards(tmp_path / "c", tensors, 2).path
        path, document = directory / "quant_config.json", {"w_bit": 4, "q_group_size": 32, "zero_point": True,
                                                           "version": "GEMM"}  # fmt: skip
        return document, in_file(path, lambda: list(unscaled(open_checkpoint(directory), {}).tensors))
    if kind == "modelopt":
        directory = tmp_path / "hf"
        tiny(directory, "bfloat16", "llama")
        config = {"quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"],
                                   "quantized_layers": {"model.layers.0": {"quant_algo": "FP8"}},
                                   "kv_cache_quant_algo": "FP8"}}  # fmt: skip
        path = directory / "hf_quant_config.json"
        return config, in_file(path, lambda: list(unscaled(open_checkpoint(directory), {}).tensors))
    tensors = test_bitsandbytes.layer(rng, 6, 128, True)
    name = "a.weight.quant_state.bitsandbytes__nf4"

    def read(document: Any) -> None:
        changed = tensors | {name: ("U8", np.frombuffer(json.dumps(document).encode(), np.uint8))}
        shutil.rmtree(tmp_path / "c", ignore_errors=True)
        made = written_in_shards(tmp_path / "c", changed, 1)
        for t in unscaled(made, {"quantization_config": test_bitsandbytes.SETTINGS}).tensors.values():
            t.rows(0, t.shape[0]) if len(t.shape) > 1 else None

    return json.loads(tensors[name][1].tobytes()), read


def index(tmp_path: Path) -> tuple[Any, Reader]:
    from tests.formats.checkpoints import written_in_shards

    x = np.ones((4, 4), "<f4")
    written_in_shards(tmp_path / "c", {"a": ("F32", x), "b": ("F32", x)}, 2)
    path = tmp_path / "c" / "model.safetensors.index.json"
    return json.loads(path.read_text()), in_file(path, lambda: open_checkpoint(tmp_path / "c"))


DOCUMENTS: dict[str, Callable[[Path], tuple[Any, Reader]]] = {
    "tokenizer.json, llama": lambda p: tokenizer(p, "tokenizer.json", "llama"),
    "tokenizer.json, gpt2": lambda p: tokenizer(p, "tokenizer.json", "gpt2"),
    "tokenizer_config.json": lambda p: tokenizer(p, "tokenizer_config.json", "llama"),
    "special_tokens_map.json": lambda p: tokenizer(p, "special_tokens_map.json", "llama"),
    "generation_config.json": lambda p: tokenizer(p, "generation_config.json", "llama"),
    "chat_template.json": lambda p: tokenizer(p, "chat_template.json", "llama"),
    "overrides, llama": lambda p: overrides(p, "llama"),
    "overrides, gpt2": lambda p: overrides(p, "gpt2"),
    "vocab.json": lambda p: merges(p, "vocab.json"),
    "added_tokens.json": lambda p: merges(p, "added_tokens.json"),
    "special_tokens_map.json beside vocab.json": lambda p: merges(p, "special_tokens_map.json"),
    "tokenizer_config.json beside vocab.json": lambda p: merges(p, "tokenizer_config.json"),
    "costs": costs_file,
    "plan": plan,
    "adapter_config.json": adapter,
    "saved run of imatrix": imatrix_run,
    "chunk log": chunk_log,
    "conversations": conversations,
    "texts with categories": categories,
    "results of compare": results,
    "saliencies": saliencies,
    "experts to keep": experts,
    "--metadata": lambda p: stated(p, "m.json"),
    "metadata of an export": lambda p: stated(p, vocab.METADATA_FILE),
    "sampling parameters": lambda p: stated(p, "generation_config.json"),
    "request for a completion": lambda p: served(p, "completion"),
    "request for a chat": lambda p: served(p, "chat"),
    "quant_config.json": lambda p: quantized(p, "awq"),
    "hf_quant_config.json": lambda p: quantized(p, "modelopt"),
    "state of NF4": lambda p: quantized(p, "nf4"),
    "index of safetensors": index,
}  # fmt: skip


@pytest.mark.parametrize("name", DOCUMENTS)
def test_values_of_other_types_end_in_errors_of_ours(tmp_path: Path, name: str) -> None:
    document, read = DOCUMENTS[name](tmp_path)
    read(document)
    outcomes = [outcome(read, changed) for changed in mutants(document)]
    assert [found for found in outcomes if found not in ("read", "refused")] == []


def outcome(read: Callable[[Any], object], document: Any) -> str:
    """What comes of a document: "read", "refused" by an error of ours, or another exception and its document."""
    try:
        read(document)
    except (QuantkitError, ApiError):
        return "refused"
    except Exception as error:
        return f"{error!r} from {document!r:.2000}"
    return "read"
