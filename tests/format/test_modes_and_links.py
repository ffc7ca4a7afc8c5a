"""The mode of a file that ``save`` replaces, and links on the way to it."""

import contextlib
import os
import stat
import subprocess
import sys

import launching
import pytest

import easydist
from easydist.format.links import resolved

OTHER = 65533
"""A user that is neither this one nor root."""

NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")


@pytest.fixture
def sticky(tmp_path):
    """Return a folder of root in which everybody may create files."""
    folder = tmp_path / "sticky"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


def planted(link, target, owner=OTHER):
    link.symlink_to(target)
    os.lchown(link, owner, owner)
    return link


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664, 0o444])
def test_the_mode_of_an_existing_file_is_kept(tmp_path, mode):
    path = tmp_path / "x.safetensors"
    easydist.save([1], path)
    path.chmod(mode)
    easydist.save([2], path)
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert easydist.load(path) == [2]


def test_the_new_file_is_private_while_it_is_written(tmp_path, monkeypatch):
    path, seen = tmp_path / "x.safetensors", []
    path.touch(0o600)
    replace = os.replace

    def look(temporary, target):
        seen.append(stat.S_IMODE(os.stat(temporary).st_mode))
        replace(temporary, target)

    before = os.umask(0)
    try:
        monkeypatch.setattr(os, "replace", look)
        easydist.save([1], path)
    finally:
        os.umask(before)
    assert seen == [0o600]


@NEEDS_ROOT
def test_the_group_is_kept_or_gets_no_permission(tmp_path, monkeypatch):
    path = tmp_path / "x.safetensors"
    path.touch()
    os.chown(path, 0, OTHER)
    path.chmod(0o660)
    easydist.save([1], path)
    assert (path.stat().st_gid, stat.S_IMODE(path.stat().st_mode)) == (OTHER, 0o660)

    def refuse(*args):
        raise PermissionError

    monkeypatch.setattr(os, "fchown", refuse)
    easydist.save([1], path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@NEEDS_ROOT
@pytest.mark.parametrize("mode", [0o1777, 0o1770])
@pytest.mark.parametrize("way", ["file", "missing file", "folder", "chain", "own link to it"])
def test_a_link_of_another_user_in_a_sticky_folder_is_refused(tmp_path, sticky, way, mode):
    sticky.chmod(mode)
    (secret := tmp_path / "authorized").write_text("before")
    path = sticky / "x.safetensors"
    if way == "file":
        planted(path, secret)
    elif way == "missing file":
        planted(path, tmp_path / "new")
    elif way == "folder":
        planted(sticky / "out", tmp_path)
        path = sticky / "out" / "authorized"
    elif way == "chain":
        planted(sticky / "second", secret)
        planted(path, "second")
    else:
        planted(path, secret)
        (tmp_path / "mine").symlink_to(path)
        path = tmp_path / "mine"
    with pytest.raises(PermissionError, match=r"save does not follow the link .* \(uid 65533\) has made"):
        easydist.save([1], path)
    assert secret.read_text() == "before"
    assert {entry.name for entry in tmp_path.iterdir()} <= {"authorized", "sticky", "mine"}


@NEEDS_ROOT
def test_own_links_those_of_the_folders_owner_and_those_elsewhere_are_followed(tmp_path, sticky):
    target = tmp_path / "x.safetensors"
    planted(tmp_path / "elsewhere", target)
    planted(sticky / "own", target, os.geteuid())
    os.chown(sticky, OTHER, OTHER)
    planted(sticky / "owners", target)
    for number, link in enumerate([tmp_path / "elsewhere", sticky / "own", sticky / "owners"]):
        easydist.save([number], link)
        assert easydist.load(target) == [number]
        assert link.is_symlink()


@NEEDS_ROOT
@pytest.mark.slow
def test_another_user_is_protected_from_third_ones(tmp_path, sticky):
    """This user is not root, and the link is a third one's."""
    tmp_path.chmod(0o777)
    for folder in tmp_path.parents:
        with contextlib.suppress(PermissionError):
            folder.chmod(folder.stat().st_mode | 0o111)
    planted(sticky / "x", tmp_path / "target", OTHER - 1)
    code = (
        "import os, sys\nfrom easydist.format.links import resolved\n"
        f"os.setgid({OTHER}); os.setuid({OTHER})\n"
        "try: resolved(sys.argv[1])\nexcept PermissionError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, sticky / "x"],
        env=os.environ | {"PYTHONPATH": str(launching.ROOT)},
        capture_output=True,
        text=True,
    )
    assert "save does not follow the link" in done.stdout, done.stderr


@NEEDS_ROOT
def test_a_file_that_another_user_has_planted_gives_its_mode_to_nobody(sticky):
    path = sticky / "x.safetensors"
    path.touch()
    path.chmod(0o666)
    os.chown(path, OTHER, OTHER)
    easydist.save([1], path)
    assert (path.stat().st_uid, stat.S_IMODE(path.stat().st_mode)) == (0, 0o600)


def test_links_are_resolved_as_by_the_system(tmp_path, monkeypatch):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "to_b").symlink_to("a/b")
    (tmp_path / "a" / "up").symlink_to("../to_b/..")
    (tmp_path / "round").symlink_to("round")
    monkeypatch.chdir(tmp_path)
    for path in [
        "x",
        "./a//x",
        "to_b/x",
        "to_b/../x",
        "a/up/b/x",
        f"{tmp_path}/a/up/../to_b",
        "/",
        "//x",
        "a/missing/../x",
    ]:
        assert resolved(path) == os.path.realpath(path), path
    with pytest.raises(OSError, match="Too many levels"):
        resolved("round")
