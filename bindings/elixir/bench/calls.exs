# The calls that bench/bench.py times, from Elixir's side:
#   mix run bench/calls.exs FOLDER [NAME...]
# For each call it writes down, in FOLDER/calls.txt and the files named there, the programs of XLA that it
# becomes, with their operands:
#   call NAME
#   input NAME DIMS FILE           an argument of the call
#   program forward|saving|backward FILE
#   operand NAME                   of the program: an input, an output of `saving`, or a gradient
#   output NAME TYPE DIMS
# Then it runs one, through the NIF on binaries, for each line that it is told: NAME forward|gradient TIMES.
alias FlashKernel.{Arguments, Binaries, Call, Op, Plan}

defmodule Bench do
  # The NIF, noting what it is asked for.
  defdelegate layout(tensor), to: Binaries
  defdelegate zeros(shape, type), to: Binaries

  def run(plan, tensors) do
    Process.put(:plans, [plan | Process.get(:plans, [])])
    Binaries.run(plan, tensors)
  end

  def normal(shape, scale) do
    count = Tuple.product(shape)
    data = for _ <- 1..count, into: <<>>, do: <<:rand.normal() * scale::float-32-native>>
    {data, shape, {:f, 32}}
  end

  # A batch of 32 sequences of 60 steps.
  def calls do
    :rand.seed(:exsss, 3)
    {d, n, h} = {512, 16, 256}
    sequence = fn width -> normal({32, 60, width}, 1.0) end
    a = for _ <- 1..d, k <- 1..n, into: <<>>, do: <<-k * 1.0::float-32-native>>

    recurrent = fn gates ->
      scale = :math.pow(h, -0.5)
      weights = for _ <- 1..2, do: normal({gates * h, h}, scale)
      [sequence.(h) | weights] ++ for(_ <- 1..2, do: normal({gates * h}, scale))
    end

    heads = fn -> normal({32, 60, 4, 64}, 1.0) end

    # Each is made when it is asked for.
    [
      selective_scan: fn ->
        positional =
          [sequence.(d), sequence.(d), {a, {d, n}, {:f, 32}}, sequence.(n), sequence.(n)] ++
            [normal({d}, 1.0)]

        {positional, [z: sequence.(d), delta_bias: normal({d}, 1.0), delta_softplus: true]}
      end,
      attention: fn -> {[heads.(), heads.(), heads.()], [causal: true]} end,
      lstm: fn -> {recurrent.(4), []} end,
      gru: fn -> {recurrent.(3), []} end
    ]
  end

  def ones({_, shape, _}) do
    {:binary.copy(<<1.0::float-32-native>>, Tuple.product(shape)), shape, {:f, 32}}
  end

  # The gradient of the sum of the first output.
  def gradient(name, positional, options) do
    {[y | rest], gradient} = FlashKernel.value_and_gradient(name, positional, options)
    gradient.([ones(y) | Enum.map(rest, fn _ -> nil end)])
  end
end

[folder | names] = System.argv()

calls =
  for {name, make} <- Bench.calls(), names == [] or to_string(name) in names do
    {positional, options} = make.()
    {name, positional, options}
  end

index = File.open!(Path.join(folder, "calls.txt"), [:write])
dims = fn shape -> Enum.join(Tuple.to_list(shape), "x") end

program = fn name, kind, plan ->
  file = "#{name}_#{kind}.mlir"
  File.write!(Path.join(folder, file), FlashKernel.EXLA.program(plan))
  IO.puts(index, "program #{kind} #{file}")
  for {operand, _, _} <- plan.inputs, do: IO.puts(index, "operand #{operand}")

  for {output, shape, {kind, bits}} <- plan.outputs,
      do: IO.puts(index, "output #{output} #{kind}#{bits} #{dims.(shape)}")
end

for {name, positional, options} <- calls do
  IO.puts(index, "call #{name}")
  op = Op.get("#{name}_fwd")
  arguments = Binaries.read(op, Arguments.read(op, positional, options))

  for {input, {binary, shape, _}} <- arguments.tensors do
    file = "#{name}_#{input}.bin"
    File.write!(Path.join(folder, file), binary)
    IO.puts(index, "input #{input} #{dims.(shape)} #{file}")
  end

  layouts = Map.new(arguments.tensors, fn {name, tensor} -> {name, Bench.layout(tensor)} end)
  program.(name, "forward", Plan.of_call(op, arguments, layouts))

  {[{_, y} | rest], gradient} = Call.with_gradient(op, arguments, Bench)
  gradient.([Bench.ones(y) | Enum.map(rest, fn _ -> nil end)])
  [backward, saving] = Process.delete(:plans)
  program.(name, "saving", saving)
  program.(name, "backward", backward)
end

File.close(index)
IO.puts("ready")

by_name =
  Map.new(calls, fn {name, positional, options} ->
    {to_string(name), {name, positional, options}}
  end)

for line <- IO.stream() do
  [called, kind, times] = String.split(line)
  {name, positional, options} = by_name[called]

  run =
    if kind == "forward",
      do: fn -> apply(FlashKernel, name, positional ++ [options]) end,
      else: fn -> Bench.gradient(name, positional, options) end

  for _ <- 1..String.to_integer(times), do: run.()
  IO.puts("done")
end
