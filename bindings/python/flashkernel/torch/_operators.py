"""The torch operators of an op, derived from its declaration:

  flashkernel::<name>_fwd[.variant]   the outputs users see; no gradient
  flashkernel::<name>[.variant]       the same kernel, also returning what the backward needs; its
                                      gradient is <name>_bwd
  flashkernel::<name>_bwd             the op's arguments and a bit mask of the gradients to compute;
                                      the others come back without elements
  flashkernel::<name>_fwd_, _bwd_     those that write one output over an input

An op whose outputs depend on its arguments (rms_norm returns the sum if there is a residual) has
one overload ("variant") for each set of outputs. The kernels are registered by the library itself
(bindings/torch); here are the schemas, the fake kernels and the gradients."""

import ctypes
import itertools
from dataclasses import dataclass, field

import torch

from .. import _library
from .._declarations import Field, Op, _compile

_lib = torch.library.Library("flashkernel", "DEF")
_register_kernel = _library.function(
    "fk_torch_register",
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_void_p,
    ctypes.c_int64,
    ctypes.c_int32,
    ctypes.c_uint64,
    ctypes.c_uint64,
)

_DTYPES = {"float32": torch.float32, "int32": torch.int32}
_CHOSEN_BY_CALL = -1
_NOT_IN_PLACE = -1


@dataclass
class Variant:
    """One set of outputs, and the operators that return it."""

    name: str  # of the overload; "" is the default one
    outputs: tuple[int, ...]  # which of the op's outputs exist
    visible: tuple[int, ...]  # those of them that users see
    absent: set[str]  # optional inputs that no call of this variant has
    present: set[str]  # optional inputs that every call of this variant has
    arguments: list[str]  # of `forward` and `in_place`: all but the absent ones
    forward: object = None
    differentiable: object = None
    in_place: object = None


@dataclass
class Operators:
    """The torch operators of one op."""

    op: Op
    variants: list[Variant] = field(default_factory=list)


#: By public name.
registered: dict[str, Operators] = {}


def register(op: Op) -> Operators:
    registered[op.public_name] = result = Operators(op, _variants(op))
    backward = _Backward(op) if op.backward else None
    for v in result.variants:
        inputs = {"absent": v.absent, "present": v.present}
        name = f"{op.public_name}_fwd"
        v.forward = _operator(op, name, v.name, v.visible, **inputs)
        if op.in_place_output:
            written = op.outputs.index(op.in_place_output)
            v.in_place = _operator(op, f"{name}_", v.name, v.visible, in_place=written, **inputs)
        if backward:
            # Calls that need a gradient take the other operator.
            _lib.impl(v.forward, torch.library.fallthrough_kernel, "Autograd")
            extra = [f"bool {s}" for s in op.extra_keywords if s == "inplace_backward"]
            v.differentiable = _operator(op, op.public_name, v.name, v.outputs, extra=extra)
            backward.register(v)
    return result


def _variants(op: Op) -> list[Variant]:
    """Every set of outputs a call may have; that of a call by default first."""
    subjects = {}
    for output in op.outputs:
        if output.when:
            subject = op.by_name[output.when.partition("=")[0].rstrip("!")]
            subjects[subject.name] = _cases(subject)
    default = {f.name: None if f.optional else object() for f in op.inputs}
    default.update({f.name: f.default for f in op.attributes})
    found: dict[tuple[int, ...], list] = {}  # outputs -> [(label, values)]
    for case in itertools.product(*subjects.values()):
        values = dict(zip(subjects, (value for _, value in case), strict=True))
        wanted = op.outputs_wanted(*((default | values)[f.name] for f in op.arguments))
        label = "_".join(label for label, _ in case if label)
        outputs = tuple(i for i, w in enumerate(wanted) if w)
        found.setdefault(outputs, []).append((label, values))
    variants = []
    for outputs, cases in found.items():
        inputs = [name for name in subjects if op.by_name[name].kind == "input"]
        absent = {n for n in inputs if all(values[n] is None for _, values in cases)}
        present = {n for n in inputs if all(values[n] is not None for _, values in cases)}
        visible = tuple(i for i in outputs if not op.outputs[i].saved)
        arguments = [f.name for f in op.arguments if f.name not in absent]
        variants.append(Variant(cases[0][0], outputs, visible, absent, present, arguments))
    return variants


def _cases(f: Field) -> list[tuple[str, object]]:
    """Values of an argument, each with its label; the default first, without one."""
    if f.kind == "input":
        return [("", None), (f.name, object())]
    if f.kind == "boolean":
        return [("", f.default), (f.name, not f.default)]
    others = [(c or "none", i) for i, c in enumerate(f.choices) if i != f.default]
    return [("", f.default), *others]


