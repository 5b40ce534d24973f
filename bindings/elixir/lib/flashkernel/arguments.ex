defmodule FlashKernel.Arguments do
  @moduledoc false
  # What a caller gives, as the library takes it: tensors by name, and attributes by name as integers,
  # floats or :infinity. What does not fit raises an ArgumentError that names the op and the argument.

  alias FlashKernel.Op

  defstruct tensors: %{}, attributes: %{}
  @type t :: %__MODULE__{tensors: map, attributes: map}

  @doc "Reads the arguments of a call. `options` may hold any that were not given by position."
  @spec read(Op.t(), list, keyword) :: t
  def read(op, positional, options) do
    fields = Op.positional(op)
    groups = Op.groups(op)

    given =
      fields
      |> Enum.zip(positional)
      |> Map.new(fn {field, value} -> {field.name, value} end)
      |> put_options(op, groups, options)

    Enum.reduce(Op.arguments(op), %__MODULE__{}, fn field, arguments ->
      absent = if field.kind == :input, do: nil, else: :absent
      put(op, field, Map.get(given, field.name, absent), arguments)
    end)
  end

  defp put_options(given, op, groups, options) do
    unless Keyword.keyword?(options) do
      raise ArgumentError,
            "#{op.public}: expected options as a keyword list, got #{show(options)}"
    end

    by_key = Map.new(Op.arguments(op), &{&1.key, &1})

    group_keys =
      Map.new(groups, fn {name, members} -> {String.to_atom(name), {name, members}} end)

    Enum.reduce(options, given, fn {key, value}, given ->
      cond do
        field = by_key[key] -> put_once(op, given, field.name, value)
        group = group_keys[key] -> unpack(op, group, value, given)
        true -> unknown(op, key, Map.keys(group_keys))
      end
    end)
  end

  defp put_once(op, given, name, value) do
    if Map.get(given, name) != nil do
      raise ArgumentError, "#{op.public}: #{name}: expected once, got it by position and by name"
    end

    Map.put(given, name, value)
  end

  defp unpack(op, {name, members}, nil, given) do
    if Enum.all?(members, &(&1.kind == :input)),
      do: given,
      else: not_a_tuple(op, name, members, nil)
  end

  defp unpack(op, {_name, members}, value, given)
       when is_tuple(value) and tuple_size(value) == length(members) do
    members
    |> Enum.zip(Tuple.to_list(value))
    |> Enum.reduce(given, fn {field, part}, given -> put_once(op, given, field.name, part) end)
  end

  defp unpack(op, {name, members}, value, _given), do: not_a_tuple(op, name, members, value)

  defp not_a_tuple(op, name, members, value) do
    parts = Enum.map_join(members, ", ", &String.replace_prefix(&1.name, name <> "_", ""))
    raise ArgumentError, "#{op.public}: #{name}: expected a tuple {#{parts}}, got #{show(value)}"
  end

  defp unknown(op, key, groups) do
    grouped = for f <- Op.arguments(op), f.group, do: f.key
    known = Enum.map(Op.arguments(op), & &1.key) -- grouped
    known = Enum.map_join(known ++ groups, ", ", &to_string/1)
    raise ArgumentError, "#{op.public}: #{key}: expected one of the arguments #{known}"
  end

  defp put(op, %{kind: :input} = field, nil, arguments) do
    if Op.required?(field), do: raise(ArgumentError, "#{op.public}: #{field.name} is missing")
    arguments
  end

  defp put(op, %{kind: :input} = field, value, arguments) do
    if is_list(value) and List.improper?(value), do: wrong(op, field, "a tensor", value)
    %{arguments | tensors: Map.put(arguments.tensors, field.name, value)}
  end

  defp put(op, field, value, arguments) do
    value =
      if value in [:absent, nil], do: without(field, value), else: attribute(op, field, value)

    %{arguments | attributes: Map.put(arguments.attributes, field.name, value)}
  end

  # What stands for an attribute without a value: nil is a choice of its own where there is one.
  defp without(%{kind: :choice} = field, nil) do
    Enum.find_index(field.choices, &(&1 == "")) || field.default
  end

  defp without(field, _), do: default(field)

  defp default(%{kind: :number, default: value}) when is_integer(value), do: value * 1.0
  defp default(%{kind: :boolean, default: value}), do: if(value in [true, 1], do: 1, else: 0)
  # All axes: whoever calls flattens the tensor.
  defp default(%{kind: :axis, nullable: true}), do: nil
  defp default(%{default: value}), do: value

  @doc "An attribute's value, as the library takes it."
  @spec attribute(Op.t(), Op.Field.t(), term) :: integer | float | :infinity
  def attribute(op, field, value) do
    case {field.kind, value} do
      {:boolean, true} -> 1
      {:boolean, false} -> 0
      {:boolean, _} -> wrong(op, field, "true or false", value)
      {:choice, _} -> choice(op, field, value)
      {:number, :infinity} -> :infinity
      {:number, value} when is_float(value) -> value
      {:number, value} when is_integer(value) -> float(op, field, value)
      {:number, _} -> wrong(op, field, "a number", value)
      {_, value} when is_integer(value) -> integer(op, field, value)
      {_, _} -> wrong(op, field, "an integer", value)
    end
  end

  defp choice(op, field, value) do
    place =
      if is_atom(value) or is_binary(value) do
        Enum.find_index(field.choices, &(&1 == to_string(value)))
      end

    shown = Enum.map_join(field.choices, ", ", &if(&1 == "", do: "nil", else: inspect(&1)))
    place || wrong(op, field, "one of #{shown}", value)
  end

  defp float(op, field, value) do
    value * 1.0
  rescue
    ArithmeticError -> wrong(op, field, "a number that a float holds", value)
  end

  defp integer(op, field, value) do
    if value in -0x8000000000000000..0x7FFFFFFFFFFFFFFF do
      value
    else
      wrong(op, field, "an integer of 64 bits", value)
    end
  end

  @spec wrong(Op.t(), Op.Field.t(), String.t(), term) :: no_return
  defp wrong(op, field, expected, value) do
    raise ArgumentError, "#{op.public}: #{field.name}: expected #{expected}, got #{show(value)}"
  end

  @doc "A value as messages show it, in a line."
  @spec show(term) :: String.t()
  def show(value), do: inspect(value, limit: 5, printable_limit: 40)
end
