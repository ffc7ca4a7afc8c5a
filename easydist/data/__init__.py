"""The leaves of a tree as bytes, in the same order on all ranks, and the functions that need no exchange."""
