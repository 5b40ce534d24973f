defmodule FlashKernel.EXLATest do
  use ExUnit.Case, async: false
  import ExUnit.CaptureLog

  # Where no XLA is loaded; tests/bindings/test_elixir.py has one that is.

  defp block do
    op = FlashKernel.Op.get("softmax_fwd")
    layouts = %{"x" => {{2, 3}, {:f, 32}}}
    %FlashKernel.Nx.Block{plan: FlashKernel.Plan.make(op, layouts, %{"axis" => -1}, ["y"])}
  end

  test "a call is left to the NIF, with one warning" do
    :persistent_term.erase({FlashKernel.EXLA, :warned})
    call = fn -> EXLA.CustomCall.call(block(), {}, [], %{platform: :host}) end
    assert capture_log(fn -> assert call.() == :skip end) =~ "expected one that is loaded"
    assert capture_log(fn -> assert call.() == :skip end) == ""
  end

  test "nor is it asked for on other platforms" do
    log =
      capture_log(fn ->
        assert EXLA.CustomCall.call(block(), {}, [], %{platform: :tpu}) == :skip
      end)

    assert log == ""
  end
end
