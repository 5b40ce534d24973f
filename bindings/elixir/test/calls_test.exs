defmodule FlashKernel.CallsTest do
  use ExUnit.Case, async: true
  doctest FlashKernel.Tensor
  alias FlashKernel.Tensor

  defp normal(shape, seed \\ 1) do
    state = :rand.seed_s(:exsss, seed)
    count = Tuple.product(shape)

    {numbers, _} =
      Enum.map_reduce(List.duplicate(0, count), state, fn _, s -> :rand.normal_s(s) end)

    {binary, _, type} = Tensor.from_list(numbers)
    {binary, shape, type}
  end

  defp close(tensor, expected, tolerance \\ 1.0e-5) do
    for {x, y} <- Enum.zip(Tensor.to_flat_list(tensor), expected),
        do: assert_in_delta(x, y, tolerance)
  end

  test "norms by position and by option" do
    x = Tensor.from_list([[3.0, 4.0]])
    w = Tensor.from_list([2.0, 1.0])
    r = :math.sqrt(12.5)
    close(FlashKernel.rms_norm(x, w, eps: 0.0), [6 / r, 4 / r])
    assert FlashKernel.rms_norm(x, w) == FlashKernel.rms_norm(x, weight: w)
    {y, sum} = FlashKernel.rms_norm(x, w, residual: x)
    assert elem(y, 1) == {1, 2}
    close(sum, [6.0, 8.0])
  end

  test "names in lower case, tuples and choices" do
    u = normal({1, 3, 2})
    a = Tensor.from_list([[-1.0], [-2.0]])
    b = normal({1, 3, 1}, 2)
    d = Tensor.from_list([1.0, 1.0])
    y = FlashKernel.selective_scan(u, u, a, b, b, d, delta_softplus: true)
    assert y == FlashKernel.selective_scan(u, u, a, b, b, d: d, delta_softplus: true)

    q = normal({1, 4, 2, 8})
    full = FlashKernel.attention(q, q, q)
    assert full == FlashKernel.attention(q, q, q, window: {-1, -1})
    assert full != FlashKernel.attention(q, q, q, window: {0, 0})
    {_, lse} = FlashKernel.attention(q, q, q, return_lse: true)
    assert elem(lse, 1) == {1, 2, 4}

    x = normal({2, 3})
    w = normal({4, 3}, 3)

    assert FlashKernel.linear(x, w, activation: :relu) ==
             FlashKernel.linear(x, w, activation: "relu")
  end

  test "a step returns its state" do
    x = normal({1, 2})
    state = normal({1, 3, 2}, 2)
    {y, next} = FlashKernel.causal_conv1d_update(x, state, normal({2, 4}, 3))
    assert elem(y, 1) == {1, 2} and elem(next, 1) == {1, 3, 2}
    assert next != state
  end

  test "all axes and one" do
    x = Tensor.from_list([[1.0, 2.0], [3.0, 4.0]])
    close(FlashKernel.sum(x), [10.0])
    close(FlashKernel.sum(x, 0), [4.0, 6.0])
    close(FlashKernel.max(x, axis: 1), [2.0, 4.0])
  end

  test "empty tensors" do
    assert {<<>>, {0, 4}, {:f, 32}} = FlashKernel.softmax({<<>>, {0, 4}, {:f, 32}})
  end

  test "gradients" do
    x = normal({4, 3})
    {[_], gradient} = FlashKernel.value_and_gradient(:softmax, [x])
    %{x: dx} = gradient.([normal({4, 3}, 5)])
    # Gradients of a softmax add up to 0 in each row.
    dx
    |> Tensor.to_flat_list()
    |> Enum.chunk_every(3)
    |> Enum.each(&assert_in_delta(Enum.sum(&1), 0, 1.0e-5))

    assert_raise ArgumentError, ~r/^softmax: expected 1 gradients, got 2/, fn ->
      gradient.([x, x])
    end
  end

  test "floats of 8 bits have no gradient" do
    q = {:binary.copy(<<0x38>>, 64), {1, 4, 2, 8}, {:f8_e4m3fn, 8}}

    {[{_, {1, 4, 2, 8}, {:bf, 16}} = out], gradient} =
      FlashKernel.value_and_gradient(:attention, [q, q, q])

    assert_raise ArgumentError, "attention: float8 inputs have no gradient", fn ->
      gradient.([out])
    end
  end

  test "what does not fit is named" do
    x = normal({2, 3})

    for {expected, call} <- [
          {"rms_norm: x: expected a tensor {binary, shape, type}, got :no",
           fn -> FlashKernel.rms_norm(:no) end},
          {"rms_norm: weight: expected shape (3,) to fit x, got (2,)",
           fn -> FlashKernel.rms_norm(x, normal({2})) end},
          {"rms_norm: epz: expected one of the arguments",
           fn -> FlashKernel.rms_norm(x, epz: 1) end},
          {"rms_norm: eps: expected a number, got \"1\"",
           fn -> FlashKernel.rms_norm(x, eps: "1") end},
          {"rms_norm: weight: expected once",
           fn -> FlashKernel.rms_norm(x, normal({3}), weight: normal({3})) end},
          {"softmax: axis: expected an integer, got 0.5", fn -> FlashKernel.softmax(x, 0.5) end},
          {"linear: activation: expected one of nil",
           fn -> FlashKernel.linear(x, x, activation: :swish) end},
          {"attention: window: expected a tuple {left, right}",
           fn -> FlashKernel.attention(x, x, x, window: 3) end},
          {"attention: causal: expected true or false, got 1",
           fn -> FlashKernel.attention(x, x, x, causal: 1) end},
          {"attention: q: expected", fn -> FlashKernel.attention(x, x, x) end},
          {"softmax: x: expected a binary of 24 bytes",
           fn -> FlashKernel.softmax({<<0>>, {2, 3}, {:f, 32}}) end},
          {"softmax: x: expected a known type",
           fn -> FlashKernel.softmax({<<0>>, {1}, {:c, 64}}) end},
          {"softmax: x: expected sizes of 0 or more",
           fn -> FlashKernel.softmax({<<0>>, {-1}, {:f, 32}}) end},
          {"merge_attention_states: outs: expected",
           fn -> FlashKernel.merge_attention_states([], []) end}
        ] do
      error = assert_raise ArgumentError, call
      assert String.starts_with?(error.message, expected), error.message
    end
  end

  test "terms that are no arguments are refused, whatever they are" do
    x = normal({2, 3})
    {binary, shape, type} = x
    huge = 1_000_000_000_000_000_000_000_000

    values = [
      nil,
      [],
      [1 | 2],
      [nil],
      [x | x],
      %{},
      make_ref(),
      self(),
      fn -> 1 end,
      huge,
      <<1::3>>,
      {},
      {nil, nil, nil},
      {binary},
      {binary, shape},
      {binary, nil, type},
      {binary, {2, nil}, type},
      {binary, {2, 3.0}, type},
      {binary, {huge, huge}, type},
      {binary, {-1, -6}, type},
      {binary, [2, 3], type},
      {binary, shape, :f32},
      {binary, shape, {:f, huge}},
      {binary, shape, nil},
      {<<1::3>>, {1}, {:u, 8}},
      {[binary | binary], shape, type},
      {binary_part(binary, 0, 23), shape, type}
    ]

    for op <- FlashKernel.Op.public(), value <- values do
      name = String.to_atom(op.public)
      required = Enum.count(FlashKernel.Op.positional(op), &FlashKernel.Op.required?/1)

      assert_raise ArgumentError, fn ->
        apply(FlashKernel, name, List.duplicate(value, required))
      end

      for field <- FlashKernel.Op.arguments(op), field.kind != :input, not is_nil(value) do
        assert_raise ArgumentError, fn ->
          apply(FlashKernel, name, List.duplicate(x, required) ++ [[{field.key, {value}}]])
        end
      end
    end

    for options <- [:no, 1, [1], [{1, 2}], [:eps | :no], %{eps: 1}, "eps"] do
      assert_raise ArgumentError, fn -> FlashKernel.rms_norm(x, nil, options) end
    end
  end
end
