# As much of Axon as FlashKernel uses: a graph of layers with parameters, and a walk through it.
defmodule Axon do
  defstruct [:function, :inputs, :options]

  def input(name), do: %Axon{function: :input, inputs: [], options: [name: name]}

  def layer(function, inputs, options) when is_function(function) and is_list(inputs) do
    true = is_function(function, length(inputs) + 1)
    %Axon{function: function, inputs: inputs, options: options}
  end

  def param(name, shape, initializer: initializer) when is_binary(name) and is_function(shape) do
    {:param, name, shape, initializer}
  end

  # The layer's value for those of the inputs. `make` gives a parameter's value for its name and shape,
  # where its initializer does not.
  def run(%Axon{function: :input, options: [name: name]}, inputs, _make), do: inputs[name]

  def run(%Axon{} = layer, inputs, make) do
    {layers, parameters} = Enum.split_with(layer.inputs, &is_struct(&1, Axon))
    values = Enum.map(layers, &run(&1, inputs, make))

    made =
      for {:param, name, shape, initializer} <- parameters do
        true = is_function(shape, length(layers))
        size = apply(shape, Enum.map(values, & &1.shape))

        if is_function(initializer),
          do: initializer.(size, {:f, 32}),
          else: make.(name, size, initializer)
      end

    apply(layer.function, values ++ made ++ [[mode: :inference]])
  end
end
