defmodule FlashKernel.LayersTest do
  use ExUnit.Case, async: true
  alias FlashKernel.{Arrays, Layers, Tensor}

  defp normal(shape, seed, scale \\ 0.5) do
    state = :rand.seed_s(:exsss, seed)
    zeros = List.duplicate(0, Tuple.product(shape))

    {numbers, _} =
      Enum.map_reduce(zeros, state, fn _, s ->
        {x, s} = :rand.normal_s(s)
        {x * scale, s}
      end)

    {binary, _, type} = Tensor.from_list(numbers)
    {binary, shape, type}
  end

  defp close({_, shape, type} = got, {_, shape, type} = expected, tolerance \\ 1.0e-5) do
    for {x, y} <- Enum.zip(Tensor.to_flat_list(got), Tensor.to_flat_list(expected)),
        do: assert_in_delta(x, y, tolerance)
  end

  defp values(parameters) do
    for {{name, shape, start}, seed} <- Enum.with_index(parameters), into: %{} do
      {name, if(is_function(start), do: start.(shape), else: normal(shape, seed))}
    end
  end

  # Rows of a matrix, and what follows from them in Elixir's own floats.
  defp rows({_, shape, _} = tensor) do
    tensor |> Tensor.to_flat_list() |> Enum.chunk_every(elem(shape, tuple_size(shape) - 1))
  end

  defp times(rows, weight) do
    for row <- rows, do: for(w <- weight, do: Enum.zip_with(row, w, &(&1 * &2)) |> Enum.sum())
  end

  defp silu(x), do: x / (1 + :math.exp(-x))
  defp softplus(x), do: :math.log(1 + :math.exp(x))

  test "a Mamba block is its formula, step by step" do
    {length, width, inner, kernel} = {5, 4, 8, 3}
    x = normal({1, length, width}, 50)
    v = values(Layers.parameters(:mamba, width, state: 3, kernel: kernel))
    v = %{v | conv_bias: normal({inner}, 51), d: normal({inner}, 52)}
    m = Map.new(v, fn {name, tensor} -> {name, rows(tensor)} end)

    gate = times(rows(x), m.gate_proj)
    inputs = times(rows(x), m.in_proj)

    u =
      for t <- 0..(length - 1) do
        for i <- 0..(inner - 1) do
          taps =
            for k <- 0..(kernel - 1), t - kernel + 1 + k >= 0 do
              m.conv_weight
              |> Enum.at(i)
              |> Enum.at(k)
              |> Kernel.*(at(inputs, t - kernel + 1 + k, i))
            end

          silu(Enum.sum(taps) + at(m.conv_bias, 0, i))
        end
      end

    delta = u |> times(m.dt_down) |> times(m.dt_up)
    {b, c} = {times(u, m.b_proj), times(u, m.c_proj)}

    {y, _} =
      Enum.map_reduce(0..(length - 1), %{}, fn t, states ->
        Enum.map_reduce(0..(inner - 1), states, fn i, states ->
          dt = softplus(at(delta, t, i) + at(m.dt_bias, 0, i))

          state =
            for n <- 0..2 do
              decay = :math.exp(-dt * :math.exp(at(m.a_log, i, n)))
              decay * Enum.at(states[i] || [0, 0, 0], n) + dt * at(b, t, n) * at(u, t, i)
            end

          y = Enum.zip_with(state, Enum.at(c, t), &(&1 * &2)) |> Enum.sum()
          y = (y + at(m.d, 0, i) * at(u, t, i)) * silu(at(gate, t, i))
          {y, Map.put(states, i, state)}
        end)
      end)

    expected = Tensor.from_list([times(y, m.out_proj)])
    close(Layers.mamba(x, v), expected)
  end

  defp at(rows, i, j), do: rows |> Enum.at(i) |> Enum.at(j)

  test "how a Mamba block begins" do
    v = values(Layers.parameters(:mamba, 16, state: 4))

    assert hd(rows(Arrays.minus_exp(v.a_log))) |> Enum.map(&Float.round(&1, 4)) == [
             -1,
             -2,
             -3,
             -4
           ]

    steps = v.dt_bias |> Tensor.to_flat_list() |> Enum.map(&softplus/1)
    assert_in_delta hd(steps), 0.001, 1.0e-6
    assert_in_delta List.last(steps), 0.1, 1.0e-5
  end

  test "attention rotates, shares heads and hides what comes later" do
    options = [heads: 4, kv_heads: 2, head_size: 4, use_bias: true]
    x = normal({2, 5, 8}, 1)
    v = values(Layers.parameters(:attention, 8, options))
    options = [causal: true, rotary_base: 100.0] ++ options
    {_, {2, 5, 8}, _} = y = Layers.attention(x, v, options)

    of = fn name, count ->
      Arrays.reshape(FlashKernel.linear(x, v[name], v[:"#{name}_bias"]), {2, 5, count, 4})
    end

    cos = Tensor.from_list(for t <- 0..4, do: [:math.cos(t), :math.cos(t / 10)])
    sin = Tensor.from_list(for t <- 0..4, do: [:math.sin(t), :math.sin(t / 10)])
    q = FlashKernel.rope(of.(:query, 4), cos, sin)
    k = FlashKernel.rope(of.(:key, 2), cos, sin)
    out = FlashKernel.attention(q, k, of.(:value, 2), causal: true)
    close(y, FlashKernel.linear(Arrays.reshape(out, {2, 5, 16}), v.output, v.output_bias))
  end

  test "recurrent nets of products made before" do
    x = normal({2, 4, 3}, 1)

    for {op, of_products, gates} <- [
          {:lstm, &Layers.lstm_of_products/3, 4},
          {:gru, &Layers.gru_of_products/3, 3}
        ] do
      w = normal({gates * 5, 3}, 2)
      b = normal({gates * 5}, 3)
      w_hh = normal({gates * 5, 5}, 4)
      h0 = normal({2, 5}, 5)
      expected = apply(FlashKernel, op, [x, w, w_hh, [b_ih: b, h0: h0, reverse: true]])
      wx = FlashKernel.linear(x, w, b)
      got = of_products.(wx, Arrays.transpose(w_hh), h0: h0, reverse: true)
      for {g, e} <- Enum.zip(Tuple.to_list(got), Tuple.to_list(expected)), do: close(g, e)
    end
  end

  test "what passes unchanged is the same to a bit" do
    for type <- [{:f, 32}, {:f, 16}, {:bf, 16}] do
      {binary, _, _} = normal({2, 8}, 6)
      x = {binary_part(binary, 0, 16 * div(elem(type, 1), 8)), {2, 8}, type}
      one = Arrays.identity(8, x)
      # Halves of floats are any numbers, NaN among them: only finite ones pass.
      if type == {:f, 32}, do: assert(FlashKernel.linear(x, one) == x)
      assert {_, {8, 8}, ^type} = one
      assert Arrays.transpose(one) == one
    end

    x = Tensor.from_list([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    assert rows(Arrays.transpose(x)) == [[1.0, 4.0], [2.0, 5.0], [3.0, 6.0]]
  end

  test "gradients of products made before are those of the gates" do
    wx = normal({1, 3, 8}, 1)
    r = Arrays.transpose(normal({2, 8}, 2))
    one = Arrays.identity(8, wx)
    {[y, _, _], gradient} = FlashKernel.value_and_gradient(:lstm, [wx, one, r])
    %{x: dwx} = gradient.([elem(y, 0) |> ones(elem(y, 1)), nil, nil])

    # By differences, of each of the 24.
    sum = fn wx ->
      {y, _, _} = FlashKernel.lstm(wx, one, r)
      y |> Tensor.to_flat_list() |> Enum.sum()
    end

    numbers = Tensor.to_flat_list(wx)

    differences =
      for i <- 0..23 do
        moved = fn by ->
          {binary, _, type} = numbers |> List.update_at(i, &(&1 + by)) |> Tensor.from_list()
          sum.({binary, {1, 3, 8}, type})
        end

        (moved.(0.01) - moved.(-0.01)) / 0.02
      end

    for {g, d} <- Enum.zip(Tensor.to_flat_list(dwx), differences),
        do: assert_in_delta(g, d, 1.0e-3)
  end

  defp ones(binary, shape) do
    {:binary.copy(<<1.0::float-32-native>>, div(byte_size(binary), 4)), shape, {:f, 32}}
  end

  test "layers of Axon need Axon" do
    assert_raise ArgumentError, "rms_norm: expected Axon among the project's dependencies", fn ->
      FlashKernel.Axon.rms_norm(%{})
    end
  end
end
