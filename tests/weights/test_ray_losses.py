"""Ray actors that are lost, silent or late: who is named, what survivors keep, and how groups go on."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import launching
import pytest
import torch
from actors import HEAD, MARKS, begun, each, members, outcome, start, travels
from launching import within

import easydist
from easydist import CollectiveTimeout, PeerLostError

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")
pytestmark = MARKS
travels(__name__)


def sync(rank, name, src=0, **options):
    """A small tensor dict arrives on every actor; what each has then."""
    from easydist.ray import ray_broadcast_tensor_dict

    mine = {"w": torch.full((3,), float(src))} if rank == src else {}
    return ray_broadcast_tensor_dict(mine, src, group_name=name, **options)["w"].tolist()


# --- members that are lost


def waits(rank, name, when):
    """Rank 1 ends ``when`` it has been told; the others raise."""

    from easydist.ray import ray_broadcast_tensor_dict
    from easydist.weights import LocalShard, broadcast_state_dict, spans, target

    class Ends(spans.Destinations):
        def take(self, message, buffer):
            if rank == 1:
                os._exit(1)
            super().take(message, buffer)

    if when == "before" and rank == 1:
        os._exit(1)
    target.Destinations = Ends
    try:
        sent = {str(i): torch.ones(1 << 20) for i in range(24)}  # more than is under way at a time
        if when == "with a half":  # of which no other rank gets anything
            halves = {i: LocalShard(torch.empty(1 << 19), [(rank == 2) << 19], [1 << 20]) for i in sent}
            return outcome(lambda: broadcast_state_dict(halves if rank else sent, group=easydist.ray.group(name)))
        return outcome(lambda: ray_broadcast_tensor_dict(sent if rank == 0 else None, group_name=name))
    finally:
        target.Destinations = spans.Destinations


@pytest.mark.parametrize("when", ["in the middle", "with a half", pytest.param("before", marks=pytest.mark.battery)])
def test_a_lost_actor_is_named_and_replaced(actors, when):
    (mortal,) = members(1)
    group = [actors[0], mortal, actors[1]]
    easydist.ray.create_group(group, "mortals", timeout=within(60))
    refs = start(group, waits, "mortals", when)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(refs[1], timeout=within(60))
    for kind, text in ray.get([refs[0], refs[2]], timeout=within(60)):
        assert kind == "PeerLostError"
        assert "rank 1 is lost" in text
        assert "call create_group in the driver" in text  # recover() is for groups of torch
        assert "recover()" not in text
    with pytest.raises(PeerLostError, match="the actor of rank 1 has died") as caught:
        easydist.ray.create_group(group, "mortals", timeout=within(60))
    assert caught.value.rank == 1
    easydist.ray.create_group(actors[:3], "mortals", timeout=within(60))  # under the same name
    assert each(actors[:3], sync, "mortals", 2) == [[2.0] * 3] * 3


def test_a_silent_actor_is_named(actors, tmp_path):
    os.mkfifo(tmp_path / "silence")
    silent = actors[2].__ray_call__.remote(lambda _, path: path.read_text(), tmp_path / "silence")
    try:
        with pytest.raises(CollectiveTimeout, match=r"ranks \[2\] of 3") as caught:
            easydist.ray.create_group(actors[:3], "silent", timeout=within(0.5))
        assert caught.value.missing == (2,)
    finally:
        (tmp_path / "silence").write_text("over")
    assert ray.get(silent, timeout=within(60)) == "over"
    easydist.ray.create_group(actors[:3], "silent", timeout=within(60))  # what it was asked before is forgotten
    from ray.experimental.internal_kv import _internal_kv_list

    assert _internal_kv_list("easydist/created/", namespace="easydist") == []  # also after the one that failed
    assert each(actors[:3], sync, "silent", 0) == [[0.0] * 3] * 3


class Serving:
    """An actor with an event loop."""

    async def answer(self):
        return "here"


def test_an_asyncio_actor_answers_while_others_do_not_come(actors, tmp_path):
    from ray.experimental.internal_kv import _internal_kv_list

    def has_come(key):
        return key.endswith(b"/here/0")

    os.mkfifo(tmp_path / "silence")
    group = [ray.remote(num_cpus=0, resources={"first": 1})(Serving).remote(), actors[2]]
    silent = actors[2].__ray_call__.remote(lambda _, path: path.read_text(), tmp_path / "silence")
    try:
        with ThreadPoolExecutor(1) as pool:
            made = pool.submit(easydist.ray.create_group, group, "serving", timeout=within(60))
            try:
                while not any(map(has_come, _internal_kv_list("easydist/created/", namespace="easydist"))):
                    assert not made.done()
                assert ray.get(group[0].answer.remote(), timeout=within(20)) == "here"
                assert not made.done()
            finally:
                (tmp_path / "silence").write_text("over")
        made.result()
        assert each(group, sync, "serving", 1) == [[1.0] * 3] * 2
    finally:
        ray.kill(group[0])
    assert ray.get(silent, timeout=within(60)) == "over"


def waits_in_vain(rank, name, seconds):
    return outcome(lambda: sync(rank, name, timeout=seconds))


def test_an_actor_that_does_not_come_to_a_call_is_named(actors):
    easydist.ray.create_group(actors[:3], "absent", timeout=within(60))
    each(actors[:3], sync, "absent")
    for kind, text in each(actors[:2], waits_in_vain, "absent", within(0.5)):
        assert kind == "CollectiveTimeout"
        assert "rank 2: missing" in text  # each says what it saw where both give up at once
    ((late, _),) = each(actors[2:3], lambda _: outcome(lambda: sync(2, "absent", timeout=30.0)))
    assert late == "CollectiveTimeout"  # it comes to a call that the others have given up
    assert each(actors[:3], sync, "absent", 2) == [[2.0] * 3] * 3


def missing(rank, size, name, seconds):
    """Come to a group of which not all come."""
    try:
        easydist.ray.init_group(size, rank, name, timeout=seconds)
    except CollectiveTimeout as error:
        return error.missing, str(error)


def test_members_that_do_not_come_are_named(actors):
    for found, text in each(actors[:2], missing, 3, "incomplete", within(1.5)):
        assert found == (2,)
        assert "group 'incomplete': 1 of 3 ranks did not come within " in text
        assert "\n  rank 2: missing; not seen in this group yet\nEach member has to call init_group" in text
    ((found, text),) = each(actors[1:2], lambda _: missing(1, 2, "headless", 0.5))
    assert found == (0,)
    assert "rank 0 did not come in time" in text
    easydist.ray.create_group(actors[:3], "incomplete", timeout=within(60))
    assert each(actors[:3], sync, "incomplete", 1) == [[1.0] * 3] * 3


def enters(rank, size, name):
    return outcome(lambda: easydist.ray.init_group(size, rank, name, timeout=60.0))


def test_members_that_disagree_on_their_number_hear_of_it(actors):
    text = (
        "group 'unequal': ranks disagree on the number of members\n  rank 0: 3   rank 2: 4\nAll members have to call "
    )
    other = actors[2].__ray_call__.remote(lambda _: enters(2, 4, "unequal"))
    found = ray.get([*start(actors[:2], enters, 3, "unequal"), other], timeout=within(20))
    assert all(kind == "DisagreementError" and said.startswith(text) for kind, said in found), found


def test_a_new_member_that_comes_first_waits_for_a_larger_group(actors):
    each(actors[:2], enters, 2, "grows")
    late = actors[2].__ray_call__.remote(lambda _: enters(2, 3, "grows"))
    assert ray.wait([late], timeout=0.2)[0] == []  # it does not enter the group of two
    ray.get([*start(actors[:2], enters, 3, "grows"), late], timeout=within(20))
    assert each(actors[:3], sync, "grows", 2) == [[2.0] * 3] * 3


# --- versions


def enrols(actor, rank, size, name, fill):
    """Become the publisher or a receiver of a new generation; returns the version, and the time it took."""
    import time

    began = time.monotonic()
    easydist.ray.init_group(size, rank, name, timeout=60.0)
    group = easydist.ray.group(name)
    if not hasattr(actor, "member"):
        actor.weights = {str(i): torch.full((1 << 18,), fill) for i in range(8)}
        kind = easydist.weights.WeightPublisher if rank == 0 else easydist.weights.WeightReceiver
        actor.member = kind(actor.weights, group=group)
    version = actor.member.regroup(group)
    return version, time.monotonic() - began


def publishes(actor, rank, fill, mortal=None, when=None):
    """The next version; ``mortal`` ends ``when`` it has come so far. Gives version, values, and the error if any."""

    from easydist.weights import holders, schedule

    for value in actor.weights.values() if rank == 0 else ():
        value.fill_(fill)

    def end(*args):
        os._exit(1)

    if rank == mortal:
        if when == "header":
            end()
        elif when == "middle":
            schedule.UnderWay._end = end
        else:
            holders.agree = end
    call = actor.member.publish if rank == 0 else actor.member.receive
    found = outcome(call)
    return actor.member.version, sorted({float(one.mean()) for one in actor.weights.values()}), found


LOSSES = [(rank, when) for when in ("header", "middle", "acknowledgement") for rank in (1, 0)]
"""A receiver, then the publisher."""


@pytest.mark.battery
def test_a_version_is_complete_or_not_there_whoever_is_lost(actors):
    """The survivors keep the version before; one that replaces the lost member gets it, and publishes the next."""
    first, second, *spare = members(len(LOSSES))
    group, spare, version = [first, second, actors[3]], [*spare, *actors[:2]], 0
    for mortal, when in LOSSES:
        version = next_version(group, version)
        refs = begun(group, publishes, -1.0, mortal, when)
        survivors = [rank for rank in range(3) if rank != mortal]
        for rank, (has, values, error) in zip(survivors, taken(refs, survivors), strict=True):
            assert has == version
            assert rank == 0 or values == [float(version)]
            assert error[0] == "PeerLostError"
            assert f"rank {mortal} is lost" in error[1]
        group[mortal] = spare.pop(0)
    next_version(group, version)


def taken(refs, ranks):
    return ray.get([refs[rank] for rank in ranks], timeout=within(60))


def next_version(group, version):
    """All have the version, whoever is new, and then the next one."""
    enrolled = ray.get(begun(group, enrols, 3, "team", float(version)), timeout=within(60))
    assert [found for found, _ in enrolled] == [version] * 3
    found = ray.get(begun(group, publishes, version + 1.0), timeout=within(60))
    assert found == [(version + 1, [version + 1.0], version + 1)] * 3
    return version + 1


# --- engines that load the weights themselves


def engages(actor, rank):
    """Enrol as the trainer, as an engine that streams, or as one with a copy; returns the version."""
    group = easydist.ray.group("engines")
    if not hasattr(actor, "engine"):
        actor.loaded, trained = {}, {str(i): torch.ones(1 << 18) for i in range(8)}
        publisher = easydist.weights.WeightPublisher(trained, group=group, bucket_bytes=1 << 20) if rank == 0 else None
        actor.engine = publisher or easydist.weights.WeightReceiver(group=group)
    return actor.engine.regroup(group, load=actor.loaded.update if rank == 1 else None)


def updates(actor, rank, dies=False):
    """The next version, or the error; what this actor has loaded, and its version."""

    def load(entries):
        for name, tensor in entries:
            if dies:
                os.kill(os.getpid(), signal.SIGKILL)
            actor.loaded[name] = tensor

    engine = actor.engine
    found = outcome([engine.publish if rank == 0 else engine.receive, lambda: load(engine.stream())][rank == 1])
    return found, engine.version, len(actor.loaded)


def test_an_engine_that_dies_while_it_loads_is_replaced(actors):
    (mortal,) = members(1)
    group = [actors[0], mortal, actors[1]]
    for one, version in ((mortal, 0), (actors[2], 1)):
        group[1] = one
        easydist.ray.create_group(group, "engines", timeout=within(60))
        assert ray.get(begun(group, engages), timeout=within(60)) == [version] * 3
        found = ray.get(begun(group, updates), timeout=within(60))
        assert [row[1] for row in found] == [version + 1] * 3
        assert found[1] == (None, version + 1, 8)
        if one is mortal:
            for (kind, text), has, _ in taken(begun(group, updates, True), [0, 2]):
                assert (kind, has) == ("PeerLostError", 1)
                assert "rank 1 is lost" in text


# --- actors of another job

SERVICE = """
import sys, ray
address, node = sys.argv[1:]
ray.init(address=address, namespace="inference", logging_level="ERROR", log_to_driver=False, _node_ip_address=node)

class Service:
    pass

service = ray.remote(num_cpus=0, resources={"first": 1}, lifetime="detached", name="service")(Service).remote()
ray.get(service.__ray_ready__.remote())
"""


def test_a_detached_actor_of_another_job_is_a_member(actors, cluster):
    launching.python("-c", SERVICE, cluster.address, HEAD, seconds=120)
    service = ray.get_actor("service", namespace="inference")
    try:
        easydist.ray.create_group([actors[0], service], "jobs", timeout=within(60))
        assert each([actors[0], service], sync, "jobs", 1) == [[1.0] * 3] * 2
    finally:
        ray.kill(service)
