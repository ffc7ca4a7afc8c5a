"""Messages and weights on a GPU: tensor dicts between two ranks, handles, state dicts, versions, files."""

import pytest
import torch
import torch.distributed as dist
from gpus import GPU, MIXED, NATIVE, ON_ANY, busy, needs_cuda, on_groups, own_stream, to_cpu, use
from torch import nn
from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor
from trees import assert_same

import easydist
from easydist import RemoteError, is_torch_tensor as is_tensor, tree
from easydist.parallel import GroupCoordinator
from easydist.testing import distributed
from easydist.weights import LocalShard, Resharding, WeightPublisher, WeightReceiver, broadcast_state_dict
from easydist.weights.shared_buffers import SharedBuffers

pytestmark = ON_ANY

GROUPS = [("gloo", 2), (MIXED, 2), (NATIVE, 2)]


def weights():
    """Return leaves on both devices that travel alone, packed and not at all."""
    return {
        "large": torch.arange(1 << 18, device=GPU).view(512, 512).t(),
        "small": [torch.tensor([0.5, -0.0], device=GPU, dtype=torch.bfloat16), torch.ones(2)],
        "empty": torch.empty(0, 2, device=GPU),
        "number": 3,
    }


def check_weights(got):
    assert [got["large"].device.type, *(leaf.device.type for leaf in got["small"])] == [GPU, GPU, "cpu"]
    assert torch.equal(got["large"], weights()["large"])
    assert [part.tolist() for part in got["small"]] == [[0.5, -0.0], [1, 1]]
    assert (got["empty"].shape, got["empty"].device.type, got["number"]) == ((0, 2), GPU, 3)


def check_tensor_dicts(rank, backend):
    use(backend)
    check_weights(easydist.broadcast_tensor_dict(weights() if rank == 0 else None))
    on_the_cpu = tree.map(lambda leaf: torch.zeros_like(leaf, device="cpu") if is_tensor(leaf) else 0, weights())
    if rank == 0:
        easydist.send_tensor_dict(weights(), 1)
        easydist.send_tensor_dict(weights(), 1)
        easydist.send_object({"x": torch.ones(2, device=GPU)}, 1)
    else:
        check_weights(easydist.recv_tensor_dict(0))
        got = easydist.recv_tensor_dict(0, into=on_the_cpu)
        assert torch.equal(got["large"], weights()["large"].cpu())
        assert easydist.recv_object(0)["x"].tolist() == [1, 1]


@on_groups(*GROUPS)
def test_tensor_dicts_arrive_on_the_device_of_their_type(ranks, backend, world_size):
    ranks.run(check_tensor_dicts, world_size, backend=backend)


def check_handles(rank, backend):
    """Handles on streams of their own: waited for, polled, and dropped, with the memory of the data used again."""
    use(MIXED)
    group = GroupCoordinator([[0, 1]], 0, backend, True)
    for turn in ("waited", "polled", "dropped", "last"):
        with own_stream():
            data = {"x": torch.full((1 << 18,), -1.0, device=GPU), "y": torch.full((3,), -1.0, device=GPU)}
            torch.accelerator.synchronize()
            busy()
            for leaf in data.values():
                leaf.fill_(len(turn))
            if rank == 0:
                handle, _ = group.isend_tensor_dict(data, 1)
                del data
                torch.full((1 << 19,), -7.0, device=GPU)
                if turn != "dropped":
                    handle.wait()
            else:
                got, handles, after = group.irecv_tensor_dict(0)
                while turn == "polled" and not all(handle.is_completed() for handle in handles):
                    pass
                for handle in handles:
                    handle.wait()
                for step in after:
                    step()
                assert [got["x"][-1].item(), got["y"][0].item()] == [len(turn)] * 2, turn
    group.destroy()


@pytest.mark.parametrize("backend", ["gloo", NATIVE])
def test_handles_on_streams(ranks, backend):
    ranks.run(check_handles, 2, backend=backend)


def state():
    """Return tensors on both devices, large and small, with several strides."""
    return {
        "large": torch.arange(1 << 18, device=GPU).view(512, 512),
        "strided": torch.arange(1 << 18, device=GPU).view(512, 512).t(),
        **{str(i): torch.full((5,), float(i), device=GPU) for i in range(9)},
        "here": torch.arange(7.0),
    }


def check_state(rank, backend):
    """Check new tensors on their own type of device, on the CPU and pinned, and existing ones on either device."""
    use(backend)
    wanted = {name: value.cpu() for name, value in state().items()}
    new = broadcast_state_dict(state() if rank == 0 else None, verify=True)
    assert {name: value.device.type for name, value in new.items()} == {
        n: "cpu" if n == "here" else GPU for n in wanted
    }
    pinned = broadcast_state_dict(state() if rank == 0 else None, offload_to_cpu=True, pin_memory=True)
    assert rank == 0 or all(value.is_pinned() for value in pinned.values())
    there = broadcast_state_dict(state() if rank == 0 else {name: torch.zeros_like(v) for name, v in wanted.items()})
    back = broadcast_state_dict(wanted if rank == 0 else {n: torch.zeros_like(v).to(GPU) for n, v in wanted.items()})
    for got in (new, pinned, there, back):
        assert all(torch.equal(got[name].cpu(), value) for name, value in wanted.items())


@on_groups(*GROUPS)
def test_state_dicts(ranks, backend, world_size):
    ranks.run(check_state, world_size, backend=backend)


def many(fill, device=GPU):
    """Return tensors that do not fit into one half of the sources' buffers, of several dtypes, and one on the CPU."""
    made = {str(i): torch.full((1 << 18,), float(fill + i), device=device) for i in range(12)}
    made |= {f"small.{i}": torch.full((3, i), fill + i, device=device, dtype=torch.bfloat16) for i in range(50)}
    return made | {"strided": torch.arange(1 << 20, device=device).view(1024, 1024).t(), "here": torch.arange(7.0)}


