"""The page "Coming from torch.distributed" has a counterpart, or none, for every function of torch.distributed."""

import re
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

PAGE = Path(__file__).parent.parent / "docs" / "coming_from_torch_distributed.md"


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the page is about torch 2.13")
def test_the_page_names_every_function():
    text = re.sub("```.*?```", "", PAGE.read_text(), flags=re.DOTALL)
    told = set(re.findall(r"\w+", " ".join(re.findall("`([^`]+)`", text))))
    public = {
        name for name, value in vars(dist).items() if type(value) is types.FunctionType and not name.startswith("_")
    }
    assert sorted(public - told) == []
