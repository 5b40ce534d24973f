defmodule FlashKernel.Call do
  @moduledoc false
  # Calls of ops, and their gradients, on tensors of any kind. A backend says what a tensor is:
  #   layout(tensor)          {shape, type}
  #   run(plan, tensors)      the outputs of a planned call by name, of tensors by name
  #   zeros(shape, type)      a tensor of zeros

  alias FlashKernel.{Arguments, Op, Plan, Shapes}

  @doc "The outputs that a user sees, by name and in order."
  @spec forward(Op.t(), Arguments.t(), module) :: [{String.t(), term}]
  def forward(op, arguments, backend) do
    names = visible_names(op, arguments)
    outputs = run(op, arguments.tensors, arguments.attributes, names, backend)
    for name <- names, do: {name, outputs[name]}
  end

  @doc """
  The same, with a function from the gradients of these outputs (nil stands for zeros), in their order,
  to those of the inputs that have one: a list in the order of `differentiable/2`.
  """
  @spec with_gradient(Op.t(), Arguments.t(), module) :: {[{String.t(), term}], (list -> list)}
  def with_gradient(op, arguments, backend) do
    %{tensors: tensors, attributes: attributes} = arguments
    visible = visible_names(op, arguments)
    wanted = for f <- Op.wanted(op, tensors, attributes), do: f.name
    read = for f <- Op.inputs(op.backward), name <- [f.prefer, f.name], do: name
    names = Enum.filter(wanted, &(&1 in visible or &1 in read))
    outputs = run(op, tensors, attributes, names, backend)

    gradient = fn cotangents ->
      gradients(op, arguments, outputs, Enum.zip(visible, cotangents), backend)
    end

    {Enum.map(visible, &{&1, outputs[&1]}), gradient}
  end

  @doc "The names of the inputs given that a gradient exists of, in slot order."
  @spec differentiable(Op.t(), Arguments.t()) :: [String.t()]
  def differentiable(op, arguments) do
    of = gradient_outputs(op)
    for f <- Op.inputs(op), of[f.name], is_map_key(arguments.tensors, f.name), do: f.name
  end

  @doc "Runs any op, a backward too, on tensors and attributes by name."
  @spec run(Op.t(), map, map, [String.t()], module) :: map
  def run(op, tensors, attributes, names, backend) do
    layouts = Map.new(tensors, fn {name, tensor} -> {name, backend.layout(tensor)} end)
    op |> Plan.make(layouts, attributes, names) |> backend.run(tensors)
  end

  defp visible_names(op, %{tensors: tensors, attributes: attributes}) do
    for f <- op |> Op.wanted(tensors, attributes) |> Op.visible(attributes), do: f.name
  end

  # The output of the backward that is the gradient of an input, by the input's name.
  defp gradient_outputs(%{backward: nil}), do: %{}

  defp gradient_outputs(op) do
    for g <- Op.outputs(op.backward),
        name <- [String.replace_prefix(g.name, "d", ""), g.also_gradient_of],
        name,
        into: %{},
        do: {name, g.name}
  end

  # Gradients are matched by name: `dy` is that of the output `y`, `dx` that of the input `x`.
  defp gradients(op, arguments, outputs, cotangents, backend) do
    if Enum.any?(arguments.tensors, fn {_, tensor} -> float8?(backend.layout(tensor)) end),
      do: raise(ArgumentError, "#{op.public}: float8 inputs have no gradient")

    values = Map.merge(arguments.tensors, outputs)
    cotangents = Map.new(cotangents, fn {name, tensor} -> {"d" <> name, {name, tensor}} end)

    inputs =
      for f <- Op.inputs(op.backward),
          tensor = backward_input(f, cotangents, values, backend),
          into: %{},
          do: {f.name, tensor}

    settings = settings(op, arguments, backend)
    of = gradient_outputs(op)
    asked = for name <- differentiable(op, arguments), do: of[name]
    wanted = for f <- Op.wanted(op.backward, inputs, settings), f.name in asked, do: f.name
    gradients = run(op.backward, inputs, settings, wanted, backend)
    Enum.map(asked, &gradients[&1])
  end

  defp float8?({_shape, type}), do: type == {:f8_e4m3fn, 8}

  defp backward_input(field, cotangents, values, backend) do
    case cotangents[field.name] do
      nil ->
        values[field.prefer] || values[field.name]

      {name, nil} ->
        {shape, type} = backend.layout(values[name])
        unless field.optional, do: backend.zeros(shape, type)

      {_name, tensor} ->
        tensor
    end
  end

  # The backward's attributes are the forward's, or sizes of its symbols.
  defp settings(op, %{tensors: tensors, attributes: attributes}, backend) do
    shapes = Map.new(tensors, fn {name, tensor} -> {name, elem(backend.layout(tensor), 0)} end)

    for f <- Op.attributes(op.backward), into: %{} do
      own = Map.get(attributes, f.name)
      {f.name, if(own == nil, do: Shapes.symbol_size(op, f.name, shapes, attributes), else: own)}
    end
  end
end
