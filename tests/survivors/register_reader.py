"""A reader of a register that stops between any two reads, while the owner of the page writes version after version."""

import itertools

REGISTER = slice((1 << 15) + 1024, (1 << 15) + 2048)
"""The place of the register in the first entry of a page."""


def check_reader(module):
    """Check that a reader gets no version from before its read, and no mixture.

    Args:
        module: ``easydist.liveness.page``, or a mutant of it.
    """

    class SteppedReader(module.PeerPage):
        """Reads a half of a register at a time; before each, the owner of the page goes on."""

        def _version(self, entry, half):
            for _ in range(next(self.plan, 0)):
                next(self.owner)
            return super()._version(entry, half)

    for plan in itertools.product(range(5), repeat=3):
        page, finished = module.OwnPage(), [0]
        entry = page.new_entry()
        reader, reader.owner = SteppedReader.attach(*page.address), versions(page, entry, finished)
        reader.plan = iter(())
        for _ in range(4):  # two versions
            next(reader.owner)
        reader.plan, before = iter(plan), finished[0]
        number = int(reader.register(entry).removeprefix("version "))
        assert before <= number <= finished[0], f"{plan}: version {number} of {before} to {finished[0]}"


def versions(page, entry, finished):
    """Write version after version, each in two steps; the one that is being written has half of its bytes."""
    memory = page._memory
    for number in itertools.count(finished[0] + 1):
        before = memory[REGISTER]
        page.set_register(entry, f"version {number}")
        after = memory[REGISTER]
        changed = [index for index, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]
        torn = bytearray(after)
        for index in changed[len(changed) // 2 :]:
            torn[index] = before[index]
        memory[REGISTER] = bytes(torn)
        yield
        memory[REGISTER], finished[0] = after, number
        yield
