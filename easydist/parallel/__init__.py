"""Groups for tensor, pipeline and data parallel engines: ``GroupCoordinator``, with vLLM's names."""

from easydist.parallel.capture import GraphCaptureContext
from easydist.parallel.coordinator import GroupCoordinator
from easydist.parallel.transfers import Transfer

__all__ = ["GraphCaptureContext", "GroupCoordinator", "Transfer"]
