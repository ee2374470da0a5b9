"""Scales of keys and values that cannot be, and files that are not a checkpoint."""

import json

import numpy as np
import pytest

from pagecore.errors import ShapeError, UnsupportedOption
from pagecore.models import ConfigError, read_kv_scales, specs_from_config
from tests.models.published import PUBLISHED
from tests.models.scale_files import pair, written

LLAMA = PUBLISHED["llama-3-8b"] | {"num_hidden_layers": 2}
FP8 = "float8_e4m3fn"
WEIGHT = {"model.layers.0.mlp.down_proj.weight_scale": 3.0}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"format": None}, "config: kv_scales of layer 0: key_scale is 0.5, but keys without a format take none"),
        ({"format": "int8_token"}, "layer 0: key_scale is 0.5, but format 'int8_token', which computes its scales"),
        ({"kv_scales": {0: (0.5, None)}}, "kv_scales of layer 0 have no value; pass kv_scales as a dict"),
        ({"kv_scales": {0: (None, 0.5)}}, "kv_scales of layer 0 have no key; pass kv_scales as a dict"),
        ({"kv_scales": {0: 0.5}}, r"kv_scales of layer 0 are 0.5; expected a pair of scales \(key, value\)"),
        ({"kv_scales": {-1: (1, 1)}}, "a layer of kv_scales is -1; it must be at least 0"),
        ({"kv_scales": {"0": (1, 1)}}, "a layer of kv_scales is .0.; expected an integer"),
        ({"kv_scales": {0: (-1.0, 1)}}, "layer 0: key_scale is -1.0; expected a number that is finite and above 0"),
        ({"kv_scales": {0: ((1, 2), 1)}}, "layer 0: key_scale has 2 entries; .* one per key-value head: 8"),
        ({"kv_scales": 0.5}, "kv_scales is 0.5; expected the path of a checkpoint, or a dict of .key, value. by layer"),
        ({"kv_scales": [(0.5, 0.5)] * 2}, "kv_scales is .*; expected the path of a checkpoint, or a dict"),
    ],
)
def test_scales_that_cannot_be_are_refused(options, reason):
    with pytest.raises((ShapeError, UnsupportedOption), match=reason):
        specs_from_config(**{"config": LLAMA, "format": FP8, "kv_scales": {0: (0.5, 0.25)}} | options)


def entry(**changes):
    return {"model.layers.0.self_attn.k_scale": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]} | changes}


@pytest.mark.parametrize(
    ("tensors", "changes", "reason"),
    [
        (WEIGHT, {}, "has no scales of keys and values, such as k_scale; leave kv_scales out"),
        (pair(0, np.zeros(1, np.uint8)), {}, r"k_scale has dtype .U8.; F64, F32, F16, BF16 are supported"),
        (pair(0, np.ones(70000, np.float32)), {}, r"has shape \[70000\]; at most 65536 numbers are read"),
        (
            pair(0) | {"model.layers.0.self_attn.k_proj.k_scale": 1.0},
            {},
            "has two scales of a layer, .*k_proj.k_scale",
        ),
        (pair(0) | {"draft.layers.0.self_attn.k_scale": 1.0}, {}, "has scales of several models, draft.*model"),
        (pair(0, value=np.nan), {}, "v_scale is nan; expected a number that is finite and above 0"),
        (pair(0, -1.0), {}, "k_scale is -1.0; expected"),
        (pair(0, np.array([1.0, 0.0])), {}, r"k_scale\[1\] is 0.0; expected"),
        (pair(0, np.ones(0, np.float32)), {}, "k_scale has no numbers; pass kv_scales as a dict"),
        (pair(0), entry(shape=[3]), r"has shape \[3\] and bytes 0 to 4, which do not match F32"),
        (pair(0), entry(shape=[-1]), r"has shape \[-1\] and bytes 0 to 4"),
        (pair(0), entry(data_offsets=[-4, 0]), "bytes -4 to 0, which do not match"),
        (pair(0), entry(data_offsets=[8, 12]), "ends within model.layers.0.self_attn.k_scale; load the file again"),
        (pair(0), entry(data_offsets=[10**30, 10**30 + 4]), "a.safetensors cannot be read: "),
        (pair(0), entry(shape=1), "expected dtype, shape and data_offsets"),
        (pair(0), entry(shape=[1.0]), "expected dtype, shape and data_offsets"),
        (pair(0), entry(data_offsets=[0]), "expected dtype, shape and data_offsets"),
        (pair(0), entry(dtype=["F32"]), "has dtype .*F32.*; F64, F32, F16, BF16 are supported"),
    ],
)
def test_files_that_cannot_be_read_are_refused(tensors, changes, reason, tmp_path):
    with pytest.raises(ConfigError, match=reason):
        read_kv_scales(written(tmp_path / "a.safetensors", tensors, **changes))


