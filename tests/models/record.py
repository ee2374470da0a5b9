"""Write attended.json, the layers that transformers builds from the published configs.

Run manually, with torch and transformers installed:

    python -m tests.models.record

Every model is built on torch's meta device (no weights). Heads, dims and scale are read from its attention layers; the
window is counted in the mask that transformers makes for the layer.
"""

import copy
import inspect
import json
from pathlib import Path

from pagecore.models.multimodal.text_fields import RENAMED
from tests.models.earlier import EARLIER_TYPES
from tests.models.meta import on_meta_device
from tests.models.published import PUBLISHED
from tests.models.record_earlier import earlier_layer, modules_of
from tests.passing import passing

FILE = Path(__file__).with_name("attended.json")


def attended(config):
    """Return the attributes of each attention layer of the text model."""
    from transformers import AutoModel, AutoModelForCausalLM

    config = copy.deepcopy(config.get_text_config())
    config.num_local_experts = config.num_experts = 2  # slow to build, and not part of attention
    config._attn_implementation = "eager"
    with on_meta_device():
        kind = AutoModelForCausalLM if type(config) in AutoModelForCausalLM._model_mapping else AutoModel
        model = kind.from_config(config)
    if config.model_type in EARLIER_TYPES and modules_of(model):
        layers = [earlier_layer(config, module) for module in modules_of(model)]
        kinds = getattr(config, "layer_types", None)
        for each, module, kind in zip(layers, modules_of(model), kinds or (), strict=kinds is not None):
            each["window"] = window(config, module, kind)
        return layers
    modules = [module for module in model.modules() if hasattr(module, "scaling") and hasattr(module, "layer_idx")]
    return [layer(config, module) for module in modules]


def layer(config, module):
    kind = (getattr(config, "layer_types", None) or [None] * config.num_hidden_layers)[module.layer_idx]
    if hasattr(module, "kv_b_proj"):
        return latent_layer(module)
    head_dim = getattr(module, "head_dim", None) or module.head_size
    if hasattr(module, "kv_proj"):
        heads, kv_heads = module.num_heads, module.num_key_value_heads
    elif hasattr(module, "k_proj"):
        kv_heads = module.k_proj.out_features // head_dim
        heads = module.q_proj.out_features // head_dim
    elif hasattr(module, "qkv_proj"):
        heads = module.o_proj.in_features // head_dim
        kv_heads = (module.qkv_proj.out_features // head_dim - heads) // 2
    elif hasattr(module, "c_attn"):
        heads = kv_heads = module.c_attn.nf // (3 * head_dim)
    else:
        heads = kv_heads = module.query_key_value.out_features // (3 * head_dim)
    v_head_dim = getattr(module, "v_head_dim", head_dim)
    return ({} if v_head_dim == head_dim else {"v_head_dim": v_head_dim}) | {
        "num_query_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "scale": module.scaling,
        "softcap": getattr(module, "attn_logit_softcapping", None) or 0.0,
        "window": window(config, module, kind),
        "sinks": module.sinks.numel() if getattr(module, "sinks", None) is not None else None,
    }


def latent_layer(module):
    latent, width = module.kv_b_proj.in_features, module.kv_a_proj_with_mqa.out_features
    return {
        "num_query_heads": module.o_proj.in_features // module.v_head_dim,
        "latent_dim": latent,
        "rope_dim": width - latent,
        "scale": module.scaling,
        "window": None,
        "index_dim": module.indexer.wk.out_features if getattr(module, "indexer", None) is not None else None,
    }


def window(config, module, kind):
    """Return the number of keys that the last query attends to in the mask of the layer; None for all keys."""
    import torch
    from transformers import masking_utils

    source = inspect.getsource(inspect.getmodule(type(module)))
    slides = kind == "sliding_attention"
    if kind is None or not ("layer_types[i]" in source or hasattr(module, "layer_type")):
        slides = "create_sliding_window_causal_mask" in source and getattr(config, "sliding_window", None) is not None
    make = masking_utils.create_sliding_window_causal_mask if slides else masking_utils.create_causal_mask
    length = (config.sliding_window or 0) + 10 if slides else 10
    if length > 5000:  # the mask would take gigabytes; the rule is the same
        return config.sliding_window
    mask = make(
        config=config,
        inputs_embeds=torch.zeros(1, length, 1),
        attention_mask=None,
        **passing(None),
        position_ids=torch.arange(length)[None],
    )
    seen = int((mask[0, 0, -1] == 0).sum())
    return None if seen == length else seen


def longest(config):
    return getattr(config, "max_position_embeddings", getattr(config, "max_seq_len", None))


def transformers_config(published):
    """Return the config under the names of transformers."""
    config = {name: value for name, value in copy.deepcopy(published).items() if name != "quantization_config"}
    return config | {"model_type": RENAMED.get(config["model_type"], config["model_type"])}


def record():
    from transformers import AutoConfig

    result = {}
    for name, published in PUBLISHED.items():
        config = AutoConfig.for_model(**transformers_config(published))
        layers = attended(config)
        dtype = config.dtype
        result[name] = {
            "to_diff_dict": config.to_diff_dict(),
            "to_dict_adds": {key: value for key, value in config.to_dict().items() if key not in config.to_diff_dict()},
            "dtype": None if dtype is None else str(dtype).removeprefix("torch."),
            "max_length": longest(config.get_text_config()),
            "kinds": (kinds := [kind for i, kind in enumerate(layers) if kind not in layers[:i]]),
            "layers": [kinds.index(layer) for layer in layers],
        }
        print(name, len(layers), layers[0], layers[-1]["window"])
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(case)}" for name, case in result.items())
    FILE.write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    record()
