"""Streams for recording graphs of an accelerator's work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass
class GraphCaptureContext:
    """The stream on which a graph is recorded.

    Attributes:
        stream: For ``torch.cuda.graph(graph, stream=…)``; None on the CPU, where there are no graphs.
    """

    stream: torch.cuda.Stream | None


@contextmanager
def capturing(device: torch.device, context: GraphCaptureContext | None) -> Iterator[GraphCaptureContext]:
    """Make a stream current, after letting it wait for the previous one."""
    if device.type != "cuda":
        yield context or GraphCaptureContext(None)
        return
    if context is None or context.stream is None:
        context = GraphCaptureContext(torch.cuda.Stream(device))
    assert context.stream is not None
    before = torch.cuda.current_stream(device)
    if context.stream != before:
        context.stream.wait_stream(before)
    with torch.cuda.stream(context.stream):
        yield context
    if context.stream != before:
        before.wait_stream(context.stream)


def is_captured(value: object) -> bool:
    """True if operations on this tensor are being recorded."""
    return isinstance(value, torch.Tensor) and value.is_cuda and torch.cuda.is_current_stream_capturing()
