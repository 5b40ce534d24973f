# Trains a small Mamba in Axon to say, at every step, the sum of what it has seen so far.
#   mix run mamba_in_axon.exs [STEPS]
# in a project that has {:axon, "~> 0.8"}, {:flashkernel, path: ...} and, to compile with XLA, {:exla, ">= 0.12.0"}.
# Under EXLA a step is one program in which each op, forward and backward, is one custom call; without EXLA
# Nx's evaluator calls the NIF.
steps =
  case System.argv() do
    [text | _] -> String.to_integer(text)
    [] -> 200
  end

{batch, length, width} = {32, 60, 32}

residual = fn x, layer -> Axon.add(x, layer.(FlashKernel.Axon.rms_norm(x))) end

model =
  Axon.input("x", shape: {nil, length, 1})
  |> Axon.dense(width)
  |> residual.(&FlashKernel.Axon.mamba(&1, state: 16))
  |> residual.(&FlashKernel.Axon.mamba(&1, state: 16))
  |> FlashKernel.Axon.rms_norm()
  |> Axon.dense(1)

# Batches without end: numbers, and their sums so far.
data =
  Stream.unfold(Nx.Random.key(42), fn key ->
    {x, key} = Nx.Random.normal(key, shape: {batch, length, 1}, type: :f32)
    {{%{"x" => x}, Nx.divide(Nx.cumulative_sum(x, axis: 1), 8)}, key}
  end)

compiler = if Code.ensure_loaded?(EXLA), do: [compiler: EXLA], else: []

model
|> Axon.Loop.trainer(:mean_squared_error, Polaris.Optimizers.adam(learning_rate: 3.0e-3), log: 10)
|> Axon.Loop.run(data, Axon.ModelState.empty(), [epochs: 1, iterations: steps] ++ compiler)
