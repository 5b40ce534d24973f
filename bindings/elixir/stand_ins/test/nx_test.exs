defmodule FlashKernel.NxTest do
  use ExUnit.Case, async: true
  alias FlashKernel.Tensor
  alias Nx.Defn

  # Tensors of Nx's form, eager and traced, give what the same calls give on binaries.

  defp normal(shape, seed) do
    state = :rand.seed_s(:exsss, seed)
    zeros = List.duplicate(0, Tuple.product(shape))
    {numbers, _} = Enum.map_reduce(zeros, state, fn _, s -> :rand.normal_s(s) end)
    {binary, _, type} = Tensor.from_list(numbers)
    {binary, shape, type}
  end

  defp nx({binary, shape, type}), do: binary |> Nx.from_binary(type) |> Nx.reshape(shape)
  defp plain(tensor), do: {Nx.to_binary(tensor), tensor.shape, tensor.type}

  defp plain_all(result) when is_tuple(result),
    do: result |> Tuple.to_list() |> Enum.map(&plain/1) |> List.to_tuple()

  defp plain_all(result), do: plain(result)

  # Calls, with the tensors that are traced.
  defp calls do
    x = normal({2, 6}, 1)
    scan = for {shape, seed} <- [{{1, 3, 2}, 2}, {{1, 3, 2}, 3}], do: normal(shape, seed)
    a = Tensor.from_list([[-1.0, -2.0], [-0.5, -0.1]])
    b = normal({1, 3, 2}, 4)
    long = for {shape, seed} <- [{{1, 70, 2}, 5}, {{1, 70, 2}, 6}], do: normal(shape, seed)
    c = normal({1, 70, 2}, 7)
    q = normal({1, 4, 2, 8}, 8)

    [
      softmax: {[x], []},
      sum: {[x], [axis: 0]},
      rms_norm: {[x, normal({6}, 9)], [residual: normal({2, 6}, 10)]},
      selective_scan: {scan ++ [a, b, b], [delta_softplus: true]},
      selective_scan: {long ++ [a, c, c], [delta_softplus: true, return_last_state: true]},
      attention: {[q, q, q], [causal: true]},
      gru: {[normal({2, 3, 4}, 11), normal({6, 4}, 12), normal({6, 2}, 13)], []}
    ]
  end

  test "eager calls" do
    for {name, {tensors, options}} <- calls() do
      expected = apply(FlashKernel, name, tensors ++ [options])

      of_nx =
        for {key, value} <- options, do: {key, if(is_tuple(value), do: nx(value), else: value)}

      got = apply(FlashKernel, name, Enum.map(tensors, &nx/1) ++ [of_nx])
      assert plain_all(got) == expected, "#{name}"
    end
  end

  test "no axis for all of them" do
    x = normal({2, 6}, 1)
    assert plain(FlashKernel.sum(nx(x))) == FlashKernel.sum(x)
    {traced, given} = Defn.argument(nx(x))
    assert plain(Defn.evaluate(FlashKernel.sum(traced), [given])) == FlashKernel.sum(x)
  end

  test "lists of parts" do
    parts = [normal({1, 2, 3, 4}, 1), normal({1, 2, 3, 4}, 2)]
    lses = [normal({1, 3, 2}, 3), normal({1, 3, 2}, 4)]
    expected = FlashKernel.merge_attention_states(parts, lses)
    got = FlashKernel.merge_attention_states(Enum.map(parts, &nx/1), Enum.map(lses, &nx/1))
    assert plain_all(got) == expected
  end

  test "traced calls and their gradients" do
    for {name, {tensors, options}} <- calls() do
      options = Keyword.delete(options, :residual)
      {outputs, gradient} = FlashKernel.value_and_gradient(name, tensors, options)
      {traced, given} = tensors |> Enum.map(&Defn.argument(nx(&1))) |> Enum.unzip()
      result = apply(FlashKernel, name, traced ++ [options])
      results = if is_tuple(result), do: Tuple.to_list(result), else: [result]
      assert Enum.map(results, &plain(Defn.evaluate(&1, given))) == outputs, "#{name}"

      cotangents = for {_, shape, _} <- outputs, do: normal(shape, 20)
      {inputs, function} = hd(results).data.gradient
      of_nx = Enum.map(cotangents, &nx/1)
      gradients = function.(if is_tuple(result), do: List.to_tuple(of_nx), else: hd(of_nx))
      assert Enum.all?(inputs, &(&1 in traced))
      expected = gradient.(cotangents)

      for {input, g} <- Enum.zip(inputs, gradients) do
        place = Enum.find_index(traced, &(&1 == input))
        key = FlashKernel.Op.positional(FlashKernel.Op.get("#{name}_fwd")) |> Enum.at(place)
        assert plain(Defn.evaluate(g, given)) == expected[key.key], "#{name}: #{key.name}"
      end
    end
  end

  test "operands and results of a block are flat" do
    {x, given} = Defn.argument(nx(normal({2, 3}, 1)))
    y = FlashKernel.softmax(x)
    assert y.shape == {2, 3}
    assert Defn.evaluate(y, [given]).shape == {2, 3}
    {block, operands, output} = y.data.block
    assert is_struct(block, FlashKernel.Nx.Block)
    assert Enum.map(operands, & &1.shape) == [{6}]
    assert output.shape == {6}
  end

  test "what does not fit is named when a call is traced" do
    {x, _} = Defn.argument(nx(normal({2, 3}, 1)))
    {w, _} = Defn.argument(nx(normal({2}, 1)))

    assert_raise ArgumentError, ~r/^rms_norm: weight: expected shape \(3,\)/, fn ->
      FlashKernel.rms_norm(x, w)
    end

    assert_raise ArgumentError, ~r/^softmax: x: expected a known type, got {:c, 64}/, fn ->
      FlashKernel.softmax(%{x | type: {:c, 64}})
    end

    for wrong <- [:no, %{}, "text"] do
      assert_raise ArgumentError, ~r/^rms_norm: weight: expected a tensor/, fn ->
        FlashKernel.rms_norm(x, wrong)
      end
    end
  end
end
