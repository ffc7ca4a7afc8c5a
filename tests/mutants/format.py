"""Faults of ``easydist/format``."""

from mutants.planting import Mutant

MUTANTS = [
    Mutant(
        "format/codec.py",
        "EncodedObject._names_globals",
        "for code in _NAMING:",
        "for code in _NAMING[1:]:",
        "tests/queue/test_queue.py::test_what_is_not_allow_listed_is_refused_by_both_ends",
    ),
    Mutant(
        "format/allowlist.py",
        "allow_globals",
        "_allowed.update([_checked(entry) for entry in entries])",
        "_allowed.update(_checked(entry) for entry in entries)",
        "tests/format/test_allowlist.py::test_what_is_no_class_or_function_cannot_be_allowed",
    ),
    Mutant(
        "format/codec.py",
        "_decoded",
        "if weights_only or not _switch.allowed:",
        "if weights_only:",
        "tests/format/test_allowlist.py::test_the_switch_denies_pickle_everywhere",
    ),
    Mutant(
        "format/cost.py",
        "of_argument",
        "return 8 * len(value)",
        "return 8",
        "tests/format/test_cost.py::test_copying_one_thing_again_and_again_is_refused",
    ),
    Mutant(
        "format/files.py",
        "_replacing",
        "except BaseException:",
        "except Exception:",
        "tests/format/test_files.py",
    ),
    Mutant(
        "format/files.py",
        "_replacing",
        "            file.flush()\n            os.fsync(file.fileno())\n",
        "",
        "tests/format/test_files.py",
    ),
    Mutant(
        "format/header.py",
        "decode",
        "key=lambda entry: (entry.start, entry.stop)",
        "key=lambda entry: entry.start",
        "tests/format/test_header.py",
    ),
    Mutant(
        "format/links.py",
        "is_planted",
        "around.st_mode & (stat.S_IWOTH | stat.S_IWGRP)",
        "around.st_mode & stat.S_IWOTH",
        "tests/format/test_modes_and_links.py",
    ),
    Mutant(
        "format/outline.py",
        "memory_of",
        "return address, *layout, value.is_conj(), value.is_neg()",
        "return address, *layout",
        "tests/format/test_files.py::test_other_views_of_one_memory_are_stored_for_themselves",
    ),
    Mutant(
        "format/parts.py",
        "Strings.of",
        'text.count("\\0") == len(value) - 1 and len(text) <= _LONG * len(value)',
        "len(text) <= _LONG * len(value)",
        "tests/format/test_codec.py",
    ),
    Mutant(
        "format/targets.py",
        "Targets.differing",
        "names = leaves.keys() | self.values.keys()",
        "names = self.values.keys()",
        "tests/format/test_files.py::test_into_of_other_leaves_is_refused_and_untouched",
    ),
    Mutant(
        "format/unpickler.py",
        "Unpickler.check_key",
        "self.spend(self._same_hash * count * work)",
        "self.spend(self._same_hash * work)",
        "tests/format/test_cost.py -k integers",
    ),
    Mutant(
        "format/unpickler.py",
        "Unpickler._end",
        "            or next(self._buffers, None) is not None\n",
        "",
        "tests/format/test_unpickler.py tests/format/test_codec.py",
    ),
    Mutant(
        "format/codec.py",
        "decode_copy",
        "[memoryview(bytearray(raw)) for raw in buffers]",
        "buffers",
        "tests/verbs/test_objects.py",
    ),
]
