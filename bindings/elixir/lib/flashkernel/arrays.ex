defmodule FlashKernel.Arrays do
  @moduledoc false
  # The few things besides the library's ops that layers do with tensors, on {binary, shape, type} and on
  # Nx tensors alike.

  alias FlashKernel.Tensor

  @compile {:no_warn_undefined, Nx}

  def shape({binary, shape, _type}) when is_binary(binary), do: shape
  def shape(tensor), do: tensor.shape

  def reshape({binary, _shape, type}, shape) when is_binary(binary), do: {binary, shape, type}

  def reshape(tensor, shape),
    do: Nx.reshape(tensor, shape, names: List.duplicate(nil, tuple_size(shape)))

  @doc "A matrix with its rows as columns."
  def transpose({binary, {rows, columns}, {_, bits} = type}) when is_binary(binary) do
    size = div(bits, 8)

    data =
      for j <- 0..(columns - 1)//1, i <- 0..(rows - 1)//1, into: <<>> do
        binary_part(binary, (i * columns + j) * size, size)
      end

    {data, {columns, rows}, type}
  end

  def transpose(tensor), do: Nx.transpose(tensor)

  @doc "A square matrix of ones on the diagonal, of the kind and the type of another tensor."
  def identity(size, {binary, _shape, type}) when is_binary(binary) do
    one = one(type)
    zeros = :binary.copy(<<0>>, size * byte_size(one))
    data = for _ <- 2..size//1, into: <<>>, do: <<one::binary, zeros::binary>>
    {<<data::binary, one::binary>>, {size, size}, type}
  end

  def identity(size, tensor), do: Nx.eye(size, type: tensor.type)

  defp one({:bf, 16}), do: <<0x3F80::16-native>>
  defp one({:f, bits}), do: <<1.0::float-size(bits)-native>>

  @doc "-exp(x), in float32."
  def minus_exp({binary, shape, _type} = tensor) when is_binary(binary) do
    data =
      for x <- Tensor.to_flat_list(tensor), into: <<>>, do: <<-:math.exp(x)::float-32-native>>

    {data, shape, {:f, 32}}
  end

  def minus_exp(tensor), do: tensor |> Nx.as_type({:f, 32}) |> Nx.exp() |> Nx.negate()
end
