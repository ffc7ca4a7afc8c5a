"""The verbs: the functions of the public API that move data between ranks."""
