"""Nested data between the processes of a distributed PyTorch program: one call, any structure."""

from easydist import comms, memory, tree
from easydist.codec import allow_pickle
from easydist.collectives import all_to_all, broadcast, copy_tensor_to_devices, gather, scatter
from easydist.errors import (
    CollectiveTimeout,
    DisagreementError,
    EasydistError,
    PeerLostError,
    RemoteError,
    UnsafeObjectError,
    WireError,
)
from easydist.files import load, load_metadata, save
from easydist.objects import broadcast_object_list, gather_object, scatter_object_list
from easydist.padding import CannotPadNestedTensorWarning, pad_across_processes, unpad
from easydist.parameters import GatheredParameters
from easydist.precision import convert_outputs_to_fp32, convert_to_fp32
from easydist.random import set_seed, synchronize_rng_states
from easydist.reduction import reduce
from easydist.state import DistributedType, ProcessState, together, wait_for_everyone
from easydist.structure import (
    TensorInformation,
    concatenate,
    find_batch_size,
    find_device,
    get_data_structure,
    honor_type,
    initialize_tensors,
    is_tensor_information,
    is_torch_tensor,
    listify,
    pad_input_tensors,
    recursively_apply,
    send_to_device,
    slice_tensors,
)
from easydist.tracing import Trace, TracedCall, trace
from easydist.transfer import broadcast_tensor_dict, recv_tensor_dict, send_tensor_dict
from easydist.tree import is_namedtuple

PartialState = ProcessState
"""accelerate's name."""

DistributedOperationException = DisagreementError
"""accelerate's name."""

__version__ = "0.1.0.dev0"

__all__ = [
    "CannotPadNestedTensorWarning",
    "CollectiveTimeout",
    "DisagreementError",
    "DistributedOperationException",
    "DistributedType",
    "EasydistError",
    "GatheredParameters",
    "PartialState",
    "PeerLostError",
    "ProcessState",
    "RemoteError",
    "TensorInformation",
    "Trace",
    "TracedCall",
    "UnsafeObjectError",
    "WireError",
    "all_to_all",
    "allow_pickle",
    "broadcast",
    "broadcast_object_list",
    "broadcast_tensor_dict",
    "comms",
    "concatenate",
    "convert_outputs_to_fp32",
    "convert_to_fp32",
    "copy_tensor_to_devices",
    "find_batch_size",
    "find_device",
    "gather",
    "gather_object",
    "get_data_structure",
    "honor_type",
    "initialize_tensors",
    "is_namedtuple",
    "is_tensor_information",
    "is_torch_tensor",
    "listify",
    "load",
    "load_metadata",
    "memory",
    "pad_across_processes",
    "pad_input_tensors",
    "recursively_apply",
    "recv_tensor_dict",
    "reduce",
    "save",
    "scatter",
    "scatter_object_list",
    "send_tensor_dict",
    "send_to_device",
    "set_seed",
    "slice_tensors",
    "synchronize_rng_states",
    "together",
    "trace",
    "tree",
    "unpad",
    "wait_for_everyone",
]
