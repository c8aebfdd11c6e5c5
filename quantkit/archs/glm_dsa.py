"""glm-dsa: GLM-5. deepseek32 whose indexers rotate neighbouring elements, and which only some layers may have.

The layers without an indexer (`"shared"` in indexer_types; from GLM-5.2 on) attend to the positions that the last layer
before them with one has selected. Without the key attention.indexer.types every layer has one, as in GLM-5 and 5.1, or
with a context of 2^20 the first two and every fourth, as in GLM-5.2. The first layer has one always.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from quantkit.archs.common.base import Config, Keys, need
from quantkit.archs.common.tensors import LazyTensor
from quantkit.archs.deepseek32 import DeepSeek32
from quantkit.errors import FormatError
from quantkit.formats.gguf.metadata import Entries
from quantkit.inputs.settings import integer, sequence

_LONG_CONTEXT = 1 << 20  # of GLM-5.2, whose first files have no key
_KINDS = {"full": True, "shared": False}


class GlmDsa(DeepSeek32):
    """GLM-5."""

    name = "glm-dsa"
    hf: ClassVar[tuple[str, ...]] = ("GlmMoeDsaForCausalLM",)
    model_type = "glm_moe_dsa"
    defaults: ClassVar[dict[str, Any]] = {"routed_scaling_factor": 2.5}
    index_rope_style = "norm"
    EXAMPLE: ClassVar[dict[str, Any]] = DeepSeek32.EXAMPLE | {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "num_hidden_layers": 4,
        "rope_scaling": None,
        "indexer_types": ["full", "full", "shared", "full"],
    }

    def metadata(self, config: Config) -> Entries:
        entries = super().metadata(config)
        if (kinds := _indexers(config)) and not all(kinds):
            kinds += [True] * (entries[f"{self.name}.block_count"][0] - len(kinds))
            entries[f"{self.name}.attention.indexer.types"] = (kinds, "bool")
        return entries

    def config(self, metadata: Mapping[str, object], tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
        hp = self.hparams(metadata, tensors.keys())
        kinds = ["full" if has else "shared" for has in hp.has_indexer[: hp.n_main]]
        return super().config(metadata, tensors) | {"indexer_types": kinds}

    def numbers(self, keys: Keys, tensors: Collection[str]) -> dict[str, Any]:
        found = super().numbers(keys, tensors)
        given = keys.get("attention.indexer.types")
        layers, main = found["n_layer"], found["n_layer"] - found["n_mtp_layers"]
        if given is None and found["n_ctx_train"] < _LONG_CONTEXT:
            return found
        if given is None:
            given = [i < 2 or i % 4 == 2 for i in range(main)]
        if len(given) not in (layers, main) or not given[0]:
            raise FormatError(
                f"metadata key {self.name}.attention.indexer.types has {len(given)} entries, the first {given[:1]}; it "
                f"has to have one for each of {main} layers ({layers} with MTP layers), the first of them true"
            )
        return found | {"has_indexer": (*map(bool, given), *(True,) * (layers - len(given)))}


def _indexers(config: Config) -> list[bool]:
    """Whether each layer has an indexer, from any form of config.json; [] where it does not say."""
    layers = int(need(config, "num_hidden_layers"))
    kinds: list[object] = list(sequence(config, "indexer_types"))
    pattern = config.get("index_topk_pattern")
    if not kinds and pattern:
        kinds = [{"F": "full", "S": "shared"}.get(kind, kind) for kind in pattern]  # type: ignore[attr-defined]
    if not kinds and (every := integer(config, "index_topk_freq")) > 1:
        offset = int(config.get("index_skip_topk_offset") or 2)  # type: ignore[call-overload]
        kinds = ["shared" if max(i - offset + 1, 0) % every else "full" for i in range(layers)]
    if not kinds:
        return []
    unknown = [kind for kind in kinds if not isinstance(kind, str) or kind not in _KINDS]
    if unknown or len(kinds) < layers or kinds[0] != "full":
        raise FormatError(
            f'config.json: indexer_types = {kinds!r:.80}; it has to name "full" or "shared" for each of {layers} '
            "layers, the first of them full"
        )
    return [_KINDS[str(kind)] for kind in kinds[:layers]]
