"""The gradient of an op: which of the forward's tensors go where in the backward op, by the rules
of names in the declarations. Written as source once per set of outputs, because a backward of a few
microseconds must not wait for Python to look things up."""

import torch
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch.autograd import forward_ad

from .. import _library
from .._declarations import Field, Op
from .._generated import compile_function
from .._output_shapes import ShapeWriter
from .._shapes import move_back, move_last


def refuse_tangents(op: Op, tensors: tuple) -> None:
    """Refuses tangents, those too that a kernel does not meet because torch.func takes them off."""
    if forward_ad._current_level < 0:
        return
    for f, t in zip(op.inputs, tensors, strict=True):
        if t is not None and _has_tangent(t):
            raise _no_tangent(op.public_name, f.name)


def _has_tangent(tensor) -> bool:
    if torch._C._functorch.is_batchedtensor(tensor):
        with retrieve_current_functorch_interpreter().lower():
            return _has_tangent(torch._C._functorch.get_unwrapped(tensor))
    return forward_ad.unpack_dual(tensor).tangent is not None


def _no_tangent(op: str, what: str) -> _library.Error:
    return _library.Error(
        f"{op}: {what}: expected a tensor without a tangent (this op defines no derivative in "
        "forward mode), got one with"
    )


def _derivatives_followed() -> bool:
    """Tells whether one of torch.func's active transforms takes derivatives."""
    kinds = torch._C._functorch.TransformType
    others = (kinds.Vmap, kinds.Functionalize)
    return any(i.key() not in others for i in torch._C._functorch.get_interpreter_stack())


