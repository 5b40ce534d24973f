defmodule FlashKernel.Application do
  @moduledoc false
  use Application

  @impl true
  def start(_type, _arguments) do
    FlashKernel.Op.load()
    # EXLA's own NIF is what loads XLA.
    if Code.ensure_loaded?(EXLA.NIF), do: FlashKernel.EXLA.registered?()
    Supervisor.start_link([], strategy: :one_for_one, name: FlashKernel.Supervisor)
  end
end
