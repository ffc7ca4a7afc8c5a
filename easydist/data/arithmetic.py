"""The arithmetic of dividing data into parts, and fingerprints."""

from __future__ import annotations

import hashlib


def fingerprint(value: object) -> int:
    """Return 64 bits that are the same in every process for values with the same repr.

    Example:
        >>> fingerprint(("a", 1)) == fingerprint(("a", 1)) != fingerprint(("a", 2))
        True
    """
    digest = hashlib.blake2b(repr(value).encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def split_sizes(length: int, parts: int) -> list[int]:
    """Return the sizes of ``parts`` nearly equal parts, as in ``torch.tensor_split``: larger parts come first.

    Example:
        >>> split_sizes(7, 3), split_sizes(1, 3)
        ([3, 2, 2], [1, 0, 0])
    """
    share, extra = divmod(length, parts)
    return [share + (part < extra) for part in range(parts)]


def split_bounds(length: int, parts: int, part: int) -> tuple[int, int]:
    """Return the start and the stop of one of ``parts`` nearly equal parts.

    Example:
        >>> [split_bounds(7, 3, part) for part in range(3)]
        [(0, 3), (3, 5), (5, 7)]
    """
    share, extra = divmod(length, parts)
    start = part * share + min(part, extra)
    return start, start + share + (part < extra)
