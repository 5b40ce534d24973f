defmodule FlashKernel.Functions do
  @moduledoc false
  # Writes FlashKernel's functions from the declarations: for each op one of every number of arguments
  # that can be given by position, and one more with options behind all of them. Where there is Nx they
  # are transforms, which may be called inside `defn`.

  alias FlashKernel.{Arguments, Binaries, Call, Op, Prepared}

  defmacro define_ops do
    for op <- Op.public() do
      fields = Op.positional(op)
      least = Enum.count(fields, &Op.required?/1)

      functions =
        for count <- least..(length(fields) + 1) do
          arguments = Enum.map(Enum.take(fields, count), &Macro.var(&1.key, __MODULE__))
          options = List.duplicate(Macro.var(:options, __MODULE__), count - length(arguments))
          define(String.to_atom(op.public), op.name, arguments ++ options)
        end

      quote do
        @doc unquote(doc(op))
        unquote_splicing(functions)
      end
    end
  end

  defp define(name, op, arguments) do
    types = Enum.map(arguments, fn _ -> quote(do: argument) end)
    head = quote(do: unquote(name)(unquote_splicing(arguments)))
    body = quote(do: FlashKernel.Functions.call(unquote(op), unquote(arguments)))

    definition =
      if Code.ensure_loaded?(Nx.Defn) do
        quote do
          require Nx.Defn
          Nx.Defn.deftransform(unquote(head), do: unquote(body))
        end
      else
        quote(do: def(unquote(head), do: unquote(body)))
      end

    quote do
      @spec unquote(name)(unquote_splicing(types)) :: tensor | tuple
      unquote(definition)
    end
  end

  @doc "Calls an op; the last of the arguments may be options, where not all of them are required."
  def call(name, given) do
    case Prepared.call(name, given, &split/2) do
      {:ok, result} -> result
      :unknown -> planned_call(Op.get(name), given)
    end
  end

  defp planned_call(op, given) do
    {positional, options} = split(op, given)
    arguments = Arguments.read(op, positional, options)

    if FlashKernel.Nx.tensors?(arguments) do
      FlashKernel.Nx.call(op, arguments)
    else
      op |> Call.forward(Binaries.read(op, arguments), Binaries) |> result()
    end
  end

  defp split(op, given) do
    fields = Op.positional(op)
    last = List.last(given)

    cond do
      length(given) > length(fields) ->
        {Enum.take(given, length(fields)), last}

      length(given) > Enum.count(fields, &Op.required?/1) and is_list(last) ->
        {Enum.drop(given, -1), last}

      true ->
        {given, []}
    end
  end

  @doc "What a call returns: its only output, or a tuple of them."
  def result([{_name, tensor}]), do: tensor
  def result(outputs), do: outputs |> Enum.map(&elem(&1, 1)) |> List.to_tuple()

  defp doc(op) do
    arguments =
      for f <- Op.arguments(op), into: "" do
        kind = if f.kind == :input, do: f.type, else: to_string(f.kind)
        choices = Enum.map_join(f.choices, ", ", &if(&1 == "", do: "nil", else: inspect(&1)))
        choices = if choices == "", do: "", else: " (#{choices})"
        where = if f.group, do: ", in the tuple `:#{f.group}`", else: ""
        optional = if f.optional, do: ", optional", else: ""
        "  * `#{f.key}` (`#{kind}`#{optional}#{where})#{choices}: #{f.doc}\n"
      end

    results =
      for f <- Op.outputs(op), not f.saved, into: "" do
        condition = f.when || f.saved_unless
        condition = if condition, do: ", where `#{condition}`", else: ""
        "  * `#{f.name}` (`#{f.type}`#{condition}): #{f.doc}\n"
      end

    "#{op.doc}\n\n## Arguments\n\n#{arguments}\n## Result\n\n#{results}"
  end
end
