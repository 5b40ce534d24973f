defmodule FlashKernel.Binaries do
  @moduledoc false
  # Tensors {binary, shape, type}, by the NIF.

  alias FlashKernel.{Arguments, Op, Plan, Tensor}

  @doc "Checks the tensors of a call, each by itself; those that come in parts become one."
  @spec read(Op.t(), Arguments.t()) :: Arguments.t()
  def read(op, arguments) do
    tensors =
      for f <- Op.inputs(op), value = arguments.tensors[f.name], into: %{} do
        {f.name, Tensor.read(op, f, value)}
      end

    flatten(op, %{arguments | tensors: tensors})
  end

  # No axis stands for all of them.
  defp flatten(%{axis: nil}, arguments), do: arguments

  defp flatten(op, %{attributes: attributes} = arguments) do
    if attributes[op.axis.name] == nil do
      %{name: name} = Enum.find(Op.inputs(op), & &1.along_axis)

      %{
        arguments
        | tensors: Map.update!(arguments.tensors, name, &Tensor.flatten/1),
          attributes: Map.put(attributes, op.axis.name, 0)
      }
    else
      arguments
    end
  end

  def layout({_binary, shape, type}), do: {shape, type}

  def run(plan, tensors) do
    outputs = Plan.run!(plan, Map.new(tensors, fn {name, {binary, _, _}} -> {name, binary} end))

    Map.new(plan.outputs, fn {name, shape, type} -> {name, {outputs[name], shape, type}} end)
  end

  def zeros(shape, {_, bits} = type) do
    {:binary.copy(<<0>>, Tuple.product(shape) * div(bits, 8)), shape, type}
  end
end
