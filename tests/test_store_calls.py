"""No wait for a store without a limit: raw stores are called in one module, and reached and used to connect in calls of
``within`` or ``connect``, which have a limit.
"""

import ast
import functools
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "easydist"
MODULES = sorted(PACKAGE.rglob("*.py"))
STORES = {"Store", "TCPStore", "FileStore", "PrefixStore"}
GIVE_STORES = {*STORES, "served", "reached", "get_group_store", "_get_default_store", "underlying_store"}
METHODS = {"set", "get", "add", "check", "wait", "compare_set", "delete_key", "multi_get", "multi_set", "append"}
METHODS |= {"num_keys", "set_timeout", "queue_pop", "queue_push", "list_keys", "barrier"}
CONNECT = {"TCPStore", "rendezvous", "init_process_group", "new_group", "_new_process_group_helper", "split_group"}
CONNECT |= {"ProcessGroupGloo", "ProcessGroupNCCL", "_Gloo", "_store_based_barrier", "monitored_barrier"}
OWN = "NAME"
"""``init_process_group(NAME, …)`` meets through easydist's own code, which calls no raw store."""


def last_name(node):
    """Return the last name of ``a``, ``a.b`` or ``a.b(…)``."""
    node = node.func if isinstance(node, ast.Call) else node
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def is_a_store(annotation):
    return annotation is not None and any(last_name(part) in STORES for part in ast.walk(annotation))