def _operator(
    op,
    name,
    overload_name,
    outputs,
    *,
    in_place=None,
    chosen_by_call=False,
    absent=frozenset(),
    present=frozenset(),
    extra=(),
):
    """Defines one operator: schema, CPU and CUDA kernels, fake kernel."""
    qualified = f"{name}.{overload_name}" if overload_name else name
    written = op.outputs[in_place].may_alias if in_place is not None else None
    returned = [i for i in outputs if i != in_place]
    boxed = {f.name for f in op.inputs if f.optional} - absent - present
    arguments = [
        _schema(op, f, f.name == written, f.name in boxed)
        for f in op.arguments
        if f.name not in absent
    ]
    arguments += extra
    if chosen_by_call:
        arguments.append("int outputs")
    results = ", ".join("Tensor" for _ in returned)
    results = results if len(returned) == 1 else f"({results})"
    _lib.define(
        f"{qualified}({', '.join(arguments)}) -> {results}",
        tags=(torch.Tag.pt2_compliant_tag,),
    )
    error = _register_kernel(
        qualified.encode(),
        op.handle,
        _CHOSEN_BY_CALL if chosen_by_call else _mask(outputs),
        _NOT_IN_PLACE if in_place is None else in_place,
        _mask(i for i, f in enumerate(op.fields) if f.name in absent),
        _mask(i for i, f in enumerate(op.fields) if f.name in boxed),
    )
    if error:
        raise ImportError(f"flashkernel: cannot register {qualified}: {error.decode()}")
    torch.library.register_fake(
        f"flashkernel::{qualified}", _fake(op, returned, chosen_by_call, absent), lib=_lib
    )
    overload = getattr(getattr(torch.ops.flashkernel, name), overload_name or "default")
    if written:
        names = [f.name for f in op.arguments if f.name not in absent]
        _bump_version(overload, names.index(written))
    return overload


def _schema(op: Op, f: Field, written: bool, boxed: bool) -> str:
    if f.kind == "input":
        kind = "Tensor(a!)" if written else "Tensor?" if boxed else "Tensor"
    elif f.kind == "integer":
        is_size = any(f.name in shape for o in op.outputs for shape in o.shapes)
        kind = "SymInt" if is_size else "int"
    else:
        kind = {"number": "float", "boolean": "bool", "choice": "int", "axis": "int"}[f.kind]
    return f"{kind} {f.name}"


def _mask(outputs) -> int:
    return sum(1 << i for i in outputs)


def _fake(op: Op, returned: list[int], chosen_by_call: bool, absent: set[str]):
    """Outputs of the right shape, dtype and device, without values."""
    names = [f.name for f in op.arguments]
    left_out = [i for i, name in enumerate(names) if name in absent]
    first = next(names.index(f.name) for f in op.inputs if not f.optional)
    sources = [op.dtype_source(f) for f in op.outputs]

    def fake(*given):
        arguments = list(given)
        for i in left_out:
            arguments.insert(i, None)
        like = arguments[first]
        shapes = op.output_shapes(*arguments[: len(names)])
        results = []
        for i in returned:
            if chosen_by_call and not arguments[-1] >> i & 1:
                results.append(like.new_empty(0))
                continue
            source = sources[i]
            dtype = _DTYPES.get(source) or arguments[names.index(source)].dtype
            results.append(like.new_empty(shapes[i], dtype=dtype))
        if len(results) == 1:
            return results[0]
        return tuple(results) or None

    return fake


def _bump_version(overload, written: int) -> None:
    """Lets autograd notice that a saved tensor was overwritten."""

    def kernel(keyset, *arguments):
        torch.autograd.graph.increment_version(arguments[written])
        return overload.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *arguments)

    _lib.impl(overload, kernel, "ADInplaceOrView", with_keyset=True)


