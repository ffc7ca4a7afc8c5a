"""The environment variables that configure easydist: one table of all ``EASYDIST_*`` names, and one strict reader.

A value is stripped of surrounding spaces. An empty or malformed one is an error: ``check`` raises it in a process that
works alone, and the ranks of a group raise it together when they meet (``groups/sharing.py``). Until then the readers
return the safe value, so that a mistyped switch never opens what it was meant to close.
"""

from __future__ import annotations

import functools
import logging
import os
import signal
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

_PREFIX = "EASYDIST_"

JOB_KEY = "EASYDIST_JOB_KEY"
"""The variable whose value nothing ever shows."""

_SECRET = 32
"""The least characters of a key."""

_LONGEST = 40
"""The most letters of a malformed value in an error: ranks tell it each other in records of limited length."""

YES = ("y", "yes", "t", "true", "on", "1")
NO = ("n", "no", "f", "false", "off", "0")

_log = logging.getLogger("easydist")


def _switch(text: str) -> bool:
    if text.lower() not in (*YES, *NO):
        raise ValueError(text)
    return text.lower() in YES


def _positive(text: str) -> float:
    if not (number := float(text)) > 0:
        raise ValueError(text)
    return number


def _signal(text: str) -> str:
    if text not in signal.Signals.__members__:
        raise ValueError(text)
    return text


def _secret(text: str) -> str:
    if len(text) < _SECRET or any(letter.isspace() for letter in text):
        raise ValueError
    return text


class Setting(NamedTuple):
    """One variable.

    Attributes:
        parse: Returns the value of a text that is not empty, or raises ValueError.
        expects: The texts that it accepts, for errors.
        default: Its value if the variable is not set.
        safe: Its value if the variable is malformed.
        meaning: Its effect, for ``easydist env`` and the docs.
        is_secret: True if its value must not be shown.
    """

    parse: Callable[[str], Any]
    expects: str
    default: Any
    safe: Any
    meaning: str
    is_secret: bool = False


_WORDS = "yes or no (also y/n, true/false, t/f, on/off, 1/0)"
_NUMBER = "a positive number"

SETTINGS = {
    "EASYDIST_CHECK": Setting(_switch, _WORDS, True, True, "compare the calls of all ranks"),
    "EASYDIST_CUDA_IPC": Setting(
        _switch, _WORDS, True, False, "move weights between processes that share a GPU on the GPU itself"
    ),
    "EASYDIST_HOST_ID": Setting(str, "a text", "", "", "ranks share memory only if this text is equal"),
    JOB_KEY: Setting(
        _secret,
        f"a text of at least {_SECRET} characters without spaces",
        "",
        "",
        "sign what easydist writes to the store with this key",
        is_secret=True,
    ),
    "EASYDIST_PICKLE": Setting(_switch, _WORDS, True, False, "allow unrestricted unpickling"),
    "EASYDIST_SHM": Setting(_switch, _WORDS, True, False, "use shared memory on one host"),
    "EASYDIST_STACK_SIGNAL": Setting(
        _signal, "the name of a signal, such as SIGUSR2", "", "", "the signal on which ranks write stacks for top"
    ),
    "EASYDIST_STRESS": Setting(_positive, _NUMBER, 1200.0, 1200.0, "easydist's own tests: the number of random calls"),
    "EASYDIST_TEST_PATIENCE": Setting(_positive, _NUMBER, "", "", "easydist's own tests: the factor of time limits"),
    "EASYDIST_UNREACHABLE_AFTER": Setting(
        _positive, _NUMBER, 25.0, 25.0, "seconds after which a host that does not answer counts as lost"
    ),
    "EASYDIST_WARN_AFTER": Setting(_positive, _NUMBER, 30.0, 30.0, "seconds of waiting between warnings"),
}
"""Every variable that easydist knows, by its name."""


def read(name: str, env: Mapping[str, str] = os.environ) -> Any:
    """Return the value of a variable: its default if it is not set, and its safe value if it is malformed.

    Args:
        name: The variable, a key of ``SETTINGS``.
        env: The environment.

    Example:
        >>> read("EASYDIST_PICKLE", {}), read("EASYDIST_PICKLE", {"EASYDIST_PICKLE": " Off "})
        (True, False)
        >>> read("EASYDIST_PICKLE", {"EASYDIST_PICKLE": "maybe"})
        False
    """
    setting, text = SETTINGS[name], env.get(name)
    if text is None:
        return setting.default
    try:
        return setting.parse(text.strip()) if text.strip() else setting.safe
    except ValueError:
        return setting.safe


