"""The backends: over ``torch.distributed`` groups, over shared memory, over both, and for a single process."""
