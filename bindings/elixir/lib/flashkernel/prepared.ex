defmodule FlashKernel.Prepared do
  @moduledoc false
  # Calls on tensors {binary, shape, type} whose kind was seen before. What a call gives the NIF follows from
  # the shapes and types of its tensors and from its other arguments; only the tensors' data differ from call
  # to call. So the slots are prepared once for each kind of call and kept, with the number of a tensor in
  # the place of its data.

  alias FlashKernel.{Arguments, Binaries, Native, Op, Plan}

  defstruct [:name, :slots, :outputs, :small]

  # So many kinds of calls are kept. Calls of others are prepared each time they are made.
  @most 4096

  @doc """
  Calls an op with what a caller gave it: the arguments by position, and options behind them. `split` tells
  the two apart. The answer is :unknown where the arguments are of another sort than those that are kept.
  """
  @spec call(String.t(), list, (Op.t(), list -> {list, keyword})) :: {:ok, term} | :unknown
  def call(name, given, split) do
    with {kind, data} <- read(given, [], []) do
      data = data |> :lists.reverse() |> List.to_tuple()

      case :persistent_term.get({__MODULE__, name, kind}, nil) do
        nil -> first(name, given, split, kind, data)
        prepared -> {:ok, run(prepared, data)}
      end
    end
  end

  # The kind of a call, as a list that is another for every other kind, and the data of its tensors, both
  # from the last to the first. A float stands there as its bits, since 0.0 and -0.0 are one key. What
  # holds others tells how many follow.
  defp read([], kind, data), do: {kind, data}

  defp read([{binary, shape, {_, _} = type} | rest], kind, data) when is_binary(binary) do
    read(rest, [{byte_size(binary), shape, type} | kind], [binary | data])
  end

  defp read([value | rest], kind, data) when is_atom(value) or is_integer(value) do
    read(rest, [value | kind], data)
  end

  defp read([value | rest], kind, data) when is_float(value) do
    read(rest, [<<value::float>> | kind], data)
  end

  defp read([value | rest], kind, data) when is_binary(value) do
    read(rest, [{:text, value} | kind], data)
  end

  defp read([value | rest], kind, data) when is_tuple(value) do
    read(Tuple.to_list(value) ++ rest, [{tuple_size(value)} | kind], data)
  end

  # The guard is false for an improper list.
  defp read([value | rest], kind, data) when length(value) >= 0 do
    read(value ++ rest, [[length(value)] | kind], data)
  end

  defp read(_other, _kind, _data), do: :unknown

  defp first(name, given, split, kind, data) do
    op = Op.get(name)
    {positional, options} = split.(op, given)
    arguments = Binaries.read(op, Arguments.read(op, positional, options))

    with {:ok, places} <- places(op, given, split) do
      layouts = Map.new(arguments.tensors, fn {name, t} -> {name, Binaries.layout(t)} end)
      plan = Plan.of_call(op, arguments, layouts)

      prepared = %__MODULE__{
        name: name,
        slots: Plan.slots(plan, places),
        outputs: for({_, shape, type} <- plan.outputs, do: {shape, type}),
        small: Plan.small?(plan)
      }

      result = run(prepared, data)
      keep({__MODULE__, name, kind}, prepared)
      {:ok, result}
    end
  end

  # The numbers of the tensors, by the names of the inputs they are.
  defp places(op, given, split) do
    {numbered, _count} = number(given, 0)
    {positional, options} = split.(op, numbered)
    tensors = Arguments.read(op, positional, options).tensors

    # One that is put together from a list of tensors is made anew by each call.
    if Enum.any?(tensors, fn {_, value} -> is_list(value) end),
      do: :unknown,
      else: {:ok, Map.new(tensors, fn {name, {place, _, _}} -> {name, place} end)}
  end

  # The same terms, with their numbers in the place of tensors' data.
  defp number({binary, shape, {_, _} = type}, count) when is_binary(binary) do
    {{count, shape, type}, count + 1}
  end

  defp number(value, count) when is_tuple(value) do
    {list, count} = number(Tuple.to_list(value), count)
    {List.to_tuple(list), count}
  end

  defp number(value, count) when is_list(value), do: Enum.map_reduce(value, count, &number/2)
  defp number(value, count), do: {value, count}

  defp run(%__MODULE__{name: name, small: small} = prepared, data) do
    slots = fill(prepared.slots, data)
    result = if small, do: Native.call_inline(name, slots), else: Native.call(name, slots)

    case {result, prepared.outputs} do
      {{:ok, [binary]}, [{shape, type}]} -> {binary, shape, type}
      {{:ok, binaries}, outputs} -> together(binaries, outputs)
      {{:error, message}, _outputs} -> raise ArgumentError, message
    end
  end

  defp fill([{:in, place, type, shape} | rest], data) do
    [{:in, elem(data, place), type, shape} | fill(rest, data)]
  end

  defp fill([slot | rest], data), do: [slot | fill(rest, data)]
  defp fill([], _data), do: []

  defp together(binaries, outputs) do
    binaries
    |> Enum.zip_with(outputs, fn binary, {shape, type} -> {binary, shape, type} end)
    |> List.to_tuple()
  end

  # A kept term is not copied when it is read. It would be costly to take one away again: none is.
  defp keep(key, prepared) do
    kept = counter()

    if :counters.get(kept, 1) < @most do
      :counters.add(kept, 1, 1)
      :persistent_term.put(key, prepared)
    end
  end

  defp counter do
    with nil <- :persistent_term.get({__MODULE__, :count}, nil) do
      counter = :counters.new(1, [])
      :persistent_term.put({__MODULE__, :count}, counter)
      counter
    end
  end

  @doc "How many kinds of calls are kept, and how many would be."
  @spec kept() :: {non_neg_integer, pos_integer}
  def kept, do: {:counters.get(counter(), 1), @most}
end
