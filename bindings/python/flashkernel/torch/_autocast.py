"""The ops under torch.autocast, each by the rule that its declaration names (`Autocast` in
src/core/declaration.h). The casts are torch's own operations, above autograd, so that gradients
come back in the dtypes of the arguments."""

import torch

from .._declarations import Op

#: The dispatch key by which torch asks for an op's autocast, for each device that the ops run on.
KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}

#: Tells whether any device's autocast is on in this thread.
active = torch._C._is_any_autocast_enabled

# What torch casts too, but for 8-bit floats: those an op was given on purpose.
_CAST = {torch.float32, torch.float16, torch.bfloat16}


def enabled(device: str) -> bool:
    """Tells whether autocast is on for a type of device; torch has none for some (meta)."""
    return device in KEYS and torch.is_autocast_enabled(device)


def wrap(op: Op, names: list[str], function, written: tuple[int, ...] = ()):
    """A function of the arguments of those names, as `function` is, that casts them by the op's
    rule first. Into the arguments `written`, which `function` writes over, it copies the values
    back if they had to be cast."""
    cast = _caster(op, names)

    def under_autocast(*arguments):
        given = cast(arguments)
        with torch._C._DisableAutocast():
            results = function(*given)
            for i in written:
                if given[i] is not arguments[i]:
                    arguments[i].copy_(given[i])
        return results

    return under_autocast


def _caster(op: Op, names: list[str]):
    """f(arguments) -> the arguments, in the dtypes that they have inside a region."""
    rules = [(i, op.by_name[n].dtype_rule) for i, n in enumerate(names) if n in op.by_name]
    rules = [(i, rule) for i, rule in rules if rule and rule not in "IJ"]
    activations = [i for i, rule in rules if rule == "T"]
    places = {name: i for i, name in enumerate(names)}

    def cast(arguments):
        first = next(arguments[i] for i in activations if arguments[i] is not None)
        device = "cpu" if first.is_cpu else first.device.type
        if not enabled(device):
            return arguments
        given = [arguments[i].dtype for i in activations if arguments[i] is not None]
        activation = _activation_dtype(op.autocast, device, given)
        result = list(arguments)
        for i, rule in rules:
            tensor = arguments[i]
            if tensor is None:
                continue
            dtype = tensor.dtype
            if rule == "T" or (rule == "P" and dtype is activation):
                wanted = activation
            elif rule in "PF":
                wanted = torch.float32
            else:  # "@name"
                wanted = result[places[rule[1:]]].dtype
            if dtype is not wanted and dtype in _CAST:
                result[i] = tensor.to(wanted)
        return result

    return cast


def _activation_dtype(rule: str, device: str, given: list):
    if not _CAST.issuperset(given):
        return torch.bfloat16  # the results' of 8-bit floats; others the op itself refuses
    if rule == "lower":
        return torch.get_autocast_dtype(device)
    if rule == "float32_on_gpu" and device != "cpu":
        return torch.float32
    return given[0] if given.count(given[0]) == len(given) else torch.float32
