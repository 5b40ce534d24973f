"""gru against its recurrence in plain torch, on every backend."""

import pytest
import torch
import torch.nn.functional as F

import flashkernel as fk
from harness import (
    BACKENDS,
    DTYPES,
    LAYOUTS,
    TORCH_BACKENDS,
    WITH_GRADIENTS,
    check_finite_differences,
    forward_and_gradients,
    raises,
    run_forward,
    run_gradients,
    seeded,
)
from recurrent import check_cut, check_slices, recurrent_case, walk


def gru_case(reverse=False, reset_after=True, **options):
    def formula(x, w_ih, w_hh, b_ih=None, b_hh=None, h0=None, cu_seqlens=None):
        sequences = x.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
        h = x.new_zeros(sequences, w_hh.shape[1]) if h0 is None else h0
        w_rz, w_n = w_hh.split([2 * h.shape[1], h.shape[1]])
        b_rz, b_n = (None, None) if b_hh is None else b_hh.split([2 * h.shape[1], h.shape[1]])

        def step(x_t, state):
            (h,) = state
            of_x = F.linear(x_t, w_ih, b_ih)
            r, z = (of_x[: 2 * len(h)] + F.linear(h, w_rz, b_rz)).sigmoid().chunk(2)
            met = r * F.linear(h, w_n, b_n) if reset_after else F.linear(r * h, w_n, b_n)
            n = (of_x[2 * len(h) :] + met).tanh()
            h = (1 - z) * n + z * h
            return h, (h,)

        return walk(x, cu_seqlens, reverse, (h,), step)

    if reverse:
        options["reverse"] = True
    if not reset_after:
        options["reset_after"] = False
    return recurrent_case("gru", formula, 3, **options)


CASES = [
    gru_case(),
    gru_case(reset_after=False),
    gru_case(reverse=True, b=3, length=7, inputs=5, hidden=16),
    gru_case(bias=False, states=False, b=1, length=9, hidden=33),
    gru_case(bias=False, states=False, b=1, length=9, hidden=33, reset_after=False),
    gru_case(lengths=(3, 0, 6, 1), hidden=9),
    gru_case(lengths=(2, 5, 4, 7, 1), hidden=18, reset_after=False, reverse=True),
    gru_case(b=9, length=3, hidden=70, inputs=31),
    gru_case(b=9, length=3, hidden=70, inputs=31, reset_after=False),
    gru_case(b=1, length=1, hidden=1, inputs=1),
    gru_case(b=3, length=0),
    gru_case(b=0, length=4),
    gru_case(inputs=0),
    gru_case(lengths=(0, 0)),
]
test_forward, test_gradients = forward_and_gradients(CASES)


LONG = [
    gru_case(b=1, length=40, inputs=20, hidden=64),
    gru_case(b=33, length=5, inputs=24, hidden=128),
    gru_case(b=50, length=3, inputs=8, hidden=96, reset_after=False),
    gru_case(lengths=(1, 30, 7), inputs=12, hidden=80),
]


# More than one thread, more rows than are summed at a time.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", WITH_GRADIENTS)
@pytest.mark.parametrize("case", LONG, ids=str)
def test_large(case, backend, dtype):
    run_forward(case, backend, dtype)
    run_gradients(case, backend, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", [b for b in BACKENDS if not b.startswith("jax")])
def test_strides(backend, layout, dtype):
    for case in (gru_case(), gru_case(reset_after=False, b=1, reverse=True)):
        run_forward(case, backend, dtype, layout)
        if backend != "numpy":
            run_gradients(case, backend, dtype, layout)


@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
@pytest.mark.parametrize("backend", BACKENDS)
def test_parameters_in_the_activations_dtype(backend, dtype):
    for case in (gru_case(reset_after=False), gru_case(b=1, length=3, hidden=21)):
        run_forward(case, backend, dtype, parameters_float32=False)
        if backend != "numpy":
            run_gradients(case, backend, dtype, parameters_float32=False)


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
@pytest.mark.parametrize("case", CASES[:7], ids=str)
def test_finite_differences(case, backend):
    check_finite_differences(case, backend)


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_a_cut_sequence_gives_the_same(backend):
    check_cut("gru", gru_case(b=3, length=12, hidden=20), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_long_batch_in_slices(backend):
    """So long that the products with x are made a few steps at a time."""
    check_slices(gru_case, backend)


def test_errors_name_the_argument():
    t = {k: v.float() for k, v in gru_case().inputs(seeded("errors")).items()}

    def call(**changed):
        return fk.gru(**{**t, **changed})

    with raises(r"gru: w_hh: expected shape \(21, .*\) to fit w_ih, got \(20, 7\)"):
        call(w_hh=t["w_hh"][:20])
    with raises("gru: h0: expected 2 rows, one per sequence, got 1"):
        call(h0=t["h0"][:1])
    with raises(r"gru: w_ih: expected shape \(.*, 6\) to fit x"):
        call(w_ih=t["w_ih"][:, :5])
    with raises("gru: cu_seqlens: expected a batch of 1"):
        call(cu_seqlens=torch.tensor([0, 5], dtype=torch.int32), h0=None)
    with raises("gru: b_ih: expected float32, got bfloat16"):
        call(b_ih=t["b_ih"].bfloat16())
