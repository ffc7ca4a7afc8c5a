"""broadcast_checkpoint: one rank reads, all have it."""

import json

import pytest
import resident
import safetensors.torch
import torch
from torch import nn
from trees import assert_same

import easydist
from easydist import DisagreementError, RemoteError, WireError, weights
from easydist.testing import distributed
from easydist.weights.checkpoint import checkpoint

WIDE = 40_000
STATE = {
    "0.weight": torch.arange(21.0).view(7, 3),
    "0.bias": torch.arange(7.0),
    "1.weight": torch.arange(7.0 * WIDE).view(WIDE, 7),
    "1.bias": torch.arange(float(WIDE)),
}


def net(device="cpu"):
    return nn.Sequential(nn.Linear(3, 7, device=device), nn.Linear(7, WIDE, device=device))


def write_index(folder, weight_map=None):
    files = {"a.safetensors": ["0.weight", "1.bias"], "b.safetensors": ["0.bias", "1.weight"]}
    for file, names in files.items():
        safetensors.torch.save_file({name: STATE[name] for name in names}, folder / file)
    places = {name: file for file, names in files.items() for name in names}
    index = folder / "model.safetensors.index.json"
    index.write_text(
        json.dumps({"metadata": {"total_size": 1}, "weight_map": places if weight_map is None else weight_map})
    )
    return index


@pytest.mark.slow
@distributed(world_size=(1, 3))
def test_every_rank_has_what_the_file_holds(rank, world_size, tmp_path):
    last = world_size - 1
    single = tmp_path / "model.safetensors"
    index = tmp_path / "sharded" / "model.safetensors.index.json"
    if rank == last:
        safetensors.torch.save_file(STATE, single)
        index.parent.mkdir()
        write_index(index.parent)
    paths = (single, index, index.parent, tmp_path) if rank == last else ("nowhere",) * 4
    for path in paths:
        got = weights.broadcast_checkpoint(path, src=last)
        assert_same(got, {name: STATE[name] for name in got})
        assert len(got) == 4
    for model in (net(), net("meta")):
        got = weights.broadcast_checkpoint(paths[1], model, last, verify=True)
        assert_same({name: value.detach() for name, value in model.state_dict().items()}, STATE)
    got = weights.broadcast_checkpoint(
        paths[0], src=last, dtype=torch.float16, filter=lambda name: "bias" in name, rename={"0.bias": "b"}
    )
    assert_same(got, {"b": STATE["0.bias"].half(), "1.bias": STATE["1.bias"].half()})


@pytest.mark.slow
@distributed(world_size=2)
def test_all_ranks_raise_or_none(rank, tmp_path):
    with pytest.raises(RemoteError, match="FileNotFoundError"):
        weights.broadcast_checkpoint(tmp_path / "none.safetensors", net())
    torn = tmp_path / f"torn{rank}.safetensors"
    torn.write_bytes(b"torn")
    with pytest.raises(RemoteError, match="WireError"):
        weights.broadcast_checkpoint(torn, net())
    easydist.save({"w": torch.ones(2)}, tmp_path / f"{rank}.safetensors")
    for guilty in (0, 1):
        target = {"w": torch.zeros(2) if rank != guilty else torch.zeros(3)}
        with pytest.raises(DisagreementError, match=rf"the checkpoint: float32 \(2,\)   rank {guilty}: float32 \(3,\)"):
            weights.broadcast_checkpoint(tmp_path / f"{rank}.safetensors", target)
        assert not target["w"].any()


# --- folders, with the names that transformers, diffusers and peft give to files

