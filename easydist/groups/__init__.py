"""The communicators of a group: making them, sharing memory, reconnecting after a failure."""
