"""Vision towers: image encoders with the projector to a language model's embeddings, as llama.cpp's clip loader reads.

One file a tower: `qwen3vl`, `gemma3`, `pixtral`. A tower says which keys and tensors its file has, from which tensors
of a checkpoint they come, and what it computes, in plain numpy (`tower.Tower`, `tower.embed`). `operations` has the
parts that they share. `convert --mmproj` (`pipelines/conversion/mmproj.py`) writes the file.

    of_config(config)            the tower of a config.json
    embed(gguf.open(path), image)     float32[tokens, n] of a normalised image float32[3, height, width]

Imports nothing above `archs`, whose transforms and checks of settings it uses.
"""

from __future__ import annotations

from quantkit.vision.gemma3 import Gemma3Tower
from quantkit.vision.pixtral import PixtralTower
from quantkit.vision.qwen3vl import Qwen3VLTower
from quantkit.vision.tower import Tower, embed, of_config

__all__ = ["Gemma3Tower", "PixtralTower", "Qwen3VLTower", "Tower", "embed", "of_config"]