def check_on_the_gpu(rank, world_size, way):
    """Ranks that share a GPU move weights on it, whatever the receivers' devices, and else through pinned memory."""
    turns, inner = [], SharedBuffers.deliver
    before = torch.cuda.memory_allocated()
    settings = {"EASYDIST_CUDA_IPC": "0"} if way == "off" and rank == world_size - 1 else {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SharedBuffers, "deliver", lambda self: turns.append(self.turn) or inner(self))
        for name, value in settings.items():
            patch.setenv(name, value)
        for turn in range(3):
            with own_stream():
                torch.accelerator.synchronize()
                busy()
                device = "cpu" if rank == world_size - 1 and turn == 2 else GPU
                mine = many(turn) if rank == 0 else None if turn == 0 else many(-1, device)
                dtype = torch.float64 if turn == 1 else None
                got = broadcast_state_dict(mine, bucket_bytes=4 << 20, verify=turn == 2, dtype=dtype)
            assert_same(to_cpu(dict(got)), many(turn, "cpu"))
    assert len(turns) == 0 if way == "off" else len(turns) > 20
    del got, mine
    dist.barrier()
    torch.cuda.ipc_collect()
    assert torch.cuda.memory_allocated() == before


@needs_cuda
@pytest.mark.parametrize("way", ["on", "off"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_weights_stay_on_the_gpu(ranks, world_size, way):
    ranks.run(check_on_the_gpu, world_size, way=way)


def check_all_sources(rank):
    """Two sources hold the halves of each tensor; a third rank gets the whole."""
    whole = {str(i): torch.arange(1 << 18, device=GPU).view(512, 512) + i for i in range(9)}
    mesh = DeviceMesh(GPU, [0, 1])
    halves = {name: distribute_tensor(value, mesh, [Shard(0)], src_data_rank=None) for name, value in whole.items()}
    with pytest.MonkeyPatch.context() as patch:
        turns, inner = [], SharedBuffers.deliver
        patch.setattr(SharedBuffers, "deliver", lambda self: turns.append(self.turn) or inner(self))
        got = broadcast_state_dict(None if rank == 2 else halves, src=[0, 1])
    assert turns
    if rank == 2:
        assert_same(to_cpu(dict(got)), to_cpu(whole))


@needs_cuda
def test_all_sources_share_their_buffers(ranks):
    ranks.run(check_all_sources, 3)


def check_streams(rank):
    """Engines that load the entries themselves; one stops in the middle, and the group works on."""
    if rank == 0:
        publisher = WeightPublisher(many(1))
        assert publisher.publish() == 1
        with pytest.raises(RemoteError):
            publisher.publish()
        assert publisher.publish() == 2
        return
    receiver = WeightReceiver()
    assert_same(to_cpu(dict(sorted(receiver.stream()))), dict(sorted(many(1, "cpu").items())))
    if rank == 1:
        for _ in receiver.stream():
            break
    else:
        with pytest.raises(RemoteError):
            receiver.receive()
    assert_same(to_cpu(dict(sorted(receiver.stream()))), dict(sorted(many(1, "cpu").items())))


def test_streams_stay_on_the_gpu(ranks):
    ranks.run(check_streams, 3)


def check_resharding(rank):
    """From two ranks on a GPU to one on the CPU and one on a GPU, through pinned memory."""
    whole = {"w": torch.arange(1 << 18, device=GPU).view(512, 512), "b": torch.arange(9.0, device=GPU)}
    held = {name: LocalShard(value[: len(value) // 2], (0,) * value.ndim, value.shape) for name, value in whole.items()}
    if rank:
        parts = {name: (value[len(value) // 2 :], len(value) // 2) for name, value in whole.items()}
        held = {name: LocalShard(part, (at, 0)[: part.ndim], whole[name].shape) for name, (part, at) in parts.items()}
    wanted = {name: torch.zeros_like(value, device=GPU if rank else "cpu") for name, value in whole.items()}
    Resharding(held, wanted).run()
    assert_same(to_cpu(wanted), to_cpu(whole))


def test_resharding(ranks):
    ranks.run(check_resharding, 2)


def net(fill, device):
    made = nn.Sequential(nn.Linear(30, 40), nn.BatchNorm1d(40), nn.Linear(40, 3, bias=False)).to(device)
    with torch.no_grad():
        for value in made.state_dict().values():
            value.fill_(fill)
    return made


def check_versions(rank, backend):
    """A trainer on the GPU, and receivers on the GPU and on the CPU."""
    use(backend)
    trained = net(1, GPU)
    member = WeightReceiver(net(0, GPU if rank == 1 else "cpu")) if rank else WeightPublisher(trained)
    for version in (1, 2, 3):
        with own_stream(), torch.no_grad():
            torch.accelerator.synchronize()
            busy()
            for value in trained.state_dict().values():
                value.fill_(version)
            got = member.publish() if rank == 0 else member.receive()
        assert got == version
        if rank:
            assert_same(to_cpu(dict(member.state.state_dict())), to_cpu(dict(net(version, "cpu").state_dict())))


@on_groups(("gloo", 3), (MIXED, 3))
def test_versions(ranks, backend, world_size):
    ranks.run(check_versions, world_size, backend=backend)


@distributed(world_size=2)
def test_files(rank, tmp_path):
    use(MIXED)
    path = tmp_path / "state.safetensors"
    if rank == 0:
        easydist.save(weights(), path)
    easydist.wait_for_everyone()
    loaded = easydist.load(path)
    assert torch.equal(loaded["large"].cpu(), weights()["large"].cpu())
