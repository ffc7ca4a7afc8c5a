"""Rooms below all others, for this package only: arguments with two names, torch's modes, forks, HTML."""
