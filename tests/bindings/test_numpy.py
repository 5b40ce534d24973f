"""The NumPy binding, for every op by its declaration: attributes, dtypes, writing in place."""

import os
import pickle
import subprocess
import sys

import numpy as np
import pytest

import flashkernel as fk
import sampling

EVERY_OP = pytest.mark.parametrize("op", [pytest.param(o, id=o.public_name) for o in sampling.OPS])


@EVERY_OP
def test_wrong_attributes_name_the_argument(op):
    sample = sampling.draw(op, 1)
    for f in op.attributes:
        for wrong in ("no such thing", "", [1], 2**70 if f.kind in ("integer", "axis") else {}):
            with pytest.raises(fk.Error, match=f"{op.public_name}: {f.name}: expected .* got"):
                sampling.call(op, {**sample, f.name: wrong})
    for name in op.extra_keywords:
        for wrong in ("no", None, np.ones(2)):
            with pytest.raises(fk.Error, match=f"{op.public_name}: {name}: expected True or False"):
                sampling.call(op, sample, **{name: wrong})


@EVERY_OP
def test_attributes_in_numpy_types(op):
    sample = sampling.draw(op, 2)
    spelled = dict(sample)
    for f in op.attributes:
        if f.kind != "choice" and sample[f.name] is not None:
            kind = {"boolean": np.bool_, "number": np.float64}.get(f.kind, np.int32)
            spelled[f.name] = kind(sample[f.name])
    for a, b in zip(*(sampling.call_with_state(op, s) for s in (sample, spelled)), strict=True):
        np.testing.assert_array_equal(a, b)


@EVERY_OP
def test_unknown_dtypes_name_the_argument(op):
    sample = sampling.draw(op, 3)
    for f in op.inputs:
        for dtype in (np.bool_, np.complex64, ">f4"):
            if sample[f.name] is None:
                continue
            with pytest.raises(fk.Error, match=f"{op.public_name}: {f.name}: expected .*, got"):
                sampling.call(op, {**sample, f.name: sample[f.name].astype(dtype)})


@pytest.mark.parametrize("value", ["dispatch", "DISPATCH", ""])
def test_log(value):
    script = "import numpy, flashkernel as fk; fk.softmax(numpy.ones(3, 'f'))"
    environment = {**os.environ, "FK_LOG": value}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    known = 'FK_LOG: expected dispatch, got "DISPATCH"' if value == "DISPATCH" else "softmax_fwd ->"
    assert known in done.stderr if value else not done.stderr


def test_errors_are_named_as_users_know_them():
    assert str(fk.Error) == "<class 'flashkernel.Error'>"
    error = pickle.loads(pickle.dumps(fk.Error("text")))
    assert type(error) is fk.Error and str(error) == "text"


def test_masks_are_not_ignored():
    x = np.ones(3, np.float32)
    for masked in (np.ma.masked_array(x, mask=[0, 1, 0]), np.ma.array(x)):
        for function in (fk.softmax, fk.sum):
            with pytest.raises(fk.Error, match="x: expected an array that is not masked, got a ma"):
                function(masked)


@pytest.mark.parametrize("threads", [0, -1, "two", 1.5])
def test_number_of_threads_that_is_none(threads):
    with pytest.raises(fk.Error, match="set_num_threads: threads: expected a number from 1, got"):
        fk.set_num_threads(threads)


@pytest.mark.parametrize(
    "op", [o for o in sampling.OPS if o.in_place_output], ids=lambda o: o.public_name
)
def test_in_place_only_where_memory_can_be_written(op):
    sample = sampling.draw(op, 4, optionals=False)
    name = op.in_place_output.may_alias
    # What cannot be written at all: a process that tried would end.
    read_only = np.frombuffer(sample[name].tobytes(), np.float32).reshape(sample[name].shape)
    with pytest.raises(fk.Error, match=f"{name}: expected an array that can be written"):
        sampling.call(op, {**sample, name: read_only}, inplace=True)
    # What would be copied, and the results lost with the copy.
    records = np.zeros(sample[name].shape, np.dtype([("tag", "i1"), ("value", "f4")]))
    with pytest.raises(fk.Error, match=f"{name}: expected an array that can be written"):
        sampling.call(op, {**sample, name: records["value"]}, inplace=True)
