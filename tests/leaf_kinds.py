"""Every kind of tensor that torch can make on a CPU: wrappers, lazy values, layouts, dtypes, borrowed and lost memory.

``KINDS[name](plain)`` returns a leaf, and a plain tensor of the same values; None in its place if the leaf has no value
of its own. ``plain`` is float32 of two dimensions with an even number of rows. Never print a leaf: torch itself would
read memory that is not there.
"""

import tempfile
import warnings

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor

KINDS = {}


def kind(make):
    KINDS[make.__name__.replace("_", " ")] = make
    return make


def alike(name, make):
    """A kind whose leaf is a function of the plain tensor, with the same value."""
    KINDS[name] = lambda plain: (make(plain.clone()), plain.clone())


def without_value(name, make):
    KINDS[name] = lambda plain: (make(plain.clone()), None)


def of_dtype(dtype):
    def make(plain):
        leaf = (plain % 100).to(dtype)
        return leaf, leaf.clone()

    KINDS[str(dtype).removeprefix("torch.")] = make


def of_bits(dtype):
    def make(plain):
        leaf, value = ((plain % 100).to(torch.uint8).view(dtype) for _ in range(2))  # some cannot be cloned
        return leaf, value

    KINDS[str(dtype).removeprefix("torch.")] = make


def escaped(transform, *args):
    """Return what a function of ``torch.func`` saw inside, after its end."""
    seen = []
    transform(lambda x: (seen.append(x), x.sum())[1])(*args)
    return seen[0]


def faked(plain):
    with FakeTensorMode() as mode:
        return mode.from_tensor(plain)


def functional(plain):
    with FunctionalTensorMode():
        return FunctionalTensor.to_functional(plain)


def resized(nbytes, start=0, of=lambda view: view):
    """Return a function that makes a view of a tensor, and then sets or shortens its memory."""

    def make(plain):
        whole = torch.cat([plain.new_zeros(start), plain.reshape(-1)])
        view = of(whole[start:].view(plain.shape))
        whole.untyped_storage().resize_(nbytes if nbytes >= 0 else whole.nbytes + nbytes)
        return view

    return make


class Tagged(torch.Tensor):
    """A subclass with its own memory, which keeps its class."""


class Counting(torch.Tensor):
    """A subclass that sees every function."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


class Dispatched(torch.Tensor):
    """A wrapper without memory that hides its tensor from ``torch.utils._python_dispatch``."""

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def inner(x):
            return x.inner if isinstance(x, cls) else x

        out = func(*map(inner, args), **{key: inner(value) for key, value in (kwargs or {}).items()})
        return cls(out) if isinstance(out, torch.Tensor) else out


class Sneaky(torch.Tensor):
    """A wrapper without memory that says it has some."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return 1 << 30 if func is torch.Tensor.data_ptr else super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        # Anything else than a tensor would leave torch in a state in which torch.func fails.
        return args[0] if isinstance(args[0], torch.Tensor) else args[0][0]


def from_file(plain):
    with tempfile.NamedTemporaryFile() as file:
        leaf = torch.from_file(file.name, shared=True, size=plain.numel(), dtype=plain.dtype)
        return leaf.copy_(plain.reshape(-1)).view(plain.shape)


def read_only(plain):
    array = plain.numpy()
    array.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.from_numpy(array)


def unaligned(plain):
    """A tensor over bytes that do not start at a multiple of the item size."""
    room = bytearray(plain.nbytes + 1)
    room[1:] = plain.numpy().tobytes()
    return torch.frombuffer(room, dtype=torch.float32, offset=1).view(plain.shape)


def sharded(plain):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    return distribute_tensor(plain, init_device_mesh("cpu", (2,)), [Replicate()])


def nested(layout):
    def make(plain):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.nested.nested_tensor([plain[:2], plain[2:]], layout=layout)

    return make


def quiet(make):
    def made(plain):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return make(plain)

    return made


def compiled(plain):
    return torch.compile(lambda x: x + 0, backend="eager")(plain)


for each in [
    *(torch.float64, torch.float16, torch.bfloat16, torch.complex32, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64, torch.bool),
]:
    of_dtype(each)
of_bits(torch.float8_e8m0fnu)
for name in ("bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"):  # torch cannot even copy the others
    of_bits(getattr(torch, name))

alike("plain", lambda x: x)
alike("of a class", lambda x: x.as_subclass(Tagged))
alike("of a class with __torch_function__", lambda x: x.as_subclass(Counting))
alike("parameter", nn.Parameter)
alike("buffer", nn.Buffer)
alike("with a graph", lambda x: x.requires_grad_() * 1)
alike("inference", torch.inference_mode()(torch.clone))
alike("transposed", lambda x: x.t().contiguous().t())
alike("every other", lambda x: x.repeat_interleave(2, 1)[:, ::2])
alike("with an offset", lambda x: torch.cat([x, x])[x.shape[0] :])
alike("of a file", from_file)
alike("shared", torch.Tensor.share_memory_)
alike("copied on write", torch._lazy_clone)
alike("read only", read_only)
alike("unaligned", unaligned)
alike("compiled", compiled)
alike("cut to its size", lambda x: resized(-x.nbytes, of=lambda y: y[: len(x)])(torch.cat([x, x])))


