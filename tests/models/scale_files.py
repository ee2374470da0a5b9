"""Files with scales of keys and values."""

import json

import numpy as np

__all__ = ["pair", "written"]

DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "uint8": "U8"}


def written(path, tensors, **changes):
    """Write a safetensors file of arrays by name; `changes` replace entries of its header."""
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, values in tensors.items():
        array = np.asarray(values, None if isinstance(values, np.ndarray) else np.float32)
        offsets = [len(data), len(data) + array.nbytes]
        header[name] = {"dtype": DTYPES[str(array.dtype)], "shape": array.shape, "data_offsets": offsets}
        data += array.tobytes()
    text = json.dumps(header | changes).encode() + b"  "
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def pair(layer, key=0.5, value=0.25):
    return {f"model.layers.{layer}.self_attn.k_scale": key, f"model.layers.{layer}.self_attn.v_scale": value}
