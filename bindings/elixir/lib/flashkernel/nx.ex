if Code.ensure_loaded?(Nx) do
  defmodule FlashKernel.Nx do
    @moduledoc false
    # Nx tensors: eager ones go through the NIF; inside `defn` a call is a block, which EXLA lowers to a
    # custom call (FlashKernel.EXLA) and which is computed by the NIF under any other compiler.

    alias FlashKernel.{Call, Functions, Op, Plan, Tensor}

    defmodule Block do
      @moduledoc false
      # `results` are the templates of the outputs, flat; empty ones have none.
      defstruct [:plan, :results]
    end

    def tensors?(arguments) do
      Enum.any?(arguments.tensors, fn {_, value} -> Enum.any?(List.wrap(value), &tensor?/1) end)
    end

    defp tensor?(value), do: is_struct(value, Nx.Tensor)

    def call(op, arguments) do
      arguments = read(op, arguments)

      if op.backward && Enum.any?(arguments.tensors, fn {_, tensor} -> traced?(tensor) end) do
        {outputs, gradient} = Call.with_gradient(op, arguments, __MODULE__)
        tensors = for name <- Call.differentiable(op, arguments), do: arguments.tensors[name]
        result = Functions.result(outputs)

        # Constants have no gradient; Nx takes none of them here.
        Nx.Defn.Kernel.custom_grad(result, Enum.filter(tensors, &traced?/1), fn cotangent ->
          cotangents = if is_tuple(cotangent), do: Tuple.to_list(cotangent), else: [cotangent]

          gradients =
            outputs
            |> Enum.zip_with(cotangents, fn {_, output}, g ->
              Nx.as_type(Nx.broadcast(g, output), output.type)
            end)
            |> gradient.()

          for {tensor, g} <- Enum.zip(tensors, gradients), traced?(tensor), do: g
        end)
      else
        op |> Call.forward(arguments, __MODULE__) |> Functions.result()
      end
    end

    defp traced?(tensor),
      do: is_struct(tensor, Nx.Tensor) and is_struct(tensor.data, Nx.Defn.Expr)

    # Every tensor as one of Nx without vectorised axes; numbers become tensors. No axis stands for all.
    defp read(op, arguments) do
      tensors =
        for f <- Op.inputs(op), value = arguments.tensors[f.name], into: %{} do
          {f.name, tensor(op, f, value)}
        end

      axis = op.axis && op.axis.name

      if axis && arguments.attributes[axis] == nil do
        %{name: name} = Enum.find(Op.inputs(op), & &1.along_axis)

        %{
          arguments
          | tensors: Map.update!(tensors, name, &flat/1),
            attributes: Map.put(arguments.attributes, axis, 0)
        }
      else
        %{arguments | tensors: tensors}
      end
    end

    defp tensor(op, field, parts) when is_list(parts) and field.stacked do
      parts |> Enum.map(&tensor(op, %{field | stacked: false}, &1)) |> Nx.stack()
    end

    defp tensor(_op, _field, value) when is_number(value), do: Nx.tensor(value)

    defp tensor(op, field, value) do
      cond do
        tensor?(value) and Tensor.known?(value.type) ->
          Nx.devectorize(value)

        tensor?(value) ->
          raise ArgumentError,
                "#{op.public}: #{field.name}: expected a known type, got #{inspect(value.type)}"

        true ->
          {binary, shape, type} = Tensor.read(op, field, value)
          binary |> Nx.from_binary(type) |> Nx.reshape(shape)
      end
    end

    defp flat(tensor), do: Nx.reshape(tensor, {Nx.size(tensor)}, names: [nil])

    # --- the backend of FlashKernel.Call: Nx has no empty tensors, {:empty, shape, type} is one -------

    def layout({:empty, shape, type}), do: {shape, type}
    def layout(tensor), do: {tensor.shape, tensor.type}

    def zeros(shape, type), do: Nx.broadcast(Nx.tensor(0, type: type), shape)

    def run(plan, tensors) do
      Plan.check!(plan)
      present = for {name, _, _} <- plan.inputs, t = tensors[name], tensor?(t), do: t
      {empty, full} = Enum.split_with(plan.outputs, fn {_, shape, _} -> Tensor.empty?(shape) end)

      results =
        if Enum.any?(present, &traced?/1),
          do: traced(plan, present, full),
          else: eager(plan, tensors, full)

      Map.merge(
        results,
        Map.new(empty, fn {name, shape, type} -> {name, {:empty, shape, type}} end)
      )
    end

    defp eager(plan, tensors, full) do
      outputs = Plan.run!(plan, Map.new(plan.inputs, fn {n, _, _} -> {n, binary(tensors[n])} end))

      Map.new(full, fn {name, shape, type} ->
        {name, outputs[name] |> Nx.from_binary(type) |> Nx.reshape(shape)}
      end)
    end

    defp binary({:empty, _, _}), do: <<>>
    defp binary(tensor), do: Nx.to_binary(tensor)

    # Operands and results are flat, so that no compiler chooses a layout for them.
    defp traced(plan, present, full) do
      templates =
        Enum.map(full, fn {_, shape, type} -> Nx.template({Tuple.product(shape)}, type) end)

      block = %Block{plan: plan, results: templates}
      operands = Enum.map(present, &flat/1)
      results = Nx.block(block, operands, together(templates), by_the_nif(length(operands)))
      results = if is_tuple(results), do: Tuple.to_list(results), else: [results]

      full
      |> Enum.zip(results)
      |> Map.new(fn {{name, shape, _}, result} -> {name, Nx.reshape(result, shape)} end)
    end

    defp together([one]), do: one
    defp together(many), do: List.to_tuple(many)

    # A block's own function has to take its operands one by one.
    for count <- 1..32 do
      operands = Macro.generate_arguments(count, __MODULE__)

      defp by_the_nif(unquote(count)) do
        fn block, unquote_splicing(operands) ->
          Nx.runtime_call(
            together(block.results),
            List.to_tuple(unquote(operands)),
            [block: block],
            &__MODULE__.run_block/2
          )
        end
      end
    end

    @doc false
    def run_block(operands, block: %Block{plan: plan}) do
      {data, []} =
        Enum.map_reduce(plan.inputs, Tuple.to_list(operands), fn {name, shape, _}, operands ->
          if Tensor.empty?(shape),
            do: {{name, <<>>}, operands},
            else: {{name, Nx.to_binary(hd(operands))}, tl(operands)}
        end)

      outputs = Plan.run!(plan, Map.new(data))

      plan.outputs
      |> Enum.reject(fn {_, shape, _} -> Tensor.empty?(shape) end)
      |> Enum.map(fn {name, _, type} ->
        Nx.from_binary(outputs[name], type, backend: Nx.BinaryBackend)
      end)
      |> together()
    end
  end
else
  defmodule FlashKernel.Nx do
    @moduledoc false
    # A project without Nx: no argument is one of its tensors.

    def tensors?(_arguments), do: false

    def call(_op, _arguments),
      do: raise(ArgumentError, "expected Nx in the project's dependencies")
  end
end
