"""An unpickler that runs only allow-listed code, in time and memory proportional to its input.

It accepts only the opcodes that protocol 5 writes: no persistent ids, no extension registry, no PUT (its index can
request any amount of memory), no text opcodes. Globals come from dicts; nothing is imported or looked up by attribute.
"""

from __future__ import annotations

import dataclasses
import functools
import pickle
import re
import struct
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from easydist.base.wording import a_or_an
from easydist.errors import EasydistError, UnsafeObjectError, WireError
from easydist.format import allowlist, cost, plain

_FREE_WORK, _WORK_PER_BYTE = 1_000_000, 16
_DEEPEST_KEY = 100
_SAME_HASH, _SLOW_SAME_HASH = 4, 64
"""The factors by which comparing two keys of the same hash may cost more than hashing one: plain keys, and others."""

_SHORT_KEY = 64
"""The characters up to which a string costs nothing as a key."""

_NEAR = 1 << 60
"""The bound on integers that are nearer to zero, no two of which share a hash."""

_STOP = pickle.STOP[0]
_NO_MAKERS: dict[str, Callable[..., Any]] = {}
_FEW_PER_HASH = (float, bool, type(None))
_NAMES = {code[0]: name for name, code in vars(pickle).items() if isinstance(code, bytes) and len(code) == 1}

_Op = Callable[["Unpickler"], None]
OPCODES: dict[int, _Op] = {}
"""The known opcodes, and their functions."""


def _op(*codes: bytes) -> Callable[[_Op], _Op]:
    def register(run: _Op) -> _Op:
        OPCODES.update({code[0]: run for code in codes})
        return run

    return register


def load(
    data: memoryview,
    buffers: Sequence[Any] = (),
    makers: Mapping[str, Callable[..., Any]] = _NO_MAKERS,
    weigh: Callable[[Any, Any], Iterable[int]] = lambda make, args: (),
) -> Any:
    """Return the object of a pickle; for the arguments and errors see ``Unpickler``, which plain values do not need.

    Example:
        >>> load(memoryview(pickle.dumps({"a": [1, (None,)]}, 5)))
        {'a': [1, (None,)]}

    Cost: for a small dict 1.5 µs, where ``Unpickler`` takes 8.
    """
    if buffers or (listed := plain.listed(data)) is None:
        return Unpickler(data, buffers, makers, weigh).load()
    try:
        (value,) = pickle.loads(listed)
        return value
    except Exception as error:
        raise _invalid(error) from error


def _invalid(error: Exception) -> WireError:
    return WireError(f"not a valid object message: {type(error).__name__}: {error!s:.300}")


