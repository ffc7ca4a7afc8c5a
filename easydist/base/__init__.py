"""What all other rooms build on, and no user imports: arguments with two names, torch's modes, forks, HTML."""
