defmodule FlashKernel.Native do
  @moduledoc false
  # The functions of c_src/nif.cc, which says what they take. They are called at compile time, too:
  # FlashKernel's functions are written from the declarations.

  @on_load :load

  def load do
    path = :filename.join(:code.priv_dir(:flashkernel), ~c"flashkernel_nif")
    :erlang.load_nif(path, 0)
  end

  def call(_op, _slots), do: :erlang.nif_error(:not_loaded)
  def call_inline(_op, _slots), do: :erlang.nif_error(:not_loaded)
  def check(_op, _slots), do: :erlang.nif_error(:not_loaded)
  def declarations, do: :erlang.nif_error(:not_loaded)
  def build_info, do: :erlang.nif_error(:not_loaded)
  def set_threads(_threads), do: :erlang.nif_error(:not_loaded)
  def register_exla(_library), do: :erlang.nif_error(:not_loaded)
end
