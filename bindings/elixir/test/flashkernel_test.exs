defmodule FlashKernelTest do
  use ExUnit.Case, async: true
  doctest FlashKernel
  doctest FlashKernel.Layers
end
