"""Faults of ``easydist/data``."""

from mutants.planting import Mutant

MUTANTS = [
    Mutant(
        "data/packing.py",
        "_order",
        ", values.storage_offset())",
        ", 0)",
        "tests/data/test_packing.py -k memory_of_their_own",
    ),
    Mutant(
        "data/packing.py",
        "Packed._parts",
        "bits[row].view(run.dtype)",
        "bits[0].view(run.dtype)",
        "tests/data/test_packing.py",
    ),
    Mutant(
        "data/packing.py",
        "separate",
        "zip(_split_copy(flat, sizes), shapes, strict=True)",
        "zip(flat.split(sizes), shapes, strict=True)",
        "tests/data/test_packing.py",
    ),
    Mutant(
        "data/leaves.py",
        "Leaves.aliases",
        "[self.tensors[i] for i in self.ties]",
        "self.tensors",
        "tests/verbs/test_broadcast.py -k may_be_converted_on_some",
    ),
    Mutant(
        "data/aliasing.py",
        "overlaps_itself",
        "if stride <= reach:",
        "if stride < reach:",
        "tests/data/test_aliasing.py",
    ),
    Mutant(
        "data/backing.py",
        "is_backed",
        "tensor.data_ptr() - base + nbytes <= storage.nbytes()",
        "nbytes <= storage.nbytes()",
        "easydist/data/backing.py",
    ),
    Mutant(
        "data/kinds.py",
        "_kind",
        " or any(map(_is_neg, values))",
        "",
        "tests/data/test_kinds.py tests/data/test_leaves.py",
    ),
    Mutant(
        "data/leaves.py",
        "Leaves.write_packed",
        " or 0 in self.layout.packing.lengths",
        "",
        "tests/data/test_leaves.py",
    ),
    Mutant(
        "data/split.py",
        "_check_indexed",
        "if isinstance(inputs, Iterator | IterableDataset):",
        "if isinstance(inputs, IterableDataset):",
        "tests/test_mistakes.py -k generator",
    ),
    Mutant(
        "data/split.py",
        "_cut",
        "share, last = value[start:stop], value[-1:]",
        "share, last = value[start:stop], value[start:stop][-1:]",
        "tests/data/test_split.py",
    ),
    Mutant(
        "data/structure.py",
        "_join",
        "part is first or (type(part) is type(first)",
        "(type(part) is type(first)",
        "tests/data/test_structure.py",
    ),
    Mutant(
        "data/values.py",
        "digest_of",
        "rows = sorted((one.path, one.text, one.digest()) for one in values)",
        "rows = [(one.path, one.text, one.digest()) for one in values]",
        "tests/verbs/test_equality.py::test_equal_values_pass_whatever_their_memory",
    ),
    Mutant(
        "data/plain.py",
        "_inside",
        "for cls in type(item).__mro__ for name in _slots(cls)",
        "for name in _slots(type(item))",
        "tests/verbs/test_trees.py -k holds_tensors",
    ),
    Mutant(
        "data/backing.py",
        "_without_memory",
        "if torch_private.is_batch_of_gradients(tensor):",
        "if False:",
        "tests/verbs/test_gradients.py::test_a_batch_of_gradients_is_a_type_error_on_all_ranks",
    ),
]
