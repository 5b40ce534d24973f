defmodule FlashKernel.EXLA do
  @moduledoc """
  Lowers calls of FlashKernel's ops to custom calls of XLA.

  Under `compiler: EXLA` a function that calls `FlashKernel.attention/3`, say, becomes one program of
  XLA in which the op is one custom call, on the CPU and on CUDA. There is nothing to do but to have EXLA
  (0.12 or newer) among the dependencies: the handlers are registered when the application starts. Where
  that fails, a warning says why, and the NIF computes the op within the program.

  `lower/1` needs neither Nx nor EXLA: it is what the library's tests compile with another XLA.
  """

  require Logger
  alias FlashKernel.{Native, Plan, Tensor}

  @target "flashkernel"

  @doc """
  The custom call of a planned call, as XLA's StableHLO has it: the target, the attributes as pairs of
  names and MLIR texts, and the flat operands and results, each a number of elements and a type.
  """
  @spec lower(Plan.t()) :: %{target: String.t(), attributes: list, operands: list, results: list}
  def lower(plan) do
    %{
      target: @target,
      attributes: attributes(plan),
      operands: flat(plan.inputs),
      results: flat(plan.outputs)
    }
  end

  # Empty tensors are in the lists of shapes alone.
  defp flat(tensors) do
    for {_name, shape, type} <- tensors,
        not Tensor.empty?(shape),
        do: {Tuple.product(shape), type}
  end

  defp attributes(plan) do
    names = for {name, _, _} <- plan.inputs ++ plan.outputs, do: name

    present =
      plan.op.fields
      |> Enum.with_index()
      |> Enum.filter(fn {field, _} -> field.name in names end)
      |> Enum.reduce(0, fn {_, i}, bits -> Bitwise.bor(bits, Bitwise.bsl(1, i)) end)

    [
      {"op", inspect(plan.op.name)},
      {"present", integer(present)},
      {"operand_shapes", shapes(plan.inputs)},
      {"result_shapes", shapes(plan.outputs)}
      | for({name, value} <- Enum.sort(plan.attributes), do: {name, attribute(value)})
    ]
  end

  defp shapes(tensors) do
    numbers =
      for {_name, shape, type} <- tensors,
          number <- [Tensor.xla(type), tuple_size(shape) | Tuple.to_list(shape)],
          do: number

    if numbers == [], do: "array<i64>", else: "array<i64: #{Enum.join(numbers, ", ")}>"
  end

  defp attribute(:infinity), do: "0x7FF0000000000000 : f64"
  defp attribute(x) when is_float(x), do: "0x#{Base.encode16(<<x::float-64-big>>)} : f64"
  defp attribute(x) when is_integer(x), do: integer(x)

  defp integer(x), do: "#{x} : i64"

  @doc """
  The same as a whole program, whose arguments are the operands and which returns the results.
  """
  @spec program(Plan.t()) :: String.t()
  def program(plan) do
    %{target: target, attributes: attributes, operands: operands, results: results} = lower(plan)
    config = Enum.map_join(attributes, ", ", fn {name, text} -> "#{name} = #{text}" end)
    types = Enum.map_join(operands, ", ", &tensor_type/1)
    returned_types = Enum.map_join(results, ", ", &tensor_type/1)
    result_types = "(#{returned_types})"

    arguments =
      operands
      |> Enum.with_index()
      |> Enum.map_join(", ", fn {operand, i} -> "%a#{i}: #{tensor_type(operand)}" end)

    values = Enum.map_join(Enum.with_index(operands), ", ", fn {_, i} -> "%a#{i}" end)
    count = length(results)
    returned = if count == 1, do: "%r", else: Enum.map_join(0..(count - 1), ", ", &"%r##{&1}")
    left = if count == 1, do: "%r", else: "%r:#{count}"

    """
    module {
      func.func public @main(#{arguments}) -> #{result_types} {
        #{left} = stablehlo.custom_call @#{target}(#{values}) {api_version = 4 : i32, backend_config = {#{config}}} : (#{types}) -> #{result_types}
        return #{returned} : #{returned_types}
      }
    }
    """
  end

  @mlir %{
    {:f, 16} => "f16",
    {:f, 32} => "f32",
    {:f, 64} => "f64",
    {:bf, 16} => "bf16",
    {:f8_e4m3fn, 8} => "f8E4M3FN",
    {:s, 8} => "i8",
    {:s, 32} => "i32",
    {:s, 64} => "i64",
    {:u, 8} => "ui8"
  }

  defp tensor_type({size, type}), do: "tensor<#{size}x#{Map.fetch!(@mlir, type)}>"

  # --- registration ------------------------------------------------------------------------------

  @xla "libxla_extension.so"

  @doc """
  Registers the handlers with the XLA that EXLA has loaded, once; `library` is the name of its file.
  Where there is none, that is no error: the NIF serves.
  """
  @spec register(String.t()) :: :ok | {:error, String.t()}
  def register(library \\ @xla) do
    with nil <- :persistent_term.get({__MODULE__, :registered}, nil),
         :ok <- Native.register_exla(library) do
      :persistent_term.put({__MODULE__, :registered}, :ok)
    end
  end

  @doc false
  # What EXLA asks: the handlers are there, or a warning has said once why not. XLA may be loaded later
  # than this was asked first, so that it is tried again.
  def registered? do
    case register() do
      :ok ->
        true

      {:error, why} ->
        unless :persistent_term.get({__MODULE__, :warned}, false) do
          :persistent_term.put({__MODULE__, :warned}, true)
          Logger.warning("FlashKernel's calls do not become XLA's: #{why}")
        end

        false
    end
  end
end

if Code.ensure_loaded?(EXLA.CustomCall) do
  defimpl EXLA.CustomCall, for: FlashKernel.Nx.Block do
    def call(%{plan: plan}, _output, _arguments, %{platform: platform})
        when platform in [:host, :cuda] do
      if FlashKernel.EXLA.registered?() do
        %{target: target, attributes: attributes} = FlashKernel.EXLA.lower(plan)
        {:ok, %EXLA.CustomCall.Spec{call_target_name: target, attributes: attributes}}
      else
        :skip
      end
    end

    def call(_block, _output, _arguments, _client), do: :skip
  end
end
