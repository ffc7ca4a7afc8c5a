"""The detection of lost, late and stopped ranks, and the failure reports of ranks."""
