"""The verb ``assert_equal``: all ranks have the same values."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from easydist.agreement.agree import shared
from easydist.agreement.call import Call, shortened
from easydist.agreement.disagreement import SHOWN, values_text
from easydist.agreement.frames import Agreement
from easydist.agreement.reports import exchange_json
from easydist.agreement.runner import Verb, run
from easydist.base.eager import eager
from easydist.data.values import NBYTES, Value, digest_of, values_of
from easydist.errors import UnequalError
from easydist.groups.communicators import Communicators
from easydist.state import communicators
from easydist.typing import Group, Timeout, Tree

__all__ = ["assert_equal"]


@eager
def assert_equal(
    data: Tree,
    fail_message: str = "",
    *,
    group: Group = None,
    check: bool | None = None,
    timeout: Timeout | None = None,
) -> None:
    """Raise an error on all ranks unless all of them have equal values.

    Law: it returns if every rank's tree has the same paths with equal values, and raises on every rank otherwise.
    Tensors and arrays are equal if dtype, shape and all bits are: a NaN equals itself, 0.0 does not equal -0.0, and
    neither strides nor the device matter. All other values are equal if type and value are; functions, classes and
    modules count by their names. Dicts are compared in any order, and lists and tuples with the same items are equal.

    Example:
        >>> import torch, easydist
        >>> easydist.assert_equal({"weights": torch.ones(2), "seed": 7, "name": "a"})

    Args:
        data: Any tree of tensors, arrays, numbers, text, dates and other values that have a complete repr.
        fail_message: The first line of the error; that of the lowest rank if ranks differ.
        group: The ranks that take part.
        check: True to compare the calls of all ranks; None follows ``EASYDIST_CHECK`` (on by default).
        timeout: The time limit of the call; None is the group's.

    Raises:
        UnequalError: Values differ. The text has up to ten paths, with the first element that differs, and the ranks
            that have each value. It is a ``DisagreementError`` and an ``AssertionError``.
        RemoteError: A value on another rank cannot be compared.
        TypeError: A value cannot be compared: an object of an unknown class, a DTensor, an array of objects.

    Cost: one header exchange with a digest of 16 bytes (BLAKE2b: different data have equal digests with a probability
    of 2 to the power of -128), and one pass over the data on the CPU, at about 1 GB/s. Data on another device is copied
    to the CPU 16 MiB at a time. If values differ: the paths and digests of all values, the digests of each 64 KiB of up
    to ten of them, and one such block of each.

    Source: JAX's ``multihost_utils.assert_equal``, to which a NaN equals nothing, and 0.0 equals -0.0.
    """
    run(_AssertEqual(data, fail_message), communicators(group), timeout, check)


class _AssertEqual(Verb[None]):
    operation = "assert_equal"

    def __init__(self, data: Tree, message: str) -> None:
        self._data, self._message = data, message
        self._values: list[Value] = []
        self._digest = torch.zeros(NBYTES, dtype=torch.uint8, device="cpu")

    def prepare(self, comms: Communicators) -> Call:
        self._values = values_of(self._data)
        if comms.size > 1:
            self._digest = torch.frombuffer(bytearray(digest_of(self._values)), dtype=torch.uint8)
        return Call(nbytes=NBYTES, payload=[self._digest])

    def exchange(self, comms: Communicators, agreed: Agreement) -> None:
        # The digests are so short that they always come with the headers.
        if comms.size > 1 and len({bytes(agreed.payload(rank).numpy()) for rank in range(comms.size)}) > 1:
            raise shared(comms, UnequalError(self._explained(comms)))

    def result(self, comms: Communicators, agreed: Agreement, arrived: None) -> None:
        return None

    def _explained(self, comms: Communicators) -> str:
        """Return the error's text, the same on every rank."""
        mine = {
            "values": {one.path: (shortened(one.text), one.digest().hex()) for one in self._values},
            "message": str(self._message),
            "site": comms.monitor.site,
        }
        every = exchange_json(comms, mine)
        values = [one["values"] for one in every]
        paths = dict.fromkeys(path for one in values for path in one)
        differing = [path for path in paths if any(one.get(path) != values[0].get(path) for one in values)]
        rows = {path: [one[path][0] if path in one else "missing" for one in values] for path in differing[:SHOWN]}
        alike = [path for path, texts in rows.items() if len(set(texts)) == 1]
        places = self._elements(comms, alike)
        shown: dict[str, list[str]] = dict(
            places.get(path, (path or "the value", texts)) for path, texts in rows.items()
        )
        head = f"assert_equal: ranks differ in {len(differing)} of {len(paths)} values"
        text = values_text(head, shown, len(differing) - len(rows), [one["site"] for one in every])
        return "\n".join([message, text]) if (message := every[0]["message"]) else text

    def _elements(self, comms: Communicators, paths: list[str]) -> dict[str, tuple[str, list[str]]]:
        """Return the first element that differs of the data at each path: its place, and its text on each rank."""
        by_path = {value.path: value for value in self._values}
        values = [by_path[path] for path in paths]
        digests = exchange_json(comms, [value.digests.hex() for value in values])
        numbers = [_first_difference(texts) for texts in zip(*digests, strict=True)]
        mine = [bytes(value.block(number)).hex() for value, number in zip(values, numbers, strict=True)]
        blocks = exchange_json(comms, mine)
        columns = zip(values, numbers, zip(*blocks, strict=True), strict=True)
        return {one.path: _element(one, number, list(map(bytes.fromhex, texts))) for one, number, texts in columns}


def _first_difference(digests: Any) -> int:
    """Return the number of the first block whose digests differ."""
    size = 2 * NBYTES
    first = digests[0]
    return next(at // size for at in range(0, len(first), size) if len({one[at : at + size] for one in digests}) > 1)


def _element(value: Value, number: int, blocks: list[bytes]) -> tuple[str, list[str]]:
    """Return the place of the first element that differs, and the element of each rank as text."""
    index = value.first_difference(blocks)
    found = [value.element(block, index) for block in blocks]
    texts = [text for text, _ in found]
    if len(set(texts)) < len(set(found)):  # NaNs with other bits, for example
        texts = [f"{text} ({digits})" for text, digits in found]
    at = np.unravel_index(number * value.per_block + index, value.shape)
    where = f" at [{', '.join(map(str, at))}]" if at else ""
    return f"{value.path or 'the value'}{where}", texts
