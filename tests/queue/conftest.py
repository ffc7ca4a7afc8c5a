"""A writer and a reader, in shared memory and over TCP."""

import pytest
from queues import SOON

from easydist.queue import MessageQueue


@pytest.fixture(params=["shm", "tcp"])
def pair(request):
    """Makes a writer and its reader in this process; both are closed at the end."""
    ends = []

    def make(**options):
        writer = MessageQueue(1, int(request.param == "shm"), connect_ip="127.0.0.1", **options)
        reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
        ends.extend([reader, writer])
        writer.wait_until_ready(SOON)
        reader.wait_until_ready(SOON)
        return writer, reader

    make.is_local = request.param == "shm"
    yield make
    for end in ends:
        end.close()
