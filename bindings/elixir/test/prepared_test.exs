defmodule FlashKernel.PreparedTest do
  # Kinds of calls are counted here, so that no other test may call meanwhile.
  use ExUnit.Case, async: false
  alias FlashKernel.{Prepared, Tensor}

  # Each test begins with no kind of call kept, and leaves none behind.
  setup do
    forget()
    on_exit(&forget/0)
  end

  defp forget do
    for {key, _} <- :persistent_term.get(), is_tuple(key) and elem(key, 0) == Prepared do
      :persistent_term.erase(key)
    end

    :ok
  end

  # The first call of a kind prepares it, and the second finds it prepared.
  defp twice(call) do
    result = call.()
    assert call.() == result
    result
  end

  # How many kinds of calls are prepared by these, which are each made twice.
  defp new_kinds(calls) do
    {before, _} = Prepared.kept()
    for call <- calls, do: twice(call)
    {now, _} = Prepared.kept()
    now - before
  end

  test "every kind of call is prepared once" do
    x = Tensor.from_list([[3.0, 4.0, 5.0]])
    w = Tensor.from_list([1.0, 2.0, 3.0])
    half = {:binary.copy(<<0x3C00::16-native>>, 3), {1, 3}, {:f, 16}}
    other = Tensor.from_list([[1.0, 2.0, 3.0]])

    assert 8 ==
             new_kinds([
               fn -> FlashKernel.rms_norm(x, nil, eps: 0.125) end,
               fn -> FlashKernel.rms_norm(x, w, eps: 0.125) end,
               fn -> FlashKernel.rms_norm(x, w, eps: 0.0625) end,
               fn -> FlashKernel.rms_norm(x, weight: w, eps: 0.125) end,
               fn -> FlashKernel.rms_norm(x, w, eps: 0.125, residual: x) end,
               fn -> FlashKernel.rms_norm(half, w, eps: 0.125) end,
               fn -> FlashKernel.rms_norm({elem(x, 0), {3, 1}, {:f, 32}}, nil, eps: 0.125) end,
               fn -> FlashKernel.layer_norm(x, w, eps: 0.125) end
             ])

    # Other numbers in tensors of the same shapes are no other kind.
    assert 0 == new_kinds([fn -> FlashKernel.rms_norm(other, w, eps: 0.125) end])
  end

  test "tensors go where they belong, in whatever order they come" do
    [q, k, v, cos, sin] =
      for {shape, seed} <-
            Enum.with_index([{1, 4, 2, 8}, {1, 4, 2, 8}, {1, 4, 2, 8}, {4, 2}, {4, 2}]) do
        numbers = for i <- 1..Tuple.product(shape), do: :math.sin(i * (seed + 1.5))
        {binary, _, type} = Tensor.from_list(numbers)
        {binary, shape, type}
      end

    one = twice(fn -> FlashKernel.attention(q, k, v, rotary: {cos, sin}, window: {2, 0}) end)

    assert one ==
             twice(fn -> FlashKernel.attention(q, k, v, window: {2, 0}, rotary: {cos, sin}) end)

    assert one !=
             twice(fn -> FlashKernel.attention(q, k, v, window: {2, 0}, rotary: {sin, cos}) end)

    # The same by hand.
    {q, k} = {FlashKernel.rope(q, cos, sin), FlashKernel.rope(k, cos, sin)}
    by_hand = FlashKernel.attention(q, k, v, window: {2, 0})

    for {x, y} <- Enum.zip(Tensor.to_flat_list(one), Tensor.to_flat_list(by_hand)),
        do: assert_in_delta(x, y, 1.0e-6)
  end

  test "a choice is a kind of its own, as an atom and as a string" do
    x = Tensor.from_list([[1.0, -2.0]])
    act = fn activation -> fn -> FlashKernel.linear(x, x, activation: activation) end end
    assert 4 == new_kinds([act.(:relu), act.("relu"), act.(:silu), act.("silu")])
    assert twice(act.("relu")) == twice(act.(:relu))
    assert twice(act.("relu")) != twice(act.("silu"))
    assert_raise ArgumentError, ~r/^linear: activation: expected one of/, act.("swish")
  end

  test "0.0 and -0.0 are not taken for each other" do
    x = Tensor.from_list([[1.0]])
    w = Tensor.from_list([-0.0])
    norm = fn offset -> fn -> elem(FlashKernel.rms_norm(x, w, weight_offset: offset), 0) end end
    assert twice(norm.(0.0)) == <<0.0::float-32-native>>
    assert twice(norm.(-0.0)) == <<-0.0::float-32-native>>
  end

  test "what does not fit raises beside calls that are prepared" do
    x = Tensor.from_list([[3.0, 4.0]])
    {binary, shape, type} = x
    twice(fn -> FlashKernel.rms_norm(x) end)

    for {wrong, message} <- [
          {{binary <> binary, shape, type},
           "expected a binary of 8 bytes for shape {1, 2}, got 16"},
          {{8, shape, type},
           "expected a tensor {binary, shape, type}, got {8, {1, 2}, {:f, 32}}"},
          {{binary, {1, 2.0}, type}, "expected sizes of 0 or more, got {1, 2.0}"},
          {{binary, shape, {:f, 31}}, "expected a known type, got {:f, 31}"}
        ] do
      assert_raise ArgumentError, "rms_norm: x: " <> message, fn ->
        FlashKernel.rms_norm(wrong)
      end
    end

    # Targets are numbers of columns, which only the call itself can see.
    logits = Tensor.from_list([[1.0, 2.0]])

    loss = fn target ->
      FlashKernel.cross_entropy(logits, {<<target::64-native>>, {1}, {:s, 64}})
    end

    twice(fn -> loss.(1) end)
    assert_raise ArgumentError, ~r/^cross_entropy: targets: /, fn -> loss.(2) end
  end

  test "no more kinds are kept than fit" do
    row = fn size -> {:binary.copy(<<1.0::float-32-native>>, size), {size}, {:f, 32}} end
    {_, most} = Prepared.kept()
    for size <- 1..(most + 10), do: FlashKernel.sum(row.(size))
    assert {^most, ^most} = Prepared.kept()
    terms = :persistent_term.info().count
    assert Tensor.to_flat_list(twice(fn -> FlashKernel.sum(row.(most + 11)) end)) == [most + 11.0]
    assert :persistent_term.info().count == terms
  end
end
