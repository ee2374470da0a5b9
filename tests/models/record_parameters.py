"""Write parameters.json, the number of parameters of the models that transformers builds from the published configs.

Run manually, with torch and transformers installed:

    python -m tests.models.record_parameters

Every model is built whole on torch's meta device (no weights), with its vision tower or its encoder.
"""

import json
from pathlib import Path

from pagecore.models.encoders.bart_t5 import ENCODER_DECODERS
from tests.models.hybrids import HYBRIDS
from tests.models.meta import on_meta_device
from tests.models.published import LLAMA_4_SCOUT, PUBLISHED
from tests.models.record import transformers_config

FILE = Path(__file__).with_name("parameters.json")
# Models whose configs attended.json and stored.json do not have.
OTHERS = {"llama-4-scout": LLAMA_4_SCOUT} | {name: {"model_type": name} for name in ENCODER_DECODERS}


def weights_in(model):
    """Return the parameters of a module; tied ones count once.

    Scales of rotary embeddings, which transformers before 5.24 keeps as buffers, are parameters.
    """
    scales = [buffer.numel() for name, buffer in model.named_buffers() if name.endswith("rotary_emb.alpha")]
    return sum(parameter.numel() for parameter in model.parameters()) + sum(scales)


def count(config):
    """Return the parameters of the model that generates text."""
    from transformers import (
        AutoModel,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForSeq2SeqLM,
        AutoModelForSpeechSeq2Seq,
    )

    kinds = [AutoModelForImageTextToText, AutoModelForSpeechSeq2Seq, AutoModelForSeq2SeqLM, AutoModelForCausalLM]
    kind = next((each for each in kinds if type(config) in each._model_mapping), AutoModel)
    with on_meta_device():
        return weights_in(kind.from_config(config))


def record():
    from transformers import AutoConfig

    result = {}
    for name, published in {**PUBLISHED, **HYBRIDS, **OTHERS}.items():
        config = AutoConfig.for_model(**transformers_config(published))
        result[name] = {"parameters": count(config)}
        if name in OTHERS:
            result[name]["config"] = config.to_dict()
        print(name, result[name]["parameters"], flush=True)
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(case)}" for name, case in result.items())
    FILE.write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    record()
