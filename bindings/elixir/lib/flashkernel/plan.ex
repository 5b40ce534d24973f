defmodule FlashKernel.Plan do
  @moduledoc false
  # One call of one op before it runs: which inputs and outputs it has, with their shapes and types, and
  # its attributes. The NIF, Nx and EXLA's custom call all start from it; it holds no data.

  alias FlashKernel.{Arguments, Native, Op, Shapes, Tensor}

  defstruct [:op, :inputs, :outputs, :attributes]

  @typedoc "`inputs` and `outputs` in slot order: {name, shape, type} of those that are present."
  @type t :: %__MODULE__{
          op: Op.t(),
          inputs: [{String.t(), tuple, Tensor.type()}],
          outputs: [{String.t(), tuple, Tensor.type()}],
          attributes: map
        }

  @doc """
  Plans a call. `layouts` has {shape, type} of every input that is given, by name; `names`, of the
  outputs that are wanted. What does not fit raises the library's own message.
  """
  @spec make(Op.t(), map, map, [String.t()]) :: t
  def make(op, layouts, attributes, names) do
    shapes = Map.new(layouts, fn {name, {shape, _}} -> {name, shape} end)
    types = Map.new(layouts, fn {name, {_, type}} -> {name, type} end)
    inputs = for f <- Op.inputs(op), {shape, type} <- [layouts[f.name]], do: {f.name, shape, type}
    plan = %__MODULE__{op: op, inputs: inputs, outputs: [], attributes: attributes}

    outputs =
      for f <- Op.outputs(op), f.name in names do
        shape = shape_of(plan, f, shapes, attributes)
        {f.name, shape, Tensor.output_type(op, f, types)}
      end

    %{plan | outputs: outputs}
  end

  # Where no size follows, or a negative one, something is wrong with the inputs, and the library
  # knows what.
  defp shape_of(plan, output, shapes, attributes) do
    shape = output_shape(plan.op, output, shapes, attributes)

    if shape && Enum.all?(Tuple.to_list(shape), &(&1 >= 0)) do
      shape
    else
      check!(plan)
      raise ArgumentError, "#{plan.op.public}: expected inputs that give outputs a size"
    end
  end

  defp output_shape(op, output, shapes, attributes) do
    Shapes.output(op, output, shapes, attributes)
  rescue
    # An input of a rank that no alternative has.
    _ in [ArithmeticError, FunctionClauseError, BadMapError] -> nil
  end

  @doc "The slots of the call for the NIF. `data` has the inputs' binaries by name."
  @spec slots(t, map) :: list
  def slots(plan, data) do
    inputs = Map.new(plan.inputs, fn {name, shape, type} -> {name, {shape, type}} end)
    outputs = Map.new(plan.outputs, fn {name, shape, type} -> {name, {shape, type}} end)

    Enum.map(plan.op.fields, fn field ->
      case field.kind do
        :input ->
          with {shape, type} <- inputs[field.name] do
            {:in, data[field.name], Tensor.dlpack(type), shape}
          end

        :output ->
          with {shape, type} <- outputs[field.name] do
            {:out, Tensor.dlpack(type), shape}
          end

        _ ->
          Map.fetch!(plan.attributes, field.name)
      end
    end)
  end

  @doc "Raises what the library says of a call with these shapes and types, if it would refuse it."
  @spec check!(t) :: t
  def check!(plan) do
    case Native.check(plan.op.name, slots(plan, %{})) do
      :ok -> plan
      {:error, message} -> raise ArgumentError, message
    end
  end

  @doc "Runs the call on binaries, by name; returns the outputs' by name."
  @spec run!(t, map) :: %{String.t() => binary}
  def run!(plan, data) do
    slots = slots(plan, data)

    result =
      if small?(plan),
        do: Native.call_inline(plan.op.name, slots),
        else: Native.call(plan.op.name, slots)

    case result do
      {:ok, binaries} ->
        plan.outputs
        |> Enum.zip(binaries)
        |> Map.new(fn {{name, _, _}, binary} -> {name, binary} end)

      {:error, message} ->
        raise ArgumentError, message
    end
  end

  # Calls of so few elements take microseconds, as going to another scheduler would.
  @few_elements 4096

  @doc "Whether a call is so small that the caller's own scheduler may run it."
  @spec small?(t) :: boolean
  def small?(plan) do
    (plan.inputs ++ plan.outputs)
    |> Enum.map(fn {_, shape, _} -> Tuple.product(shape) end)
    |> Enum.sum() <= @few_elements
  end

  @doc "The plan of a call that a user makes, with the arguments as they were read."
  @spec of_call(Op.t(), Arguments.t(), map) :: t
  def of_call(op, arguments, layouts) do
    wanted = Op.wanted(op, arguments.tensors, arguments.attributes)
    names = for f <- Op.visible(wanted, arguments.attributes), do: f.name
    make(op, layouts, arguments.attributes, names)
  end
end
