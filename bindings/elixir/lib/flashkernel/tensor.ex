defmodule FlashKernel.Tensor do
  @moduledoc """
  A tensor without Nx: a tuple `{binary, shape, type}`, with the elements in row-major order and the
  machine's byte order, the shape as a tuple and the type as Nx writes it, such as `{:f, 32}`,
  `{:bf, 16}`, `{:f, 16}`, `{:s, 32}`.
  """

  alias FlashKernel.{Arguments, Op}

  @type type :: {atom, pos_integer}
  @type t :: {binary, tuple, type}

  # DLPack's code and bits, and the number by which XLA knows the type.
  @types %{
    {:f, 16} => {{2, 16}, 10},
    {:f, 32} => {{2, 32}, 11},
    {:f, 64} => {{2, 64}, 12},
    {:bf, 16} => {{4, 16}, 16},
    {:f8_e4m3fn, 8} => {{10, 8}, 20},
    {:s, 8} => {{0, 8}, 2},
    {:s, 32} => {{0, 32}, 4},
    {:s, 64} => {{0, 64}, 5},
    {:u, 8} => {{1, 8}, 6}
  }

  @doc false
  def dlpack(type), do: @types |> Map.fetch!(type) |> elem(0)

  @doc false
  def xla(type), do: @types |> Map.fetch!(type) |> elem(1)

  @doc false
  def known?(type), do: is_map_key(@types, type)

  @doc "Makes a tensor of type `{:f, 32}` from numbers, a list of them or lists of lists."
  @spec from_list(list | number) :: t
  def from_list(list) do
    numbers = List.wrap(list) |> List.flatten()
    {for(x <- numbers, into: <<>>, do: <<x::float-32-native>>), shape(list), {:f, 32}}
  end

  defp shape(list), do: list |> sizes() |> List.to_tuple()
  defp sizes([first | _] = list), do: [length(list) | sizes(first)]
  defp sizes([]), do: [0]
  defp sizes(_number), do: []

  @doc "The numbers of a tensor, in row-major order."
  @spec to_flat_list(t) :: [number]
  def to_flat_list({binary, _shape, {:f, bits}}) do
    for <<x::float-size(bits)-native <- binary>>, do: x
  end

  def to_flat_list({binary, _shape, {:s, bits}}) do
    for <<x::signed-size(bits)-native <- binary>>, do: x
  end

  def to_flat_list({binary, _shape, {:u, bits}}) do
    for <<x::unsigned-size(bits)-native <- binary>>, do: x
  end

  def to_flat_list({binary, _shape, {:bf, 16}}) do
    # The upper half of a float: infinities and NaN are no floats of Erlang.
    for <<bits::16-native <- binary>>, do: from_upper_half(bits)
  end

  defp from_upper_half(bits) do
    case <<bits::16, 0::16>> do
      <<x::float-32>> -> x
      <<0::1, 255::8, 0::23>> -> :infinity
      <<1::1, 255::8, 0::23>> -> :neg_infinity
      _ -> :nan
    end
  end

  @doc false
  # An argument that is a tensor of this form; a list of such where the op takes one.
  def read(op, field, parts) when is_list(parts) and field.stacked, do: stack(op, field, parts)

  def read(op, field, {binary, shape, {_, bits} = type} = value)
      when is_binary(binary) and is_tuple(shape) do
    unless known?(type), do: wrong(op, field, "a known type", type)
    unless sizes?(shape), do: wrong(op, field, "sizes of 0 or more", shape)
    bytes = Tuple.product(shape) * div(bits, 8)

    if byte_size(binary) != bytes do
      wrong(
        op,
        field,
        "a binary of #{bytes} bytes for shape #{inspect(shape)}",
        byte_size(binary)
      )
    end

    value
  end

  def read(op, field, value) do
    wrong(op, field, "a tensor {binary, shape, type}", value)
  end

  defp sizes?(shape), do: Enum.all?(Tuple.to_list(shape), &(is_integer(&1) and &1 >= 0))

  defp stack(op, field, []), do: wrong(op, field, "at least 1 part", [])

  defp stack(op, field, parts) do
    parts = Enum.map(parts, &read(op, %{field | stacked: false}, &1))
    [{_, shape, type} | _] = parts

    for {{_, other_shape, other_type}, i} <- Enum.with_index(parts) do
      if {other_shape, other_type} != {shape, type} do
        expected = "part #{i} to be of #{inspect({shape, type})}, as the first"
        wrong(op, field, expected, {other_shape, other_type})
      end
    end

    binary = Enum.map_join(parts, &elem(&1, 0))
    {binary, List.to_tuple([length(parts) | Tuple.to_list(shape)]), type}
  end

  @doc false
  @spec flatten(t) :: t
  def flatten({binary, shape, type}), do: {binary, {Tuple.product(shape)}, type}

  @doc false
  @spec empty?(tuple) :: boolean
  def empty?(shape), do: 0 in Tuple.to_list(shape)

  defp wrong(op, field, expected, got) do
    raise ArgumentError,
          "#{op.public}: #{field.name}: expected #{expected}, got #{Arguments.show(got)}"
  end

  @doc false
  # The type of an output, by the types of the inputs that are given.
  @spec output_type(Op.t(), Op.Field.t(), map) :: type
  def output_type(op, output, types) do
    case output.rule do
      "F" -> {:f, 32}
      "J" -> {:s, 32}
      "@" <> name -> types[name]
      "T" -> result_type(Enum.find_value(Op.inputs(op), &(&1.rule == "T" && types[&1.name])))
    end
  end

  defp result_type({:f8_e4m3fn, 8}), do: {:bf, 16}
  defp result_type(type), do: type
end
