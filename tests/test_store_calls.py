"""No wait for a store without a limit: raw stores are called, and connected to, in one module or inside ``within``."""

import ast
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
    attributes = {
        id(method): held(node, ast.Attribute)
        for node in inner
        if isinstance(node, ast.ClassDef)
        for method in node.body
    }
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


def gives_a_store(value, known):
    if isinstance(value, ast.IfExp):
        return gives_a_store(value.body, known) or gives_a_store(value.orelse, known)
    return last_name(value) in (GIVE_STORES if isinstance(value, ast.Call) else known)


def unlimited(source):
    """Return the lines that wait for a store without a limit."""
    tree = ast.parse(source)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    limits = [node for node in calls if last_name(node) == "within"]
    limited = {id(part) for node in limits for given in (*node.args, *node.keywords) for part in ast.walk(given)}
    connecting = {id(node) for node in calls if connects(node)}
    waiting = {
        id(node)
        for nodes, stores in scopes(tree)
        for node in nodes
        if isinstance(node, ast.Call) and asks(node, stores)
    }
    return sorted(node.lineno for node in calls if id(node) in (connecting | waiting) - limited)


def connects(call):
    return last_name(call) in CONNECT and not (call.args and last_name(call.args[0]) == OWN)


def asks(call, stores):
    is_method = isinstance(call.func, ast.Attribute) and call.func.attr in METHODS
    return is_method and last_name(call.func.value) in stores | GIVE_STORES


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
        "next(rendezvous('env://'))",
        "dist.new_group([0, 1])",
    ],
)
def test_a_raw_call_is_found(line):
    assert unlimited(line)


def raw(source):
    """Return the lines that call a store of torch's, with a limit or without."""
    return [
        node.lineno
        for nodes, stores in scopes(ast.parse(source))
        for node in nodes
        if isinstance(node, ast.Call) and asks(node, stores)
    ]


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


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_module_waits_for_a_store_without_a_limit(path):
    source = path.read_text()
    if path.name == "timed_store.py" or "easydist.metrics.store" in source:  # the latter has a ``Store`` of its own
        return
    if "torch.distributed" in source or "store" in source.lower():
        assert not [f"{path}:{line}" for line in unlimited(source)]


def test_a_raw_call_with_a_limit_is_found():
    assert raw("def f(store: Store):\n    within(3, lambda: store.set('key', 'value'))")
    assert not raw("def f(store: TimedStore):\n    within(3, lambda: store.set('key', 'value'))")


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_module_writes_or_reads_unsigned_values(path):
    """``TimedStore`` signs, and checks signatures: nothing else may call a store, not even inside ``within``."""
    source = path.read_text()
    if path.name != "timed_store.py" and "easydist.metrics.store" not in source and "store" in source.lower():
        assert not [f"{path}:{line}" for line in raw(source)]


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
    assert unsealed(source.replace("self._seal.sealed(key, text)", "text")) == ["set_first", "set", "append", "append"]
    assert unsealed(source.replace("self._seal.opened", "str")) == ["get", "set_first"]
