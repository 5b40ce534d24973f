# Runs calls that tests/bindings/test_elixir.py has drawn, and writes down what came of them:
#   mix run test/support/run_cases.exs FOLDER
# FOLDER/cases.json is a list of calls. FOLDER/index.txt gets a line for each thing that came of them:
#   case NUMBER                        what follows is of this call
#   result|gradient NAME TYPE DIMS FILE
#   program FILE                       an op that ran for it, as a program of XLA
#   operand|output TYPE COUNT FILE     its operands and results, flat
alias FlashKernel.{Arguments, Binaries, Call, JSON, Op}

defmodule Recorder do
  # The NIF, noting every op that it runs.
  defdelegate layout(tensor), to: Binaries
  defdelegate zeros(shape, type), to: Binaries

  def run(plan, tensors) do
    outputs = Binaries.run(plan, tensors)
    inputs = for {name, _, _} <- plan.inputs, do: tensors[name]
    results = for {name, _, _} <- plan.outputs, do: outputs[name]

    Process.put(:runs, [
      {FlashKernel.EXLA.program(plan), inputs, results} | Process.get(:runs, [])
    ])

    outputs
  end
end

[folder] = System.argv()
counter = :counters.new(1, [])
index = File.open!(Path.join(folder, "index.txt"), [:write])

write = fn data ->
  :counters.add(counter, 1, 1)
  name = "elixir_#{:counters.get(counter, 1)}"
  File.write!(Path.join(folder, name), data)
  name
end

type_text = fn {kind, bits} -> "#{kind}#{bits}" end
dims_text = fn shape -> Enum.join(["dims" | Tuple.to_list(shape)], "x") end

note = fn kind, name, {binary, shape, type} ->
  IO.puts(index, "#{kind} #{name} #{type_text.(type)} #{dims_text.(shape)} #{write.(binary)}")
end

value = fn
  %{"file" => file, "shape" => shape, "type" => [kind, bits]} ->
    {File.read!(Path.join(folder, file)), List.to_tuple(shape), {String.to_atom(kind), bits}}

  "infinity" ->
    :infinity

  other ->
    other
end

nested = fn
  list when is_list(list) -> list |> Enum.map(value) |> List.to_tuple()
  other -> value.(other)
end

for {call, number} <-
      folder |> Path.join("cases.json") |> File.read!() |> JSON.decode!() |> Enum.with_index() do
  IO.puts(index, "case #{number}")
  Process.put(:runs, [])
  op = Op.get(call["op"])
  positional = Enum.map(call["positional"], nested)

  options =
    for {name, v} <- call["options"], do: {String.to_atom(String.downcase(name)), nested.(v)}

  arguments = Binaries.read(op, Arguments.read(op, positional, options))

  if call["cotangents"] do
    {outputs, gradient} = Call.with_gradient(op, arguments, Recorder)
    for {name, tensor} <- outputs, do: note.("result", name, tensor)
    gradients = gradient.(Enum.map(call["cotangents"], &(&1 && value.(&1))))

    for {name, tensor} <- Enum.zip(Call.differentiable(op, arguments), gradients) do
      note.("gradient", name, tensor)
    end
  else
    outputs = Call.forward(op, arguments, Recorder)
    for {name, tensor} <- outputs, do: note.("result", name, tensor)

    # The public function gives the same, when it is called for the first time and when the call is known.
    for _ <- 1..2 do
      given = apply(FlashKernel, String.to_atom(op.public), positional ++ [options])
      if given != FlashKernel.Functions.result(outputs), do: raise("#{op.public}: other results")
    end
  end

  for {program, inputs, outputs} <- Enum.reverse(Process.get(:runs)) do
    IO.puts(index, "program #{write.(program)}")

    for {kind, tensors} <- [{"operand", inputs}, {"output", outputs}],
        {binary, shape, type} <- tensors,
        Tuple.product(shape) > 0 do
      IO.puts(index, "#{kind} #{type_text.(type)} #{Tuple.product(shape)} #{write.(binary)}")
    end
  end
end

File.close(index)
