"""gru against its recurrence in plain torch, on every backend."""

import torch.nn.functional as F

from harness import forward_and_gradients
from recurrent import recurrent_case, walk


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
