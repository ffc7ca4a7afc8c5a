"""transformers' Trainer with easydist's functions in the places of accelerate's: the same results, bit for bit."""

import importlib.util
import json

import pytest
from test_launchers import SCRIPTS, torchrun

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, ("accelerate", "transformers"))), reason="transformers is not installed"
    ),
]
CALLED = {
    "sequences": {"broadcast", "broadcast_object_list", "concatenate", "slice_tensors"},
    "tokens": {"recursively_apply"},
    "generation": set(),
}
ALWAYS = {"gather", "pad_across_processes", "send_to_device"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder into which each rank has written its findings."""
    folder = tmp_path_factory.mktemp("trainer")
    torchrun(2, SCRIPTS / "trainer.py", folder, seconds=150)
    return folder


@pytest.mark.parametrize("kind", CALLED)
def test_a_trainer_gets_what_it_gets_from_accelerate(kind, folder):
    for rank in range(2):
        found = json.loads((folder / f"{kind}-{rank}.json").read_text())
        assert found["differences"] == []
        assert set(found["called"]) >= CALLED[kind] | ALWAYS