@kind
def conjugate(plain):
    return torch.complex(plain, plain + 1).conj(), torch.complex(plain, -plain - 1)


@kind
def conjugate_of_half(plain):
    half = torch.view_as_complex(torch.stack([plain, plain], -1).half())
    return half.conj(), half.conj().resolve_conj()


@kind
def negative(plain):
    return torch.complex(plain, plain + 1).conj().imag, -plain - 1


@kind
def negative_and_dense(plain):
    return torch._neg_view(plain), -plain


@kind
def zero(plain):
    return torch._efficientzerotensor(plain.shape), torch.zeros(plain.shape)


@kind
def zero_in_part(plain):
    rows = plain.shape[0]
    return torch._efficientzerotensor((2 * rows, plain.shape[1]))[rows:], torch.zeros(plain.shape)


@kind
def zero_of_a_gradient(plain):
    w = torch.ones(plain.shape, requires_grad=True)
    torch.sgn(w).sum().backward()
    return w.grad, torch.zeros(plain.shape)


@kind
def zero_and_conjugate(plain):
    return torch._efficientzerotensor(plain.shape, dtype=torch.complex64).conj(), torch.zeros(plain.shape) + 0j


@kind
def empty(plain):
    return plain.new_empty(0, 3), plain.new_empty(0, 3)


@kind
def empty_and_freed(plain):
    leaf = plain.new_empty(2, 0)
    leaf.untyped_storage().resize_(0)
    return leaf, plain.new_empty(2, 0)


@kind
def expanded(plain):
    return plain[:1].expand(4, -1), plain[:1].expand(4, -1).clone()


@kind
def overlapping(plain):
    leaf = plain.reshape(-1).as_strided((4, 4), (1, 1))
    return leaf, leaf.clone()


without_value("meta", lambda x: x.to("meta"))
without_value("fake", faked)
without_value("fake parameter", lambda x: nn.Parameter(faked(x)))
without_value("functional", functional)
without_value("functional in C++", torch._to_functional_tensor)
without_value("batched, escaped", lambda x: escaped(torch.vmap, x))
without_value("of grad, escaped", lambda x: escaped(torch.func.grad, x))
without_value("freed", resized(0))
without_value("freed with an offset", resized(0, start=200))
without_value("freed parameter", lambda x: nn.Parameter(resized(0)(x)))
without_value("freed, of a class", lambda x: resized(0)(x).as_subclass(Tagged))
without_value("freed, transposed", lambda x: resized(0, of=torch.t)(x))
without_value("freed complex", lambda x: resized(0)(x + 0j))
without_value("freed conjugate", lambda x: resized(0, of=torch.conj)(x + 0j))
without_value("short by an item", resized(-4))
without_value("short for its offset", lambda x: resized(x.nbytes, start=200)(x))
without_value("short for its strides", lambda x: resized(-4, of=lambda y: y[:, 1::2])(x.repeat_interleave(2, 1)))
without_value("short and negative", lambda x: resized(-4, of=torch._neg_view)(x))
without_value("coo", torch.Tensor.to_sparse)
without_value("csr", quiet(torch.Tensor.to_sparse_csr))
without_value("csc", quiet(torch.Tensor.to_sparse_csc))
without_value("bsr", quiet(lambda x: x.to_sparse_bsr((2, 2))))
without_value("bsc", quiet(lambda x: x.to_sparse_bsc((2, 2))))
without_value("mkldnn", torch.Tensor.to_mkldnn)
without_value("quantized", lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8))
without_value(
    "quantized by channel", lambda x: torch.quantize_per_channel(x, x[:, 0].abs() + 1, x[:, 0] * 0, 0, torch.qint8)
)
without_value("nested", nested(torch.strided))
without_value("nested, jagged", nested(torch.jagged))
without_value("masked", quiet(lambda x: torch.masked.masked_tensor(x, x > 1)))
without_value("sharded", sharded)
without_value("two tensors", lambda x: TwoTensor(x, x.clone()))
without_value("of a wrapper class", Dispatched)
without_value("of a wrapper class with false answers", Sneaky)
without_value("not initialized", lambda x: nn.UninitializedParameter())
without_value("not initialized buffer", lambda x: nn.UninitializedBuffer())


def in_fake_mode(call, plain):
    mode = FakeTensorMode()
    leaf = mode.from_tensor(plain)
    with mode:
        return call(leaf)


def in_functional_mode(call, plain):
    with FunctionalTensorMode():
        return call(FunctionalTensor.to_functional(plain))


def in_make_fx(call, plain):
    seen = []
    make_fx(lambda x: (seen.append(call(x)), x)[1])(plain)
    return seen[0]


def in_vmap(call, plain):
    seen = []
    torch.vmap(lambda x: (seen.append(call(x)), x)[1])(plain)
    return seen[0]


def in_grad(call, plain):
    seen = []
    torch.func.grad(lambda x: (seen.append(call(x)), x.sum())[1])(plain)
    return seen[0]


INSIDE = {
    "fake, in its mode": in_fake_mode,
    "functional, in its mode": in_functional_mode,
    "recorded": in_make_fx,
    "batched": in_vmap,
    "of grad": in_grad,
}
"""Functions that call a function with a leaf inside of a mode."""
