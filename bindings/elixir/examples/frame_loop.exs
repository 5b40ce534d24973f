# A game agent's loop: sixty times a second a frame of numbers goes through a GRU and a Mamba layer that
# remember, and an action comes out. It prints how long a frame took.
#   mix run examples/frame_loop.exs [SECONDS]
#
# Each step is a few calls of the NIF. They are small, so that they run on the process's own scheduler; the
# states are binaries that go from one frame to the next.
alias FlashKernel.Tensor

defmodule FrameLoop do
  @inputs 64
  @hidden 256
  @state 16
  @actions 8

  # Random weights, as an agent has before it has learned.
  def weights do
    :rand.seed(:exsss, 7)

    %{
      w_ih: normal({3 * @hidden, @inputs}),
      w_hh: normal({3 * @hidden, @hidden}),
      delta: normal({@hidden, @hidden}),
      b: normal({@state, @hidden}),
      c: normal({@state, @hidden}),
      a: Tensor.from_list(for _ <- 1..@hidden, do: for(n <- 1..@state, do: -n * 1.0)),
      d: Tensor.from_list(List.duplicate(1.0, @hidden)),
      norm: Tensor.from_list(List.duplicate(1.0, @hidden)),
      actions: normal({@actions, @hidden})
    }
  end

  def states, do: {zeros({1, @hidden}), zeros({1, @hidden, @state})}
  def frame, do: normal({1, 1, @inputs})

  # One frame: what the agent does, and what it remembers.
  def step(frame, w, {hidden, memory}) do
    {_, hidden} = FlashKernel.gru(frame, w.w_ih, w.w_hh, h0: hidden)
    x = FlashKernel.rms_norm(hidden, w.norm)
    dt = FlashKernel.linear(x, w.delta)
    {b, c} = {FlashKernel.linear(x, w.b), FlashKernel.linear(x, w.c)}

    {y, memory} =
      FlashKernel.selective_state_update(memory, x, dt, w.a, b, c, w.d, dt_softplus: true)

    {FlashKernel.softmax(FlashKernel.linear(y, w.actions)), {hidden, memory}}
  end

  defp normal(shape) do
    scale = :math.sqrt(1 / elem(shape, tuple_size(shape) - 1))
    count = Tuple.product(shape)
    data = for _ <- 1..count, into: <<>>, do: <<:rand.normal() * scale::float-32-native>>
    {data, shape, {:f, 32}}
  end

  defp zeros(shape), do: {:binary.copy(<<0::32>>, Tuple.product(shape)), shape, {:f, 32}}
end

seconds =
  case System.argv() do
    [text | _] -> text |> Float.parse() |> elem(0)
    [] -> 5.0
  end

frame_us = div(1_000_000, 60)
weights = FrameLoop.weights()
frames = for _ <- 1..60, do: FrameLoop.frame()
now = fn -> System.monotonic_time(:microsecond) end
begin = now.()

# A frame begins when its time has come, however long the last one took.
{_, taken} =
  Enum.reduce(0..round(seconds * 60), {FrameLoop.states(), []}, fn i, {states, taken} ->
    wait = begin + i * frame_us - now.()
    if wait > 0, do: Process.sleep(div(wait, 1000))
    from = now.()
    {_actions, states} = FrameLoop.step(Enum.at(frames, rem(i, 60)), weights, states)
    {states, [now.() - from | taken]}
  end)

# The first frame also wakes what sleeps.
[_ | taken] = Enum.reverse(taken)
sorted = Enum.sort(taken)
at = fn share -> Enum.at(sorted, min(trunc(share * length(sorted)), length(sorted) - 1)) end
late = Enum.count(taken, &(&1 > frame_us))

IO.puts("""
#{length(taken)} frames: p50 #{at.(0.5)} us, p99 #{at.(0.99)} us, longest #{List.last(sorted)} us; \
#{late} took longer than a frame's #{frame_us} us\
""")
