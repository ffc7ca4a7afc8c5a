"""The call of a verb: its number, site and clock, and the header exchange in which all ranks agree on it."""
