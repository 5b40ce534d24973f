defmodule FlashKernel.AxonTest do
  use ExUnit.Case, async: true
  alias FlashKernel.{Arrays, Layers, Tensor}

  defp tensor(shape, first) do
    count = Tuple.product(shape)
    numbers = for i <- 1..count, do: :math.sin(first + i)
    {binary, _, type} = Tensor.from_list(numbers)
    binary |> Nx.from_binary(type) |> Nx.reshape(shape)
  end

  # Parameters that no initializer makes, and what was made of them.
  defp run(layer, inputs) do
    make = fn name, shape, initializer ->
      assert initializer in [:glorot_uniform, :zeros, :ones]
      value = tensor(shape, byte_size(name))
      send(self(), {:made, String.to_atom(name), value})
      value
    end

    {Axon.run(layer, inputs, make), made(%{})}
  end

  defp made(values) do
    receive do
      {:made, name, value} -> made(Map.put(values, name, value))
    after
      0 -> values
    end
  end

  test "norms" do
    x = tensor({2, 3, 4}, 1)

    {y, %{weight: weight}} =
      run(FlashKernel.Axon.rms_norm(Axon.input("x"), eps: 0.5), %{"x" => x})

    assert weight.shape == {4}
    assert y == FlashKernel.rms_norm(x, weight, eps: 0.5)
    {y, values} = run(FlashKernel.Axon.layer_norm(Axon.input("x"), name: "n"), %{"x" => x})
    assert y == FlashKernel.layer_norm(x, values.weight, values.bias)
  end

  test "a Mamba block" do
    x = tensor({2, 5, 6}, 1)
    layer = FlashKernel.Axon.mamba(Axon.input("x"), state: 3, expand: 1, name: "block")
    assert layer.options == [name: "block", op_name: :mamba]
    {y, values} = run(layer, %{"x" => x})
    # Those with a beginning of their own.
    values = Map.put(values, :a_log, a_log(6, 3))

    {:dt_bias, shape, begin} =
      Layers.parameters(:mamba, 6, expand: 1) |> List.keyfind!(:dt_bias, 0)

    {binary, shape, type} = begin.(shape)
    values = Map.put(values, :dt_bias, binary |> Nx.from_binary(type) |> Nx.reshape(shape))
    assert y == Layers.mamba(x, values)
    assert y.shape == x.shape
  end

  defp a_log(channels, state) do
    row = for n <- 1..state, do: :math.log(n)
    {binary, shape, type} = Tensor.from_list(List.duplicate(row, channels))
    binary |> Nx.from_binary(type) |> Nx.reshape(shape)
  end

  test "a scan of four inputs" do
    [u, delta] = [tensor({1, 4, 2}, 1), tensor({1, 4, 2}, 2)]
    [b, c] = [tensor({1, 4, 3}, 3), tensor({1, 4, 3}, 4)]
    inputs = %{"u" => u, "delta" => delta, "b" => b, "c" => c}
    [lu, ld, lb, lc] = Enum.map(~w(u delta b c), &Axon.input/1)
    layer = FlashKernel.Axon.selective_scan(lu, ld, lb, lc, state: 3, algorithm: :sequential)
    {y, %{d: d}} = run(layer, inputs)
    assert y.shape == {1, 4, 2}
    assert d.shape == {2}
  end

  test "attention" do
    x = tensor({2, 3, 8}, 1)
    options = [heads: 2, kv_heads: 1, causal: true, rotary_base: 100.0, use_bias: true]
    {y, values} = run(FlashKernel.Axon.attention(Axon.input("x"), options), %{"x" => x})
    assert values.key.shape == {4, 8} and values.key_bias.shape == {4}
    assert y == Layers.attention(x, values, options)
  end

  test "recurrent nets, from inputs and from their products" do
    x = tensor({2, 3, 4}, 1)

    for {op, gates} <- [lstm: 4, gru: 3] do
      {sequence, states} = apply(FlashKernel.Axon, op, [Axon.input("x"), 5])
      {y, values} = run(sequence, %{"x" => x})
      assert values.w_ih.shape == {gates * 5, 4} and values.w_hh.shape == {gates * 5, 5}
      options = [b_ih: values.b_ih, b_hh: values.b_hh]
      expected = apply(FlashKernel, op, [x, values.w_ih, values.w_hh, options])
      assert y == elem(expected, 0)

      found = for state <- Tuple.to_list(states), do: elem(run(state, %{"x" => x}), 0)
      # The cell comes before the output, as in Axon.
      assert found == expected |> Tuple.to_list() |> tl() |> Enum.reverse()

      wx = FlashKernel.linear(x, values.w_ih)
      {sequence, _} = apply(FlashKernel.Axon, op, [Axon.input("wx"), 5, [multiplied: true]])
      {y, %{recurrent: r}} = run(sequence, %{"wx" => wx})
      assert r.shape == {5, gates * 5}

      expected =
        apply(FlashKernel, op, [wx, Nx.eye(gates * 5, type: {:f, 32}), Arrays.transpose(r)])

      assert y == elem(expected, 0)
    end
  end
end
