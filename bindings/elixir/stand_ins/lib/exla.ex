# As much of EXLA as FlashKernel uses: the module whose NIF loads XLA, and the protocol by which EXLA asks
# for custom calls.
defmodule EXLA.NIF do
  # EXLA's brings XLA into the process when it is loaded; this one test/support/xla_stub.cc, where a test
  # names it.
  @on_load :load

  def load do
    case System.get_env("XLA_STUB") do
      nil -> :ok
      path -> :erlang.load_nif(to_charlist(path), 0)
    end
  end

  def registered, do: []
end

defmodule EXLA.CustomCall.Spec do
  defstruct [:call_target_name, attributes: [], operand_element_types: :default]
end

defprotocol EXLA.CustomCall do
  def call(struct, out, args, client)
end
