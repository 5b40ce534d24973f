"""What Python derives from declarations, on ops of the tests' own, written as the library writes
them: products of sizes, last dims that may be missing, several states that one call updates."""

import numpy as np
import pytest

import sampling
from flashkernel import _shapes
from flashkernel._declarations import OPS, Op
from flashkernel._fields import field_of
from flashkernel._output_shapes import ShapeWriter
from flashkernel._shapes import Dim


def dim(text: str) -> dict:
    """A dim, as the library has parsed it; of the few kinds that stand in these tests."""
    if text.isdigit():
        return {"text": text, "offset": int(text)}
    size, sign, offset = text.partition("+")
    factor, star, symbol = size.rpartition("*")
    result = {"text": text, "symbol": symbol}
    if star:
        result["factor"] = int(factor)
    if sign:
        result["offset"] = int(offset)
    return result


def make_op(name: str, **fields) -> Op:
    """fields: (kind, alternatives, options) by name."""
    entries = []
    for field, (kind, shapes, options) in fields.items():
        dims = [[dim(d) for d in shape] for shape in shapes]
        entries.append({"name": field, "kind": kind, "shapes": dims, **options})
    return Op(name, "Of a test.", [field_of(e) for e in entries], handle=0)


LSTM = make_op(
    "lstm_step_fwd",
    x=("input", [["B", "I"]], {"type": "T[B, I]"}),
    h=("input", [["B", "H"]], {"type": "T[B, H]"}),
    c=("input", [["B", "H"]], {"type": "F[B, H]"}),
    w_ih=("input", [["4*H", "I"]], {"type": "P[4*H, I]"}),
    y=("output", [["B", "H"]], {"type": "T[B, H]"}),
    new_h=("output", [], {"type": "@h", "updates": "h"}),
    new_c=("output", [], {"type": "@c", "updates": "c"}),
)


def test_the_length_of_blocks_and_the_numbers_of_dims():
    assert Dim("7", offset=7).evaluate(0, {}) == 7
    assert Dim("4*H+1", "H", factor=4, offset=1).evaluate(3, {}) == 13
    assert Dim("W-1", "W", offset=-1).evaluate(3, {}) == 2
    assert Dim("L/length", "L", blocks_of="length").evaluate(200, {"length": 64}) == 3


@pytest.mark.parametrize("given", [Dim("N", "N"), Dim("W-1", "W", 1, -1), Dim("4*H+1", "H", 4, 1)])
def test_a_symbol_is_told_by_what_follows_from_it(given):
    for size in (1, 2, 17):
        own = given.evaluate(size, {})
        assert eval(given.symbol_expression("own"), {"own": own}) == size


def test_products_give_shapes_and_tell_sizes():
    x, h, w_ih = np.zeros((2, 3)), np.zeros((2, 5)), np.zeros((20, 3))
    assert LSTM.output_shapes(x, h, h, w_ih) == ((2, 5), (2, 5), (2, 5))
    gates = make_op(
        "gates",
        w=("input", [["4*H+1", "I"]], {"type": "P[4*H+1, I]"}),
        y=("output", [["I", "H", "2*H"]], {"type": "P[I, H, 2*H]"}),
    )
    assert gates.output_shapes(np.zeros((21, 3))) == ((3, 5, 10),)


def test_a_size_is_told_by_the_tensor_that_has_it_rather_than_by_a_product():
    op = make_op(
        "twins",
        w=("input", [["4*H"]], {"type": "P[4*H]"}),
        b=("input", [["H"]], {"type": "P[H]"}),
        y=("output", [["H"]], {"type": "P[H]"}),
    )
    assert ShapeWriter(op, []).size("H")[0] == "b.shape[0]"


def test_last_dims_that_may_be_missing():
    op = make_op(
        "skip_fwd",
        x=("input", [["...", "H", "P"]], {"type": "T[..., H, P]"}),
        D=("input", [["H"], ["H", "P"]], {"type": "P[H, (P)]", "form": "D"}),
        y=("output", [["...", "H", "P"]], {"type": "T[..., H, P]"}),
        dD=("output", [], {"type": "@D"}),
    )
    x = np.zeros((7, 2, 3))
    assert op.output_shapes(x, np.zeros(2)) == ((7, 2, 3), (2,))
    assert op.output_shapes(x, np.zeros((2, 3))) == ((7, 2, 3), (2, 3))
    random, seen = np.random.default_rng(0), set()
    for _ in range(50):
        sample = sampling._draw_once(op, random, True, {})
        assert sample["D"].shape in (sample["x"].shape[-2:-1], sample["x"].shape[-2:])
        seen.add(sample["D"].ndim)
    assert seen == {1, 2}


def test_samples_follow_products():
    random = np.random.default_rng(0)
    for _ in range(20):
        sample = sampling._draw_once(LSTM, random, True, {})
        assert sample["w_ih"].shape == (4 * sample["h"].shape[1], sample["x"].shape[1])


def test_shapes_are_those_that_the_declarations_write():
    """One dim for each that stands between the brackets of a type."""
    for op in OPS.values():
        for f in op.fields:
            if not f.is_tensor or "[" not in f.type:
                continue
            inside = f.type.partition("[")[2][:-1]
            if "(" in inside:
                continue
            written = [[d.strip() for d in s.split(",") if d.strip()] for s in inside.split("|")]
            texts = [[d.text.replace(" or 1", "?") for d in dims] for dims in f.shapes]
            assert texts == written, (op.name, f.name)


def test_roles_are_those_of_symbols():
    assert OPS["sum_fwd"].roles == {"...": "batch", "N": "reduced"}
    for op in OPS.values():
        symbols = {d.symbol for f in op.fields for dims in f.shapes for d in dims}
        assert set(op.roles) <= symbols


def test_block_count():
    assert [_shapes.block_count(n, 64) for n in (0, 63, 64, 200)] == [0, 0, 1, 3]
    assert _shapes.block_count(200, 0) == 0
    assert _shapes.block_count(200, -1) == 13


def test_torch_updates_several_states(monkeypatch):
    torch = pytest.importorskip("torch")
    from flashkernel.torch import _calls, _operators

    masks = []
    monkeypatch.setattr(_operators, "_register_kernel", lambda *a: masks.append(a[3]))
    monkeypatch.setattr(_operators, "_layout_of", lambda handle, output: None)
    monkeypatch.setattr(_operators, "_check", lambda op, arguments: None)
    monkeypatch.setattr(_operators, "registered", {})
    operators = _operators.register(LSTM)
    assert masks == [0b110]
    (variant,) = operators.variants
    assert str(variant.forward._schema) == (
        "flashkernel::lstm_step_fwd(Tensor x, Tensor(a!) h, Tensor(b!) c, Tensor w_ih) -> Tensor"
    )

    def kernel(x, h, c, w_ih):
        h.add_(1)
        c.add_(2)
        return h.clone()

    _operators._lib.impl(variant.forward, kernel, "CPU")
    call = _calls.make(operators)
    for dtype in (torch.float32, torch.bfloat16):
        arguments = [torch.zeros(s) for s in ((2, 3), (2, 5), (2, 5), (20, 3))]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
            y = call(*arguments)
        x, h, c, w_ih = arguments
        assert (h == 1).all() and (c == 2).all() and (y == 1).all()
        assert h._version >= 1 and c._version >= 1 and x._version == w_ih._version == 0
    fake = torch._subclasses.FakeTensorMode()
    with fake:
        assert call(*(torch.empty(t.shape) for t in arguments)).shape == (2, 5)
