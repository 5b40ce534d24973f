defmodule FlashKernel.ExlaTest do
  use ExUnit.Case, async: true
  alias FlashKernel.{EXLA, Op, Plan}

  defp plan(layouts, attributes, outputs) do
    Plan.make(Op.get("softmax_fwd"), layouts, attributes, outputs)
  end

  test "a call as a custom call" do
    plan = plan(%{"x" => {{2, 3}, {:f, 32}}}, %{"axis" => -1}, ["y"])
    lowered = EXLA.lower(plan)
    assert lowered.target == "flashkernel"
    assert lowered.operands == [{6, {:f, 32}}]
    assert lowered.results == [{6, {:f, 32}}]

    assert lowered.attributes == [
             {"op", ~s("softmax_fwd")},
             {"present", "5 : i64"},
             {"operand_shapes", "array<i64: 11, 2, 2, 3>"},
             {"result_shapes", "array<i64: 11, 2, 2, 3>"},
             {"axis", "-1 : i64"}
           ]
  end

  test "an empty tensor has a shape and no operand" do
    lowered = EXLA.lower(plan(%{"x" => {{0, 3}, {:bf, 16}}}, %{"axis" => 1}, ["y"]))
    assert lowered.operands == [] and lowered.results == []
    assert {"operand_shapes", "array<i64: 16, 2, 0, 3>"} in lowered.attributes
  end

  test "errors come when a call is planned" do
    assert_raise ArgumentError, ~r/^softmax: axis: /, fn ->
      %{"x" => {{2, 3}, {:f, 32}}} |> plan(%{"axis" => 7}, ["y"]) |> Plan.check!()
    end
  end

  test "registration says why it failed" do
    assert {:error, message} = FlashKernel.Native.register_exla("no_such_library.so")
    assert message =~ "expected one that is loaded"
    assert_raise ArgumentError, fn -> FlashKernel.Native.register_exla("with\0null") end
  end
end
