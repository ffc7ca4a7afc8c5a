"""Tensors of a tree as bytes, in an order on which all ranks agree, and what needs no exchange."""