def scopes(tree):
    """Return each function's own nodes, those of the methods of a class together; and the module's."""
    inner = [node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    methods = [one for node in inner if isinstance(node, ast.ClassDef) for one in node.body]
    functions = [node for node in [*inner, *methods] if isinstance(node, ast.FunctionDef)]
    classes = [(node, held(node, ast.Attribute)) for node in inner if isinstance(node, ast.ClassDef)]
    attributes = {id(method): stores for node, stores in classes for method in node.body}
    yield [node for one in tree.body if one not in inner for node in ast.walk(one)], held(tree, ast.Name)
    for function in functions:
        yield list(ast.walk(function)), held(function, ast.Name) | attributes.get(id(function), set())


def held(scope, kind):
    """Return the names of this kind, variables or attributes, that hold a store of torch's."""
    nodes, pairs = list(ast.walk(scope)), []
    found = {arg.arg for arg in nodes if isinstance(arg, ast.arg) and is_a_store(arg.annotation)}
    for node in nodes:
        if isinstance(node, ast.AnnAssign) and is_a_store(node.annotation):
            found.add(last_name(node.target))
        for target in node.targets if isinstance(node, ast.Assign) else ():
            both = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
            pairs += zip(target.elts, node.value.elts, strict=False) if both else [(target, node.value)]
    while new := {last_name(target) for target, value in pairs if gives_a_store(value, found)} - found - {""}:
        found |= new
    named = {last_name(node) for node in nodes if isinstance(node, kind)} | {
        arg.arg for arg in nodes if isinstance(arg, ast.arg) and kind is ast.Name
    }
    return (found & named) - {last_name(target) for target, value in pairs if last_name(value) == "TimedStore"}


def timed(tree):
    """Return the variables, and the attributes, that hold a ``TimedStore`` anywhere in a module."""
    nodes = list(ast.walk(tree))
    found = {(ast.Name, arg.arg) for arg in nodes if isinstance(arg, ast.arg) and is_timed(arg.annotation)}
    found |= {key(node.target) for node in nodes if isinstance(node, ast.AnnAssign) and is_timed(node.annotation)}
    pairs = [(target, node.value) for node in nodes if isinstance(node, ast.Assign) for target in node.targets]
    pairs += [(node.target, node.value) for node in nodes if isinstance(node, ast.NamedExpr)]
    while (
        new := {key(one) for target, value in pairs for one, held in matched(target, value) if holds(held, found)}
        - found
    ):
        found |= new
    return found


def key(node):
    return type(node), last_name(node)


def is_timed(annotation):
    return annotation is not None and any(last_name(part) == "TimedStore" for part in ast.walk(annotation))


def matched(target, value):
    both = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
    return zip(target.elts, value.elts, strict=False) if both else [(target, value)]


def holds(value, found):
    if isinstance(value, ast.IfExp):
        return holds(value.body, found) or holds(value.orelse, found)
    return last_name(value) == "TimedStore" or (key(value) in found and last_name(value) != "")


def gives_a_store(value, known):
    if isinstance(value, ast.IfExp):
        return gives_a_store(value.body, known) or gives_a_store(value.orelse, known)
    return last_name(value) in (GIVE_STORES if isinstance(value, ast.Call) else known)


def unlimited(source):
    """Return the lines that wait for a store without a limit."""
    tree, asking = parsed(source)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    limits = [node for node in calls if last_name(node) == "within" or getattr(node.func, "id", "") == "connect"]
    limited = {id(part) for node in limits for given in (*node.args, *node.keywords) for part in ast.walk(given)}
    connecting = {id(node) for node in calls if connects(node)}
    waiting = {id(node) for node in asking}
    return sorted(node.lineno for node in calls if id(node) in (connecting | waiting) - limited)


@functools.cache
def parsed(source):
    """Return the tree of a module, and its calls of stores of torch's."""
    return (tree := ast.parse(source)), [*raw_calls(tree)]


def raw_calls(tree):
    """Return the calls of stores of torch's: what is not known to be a ``TimedStore`` is one if its name says store."""
    known = timed(tree)
    for nodes, stores in scopes(tree):
        yield from (node for node in nodes if isinstance(node, ast.Call) and asks(node, stores))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and asks(node, set(), known):
            yield node


def connects(call):
    return last_name(call) in CONNECT and not (call.args and last_name(call.args[0]) == OWN)


def asks(call, stores, known=None):
    if not isinstance(call.func, ast.Attribute) or call.func.attr not in METHODS:
        return False
    store = call.func.value
    says_so = known is not None and last_name(store).lower().endswith("store") and key(store) not in known
    return last_name(store) in stores | GIVE_STORES or (says_so and last_name(store) != "TimedStore")


@pytest.mark.parametrize(
    "line",
    [
        "def f(store: Store):\n    store.get('key')",
        "def f(store: Store | None):\n    store.wait(['key'])",
        "store = PrefixStore('a', b)\nstore.set('key', 'value')",
        "class A:\n    def __init__(self, store: Store):\n        self._store, self.x = store, 1\n"
        "    def f(self):\n        return self._store.add('key', 1)",
        "store = TCPStore('host', 1)",
        "group.get_group_store().check(['key'])",
        "dist.init_process_group('gloo', store=store)",
        "gloo = ProcessGroupGloo(store, 0, 2)",
        "def f(place):\n    place.store.get('key')",
        "def f(store):\n    store.get('key')",
        "class A:\n    def __init__(self, store):\n        self._store = store\n"
        "    def f(self):\n        self._store.get('key')",
        "if (store := group.get_group_store()):\n    store.get('key')",
        "HashStore().get('key')",
        "next(rendezvous('env://'))",
        "dist.new_group([0, 1])",
    ],
)
def test_a_raw_call_is_found(line):
    assert unlimited(line)


def raw(source):
    """Return the lines that call a store of torch's, with a limit or without."""
    return [node.lineno for node in parsed(source)[1]]


@pytest.mark.parametrize(
    "line",
    [
        "def f(store: TimedStore):\n    store.get('key')",
        "def f(store: Store):\n    within(3, lambda: store.get('key'))",
        "timed = TimedStore(PrefixStore('a', b))\ntimed.set('key', 'value')",
        "gloo = within(3, lambda: ProcessGroupGloo(store, 0, 2))",
        "known = {}\nknown.get('store')",
    ],
)
def test_a_call_with_a_limit_is_none(line):
    assert not unlimited(line)


def sources(words):
    """Return by path the modules that have one of these words, but those that may call raw stores."""
    found = {path: path.read_text() for path in MODULES if path.name != "timed_store.py"}
    own = "easydist.metrics.store"  # a ``Store`` of another kind
    return {
        path: text for path, text in found.items() if own not in text and any(word in text.lower() for word in words)
    }


@pytest.mark.slow
def test_no_module_waits_for_a_store_without_a_limit():
    modules = sources(["store", "torch.distributed"])
    assert not [f"{path}:{line}" for path, source in modules.items() for line in unlimited(source)]


def test_a_raw_call_with_a_limit_is_found():
    assert raw("def f(store: Store):\n    within(3, lambda: store.set('key', 'value'))")
    assert not raw("def f(store: TimedStore):\n    within(3, lambda: store.set('key', 'value'))")


@pytest.mark.slow
def test_no_module_writes_or_reads_unsigned_values():
    """``TimedStore`` signs, and checks signatures: nothing else may call a store, not even inside ``within``."""
    assert not [f"{path}:{line}" for path, source in sources(["store"]).items() for line in raw(source)]


SEALED, OPENED = {"set", "compare_set"}, {"get", "compare_set"}


def unsealed(source):
    """Return the methods that write a value which is not sealed, or return one that is not opened."""
    found = []
    for method in [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]:
        calls = [node for node in ast.walk(method) if isinstance(node, ast.Call)]
        names = {last_name(call) for call in calls}
        used = {last_name(call) for call in calls if "_store" in ast.unparse(call.func)}
        if (used & SEALED and "sealed" not in names) or (used & OPENED and "opened" not in names):
            found.append(method.name)
        if used & (METHODS - SEALED - OPENED - {"add", "check", "delete_key", "set_timeout"}):
            found.append(method.name)
    return found


def test_the_one_writer_signs_and_the_one_reader_checks():
    source = (PACKAGE / "liveness" / "timed_store.py").read_text()
    assert not unsealed(source)
    assert unsealed(source.replace("self._seal.sealed", "str")) == ["set_first", "set", "append", "append"]
    assert unsealed(source.replace("self._seal.opened", "str")) == ["get", "set_first"]