class _Backward:
    """The backward operators of an op, and which of the forward's tensors go where in them."""

    def __init__(self, op: Op):
        self.op, self.bwd = op, op.backward
        self.name = self.bwd.public_name
        everything = range(len(self.bwd.outputs))
        self.call = _operator(self.bwd, self.name, "", everything, chosen_by_call=True)
        self.in_place_call = None
        if "inplace_backward" in op.extra_keywords:
            self.overwriting = self.bwd.outputs.index(self.bwd.in_place_output)
            self.in_place_call = _operator(
                self.bwd,
                f"{self.name}_",
                "",
                everything,
                in_place=self.overwriting,
                chosen_by_call=True,
            )
        places = {f.name: i for i, f in enumerate(op.arguments)}
        # For each gradient: the forward's arguments it belongs to.
        self.targets = [
            [places[name] for name in (f.name[1:], f.also_gradient_of) if name in places]
            for f in self.bwd.outputs
        ]
        reached = {i for targets in self.targets for i in targets}
        self.constant = [
            (i, f.name)
            for i, f in enumerate(op.arguments)
            if f.kind == "input" and i not in reached
        ]
        self.attribute = [self._attribute(f) for f in self.bwd.attributes]

    def _attribute(self, f: Field):
        """f(*forward arguments) -> a backward's attribute: the forward's own, or a size."""
        names = ", ".join(g.name for g in self.op.arguments)
        lines: list[str] = []
        expression = f.name
        if f.name not in self.op.by_name:
            expression, _ = self.op._source_of(f.name, lines)
        body = "".join(f"    {line}\n" for line in lines)
        return _compile(
            f"def attribute({names}):\n{body}    return {expression}",
            "attribute",
            **_compile_helpers(),
        )

    def _sources(self, variant: Variant):
        """For each input of the backward, in order: ("gradient" | "argument" | "output", index)."""
        arguments = {f.name: i for i, f in enumerate(self.op.arguments)}
        outputs = {self.op.outputs[i].name: k for k, i in enumerate(variant.outputs)}
        for f in self.bwd.inputs:
            if f.prefer in outputs:
                yield "output", outputs[f.prefer]
            elif f.name in arguments:
                yield "argument", arguments[f.name]
            elif f.name in outputs:
                yield "output", outputs[f.name]
            else:
                yield "gradient", outputs.get(f.name[1:])

    def register(self, variant: Variant) -> None:
        sources = list(self._sources(variant))
        kept = [(kind, i) for kind, i in sources if kind != "gradient"]
        hidden = [k for k, i in enumerate(variant.outputs) if i not in variant.visible]
        n_arguments = len(self.op.arguments)
        in_slot_order = _slot_order(self.bwd)
        gradients_required = [
            i
            for f, (kind, i) in zip(self.bwd.inputs, sources, strict=True)
            if kind == "gradient" and not f.optional
        ]

        def setup_context(ctx, inputs, output):
            outputs = output if isinstance(output, tuple) else (output,)
            for i, name in self.constant:
                if ctx.needs_input_grad[i]:
                    raise _library.Error(
                        f"{self.op.public_name}: {name}: expected a tensor that requires no "
                        "gradient (this op defines none for it), got one that does"
                    )
            ctx.set_materialize_grads(False)
            ctx.mark_non_differentiable(*(outputs[k] for k in hidden))
            ctx.save_for_backward(
                *(inputs[i] if kind == "argument" else outputs[i] for kind, i in kept)
            )
            ctx.attributes = [f(*inputs[:n_arguments]) for f in self.attribute]
            ctx.in_place = self.in_place_call is not None and inputs[n_arguments]
            if len(variant.visible) > 1:
                ctx.like = {i: (outputs[i].shape, outputs[i].dtype) for i in gradients_required}

        def backward(ctx, *gradients):
            saved = iter(ctx.saved_tensors)
            tensors = []
            for f, (kind, i) in zip(self.bwd.inputs, sources, strict=True):
                if kind != "gradient":
                    tensors.append(next(saved))
                    continue
                gradient = gradients[i] if i is not None else None
                if gradient is None and not f.optional:
                    shape, dtype = ctx.like[i]
                    some = next(g for g in gradients if g is not None)
                    gradient = some.new_zeros((), dtype=dtype).expand(shape)
                tensors.append(gradient)
            needs = ctx.needs_input_grad
            mask = _mask(
                bit for bit, targets in enumerate(self.targets) if any(needs[t] for t in targets)
            )
            arguments = in_slot_order(tensors, ctx.attributes)
            computed = self._run(arguments, mask, ctx.in_place)
            results = [None] * len(needs)
            for bit, targets in enumerate(self.targets):
                for t in targets:
                    if needs[t]:
                        results[t] = computed[bit]
            return tuple(results)

        torch.library.register_autograd(
            variant.differentiable._name, backward, setup_context=setup_context, lib=_lib
        )

    def _run(self, arguments: list, mask: int, in_place: bool) -> tuple:
        """All gradients of the mask; what stands for the others does not matter."""
        try:
            if torch.is_grad_enabled():
                computed = _Once.apply(self.call, self.op.public_name, *arguments, mask)
            elif in_place and mask >> self.overwriting & 1:
                computed = self.in_place_call(*arguments, mask)
                computed = list(computed) if isinstance(computed, tuple) else [computed]
                computed = [c for c in computed if c is not None]
                target = self.bwd.arguments.index(
                    self.bwd.by_name[self.bwd.in_place_output.may_alias]
                )
                computed.insert(self.overwriting, arguments[target].detach())
                return tuple(computed)
            else:
                computed = self.call(*arguments, mask)
        except RuntimeError as error:
            if str(error).startswith(f"{self.name}: "):
                raise _library.Error(str(error)) from None
            raise
        return computed if isinstance(computed, (tuple, list)) else (computed,)


def _slot_order(op: Op):
    """f(inputs, attributes) -> the op's arguments in slot order."""
    tensors, attributes, order = 0, 0, []
    for f in op.arguments:
        if f.is_tensor:
            order.append(f"tensors[{tensors}]")
            tensors += 1
        else:
            order.append(f"attributes[{attributes}]")
            attributes += 1
    return _compile(
        f"def in_order(tensors, attributes):\n    return [{', '.join(order)}]", "in_order"
    )


def _compile_helpers() -> dict:
    from .._declarations import move_back, move_last

    return {"move_last": move_last, "move_back": move_back}


class _Once(torch.autograd.Function):
    """A backward call inside a graph that is kept (create_graph=True): may be made, but not
    differentiated in its turn."""

    @staticmethod
    def forward(ctx, call, name, *arguments):
        ctx.name = name
        return call(*arguments)

    @staticmethod
    def backward(ctx, *gradients):
        raise _library.Error(
            f"{ctx.name}: expected a single backward, got a gradient of its gradient, "
            "which is not defined"
        )
