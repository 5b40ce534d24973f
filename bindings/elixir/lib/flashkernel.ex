defmodule FlashKernel do
  @moduledoc """
  Fused kernels for sequence models: attention, state-space scans, norms, projections, losses.

  Each op of the library is a function here. Tensors are `{binary, shape, type}`
  (`t:FlashKernel.Tensor.t/0`), or Nx tensors where a project has Nx:

      iex> x = FlashKernel.Tensor.from_list([[3.0, 4.0]])
      iex> FlashKernel.Tensor.to_flat_list(FlashKernel.sum(x))
      [7.0]
      iex> {_, shape, type} = FlashKernel.rms_norm(x, nil, eps: 0.0)
      iex> {shape, type}
      {{1, 2}, {:f, 32}}

  Positional arguments of the Python functions are positional here, and optional ones may also be
  given as options, their names in lower case. Everything else is an option. A function with several
  results returns a tuple. States are not updated in place, since binaries cannot be: a step returns
  its output and the new state.

  What does not fit raises an `ArgumentError` that names the op and the argument:

      iex> FlashKernel.rms_norm(FlashKernel.Tensor.from_list([[3.0, 4.0]]), nil, eps: "small")
      ** (ArgumentError) rms_norm: eps: expected a number, got "small"
  """

  alias FlashKernel.{Arguments, Binaries, Call, Native, Op}

  @typedoc "A tensor `{binary, shape, type}`, or one of Nx."
  @type tensor :: FlashKernel.Tensor.t() | struct

  @typedoc "A tensor, nil where it is optional, the value of an attribute, or the options."
  @type argument :: term

  # Ops of these names stand here.
  import Kernel, except: [max: 2]
  require FlashKernel.Functions
  FlashKernel.Functions.define_ops()

  @doc """
  A call with its gradient: the results as a list, and a function from their gradients, a list of the
  same length in which nil stands for zeros, to a map of the gradients of the inputs.

      iex> x = FlashKernel.Tensor.from_list([1.0, 2.0])
      iex> {[_], gradient} = FlashKernel.value_and_gradient(:sum, [x])
      iex> %{x: dx} = gradient.([FlashKernel.Tensor.from_list(3.0)])
      iex> FlashKernel.Tensor.to_flat_list(dx)
      [3.0, 3.0]

  It takes tensors `{binary, shape, type}`. Under Nx use `Nx.Defn.grad/2`.
  """
  @spec value_and_gradient(atom, list, keyword) :: {list, (list -> map)}
  def value_and_gradient(name, positional, options \\ []) do
    op = public_op(name)

    if op.backward == nil,
      do: raise(ArgumentError, "#{op.public}: expected an op with a gradient")

    arguments = Binaries.read(op, Arguments.read(op, positional, options))
    given = Arguments.read(op, positional, options).tensors
    {outputs, gradient} = Call.with_gradient(op, arguments, Binaries)
    names = Call.differentiable(op, arguments)

    named = fn cotangents ->
      unless length(cotangents) == length(outputs) do
        raise ArgumentError,
              "#{op.public}: expected #{length(outputs)} gradients, got #{length(cotangents)}"
      end

      names
      |> Enum.zip(gradient.(cotangents))
      |> Map.new(fn {name, value} -> {Op.field(op, name).key, shaped_as(value, given[name])} end)
    end

    {Enum.map(outputs, &elem(&1, 1)), named}
  end

  # The gradient of a tensor that was flattened has the tensor's own shape.
  defp shaped_as({binary, _, type}, {_, shape, _}), do: {binary, shape, type}
  defp shaped_as(value, _parts), do: value

  @doc """
  What was built: versions, the processor's instructions in use and those available, GPUs.
  """
  @spec build_info() :: map
  def build_info, do: FlashKernel.JSON.decode!(Native.build_info())

  @doc "Sets how many threads the library's own pool has."
  @spec set_num_threads(pos_integer) :: :ok
  def set_num_threads(threads), do: Native.set_threads(threads)

  defp public_op(name) do
    public = to_string(name)
    Enum.find(Op.public(), &(&1.public == public)) || Op.get(public)
  end
end
