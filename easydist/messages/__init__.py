"""Messages between two ranks: one protocol for trees, tensors and objects, whoever sends and receives them."""
