"""The file with the job key."""

import os
import stat

import click
import launching
import pytest
from click.testing import CliRunner
from test_env import easydist

from easydist import settings
from easydist.cli.main import main
from easydist.cli.options import job_key

KEY = "k" * 40


def file_with(tmp_path, text, mode=0o600):
    path = tmp_path / "key"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_a_missing_file_is_made_once_and_only_its_owner_may_read_it(tmp_path, capsys):
    path = str(tmp_path / "key")
    made = job_key(path)
    assert settings.fault({settings.JOB_KEY: made}) == ""
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert capsys.readouterr().err == f"easydist run: made {path}; every host of the job needs this file\n"
    assert job_key(path) == made
    assert (os.listdir(tmp_path), capsys.readouterr().err) == (["key"], "")


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_a_file_of_this_user_alone_is_read(tmp_path, mode):
    assert job_key(file_with(tmp_path, f" {KEY}\n", mode)) == KEY


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        (KEY, 0o644, r"other users may open .*/key \(mode 0644\)\. Run chmod 600 .*/key"),
        (KEY, 0o660, r"\(mode 0660\)"),
        ("short", 0o600, "has no key, which is a text of at least 32 characters without spaces. Remove the file"),
        ("a b" * 20, 0o600, "has no key"),
        ("", 0o600, "has no key"),
        ("é" * 40, 0o600, "has no key"),
    ],
)
def test_any_other_file_is_an_error_that_says_what_to_do(tmp_path, text, mode, said):
    with pytest.raises(click.UsageError, match=said) as caught:
        job_key(file_with(tmp_path, text, mode))
    assert KEY not in str(caught.value)


def test_a_file_of_another_user_is_an_error(tmp_path, monkeypatch):
    path = file_with(tmp_path, KEY)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(click.UsageError, match=r"belongs to another user\. Copy it to a file of your own"):
        job_key(path)


def test_a_folder_that_is_missing_is_an_error(tmp_path):
    with pytest.raises(click.UsageError, match=r"cannot read or make .*: No such file or directory"):
        job_key(str(tmp_path / "missing" / "key"))


@pytest.mark.parametrize(("key", "shown"), [(KEY, "set: "), ("short key", "MALFORMED (hidden), takes a text of at")])
def test_env_and_errors_never_show_the_key(key, shown):
    said = CliRunner().invoke(main, ["env"], env={"EASYDIST_JOB_KEY": key}).output
    assert f"EASYDIST_JOB_KEY           {shown}" in said
    assert key not in said
    assert key not in settings.fault({"EASYDIST_JOB_KEY": key})


PRINTS = "import os, easydist; print(easydist.gather(1).tolist(), os.environ['EASYDIST_JOB_KEY'])"


@pytest.mark.slow
def test_the_ranks_have_the_key_in_their_environment(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(PRINTS)
    path = file_with(tmp_path, KEY)
    command = ("run", "-n", "2", "--job-key", path, script)
    out, _ = easydist(*command, EASYDIST_JOB_KEY="x", PYTHON_EXEC=launching.fork())
    assert sorted(out.splitlines()) == [f"[rank {rank}] [1, 1] {KEY}" for rank in range(2)]
    os.chmod(path, 0o640)
    out, err = easydist(*command, status=2)
    assert (out, "chmod 600" in err) == ("", True)
