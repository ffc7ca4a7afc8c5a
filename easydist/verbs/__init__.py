"""The verbs: what each call takes, moves and returns."""
