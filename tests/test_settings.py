"""The variables of easydist: one strict reader, the same error on all ranks, and the same table everywhere."""

import os
import re

import launching
import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from groups import made
from hypothesis import given, strategies as st

import easydist
from easydist import settings
from easydist.cli.main import main
from easydist.errors import RemoteError
from easydist.testing import distributed

SWITCHES = ["EASYDIST_CHECK", "EASYDIST_PICKLE", "EASYDIST_SHM"]
MALFORMED = {name: ["", "  ", "maybe", "2", "nein", "0 0"] for name in SWITCHES} | {
    "EASYDIST_HOST_ID": ["", "\t"],
    "EASYDIST_JOB_KEY": ["", "short", "a b" * 20],
    "EASYDIST_STACK_SIGNAL": ["", "USR2", "12"],
    "EASYDIST_UNREACHABLE_AFTER": ["", "0", "-5", "nan", "1 min"],
    "EASYDIST_WARN_AFTER": ["", "abc", "0", "-1", "nan", "30s"],
}
USES = re.compile(r"\bEASYDIST_[A-Z]\w*")


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("pad", ["", " ", "\t\n"])
def test_the_usual_words_for_yes_and_no_are_understood(name, pad):
    for words, value in ((settings.YES, True), (settings.NO, False)):
        for word in (*words, *map(str.upper, words)):
            env = {name: f"{pad}{word}{pad}"}
            assert settings.read(name, env) is value
            assert settings.fault(env) == ""


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in MALFORMED.items() for text in texts])
def test_anything_else_is_an_error_that_names_the_variable_and_closes_what_it_may_close(name, text):
    assert settings.read(name, {name: text}) is settings.SETTINGS[name].safe
    with pytest.raises(
        ValueError, match=rf"^{name}=.* is (empty|malformed): {name} takes .*; unset it for the default$"
    ):
        settings.check({name: text})


def test_a_mistyped_switch_denies_pickle():
    assert settings.read("EASYDIST_PICKLE", {"EASYDIST_PICKLE": "fasle"}) is False


@pytest.mark.slow
@given(st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\0")))
def test_every_text_is_read_or_refused(text):
    for name, setting in settings.SETTINGS.items():
        is_refused = bool(settings.fault({name: text}))
        assert not is_refused or settings.read(name, {name: text}) == setting.safe
        assert len(settings.fault({name: text})) <= 70  # a record has no room for more


def test_unknown_names_are_a_warning_once(caplog):
    for _ in range(2):
        settings.check({"EASYDIST_WARN_AFTR": "3", "_EASYDIST_COMPLETE": "bash_source", "EASYDISTANT": "1"})
    (record,) = caplog.records
    assert "EASYDIST_WARN_AFTR (did you mean EASYDIST_WARN_AFTER?)" in record.getMessage()


@distributed(world_size=[1, 2, 3, 4])
@pytest.mark.parametrize("way", ["shm", "gloo"])
def test_all_ranks_raise_and_the_group_works_once_it_is_corrected(rank, way):
    size = dist.get_world_size()
    with made(way) as group, pytest.MonkeyPatch.context() as patch:
        if rank == size - 1:
            patch.setenv("EASYDIST_PICKLE", "maybe")
        if size > 1:
            for _ in range(2):
                kind = ValueError if rank == size - 1 else RemoteError
                with pytest.raises(kind, match=rf"rank {size - 1}: EASYDIST_PICKLE='maybe' is malformed: "):
                    easydist.gather(torch.tensor([rank]), group=group)
        patch.delenv("EASYDIST_PICKLE", raising=False)
        assert easydist.gather(torch.tensor([rank]), group=group).tolist() == list(range(size))


@distributed(world_size=3)
def test_making_a_group_in_shared_memory_raises_on_all_ranks(rank):
    import easydist.process_group  # noqa: F401 registers easydist_shm

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setenv("EASYDIST_WARN_AFTER", "soon")
        with pytest.raises(ValueError if rank == 1 else RemoteError, match="rank 1: EASYDIST_WARN_AFTER='soon'"):
            dist.new_group(backend="easydist_shm")


@pytest.mark.slow
@pytest.mark.parametrize("call", ["gather_object([1])", "queue.MessageQueue(1, 1)", "ProcessState()"])
def test_a_single_process_raises_in_its_first_call(call):
    code = f"import easydist\ntry: easydist.{call}\nexcept ValueError as error: print(error)"
    out, _ = launching.forked("-c", code, EASYDIST_PICKLE=" 2")
    assert out.startswith("EASYDIST_PICKLE=' 2' is malformed: EASYDIST_PICKLE takes yes or no")


@pytest.mark.slow
def test_run_refuses_before_it_starts_ranks(tmp_path):
    path = tmp_path / "never.py"
    path.write_text("print('started')")
    out, err = launching.forked("-m", "easydist", "run", path, status=2, EASYDIST_CHECK="")
    assert "EASYDIST_CHECK='' is empty" in err
    assert "started" not in out


def test_env_and_the_docs_list_every_variable():
    said = (
        CliRunner()
        .invoke(main, ["env"], env={"EASYDIST_SHM": "on", "EASYDIST_FOO": "1", "EASYDIST_PICKLE": "?"})
        .output
    )
    rows = dict(re.findall(r"^  (EASYDIST_\w+) +(.+)$", said.partition("settings")[2].partition("variables")[0], re.M))
    assert set(rows) == {*settings.SETTINGS, "EASYDIST_FOO"}
    assert rows["EASYDIST_SHM"] == "on: use shared memory on one host"
    assert rows["EASYDIST_PICKLE"].startswith("MALFORMED '?', takes yes or no")
    docs = (launching.ROOT / "docs" / "settings.md").read_text()
    assert re.findall(r"^\| `(EASYDIST_\w+)`", docs, re.M) == sorted(settings.SETTINGS)


def test_the_table_has_every_name_that_is_used():
    """A name that is read elsewhere escapes the strict reader, unless a test reads it."""
    for path in [*(launching.ROOT / "easydist").rglob("*.py"), *(launching.ROOT / "docs").glob("*.md")]:
        text = path.read_text()
        assert set(USES.findall(text)) - {"EASYDIST_COMPLETE", "EASYDIST_PICKEL"} <= set(settings.SETTINGS), path
        assert not re.search(r"environ[^\n]*[\"']EASYDIST_", text), path
    assert set(settings.unknown(dict.fromkeys(os.environ, ""))) == set()
