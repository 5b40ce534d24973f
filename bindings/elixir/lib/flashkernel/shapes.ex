defmodule FlashKernel.Shapes do
  @moduledoc false
  # The shapes of a call's outputs, from those of its inputs and the declared ones. The library has
  # parsed what is declared (src/core/dim.h); this reads what it parsed.

  defmodule Dim do
    @moduledoc false
    # symbol: nil where the size is a number, which is `offset` then; "..." for any leading dims.
    defstruct [:text, :symbol, :blocks_of, factor: 1, offset: 0, or_one: false]
  end

  alias FlashKernel.Op

  @doc "The alternatives of a declared shape, from the library's JSON."
  def parse(alternatives), do: Enum.map(alternatives, fn dims -> Enum.map(dims, &dim/1) end)

  defp dim(entry) do
    %Dim{
      text: entry["text"],
      symbol: entry["symbol"],
      blocks_of: entry["blocks_of"],
      factor: Map.get(entry, "factor", 1),
      offset: Map.get(entry, "offset", 0),
      or_one: Map.get(entry, "or_one", false)
    }
  end

  @doc """
  The shape of an output. `shapes` are those of the inputs that are given, `attributes` the values of
  the others, both by name. It is nil where no input tells a size that is needed.
  """
  @spec output(Op.t(), Op.Field.t(), map, map) :: tuple | nil
  def output(op, %{shapes: []} = output, shapes, _attributes) do
    "@" <> name = output.rule
    if Op.field(op, name), do: shapes[name]
  end

  def output(op, output, shapes, attributes) do
    index = alternative(op, output, shapes)
    dims = index && Enum.at(output.shapes, index)
    sizes = dims && Enum.map(dims, &sizes(op, &1, index, output.form, shapes, attributes))

    if sizes && Enum.all?(sizes) do
      list = List.flatten(sizes)
      list = if output.along_axis, do: move_back(list, attributes[op.axis.name]), else: list
      List.to_tuple(list)
    end
  end

  @doc "The size of a symbol in a call, or nil."
  @spec symbol_size(Op.t(), String.t(), map, map) :: integer | nil
  def symbol_size(op, symbol, shapes, attributes) do
    size(op, symbol, 0, nil, shapes, attributes)
  end

  # Which of its alternatives an output has: as the first required input of its form.
  defp alternative(_op, %{shapes: [_]}, _shapes), do: 0

  defp alternative(op, output, shapes) do
    decides =
      Enum.find(Op.inputs(op), fn f ->
        Op.required?(f) and length(f.shapes) > 1 and f.form == output.form
      end)

    rank = tuple_size(shapes[decides.name])
    Enum.find_index(decides.shapes, &(length(&1) == rank))
  end

  # A size, a list of those of the leading dims, or nil.
  defp sizes(_op, %Dim{symbol: nil} = dim, _index, _form, _shapes, _attributes), do: dim.offset

  defp sizes(op, dim, index, form, shapes, attributes) do
    size = size(op, dim.symbol, index, form, shapes, attributes)

    cond do
      size == nil or is_list(size) -> size
      dim.blocks_of -> block_count(size, attributes[dim.blocks_of])
      true -> dim.factor * size + dim.offset
    end
  end

  defp size(op, symbol, index, form, shapes, attributes) do
    cond do
      is_map_key(attributes, symbol) -> attributes[symbol]
      told = told(op, symbol, index, form, shapes, attributes) -> told
      other = op.size_unless_given[symbol] -> size(op, other, index, form, shapes, attributes)
      true -> nil
    end
  end

  # What the inputs tell: required ones are asked first, and among these such as have the very size.
  defp told(op, symbol, index, form, shapes, attributes) do
    found =
      for f <- Op.inputs(op),
          shape = shapes[f.name],
          length(f.shapes) == 1 or f.form == form,
          dims <- alternatives(f, index),
          place = Enum.find_index(dims, &tells?(&1, symbol)),
          do: {f.optional, Enum.at(dims, place).text != symbol, f, dims, place, shape}

    case Enum.sort_by(found, fn {optional, derived, _, _, _, _} -> {optional, derived} end) do
      [{_, _, f, dims, place, shape} | _] ->
        list = Tuple.to_list(shape)
        list = if f.along_axis, do: move_last(list, attributes[op.axis.name]), else: list
        dims = if is_map_key(shapes, f.factors_unless), do: without_factors(dims), else: dims
        size_at(symbol, dims, place, list)

      [] ->
        nil
    end
  end

  defp alternatives(%{shapes: [only]}, _index), do: [only]
  defp alternatives(%{shapes: many}, index), do: many |> Enum.at(index) |> List.wrap() |> wrap()
  defp wrap([]), do: []
  defp wrap(dims), do: [dims]

  defp tells?(dim, symbol), do: dim.symbol == symbol and not dim.or_one and dim.blocks_of == nil

  # What holds where the input is given that stands for the other part of this one.
  defp without_factors(dims), do: Enum.map(dims, &%{&1 | factor: 1})

  defp size_at("...", dims, 0, list), do: Enum.drop(list, -(length(dims) - 1))

  defp size_at(_symbol, dims, place, list) do
    dim = Enum.at(dims, place)
    # Counted from the end, since leading dims stand in front.
    size = Enum.at(list, place - length(dims))
    size && div(size - dim.offset, dim.factor)
  end

  # How many whole blocks there are: none of length 0, and by the square root of the size, rounded up,
  # where the length is negative.
  defp block_count(_size, 0), do: 0
  defp block_count(size, length) when length < 0, do: div(size, max(ceil_of_root(size), 1))
  defp block_count(size, length), do: div(size, length)

  defp ceil_of_root(size), do: size |> :math.sqrt() |> Float.ceil() |> trunc()

  defp move_last(list, axis) do
    {size, rest} = List.pop_at(list, axis)
    rest ++ List.wrap(size)
  end

  defp move_back(list, axis) do
    # An output may lack the axis that its input has (a sum over it).
    {size, rest} = List.pop_at(list, -1)
    place = if axis < 0, do: axis + length(list), else: axis
    List.insert_at(rest, place, size)
  end
end
