"""A layer as a list of parts, the head, and layers that predict further tokens."""

from __future__ import annotations

from dataclasses import dataclass

from quantkit.archs.common.blocks.attention import Attention
from quantkit.archs.common.blocks.compressed import CompressedAttention
from quantkit.archs.common.blocks.feed_forward import Experts, FeedForward
from quantkit.archs.common.blocks.latent import LatentAttention
from quantkit.archs.common.blocks.linear import Linear, Norm
from quantkit.archs.common.blocks.recurrence import DeltaNet, KimiDelta, Mamba2, ShortConv
from quantkit.archs.common.blocks.residual import Laurel, LayerInput, NGrams
from quantkit.archs.common.blocks.streams import AltUp, AltUpHead, HyperConnection, StreamHead, StreamMixer

Part = (
    Attention
    | LatentAttention
    | CompressedAttention
    | DeltaNet
    | KimiDelta
    | Mamba2
    | ShortConv
    | FeedForward
    | Experts
    | LayerInput
    | Laurel
    | NGrams
)


@dataclass(frozen=True)
class Block:
    """One layer: its number and its parts, in the order in which they are computed.

    With `parallel` the parts have the same norm, and what each makes of the layer's input is added to it. All that
    leaves the block is multiplied by `out_scale`, a tensor float32[1].

    With `hyper`, one for each part, the block gets and gives streams float32[tokens, streams * n_embd], and what a part
    adds to the stream that it reads is given to all of them instead; None: the part reads and adds to all streams. With
    `altup` it gets and gives streams too.
    """

    layer: int
    parts: tuple[Part, ...]
    parallel: bool = False
    out_scale: str | None = None
    hyper: tuple[HyperConnection | StreamMixer | None, ...] = ()
    altup: AltUp | None = None
    layers: tuple[int, ...] = ()  # of each part, whose cache or state it uses; () where all are `layer`

    @property
    def numbered_parts(self) -> tuple[tuple[int, Part], ...]:
        """The layer of each part, and the part."""
        return tuple(zip(self.layers or (self.layer,) * len(self.parts), self.parts, strict=True))


@dataclass(frozen=True)
class Head:
    """Embedding, final norm and output matrix. If the two matrices are tied, `output` names the embedding.

    With a StreamHead or a StreamMixer, each stream of the first block is the embedding. Without a norm, the output
    matrix gets what the streams become.
    """

    embedding: str
    norm: Norm | None
    output: Linear
    embedding_scale: float = 1.0  # factor of the rows of the embedding
    embedding_factor: str | None = None  # tensor float32[1], another one: the scale of an NVFP4 embedding
    softcap: float | None = None  # c: logits x become c tanh(x / c)
    streams: StreamHead | StreamMixer | AltUpHead | None = None


@dataclass(frozen=True)
class MtpLayer:
    """A layer that predicts one token more: of the hidden state of a token and the token after it, the next but one.

    With h the trunk's state after its last norm, and e the row of `embedding` of the token after it:

        x       projection([enorm(e), hnorm(h)]), the embedding first
        g       norm(block(x)), causal over the x of all tokens before
        logits  output(g)

    A further step takes g in place of h, with the layer after this one, or with the last one again. llama.cpp,
    ik_llama.cpp (`build_mtp_input`) and SGLang (`deepseek_nextn`) do so; vLLM's `deepseek_mtp` passes block(x) on.
    """

    embedding: str
    enorm: Norm
    hnorm: Norm
    projection: Linear  # [n_embd, 2 n_embd]
    block: Block
    norm: Norm | None
    output: Linear
    embedding_scale: float = 1.0
    embedding_factor: str | None = None  # as in Head
