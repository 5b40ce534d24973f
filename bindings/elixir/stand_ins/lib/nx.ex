# As much of Nx as FlashKernel uses, for tests where Nx cannot be had: tensors as structs, and a tracer
# that records functions instead of values. Its names and what they take are Nx's (0.13); how it works is
# not.
defmodule Nx.Tensor do
  defstruct [:data, :type, :shape, :names, vectorized_axes: []]
end

defmodule Nx.BinaryBackend do
  defstruct [:state]
end

defmodule Nx.Defn.Expr do
  # `compute` makes the value from those of the arguments, which Nx.Defn.evaluate is given. `block` and
  # `gradient` are what a compiler and `grad` would find here; a new shape keeps the block.
  defstruct [:compute, :block, :gradient]
end

defmodule Nx do
  alias Nx.{BinaryBackend, Defn.Expr, Tensor}

  def from_binary(binary, type, _options \\ []) when is_binary(binary) do
    eager(binary, {div(bit_size(binary), bits(type))}, type)
  end

  def to_binary(%Tensor{data: %BinaryBackend{state: binary}}), do: binary

  def tensor(number, options \\ []) when is_number(number) do
    type = Keyword.get(options, :type, if(is_float(number), do: {:f, 32}, else: {:s, 32}))
    eager(encode(number, type), {}, type)
  end

  def template(shape, type, _options \\ []) do
    %Tensor{type: type, shape: shape, names: nameless(shape), data: :template}
  end

  def size(%Tensor{shape: shape}), do: Tuple.product(shape)
  def devectorize(%Tensor{vectorized_axes: []} = tensor), do: tensor

  def reshape(tensor, shape, _options \\ []) do
    true = Tuple.product(shape) == size(tensor)
    shaped = apply_to([tensor], shape, tensor.type, fn [binary] -> binary end)

    case tensor.data do
      %Expr{block: block} -> %{shaped | data: %{shaped.data | block: block}}
      _ -> shaped
    end
  end

  def stack([%Tensor{shape: shape, type: type} | _] = tensors) do
    shape = List.to_tuple([length(tensors) | Tuple.to_list(shape)])
    apply_to(tensors, shape, type, &Enum.join/1)
  end

  # Of a number to any shape, or to the shape that it has.
  def broadcast(tensor, %Tensor{shape: shape}), do: broadcast(tensor, shape)
  def broadcast(%Tensor{shape: shape} = tensor, shape), do: tensor

  def broadcast(%Tensor{shape: {}} = tensor, shape) do
    apply_to([tensor], shape, tensor.type, fn [one] ->
      :binary.copy(one, Tuple.product(shape))
    end)
  end

  def as_type(%Tensor{type: type} = tensor, type), do: tensor

  def exp(%Tensor{type: {:f, 32}} = tensor), do: each(tensor, &:math.exp/1)
  def negate(%Tensor{type: {:f, 32}} = tensor), do: each(tensor, &(-&1))

  def transpose(%Tensor{shape: {rows, columns}, type: type} = tensor) do
    size = div(bits(type), 8)

    apply_to([tensor], {columns, rows}, type, fn [binary] ->
      for j <- 1..columns, i <- 1..rows, into: <<>> do
        binary_part(binary, ((i - 1) * columns + j - 1) * size, size)
      end
    end)
  end

  def eye(size, type: type) do
    data =
      for i <- 1..size, j <- 1..size, into: <<>>, do: encode(if(i == j, do: 1, else: 0), type)

    eager(data, {size, size}, type)
  end

  def runtime_call(_output, operands, options, function), do: function.(operands, options)

  # Every result computes the whole block: this is about what is called, not how often.
  def block(struct, operands, output, function) do
    ^operands = Enum.filter(operands, &is_struct(&1, Tensor))
    true = is_function(function, length(operands) + 1)

    results = fn binaries ->
      tensors = Enum.zip_with(operands, binaries, &eager(&2, &1.shape, &1.type))
      result = apply(function, [struct | tensors])
      if is_tuple(result), do: Tuple.to_list(result), else: [result]
    end

    made =
      for {template, i} <- Enum.with_index(List.wrap(untuple(output))) do
        traced =
          apply_to(operands, template.shape, template.type, &part(results.(&1), i, template))

        %{traced | data: %{traced.data | block: {struct, operands, output}}}
      end

    if is_tuple(output), do: List.to_tuple(made), else: hd(made)
  end

  defp part(results, i, template) do
    %Tensor{data: %BinaryBackend{state: binary}, shape: shape, type: type} = Enum.at(results, i)
    true = {shape, type} == {template.shape, template.type}
    binary
  end

  defp untuple(output), do: if(is_tuple(output), do: Tuple.to_list(output), else: output)

  defp eager(binary, shape, type) do
    true = byte_size(binary) == div(Tuple.product(shape) * bits(type), 8)
    data = %BinaryBackend{state: binary}
    %Tensor{data: data, shape: shape, type: type, names: nameless(shape)}
  end

  # A value where all arguments have one; else the way to it.
  defp apply_to(tensors, shape, type, function) do
    if Enum.any?(tensors, &is_struct(&1.data, Expr)) do
      compute = fn given -> tensors |> Enum.map(&binary(&1, given)) |> function.() end
      %Tensor{data: %Expr{compute: compute}, shape: shape, type: type, names: nameless(shape)}
    else
      tensors |> Enum.map(&to_binary/1) |> function.() |> eager(shape, type)
    end
  end

  defp binary(%Tensor{data: %Expr{compute: compute}}, given), do: compute.(given)
  defp binary(tensor, _given), do: to_binary(tensor)

  defp each(tensor, function) do
    apply_to([tensor], tensor.shape, tensor.type, fn [binary] ->
      for <<x::float-32-native <- binary>>, into: <<>>, do: <<function.(x)::float-32-native>>
    end)
  end

  defp encode(number, {:f, bits}), do: <<number * 1.0::float-size(bits)-native>>
  defp encode(number, {:s, bits}), do: <<number::size(bits)-native>>
  # Ones and zeros only: their upper halves are exact.
  defp encode(number, {:bf, 16}), do: <<if(number == 1, do: 0x3F80, else: 0)::16-native>>
  defp bits({_, bits}), do: bits
  defp nameless(shape), do: List.duplicate(nil, tuple_size(shape))
end

defmodule Nx.Defn do
  alias Nx.{Defn.Expr, Tensor}

  # In Nx it also makes the function callable inside `defn`; it is one outside in both.
  defmacro deftransform(head, do: body), do: quote(do: def(unquote(head), do: unquote(body)))

  # An argument of a traced function, with the value that it will have.
  def argument(%Tensor{} = value) do
    key = make_ref()
    {%{value | data: %Expr{compute: &Map.fetch!(&1, key)}}, {key, Nx.to_binary(value)}}
  end

  # The value of what was traced, where the arguments have theirs.
  def evaluate(%Tensor{data: %Expr{compute: compute}} = traced, given) do
    compute.(Map.new(given)) |> Nx.from_binary(traced.type) |> Nx.reshape(traced.shape)
  end

  def evaluate(tensor, _given), do: tensor
end

defmodule Nx.Defn.Kernel do
  def custom_grad(result, inputs, function) when is_list(inputs) and is_function(function, 1) do
    note = fn tensor -> %{tensor | data: %{tensor.data | gradient: {inputs, function}}} end

    if is_tuple(result),
      do: result |> Tuple.to_list() |> Enum.map(note) |> List.to_tuple(),
      else: note.(result)
  end
end
