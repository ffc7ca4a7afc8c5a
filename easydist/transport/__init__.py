"""The core of a communicator: ``Collectives``, its pending operations, and the ``Backend`` that moves the bytes."""
