"""What parameters begin with: the distributions of torch's modules."""

import jax
import jax.numpy as jnp


def uniform(key, shape, bound, dtype):
    return jax.random.uniform(key, shape, jnp.float32, -bound, bound).astype(dtype)


def linear(key, name, outputs, inputs, dtype, bias=False) -> dict:
    bound = inputs**-0.5
    params = {f"{name}.weight": uniform(key, (outputs, inputs), bound, dtype)}
    if bias:
        params[f"{name}.bias"] = uniform(jax.random.fold_in(key, 1), (outputs,), bound, dtype)
    return params


def conv1d(key, name, channels, width, dtype) -> dict:
    bound = width**-0.5
    return {
        f"{name}.weight": uniform(key, (channels, 1, width), bound, dtype),
        f"{name}.bias": uniform(jax.random.fold_in(key, 1), (channels,), bound, dtype),
    }


def norm(kind, name, size, dtype) -> dict:
    params = {f"{name}.weight": jnp.ones(size, dtype)}
    return params | ({f"{name}.bias": jnp.zeros(size, dtype)} if kind == "layer" else {})
