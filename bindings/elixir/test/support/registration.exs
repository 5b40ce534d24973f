# What comes of the handlers' registration when the application starts; tests/bindings/test_elixir.py runs
# it in processes that have loaded one XLA or another:
#   XLA_STUB=FOLDER/xla_stub_nif mix run --no-start test/support/registration.exs
{:ok, _} = Application.ensure_all_started(:flashkernel)

for {name, kind} <- EXLA.NIF.registered(), do: IO.puts("registered #{name}: #{kind}")

op = FlashKernel.Op.get("softmax_fwd")
layouts = %{"x" => {{2, 3}, {:f, 32}}}
block = %FlashKernel.Nx.Block{plan: FlashKernel.Plan.make(op, layouts, %{"axis" => -1}, ["y"])}

for platform <- [:host, :cuda, :tpu] do
  case EXLA.CustomCall.call(block, {}, [], %{platform: platform}) do
    :skip ->
      IO.puts("#{platform}: skip")

    {:ok, %EXLA.CustomCall.Spec{call_target_name: target, attributes: attributes}} ->
      IO.puts("#{platform}: #{target} #{attributes |> List.keyfind!("op", 0) |> elem(1)}")
  end
end

# A second time nothing is registered again, or it is tried again.
IO.puts("again: #{inspect(FlashKernel.EXLA.register())}")
IO.puts("handlers: #{length(EXLA.NIF.registered())}")
