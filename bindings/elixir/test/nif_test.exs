defmodule FlashKernel.NifTest do
  use ExUnit.Case, async: false
  alias FlashKernel.{Native, Op, Plan}

  # What a NIF is given by the library's own functions is well formed; this is about everything else.

  defp tensor(shape) do
    count = Tuple.product(shape)
    {:binary.copy(<<1.0::float-32-native>>, count), shape, {:f, 32}}
  end

  defp slots(op) do
    layouts = %{"x" => {{2, 4}, {:f, 32}}, "weight" => {{4}, {:f, 32}}}
    attributes = for f <- Op.attributes(op), into: %{}, do: {f.name, default(f)}
    plan = Plan.make(op, layouts, attributes, ["y"])
    data = %{"x" => elem(tensor({2, 4}), 0), "weight" => elem(tensor({4}), 0)}
    Plan.slots(plan, data)
  end

  defp default(%{kind: :number, default: value}), do: value * 1.0
  defp default(%{default: value}), do: value || 0

  test "the right slots are taken" do
    assert {:ok, [y]} = Native.call("layer_norm_fwd", slots(Op.get("layer_norm_fwd")))
    assert byte_size(y) == 32
  end

  test "slots of another number or kind raise" do
    slots = slots(Op.get("layer_norm_fwd"))

    for wrong <- [
          [],
          tl(slots),
          slots ++ [nil],
          [1.0 | tl(slots)],
          [{} | tl(slots)],
          [{:in} | tl(slots)],
          [{:out, {2, 32}, {2, 4}} | tl(slots)],
          [put_elem(hd(slots), 1, "short") | tl(slots)] |> Enum.map(&shift/1),
          [put_elem(hd(slots), 2, {2, 31}) | tl(slots)],
          [put_elem(hd(slots), 2, {2, -32}) | tl(slots)],
          [put_elem(hd(slots), 3, {2, -4}) | tl(slots)],
          [put_elem(hd(slots), 3, {2, 4, 1.0}) | tl(slots)],
          [put_elem(hd(slots), 3, List.to_tuple(List.duplicate(1, 40))) | tl(slots)],
          [put_elem(hd(slots), 3, {1_000_000_000_000_000_000_000}) | tl(slots)],
          [hd(slots) | :improper],
          :no_list,
          %{}
        ] do
      assert_raise ArgumentError, fn -> Native.call("layer_norm_fwd", wrong) end
      assert_raise ArgumentError, fn -> Native.call_inline("layer_norm_fwd", wrong) end
      assert_raise ArgumentError, fn -> Native.check("layer_norm_fwd", wrong) end
    end
  end

  defp shift(slot) when is_tuple(slot), do: put_elem(slot, 0, :neither)
  defp shift(slot), do: slot

  test "names of no op raise" do
    for name <- ["", "no_op", "layer_norm_fwd\0", :layer_norm_fwd, nil, 3, <<255>>] do
      assert_raise ArgumentError, fn -> Native.call(name, []) end
    end
  end

  test "a binary of another size is named" do
    [x | rest] = slots(Op.get("layer_norm_fwd"))
    assert {:error, message} = Native.call("layer_norm_fwd", [put_elem(x, 1, "short") | rest])
    assert message == "layer_norm_fwd: expected a binary of 32 bytes, got one of 5"
  end

  test "shapes that do not fit are the library's error" do
    [x, weight | rest] = slots(Op.get("layer_norm_fwd"))
    data = elem(tensor({5}), 0)
    weight = weight |> put_elem(1, data) |> put_elem(3, {5})

    assert {:error, "layer_norm" <> _ = message} =
             Native.call("layer_norm_fwd", [x, weight | rest])

    assert message =~ "weight: expected shape (4,)"
  end

  test "sizes whose product no memory holds" do
    [x | rest] = slots(Op.get("layer_norm_fwd"))
    huge = 0x7FFFFFFFFFFFFFFF

    assert_raise ArgumentError, fn ->
      Native.call("layer_norm_fwd", [put_elem(x, 3, {huge, huge}) | rest])
    end
  end

  test "ten thousand random terms" do
    :rand.seed(:exsss, {1, 2, 3})
    names = Map.keys(Op.all())

    for _ <- 1..10_000 do
      op = Op.get(Enum.random(names))
      slots = Enum.map(1..(length(op.fields) + Enum.random(-1..1))//1, fn _ -> random(3) end)

      result =
        try do
          Native.call_inline(op.name, slots)
        rescue
          ArgumentError -> :refused
        end

      assert result == :refused or match?({:error, _}, result) or match?({:ok, _}, result)
    end
  end

  defp random(depth) do
    case :rand.uniform(12) do
      1 -> nil
      2 -> :infinity
      3 -> :rand.uniform(9) - 4
      4 -> :rand.normal()
      5 -> 1_000_000_000_000_000_000_000
      6 -> :rand.bytes(:rand.uniform(32))
      7 -> {:in, :rand.bytes(16), {2, 32}, {4}}
      8 -> {:in, :rand.bytes(24), {2, 32}, {2, 3}}
      9 -> {:out, {2, 32}, {4}}
      10 when depth > 0 -> List.to_tuple(random_list(depth))
      11 when depth > 0 -> random_list(depth)
      12 when depth > 0 -> [random(depth - 1) | random(depth - 1)]
      _ -> make_ref()
    end
  end

  defp random_list(depth) do
    for _ <- 1..:rand.uniform(5)//1, do: random(depth - 1)
  end

  test "inputs are not written" do
    {binary, _, _} = x = tensor({3, 5})
    before = :binary.copy(binary)
    FlashKernel.softmax(x)
    FlashKernel.rope(tensor({1, 2, 1, 4}), tensor({2, 2}), tensor({2, 2}))
    assert binary == before
  end

  test "heavy calls leave the schedulers free" do
    # 2 GFLOP a call.
    x = tensor({1024, 1024})
    # The machine may have other things to do: the best of three.
    longest = Enum.min(for _ <- 1..3, do: longest_wait(fn -> FlashKernel.linear(x, x) end))
    IO.puts("under heavy calls of 8 processes a timer of 1 ms waited #{longest} ms")
    assert longest < 200 * slower()
  end

  # How long a timer of a millisecond waited at most while eight processes made five calls each.
  defp longest_wait(call) do
    caller = self()

    workers =
      for _ <- 1..8 do
        spawn_link(fn ->
          for _ <- 1..5, do: call.()
          send(caller, {:done, self()})
        end)
      end

    wait(workers, System.monotonic_time(:millisecond), 0)
  end

  # A NIF whose accesses are watched.
  defp watched?, do: System.get_env("ASAN_OPTIONS") != nil
  defp slower, do: if(watched?(), do: 10, else: 1)

  # The longest that a timer of a millisecond took while the workers were at work.
  defp wait([], _last, longest), do: longest

  defp wait(workers, last, longest) do
    receive do
      {:done, worker} -> wait(List.delete(workers, worker), last, longest)
    after
      1 ->
        now = System.monotonic_time(:millisecond)
        wait(workers, now, max(longest, now - last))
    end
  end

  test "a process that is killed in a call harms nobody" do
    x = tensor({512, 512})

    for _ <- 1..20 do
      worker = spawn(fn -> for _ <- 1..100, do: FlashKernel.linear(x, x) end)
      Process.sleep(:rand.uniform(5))
      Process.exit(worker, :kill)
    end

    assert {_, {512, 512}, _} = FlashKernel.linear(x, x)
  end

  test "new code takes over from old while calls are in flight" do
    {_, _, path} = object = :code.get_object_code(Native)
    assert File.exists?(path)
    # On a dirty scheduler, and on the caller's own.
    large = tensor({256, 256})
    small = tensor({8, 8})
    expected = {FlashKernel.linear(large, large), FlashKernel.linear(small, small)}

    workers =
      for _ <- 1..4 do
        Task.async(fn -> count_calls(large, small, expected, 0) end)
      end

    for _ <- 1..10 do
      load_again(object)
      # The old code goes when the last call that entered it is done.
      assert within(10_000, fn -> :code.soft_purge(Native) end)
    end

    for worker <- workers, do: send(worker.pid, :stop)
    for calls <- Task.await_many(workers, 60_000), do: assert(calls > 0)
  end

  # Calls until it is told to stop, and how many they were; each must give what is expected.
  defp count_calls(large, small, expected, count) do
    ^expected = {FlashKernel.linear(large, large), FlashKernel.linear(small, small)}

    receive do
      :stop -> count + 1
    after
      0 -> count_calls(large, small, expected, count + 1)
    end
  end

  defp load_again({module, binary, path}) do
    assert {:module, ^module} = :code.load_binary(module, path, binary)
  end

  defp within(milliseconds, condition) do
    cond do
      condition.() -> true
      milliseconds <= 0 -> false
      true -> Process.sleep(1) && within(milliseconds - 1, condition)
    end
  end

  test "old code that is purged takes the processes in it along, and nothing else" do
    object = :code.get_object_code(Native)
    x = tensor({2048, 2048})
    before = :erlang.memory(:binary)
    # 17 GFLOP a call, of which the first ends only after the purge.
    {worker, monitor} = spawn_monitor(fn -> for _ <- 1..100, do: FlashKernel.linear(x, x) end)
    assert within(10_000, fn -> match?({_, {Native, :call, 2}}, in_call(worker)) end)
    load_again(object)
    assert :code.purge(Native)
    assert_receive {:DOWN, ^monitor, :process, ^worker, :killed}, 60_000
    # What the call holds, a result of 16 MB, is given back when it ends.
    assert within(60_000, fn -> :erlang.memory(:binary) - before < 8 * 1024 * 1024 end)
    assert {_, {8, 8}, _} = FlashKernel.linear(tensor({8, 8}), tensor({8, 8}))
  end

  defp in_call(worker) do
    with {:current_function, function} <- Process.info(worker, :current_function),
         do: {worker, function}
  end

  test "a module that is loaded after it was gone answers as before" do
    object = :code.get_object_code(Native)
    expected = FlashKernel.softmax(tensor({64, 65}))

    for _ <- 1..3 do
      # What is on its way from another test has to be out, or it would die here.
      assert within(10_000, fn -> :code.soft_purge(Native) end)
      assert :code.delete(Native)
      assert within(10_000, fn -> :code.soft_purge(Native) end)
      refute :code.is_loaded(Native)
      load_again(object)
      assert FlashKernel.softmax(tensor({64, 65})) == expected
    end
  end

  test "results are given back" do
    x = tensor({1024, 1024})
    call = fn -> for _ <- 1..100, do: FlashKernel.softmax(x) |> elem(1) end
    Task.await(Task.async(call), :infinity)
    # What a task leaves is freed a moment after its answer has come.
    Process.sleep(100)
    before = held()
    Task.await(Task.async(call), :infinity)

    for {kind, bytes} <- before do
      little_more = fn -> held()[kind] - bytes < 8 * 1024 * 1024 end
      assert within(2000, little_more), "#{kind}: #{held()[kind] - bytes} bytes"
    end
  end

  # Bytes of binaries, and of the whole process where the system tells them and nothing watches.
  defp held do
    :erlang.garbage_collect()
    binaries = [binaries: :erlang.memory(:binary)]

    case not watched?() && File.read("/proc/self/statm") do
      {:ok, text} ->
        [_, resident | _] = String.split(text)
        [{:process, String.to_integer(resident) * 4096} | binaries]

      _ ->
        binaries
    end
  end

  test "a small call costs less than a microsecond more than from C" do
    unless watched?() do
      priv = to_string(:code.priv_dir(:flashkernel))

      {text, 0} =
        System.cmd("make", ["-s", "c_call"], env: [{"PRIV", priv}], stderr_to_stdout: true)

      assert text == ""
      {text, 0} = System.cmd(Path.join(priv, "c_call"), [])
      from_c = text |> String.trim() |> String.to_float()
      tensor = fn shape -> tensor(shape) |> elem(0) end
      layouts = %{"x" => {{1, 8}, {:f, 32}}, "weight" => {{8}, {:f, 32}}}
      plan = Plan.make(Op.get("layer_norm_fwd"), layouts, %{"eps" => 1.0e-5}, ["y"])
      slots = Plan.slots(plan, %{"x" => tensor.({1, 8}), "weight" => tensor.({8})})
      {x, weight} = {tensor({1, 8}), tensor({8})}

      for {what, call} <- [
            {"with slots at hand",
             fn -> {:ok, _} = Native.call_inline("layer_norm_fwd", slots) end},
            {"by its function", fn -> {_, _, _} = FlashKernel.layer_norm(x, weight) end}
          ] do
        over = quickest(call) - from_c

        IO.puts(
          "layer_norm on a row of 8 #{what}: #{round(over)} ns over #{round(from_c)} from C"
        )

        assert over < 1000
      end
    end
  end

  # Nanoseconds of a call in the quickest of many batches.
  defp quickest(call) do
    Enum.min(
      for _ <- 1..100 do
        {microseconds, :ok} = :timer.tc(fn -> repeat(call, 5000) end)
        microseconds * 1000 / 5000
      end
    )
  end

  defp repeat(_call, 0), do: :ok

  defp repeat(call, times) do
    call.()
    repeat(call, times - 1)
  end
end
