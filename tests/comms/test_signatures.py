"""Names, order and defaults of torchcomms' page: scripts that were written for it run with the import changed."""

import enum
import inspect

import pytest
import torch

from easydist import comms
from easydist.comms import device_mesh, objcol

OPTIONAL = "hints=None, timeout=None"
METHODS = {
    "TorchComm.all_gather": f"self, tensor_list, tensor, async_op, {OPTIONAL}",
    "TorchComm.all_gather_single": f"self, output, input, async_op, {OPTIONAL}",
    "TorchComm.all_reduce": f"self, tensor, op, async_op, {OPTIONAL}",
    "TorchComm.all_to_all": f"self, output_tensor_list, input_tensor_list, async_op, {OPTIONAL}",
    "TorchComm.all_to_all_single": f"self, output, input, async_op, {OPTIONAL}",
    "TorchComm.all_to_all_v_single": (
        f"self, output, input, output_split_sizes, input_split_sizes, async_op, {OPTIONAL}"
    ),
    "TorchComm.barrier": f"self, async_op, {OPTIONAL}",
    "TorchComm.batch_op_create": "self",
    "TorchComm.broadcast": f"self, tensor, root, async_op, {OPTIONAL}",
    "TorchComm.finalize": "self",
    "TorchComm.gather": f"self, output_tensor_list, input_tensor, root, async_op, {OPTIONAL}",
    "TorchComm.get_backend": "self",
    "TorchComm.get_device": "self",
    "TorchComm.get_name": "self",
    "TorchComm.get_options": "self",
    "TorchComm.get_rank": "self",
    "TorchComm.get_size": "self",
    "TorchComm.recv": f"self, tensor, src, async_op, {OPTIONAL}",
    "TorchComm.reduce": f"self, tensor, root, op, async_op, {OPTIONAL}",
    "TorchComm.reduce_scatter": f"self, output, input_list, op, async_op, {OPTIONAL}",
    "TorchComm.reduce_scatter_single": f"self, output, input, op, async_op, {OPTIONAL}",
    "TorchComm.scatter": f"self, output_tensor, input_tensor_list, root, async_op, {OPTIONAL}",
    "TorchComm.send": f"self, tensor, dst, async_op, {OPTIONAL}",
    "TorchComm.split": f"self, ranks, name, {OPTIONAL}",
    "TorchComm.unsafe_get_backend": "self",
    "TorchComm.window_allocate": "self, window_size, cpu_buf=False, signal_size=256",
    "ReduceOp.__init__": "self, opType",
    "ReduceOp.PREMUL_SUM": "factor",
    "TorchWork.is_completed": "self",
    "TorchWork.wait": "self",
    "BatchP2POptions.__init__": "self",
    "BatchSendRecv.issue": "self, async_op, options=BatchP2POptions",
    "BatchSendRecv.recv": "self, tensor, src",
    "BatchSendRecv.send": "self, tensor, dst",
    "P2POp.__init__": "self, type, tensor, peer",
    "CommOptions.__init__": "self",
    "TorchCommWindow.get_size": "self",
    "TorchCommWindow.get_tensor": "self, rank, sizes, dtype, offset",
    "TorchCommWindow.put": "self, tensor, dst_rank, target_disp, async_op",
    "TorchCommWindow.signal": "self, signal_disp, signal_val, dst_rank, async_op",
    "TorchCommWindow.wait_signal": "self, signal_disp, signal_val, cmp_op, async_op",
    "new_comm": (
        "backend, device, name, abort_process_on_timeout_or_error=None, timeout=None, high_priority_stream=None, "
        "store=None, hints=None"
    ),
    "device_mesh.init_device_mesh": "mesh_dim_comms, mesh_dim_names, _global_comm=None",
    "objcol.all_gather_object": "comm, object_list, obj, timeout=None, weights_only=True",
    "objcol.gather_object": "comm, obj, root, object_gather_list=None, timeout=None, weights_only=True",
    "objcol.send_object_list": "comm, object_list, dst, timeout=None",
    "objcol.recv_object_list": "comm, object_list, src, timeout=None, weights_only=True",
    "objcol.broadcast_object_list": "comm, object_list, root, timeout=None, weights_only=True",
    "objcol.scatter_object_list": (
        "comm, root, scatter_object_output_list, scatter_object_input_list=None, timeout=None, weights_only=True"
    ),
}
"""The page, and what it says of each name."""

LATER = [
    *["gather_single", "all_gather_v", "reduce_scatter_v", "new_window", "get_backend_impl", "get_backend_version"],
    *["register_pre_hook", "register_post_hook", "register_abort_hook", "set_timeout"],
]
"""Methods of ``TorchComm`` in later releases."""


def of(name):
    value = comms
    for part in name.split("."):
        value = getattr(value, part)
    return value


def written(parameter):
    assert parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    if parameter.default is inspect.Parameter.empty:
        return parameter.name
    is_plain = parameter.default is None or isinstance(parameter.default, bool | int)
    return f"{parameter.name}={parameter.default if is_plain else type(parameter.default).__name__}"


@pytest.mark.parametrize("name", METHODS)
def test_parameters_have_the_names_the_order_and_the_defaults_of_the_page(name):
    assert ", ".join(map(written, inspect.signature(of(name)).parameters.values())) == METHODS[name]


@pytest.mark.parametrize("name", LATER)
def test_names_of_later_releases_are_there(name):
    assert callable(getattr(comms.TorchComm, name))
    assert callable(comms.TorchWork.get_future)
    assert callable(comms.TorchWork.wait_blocking)
    assert callable(comms.register_backend)


def test_attributes_are_those_of_the_page():
    options = comms.CommOptions()
    assert (options.abort_process_on_timeout_or_error, options.hints, options.store) == (None, {}, None)
    assert options.timeout.total_seconds() == 600
    batch = comms.BatchP2POptions()
    assert batch.hints is batch.timeout is None
    op = comms.P2POp(comms.P2POpType.RECV, tensor := torch.ones(2), torch.tensor(3))
    assert (op.type, op.tensor, op.peer) == (comms.P2POpType.RECV, tensor, 3)
    names = ["AVG", "BAND", "BOR", "BXOR", "MAX", "MIN", "PRODUCT", "SUM"]
    assert all(getattr(comms.ReduceOp, name).type is comms.RedOpType[name] for name in names)
    assert {op.name: op.value for op in comms.RedOpType} == {
        **dict(zip(["SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM", "AVG"], range(9), strict=True))
    }
    assert [op.name for op in comms.SignalCmpOp] == ["EQ", "GE", "LE"]
    assert issubclass(comms.SignalCmpOp, enum.Enum)


def test_a_time_limit_is_milliseconds_and_a_timedelta():
    options = comms.CommOptions()
    for limit in (2500, options.timeout / 240, comms.CommOptions().timeout * (1 / 240)):
        options.timeout = limit
        assert options.timeout == 2500
        assert options.timeout.total_seconds() == 2.5
        assert int(options.timeout) == 2500


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("create_window", "use comm.window_allocate"),
        ("all_reduce", r"it is a method, comm\.all_reduce"),
        ("nothing_of_the_kind", "'nothing_of_the_kind'$"),
    ],
)
def test_what_is_no_function_of_the_module_says_where_it_is(name, hint):
    with pytest.raises(AttributeError, match=hint):
        getattr(comms, name)
    assert comms.objcol is objcol
    assert comms.device_mesh is device_mesh
