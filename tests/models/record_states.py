"""Write stored.json, the layers that transformers builds from the published configs of models with states.

Run manually, with torch and transformers installed:

    python -m tests.models.record_states

Every model is built on torch's meta device (no weights). Heads, dims and scale are read from its attention layers, and
channels, kernel and state from its convolutions and recurrences.
"""

import copy
import json
from pathlib import Path

from tests.models.hybrids import HYBRIDS
from tests.models.meta import on_meta_device
from tests.models.record import latent_layer

FILE = Path(__file__).with_name("stored.json")


def stored(config):
    """Return, for each layer of the text model, the attributes of its attention and of its state; None without one."""
    from transformers import AutoModel, AutoModelForCausalLM

    config = copy.deepcopy(config.get_text_config())
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if hasattr(config, name):
            setattr(config, name, 4)  # slow to build, and not part of attention
    config.num_experts_per_tok = 2
    config._attn_implementation = "eager"
    with on_meta_device():
        kind = AutoModelForCausalLM if type(config) in AutoModelForCausalLM._model_mapping else AutoModel
        model = kind.from_config(config)
    return [[parts(layer, "scaling", attention), parts(layer, None, state)] for layer in decoder(model)]


def decoder(model):
    return max((m for m in model.modules() if type(m).__name__ == "ModuleList"), key=len)


def parts(layer, marker, read):
    """Return what `read` finds in the modules of a layer, shared ones included."""
    for module in layer.modules():
        if marker is None and isinstance(getattr(module, "conv_kernel_size", None) or convolution(module), int):
            return read(module)
        if marker is not None and hasattr(module, marker) and hasattr(module, "layer_idx"):
            return read(module)
    return None


def convolution(module):
    return module.L_cache if hasattr(module, "L_cache") else None


def attention(module):
    if hasattr(module, "kv_b_proj"):
        return {name: value for name, value in latent_layer(module).items() if name not in ("window", "index_dim")}
    out = module.out_proj if hasattr(module, "out_proj") else module.o_proj
    window = getattr(module, "sliding_window", None)
    return ({} if window is None else {"window": window}) | {
        "num_query_heads": out.in_features // module.head_dim,
        "num_kv_heads": module.k_proj.out_features // module.head_dim,
        "head_dim": module.head_dim,
        "scale": module.scaling,
    }


def state(module):
    """Return the channels and the kernel of a convolution, and the shape of the state, in the order of engines."""
    conv = getattr(module, "conv1d", None) or module.conv
    temporal = None
    if hasattr(module, "head_v_dim"):
        temporal = [module.num_v_heads, module.head_v_dim, module.head_k_dim]
    elif hasattr(module, "qkv_dim"):
        temporal = [module.num_heads, module.head_dim, module.head_dim]
    elif hasattr(module, "num_heads"):
        temporal = [module.num_heads, module.head_dim, module.ssm_state_size]
    elif hasattr(module, "ssm_state_size"):
        temporal = [module.intermediate_size, module.ssm_state_size]
    return {"conv": [conv.in_channels, conv.kernel_size[0]], "temporal": temporal}


def record():
    from transformers import AutoConfig

    result = {}
    for name, published in HYBRIDS.items():
        config = AutoConfig.for_model(**copy.deepcopy(published))
        layers = stored(config)
        dtype = config.get_text_config().dtype
        result[name] = {
            "to_diff_dict": config.to_diff_dict(),
            "to_dict_adds": {key: value for key, value in config.to_dict().items() if key not in config.to_diff_dict()},
            "dtype": None if dtype is None else str(dtype).removeprefix("torch."),
            "kinds": (kinds := [kind for i, kind in enumerate(layers) if kind not in layers[:i]]),
            "layers": [kinds.index(layer) for layer in layers],
        }
        print(name, len(layers), kinds)
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(case)}" for name, case in result.items())
    FILE.write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    record()
