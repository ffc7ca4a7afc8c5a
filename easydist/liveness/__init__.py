"""Which ranks are alive, late, stopped or lost, and what they reported last."""
