"""The public names of easydist and the modules that define them: the only list, which ``__init__.py`` reads, too."""

from . import (
    accelerate as accelerate,
    comms as comms,
    logging as logging,
    memory as memory,
    metrics as metrics,
    notebook as notebook,
    parallel as parallel,
    queue as queue,
    ray as ray,
    testing as testing,
    tree as tree,
    weights as weights,
)
from .data.precision import convert_outputs_to_fp32 as convert_outputs_to_fp32, convert_to_fp32 as convert_to_fp32
from .data.structure import (
    TensorInformation as TensorInformation,
    concatenate as concatenate,
    find_batch_size as find_batch_size,
    find_device as find_device,
    get_data_structure as get_data_structure,
    honor_type as honor_type,
    initialize_tensors as initialize_tensors,
    is_tensor_information as is_tensor_information,
    is_torch_tensor as is_torch_tensor,
    listify as listify,
    pad_input_tensors as pad_input_tensors,
    recursively_apply as recursively_apply,
    send_to_device as send_to_device,
    slice_tensors as slice_tensors,
)
from .errors import (
    CollectiveTimeout as CollectiveTimeout,
    DisagreementError as DisagreementError,
    DistributedOperationException as DistributedOperationException,
    EasydistError as EasydistError,
    LeftOutError as LeftOutError,
    OverlappingCallError as OverlappingCallError,
    PeerLostError as PeerLostError,
    RemoteError as RemoteError,
    ShapeError as ShapeError,
    UnequalError as UnequalError,
    UnsafeObjectError as UnsafeObjectError,
    WireError as WireError,
)
from .format.allowlist import allow_globals as allow_globals
from .format.codec import allow_pickle as allow_pickle
from .format.files import (
    header as header,
    load as load,
    load_metadata as load_metadata,
    read_header as read_header,
    save as save,
)
from .format.header import Header as Header
from .metrics.collector import MetricCollector as MetricCollector
from .metrics.gather import gather_for_metrics as gather_for_metrics
from .state import (
    DistributedType as DistributedType,
    PartialState as PartialState,
    ProcessState as ProcessState,
    recover as recover,
    together as together,
    wait_for_everyone as wait_for_everyone,
)
from .tracing import Trace as Trace, TracedCall as TracedCall, trace as trace
from .tree import is_namedtuple as is_namedtuple
from .verbs.all_to_all import all_to_all as all_to_all
from .verbs.broadcast import broadcast as broadcast, copy_tensor_to_devices as copy_tensor_to_devices
from .verbs.equality import assert_equal as assert_equal
from .verbs.gather import gather as gather
from .verbs.object_pair import recv_object as recv_object, send_object as send_object
from .verbs.objects import (
    broadcast_object_list as broadcast_object_list,
    gather_object as gather_object,
    scatter_object_list as scatter_object_list,
)
from .verbs.padding import (
    CannotPadNestedTensorWarning as CannotPadNestedTensorWarning,
    pad_across_processes as pad_across_processes,
    unpad as unpad,
)
from .verbs.parameters import GatheredParameters as GatheredParameters
from .verbs.random import set_seed as set_seed, synchronize_rng_states as synchronize_rng_states
from .verbs.reduce import reduce as reduce
from .verbs.scatter import scatter as scatter
from .verbs.tensor_dicts import (
    broadcast_tensor_dict as broadcast_tensor_dict,
    recv_tensor_dict as recv_tensor_dict,
    send_tensor_dict as send_tensor_dict,
)

__version__: str
