"""Functions that take a call straight to the library's kernel (bindings/torch/plain.cc), if torch
and Python are laid out in memory as they need it. Where a tensor's Python object holds the tensor,
and where that holds its dispatch keys, is found by looking for known values in some tensors."""

import ctypes
import importlib.abc
import sys
import threading

import torch

from .. import _library

# None of this is promised by torch: only the versions that the tests ran with, and there only where
# the layout is found for certain. Any other torch calls through its dispatcher.
_TESTED = ("2.13.",)

_WORD = ctypes.sizeof(ctypes.c_void_p)
_OBJECT_WORDS = range(2, 5)  # of a tensor's Python object, past what every object begins with
_TENSOR_WORDS = range(1, 22)

# These make Python objects, so they are called with the interpreter's lock held.
_locked = ctypes.PyDLL(_library.path)


def _words(address: int, places: range, value: int) -> set[int]:
    """The places among the words at an address that hold a value."""
    words = (ctypes.c_uint64 * places.stop).from_address(address)
    return {i for i in places if words[i] == value}


def _find_layout() -> tuple[int, int, int] | None:
    """Bytes from a tensor's Python object to its tensor, and from that to its dispatch keys and to
    its part for autograd; None where they cannot be told for certain."""
    plain, seen = torch.empty(2, 3), torch.empty(2, 3)
    tensors = [plain, torch._neg_view(plain), torch.empty(2, device="meta"), torch.ones(1).int()]
    holders, keys = set(_OBJECT_WORDS), set(_TENSOR_WORDS)
    for t in tensors:
        holders &= _words(id(t), _OBJECT_WORDS, t._cdata)
        keys &= _words(t._cdata, _TENSOR_WORDS, _dispatch_keys(t))
    autograd = _words(seen._cdata, _TENSOR_WORDS, 0)
    autograd -= _words(seen.requires_grad_()._cdata, _TENSOR_WORDS, 0)
    found = (holders, keys, autograd)
    if any(len(f) != 1 for f in found) or len({_dispatch_keys(t) for t in tensors}) != 3:
        return None
    return tuple(f.pop() * _WORD for f in found)


def _dispatch_keys(tensor) -> int:
    return torch._C._dispatch_keys(tensor).raw_repr()


def _set_up() -> bool:
    # A CPython that may run without its lock has another layout of objects.
    if "t" in getattr(sys, "abiflags", "") or _WORD != 8:
        return False
    if not torch.__version__.startswith(_TESTED):
        return False
    layout = _find_layout()
    if layout is None:
        return False
    function = _library.function
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    set_layout = function(
        "fk_torch_set_layout", ctypes.c_bool, pointer, pointer, integer, integer, integer
    )
    if not set_layout(id(torch.Tensor), id(torch.nn.Parameter), *layout):
        return False
    add_plain = function("fk_torch_add_plain", None, ctypes.c_uint64)
    add_plain(_dispatch_keys(torch.empty(1)))
    with torch.inference_mode():
        add_plain(_dispatch_keys(torch.empty(1)))
    return True


def _try_to_set_up() -> bool:
    """In a thread of its own, where none of torch's modes is active."""
    results = []

    def attempt():
        try:
            results.append(_set_up())
        except (AttributeError, RuntimeError, TypeError):  # a torch without what is looked at
            results.append(False)

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    return results == [True]


#: Whether there are such functions in this process.
available = _try_to_set_up()


# Functions of C, and for each one in Python that does the same.
_in_python: list[tuple] = []


def _substitute(dynamo, function, in_python) -> None:
    """Has Dynamo, which cannot look into C, follow the function in Python instead."""
    dynamo.substitute_in_graph(function, skip_signature_check=True)(in_python)


class _WhenDynamoIsImported(importlib.abc.MetaPathFinder):
    """Tells Dynamo when somebody imports it: to do that ourselves would take seconds of every
    program's first call, and few programs compile."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch._dynamo":
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next(filter(None, found), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_tell(module):
            execute(module)
            if self in sys.meta_path:  # who asks for the spec need not import the module
                sys.meta_path.remove(self)
                for function, in_python in _in_python:
                    _substitute(module, function, in_python)

        spec.loader.exec_module = execute_and_tell
        return spec


if available and "torch._dynamo" not in sys.modules:
    sys.meta_path.insert(0, _WhenDynamoIsImported())


def _making(name: str, *argtypes):
    """A C function that makes a Python function."""
    if not available:
        return lambda in_python, *_: in_python
    make = getattr(_locked, name)
    make.restype = ctypes.c_void_p
    make.argtypes = argtypes

    def made(in_python, *arguments):
        """What it makes; where it cannot, and in Dynamo, the function in Python."""
        address = make(*arguments)
        if not address:
            return in_python
        function = ctypes.cast(address, ctypes.py_object).value  # takes a reference of its own
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(function))
        _in_python.append((function, in_python))
        if "torch._dynamo" in sys.modules:
            _substitute(torch._dynamo, function, in_python)
        return function

    return made


_plain_function = _making(
    "fk_torch_plain_function", ctypes.c_char_p, ctypes.py_object, ctypes.c_bool
)
_repeat_function = _making("fk_torch_repeat_function", ctypes.py_object)


def operator(overload, under_transforms=None):
    """A function of an operator's arguments, by position, for calls that need no gradient. In the
    place of results that it is told not to compute it may have None. Calls under torch.func's
    transforms `under_transforms` takes, if there is one."""

    def in_python(*arguments):
        if under_transforms and torch._C._are_functorch_transforms_active():
            return under_transforms(*arguments)
        return overload(*arguments)

    otherwise = in_python if under_transforms else overload._op
    return _plain_function(in_python, _name(overload), otherwise, False)


def without_gradient(overload, otherwise):
    """A function that does what `otherwise` does, which takes just the operator's arguments and
    computes the same where none of them needs a gradient."""
    return _plain_function(otherwise, _name(overload), otherwise, True)


def repeat(otherwise):
    """A function that does what `otherwise` does: (tensor, axis, size) -> a view that repeats the
    tensor along an axis that it does not have yet."""
    return _repeat_function(otherwise, otherwise)


def _name(overload) -> bytes:
    return overload._name.removeprefix("flashkernel::").encode()
