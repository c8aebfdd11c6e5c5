"""The description of a model that the runtime executes: a list of blocks, each a list of parts that name their tensors.

    Model = embedding, Block(Attention, FeedForward or Experts) x n_layer, output norm, output

Every name is a GGUF tensor name; a name that is None is a tensor the file does not have. Shapes follow from HParams.
"""

from __future__ import annotations

from quantkit.archs.common.blocks.attention import Attention, BlockIndexer, HeadScaling, PooledIndexer, Temperature
from quantkit.archs.common.blocks.compressed import CompressedAttention, Compressor, EntryIndexer, EntrySizes
from quantkit.archs.common.blocks.feed_forward import Activation, Experts, FeedForward, Xielu
from quantkit.archs.common.blocks.hparams import HParams
from quantkit.archs.common.blocks.latent import Indexer, LatentAttention
from quantkit.archs.common.blocks.layers import Block, Head, MtpLayer, Part
from quantkit.archs.common.blocks.linear import Linear, Norm
from quantkit.archs.common.blocks.recurrence import (
    RECURRENT,
    DeltaNet,
    KimiDelta,
    Mamba2,
    Recurrence,
    ShortConv,
    StateShapes,
)
from quantkit.archs.common.blocks.residual import TABLE_MULTIPLE, Laurel, LayerInput, NGrams
from quantkit.archs.common.blocks.rope import Rope, Yarn
from quantkit.archs.common.blocks.streams import AltUp, AltUpHead, Connection, HyperConnection, StreamHead, StreamMixer

__all__ = [
    "RECURRENT",
    "TABLE_MULTIPLE",
    "Activation",
    "AltUp",
    "AltUpHead",
    "Attention",
    "Block",
    "BlockIndexer",
    "CompressedAttention",
    "Compressor",
    "Connection",
    "DeltaNet",
    "EntryIndexer",
    "EntrySizes",
    "Experts",
    "FeedForward",
    "HParams",
    "Head",
    "HeadScaling",
    "HyperConnection",
    "Indexer",
    "KimiDelta",
    "LatentAttention",
    "Laurel",
    "LayerInput",
    "Linear",
    "Mamba2",
    "MtpLayer",
    "NGrams",
    "Norm",
    "Part",
    "PooledIndexer",
    "Recurrence",
    "Rope",
    "ShortConv",
    "StateShapes",
    "StreamHead",
    "StreamMixer",
    "Temperature",
    "Xielu",
    "Yarn",
]
