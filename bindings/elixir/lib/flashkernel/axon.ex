defmodule FlashKernel.Axon do
  @moduledoc """
  Layers for Axon, where a project has it: the library's ops with parameters of Axon's own.

      model =
        Axon.input("frames", shape: {nil, 60, 64})
        |> FlashKernel.Axon.rms_norm()
        |> FlashKernel.Axon.mamba(state: 16)
        |> FlashKernel.Axon.attention(heads: 4, causal: true)

      {sequence, {_cell, _hidden}} = FlashKernel.Axon.lstm(model, 128)

  Every layer takes `:name`, and runs wherever Axon's do: one custom call an op under EXLA, the NIF under
  another compiler. What a layer computes is in `FlashKernel.Layers`, whose options are those of the layers
  here. Parameters have the names and shapes that `FlashKernel.Layers.parameters/3` gives; weights are
  (out, in).
  """

  alias FlashKernel.Layers

  @compile {:no_warn_undefined, [Axon, Nx]}

  @typedoc "A layer of Axon."
  @type layer :: struct

  @doc "RMSNorm over the last axis; options of `FlashKernel.rms_norm`: `:eps`, `:weight_offset`."
  @spec rms_norm(layer, keyword) :: layer
  def rms_norm(input, options \\ []) do
    layer(:rms_norm, [input], [], options, fn [x], values, options ->
      FlashKernel.rms_norm(x, values.weight, options)
    end)
  end

  @doc "Layer norm over the last axis; options of `FlashKernel.layer_norm`: `:eps`."
  @spec layer_norm(layer, keyword) :: layer
  def layer_norm(input, options \\ []) do
    layer(:layer_norm, [input], [], options, fn [x], values, options ->
      FlashKernel.layer_norm(x, values.weight, values.bias, options)
    end)
  end

  @doc """
  A Mamba block on (B, L, M), without norm and residual. Options: `:state`, `:expand`, `:kernel`, `:dt_rank`.
  """
  @spec mamba(layer, keyword) :: layer
  def mamba(input, options \\ []) do
    layer(:mamba, [input], [:state, :expand, :kernel, :dt_rank], options, fn [x],
                                                                             values,
                                                                             options ->
      Layers.mamba(x, values, options)
    end)
  end

  @doc """
  The selective scan alone, with the parameters A, D and the bias of delta: u and delta (B, L, D), b and c
  (B, L, N). Options: `:state`, which is N, and those of `FlashKernel.selective_scan`.
  """
  @spec selective_scan(layer, layer, layer, layer, keyword) :: layer
  def selective_scan(u, delta, b, c, options \\ []) do
    layer(:selective_scan, [u, delta, b, c], [:state], options, fn [u, delta, b, c],
                                                                   values,
                                                                   options ->
      Layers.selective_scan(u, delta, b, c, values, options)
    end)
  end

  @doc """
  Multi-head self-attention on (B, L, M). Options: `:heads`, `:kv_heads`, `:head_size`, `:use_bias`,
  `:rotary_base`, and those of `FlashKernel.attention`.
  """
  @spec attention(layer, keyword) :: layer
  def attention(input, options) do
    layer(:attention, [input], [:use_bias], options, fn [x], values, options ->
      Layers.attention(x, values, options)
    end)
  end

  @doc """
  An LSTM over (B, L, I), from zero states. Returns what `Axon.lstm/3` does: {sequence, {cell, hidden}}.

  With `multiplied: true` the input is W x + b already, (B, L, 4 units), and the only parameter is `recurrent`
  (units, 4 units). Other options: `:use_bias`, and those of `FlashKernel.lstm`.
  """
  @spec lstm(layer, pos_integer, keyword) :: {layer, {layer, layer}}
  def lstm(input, units, options \\ []) do
    output = recurrent(:lstm, input, units, options)
    {part(output, 0), {part(output, 2), part(output, 1)}}
  end

  @doc "A GRU in the same way, with 3 units where the LSTM has 4. Returns {sequence, {hidden}}, as Axon's."
  @spec gru(layer, pos_integer, keyword) :: {layer, {layer}}
  def gru(input, units, options \\ []) do
    output = recurrent(:gru, input, units, options)
    {part(output, 0), {part(output, 1)}}
  end

  defp recurrent(op, input, units, options) do
    {multiplied, options} = Keyword.pop(options, :multiplied, false)

    if multiplied do
      parameters = fn _width, _options ->
        [{:recurrent, {units, Layers.gates(op) * units}, :glorot_uniform}]
      end

      layer(op, [input], [:use_bias], options, parameters, fn [wx], values, options ->
        if op == :lstm,
          do: Layers.lstm_of_products(wx, values.recurrent, options),
          else: Layers.gru_of_products(wx, values.recurrent, options)
      end)
    else
      options = [units: units] ++ options

      layer(op, [input], [:units, :use_bias], options, fn [x], values, options ->
        options = Keyword.merge(options, b_ih: values[:b_ih], b_hh: values[:b_hh])
        apply(FlashKernel, op, [x, values.w_ih, values.w_hh, options])
      end)
    end
  end

  defp part(output, index),
    do: Axon.layer(fn value, _ -> elem(value, index) end, [output], op_name: :elem)

  # `own` are the options that only the parameters' shapes depend on: the op does not take them.
  defp layer(kind, inputs, own, options, function) do
    layer(kind, inputs, own, options, &Layers.parameters(kind, &1, &2), function)
  end

  defp layer(kind, inputs, own, options, parameters, function) do
    unless Code.ensure_loaded?(Axon) do
      raise ArgumentError, "#{kind}: expected Axon among the project's dependencies"
    end

    {name, options} = Keyword.pop(options, :name)
    # Names and their order do not depend on the width.
    names = for {name, _, _} <- parameters.(1, options), do: name
    count = length(inputs)

    made =
      for name <- names do
        find = fn width -> width |> parameters.(options) |> List.keyfind!(name, 0) end
        {_, _, start} = find.(1)
        shape = fn first -> first |> last_size() |> find.() |> elem(1) end
        Axon.param(to_string(name), of_first(count, shape), initializer: initializer(start))
      end

    forward = Keyword.drop(options, own)

    operation = fn values ->
      {given, parameters} = Enum.split(values, count)
      function.(given, names |> Enum.zip(parameters) |> Map.new(), forward)
    end

    operation
    |> of_arity(count + length(names))
    |> Axon.layer(inputs ++ made, name: name, op_name: kind)
  end

  defp last_size(shape), do: elem(shape, tuple_size(shape) - 1)

  # Axon's names stand for themselves.
  defp initializer(start) when is_atom(start), do: start

  defp initializer(start) do
    fn shape, type ->
      {binary, shape, own} = start.(shape)
      binary |> Nx.from_binary(own) |> Nx.reshape(shape) |> Nx.as_type(type)
    end
  end

  # Axon asks functions for their arity: of shapes it is the number of inputs, of layers that of inputs and
  # parameters and one for options.
  for count <- 1..4 do
    [first | rest] = Macro.generate_arguments(count, __MODULE__)
    rest = Enum.map(rest, fn {name, meta, context} -> {:"_#{name}", meta, context} end)

    defp of_first(unquote(count), f),
      do: fn unquote_splicing([first | rest]) -> f.(unquote(first)) end
  end

  for count <- 1..16 do
    values = Macro.generate_arguments(count, __MODULE__)

    defp of_arity(f, unquote(count)),
      do: fn unquote_splicing(values), _ -> f.(unquote(values)) end
  end
end
