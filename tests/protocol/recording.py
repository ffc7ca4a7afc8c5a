"""Looks for what notices the faults of ``protocol_mutants`` and ``drawn_mutants``: a case, or the seed of a schedule.

``python tests/protocol/recording.py [SECONDS]``, with the repository and tests/protocol on PYTHONPATH, prints each
fault with what notices it. Each gets the seconds; what is recorded is tried first.
"""

import sys
import time

from cases import CASES
from schedules import play
from sources import load


def is_noticed(by, mutant):
    """True if a schedule or a case fails with a fault.

    Args:
        by: The seed of the schedule, or the name of the case.
        mutant: The fault.
    """
    try:
        CASES[by](load(mutant)) if by in CASES else play(by, mutant)
    except Exception:  # a law, or an error that no law expects
        return True
    return False


def search(mutant, recorded, seconds):
    """Return what notices a fault; None if nothing is found in time.

    Args:
        mutant: The fault.
        recorded: What was found before, or None.
        seconds: The seconds of processor time for schedules.
    """
    for by in [recorded, *CASES]:
        if by is not None and is_noticed(by, mutant):
            return by
    ends, seed = time.process_time() + seconds, 0
    while time.process_time() < ends:
        if is_noticed(seed, mutant) and not is_noticed(seed, None):
            return seed
        seed += 1
    return None


def main():
    """Print each fault with what notices it."""
    from drawn_mutants import DRAWN, UNNOTICED
    from protocol_mutants import PAST

    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 30.0
    for by, mutant in [*PAST.values(), *DRAWN, *((None, one) for one in UNNOTICED)]:
        print(search(mutant, by, seconds), mutant, flush=True)


if __name__ == "__main__":
    main()