def by_layer(scales):
    return b'{"kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {' + scales + b"}}}}"


TWICE = b'{"a.k_scale": {}, "a.k_scale": {}}'
DUPLICATE = len(TWICE).to_bytes(8, "little") + TWICE


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.safetensors", b"", "is not a safetensors file: its header would have 0 bytes"),
        ("a.safetensors", b"\xff" * 64, "is not a safetensors file: its header would have"),
        ("a.safetensors", (99).to_bytes(8, "little") + b"{}", "ends within its header of 99 bytes"),
        ("a.safetensors", (2).to_bytes(8, "little") + b"{]", "is not JSON"),
        ("a.safetensors", (2).to_bytes(8, "little") + b"[]", r"holds \[\]; expected a JSON object"),
        ("a.json", b"{}", "kv_cache is null; expected scaling_factor, by rank and layer"),
        ("a.json", b'{"kv_cache": {"scaling_factor": {"0": 1}}}', "expected scaling_factor, by rank and layer"),
        ("a.json", b'{"kv_cache": {"dtype": "int8", "scaling_factor": {"0": {"0": 1}}}}', "dtype is .int8.; expected"),
        (
            "a.json",
            b'{"kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {"0": 1}, "1": {"0": 2}}}}',
            "has other scales for other ranks; pass kv_scales as a dict",
        ),
        ("a.json", b'{"kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {"x": 1}}}}', "has the layer .x."),
        ("a.json", b'{"kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {"0": 0}}}}', "layer 0 is 0.0"),
        ("a.json", by_layer(b'"' + b"9" * 5000 + b'": 1'), "has the layer .99"),
        ("a.json", by_layer(b'"00": 1'), "has the layer .00.; expected an integer"),
        ("a.json", by_layer(b'"0": 1, "0": 2'), "has two values of .0."),
        ("a.json", by_layer(b'"0": null'), "layer 0 is null; expected a number"),
        ("a.json", by_layer(b'"0": true'), "layer 0 is true; expected a number"),
        ("a.json", by_layer(b'"0": NaN'), "layer 0 is nan; expected a number that is finite"),
        ("a.json", by_layer(b""), "has no scales of keys and values"),
        ("a.safetensors", DUPLICATE, "has two values of .a.k_scale."),
        ("model.safetensors.index.json", b"{}", "kv_cache is null"),
    ],
)
def test_bytes_that_are_no_scales_are_refused(name, content, reason, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=reason):
        read_kv_scales(tmp_path / name)


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "", "..", 3, ["a"], {"x": 1}])
def test_an_index_names_files_of_its_own_folder(file, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(pair(0), file)}))
    with pytest.raises(ConfigError, match=r"names the file .*; expected one of its own folder"):
        read_kv_scales(tmp_path)


def test_paths_without_a_checkpoint_are_refused(tmp_path):
    for path, reason in [
        (tmp_path, "has no safetensors files; pass the folder of a checkpoint"),
        (tmp_path / "missing.safetensors", "cannot be read: No such file or directory"),
        (tmp_path / "missing.json", "cannot be read: No such file or directory"),
    ]:
        with pytest.raises(ConfigError, match=reason):
            read_kv_scales(path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ConfigError, match="weight_map is null; expected the file of each tensor"):
        read_kv_scales(tmp_path)
