"""What the tests of lstm and gru share: cases, and a recurrence in plain torch."""

import torch

import flashkernel as fk
from harness import Case, convert, normal, seeded, to_float64


def walk(x, cu_seqlens, reverse, states, step):
    """y and the last states, from step(x_t, states) -> (output, states), where states are tuples of
    tensors with one row per sequence."""
    if cu_seqlens is None:
        spans = [(b, 0, x.shape[1]) for b in range(x.shape[0])]
    else:
        bounds = [int(i) for i in cu_seqlens]
        spans = [(0, begin, end) for begin, end in zip(bounds, bounds[1:], strict=False)]
    rows = [[None] * x.shape[1] for _ in range(x.shape[0])]
    last = []
    for s, (b, begin, end) in enumerate(spans):
        state = tuple(t[s] for t in states)
        for t in reversed(range(begin, end)) if reverse else range(begin, end):
            rows[b][t], state = step(x[b, t], state)
        last.append(state)
    lasts = (
        torch.stack([state[k] for state in last]) if last else t
        for k, t in enumerate(states)
    )  # fmt: skip
    width = states[0].shape[1]
    if x.shape[0] == 0 or x.shape[1] == 0:
        return (x.new_zeros(x.shape[0], x.shape[1], width), *lasts)
    return (torch.stack([torch.stack(row) for row in rows]), *lasts)


def recurrent_case(op, formula, gates, *, b=2, length=5, inputs=6, hidden=7, outputs=None,
                   bias=True, states=True, lengths=None, floor=0.0,
                   **attributes):  # fmt: skip
    """`outputs`: of a projection. `lengths`: of packed sequences, in place of b and length."""

    def draw(g):
        width = hidden if outputs is None else outputs
        sequences, steps = (b, length) if lengths is None else (len(lengths), sum(lengths))
        scale = max(hidden, 1) ** -0.5
        out = {
            "x": normal(g, b if lengths is None else 1, steps, inputs),
            "w_ih": normal(g, gates * hidden, inputs, scale=max(inputs, 1) ** -0.5),
            "w_hh": normal(g, gates * hidden, width, scale=scale),
        }
        if bias:
            out["b_ih"] = normal(g, gates * hidden, scale=0.5)
            out["b_hh"] = normal(g, gates * hidden, scale=0.5)
        if states:
            out["h0"] = normal(g, sequences, width, scale=0.5)
            if op == "lstm":
                out["c0"] = normal(g, sequences, hidden)
        if outputs is not None:
            out["w_hr"] = normal(g, outputs, hidden, scale=scale)
        if lengths is not None:
            bounds = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
            out["cu_seqlens"] = torch.tensor(bounds, dtype=torch.int32)
        return out

    def attached(**tensors):
        """Without a step, outputs would have no gradient; torch's engine wants one, if zeros."""
        floats = (t for t in tensors.values() if t.is_floating_point())
        nothing = sum(t.flatten()[:0].sum() for t in floats)
        return tuple(t + nothing for t in formula(**tensors))

    size = f"{b}x{length}" if lengths is None else "+".join(map(str, lengths))
    label = f"{size},{inputs},{hidden}" + ("" if outputs is None else f",to{outputs}")
    label += ("" if bias else ",no_bias") + ("" if states else ",no_states")
    label += "".join(f",{k}={v}" for k, v in attributes.items())
    parameters = ("w_ih", "w_hh", "b_ih", "b_hh", "h0", "c0", "w_hr")
    drawn = draw(torch.Generator())
    return Case(
        f"{op}[{label}]",
        op,
        draw,
        attached,
        attributes,
        parameters,
        tuple(k for k in ("x", *parameters) if k in drawn),
        # Gradients come from gates as they are kept, rounded to x's dtype.
        sums=("x", *parameters),
        floor=floor,
    )


def check_cut(op, case, backend):
    """A sequence cut in three gives what the whole gives, and has its gradients."""
    inputs = {k: convert(t.float(), backend) for k, t in case.inputs(seeded("cut")).items()}
    names = [k for k in ("h0", "c0") if k in inputs]
    call = getattr(fk, op)

    def run(leaves, bounds):
        states, outputs = [leaves[k] for k in names], []
        for begin, end in zip(bounds, bounds[1:], strict=False):
            part = {**leaves, "x": leaves["x"][:, begin:end]}
            y, *states = call(**{**part, **dict(zip(names, states, strict=True))})
            outputs.append(y)
        results = [torch.cat(outputs, 1), *states]
        weights = seeded("weights")
        loss = sum((r * normal(weights, *r.shape).to(r)).sum() for r in results)
        return results + list(torch.autograd.grad(loss, list(leaves.values())))

    length = inputs["x"].shape[1]
    whole, cut = (
        run({k: t.clone().requires_grad_() for k, t in inputs.items()}, bounds)
        for bounds in ((0, length), (0, 1, 5, length))
    )
    for a, b in zip(whole, cut, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def check_slices(make_case, backend):
    """A call whose products with x do not fit what is made of them at a time, beside its parts."""
    for reverse in (False, True):
        case = make_case(b=40, length=300, inputs=3, hidden=512, reverse=reverse, states=False)
        generator = seeded("slices")
        t = {k: convert(v.float(), backend) for k, v in case.inputs(generator).items()}
        y, *_ = getattr(fk, case.op)(**t, **case.attributes)
        # A row of the batch alone does fit.
        for row in (0, 39):
            alone = {**t, "x": t["x"][row : row + 1]}
            expected, *_ = getattr(fk, case.op)(**alone, **case.attributes)
            difference = to_float64(y)[row] - to_float64(expected)[0]
            assert difference.abs().max() < 1e-4
