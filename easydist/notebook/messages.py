"""The protocol between the notebook and its ranks, beyond Jupyter's messages."""

from __future__ import annotations

META = "easydist"
"""The key of a request's metadata: ``number`` is the cell's; ``action`` and its arguments replace the source."""

ACT = "__easydist__()"
"""The source of a request for an action."""

VALUE = "easydist_value"
"""The type of a message that carries bytes from a rank."""
