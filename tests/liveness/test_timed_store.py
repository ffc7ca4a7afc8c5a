"""A store that answers late, and a process that ends meanwhile."""

import launching
import pytest
from torch.distributed import HashStore

from easydist.liveness.timed_store import TimedStore

SCRIPT = """
import time
from datetime import timedelta
from torch.distributed import HashStore
from easydist.liveness.timed_store import TimedStore

class Late(HashStore):
    def check(self, keys):
        self.wait(["never"], timedelta(seconds=1))

class EndsSlowly:
    def __del__(self, sleep=time.sleep):
        sleep(1)  # while the interpreter ends: the answer comes now

ends_slowly = EndsSlowly()
print(TimedStore(Late()).check(["key"]))
"""


class Broken(HashStore):
    def set(self, key, value):
        raise ConnectionError("reset by peer")


def test_a_store_that_raises_an_error_of_its_own_is_gone_and_the_others_go_on():
    with pytest.raises(RuntimeError, match="reset by peer"):
        TimedStore(Broken()).set("key", "value")
    store = TimedStore(HashStore())
    store.set("key", "value")
    assert store.get("key") == b"value"


@pytest.mark.slow
def test_a_question_under_way_does_not_abort_a_process_that_ends(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    assert launching.python(script) == ("False\n", "")
