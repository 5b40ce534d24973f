"""Model files: weights as the `gguf` package reads them, folders of safetensors, cut files."""

import json
import struct

import gguf
import numpy as np
import pytest

import flashkernel as fk
import vocabularies
from flashkernel._model import ModelFile, dequantize

TYPES = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"]


@pytest.mark.parametrize("name", TYPES)
def test_dequantizes_as_gguf(name):
    kind = gguf.GGMLQuantizationType[name]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    # Any bits at all, infinite and NaN scales among them.
    data = np.random.default_rng().integers(0, 256, (4096, size), dtype=np.uint8)
    view = {"F32": np.float32, "F16": np.float16}.get(name, np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(data.reshape(1, -1).view(view), kind).reshape(-1)
    got = dequantize(name, data, 4096 * block)
    numbers = ~np.isnan(expected)
    assert np.array_equal(np.isnan(got), ~numbers)
    bits = expected.astype(np.float32).view(np.uint32)
    assert np.array_equal(got.view(np.uint32)[numbers], bits[numbers])


def test_dequantize_refuses():
    data = np.zeros(34, np.uint8)
    for arguments in [("Q2_K", data, 32), ("Q8_0", data, 31), ("Q8_0", data, 64)]:
        with pytest.raises(fk.Error, match="dequantize"):
            dequantize(*arguments)


def write_gguf(path, kind):
    """A small model of one type, its weights random."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(256)
    writer.add_block_count(1)
    writer.add_feed_forward_length(512)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    stored = {}

    def matrix(name, rows, columns):
        data = rng.integers(0, 256, (rows, columns // block * size), dtype=np.uint8)
        data[:] &= 0x3F  # finite scales
        stored[name] = data
        writer.add_tensor(name, data, raw_dtype=kind)

    def vector(name):
        writer.add_tensor(name, rng.standard_normal(256).astype(np.float32))

    matrix("token_embd.weight", 32, 256)
    vector("output_norm.weight")
    vector("blk.0.attn_norm.weight")
    vector("blk.0.ffn_norm.weight")
    for name, rows, columns in [("attn_q", 256, 256), ("attn_k", 128, 256), ("attn_v", 128, 256)]:
        matrix(f"blk.0.{name}.weight", rows, columns)
    matrix("blk.0.attn_output.weight", 256, 256)
    matrix("blk.0.ffn_gate.weight", 512, 256)
    matrix("blk.0.ffn_up.weight", 512, 256)
    matrix("blk.0.ffn_down.weight", 256, 512)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


@pytest.mark.parametrize("name", TYPES)
def test_gguf_weights(name, tmp_path):
    kind = gguf.GGMLQuantizationType[name]
    stored = write_gguf(tmp_path / "model.gguf", kind)
    model = ModelFile(tmp_path / "model.gguf")
    assert model.config["kv_heads"] == 2 and model.config["rope_interleaved"]
    for ours, theirs in [("layers.0.k", "blk.0.attn_k"), ("layers.0.down", "blk.0.ffn_down")]:
        data = stored[theirs + ".weight"]
        view = {"F32": np.float32, "F16": np.float16}.get(name, np.uint8)
        expected = gguf.quants.dequantize(data.view(view), kind)
        assert np.array_equal(model.read_weight(ours), expected)


def write_safetensors(path, tensors):
    header, at = {}, 0
    for name, array in tensors.items():
        span = [at, at + array.nbytes]
        header[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": span}
        at += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(map(bytes, tensors.values())))


def gpt2_folder(folder, files=1):
    rng = np.random.default_rng(0)
    dim, vocab = 16, 40
    shapes = {"wte.weight": (vocab, dim), "wpe.weight": (32, dim), "ln_f.weight": (dim,)}
    shapes |= {"ln_f.bias": (dim,)}
    for norm in ("ln_1", "ln_2"):
        shapes |= {f"h.0.{norm}.weight": (dim,), f"h.0.{norm}.bias": (dim,)}
    for name, columns, rows in [
        ("attn.c_attn", dim, 3 * dim),
        ("attn.c_proj", dim, dim),
        ("mlp.c_fc", dim, 4 * dim),
        ("mlp.c_proj", 4 * dim, dim),
    ]:
        shapes |= {f"h.0.{name}.weight": (columns, rows), f"h.0.{name}.bias": (rows,)}
    tensors = {
        "transformer." + n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()
    }
    names = list(tensors)
    if files == 1:
        write_safetensors(folder / "model.safetensors", tensors)
    else:
        where = {n: f"model-{i % files}.safetensors" for i, n in enumerate(names)}
        for file in set(where.values()):
            write_safetensors(folder / file, {n: tensors[n] for n in names if where[n] == file})
        index = folder / "model.safetensors.index.json"
        index.write_text(json.dumps({"metadata": {}, "weight_map": where}))
    config = {"model_type": "gpt2", "n_embd": dim, "n_layer": 1, "n_head": 2, "n_positions": 32}
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": vocab}))
    return tensors


@pytest.mark.parametrize("files", [1, 3])
def test_transposed_weights(files, tmp_path):
    tensors = gpt2_folder(tmp_path, files)
    model = ModelFile(tmp_path)
    assert model.config["family"] == "GPT-2" and model.config["tied"]
    fused = tensors["transformer.h.0.attn.c_attn.weight"].T
    for i, name in enumerate("qkv"):
        part = slice(16 * i, 16 * i + 16)
        assert np.array_equal(model.read_weight(f"layers.0.{name}"), fused[part])
        bias = tensors["transformer.h.0.attn.c_attn.bias"][None, part]
        assert np.array_equal(model.read_weight(f"layers.0.{name}_bias"), bias)
    down = tensors["transformer.h.0.mlp.c_proj.weight"].T
    assert np.array_equal(model.read_weight("layers.0.down"), down)


def cut_everywhere(path, step=997):
    """Loading any beginning of a file gives an error that names it."""
    data = path.read_bytes()
    for size in range(0, len(data), step):
        path.write_bytes(data[:size])
        with pytest.raises(fk.Error, match=path.name):
            ModelFile(path)


def test_cut_files(tmp_path):
    write_gguf(tmp_path / "model.gguf", gguf.GGMLQuantizationType.Q4_K)
    cut_everywhere(tmp_path / "model.gguf")
    gpt2_folder(tmp_path)
    cut_everywhere(tmp_path / "model.safetensors")


def test_cut_llama2c(tmp_path):
    path = tmp_path / "model.bin"
    path.write_bytes(vocabularies.data("stories260K.bin").read_bytes())
    cut_everywhere(path)


@pytest.mark.parametrize(
    "path, message", [("/nowhere/model.gguf", "no such file"), ("/dev/null", "/dev/null")]
)
def test_nothing_there(path, message):
    with pytest.raises(fk.Error, match=message):
        ModelFile(path)
