"""Plan the conversion of a checkpoint on the Hub from its headers. The Conversion's `arrivals` bring the weights later.

The output has the bytes that it has from a directory of the same checkpoint, named as the repository.
"""

from __future__ import annotations

from quantkit.formats.safetensors.peft_adapter import files_of
from quantkit.hub.address import Address
from quantkit.hub.checkpoint import open_checkpoint
from quantkit.hub.files import CheckpointFiles
from quantkit.hub.stream import CheckpointStream
from quantkit.pipelines.conversion.plan import Conversion, plan_conversion
from quantkit.pipelines.options import ConvertOptions, QuantizeOptions
from quantkit.pipelines.resume import file_identities


def plan_remote(
    address: Address, outtype: str, options: ConvertOptions | QuantizeOptions, mtp: str, in_any_order: bool = False
) -> Conversion:
    """Read configuration, tokenizer and headers of a checkpoint on the Hub and plan its GGUF.

    `in_any_order`: tensors may be read at any time and more than once, by files instead of as a stream.
    """
    remote = open_checkpoint(address)
    kind = CheckpointFiles if in_any_order else CheckpointStream
    arrivals = kind(remote, options.disk, options.keep_shards)
    about = (options.pre, mtp, options.metadata, options.model_name, remote.checkpoint, arrivals)
    if isinstance(options, ConvertOptions):
        planned = plan_conversion(remote.directory, outtype, *about, options.fuse_gate_up, options.merge_lora)
        if options.merge_lora is not None:  # an interrupted run with another adapter is not resumed
            arrivals.identities += file_identities(files_of(options.merge_lora))
        return planned
    return plan_conversion(remote.directory, outtype, *about)
