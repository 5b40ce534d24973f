"""The modules LSTM and GRU beside torch's own, over all options, and a trained character model."""

import importlib.util
import itertools
import json
import pathlib
import warnings

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence

import flashkernel as fk
from flashkernel.torch import GRU, LSTM

KINDS = {"lstm": (LSTM, torch.nn.LSTM), "gru": (GRU, torch.nn.GRU)}
OPTIONS = [
    {},
    {"num_layers": 3},
    {"bidirectional": True},
    {"num_layers": 3, "bidirectional": True, "bias": False},
    {"batch_first": True},
    {"num_layers": 2, "batch_first": True, "bidirectional": True},
    {"proj_size": 3},
    {"proj_size": 5, "num_layers": 2, "bidirectional": True, "batch_first": True},
]


def pair(kind, inputs=5, hidden=11, **options):
    """Our module and torch's with the same weights."""
    torch.manual_seed(0)
    ours, theirs = (cls(inputs, hidden, **options) for cls in KINDS[kind])
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def all_options(kind):
    return [o for o in OPTIONS if kind == "lstm" or "proj_size" not in o]


CASES = [(kind, options) for kind in KINDS for options in all_options(kind)]
NAMES = [f"{kind}-{','.join(f'{k}={v}' for k, v in options.items())}" for kind, options in CASES]


def first_state(module, batch):
    count = module.num_layers * (2 if module.bidirectional else 1)
    h = torch.randn(count, batch, module.proj_size or module.hidden_size)
    if isinstance(module, (torch.nn.GRU, GRU)):
        return h
    return h, torch.randn(count, batch, module.hidden_size)


def tensors(result):
    """What a module returns, or what it takes as a state, as a flat list."""
    if isinstance(result, PackedSequence):
        return [result.data]
    if isinstance(result, torch.Tensor):
        return [result]
    return [] if result is None else list(itertools.chain.from_iterable(map(tensors, result)))


