"""The core of a communicator: ``TorchComm``, its operations under way, and the ``Backend`` that moves the bytes."""
