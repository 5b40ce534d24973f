"""lstm against its recurrence in plain torch, on every backend."""

import torch.nn.functional as F

from harness import forward_and_gradients
from recurrent import recurrent_case, walk


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
