"""The core of a communicator: ``Collectives``, its operations under way, and the ``Backend`` that moves the bytes."""
