defmodule FlashKernel.Op do
  @moduledoc false
  # The library's declarations of its ops, as it writes them (src/core/declaration.h), and what follows
  # from them for a call from Elixir. Nothing here knows an op by name.

  alias FlashKernel.{JSON, Native, Shapes}

  defmodule Field do
    @moduledoc false
    # kind: :input, :output, :number, :integer, :boolean, :choice or :axis.
    # rule: how the dtype is told, "T", "P", "F", "I", "J" or "@name".
    defstruct [:name, :kind, :doc, :type, :rule, :key, :default, :form] ++
                [
                  :group,
                  :when,
                  :saved_unless,
                  :updates,
                  :prefer,
                  :also_gradient_of,
                  :factors_unless
                ] ++
                [shapes: [], choices: []] ++
                [keyword_only: false, optional: false, stacked: false, along_axis: false] ++
                [saved: false, nullable: false]

    @type t :: %__MODULE__{}
  end

  defstruct [:name, :public, :doc, :fields, :axis, :size_unless_given, :backward]
  @type t :: %__MODULE__{}

  @doc "Every op by name; read once."
  @spec all() :: %{String.t() => t}
  def all do
    case :persistent_term.get(__MODULE__, nil) do
      nil -> load()
      ops -> ops
    end
  end

  @doc "Reads the declarations."
  @spec load() :: %{String.t() => t}
  def load do
    ops = Map.new(JSON.decode!(Native.declarations()), &{&1["name"], op(&1)})
    ops = Map.new(ops, fn {name, op} -> {name, %{op | backward: backward(ops, name)}} end)
    :persistent_term.put(__MODULE__, ops)
    ops
  end

  @doc "The op of this name."
  @spec get(String.t()) :: t
  def get(name) do
    with :error <- Map.fetch(all(), name) do
      raise ArgumentError, "#{name}: there is no such op"
    else
      {:ok, op} -> op
    end
  end

  @doc "The ops that users call, in the order of their names: gradients are reached through them."
  @spec public() :: [t]
  def public do
    all() |> Map.values() |> Enum.reject(&backward?/1) |> Enum.sort_by(& &1.public)
  end

  @spec backward?(t) :: boolean
  def backward?(op), do: String.ends_with?(op.name, "_bwd")

  @spec inputs(t) :: [Field.t()]
  def inputs(op), do: Enum.filter(op.fields, &(&1.kind == :input))
  @spec outputs(t) :: [Field.t()]
  def outputs(op), do: Enum.filter(op.fields, &(&1.kind == :output))
  @spec attributes(t) :: [Field.t()]
  def attributes(op), do: Enum.reject(op.fields, &(&1.kind in [:input, :output]))
  @spec arguments(t) :: [Field.t()]
  def arguments(op), do: Enum.reject(op.fields, &(&1.kind == :output))

  @spec field(t, String.t()) :: Field.t() | nil
  def field(op, name), do: Enum.find(op.fields, &(&1.name == name))

  @doc "The arguments that Elixir takes by position, the required ones first."
  @spec positional(t) :: [Field.t()]
  def positional(op), do: Enum.reject(arguments(op), & &1.keyword_only)

  @spec required?(Field.t()) :: boolean
  def required?(field), do: field.kind == :input and not field.optional

  @doc "The names of arguments that are given together, as a tuple, with their members."
  @spec groups(t) :: %{String.t() => [Field.t()]}
  def groups(op), do: op |> arguments() |> Enum.filter(& &1.group) |> Enum.group_by(& &1.group)

  @doc "The outputs that a call has, by what it is given: tensors and attributes by name."
  @spec wanted(t, map, map) :: [Field.t()]
  def wanted(op, tensors, attributes) do
    Enum.filter(outputs(op), &holds?(&1.when, op, tensors, attributes))
  end

  @doc "Those of them that a caller sees."
  @spec visible([Field.t()], map) :: [Field.t()]
  def visible(outputs, attributes) do
    Enum.reject(outputs, &(&1.saved or (&1.saved_unless && attributes[&1.saved_unless] == 0)))
  end

  defp holds?(nil, _op, _tensors, _attributes), do: true

  defp holds?("!" <> name, op, tensors, attributes) do
    not holds?(name, op, tensors, attributes)
  end

  defp holds?(condition, op, tensors, attributes) do
    case String.split(condition, "=") do
      [name] when is_map_key(attributes, name) ->
        attributes[name] != 0

      [name] ->
        is_map_key(tensors, name)

      [name, value] ->
        differs = String.ends_with?(name, "!")
        field = field(op, String.trim_trailing(name, "!"))
        Enum.at(field.choices, attributes[field.name]) == value != differs
    end
  end

  # --- from JSON ---------------------------------------------------------------------------------

  defp op(entry) do
    fields = Enum.map(entry["fields"], &field_of/1)

    %__MODULE__{
      name: entry["name"],
      public: String.replace_suffix(entry["name"], "_fwd", ""),
      doc: entry["doc"],
      fields: fields,
      axis: Enum.find(fields, &(&1.kind == :axis)),
      size_unless_given: Map.get(entry, "size_unless_given", %{})
    }
  end

  defp backward(ops, name) do
    if String.ends_with?(name, "_fwd") do
      ops[String.replace_suffix(name, "_fwd", "_bwd")]
    end
  end

  @kinds ~w(input output number integer boolean choice axis)
  @texts ~w(type form group when saved_unless updates prefer also_gradient_of factors_unless)
  @flags ~w(keyword_only optional stacked along_axis saved nullable)

  defp field_of(%{"name" => name, "kind" => kind} = entry) when kind in @kinds do
    field = %Field{
      name: name,
      kind: String.to_atom(kind),
      doc: Map.get(entry, "doc", ""),
      rule: entry |> Map.get("type", "") |> String.split("[") |> hd(),
      key: String.to_atom(String.downcase(name)),
      default: entry["default"],
      shapes: Shapes.parse(Map.get(entry, "shapes", [])),
      choices: Map.get(entry, "choices", [])
    }

    field = Enum.reduce(@texts, field, &Map.put(&2, String.to_atom(&1), entry[&1]))
    Enum.reduce(@flags, field, &Map.put(&2, String.to_atom(&1), Map.get(entry, &1, false)))
  end
end
