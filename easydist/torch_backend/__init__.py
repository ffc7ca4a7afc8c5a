"""``"easydist_shm"``, a ``torch.distributed`` backend over shared memory."""
