"""The file with the job key, for ``easydist run --job-key FILE``."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import tempfile

import click

from easydist import settings


def read(path: str) -> str:
    """Return the key in a file; if there is no such file, make one with a random key.

    Args:
        path: The file. It must belong to this user, who alone may read it.

    Raises:
        click.UsageError: Others may read the file, or it has no key.
    """
    try:
        if not os.path.exists(path):
            _make(path)
        with open(path, encoding="ascii") as file:
            _check_owner(path, os.fstat(file.fileno()))
            key = file.read().strip()
    except OSError as error:
        raise click.UsageError(f"--job-key: cannot read or make {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        key = ""
    if settings.fault({settings.JOB_KEY: key}):
        expected = settings.SETTINGS[settings.JOB_KEY].expects
        raise click.UsageError(
            f"--job-key: {path} has no key, which is {expected}. Remove the file, and easydist run makes a new one"
        )
    return key


def _check_owner(path: str, found: os.stat_result) -> None:
    if found.st_uid != os.geteuid():
        raise click.UsageError(f"--job-key: {path} belongs to another user. Copy it to a file of your own")
    if (mode := stat.S_IMODE(found.st_mode)) & 0o077:
        raise click.UsageError(
            f"--job-key: other users may open {path} (mode {mode:04o}). Run chmod 600 {path}; if they may have read "
            "it, remove it instead, and easydist run makes a new one"
        )


def _make(path: str) -> None:
    """Make the file at once with its content, because other hosts may be starting with it, too."""
    descriptor, draft = tempfile.mkstemp(dir=os.path.dirname(os.path.abspath(path)))  # mode 0600
    try:
        with open(descriptor, "w") as file:
            file.write(f"{secrets.token_hex(32)}\n")
        with contextlib.suppress(FileExistsError):  # another host was faster
            os.link(draft, path)
            click.echo(f"easydist run: made {path}; every host of the job needs this file", err=True)
    finally:
        os.unlink(draft)