class Unpickler:
    """A reader of one pickle.

    Args:
        data: The pickle.
        buffers: Its out-of-band buffers.
        makers: The functions by name that it may call with any arguments; they check these themselves.
        weigh: Yields the costs of a call of one of them beyond those of its arguments (``cost.of_argument``).
    """

    def __init__(
        self,
        data: memoryview,
        buffers: Iterable[Any] = (),
        makers: Mapping[str, Callable[..., Any]] = _NO_MAKERS,
        weigh: Callable[[Any, Any], Iterable[int]] = lambda make, args: (),
    ) -> None:
        self.stack: list[Any] = []
        self.memo: list[Any] = []
        self._data, self._nbytes, self._at = data, len(data), 0
        self._marks: list[list[Any]] = []
        outside = list(buffers)
        self._buffers: Iterator[Any] = iter(outside)
        self._makers, self._weigh = makers, weigh
        self._same_hash = _SAME_HASH
        self._hashes: dict[int, tuple[Any, dict[int, int]]] = {}
        self._work = _FREE_WORK + _WORK_PER_BYTE * (len(data) + sum(map(len, outside)))

    @functools.cached_property
    def _trusted(self) -> dict[str, Any]:
        return allowlist.registered()

    @functools.cached_property
    def _trusted_ids(self) -> set[int]:
        return {id(value) for value in self._trusted.values()}

    def load(self) -> Any:
        """Return the object.

        Raises:
            UnsafeObjectError: It needs a global that is not allow-listed.
            WireError: These are not the bytes of a pickle that ``codec.encode`` wrote.

        Example:
            >>> Unpickler(memoryview(pickle.dumps({"a": {1}}, 5))).load()
            {'a': {1}}
        """
        try:
            data, known = self._data, OPCODES
            while (code := data[self._at]) != _STOP:
                self._at += 1
                (known.get(code) or _unknown(code))(self)
            return self._end()
        except EasydistError:
            raise
        except Exception as error:
            raise _invalid(error) from error

    def _end(self) -> Any:
        if (
            self._at + 1 != len(self._data)
            or self._marks
            or len(self.stack) != 1
            or next(self._buffers, None) is not None
        ):
            raise WireError("not a valid object message: it is not complete, or data is left over")
        return self.stack.pop()

    # --- bytes

    def take(self, nbytes: int) -> memoryview:
        """Return the next bytes."""
        start = self._at
        self._at = end = start + nbytes
        if end > self._nbytes:
            raise WireError("not a valid object message: it is truncated")
        return self._data[start:end]

    def byte(self) -> int:
        """Return the next byte."""
        self._at += 1
        return self._data[self._at - 1]

    def number(self, nbytes: int) -> int:
        """Return the next bytes as an unsigned number."""
        return int.from_bytes(self.take(nbytes), "little")

    def next_buffer(self) -> Any:
        """Return the next out-of-band buffer."""
        return next(self._buffers)

    # --- stack

    def mark(self) -> None:
        """Begin a new stack."""
        self._marks.append(self.stack)
        self.stack = []

    def to_mark(self) -> list[Any]:
        """Return the items since the mark, and restore the stack before it."""
        items, self.stack = self.stack, self._marks.pop()
        return items

    # --- operations that could run code

    def find(self, name: str) -> Any:
        """Return the global of that name."""
        if name in allowlist.VALUES:
            return allowlist.VALUES[name]
        if name in self._makers:
            return self._makers[name]
        name = allowlist.in_main(name)
        return self._trusted[name] if name in self._trusted else _refuse(name)

    def is_trusted(self, value: Any) -> bool:
        """True if the user allowed this class or function."""
        return id(value) in self._trusted_ids

    def call(self, function: Any, args: Any) -> Any:
        """Return ``function(*args)``, if that is harmless."""
        self.spend(8 * len(args) + sum(map(cost.of_argument, args)))
        if isinstance(function, type) and function in allowlist.CALLABLES:
            if not all(isinstance(arg, allowlist.CALLABLES[function]) for arg in args):
                kinds = ", ".join(type(arg).__name__ for arg in args[:10])
                raise WireError(f"not a valid object message: it calls {function.__name__}({kinds})")
        elif any(function is make for make in self._makers.values()):
            for work in self._weigh(function, args):
                self.spend(work)
        elif not self.is_trusted(function):
            _refuse(f"a call of {type(function).__name__} {getattr(function, '__name__', '')}".rstrip())
        return function(*args)

    def new(self, cls: Any, args: Any, kwargs: Any) -> Any:
        """Return ``cls.__new__(cls, …)``, if that is harmless."""
        plain = cls is UserDict or (isinstance(cls, type) and cls in allowlist.PLAIN)
        if not (self.is_trusted(cls) or (plain and not args and not kwargs)):
            _refuse(f"the making of {a_or_an(cls.__name__ if isinstance(cls, type) else type(cls).__name__)}")
        return cls.__new__(cls, *args, **kwargs)

    def check_key(self, key: Any, target: Any) -> None:
        """Refuse a key that would take too long to hash or compare (nested, shared, same hash), or end the process.

        A message can choose hashes, except for those of text and bytes. All keys of one dict or set that share a hash
        are compared with one another, so each costs more than the previous one.

        Args:
            key: The next key of ``target``.
            target: A dict or a set.
        """
        kind = type(key)
        if kind is str or kind is bytes:
            self.spend(len(key) // _SHORT_KEY)
            return
        known = self._hashes.get(id(target))
        if known is None:
            if kind in _FEW_PER_HASH or (kind is int and -_NEAR < key < _NEAR):
                return
            # The target is stored, too, so that its id stays valid.
            known = self._hashes[id(target)] = target, dict.fromkeys(map(hash, _keys(target)), 1)
        work, hashes = self._weighed(key), known[1]
        count = hashes.get(value := hash(key), 0)
        self.spend(self._same_hash * count * work)
        hashes[value] = count + 1

    def _weighed(self, key: Any) -> int:
        """Return the cost of hashing a key. A shared tuple counts once per occurrence, as it is hashed each time."""
        total, level = 1, [key]
        for _ in range(_DEEPEST_KEY):
            inner = [each for each in level if isinstance(each, tuple | frozenset)]
            work = sum(map(cost.of_key, level)) + 4 * sum(map(len, inner))
            self.spend(work)  # before the next level is listed
            if not cost.QUICKLY_COMPARED.issuperset(map(type, level)):
                self._same_hash = _SLOW_SAME_HASH  # for all later keys, which may be compared with this one
            total += work
            level = [child for each in inner for child in each]
            if not level:
                return total
        raise WireError(f"not a valid object message: a key is nested deeper than {_DEEPEST_KEY}")

    def forget(self, target: Any) -> None:
        """Drop the hashes of a complete set."""
        self._hashes.pop(id(target), None)

    def spend(self, work: int) -> None:
        """Count work that is not proportional to the bytes read; raise an error above the limit."""
        self._work -= work
        if self._work < 0:
            raise WireError("not a valid object message: it asks for far more work than its length justifies")


def _keys(target: Any) -> Iterator[Any]:
    """Return the keys of a dict or set without running code of its class; none for other, trusted classes."""
    if isinstance(target, dict):
        return dict.__iter__(target)
    return set.__iter__(target) if isinstance(target, set) else iter(())


def _unknown(code: int) -> NoReturn:
    raise WireError(f"not a valid object message: opcode {_NAMES.get(code, hex(code))} is not allowed in it")


def _refuse(name: str) -> NoReturn:
    shown = name if re.fullmatch(r"[\w.<> ]{1,100}", name) else f"{name!a:.100}"
    raise UnsafeObjectError(
        f"the message asks for {shown}, which is not allow-listed. If you trust its sender, allow the class with "
        "easydist.allow_globals([...]) on every rank, or decode with weights_only=False"
    )


# --- opcodes that push a value


def _pushing(code: bytes, make: Callable[[Unpickler], Any]) -> None:
    OPCODES[code[0]] = lambda u: u.stack.append(make(u))


_pushing(pickle.NONE, lambda u: None)
_pushing(pickle.NEWTRUE, lambda u: True)
_pushing(pickle.NEWFALSE, lambda u: False)
_pushing(pickle.BININT, lambda u: int.from_bytes(u.take(4), "little", signed=True))
_pushing(pickle.BININT1, lambda u: u.byte())
_pushing(pickle.BININT2, lambda u: u.number(2))
_pushing(pickle.LONG1, lambda u: int.from_bytes(u.take(u.byte()), "little", signed=True))
_pushing(pickle.LONG4, lambda u: int.from_bytes(u.take(u.number(4)), "little", signed=True))
_pushing(pickle.BINFLOAT, lambda u: struct.unpack(">d", u.take(8))[0])
_pushing(pickle.BINUNICODE, lambda u: str(u.take(u.number(4)), "utf-8", "surrogatepass"))
_pushing(pickle.BINUNICODE8, lambda u: str(u.take(u.number(8)), "utf-8", "surrogatepass"))
_pushing(pickle.SHORT_BINBYTES, lambda u: bytes(u.take(u.byte())))
_pushing(pickle.BINBYTES, lambda u: bytes(u.take(u.number(4))))
_pushing(pickle.BINBYTES8, lambda u: bytes(u.take(u.number(8))))
_pushing(pickle.BYTEARRAY8, lambda u: bytearray(u.take(u.number(8))))
_pushing(pickle.EMPTY_TUPLE, lambda u: ())
_pushing(pickle.EMPTY_LIST, lambda u: [])
_pushing(pickle.EMPTY_DICT, lambda u: {})
_pushing(pickle.EMPTY_SET, lambda u: set())
_pushing(pickle.TUPLE1, lambda u: (u.stack.pop(),))
_pushing(pickle.TUPLE2, lambda u: (u.stack.pop(), u.stack.pop())[::-1])
_pushing(pickle.TUPLE3, lambda u: (u.stack.pop(), u.stack.pop(), u.stack.pop())[::-1])
_pushing(pickle.BINGET, lambda u: u.memo[u.byte()])
_pushing(pickle.LONG_BINGET, lambda u: u.memo[u.number(4)])
_pushing(pickle.NEXT_BUFFER, Unpickler.next_buffer)
_pushing(pickle.READONLY_BUFFER, lambda u: memoryview(u.stack.pop()).toreadonly())


@_op(pickle.SHORT_BINUNICODE)
def _short_text(u: Unpickler) -> None:
    u.stack.append(str(u.take(u.byte()), "utf-8", "surrogatepass"))


@_op(pickle.TUPLE)
def _tuple(u: Unpickler) -> None:
    items = u.to_mark()
    u.stack.append(tuple(items))


@_op(pickle.FROZENSET)
def _frozenset(u: Unpickler) -> None:
    items: set[Any] = set()
    _add_all(u, items, u.to_mark())
    u.forget(items)
    u.stack.append(frozenset(items))


def _add_all(u: Unpickler, target: Any, items: list[Any]) -> None:
    for item in items:
        u.check_key(item, target)
        target.add(item)


@_op(pickle.STACK_GLOBAL)
def _stack_global(u: Unpickler) -> None:
    name, module = u.stack.pop(), u.stack.pop()
    if type(name) is not str or type(module) is not str:
        raise WireError("not a valid object message: the name of a global is not text")
    u.stack.append(u.find(f"{module}.{name}"))


@_op(pickle.REDUCE)
def _reduce(u: Unpickler) -> None:
    args, function = _tuple_of(u.stack.pop()), u.stack.pop()
    u.stack.append(u.call(function, args))


@_op(pickle.NEWOBJ)
def _newobj(u: Unpickler) -> None:
    args, cls = _tuple_of(u.stack.pop()), u.stack.pop()
    u.stack.append(u.new(cls, args, {}))


@_op(pickle.NEWOBJ_EX)
def _newobj_ex(u: Unpickler) -> None:
    kwargs, args, cls = u.stack.pop(), _tuple_of(u.stack.pop()), u.stack.pop()
    u.stack.append(u.new(cls, args, kwargs))


def _tuple_of(args: Any) -> tuple[Any, ...]:
    if type(args) is not tuple:
        raise WireError("not a valid object message: arguments are not a tuple")
    return args


# --- other opcodes


@_op(pickle.PROTO)
def _proto(u: Unpickler) -> None:
    u.take(1)


@_op(pickle.FRAME)
def _frame(u: Unpickler) -> None:
    u.take(8)


@_op(pickle.MARK)
def _mark(u: Unpickler) -> None:
    u.mark()


@_op(pickle.POP_MARK)
def _pop_mark(u: Unpickler) -> None:
    u.to_mark()


@_op(pickle.POP)
def _pop(u: Unpickler) -> None:
    u.stack.pop()


@_op(pickle.MEMOIZE)
def _memoize(u: Unpickler) -> None:
    u.memo.append(u.stack[-1])


@_op(pickle.APPEND)
def _append(u: Unpickler) -> None:
    _extend(u, [u.stack.pop()])


@_op(pickle.APPENDS)
def _appends(u: Unpickler) -> None:
    _extend(u, u.to_mark())


def _extend(u: Unpickler, items: list[Any]) -> None:
    _filled(u, list, deque).extend(items)


@_op(pickle.ADDITEMS)
def _add_items(u: Unpickler) -> None:
    items = u.to_mark()
    _add_all(u, _filled(u, set), items)


@_op(pickle.SETITEM)
def _set_item(u: Unpickler) -> None:
    value, key = u.stack.pop(), u.stack.pop()
    _update(u, [key, value])


@_op(pickle.SETITEMS)
def _set_items(u: Unpickler) -> None:
    _update(u, u.to_mark())


def _update(u: Unpickler, items: list[Any]) -> None:
    target = _filled(u, dict, OrderedDict, defaultdict, Counter)
    for key, value in zip(items[::2], items[1::2], strict=True):
        if type(key) is not str or len(key) >= _SHORT_KEY:
            u.check_key(key, target)
        target[key] = value


def _filled(u: Unpickler, *types: type) -> Any:
    """Return the container on top of the stack, which has exactly one of these types, or one that the user trusts."""
    target = u.stack[-1]
    if type(target) not in types and not u.is_trusted(type(target)):
        raise WireError(f"not a valid object message: it puts items into {a_or_an(type(target).__name__)}")
    return target


@_op(pickle.BUILD)
def _build(u: Unpickler) -> None:
    state, target = u.stack.pop(), u.stack[-1]
    if u.is_trusted(type(target)):
        _set_state(target, state)
    elif type(state) is dict and _harmless(type(target), state):
        vars(target).update(state)
    else:
        _refuse(f"the state of {a_or_an(type(target).__name__)}")


def _harmless(cls: type, state: dict[Any, Any]) -> bool:
    """True if these attributes are only data."""
    if cls in allowlist.PLAIN:
        return state.keys() <= {field.name for field in dataclasses.fields(cls)}
    return cls is UserDict and state.keys() == {"data"}


def _set_state(target: Any, state: Any) -> None:
    """Set the state in the same way as pickle."""
    if (set_state := getattr(target, "__setstate__", None)) is not None:
        set_state(state)
        return
    attributes, slots = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
    if attributes:
        vars(target).update(attributes)
    for name, value in (slots or {}).items():
        setattr(target, name, value)
