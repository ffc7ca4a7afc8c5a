"""The ranks of a Ray cluster: one actor each, and a world over them."""
