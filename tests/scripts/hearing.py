"""The warnings that a rank gets, as an event for the other ranks."""

import logging
import os


class Heard(logging.Handler):
    """A handler that keeps the warnings of easydist.

    Args:
        writing: The end of a pipe for a byte.
        count: The number of warnings after which it writes the byte.
    """

    def __init__(self, writing: int, count: int) -> None:
        super().__init__()
        self.texts: list[str] = []
        self._writing, self._count = writing, count

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        if len(self.texts) == self._count:
            os.write(self._writing, b"!")