class Gradient:
    """The gradient of one variant of an op.

    setup(ctx, *arguments, results) keeps what the backward needs; backward(ctx, *gradients) returns
    one gradient per argument. `arguments` are those of the differentiable operator, `results` the
    tuple of its results."""

    def __init__(self, op: Op, variant, call, in_place_call):
        self.op, self.bwd, self.variant = op, op.backward, variant
        self.arguments = [f.name for f in op.arguments]
        if in_place_call:
            self.arguments.append("inplace_backward")

        self.results = {op.outputs[i].name: k for k, i in enumerate(variant.outputs)}
        self.namespace = {
            "Error": _library.Error,
            "bwd_name": self.bwd.public_name,
            "call": call,
            "grad_enabled": torch.is_grad_enabled,
            "in_place_call": in_place_call,
            "move_back": move_back,
            "move_last": move_last,
            "op_name": op.public_name,
            "once": _Once.apply,
            "repeat": _repeat,
            "transforms_active": torch._C._are_functorch_transforms_active,
            "zeros": _zeros,
        }
        self.kept: dict[str, str] = {}  # name in the backward -> expression in the forward
        for f in self.bwd.inputs:
            if f.when in variant.absent:
                continue  # of no use in this variant's backward
            if f.prefer in self.results:
                self.kept[f.name] = f"results[{self.results[f.prefer]}]"
            elif f.name in op.by_name and op.by_name[f.name].kind == "input":
                self.kept[f.name] = f.name
            elif f.name in self.results:
                self.kept[f.name] = f"results[{self.results[f.name]}]"
        self.setup_lines = self._make_setup_lines()
        parameters = ["ctx", *self.arguments, "results"]
        self.setup = self._compile("setup", parameters, self.setup_lines)
        self.backward = self._make_backward(in_place_call)

    def _targets(self, f: Field) -> list[int]:
        """The arguments whose gradient an output of the backward is."""
        names = (f.name[1:], f.also_gradient_of)
        return [self.arguments.index(name) for name in names if name in self.arguments]

    def _make_setup_lines(self) -> list[str]:
        op, lines = self.op, []
        reached = {t for f in self.bwd.outputs for t in self._targets(f)}
        for i, f in enumerate(op.arguments):
            if f.kind == "input" and f.dtype_rule not in ("I", "J") and i not in reached:
                text = (
                    f"{op.public_name}: {f.name}: expected a tensor that requires no gradient "
                    "(this op defines none for it), got one that does"
                )
                lines += [f"if ctx.needs_input_grad[{i}]:", f"    raise Error({text!r})"]
        attributes, sizes = [], ShapeWriter(op, lines)
        for f in self.bwd.attributes:
            # An attribute of the forward, or the size of the symbol that has its name.
            value = f.name if f.name in op.by_name else sizes.size(f.name)[0]
            attributes.append(value)
        hidden = [k for k, i in enumerate(self.variant.outputs) if i not in self.variant.visible]
        lines.append("ctx.set_materialize_grads(False)")
        if hidden:
            lines.append(f"ctx.mark_non_differentiable({_join(f'results[{k}]' for k in hidden)})")
        lines.append(f"ctx.save_for_backward({_join(self.kept.values())})")
        lines.append(f"ctx.attributes = ({_join(attributes)})")
        if len(self.variant.visible) > 1:
            lines.append("ctx.types = [(r.shape, r.dtype) for r in results]")
        if "inplace_backward" in self.arguments:
            lines.append("ctx.in_place = inplace_backward")
        return lines

    def _make_forward(self, compute):
        """forward(ctx, *arguments): the outputs by `compute`, and the setup without its call."""
        given = ", ".join(f.name for f in self.op.arguments)
        single = "" if len(self.variant.outputs) > 1 else "results = (returned,)"
        lines = [f"returned = results = compute({given})", *filter(None, [single])]
        lines += [*self.setup_lines, "return returned"]
        self.namespace["compute"] = compute
        return self._compile("forward", ["ctx", *self.arguments], lines)

    def _make_backward(self, in_place_call):
        gradients = [f"gradient_{k}" for k in range(len(self.variant.outputs))]
        # The gradient of everything may be nothing, after a function that gives none.
        lines = [f"if {' is None and '.join(gradients)} is None:"]
        lines.append(f"    return ({_join(['None'] * len(self.arguments))})")
        if self.kept:
            lines.append(f"({_join(self.kept)}) = ctx.saved_tensors")
        attributes = [f.name for f in self.bwd.attributes]
        if attributes:
            lines.append(f"({_join(attributes)}) = ctx.attributes")
        arguments = []
        for f in self.bwd.arguments:
            if f.name in self.kept or not f.is_tensor:
                arguments.append(f.name)
                continue
            k = self.results.get(f.name[1:])
            arguments.append("None" if k is None else gradients[k])
            if k is not None and not f.optional and len(self.variant.visible) > 1:
                lines.append(f"if {gradients[k]} is None:")
                lines.append(f"    {gradients[k]} = zeros(ctx.types[{k}], ({_join(gradients)}))")
        returned = ["None"] * len(self.arguments)
        targets = {f.name: self._targets(f) for f in self.bwd.outputs}
        if [len(t) for t in targets.values()] == [1]:
            # A backward is only run where the gradient of something is needed.
            ((name, (target,)),) = targets.items()
            returned[target] = name
            lines.append("outputs = 1")
        else:
            lines += ["needs = ctx.needs_input_grad", "outputs = 0"]
            for bit, (name, places) in enumerate(targets.items()):
                lines.append(f"if {' or '.join(f'needs[{t}]' for t in places)}:")
                lines.append(f"    outputs |= {1 << bit}")
                for t in places:
                    returned[t] = f"{name} if needs[{t}] else None"
        names = [f.name for f in self.bwd.outputs]
        given = ", ".join([*arguments, "outputs"])
        lines += ["try:", "    if grad_enabled():"]
        lines.append(f"        {', '.join(names)} = once(call, bwd_name, {given})")
        if in_place_call:
            written = self.bwd.in_place_output
            bit = 1 << self.bwd.outputs.index(written)
            others = [n for n in names if n != written.name]
            lines.append(f"    elif ctx.in_place and outputs & {bit}:")
            lines.append(f"        {f'{_join(others)} = ' if others else ''}in_place_call({given})")
            lines.append(f"        {written.name} = {written.may_alias}.detach()")
        if all(f.repeats for f in self.bwd.outputs):
            lines.append("    else:")
            for f in self.bwd.outputs:
                repeated = arguments[self.bwd.arguments.index(self.bwd.by_name[f.repeats])]
                kept = {d.symbol for d in self.bwd.by_name[f.repeats].shapes[0]}
                (size,) = {d.symbol for d in f.shapes[0]} - kept
                lines.append(f"        {f.name} = repeat({repeated}, {self.bwd.axis.name}, {size})")
        else:
            lines.append("    elif transforms_active():")
            lines.append(f"        {', '.join(names)} = once(call, bwd_name, {given})")
            lines.append("    else:")
            lines.append(f"        {', '.join(names)} = call({given})")
        lines += [
            "except RuntimeError as error:",
            "    if str(error).startswith(bwd_name + ': '):",
            "        raise Error(op_name + str(error).removeprefix(bwd_name)) from None",
            "    raise",
            f"return ({_join(returned)})",
        ]
        return self._compile("backward", ["ctx", *gradients], lines)

    def _compile(self, name: str, arguments: list[str], lines: list[str]):
        body = "\n    ".join(lines)
        source = f"def {name}({', '.join(arguments)}):\n    {body}\n"
        return compile_function(source, name, **self.namespace)

    def jvp(self, ctx, *tangents):
        names = (n for n, t in zip(self.arguments, tangents, strict=True) if t is not None)
        raise _no_tangent(self.op.public_name, next(names))

    def function(self, call):
        """An autograd function around the operator: for calls outside of a compiler, where it costs
        less than the one torch makes of setup and backward."""
        extra = (False,) * (len(self.arguments) - len(self.op.arguments))  # no matter to the kernel

        def below_autograd(*arguments):
            with torch._C._AutoDispatchBelowAutograd():
                return call(*arguments, *extra)

        forward = self._make_forward(below_autograd)

        methods = {
            "forward": staticmethod(forward),
            "backward": staticmethod(self.backward),
            "jvp": staticmethod(self.jvp),
        }
        function = type(self.op.public_name, (torch.autograd.Function,), methods)
        # What the engine calls. Torch's own looks for `backward` or `vjp` each time.
        function._backward_cls.apply = self.backward
        return function.apply

    def function_under_transforms(self, call):
        """What stands for the operator without a gradient, but for its always returning a tuple,
        under torch.func's transforms: a tensor that they wrapped does not tell whether those
        inside it need a gradient."""
        setup, count = self.setup, len(self.op.arguments)
        extra = (False,) * (len(self.arguments) - count)

        def forward(*arguments):
            return call(*arguments[:count], *extra)

        def setup_context(ctx, arguments, results):
            setup(ctx, *arguments, results if isinstance(results, tuple) else (results,))

        methods = {
            "forward": staticmethod(forward),
            "setup_context": staticmethod(setup_context),
            "backward": staticmethod(self.backward),
            "jvp": staticmethod(self.jvp),
            "generate_vmap_rule": True,
        }
        function = type(self.op.public_name, (torch.autograd.Function,), methods)
        left_out = [i for i, f in enumerate(self.op.arguments) if f.name in self.variant.absent]
        tensors = [i for i, f in enumerate(self.op.arguments) if f.is_tensor]
        visible = [k for k, i in enumerate(self.variant.outputs) if i in self.variant.visible]

        def transformed(*given):
            arguments = list(given)
            for i in left_out:
                arguments.insert(i, None)
            refuse_tangents(self.op, tuple(arguments[i] for i in tensors))
            compute = function.apply if _derivatives_followed() else call
            results = compute(*arguments, *extra)
            return tuple(results[k] for k in visible) if isinstance(results, tuple) else (results,)

        return transformed


def _join(items) -> str:
    """Joins items to what stands inside a tuple of any length."""
    return "".join(f"{item}, " for item in items)


def _repeat(tensor, axis: int, size: int):
    """A view that repeats a tensor along an axis that it does not have yet."""
    view = tensor.unsqueeze(axis)
    sizes = [-1] * view.dim()
    sizes[axis] = size
    return view.expand(sizes)


def _zeros(type_, gradients):
    """The gradient of an output that nothing was computed from."""
    shape, dtype = type_
    some = next(g for g in gradients if g is not None)
    return some.new_zeros((), dtype=dtype).expand(shape)


class _Once(torch.autograd.Function):
    """A backward call inside a graph that is kept (create_graph=True): may be made, but not
    differentiated in its turn."""

    generate_vmap_rule = True

    @staticmethod
    def forward(call, name, *arguments):
        return call(*arguments)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.name = inputs[1].removesuffix("_bwd")

    @staticmethod
    def backward(ctx, *gradients):
        raise _library.Error(
            f"{ctx.name}: expected a single backward, got a gradient of its gradient, "
            "which is not defined"
        )

    @staticmethod
    def jvp(ctx, *tangents):
        raise _no_tangent(ctx.name, "gradient")
