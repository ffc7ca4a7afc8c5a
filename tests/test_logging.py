"""Loggers of several processes: which of them write, in which order, and with which line."""

import logging
import os
import threading

import accelerate
import launching
import pytest

import easydist
from easydist import DisagreementError, RemoteError
from easydist.logging import MultiProcessAdapter, get_logger
from easydist.testing import distributed


class Records(logging.Handler):
    """Keeps all records."""

    def __init__(self):
        super().__init__()
        self.found = []

    def emit(self, record):
        self.found.append(record)

    @property
    def texts(self):
        return [record.getMessage() for record in self.found]


@pytest.fixture(autouse=True)
def levels():
    """Root's level is the tests' own."""
    level = logging.getLogger().level
    yield
    logging.getLogger().setLevel(level)


def made(level="INFO"):
    """Return a logger with a name of its own, and its records."""
    logger = get_logger(f"test.{os.getpid()}.{threading.get_ident()}", level)
    logger.logger.handlers.clear()
    logger.logger.propagate = False
    logger.logger.addHandler(records := Records())
    return logger, records


@distributed(world_size=[1, 2, 3, 4])
def test_messages_of_the_main_process_and_of_all(rank, world_size):
    logger, records = made()
    logger.info("main %d", 3)
    logger.warning("all", main_process_only=False)
    logger.log(logging.ERROR, "main")
    logger.debug("not at this level", main_process_only=False)
    assert records.texts == [
        f"[RANK {rank}] {text}"
        for text in (["main 3"] if rank == 0 else []) + ["all"] + (["main"] if rank == 0 else [])
    ]


@distributed(world_size=[2, 3, 4])
def test_in_order_each_process_writes_after_those_before_it(rank, world_size, tmp_path):
    logger, _ = made()
    logger.logger.addHandler(logging.FileHandler(tmp_path / "log"))
    for turn in range(5):
        logger.info("turn %d", turn, in_order=True, main_process_only=True)
        written = (tmp_path / "log").read_text().splitlines()
        assert len(written) >= (turn + 1) * world_size, "all leave together"
    assert written == [f"[RANK {r}] turn {turn}" for turn in range(5) for r in range(world_size)]


@distributed(world_size=3)
def test_levels_decide_about_writing_only(rank):
    logger, records = made("ERROR" if rank == 1 else "INFO")
    with easydist.trace() as trace:
        logger.info("hello", in_order=True)
    assert records.texts == ([] if rank == 1 else [f"[RANK {rank}] hello"])
    assert [call.operation for call in trace.calls] == ["log"] * 3
    assert all("test_logging.py:" in call.site for call in trace.calls)


@distributed(world_size=2)
def test_in_order_on_one_rank_only_is_a_disagreement(rank):
    logger, _ = made()
    with pytest.raises(DisagreementError, match=r"rank 0: log\(\) at .*test_logging.py:\d+\n  rank 1: gather_object"):
        easydist.gather_object(1) if rank else logger.info("hello", in_order=True)
    assert easydist.gather_object(rank) == [0, 1]


@distributed(world_size=3)
def test_an_exception_while_a_rank_writes_is_raised_on_all(rank):
    class Broken:
        def __str__(self):
            raise KeyError("no text")

    logger, _ = made()
    with pytest.raises(KeyError if rank == 1 else RemoteError, match="no text"):
        logger.info(Broken() if rank == 1 else "hello", in_order=True)
    assert easydist.gather_object(rank) == [0, 1, 2]


def test_the_line_is_the_callers():
    logger, records = made()
    where = test_the_line_is_the_callers.__code__.co_firstlineno

    def helper(**options):
        logger.info("from the helper", **options)

    logger.info("a")
    logger.log(logging.INFO, "b")
    logger.info("c", in_order=True)
    logger.warning_once("d")
    helper(stacklevel=2)
    try:
        raise ValueError("seen")
    except ValueError:
        logger.exception("e")
    lines = [record.lineno - where for record in records.found]
    assert lines == [7, 8, 9, 10, 11, 15]
    assert {record.pathname for record in records.found} == {__file__}
    assert records.found[-1].exc_info[0] is ValueError


def test_extra_reaches_the_record():
    logger, records = made()
    logger.info("x", extra={"step": 3})
    assert MultiProcessAdapter(logger.logger, {"run": "a", "step": 1}).info("y", extra={"step": 2}) is None
    assert (records.found[0].step, records.found[1].step, records.found[1].run) == (3, 2, "a")


def test_a_warning_once_is_written_once():
    logger, records = made()
    for value in (1, 1, [2], [2]):
        logger.warning_once("seen %s", value)
    assert records.texts == ["[RANK 0] seen 1", "[RANK 0] seen [2]"]


@distributed(world_size=3)
def test_ranks_stay_in_step_though_a_warning_is_new_on_some_only(rank):
    logger, records = made()
    for step in range(3):
        logger.warning_once("%d dropped", step * (rank == 1), in_order=True)
    assert easydist.gather_object([records.texts]) == [
        ["[RANK 0] 0 dropped"],
        ["[RANK 1] 0 dropped", "[RANK 1] 1 dropped", "[RANK 1] 2 dropped"],
        ["[RANK 2] 0 dropped"],
    ]


def test_levels_are_accelerates(monkeypatch):
    logger, root = logging.getLogger("test.levels"), logging.getLogger()
    before = root.level
    assert get_logger("test.levels").logger is logger
    assert (logger.level, root.level) == (0, before)
    monkeypatch.setenv("ACCELERATE_LOG_LEVEL", "error")
    get_logger("test.levels")
    assert (logger.level, root.level) == (logging.ERROR, logging.ERROR)
    get_logger("test.levels", log_level="debug")
    assert (logger.level, root.level) == (logging.DEBUG, logging.DEBUG)
    with pytest.raises(ValueError, match="Unknown level: 'LOUD'"):
        get_logger("test.levels", "loud")


def test_accelerates_logger_writes_the_same():
    accelerate.PartialState(cpu=True)
    found = []
    for get in (accelerate.logging.get_logger, get_logger):
        logger, records = get("test.theirs", "INFO"), Records()
        logger.logger.handlers = [records]
        logger.info("a %s", 1, main_process_only=False)
        logger.warning("b", in_order=True)
        logger.warning_once("c")
        logger.warning_once("c")
        logger.debug("d")
        found.append([(r.levelname, r.getMessage(), r.funcName if "c" not in r.msg else "") for r in records.found])
    assert found[0] == found[1]
    accelerate.PartialState._reset_state()


ALONE = """
import logging, sys, torch.distributed as dist
logging.basicConfig(stream=sys.stdout, level="INFO", format="%(message)s")
import easydist
logger = easydist.logging.get_logger("script")
logger.info("main")
logger.info("all", main_process_only=False)
from easydist import ProcessState
assert not dist.is_initialized() and not ProcessState._shared
assert ProcessState(cpu=True).num_processes == 2
assert not dist.is_initialized()
"""


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_before_a_state_or_a_group_exists(rank):
    """The other rank never comes: nothing waits for it."""
    out, _ = launching.forked("-c", ALONE, RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    assert out.splitlines() == (["[RANK 0] main"] if rank == 0 else []) + [f"[RANK {rank}] all"]
