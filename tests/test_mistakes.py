"""Mistakes that are easily made, and the texts that they get: what happened, where, and what to do."""

import re
import threading
from dataclasses import dataclass

import launching
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import easydist
from easydist import comms, metrics, parallel, tree, weights
from easydist.comms import ReduceOp
from easydist.errors import WireError
from easydist.queue import MessageQueue
from easydist.testing import distributed

DATA = {"a": torch.ones(1)}


def publish_twice():
    publisher = weights.WeightPublisher(DATA)
    publisher.publish(3)
    publisher.publish(3)


MISTAKES = {
    "a rank as text": (
        lambda: easydist.broadcast(DATA, from_process="0"),
        TypeError("broadcast: from_process='0' is not a rank: pass an integer"),
    ),
    "a rank as a float": (
        lambda: easydist.gather(DATA, dst=0.0),
        TypeError("gather: dst=0.0 is not a rank: pass an integer"),
    ),
    "a flag in place of a rank": (
        lambda: easydist.gather(DATA, dst=True),
        TypeError("gather: dst=True is not a rank: pass an integer"),
    ),
    "flags in place of ranks of a coordinator": (
        lambda: parallel.GroupCoordinator([[True]], 0, "gloo", False),
        TypeError("group_ranks has [True]; pass lists of ranks, such as [[0, 1], [2, 3]]"),
    ),
    "the size of a window as a float": (
        lambda: comms.TorchComm(comms.Solo()).window_allocate(8.0),
        TypeError("window_size=8.0 is not an integer: pass an integer"),
    ),
    "a peer as text": (
        lambda: easydist.send_tensor_dict(DATA, dst="0"),
        TypeError("send_tensor_dict: dst='0' is not a rank: pass an integer"),
    ),
    "a modifier as text": (
        lambda: easydist.GatheredParameters([], modifier_rank="0").__enter__(),
        TypeError("GatheredParameters: modifier_rank='0' is not a rank: pass an integer"),
    ),
    "a rank that is not there": (
        lambda: easydist.broadcast(DATA, from_process=1),
        ValueError("broadcast: from_process=1 is not a rank of the group, which has 1 rank (0)"),
    ),
    "oneself as the other rank": (
        lambda: easydist.recv_object(src=0),
        ValueError("recv_object: src=0 is not another rank of the group, which has 1 rank (0); this is rank 0"),
    ),
    "a generator": (
        lambda: easydist.gather_object(number for number in range(3)),
        TypeError("generator cannot be pickled: cannot pickle 'generator' object; pass a list of its values"),
    ),
    "torch's name": (
        lambda: easydist.all_gather,
        AttributeError(
            "module 'easydist' has no attribute 'all_gather'; use easydist.gather, of which every rank gets the result"
        ),
    ),
    "MPI's name": (
        lambda: easydist.barrier,
        AttributeError("module 'easydist' has no attribute 'barrier'; use easydist.wait_for_everyone"),
    ),
    "a reduction that is not there": (
        lambda: easydist.reduce(DATA, "avg"),
        ValueError(
            "reduce: there is no reduction 'avg'; choose from 'mean', 'sum', 'max', 'min', 'prod', 'and', 'or', 'xor',"
            " 'none'"
        ),
    ),
    "a reduction of a wrong type": (
        lambda: easydist.reduce(DATA, True),
        TypeError(
            "reduce: there is no reduction True; choose from 'mean', 'sum', 'max', 'min', 'prod', 'and', 'or', 'xor', "
            "'none'"
        ),
    ),
    "a scale as text": (lambda: easydist.reduce(DATA, "sum", "2"), TypeError("reduce: scale='2' is not a number")),
    "no scale": (lambda: easydist.reduce(DATA, "sum", None), TypeError("reduce: scale=None is not a number")),
    "a complex scale": (lambda: easydist.reduce(DATA, "sum", 1j), TypeError("reduce: scale=1j is not a number")),
    "a complex scale of NumPy's": (
        lambda: easydist.reduce(DATA, "sum", np.complex64(1 + 2j)),
        TypeError("reduce: scale=np.complex64(1+2j) is not a number"),
    ),
    "a complex scale in a tensor": (
        lambda: easydist.reduce(DATA, "sum", torch.tensor(2j)),
        TypeError("reduce: scale=tensor(0.+2.j) is not a number"),
    ),
    "a complex factor": (
        lambda: easydist.reduce(DATA, ReduceOp.PREMUL_SUM(torch.tensor(2j))),
        TypeError("reduce: factor=tensor(0.+2.j) is not a number"),
    ),
    "several scales": (
        lambda: easydist.reduce(DATA, "sum", torch.ones(2)),
        TypeError("reduce: scale=tensor([1., 1.]) is not a number"),
    ),
    "a part of a sample": (
        lambda: easydist.gather_for_metrics(torch.ones(2), total=2.5),
        TypeError("total=2.5 is not a number of samples: pass an integer"),
    ),
    "a name in place of a list": (
        lambda: easydist.synchronize_rng_states("torch"),
        TypeError("synchronize_rng_states: rng_types='torch' is not a list of names; pass ['torch']"),
    ),
    "a number in place of a list": (
        lambda: easydist.synchronize_rng_states(5),
        TypeError("synchronize_rng_states: rng_types=5 is not a list of names; pass [5]"),
    ),
    "a generator of NumPy": (
        lambda: easydist.synchronize_rng_states(["generator"], np.random.default_rng()),
        TypeError("synchronize_rng_states: generator= takes a torch.Generator, got numpy.random._generator.Generator"),
    ),
    "text in place of tensors": (
        lambda: easydist.gather("abc"),
        TypeError(
            "gather: the tree holds no tensor, array or number (the value is 'abc'); use gather_object for other values"
        ),
    ),
    "a dict of text": (
        lambda: easydist.gather({"a": "x"}),
        TypeError(
            "gather: the tree holds no tensor, array or number (['a'] is 'x'); use gather_object for other values"
        ),
    ),
    "a set": (
        lambda: easydist.gather({1, 2}),
        TypeError(
            "gather: the tree holds no tensor, array or number (the value is set(1, 2)); use gather_object for "
            "other values"
        ),
    ),
    "nothing": (
        lambda: easydist.gather(None),
        TypeError(
            "gather: the tree holds no tensor, array or number (the value is None); use gather_object for other values"
        ),
    ),
    "a sparse tensor": (
        lambda: easydist.gather(torch.ones(2).to_sparse()),
        TypeError("the value is not a dense tensor (torch.sparse_coo on cpu); pass its dense parts"),
    ),
    "a tensor without data": (
        lambda: easydist.gather(torch.ones(2, device="meta")),
        TypeError("the value is a meta tensor, which has no data; pass a tensor with data"),
    ),
    "a dimension that is not there": (
        lambda: easydist.gather(DATA, dim=3),
        ValueError("gather: ['a'] of shape (1,) has no dim 3"),
    ),
    "a dimension as text": (
        lambda: easydist.gather(DATA, dim="0"),
        TypeError("dim='0' is not a dimension: pass an integer"),
    ),
    "a dimension of unpad as text": (
        lambda: easydist.unpad(torch.ones(2), torch.ones(1), dim="0"),
        TypeError("dim='0' is not a dimension: pass an integer"),
    ),
    "a dimension of concatenate as text": (
        lambda: easydist.concatenate([DATA, DATA], dim="0"),
        TypeError("dim='0' is not a dimension: pass an integer"),
    ),
    "two dimensions": (
        lambda: easydist.gather(DATA, dim=[0, 1]),
        TypeError("dim=[0, 1] is not a dimension: pass an integer"),
    ),
    "a negative timeout": (lambda: easydist.gather(DATA, timeout=-1), ValueError("gather: timeout=-1 is not positive")),
    "a timeout as text": (
        lambda: easydist.gather(DATA, timeout="5"),
        TypeError("gather: timeout= takes seconds or a datetime.timedelta, got '5'"),
    ),
    "no time at all": (lambda: easydist.gather(DATA, timeout=0), ValueError("gather: timeout=0 is not positive")),
    "a group by its number": (
        lambda: easydist.gather(DATA, group=1),
        TypeError(
            "group= takes None, a ProcessGroup, a one-dimensional DeviceMesh, a TorchComm or a GroupCoordinator, got "
            "int"
        ),
    ),
    "a group by its ranks": (
        lambda: easydist.gather(DATA, group=[0]),
        TypeError(
            "group= takes None, a ProcessGroup, a one-dimensional DeviceMesh, a TorchComm or a GroupCoordinator, got "
            "list"
        ),
    ),
    "a group by its name": (
        lambda: easydist.gather(DATA, group="world"),
        TypeError(
            "group= takes None, a ProcessGroup, a one-dimensional DeviceMesh, a TorchComm or a GroupCoordinator, got "
            "str"
        ),
    ),
    "a gradient on one rank": (
        lambda: easydist.gather(DATA, dst=0, differentiable=True),
        ValueError(
            "gather: differentiable=True needs a result on every rank, because all take part in backward; leave out "
            "dst="
        ),
    ),
    "a dict in place of a list": (
        lambda: easydist.broadcast_object_list({"a": 1}),
        TypeError("broadcast_object_list: object_list has to be a list, got dict"),
    ),
    "text in place of a list": (
        lambda: easydist.broadcast_object_list("abc"),
        TypeError("broadcast_object_list: object_list has to be a list, got str"),
    ),
    "no list to scatter": (
        lambda: easydist.scatter_object_list([None], None),
        TypeError("scatter_object_list: scatter_object_input_list has to be a list, got NoneType"),
    ),
    "a part of a number": (
        lambda: easydist.scatter(torch.tensor(1.0)),
        ValueError("scatter: the tensor of shape () has no dim 0"),
    ),
    "a message to oneself": (
        lambda: easydist.send_tensor_dict(DATA, dst=0),
        ValueError("send_tensor_dict: dst=0 is not another rank of the group, which has 1 rank (0); this is rank 0"),
    ),
    "a message to a rank that is not there": (
        lambda: easydist.send_tensor_dict([1], dst=1),
        ValueError("send_tensor_dict: dst=1 is not another rank of the group, which has 1 rank (0); this is rank 0"),
    ),
    "a source without data": (
        lambda: easydist.broadcast_tensor_dict(None),
        ValueError("broadcast_tensor_dict: rank 0 is the source, but its tensor_dict is None"),
    ),
    "a set in a tensor dict": (
        lambda: easydist.broadcast_tensor_dict({"a": {1}}),
        TypeError(
            "['a'] is a set; a tensor dict holds tensors, arrays, numbers, text, bytes, None and plain containers of "
            "them: send its parts, or use broadcast_object_list"
        ),
    ),
    "padding of text": (
        lambda: easydist.pad_across_processes("x"),
        TypeError(
            "pad_across_processes: the tree holds no tensor, array or number (the value is 'x'); use gather_object for"
            " other values"
        ),
    ),
    "padding along text": (
        lambda: easydist.pad_across_processes(torch.ones(2), dim="x"),
        TypeError("dim='x' is not a dimension: pass an integer"),
    ),
    "padding with text": (
        lambda: easydist.pad_across_processes(torch.ones(2), pad_index="x"),
        TypeError("pad_across_processes: pad_index='x' is not a number"),
    ),
    "padding with a complex number of NumPy's": (
        lambda: easydist.pad_across_processes(torch.ones(2), pad_index=np.complex64(1 + 2j)),
        TypeError("pad_across_processes: pad_index=np.complex64(1+2j) is not a number"),
    ),
    "padding with a time span": (
        lambda: easydist.pad_across_processes(torch.ones(2), pad_index=np.timedelta64(3, "ns")),
        TypeError("pad_across_processes: pad_index=np.timedelta64(3,'ns') is not a number"),
    ),
    "nothing to concatenate": (lambda: easydist.concatenate([]), ValueError("concatenate needs at least one item")),
    "trees that differ": (
        lambda: easydist.concatenate([{"a": torch.ones(1)}, {"b": torch.ones(1)}]),
        ValueError("concatenate: item 1 and item 0 differ in ['a'], ['b']"),
    ),
    "a path and a tree, swapped": (
        lambda: easydist.save("x.safetensors", DATA),
        TypeError("save: got dict as the path, and a path as the tree: they are swapped; pass save(tree, path)"),
    ),
    "a function in a file": (
        lambda: easydist.save({"a": lambda: 1}, "x.safetensors"),
        TypeError(
            "['a'] is a function; a file holds tensors, arrays, numbers, text, bytes, None and plain containers of "
            "them: save its parts, or use torch.save"
        ),
    ),
    "a set in a file": (
        lambda: easydist.save({"a": {1}}, "x.safetensors"),
        TypeError(
            "['a'] is a set; a file holds tensors, arrays, numbers, text, bytes, None and plain containers of them: "
            "save its parts, or use torch.save"
        ),
    ),
    "a flag in place of an epoch": (
        lambda: metrics.distributed_loader(range(3), 1).set_epoch(True),
        TypeError("set_epoch: epoch=True is not the number of an epoch: pass an integer"),
    ),
    "batches of nothing": (lambda: metrics.distributed_loader(range(3), 0), ValueError("batch_size=0 is less than 1")),
    "a sampler of one's own": (
        lambda: metrics.distributed_loader(range(3), 1, sampler=[1]),
        TypeError(
            "distributed_loader: sampler= is not accepted, because the loader itself splits the samples among the ranks"
        ),
    ),
    "rows of no loader": (
        lambda: easydist.gather_for_metrics(DATA),
        ValueError(
            "gather_for_metrics: no loader prepared with accelerate tells which samples are repeated; pass loader= "
            "(the loader that these rows come from), indices=, or total= (the number of samples)"
        ),
    ),
    "another number of rows": (
        lambda: easydist.gather_for_metrics(DATA, total=3),
        ValueError(
            "gather_for_metrics: ['a']: the ranks have 1 row, 1 in all, but total is 3; pass loader= or indices= to "
            "tell which rows are repeated"
        ),
    ),
    "more indices than rows": (
        lambda: easydist.gather_for_metrics(DATA, indices=[1, 2]),
        ValueError("gather_for_metrics: ['a'] has 1 row on the ranks, indices has 2; pass one index per row"),
    ),
    "a number of samples as text": (
        lambda: easydist.MetricCollector("x"),
        TypeError("MetricCollector: total='x' is not a number of samples: pass an integer"),
    ),
    "more rows than indices": (
        lambda: easydist.MetricCollector(2).update([0], x=torch.ones(2)),
        ValueError("MetricCollector: ['x'] has 2 rows, indices has 1; pass one row per sample"),
    ),
    "an index beyond the dataset": (
        lambda: easydist.MetricCollector(2).update([2], x=torch.ones(1)),
        ValueError("MetricCollector: index 2 is out of range for a dataset of 2 samples"),
    ),
    "samples that never came": (
        lambda: easydist.MetricCollector(2).compute(),
        ValueError("MetricCollector: 2 of 2 samples are missing: 0, 1"),
    ),
    "one value for several rows": (
        lambda: easydist.MetricCollector(2).update([0], x=0.5),
        ValueError("MetricCollector: ['x'] has one value, indices has 1; pass one row per sample"),
    ),
    "a state of a wrong type": (
        lambda: easydist.MetricCollector(2).load_state_dict([]),
        ValueError("load_state_dict: the state has the type list; pass a result of MetricCollector.state_dict"),
    ),
    "indices that are floats": (
        lambda: easydist.MetricCollector(2).update(torch.tensor([0.0]), x=torch.ones(1)),
        ValueError("MetricCollector: indices has to be one integer per row, got torch.float32 (1,)"),
    ),
    "a negative weight": (
        lambda: metrics.WeightedMean().update(1.0, weight=-1),
        ValueError("WeightedMean: a weight is negative or not finite"),
    ),
    "a mean of text": (
        lambda: metrics.WeightedMean().update("1", weight=1),
        TypeError("value is str; pass a real number, or a tensor or array of them"),
    ),
    "a sum of text": (
        lambda: metrics.Sums().update(a="x"),
        TypeError("a is str; pass a real number, or a tensor or array of them"),
    ),
    "a seed as text": (
        lambda: easydist.set_seed("x"),
        TypeError("set_seed: seed='x' is not a seed: pass an integer"),
    ),
    "a limit as text": (
        lambda: easydist.ProcessState().main_process_first(timeout="x").__enter__(),
        TypeError("main_process_first: timeout= takes seconds or a datetime.timedelta, got 'x'"),
    ),
    "more local readers than readers": (
        lambda: MessageQueue(1, 2),
        ValueError(
            "MessageQueue: n_reader=1, n_local_reader=2, local_reader_ranks=[0, 1]: there cannot be more local readers"
            " than readers, and each has a rank of its own"
        ),
    ),
    "bytes as a float": (
        lambda: MessageQueue(1, 1, None, 24e6),
        TypeError("MessageQueue: max_chunk_bytes=24000000.0 is not a whole number: pass an integer"),
    ),
    "a reader's rank as text": (
        lambda: MessageQueue.create_from_handle(MessageQueue(1, 1).export_handle(), "0"),
        TypeError("MessageQueue.create_from_handle: rank='0' is not a rank: pass an integer"),
    ),
    "a writer that reads": (
        lambda: MessageQueue(1, 1).dequeue(),
        RuntimeError("Only readers can dequeue: this is the writer's end"),
    ),
    "a list in place of a state dict": (
        lambda: weights.broadcast_state_dict([1]),
        TypeError("pass a module or a dict of tensors, got list"),
    ),
    "a version that is not new": (
        lambda: publish_twice(),
        ValueError("version 3 is not newer than 3, which was published before"),
    ),
    "a change of an unknown name": (
        lambda: weights.WeightPublisher(DATA).publish(changed=["b"]),
        ValueError("changed= contains 'b', not among the published entries (1)"),
    ),
    "a number in place of parameters": (
        lambda: easydist.GatheredParameters(3).__enter__(),
        TypeError("GatheredParameters takes parameters and modules, got int"),
    ),
    "too many leaves": (lambda: tree.flatten([1])[1].rebuild([1, 2]), ValueError("the tree has 1 leaf, got 2")),
    "a recovery's limit as text": (
        lambda: easydist.recover(timeout="x"),
        TypeError("recover: timeout= takes seconds or a datetime.timedelta, got 'x'"),
    ),
    "Horovod's init": (
        lambda: easydist.init,
        AttributeError(
            "module 'easydist' has no attribute 'init'; use easydist.ProcessState, or nothing: the first call begins"
        ),
    ),
    "a rank by itself": (
        lambda: easydist.rank,
        AttributeError("module 'easydist' has no attribute 'rank'; use easydist.ProcessState().process_index"),
    ),
    "a world size by itself": (
        lambda: easydist.world_size,
        AttributeError("module 'easydist' has no attribute 'world_size'; use easydist.ProcessState().num_processes"),
    ),
    "torch's rank": (
        lambda: easydist.get_rank,
        AttributeError("module 'easydist' has no attribute 'get_rank'; use easydist.ProcessState().process_index"),
    ),
    "torch's reduction": (
        lambda: easydist.all_reduce,
        AttributeError(
            "module 'easydist' has no attribute 'all_reduce'; use easydist.reduce, of which every rank gets the result"
        ),
    ),
    "torch's local rank": (
        lambda: easydist.local_rank,
        AttributeError(
            "module 'easydist' has no attribute 'local_rank'; use easydist.ProcessState().local_process_index"
        ),
    ),
    "a name of a module": (
        lambda: easydist.distributed_loader,
        AttributeError(
            "module 'easydist' has no attribute 'distributed_loader'; use easydist.metrics.distributed_loader"
        ),
    ),
    "MPI's rank of a state": (
        lambda: easydist.ProcessState().rank,
        AttributeError("ProcessState (PartialState) has no attribute 'rank': use process_index"),
    ),
    "a loader in place of its dataset": (
        lambda: metrics.distributed_loader(DataLoader([1, 2])),
        TypeError("distributed_loader takes a dataset, not a DataLoader: pass loader.dataset"),
    ),
    "columns in place of a dataset": (
        lambda: metrics.distributed_loader({"x": torch.ones(4), "y": torch.ones(4)}),
        TypeError(
            "distributed_loader takes a dataset, not a dict of 'x', 'y': pass one of its values, or all as the columns "
            "of one dataset, torch.utils.data.StackDataset(**columns)"
        ),
    ),
    "a generator to split": (
        lambda: easydist.ProcessState().split_between_processes(number for number in range(3)).__enter__(),
        TypeError("an iterator (generator) cannot be split between processes; pass a list of its values"),
    ),
    "a number of samples below zero": (
        lambda: easydist.MetricCollector(-2),
        ValueError("MetricCollector: total=-2 is negative"),
    ),
    "a switch as text": (
        lambda: easydist.allow_pickle("no"),
        TypeError("allow_pickle: allowed='no' is neither True nor False"),
    ),
    "a file by its number": (
        lambda: easydist.load(0),
        TypeError("load: got int as the path"),
    ),
    "a tree and a function, swapped": (
        lambda: tree.map(DATA, len),
        TypeError("tree.map takes a function and a tree, in this order; got dict as the function"),
    ),
    "an object in place of its class": (
        lambda: tree.register(object(), list, list),
        TypeError("tree.register takes a class, the function that flattens it, and the function that unflattens it"),
    ),
    "a device as text": (
        lambda: comms.new_comm("gloo", "cpu", "x"),
        TypeError("new_comm(): device must be a device, got 'cpu'; pass torch.device('cpu')"),
    ),
    "nothing to scatter": (
        lambda: easydist.scatter(None),
        ValueError("scatter: rank 0 is the source, but its tree is None"),
    ),
    "a model in place of a dataset": (
        lambda: metrics.distributed_loader(torch.nn.Linear(1, 1), 2),
        TypeError(
            "distributed_loader takes a dataset, not Linear: pass an object that has __len__ and __getitem__, such as "
            "a list, or an IterableDataset"
        ),
    ),
    "no state of a loader": (
        lambda: metrics.distributed_loader(range(3), 1).load_state_dict(None),
        ValueError("load_state_dict: the state has the type NoneType; pass a result of the loader's state_dict"),
    ),
    "a state of something else": (
        lambda: metrics.distributed_loader(range(3), 1).load_state_dict({"epoch": 1}),
        ValueError("load_state_dict: the state has the keys ['epoch']; pass a result of the loader's state_dict"),
    ),
    "a class by its name": (
        lambda: easydist.allow_globals("collections.Counter"),
        TypeError("allow_globals: 'collections.Counter' is not a list of classes; pass, for example, [MyClass]"),
    ),
    "a model and its checkpoint, swapped": (
        lambda: weights.broadcast_checkpoint(torch.nn.Linear(1, 1), "model.safetensors"),
        TypeError("broadcast_checkpoint: got Linear as the path; pass broadcast_checkpoint(path, model)"),
    ),
    "a name that nothing has": (lambda: easydist.spawn, AttributeError("module 'easydist' has no attribute 'spawn'")),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_has_its_text(name):
    make, error = MISTAKES[name]
    with pytest.raises(type(error)) as caught:
        make()
    assert str(caught.value) == str(error)


def test_a_file_that_is_none(tmp_path):
    (path := tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(WireError) as caught:
        easydist.load(path)
    assert str(caught.value) == f"{path}: 5 bytes are too few: the length of a safetensors header alone takes 8"


@pytest.mark.parametrize("name", sorted(easydist._ELSEWHERE))
def test_what_a_hint_names_is_there(name):
    assert not hasattr(easydist, name)
    for word in easydist._ELSEWHERE[name].replace(",", " ").replace("()", "").split():
        if word.startswith("easydist."):
            eval(word)


@distributed(world_size=2)
def test_a_rank_of_a_wrong_type_on_one_rank_is_an_error_on_all(rank):
    with pytest.raises(easydist.RemoteError, match="rank 1: TypeError: broadcast: from_process='0' is not a rank"):
        easydist.broadcast(DATA, from_process="0" if rank else 0)
    assert easydist.gather(torch.tensor([rank])).tolist() == [0, 1]


@pytest.mark.slow
@pytest.mark.skipif(torch.distributed.is_nccl_available(), reason="this build of torch has NCCL")
def test_nccl_without_cuda():
    world = {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": launching.free_port()}
    code = "import easydist; easydist.ProcessState(backend='nccl'); easydist.wait_for_everyone()"
    _, err = launching.forked("-c", code, status=1, **{name: str(value) for name, value in world.items()})
    assert "has no NCCL; install torch for CUDA, or leave backend= out, which means gloo on the CPU" in err


def test_files_at_wrong_places(tmp_path):
    said = {}
    for path in (tmp_path, tmp_path / "no" / "x.safetensors"):
        with pytest.raises((IsADirectoryError, FileNotFoundError)) as caught:
            easydist.save(DATA, path)
        said[caught.type] = caught.value.strerror, caught.value.filename
    assert said == {
        IsADirectoryError: ("save needs the path of a file, but this is a folder", str(tmp_path)),
        FileNotFoundError: ("save makes no folders, and there is none", str(tmp_path / "no")),
    }
    assert not [*tmp_path.iterdir()]


def test_a_pickle_of_torch_in_place_of_a_file(tmp_path):
    torch.save(DATA, path := tmp_path / "model.bin")
    with pytest.raises(WireError) as caught:
        easydist.load(path)
    assert str(caught.value) == (
        f"{path}: this is a zip archive, as torch.save writes, not a safetensors file; use torch.load"
    )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"version https://git-lfs.github.com/spec/v1\n", "this is Git LFS's pointer to a file, not the file"),
        (b'{"weight_map": {}}', "this is text, not a safetensors file"),
    ],
)
def test_text_in_place_of_a_file(tmp_path, content, said):
    (path := tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(WireError) as caught:
        easydist.load(path)
    assert str(caught.value).startswith(f"{path}: {said}")


@dataclass
class Trainer:
    config: dict


def test_what_cannot_be_pickled_is_named_by_its_path():
    trainer = Trainer({"steps": 3, "lock": threading.Lock()})
    for value, path in [(trainer, ""), ({"all": [1, trainer]}, "['all'][1]")]:
        with pytest.raises(TypeError, match=re.escape(f"{path}.config['lock'] of type lock cannot be pickled: ")):
            easydist.gather_object(value)
    batches = iter(DataLoader([1]))  # raises NotImplementedError
    with pytest.raises(TypeError, match=r"^\['a'\].* cannot be pickled: "):
        easydist.gather_object({"a": batches})
    around = [threading.Lock()]
    around.insert(0, around)
    with pytest.raises(TypeError, match=r"^\[1\] of type lock cannot be pickled: "):
        easydist.gather_object(around)


@pytest.mark.parametrize("value", [lambda: 1, [lambda: 1]])
def test_a_function_without_a_name(value):
    with pytest.raises(TypeError, match=r"cannot be pickled: .*; define it by def at the top level of a module"):
        easydist.gather_object(value)