def fault(env: Mapping[str, str] = os.environ) -> str:
    """Return the first malformed variable, as ``NAME='value'``; empty if there is none.

    Args:
        env: The environment.

    Example:
        >>> fault({"EASYDIST_PICKLE": "maybe"}), fault({"EASYDIST_PICKLE": "no"})
        ("EASYDIST_PICKLE='maybe'", '')
    """
    for name, setting in SETTINGS.items():
        if (text := env.get(name)) is not None and not _is_valid(setting, text.strip()):
            return f"{name}={'(hidden)' if setting.is_secret and text.strip() else ascii(text)[:_LONGEST]}"
    return ""


def _is_valid(setting: Setting, text: str) -> bool:
    try:
        setting.parse(text)
    except ValueError:
        return False
    return bool(text)


def text_of(fault: str) -> str:
    """Return the error about a malformed variable.

    Args:
        fault: The result of ``fault``, of this or another rank.
    """
    name, _, value = fault.partition("=")
    what = "is empty" if value == "''" else "is malformed"
    takes = SETTINGS[name].expects if name in SETTINGS else "another value"  # that rank may have another version
    return f"{fault} {what}: {name} takes {takes}; unset it for the default"


def check(env: Mapping[str, str] = os.environ) -> None:
    """Check the variables of a process that works alone, and warn of names that easydist does not know.

    Args:
        env: The environment.

    Raises:
        ValueError: A variable is empty or malformed.

    Example:
        >>> check({"EASYDIST_CHECK": "2"})
        Traceback (most recent call last):
        ValueError: EASYDIST_CHECK='2' is malformed: EASYDIST_CHECK takes yes or no (also ...); unset it for the default
    """
    if malformed := fault(env):
        raise ValueError(text_of(malformed))
    warn_of_unknown(env)


def unknown(env: Mapping[str, str] = os.environ) -> list[str]:
    """Return the names that look like easydist's but are none, with the name that may be meant.

    Args:
        env: The environment.

    Example:
        >>> unknown({"EASYDIST_PICKEL": "0", "EASYDIST_SHM": "0"})
        ['EASYDIST_PICKEL (did you mean EASYDIST_PICKLE?)']
    """
    return [f"{name}{_suggestion(name)}" for name in sorted(env) if name.startswith(_PREFIX) and name not in SETTINGS]


def _suggestion(name: str) -> str:
    from difflib import get_close_matches

    return f" (did you mean {close[0]}?)" if (close := get_close_matches(name, SETTINGS, 1, 0.8)) else ""


def table(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return a line about every variable: its text or its default, and its meaning; unknown names follow.

    Args:
        env: The environment.

    Example:
        >>> table({"EASYDIST_CHECK": "off"})["EASYDIST_CHECK"]
        'off: compare the calls of all ranks'
    """
    known = {name: f"{_shown(name, env)}: {setting.meaning}" for name, setting in SETTINGS.items()}
    return known | {
        name: f"unknown, no effect {hint}".strip() for name, _, hint in (n.partition(" ") for n in unknown(env))
    }


def _shown(name: str, env: Mapping[str, str]) -> str:
    if (text := env.get(name)) is None:
        default = SETTINGS[name].default
        return f"{ {True: 'yes', '': 'not set'}.get(default) or f'{default:g}' } (default)"
    setting, malformed = SETTINGS[name], fault({name: text})
    shown, text = ("(hidden)", "set") if setting.is_secret else (ascii(text), text.strip())
    return f"MALFORMED {shown}, takes {setting.expects}" if malformed else text


def warn_of_unknown(env: Mapping[str, str] = os.environ) -> None:
    """Warn of unknown names, once in each process.

    Args:
        env: The environment.
    """
    if names := unknown(env):
        _warn(", ".join(names))


@functools.cache
def _warn(names: str) -> None:
    _log.warning("easydist knows no variable %s, which has no effect; `easydist env` lists all of them", names)
