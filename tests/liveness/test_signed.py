"""Values of a store that are signed with the job key."""

import pytest
from torch.distributed import FileStore, HashStore, PrefixStore, TCPStore

from easydist.errors import WireError
from easydist.liveness.log import Log
from easydist.liveness.signed import Seal, difference
from easydist.liveness.timed_store import TimedStore

KEYS = ["a" * 40, "b" * 40]


def timed(store, key, monkeypatch):
    monkeypatch.setenv("EASYDIST_JOB_KEY", key) if key else monkeypatch.delenv("EASYDIST_JOB_KEY", raising=False)
    return TimedStore(store)


@pytest.mark.parametrize("key", ["", KEYS[0]])
def test_every_value_arrives_as_it_was_written(key, monkeypatch):
    raw = HashStore()
    store = timed(PrefixStore("group", raw), key, monkeypatch)
    for text in ("", "[1]", "a:b:c:d:e", "signed", "é\n"):
        store.set("a/1", text)
        assert store.get("a/1") == text.encode()
        assert (raw.get("group/a/1") == text.encode()) is not bool(key)
    assert [store.set_first("met", text) for text in ("yes", "no")] == [b"yes", b"yes"]
    Log("log").append(store, 1, "first: a")
    assert [(entry.by, entry.text) for entry in Log("log").news(store)] == [(1, b"first: a")]
    assert store.check(["a/1"])
    assert not store.check(["a/1", "a/2"])


@pytest.mark.parametrize(
    ("writer", "reader", "said"),
    [
        ("", KEYS[0], "is not signed: rank 1 has no valid EASYDIST_JOB_KEY, or another program has written it"),
        (KEYS[1], KEYS[0], "is signed with another key: rank 1 has another EASYDIST_JOB_KEY than this process"),
        (KEYS[1], "", "is signed, but this process on .* has no valid EASYDIST_JOB_KEY"),
    ],
)
def test_a_value_of_a_rank_with_another_key_is_refused_and_named(writer, reader, said, monkeypatch):
    raw = HashStore()
    timed(raw, writer, monkeypatch).set("who/1", "[1]")
    store = timed(raw, reader, monkeypatch)
    with pytest.raises(WireError, match=rf"^the value of 'who/1' in the group's store {said}\. Give all ranks "):
        store.get("who/1", 1)
    if reader:
        with pytest.raises(WireError, match="EASYDIST_JOB_KEY"):
            store.check(["who/1"])
        with pytest.raises(WireError, match="EASYDIST_JOB_KEY"):
            store.set_first("who/1", "yes")


STORES = {
    "hash": lambda _: HashStore(),
    "file": lambda folder: FileStore(str(folder / "store"), 1),
    "tcp": lambda _: TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False),
}


@pytest.mark.parametrize("kind", STORES)
def test_a_changed_or_moved_value_is_refused(kind, monkeypatch, tmp_path):
    raw = STORES[kind](tmp_path)
    store = timed(raw, KEYS[0], monkeypatch)
    store.set("seen/1", "[17]")
    signed = raw.get("seen/1")
    for key, value in (("seen/1", signed.replace(b"[17]", b"[18]")), ("seen/2", signed), ("seen/1", signed[:-1])):
        raw.set(key, value)
        with pytest.raises(WireError, match="has a wrong signature: another program, without EASYDIST_JOB_KEY"):
            store.get(key, 1)


@pytest.mark.parametrize("value", [b"", b"signed:", b"signed:::", b"signed:\xff:\xff:\xff", b":::", b"signed:a:b"])
def test_any_other_bytes_are_refused(value):
    with pytest.raises(WireError, match="EASYDIST_JOB_KEY"):
        Seal(KEYS[0].encode()).opened("seen/1", value, 1)


def test_ranks_with_different_keys_are_listed():
    assert difference({0: "", 1: ""}, ["a", "b"]) == difference({0: "7", 1: "7"}, ["a", "b"]) == ""
    rows = difference({0: "7", 1: "8", 2: ""}, ["a", "b", "c"]).splitlines()
    assert rows[1:] == [
        "  rank 1 on b: EASYDIST_JOB_KEY with the fingerprint 8",
        "  rank 2 on c: no EASYDIST_JOB_KEY",
    ]


def test_an_error_shows_no_key():
    for key in KEYS:
        with pytest.raises(WireError) as caught:
            Seal(key.encode()).opened("seen/1", b"[1]")
        assert key not in str(caught.value)