def compare(ours, theirs, x, state):
    """Outputs, states, and the gradients of weights, input and states."""
    results = []
    for module in (ours, theirs):
        module.zero_grad()
        leaves = [t.detach().clone().requires_grad_() for t in [*tensors(x), *tensors(state)]]
        given = x._replace(data=leaves[0]) if isinstance(x, PackedSequence) else leaves[0]
        hx = None
        if state is not None:
            hx = leaves[1] if len(leaves) == 2 else tuple(leaves[1:])
        out = tensors(module(given, hx))
        sum((t * torch.linspace(0.5, 1.5, t.numel()).view_as(t)).sum() for t in out).backward()
        gradients = [p.grad for p in module.parameters()]
        results.append([*out, *gradients, *(t.grad for t in leaves)])
    for a, b in zip(*results, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape and a.is_contiguous() >= b.is_contiguous()
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("with_state", [False, True], ids=["zeros", "state"])
@pytest.mark.parametrize("kind, options", CASES, ids=NAMES)
def test_module_is_torchs(kind, options, with_state):
    ours, theirs = pair(kind, **options)
    x = torch.randn(*((4, 7) if options.get("batch_first") else (7, 4)), 5)
    compare(ours, theirs, x, first_state(theirs, 4) if with_state else None)


@pytest.mark.parametrize("enforce_sorted", [True, False])
@pytest.mark.parametrize("with_state", [False, True], ids=["zeros", "state"])
@pytest.mark.parametrize("kind, options", CASES, ids=NAMES)
def test_packed_sequences(kind, options, with_state, enforce_sorted):
    ours, theirs = pair(kind, **options)
    lengths = [9, 6, 6, 2, 1] if enforce_sorted else [2, 9, 1, 6, 6]
    x = pack_sequence([torch.randn(n, 5) for n in lengths], enforce_sorted=enforce_sorted)
    compare(ours, theirs, x, first_state(theirs, 5) if with_state else None)


def test_packed_in_is_packed_out():
    """What comes out can be unpacked as what torch's gives."""
    ours, theirs = pair("lstm", num_layers=2)
    x = pack_padded_sequence(torch.randn(8, 3, 5), [4, 8, 2], enforce_sorted=False)
    (a, _), (b, _) = ours(x), theirs(x)
    for unpacked in zip(*(torch.nn.utils.rnn.pad_packed_sequence(p) for p in (a, b)), strict=True):
        torch.testing.assert_close(*unpacked, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_single_sequence_without_a_batch(kind):
    ours, theirs = pair(kind, num_layers=2)
    state = first_state(theirs, 1)
    state = state[:, 0] if kind == "gru" else tuple(s[:, 0] for s in state)
    compare(ours, theirs, torch.randn(6, 5), state)
    compare(ours, theirs, torch.randn(6, 5), None)


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_is_between_layers_and_in_training(kind):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours, theirs = pair(kind, num_layers=2, dropout=1.0)
    x = torch.randn(3, 2, 5)
    compare(ours, theirs, x, None)  # nothing of the first layer passes
    compare(ours.eval(), theirs.eval(), x, None)


@pytest.mark.parametrize("kind, options", CASES, ids=NAMES)
def test_step_by_step(kind, options):
    """Frames one at a time give what the sequence gives, also from where `forward` left off."""
    ours, _ = pair(kind, **options)
    x = torch.randn(9, 3, 5)
    if options.get("bidirectional"):
        with pytest.raises(fk.Error, match="step: expected a module that is not bidirectional"):
            ours.step(x[0])
        return
    batch_first = options.get("batch_first", False)
    whole, last = ours(x.transpose(0, 1) if batch_first else x)
    whole = whole.transpose(0, 1) if batch_first else whole
    start, state = ours(x[:4].transpose(0, 1) if batch_first else x[:4])
    rows = list(start.transpose(0, 1) if batch_first else start)
    for frame in x[4:]:
        y, state = ours.step(frame, state)
        rows.append(y)
    torch.testing.assert_close(torch.stack(rows), whole, rtol=1e-4, atol=1e-5)
    for a, b in zip(tensors(state), tensors(last), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    first, _ = ours.step(x[0])
    torch.testing.assert_close(first, whole[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_half_precision(kind, dtype):
    ours, theirs = pair(kind, num_layers=2, bidirectional=True)
    ours = ours.to(dtype)
    x = torch.randn(7, 4, 5)
    y, last = ours(x.to(dtype))
    expected, _ = theirs(x.to(dtype).float())
    assert all(t.dtype == dtype for t in tensors((y, last)))
    torch.testing.assert_close(y.float(), expected, rtol=0.05, atol=0.02)


def test_gru_with_the_reset_gate_before_the_product():
    """A bias of the product with the state comes in outside of the gate."""
    torch.manual_seed(0)
    gru = GRU(3, 4, reset_after=False)
    x, h = torch.randn(1, 2, 3), torch.randn(1, 2, 4)
    w_ih, w_hh, b_ih, b_hh = gru.all_weights[0]
    of_x = (x[0] @ w_ih.T + b_ih).chunk(3, 1)
    r, z = ((of_x[i] + h[0] @ w_hh[4 * i : 4 * i + 4].T + b_hh[4 * i : 4 * i + 4]).sigmoid()
            for i in (0, 1))  # fmt: skip
    n = (of_x[2] + (r * h[0]) @ w_hh[8:].T + b_hh[8:]).tanh()
    torch.testing.assert_close(gru(x, h)[0][0], (1 - z) * n + z * h[0], rtol=1e-4, atol=1e-5)


def test_compiles():
    ours, _ = pair("lstm", num_layers=2)
    compiled = torch.compile(ours, fullgraph=True)
    x = torch.randn(6, 3, 5)
    torch.testing.assert_close(compiled(x)[0], ours(x)[0])


def test_copies_and_moves():
    """A module's arguments show in its text, and its weights follow it."""
    ours, theirs = pair("lstm", num_layers=2, bidirectional=True, proj_size=3)
    assert ours.extra_repr() == theirs.extra_repr()
    double = ours.to(torch.bfloat16)
    assert all(w.dtype == torch.bfloat16 for layer in double.all_weights for w in layer)


def test_errors():
    with pytest.raises(fk.Error, match="proj_size: expected less than hidden_size, 4, got 4"):
        LSTM(3, 4, proj_size=4)
    with pytest.raises(fk.Error, match="proj_size: expected none, a GRU has no projection"):
        GRU(3, 4, proj_size=2)
    with pytest.raises(fk.Error, match="dropout: expected 0 to 1, got 2"):
        LSTM(3, 4, dropout=2)
    with pytest.raises(
        fk.Error, match=r"input: expected \(..., 3\) of 2 or 3 dims, got \(2, 2, 5\)"
    ):
        LSTM(3, 4)(torch.randn(2, 2, 5))
    with pytest.raises(fk.Error, match=r"c_0: expected shape \(1, 2, 4\), got \(1, 3, 4\)"):
        LSTM(3, 4)(torch.randn(5, 2, 3), (torch.zeros(1, 2, 4), torch.zeros(1, 3, 4)))
    with pytest.raises(fk.Error, match=r"step: x: expected shape \(B, 3\), got \(2, 4\)"):
        GRU(3, 4).step(torch.randn(2, 4))


@pytest.fixture(scope="module")
def character_model():
    """(embedding, two layers' weights in torch's order, output weights and bias) as tensors."""
    folder = pathlib.Path(__file__).parents[3] / "shared" / "data" / "charrnn_lstm"
    if not (folder / "manifest.json").exists():
        pytest.skip(f"{folder} has no manifest.json")
    manifest = json.loads((folder / "manifest.json").read_text())

    def read(name):
        entry = manifest[name]
        values = np.fromfile(folder / entry["filename"], np.float32).reshape(entry["shape"])
        return torch.from_numpy(values)

    layers = []
    for i in range(2):
        cell = f"rnnlm/multi_rnn_cell/cell_{i}/basic_lstm_cell"
        # Its gates stand in the order i, g, f, o, and 1 is added to f when it runs.
        order = [0, 2, 1, 3]
        kernel = torch.cat([read(f"{cell}/kernel").T.chunk(4)[k] for k in order])
        biases = read(f"{cell}/bias").chunk(4)
        bias = torch.cat([biases[k] + (k == 2) for k in order])
        layers.append((kernel[:, :128], kernel[:, 128:], bias, torch.zeros_like(bias)))
    return read("embedding"), layers, read("rnnlm/softmax_w"), read("rnnlm/softmax_b")


def test_a_trained_model_writes_the_same_text(character_model):
    """Greedily, 500 characters, by whole sequences and by steps."""
    embedding, layers, w, b = character_model
    modules = [cls(128, 128, num_layers=2).requires_grad_(False) for cls in KINDS["lstm"]]
    for module in modules:
        for parameters, values in zip(module.all_weights, layers, strict=True):
            for parameter, value in zip(parameters, values, strict=True):
                parameter.copy_(value)
    ours, theirs = modules

    def write(advance):
        text, state, character = [], None, 0
        for _ in range(500):
            y, state = advance(embedding[character][None], state)
            character = int((y @ w + b).argmax())
            text.append(character)
        return text, state

    def forward(module):
        def advance(x, state):
            y, state = module(x[None], state)
            return y[0], state

        return advance

    text, _ = write(forward(theirs))
    assert len(set(text)) > 10  # it is text, not one letter
    assert write(forward(ours))[0] == text
    assert write(ours.step)[0] == text


def test_the_example_in_jax_learns():
    pytest.importorskip("jax")
    file = pathlib.Path(__file__).parents[2] / "examples" / "lstm_in_jax.py"
    spec = importlib.util.spec_from_file_location("lstm_in_jax", file)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    losses = example.main(["--steps", "60", "--hidden", "48", "--length", "32"])
    assert losses[-1] < 0.8 * losses[0]
