"""Modules below all others, for this package only: arguments with two names, forks, HTML, and what torch hides."""