FOLDERS = {
    "transformers": (["model.safetensors", "config.json"], "model.safetensors"),
    "shards go first": (["model.safetensors.index.json", "model.safetensors"], "model.safetensors.index.json"),
    "diffusers": (["diffusion_pytorch_model.safetensors", "config.json"], "diffusion_pytorch_model.safetensors"),
    "diffusers, shards": (
        ["diffusion_pytorch_model.safetensors.index.json", "diffusion_pytorch_model-00001-of-00002.safetensors"],
        "diffusion_pytorch_model.safetensors.index.json",
    ),
    "peft": (["adapter_model.safetensors", "adapter_config.json", "other.safetensors"], "adapter_model.safetensors"),
    "beside a variant": (
        ["model.fp16.safetensors", "model.safetensors", "model.bf16.safetensors"],
        "model.safetensors",
    ),
    "the only variant": (["diffusion_pytorch_model.fp16.safetensors"], "diffusion_pytorch_model.fp16.safetensors"),
    "shards of a variant": (
        [
            *("model.safetensors.index.fp16.json", "model.fp16-00001-of-00002.safetensors"),
            *("model-00002-of-00002.fp16.safetensors", "pytorch_model.bin"),
        ],
        "model.safetensors.index.fp16.json",
    ),
    "shards of a variant, elsewhere": (
        ["model.fp16.safetensors.index.json", "model.fp16-00001-of-00001.safetensors"],
        "model.fp16.safetensors.index.json",
    ),
    "any only file": (["pytorch_lora_weights.safetensors", "README.md"], "pytorch_lora_weights.safetensors"),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_the_checkpoint_of_a_folder_is_found(case, tmp_path):
    names, want = FOLDERS[case]
    for name in names:
        if name.endswith(".json"):
            (tmp_path / name).write_text(json.dumps({"weight_map": {"w": "part-1-of-1.safetensors"}}))
        else:
            safetensors.torch.save_file({"w": torch.tensor([names.index(name)])}, tmp_path / name)
    safetensors.torch.save_file({"w": torch.tensor([names.index(want)])}, tmp_path / "part-1-of-1.safetensors")
    assert checkpoint(tmp_path)["w"].tolist() == [names.index(want)]


NOT_FOUND = {
    "variants": (
        ["model.bf16.safetensors", "model.fp16.safetensors", "config.json"],
        "several checkpoints are in this folder: model.bf16.safetensors, model.fp16.safetensors; pass the path of one",
    ),
    "a pipeline": (
        ["model_index.json", "unet/diffusion_pytorch_model.safetensors", "vae/diffusion_pytorch_model.safetensors"],
        "no safetensors checkpoint is in this folder, which has model_index.json, unet/, vae/; pass the path of one",
    ),
    "shards without an index": (
        ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],
        "which has model-00001-of-00002.safetensors, model-00002-of-00002.safetensors; pass the path of one",
    ),
    "a pickle": (["pytorch_model.bin"], "which has pytorch_model.bin; pass the path of one"),
    "nothing": ([], "which has nothing; pass the path of one"),
    "much": ([f"{i:02}" for i in range(30)], "17, 18, 19, and 10 more; pass the path of one"),
}


@pytest.mark.parametrize("case", NOT_FOUND)
def test_a_folder_without_one_checkpoint_is_an_error_that_lists_what_is_there(case, tmp_path):
    names, text = NOT_FOUND[case]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    with pytest.raises(FileNotFoundError) as caught:
        checkpoint(tmp_path)
    assert text in str(caught.value)
    assert str(caught.value).endswith(f": '{tmp_path}'")


@pytest.mark.slow
@distributed(world_size=2)
def test_a_folder_of_diffusers_reaches_every_rank(rank, tmp_path):
    if rank == 0:
        easydist.save(STATE, tmp_path / "diffusion_pytorch_model.fp16.safetensors")
    model = net("meta")
    weights.broadcast_checkpoint(tmp_path if rank == 0 else "nowhere", model)
    assert_same({name: value.detach() for name, value in model.state_dict().items()}, STATE)
    if rank == 0:
        easydist.save(STATE, tmp_path / "diffusion_pytorch_model.bf16.safetensors")
    with pytest.raises(RemoteError, match="several checkpoints are in this folder: diffusion"):
        weights.broadcast_checkpoint(tmp_path if rank == 0 else "nowhere", model)
    assert easydist.gather(torch.tensor([rank])).tolist() == [0, 1]


BAD = {
    "no object": (None, "no weight_map"),
    "numbers": ({"a": 1}, "not an object of file names"),
    "up": ({"a": "../secret.safetensors"}, "not a file next to it"),
    "absolute": ({"a": "/etc/passwd"}, "not a file next to it"),
    "elsewhere": ({"0.bias": "a.safetensors"}, "'0.bias' is in a.safetensors, but it is not"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_index_is_refused(case, tmp_path):
    weight_map, match = BAD[case]
    index = write_index(tmp_path, weight_map)
    if weight_map is None:
        index.write_text("[]")
    with pytest.raises(WireError, match=match):
        checkpoint(index)


@pytest.mark.slow
@distributed(world_size=2)
def test_the_source_needs_no_copy_of_the_file(rank, tmp_path):
    """80 MB; a model on the meta device gets its memory, and the rest is the bucket."""
    path = tmp_path / "large.safetensors"
    if rank == 0:
        easydist.save({str(i): torch.ones(1_000_000) for i in range(20)}, path)
    weights.broadcast_checkpoint(path, {"0": torch.zeros(1_000_000)}, filter=lambda name: name == "0")
    targets = {str(i): torch.zeros(1_000_000) for i in range(20)}
    easydist.memory.release()
    before = resident.own()
    weights.broadcast_checkpoint(path, targets, bucket_bytes=8 << 20)
    assert resident.own() - before < 20_000_000
    assert all(one.eq(1).all() for one in targets.values())
