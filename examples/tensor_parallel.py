"""A small transformer with its layers in a pipeline, each layer split over tensor-parallel ranks.

torchrun --nproc-per-node 4 examples/tensor_parallel.py    # tensor 2 × pipeline 2
torchrun --nproc-per-node 2 examples/tensor_parallel.py    # tensor 2
python examples/tensor_parallel.py

Every stage gets activations with ``recv_tensor_dict``, and the ranks of a stage sum their parts of each layer with
``all_reduce``. The first rank of a stage announces the next step with ``broadcast_object``, through a message queue.
The result is compared with that of one process.
"""

import torch
import torch.nn.functional as F

from easydist import ProcessState
from easydist.parallel import GroupCoordinator, parallel_groups

WIDTH, HEADS, LAYERS, TOKENS = 32, 4, 4, 6


def weights(layer: int) -> dict[str, torch.Tensor]:
    """Return a layer's weights, the same on every rank."""
    generator = torch.Generator().manual_seed(layer)
    shapes = {"qkv": (3, WIDTH, WIDTH), "out": (WIDTH, WIDTH), "up": (4 * WIDTH, WIDTH), "down": (WIDTH, 4 * WIDTH)}
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) / WIDTH**0.5
        for name, shape in shapes.items()
    }


class Block:
    """One layer, of which this rank has some of the heads and some of the hidden units."""

    def __init__(self, layer: int, tp: GroupCoordinator | None) -> None:
        self.tp, whole = tp, weights(layer)
        self.ranks, rank = (1, 0) if tp is None else (tp.world_size, tp.rank_in_group)
        self.qkv = whole["qkv"].chunk(self.ranks, 1)[rank]
        self.out = whole["out"].chunk(self.ranks, 1)[rank]
        self.up = whole["up"].chunk(self.ranks, 0)[rank]
        self.down = whole["down"].chunk(self.ranks, 1)[rank]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (self._heads(F.layer_norm(x, [WIDTH]) @ weight.t()) for weight in self.qkv)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).reshape(len(x), -1)
        x = x + self._sum(attended @ self.out.t())
        return x + self._sum(F.gelu(F.layer_norm(x, [WIDTH]) @ self.up.t()) @ self.down.t())

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(len(x), HEADS // self.ranks, -1).transpose(0, 1)

    def _sum(self, part: torch.Tensor) -> torch.Tensor:
        return part if self.tp is None else self.tp.all_reduce(part)


def main() -> None:
    state = ProcessState()
    groups = parallel_groups(tp=min(2, state.num_processes), use_message_queue_broadcaster=True, pp=_stages(state))
    tp, pp = groups.tp, groups.pp
    per_stage = LAYERS // pp.world_size
    mine = range(pp.rank_in_group * per_stage, (pp.rank_in_group + 1) * per_stage)
    blocks = [Block(layer, tp) for layer in mine]
    largest = 0.0
    for step in range(3):
        plan = tp.broadcast_object({"step": step, "tokens": TOKENS + step} if tp.is_first_rank else None)
        x = torch.randn(plan["tokens"], WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        want = x
        if not pp.is_first_rank:
            got = pp.recv_tensor_dict(all_gather_group=tp)
            assert got["step"] == plan["step"]
            x = got["hidden"]
        for block in blocks:
            x = block(x)
        if not pp.is_last_rank:
            pp.send_tensor_dict({"hidden": x, "step": step}, all_gather_group=tp)
        else:
            for layer in range(LAYERS):
                want = Block(layer, None)(want)
            largest = max(largest, (x - want).abs().max().item())
    differences = groups.world.all_gather(torch.tensor([largest]))
    if state.is_main_process:
        print(
            f"tensor {tp.world_size} × pipeline {pp.world_size}: equal to one process", differences.max().item() < 1e-9
        )
    groups.destroy()


def _stages(state: ProcessState) -> int:
    return max(1, state.num_processes // 2)


if __name__ == "__main__":
    main()
