defmodule FlashKernel.MixProject do
  use Mix.Project

  def project do
    [
      app: :flashkernel,
      version: "0.1.0",
      elixir: "~> 1.14",
      description: "Fused kernels for sequence models, on any CPU and on NVIDIA GPUs",
      compilers: [:flashkernel_nif] ++ Mix.compilers(),
      deps: deps(Mix.env()),
      test_paths: test_paths(Mix.env()),
      package: [licenses: ["Apache-2.0"]]
    ]
  end

  # Nx, EXLA and Axon are used where a project has them, and are compiled first then. A project's
  # dependencies are compiled for :prod; the tests here need none of them, nor Hex: what touches them is
  # tested with stand-ins.
  defp deps(:prod) do
    [
      {:nx, ">= 0.12.0", optional: true},
      {:exla, ">= 0.12.0", optional: true},
      {:axon, ">= 0.8.0", optional: true}
    ]
  end

  defp deps(:stand_ins), do: [{:stand_ins, path: "stand_ins"}]
  defp deps(_environment), do: []

  defp test_paths(:stand_ins), do: ["stand_ins/test"]
  defp test_paths(_environment), do: ["test"]

  def application do
    [mod: {FlashKernel.Application, []}, extra_applications: [:logger]]
  end
end

defmodule Mix.Tasks.Compile.FlashkernelNif do
  @moduledoc false
  # Builds the NIF by make, into the priv folder of the build, before anything of Elixir is compiled.
  use Mix.Task.Compiler

  @impl true
  def run(_arguments) do
    priv = Path.join(Mix.Project.app_path(), "priv")
    File.mkdir_p!(priv)
    erts = Path.join([:code.root_dir(), "erts-#{:erlang.system_info(:version)}", "include"])
    environment = [{"PRIV", priv}, {"ERL_INCLUDE", to_string(erts)}]

    case System.cmd("make", ["-s"], env: environment, stderr_to_stdout: true, into: IO.stream()) do
      {_, 0} -> {:ok, []}
      {_, _} -> Mix.raise("flashkernel: the NIF could not be built; see the lines above")
    end
  end
end
