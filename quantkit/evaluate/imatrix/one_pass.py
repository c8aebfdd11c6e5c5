"""Quantize a model while its importance matrix is measured, one layer at a time: no matrix is stored, none is read.

    hidden states of all chunks -> a layer -> importance and second moments of its inputs -> its tensors are encoded

The output matrix, or the embedding that serves as output, comes behind the last layer if second moments are measured.
With `propagate="original"` the original layer makes the hidden states of the next one, and the file has the bytes that
`imatrix`, of one text and to a GGUF file, and `quantize` in turn give. With "quantized" the encoded layer makes them,
so that later layers are measured on the inputs that they will get, as GPTQ does.

Memory: the sums of one layer, and the states of all chunks (`layer_by_layer`), in temporary files if they are large. A
checkpoint's tensors are computed when they are read; its files are fetched then, if it is on the Hub. An interrupted
run resumes: the finished layers run again, but are not measured.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from quantkit.errors import OptionError, UnknownNameError
from quantkit.evaluate.chunk_runs import check_context
from quantkit.evaluate.corpus import require_different
from quantkit.evaluate.imatrix.collect import Collector, chosen_weights, collects_output
from quantkit.evaluate.imatrix.mtp import mtp_head, observe_batches
from quantkit.evaluate.imatrix.second_moments import (
    InputForm,
    MomentsCollector,
    MomentsForm,
    measured_shapes,
    output_matrix,
    plan_forms,
    sizes,
)  # fmt: skip
from quantkit.evaluate.layers.checkpoint_model import CheckpointModel
from quantkit.evaluate.layers.layer_by_layer import LayerRun, chunk_batches, state_bytes, whole_batches
from quantkit.evaluate.text import DEFAULT_BATCH, DEFAULT_CONTEXT, Chunks, chunked
from quantkit.formats import gguf
from quantkit.formats.imatrix import Imatrix, check_policy, fill_missing
from quantkit.formats.safetensors import CheckpointTensor
from quantkit.hub.files import CheckpointFiles
from quantkit.pipelines import api, planning
from quantkit.pipelines.calibration import Stage
from quantkit.pipelines.conversion.tensor import OutputTensor
from quantkit.pipelines.options import PathLike, QuantizeOptions
from quantkit.recipe import PlannedTensor
from quantkit.runtime.scale_check import layer_of

if TYPE_CHECKING:
    from quantkit.archs.common.blocks import Block
    from quantkit.formats.pipeline import Progress
    from quantkit.pipelines.conversion.plan import CheckpointView, Conversion
    from quantkit.runtime.model import Model
    from quantkit.runtime.mtp import MtpHead

PROPAGATED = ("original", "quantized")
_OUTPUT = sys.maxsize  # stands for the output matrix where layers have numbers


@dataclass(frozen=True, kw_only=True)
class CalibrationOptions:
    """Options of `quantize_calibrated`: flags of `quantkit quantize` that go with --calibrate.

    ctx_size             tokens per chunk
    chunks               at most this many chunks of each text; None: all
    propagate            what makes the inputs of the next layer: the "original" layer or the "quantized" one
    second_moments       form: "full", "rank:N", "blocks:N" or "auto"; "" measures importance only
    second_moments_size  bytes of memory that the sums of a layer may take; None: no limit
    token_weights        as of `ImatrixOptions`
    missing_experts      for experts without tokens: "weight-one", "layer-mean" or "error"
    batch_size           tokens per batch, in whole chunks
    """

    ctx_size: int = DEFAULT_CONTEXT
    chunks: int | None = None
    propagate: str = "original"
    second_moments: str = "full"
    second_moments_size: int | None = None
    token_weights: str = ""
    missing_experts: str = "weight-one"
    batch_size: int = DEFAULT_BATCH


def quantize_calibrated(
    source: PathLike | gguf.GGUF | Conversion,
    output: PathLike,
    type: str | None,
    texts: PathLike | Sequence[PathLike],
    options: QuantizeOptions | None = None,
    calibration: CalibrationOptions | None = None,
    *,
    progress: Progress | bool = False,
    on_message: Callable[[str], None] = lambda text: None,
) -> api.QuantizeResult:
    """Quantize a GGUF file or a checkpoint directory, with importance measured on `texts` while it is written.

    `source`, `output`, `type`, `options`, `progress`, `on_message`, the result and the errors are those of `quantize`.
    `calibration` are the settings of the measurement. OptionError for options that name an importance matrix or an
    older file, DataError for a text that is too short.
    """
    job = prepare(source, type, texts, options, calibration, on_message=on_message)
    if job.options.strict:
        job.plan.require_clean()
    return job.write(output, progress=progress, on_message=on_message)


def prepare(
    source: PathLike | gguf.GGUF | Conversion,
    type: str | None,
    texts: PathLike | Sequence[PathLike],
    options: QuantizeOptions | None = None,
    calibration: CalibrationOptions | None = None,
    *,
    on_message: Callable[[str], None] = lambda text: None,
) -> api.Quantization:
    """Plan the job and open model and texts; nothing runs and nothing is written."""
    options, o = options or QuantizeOptions(), calibration or CalibrationOptions()
    if options.imatrix is not None:
        raise OptionError("--imatrix and --calibrate both give the importance; drop one of them")
    if options.partial_requant or options.reuse:
        raise OptionError("--calibrate measures every tensor anew, so nothing of an older file can be reused")
    if o.propagate not in PROPAGATED:
        raise UnknownNameError("choice of --propagate", o.propagate, PROPAGATED)
    check_policy(o.missing_experts)
    form = MomentsForm.parse(o.second_moments) if o.second_moments and not options.no_second_moments else None
    opened = planning.open_model(source, weights=True, options=options, mtp=options.mtp, in_any_order=True)
    assert opened.file is not None
    _announce_layers(opened.file)
    model = _load(opened.file, options.threads, o.ctx_size)
    o = replace(o, token_weights=chosen_weights(o.token_weights, form is not None))
    model.weighs_tokens = o.token_weights == "attention"
    paths = [Path(text) for text in ([texts] if isinstance(texts, (str, os.PathLike)) else texts)]
    require_different(paths)
    chunks = _joined([chunked(model.tokenizer, path, o.ctx_size, o.chunks) for path in paths])
    check_context(model, o.ctx_size)
    head = mtp_head(model, on_message)
    layers = {block.layer for block in [*model.blocks, *(layer.block for layer in (head.layers if head else []))]}
    output = _output_matrix(model, form)
    measured = planning.complete_imatrix([
        t for t in opened.tensors
        if t.name == output or (layer_of(t.name) in layers and ".nextn.embed_tokens." not in t.name)
    ])  # fmt: skip
    measured = replace(measured, chunks=len(chunks), dataset=chunks.source, chunk_size=o.ctx_size)
    names = replace(options, imatrix=measured, no_second_moments=False)
    job = api.prepare_quantize(opened, type, names)
    one_pass = _OnePass(model, head, chunks, form, o)
    on_message(one_pass.announcement())
    return replace(job, calibration=one_pass)


def _announce_layers(file: gguf.GGUF | CheckpointView) -> None:
    """Tell what fetches a checkpoint from the Hub which of its tensors make a layer."""
    arrivals = getattr(file, "arrivals", None)
    if isinstance(arrivals, CheckpointFiles):
        inputs: dict[int, list[CheckpointTensor]] = {}
        for tensor in file.tensors.values():
            if isinstance(tensor, OutputTensor) and (layer := layer_of(tensor.name)) is not None:
                inputs.setdefault(layer, []).extend(tensor.inputs)
        arrivals.reads_together(inputs.values())


def _load(file: gguf.GGUF | CheckpointView, threads: int | None, n_ctx: int) -> Model:
    from quantkit.runtime import loading

    opened = file if isinstance(file, gguf.GGUF) else CheckpointModel.of(file)
    return loading.load(opened, threads=threads, n_ctx=n_ctx)


def _output_matrix(model: Model, form: MomentsForm | None) -> str | None:
    """The name of the output matrix, if it is measured."""
    return output_matrix(model.weights) if collects_output(None, form is not None) else None


def _joined(parts: list[Chunks]) -> Chunks:
    """The chunks of all texts, one after another."""
    tokens, inputs = (np.concatenate([getattr(part, name) for part in parts]) for name in ("tokens", "inputs"))
    return Chunks(tokens, inputs, "+".join(part.source for part in parts))


class _OnePass:
    """A `Calibration` that runs the model; see the module."""

    def __init__(
        self,
        model: Model,
        head: MtpHead | None,
        chunks: Chunks,
        form: MomentsForm | None,
        options: CalibrationOptions,
    ):
        self._model, self._head, self._chunks, self._form, self._options = model, head, chunks, form, options
        self._mtp = [layer.block.layer for layer in head.layers] if head is not None else []
        self._output = _output_matrix(model, form)
        layers = [*(block.layer for block in model.blocks), *self._mtp, *([_OUTPUT] if self._output else [])]
        self._forms = {layer: self._plan_forms(layer) for layer in layers} if form else {}

    def _layer_of(self, name: str) -> int | None:
        return _OUTPUT if name == self._output else layer_of(name)

    def _plan_forms(self, layer: int) -> dict[str, InputForm]:
        assert self._form is not None
        return plan_forms(self._shapes(layer), self._form, self._options.second_moments_size)

    def _shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        own = [t for t in self._model.weights.values() if self._layer_of(t.name) == layer]
        return measured_shapes(own, process_output=layer == _OUTPUT)

    def announcement(self) -> str:
        """What will be run, and the memory that it takes."""
        chunks, n_ctx = self._chunks.inputs.shape
        states = state_bytes(self._model, chunks * n_ctx)
        sums = max((sizes(self._shapes(layer), forms)[0] for layer, forms in self._forms.items()), default=0)
        return (
            f"calibrating on {chunks} chunks of {n_ctx} tokens of {self._chunks.source}, layer by layer: {states}, "
            f"second moments of a layer up to {sums / 1e6:,.1f} MB"
        )

    @property
    def described(self) -> str:
        """The text and the settings."""
        chunks, n_ctx = self._chunks.inputs.shape
        o = self._options
        form = o.second_moments if self._form is not None else "none"
        return (
            f"{chunks} chunks of {n_ctx} tokens of {self._chunks.source}, second moments {form}, "
            f"token weights {o.token_weights}, propagate {o.propagate}, missing experts {o.missing_experts}"
        )

    @property
    def digest(self) -> str:
        """SHA-256 of tokens and settings."""
        o = self._options
        blocks = sorted(
            (layer, {name: form.key for name, form in forms.items()}) for layer, forms in self._forms.items()
        )
        settings = (
            f"{self._form} {blocks} {o.propagate} {o.missing_experts} {o.batch_size} {self._chunks.inputs.shape} "
        )
        settings += o.token_weights
        digest = hashlib.sha256(settings.encode())
        digest.update(np.ascontiguousarray(self._chunks.inputs, "<i4").data)
        return digest.hexdigest()

    def stages(
        self,
        tensors: Sequence[PlannedTensor],
        done: Collection[str],
        written: Callable[[], Mapping[str, gguf.Tensor]],
        describe: Callable[[str], None],
    ) -> Iterator[Stage]:
        """First the tensors of no layer that runs, then those of each layer with its importance matrix, then the output
        matrix, MTP layers last."""
        layers = [*(block.layer for block in self._model.blocks), _OUTPUT, *self._mtp]
        of_layer: dict[int, list[PlannedTensor]] = {layer: [] for layer in layers}
        others: list[PlannedTensor] = []
        for planned in tensors:
            layer = self._layer_of(planned.name)
            of_layer.get(layer if layer is not None else -1, others).append(planned)
        yield Stage(others, None)
        missing = {layer for layer, own in of_layer.items() if any(t.name not in done for t in own)}
        batches = chunk_batches(len(self._chunks), self._chunks.n_ctx, self._options.batch_size)
        run = LayerRun(self._model, self._chunks.inputs, batches) if missing else None
        for block in self._model.blocks:
            own = of_layer[block.layer]
            if run is None or not any(layer >= block.layer for layer in missing):
                yield Stage(own, None)  # all are done
                continue
            matrix = None
            describe(f"measuring blk.{block.layer}")
            if block.layer in missing:
                matrix = self._measure(run, block)
            elif self._options.propagate == "original":
                run.advance(block)
            run.release(block)
            yield Stage(own, matrix)
            if self._options.propagate == "quantized" and any(layer > block.layer for layer in missing):
                describe(f"running blk.{block.layer} as quantized")
                made = written()
                self._advance_with(run, block, {t.name: made[t.name] for t in own})

        if run is not None and not missing.isdisjoint((_OUTPUT, *self._mtp)):  # what reads these states
            run.finish()
        if own := of_layer[_OUTPUT]:
            describe(f"measuring {self._output}")
            yield Stage(own, self._measure_output(run) if run is not None and _OUTPUT in missing else None)
        if self._head is not None:
            mine = [t for layer in self._mtp for t in of_layer[layer]]
            measured = run is not None and any(layer in missing for layer in self._mtp)
            describe("measuring MTP layers")
            yield Stage(mine, self._measure_mtp(run) if run is not None and measured else None)

    def _measure_output(self, run: LayerRun) -> Imatrix:
        """The importance matrix of the output matrix, on the states that leave the last block."""
        collector = self._collector(self._forms[_OUTPUT], process_output=True)
        before, self._model.observer = self._model.observer, collector.observe
        try:
            for states in run.hidden:
                self._model.project(states)
        finally:
            self._model.observer = before
        return self._found(collector)

    def _measure_mtp(self, run: LayerRun) -> Imatrix:
        """The importance matrix of the MTP layers, on the states that leave the last block."""
        assert self._head is not None
        forms = {name: form for layer in self._mtp for name, form in self._forms.get(layer, {}).items()}
        collector = self._collector(forms if self._form is not None else None)
        batches = whole_batches(len(self._chunks), self._chunks.n_ctx, self._options.batch_size)
        observe_batches(self._head, self._chunks.inputs, run.hidden, batches, lambda _: collector.observe)
        return self._found(collector)

    def _measure(self, run: LayerRun, block: Block) -> Imatrix:
        """The importance matrix of a block's weights on the hidden states that enter it."""
        collector = self._collector(self._forms.get(block.layer))
        run.advance(block, self._options.propagate == "original", lambda _: collector.observe)
        return self._found(collector)

    def _collector(self, forms: Mapping[str, InputForm] | None, process_output: bool = False) -> Collector:
        moments = MomentsCollector(forms) if forms is not None else None
        collector = Collector(process_output, moments, token_weights=self._options.token_weights)
        collector.chunks = len(self._chunks)
        return collector

    def _found(self, collector: Collector) -> Imatrix:
        return fill_missing(collector.result(self._chunks.source, self._chunks.n_ctx), self._options.missing_experts)

    def _advance_with(self, run: LayerRun, block: Block, others: Mapping[str, gguf.Tensor]) -> None:
        """Run a block with tensors of the output in place of its own."""
        own = self._model.weights
        self._model.weights = {**own, **others}
        try:
            run.advance(block)
            run.release(block)
        finally:
            self._model.weights = own
            self._model.drop_cached(others)
