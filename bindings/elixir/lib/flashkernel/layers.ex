defmodule FlashKernel.Layers do
  @moduledoc """
  Layers put together from the library's ops: a Mamba block, multi-head attention, an LSTM and a GRU whose
  products with the input were made before.

  They are functions of their input and their parameters, on tensors `{binary, shape, type}` or on those of
  Nx, inside `defn` too, where their gradients follow from the ops'. `FlashKernel.Axon` makes layers of Axon
  from them.

      iex> x = FlashKernel.Tensor.from_list([[[1.0, 2.0], [0.5, -1.0]]])
      iex> parameters = FlashKernel.Layers.parameters(:mamba, 2, state: 4, expand: 1)
      iex> Enum.map(parameters, fn {name, shape, _} -> {name, shape} end) |> List.first()
      {:in_proj, {2, 2}}
      iex> values = for {name, shape, _} <- parameters, into: %{} do
      ...>   count = Tuple.product(shape)
      ...>   {name, {:binary.copy(<<0.5::float-32-native>>, count), shape, {:f, 32}}}
      ...> end
      iex> {_, shape, _} = FlashKernel.Layers.mamba(x, values)
      iex> shape
      {1, 2, 2}
  """

  alias FlashKernel.{Arrays, Tensor}

  @typedoc """
  A parameter: its name, its shape, and how it begins. `:glorot_uniform`, `:zeros` and `:ones` are Axon's
  names; a function makes the tensor for the shape.
  """
  @type parameter :: {atom, tuple, atom | (tuple -> Tensor.t())}

  @doc """
  The parameters of a layer for an input whose last axis has this size. Weights are (out, in).

    * `:mamba` with `:state` (16), `:expand` (2), `:kernel` (4) and `:dt_rank` (a sixteenth of the width)
    * `:selective_scan`, of so many channels, with `:state` (16)
    * `:attention` with `:heads`, `:kv_heads` (as many), `:head_size` (the width over the heads) and
      `:use_bias` (false)
    * `:lstm` and `:gru` with `:units` and `:use_bias` (true)
    * `:rms_norm`, `:layer_norm`
  """
  @spec parameters(atom, pos_integer, keyword) :: [parameter]
  def parameters(layer, width, options \\ [])

  def parameters(:mamba, width, options) do
    inner = Keyword.get(options, :expand, 2) * width
    state = Keyword.get(options, :state, 16)
    rank = Keyword.get(options, :dt_rank, div(width + 15, 16))

    [
      {:in_proj, {inner, width}, :glorot_uniform},
      {:gate_proj, {inner, width}, :glorot_uniform},
      {:conv_weight, {inner, Keyword.get(options, :kernel, 4)}, :glorot_uniform},
      {:conv_bias, {inner}, :zeros},
      {:dt_down, {rank, inner}, :glorot_uniform},
      {:dt_up, {inner, rank}, :glorot_uniform},
      {:b_proj, {state, inner}, :glorot_uniform},
      {:c_proj, {state, inner}, :glorot_uniform}
    ] ++
      parameters(:selective_scan, inner, state: state) ++
      [{:out_proj, {width, inner}, :glorot_uniform}]
  end

  def parameters(:selective_scan, channels, options) do
    state = Keyword.get(options, :state, 16)

    [
      {:a_log, {channels, state}, &decays/1},
      {:d, {channels}, :ones},
      {:dt_bias, {channels}, &time_steps/1}
    ]
  end

  def parameters(:attention, width, options) do
    {heads, kv_heads, size} = heads(width, options)
    inner = heads * size

    weights = [
      {:query, {inner, width}, :glorot_uniform},
      {:key, {kv_heads * size, width}, :glorot_uniform},
      {:value, {kv_heads * size, width}, :glorot_uniform},
      {:output, {width, inner}, :glorot_uniform}
    ]

    if Keyword.get(options, :use_bias, false) do
      weights ++
        for {name, {rows, _}, _} <- weights, do: {:"#{name}_bias", {rows}, :zeros}
    else
      weights
    end
  end

  def parameters(layer, width, options) when layer in [:lstm, :gru] do
    units = Keyword.fetch!(options, :units)
    rows = gates(layer) * units

    weights = [
      {:w_ih, {rows, width}, :glorot_uniform},
      {:w_hh, {rows, units}, :glorot_uniform}
    ]

    if Keyword.get(options, :use_bias, true),
      do: weights ++ [{:b_ih, {rows}, :zeros}, {:b_hh, {rows}, :zeros}],
      else: weights
  end

  def parameters(:rms_norm, width, _options), do: [{:weight, {width}, :ones}]

  def parameters(:layer_norm, width, _options) do
    [{:weight, {width}, :ones}, {:bias, {width}, :zeros}]
  end

  @doc "How many gates a hidden unit of `:lstm` or `:gru` has."
  @spec gates(:lstm | :gru) :: pos_integer
  def gates(:lstm), do: 4
  def gates(:gru), do: 3

  # As Mamba begins: the decays of a channel's states are 1, 2, 3, ...
  defp decays({channels, state}) do
    Tensor.from_list(for _ <- 1..channels, do: for(n <- 1..state, do: :math.log(n)))
  end

  # Time steps from 0.001 to 0.1, spread evenly by their logarithms, as softplus gives them back.
  defp time_steps({channels}) do
    Tensor.from_list(
      for i <- 0..(channels - 1) do
        step = 0.001 * :math.pow(100.0, i / max(channels - 1, 1))
        step + :math.log(1 - :math.exp(-step))
      end
    )
  end

  @doc """
  A Mamba block on x (B, L, M): projections, convolution, scan and gate. `values` has the parameters by name.
  """
  @spec mamba(FlashKernel.tensor(), map, keyword) :: FlashKernel.tensor()
  def mamba(x, values, _options \\ []) do
    gate = FlashKernel.linear(x, values.gate_proj)

    u =
      x
      |> FlashKernel.linear(values.in_proj)
      |> FlashKernel.causal_conv1d(values.conv_weight, values.conv_bias, activation: :silu)

    delta = u |> FlashKernel.linear(values.dt_down) |> FlashKernel.linear(values.dt_up)
    b = FlashKernel.linear(u, values.b_proj)
    c = FlashKernel.linear(u, values.c_proj)

    u
    |> selective_scan(delta, b, c, values, z: gate)
    |> FlashKernel.linear(values.out_proj)
  end

  @doc """
  The selective scan with Mamba's parameters: A is -exp(a_log), and delta goes through softplus with dt_bias.
  `options` are those of `FlashKernel.selective_scan`.
  """
  @spec selective_scan(term, term, term, term, map, keyword) :: term
  def selective_scan(u, delta, b, c, values, options \\ []) do
    a = Arrays.minus_exp(values.a_log)
    options = [d: values.d, delta_bias: values.dt_bias, delta_softplus: true] ++ options
    FlashKernel.selective_scan(u, delta, a, b, c, options)
  end

  @doc """
  Multi-head self-attention on x (B, L, M). `:rotary_base` (10000.0, say) rotates queries and keys by their
  positions; the options of `FlashKernel.attention` go with it: `causal: true`, `window: {64, 0}`, ...
  """
  @spec attention(FlashKernel.tensor(), map, keyword) :: FlashKernel.tensor()
  def attention(x, values, options) do
    {batch, length, width} = Arrays.shape(x)
    {heads, kv_heads, size} = heads(width, options)
    {_own, options} = Keyword.split(options, [:heads, :kv_heads, :head_size, :use_bias])
    {base, options} = Keyword.pop(options, :rotary_base)
    options = if base, do: [rotary: rotation(length, size, base)] ++ options, else: options

    project = fn name, count ->
      x
      |> FlashKernel.linear(values[name], values[:"#{name}_bias"])
      |> Arrays.reshape({batch, length, count, size})
    end

    project.(:query, heads)
    |> FlashKernel.attention(project.(:key, kv_heads), project.(:value, kv_heads), options)
    |> Arrays.reshape({batch, length, heads * size})
    |> FlashKernel.linear(values.output, values[:output_bias])
  end

  defp heads(width, options) do
    heads = Keyword.fetch!(options, :heads)
    {heads, options[:kv_heads] || heads, options[:head_size] || div(width, heads)}
  end

  # The cosines and sines of every position, (L, size / 2) each.
  defp rotation(length, size, base) do
    angles =
      for t <- 0..(length - 1) do
        for i <- 0..(div(size, 2) - 1), do: t * :math.pow(base, -2 * i / size)
      end

    of = fn function -> Tensor.from_list(for row <- angles, do: Enum.map(row, function)) end
    {of.(&:math.cos/1), of.(&:math.sin/1)}
  end

  @doc """
  An LSTM whose products with the input were made before: `wx` (B, L, 4 H) is W x + b, gates in the order i, f,
  g, o, and `recurrent` is R (H, 4 H), so that a step adds h R. Returns {y, h, c}. Options: those of
  `FlashKernel.lstm`.

      iex> wx = FlashKernel.Tensor.from_list([[[0.1, 0.2, 0.3, 0.4]]])
      iex> r = FlashKernel.Tensor.from_list([[0.5, 0.5, 0.5, 0.5]])
      iex> {{_, shape, _}, _h, _c} = FlashKernel.Layers.lstm_of_products(wx, r)
      iex> shape
      {1, 1, 1}
  """
  @spec lstm_of_products(FlashKernel.tensor(), FlashKernel.tensor(), keyword) :: tuple
  def lstm_of_products(wx, recurrent, options \\ []) do
    FlashKernel.lstm(wx, passing(wx), Arrays.transpose(recurrent), options)
  end

  @doc """
  The same for a GRU: `wx` (B, L, 3 H) in the order r, z, n, and R (H, 3 H). The reset gate meets h R, as in
  torch and Axon, unless the option `reset_after: false` says otherwise. Returns {y, h}.
  """
  @spec gru_of_products(FlashKernel.tensor(), FlashKernel.tensor(), keyword) :: tuple
  def gru_of_products(wx, recurrent, options \\ []) do
    FlashKernel.gru(wx, passing(wx), Arrays.transpose(recurrent), options)
  end

  # Input weights that change nothing, not by a bit: each sum has one product that is not 0.
  defp passing(wx) do
    shape = Arrays.shape(wx)
    Arrays.identity(elem(shape, tuple_size(shape) - 1), wx)
  end
end
