defmodule StandIns.MixProject do
  use Mix.Project

  def project, do: [app: :stand_ins, version: "0.1.0", elixir: "~> 1.14"]
end
