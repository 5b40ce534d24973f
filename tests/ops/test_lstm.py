"""lstm against its recurrence in plain torch, on every backend."""

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


def lstm_case(reverse=False, **options):
    def formula(x, w_ih, w_hh, b_ih=None, b_hh=None, h0=None, c0=None, w_hr=None, cu_seqlens=None):
        sequences = x.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
        h = x.new_zeros(sequences, w_hh.shape[1]) if h0 is None else h0
        c = x.new_zeros(sequences, w_hh.shape[0] // 4) if c0 is None else c0

        def step(x_t, state):
            h, c = state
            gates = F.linear(x_t, w_ih, b_ih) + F.linear(h, w_hh, b_hh)
            i, f, g, o = gates.chunk(4)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            m = o.sigmoid() * c.tanh()
            h = m if w_hr is None else F.linear(m, w_hr)
            return h, (h, c)

        return walk(x, cu_seqlens, reverse, (h, c), step)

    if reverse:
        options["reverse"] = True
    return recurrent_case("lstm", formula, 4, **options)


CASES = [
    lstm_case(),
    lstm_case(reverse=True, b=3, length=7, inputs=5, hidden=16),
    lstm_case(bias=False, states=False, b=1, length=9, hidden=33),
    lstm_case(outputs=3, b=2, length=4, hidden=10),
    lstm_case(outputs=20, b=5, length=6, hidden=40, inputs=17, reverse=True),
    lstm_case(lengths=(3, 0, 6, 1), hidden=9),
    lstm_case(lengths=(2, 5, 4, 7, 1), hidden=18, outputs=5, reverse=True),
    lstm_case(b=9, length=3, hidden=70, inputs=31),
    lstm_case(b=1, length=1, hidden=1, inputs=1),
    lstm_case(b=3, length=0),
    lstm_case(b=0, length=4),
    lstm_case(inputs=0),
    lstm_case(lengths=(0, 0)),
]
test_forward, test_gradients = forward_and_gradients(CASES)


LONG = [
    lstm_case(b=1, length=40, inputs=20, hidden=64),
    lstm_case(b=33, length=5, inputs=24, hidden=128),
    # Products are added up one after another here, in torch's formula several side by side: three
    # units in the last place, where torch has one.
    lstm_case(b=50, length=3, inputs=8, hidden=96, outputs=48, floor=5e-7),
    lstm_case(lengths=(1, 30, 7), inputs=12, hidden=80),
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
    # A GPU rounds weights to x's dtype, as torch's formula does. The last state, which is float32,
    # is off by two roundings at most, where torch's happens to be off by one.
    floor = 6e-4 if dtype == "float16" else 0.0
    for case in (lstm_case(), lstm_case(outputs=3, b=4, reverse=True, floor=floor)):
        run_forward(case, backend, dtype, layout)
        if backend != "numpy":
            run_gradients(case, backend, dtype, layout)


@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
@pytest.mark.parametrize("backend", BACKENDS)
def test_parameters_in_the_activations_dtype(backend, dtype):
    for case in (lstm_case(outputs=3), lstm_case(b=1, length=3, hidden=21)):
        run_forward(case, backend, dtype, parameters_float32=False)
        if backend != "numpy":
            run_gradients(case, backend, dtype, parameters_float32=False)


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
@pytest.mark.parametrize("case", CASES[:7], ids=str)
def test_finite_differences(case, backend):
    check_finite_differences(case, backend)


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_a_cut_sequence_gives_the_same(backend):
    check_cut("lstm", lstm_case(b=3, length=12, hidden=20), backend)


@pytest.mark.parametrize("backend", [b for b in BACKENDS if not b.endswith("cuda")])
def test_long_batch_in_slices(backend):
    """So long that the products with x are made a few steps at a time."""
    check_slices(lstm_case, backend)


def test_errors_name_the_argument():
    t = {k: v.float() for k, v in lstm_case().inputs(seeded("errors")).items()}

    def call(**changed):
        return fk.lstm(**{**t, **changed})

    with raises(r"lstm: w_hh: expected 7 columns, one per hidden unit \(there is no w_hr\), got 6"):
        call(w_hh=t["w_hh"][:, :6], h0=None)
    with raises(r"lstm: w_hh: expected shape \(28, .*\) to fit w_ih, got \(27, 7\)"):
        call(w_hh=t["w_hh"][:27])
    with raises("lstm: h0: expected 2 rows, one per sequence, got 1"):
        call(h0=t["h0"][:1], c0=None)
    with raises(r"lstm: w_ih: expected shape \(.*, 6\) to fit x"):
        call(w_ih=t["w_ih"][:, :5])
    with raises("lstm: cu_seqlens: expected a batch of 1"):
        call(cu_seqlens=torch.tensor([0, 5], dtype=torch.int32), h0=None, c0=None)
    with raises("lstm: b_ih: expected float32, got bfloat16"):
        call(b_ih=t["b_ih"].bfloat16())
