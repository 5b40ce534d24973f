"""A character model of one LSTM layer in plain JAX: trained on a text, then asked to write.

    python examples/lstm_in_jax.py novel.txt --steps 300
    python examples/lstm_in_jax.py              (learns this file)

`fk.lstm` takes JAX arrays under `jax.jit` and `jax.grad` as any function of jax.numpy does. The
sequences of the batch carry their states over from one step of training to the next.
"""

import argparse
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

import flashkernel as fk


def initial(key, vocabulary, hidden):
    names = {
        "embedding": (vocabulary, hidden),
        "w_ih": (4 * hidden, hidden),
        "w_hh": (4 * hidden, hidden),
        "b_ih": (4 * hidden,),
        "out": (hidden, vocabulary),
    }
    keys = jax.random.split(key, len(names))
    bound = hidden**-0.5
    return {
        name: jax.random.uniform(k, shape, minval=-bound, maxval=bound)
        for k, (name, shape) in zip(keys, names.items(), strict=True)
    }


def logits_of(weights, characters, state):
    """Logits (B, L, vocabulary) of what follows each character, and the state behind the last."""
    x = weights["embedding"][characters]
    y, *state = fk.lstm(x, weights["w_ih"], weights["w_hh"], weights["b_ih"], None, *state)
    return y @ weights["out"], tuple(state)


@jax.jit
def train(weights, moments, characters, state, rate):
    """A step of Adam without its bias correction: (weights, moments, loss, state)."""

    def loss_of(weights):
        logits, after = logits_of(weights, characters[:, :-1], state)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), characters[:, 1:, None], -1)
        return -chosen.mean(), after

    (loss, state), gradients = jax.value_and_grad(loss_of, has_aux=True)(weights)
    first, second = moments
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, gradients)
    second = jax.tree.map(lambda m, g: 0.99 * m + 0.01 * g * g, second, gradients)
    weights = jax.tree.map(
        lambda w, m, v: w - rate * m / (jnp.sqrt(v) + 1e-8), weights, first, second
    )
    return weights, (first, second), loss, state


def main(arguments=None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", nargs="?", default=__file__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    options = parser.parse_args(arguments)

    text = pathlib.Path(options.text).read_text(encoding="utf-8")
    alphabet = sorted(set(text))
    numbers = np.array([alphabet.index(c) for c in text])
    # Rows of the batch are parts of the text, each walked from its beginning.
    rows = np.array_split(numbers[: len(numbers) // options.batch * options.batch], options.batch)
    rows = np.stack(rows)

    weights = initial(jax.random.key(0), len(alphabet), options.hidden)
    zeros = jax.tree.map(jnp.zeros_like, weights)
    moments, losses, at = (zeros, zeros), [], 0
    fresh = (jnp.zeros((options.batch, options.hidden)),) * 2
    state = fresh
    for step in range(options.steps):
        if at + options.length + 1 > rows.shape[1]:
            at, state = 0, fresh
        piece = jnp.asarray(rows[:, at : at + options.length + 1])
        weights, moments, loss, state = train(weights, moments, piece, state, 3e-3)
        losses.append(float(loss))
        at += options.length
        if step % 50 == 0 or step + 1 == options.steps:
            print(f"step {step}: {losses[-1] / np.log(2):.2f} bits a character")

    state = (jnp.zeros((1, options.hidden)),) * 2
    character, written = alphabet.index("\n"), []
    advance = jax.jit(logits_of)
    for _ in range(200):
        logits, state = advance(weights, jnp.array([[character]]), state)
        character = int(logits[0, 0].argmax())
        written.append(alphabet[character])
    print("".join(written))
    return losses


if __name__ == "__main__":
    main()
