"""CLIP's loss over the embeddings of all ranks, with the gradients of one process that has all samples.

torchrun --standalone --nproc-per-node 2 examples/contrastive_loss.py
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

import easydist

SAMPLES = 25  # which most numbers of ranks do not divide

state = easydist.ProcessState()


class Clip(nn.Module):
    """Two towers, and a scale for their products."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 8))
        self.text = nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.Linear(32, 8))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, images: torch.Tensor, texts: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the normalized embeddings."""
        return {
            "images": functional.normalize(self.image(images), dim=1),
            "texts": functional.normalize(self.text(texts), dim=1),
        }


def contrast(images: torch.Tensor, texts: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the loss: each image belongs to the text of the same row, and the other way round."""
    products = scale.exp() * images @ texts.T
    rows = torch.arange(len(products))
    return (functional.cross_entropy(products, rows) + functional.cross_entropy(products.T, rows)) / 2


torch.manual_seed(0)
model = Clip()
images, texts = torch.randn(SAMPLES, 12), torch.randn(SAMPLES, 6)

with state.split_between_processes({"images": images, "texts": texts}) as batch:
    embeddings = model(**batch)
everyone = easydist.gather(embeddings, differentiable=True)
loss = contrast(**everyone, scale=model.scale)
loss.backward()
gradients = easydist.reduce([p.grad for p in model.parameters()], "mean")  # as DDP does

alone = torch.autograd.grad(contrast(**model(images, texts), scale=model.scale), list(model.parameters()))
worst = max(float((one - other).abs().max()) for one, other in zip(gradients, alone, strict=True))
state.print(f"loss {loss:.4f} over {len(everyone['texts'])} pairs; gradients equal to one process: {worst < 1e-6}")
