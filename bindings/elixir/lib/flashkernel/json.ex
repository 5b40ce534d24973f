defmodule FlashKernel.JSON do
  @moduledoc false
  # Reads JSON: Elixir has had a module for it since 1.18, and this library needs no other version.
  # Numbers that a float does not hold (1e999) are :infinity or :neg_infinity.

  @spec decode!(binary) :: term
  def decode!(text) do
    {value, rest} = value(skip(text))
    if skip(rest) == "", do: value, else: wrong(rest)
  end

  defp skip(<<c, rest::binary>>) when c in [?\s, ?\t, ?\r, ?\n], do: skip(rest)
  defp skip(text), do: text

  defp value("{" <> rest), do: object(skip(rest), %{})
  defp value("[" <> rest), do: array(skip(rest), [])
  defp value("\"" <> rest), do: string(rest, [])
  defp value("true" <> rest), do: {true, rest}
  defp value("false" <> rest), do: {false, rest}
  defp value("null" <> rest), do: {nil, rest}
  defp value(text), do: number(text)

  defp object("}" <> rest, map), do: {map, rest}

  defp object("\"" <> rest, map) do
    {key, rest} = string(rest, [])
    ":" <> rest = skip(rest)
    {value, rest} = value(skip(rest))
    map = Map.put(map, key, value)

    case skip(rest) do
      "," <> rest -> object(skip(rest), map)
      "}" <> rest -> {map, rest}
      rest -> wrong(rest)
    end
  end

  defp object(text, _map), do: wrong(text)

  defp array("]" <> rest, list), do: {Enum.reverse(list), rest}

  defp array(text, list) do
    {value, rest} = value(text)
    list = [value | list]

    case skip(rest) do
      "," <> rest -> array(skip(rest), list)
      "]" <> rest -> {Enum.reverse(list), rest}
      rest -> wrong(rest)
    end
  end

  @escapes %{
    ?" => ?",
    ?\\ => ?\\,
    ?/ => ?/,
    ?b => ?\b,
    ?f => ?\f,
    ?n => ?\n,
    ?r => ?\r,
    ?t => ?\t
  }

  defp string("\"" <> rest, parts), do: {parts |> Enum.reverse() |> IO.iodata_to_binary(), rest}

  defp string(<<"\\u", code::binary-size(4), rest::binary>>, parts) do
    string(rest, [<<String.to_integer(code, 16)::utf8>> | parts])
  end

  defp string(<<"\\", c, rest::binary>>, parts) when is_map_key(@escapes, c) do
    string(rest, [@escapes[c] | parts])
  end

  defp string(<<c, rest::binary>>, parts) when c not in [?", ?\\], do: string(rest, [c | parts])
  defp string(text, _parts), do: wrong(text)

  defp number(text) do
    case Regex.run(~r/^-?\d+(\.\d+)?([eE][+-]?\d+)?/, text) do
      [digits] -> {String.to_integer(digits), behind(text, digits)}
      [digits | _] -> {float(digits), behind(text, digits)}
      nil -> wrong(text)
    end
  end

  defp behind(text, digits) do
    binary_part(text, byte_size(digits), byte_size(text) - byte_size(digits))
  end

  defp float(digits) do
    case Float.parse(digits) do
      {value, ""} -> value
      :error -> if String.starts_with?(digits, "-"), do: :neg_infinity, else: :infinity
    end
  end

  defp wrong(text), do: raise(ArgumentError, "expected JSON, got #{String.slice(text, 0, 20)}")
end
