"""Memory that elements or leaves share, against NumPy's own search."""

import numpy as np
import torch
from hypothesis import given, strategies as st

from easydist.data.aliasing import aliases, are_disjoint, overlap, overlaps_itself

STRIDED = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), max_size=4)


@given(STRIDED)
def test_strides_overlap_where_two_elements_have_one_place(dims):
    shape, strides = [size for size, _ in dims], [stride for _, stride in dims]
    places = np.lib.stride_tricks.as_strided(np.arange(200), shape, [8 * stride for stride in strides]).reshape(-1)
    assert overlaps_itself(shape, strides) == (len(np.unique(places)) < places.size)


@given(st.lists(st.tuples(STRIDED, st.integers(0, 20)), max_size=5))
def test_leaves_overlap_where_numpy_finds_that_they_share_memory(views):
    base = torch.arange(200.0)
    tensors = [base.as_strided([n for n, _ in dims], [s for _, s in dims], start) for dims, start in views]
    arrays = [tensor.numpy() for tensor in tensors]
    same = {(i, j) for i, j in pairs(tensors) if aliases([tensors[i], tensors[j]])}
    sharing = {(i, j) for i, j in pairs(tensors) if np.shares_memory(arrays[i], arrays[j])} - same
    found = overlap(tensors)
    assert found in sharing if sharing else found is None
    is_plain = all(tensor.is_contiguous() for tensor in tensors)
    assert are_disjoint(tensors, [tensor.nbytes for tensor in tensors]) == (is_plain and not sharing and not same)


def pairs(items):
    return [(i, j) for j in range(len(items)) for i in range(j)]
