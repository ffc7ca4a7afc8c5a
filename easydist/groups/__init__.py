"""The communicators of a group: made, shared on demand, connected again after a failure."""
