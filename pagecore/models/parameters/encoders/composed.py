"""Parameters of models that are made of two others: an encoder of text, images or sound, and a decoder.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pagecore.errors import UnsupportedOption
from pagecore.models.config_files.fields import Fields
from pagecore.models.encoders.bart_t5 import ENCODER_DECODERS
from pagecore.models.parameters.counting.encoder_parts import encoder_add, encoder_linear
from pagecore.models.parameters.counting.tally import Kind, Tally, check_stage
from pagecore.models.parameters.decoders.text_model import add_text_model
from pagecore.models.parameters.encoders.composed_encoders import COMPOSED_ENCODERS
from pagecore.models.parameters.encoders.cross_attention import add_cross_decoder
from pagecore.models.parameters.encoders.cross_layers import DecoderStage, add_cross_layers, add_tables
from pagecore.models.parameters.vision.radio import add_radio
from pagecore.storage import AttentionSpec, CrossSpec

__all__ = ["add_composed", "add_nemotron_parse"]

_Specs = Sequence[AttentionSpec | CrossSpec]
# Families of text models whose layers may have cross attention next to their own.
_CROSSED = ("bert", "camembert", "gpt2", "roberta", "xlm-roberta")


def add_composed(tally: Tally, whole: Fields, specs: _Specs, stage: range | None) -> None:
    """Add a model of two others, or a stage of its decoder; `specs` are those of the config.

    Raises
    ------
    UnsupportedOption
        The encoder or the decoder is one whose parameters are not known.
    """
    encoder, decoder = whole.inner("encoder"), whole.inner("decoder")
    for part, known in ((encoder, [*COMPOSED_ENCODERS]), (decoder, ["trocr", *_DECODERS])):
        if part.value("model_type") not in known:
            raise UnsupportedOption(
                f"{whole.source}: {part.describe('model_type')}, whose parameters cannot be counted; expected "
                f"{', '.join(known)}: pass weights= in bytes"
            )
    kind = decoder.value("model_type")
    if kind == "trocr":
        add_cross_decoder(tally, decoder, kind, specs, stage)
    else:
        _DECODERS[kind](tally, decoder, kind, specs, stage)
    if stage is None or stage.start == 0:
        inputs, hidden = COMPOSED_ENCODERS[encoder.value("model_type")](tally, encoder), decoder.integer("hidden_size")
        # transformers compares this size, the output of an adapter, but the layer reads `inputs` features.
        own = encoder.given("output_hidden_size")
        outputs = inputs if own is None else encoder.integer("output_hidden_size")
        if outputs != hidden and decoder.given("cross_attention_hidden_size") is None:
            tally.linear(inputs, hidden, bias=True)


def add_nemotron_parse(tally: Tally, whole: Fields, specs: _Specs, stage: range | None) -> None:
    """Add a RADIO tower, the neck that merges four of its patches, and an mBART without positions.

    Source: the model of vLLM.
    """
    decoder = whole.inner("decoder")
    _bart(tally, decoder, "mbart", specs, stage, has_positions=False)
    if stage is not None and stage.start > 0:
        return
    inputs, hidden = add_radio(tally, whole, "encoder"), decoder.integer("hidden_size")
    encoder_linear(tally, inputs, hidden, bias=True)
    encoder_linear(tally, 4 * hidden, hidden)
    encoder_linear(tally, 3 * inputs, hidden, bias=True)  # of the summaries of three teachers
    encoder_add(tally, 3 * 2 * hidden)


def _text_model(tally: Tally, decoder: Fields, kind: str, specs: _Specs, stage: range | None) -> None:
    """Add a BERT or a GPT-2 whose layers attend to the encoder, too."""
    config = {name: decoder.given(name) for name in decoder} | {"is_decoder": True, "add_cross_attention": False}
    add_text_model(tally, config, decoder, decoder, kind, stage, mtp=False)
    count = len(specs) // 2
    layers = len(check_stage(range(count) if stage is None else stage, count))
    hidden = decoder.integer("hidden_size")
    tally.linear(hidden, hidden, bias=True, copies=4 * layers)
    tally.norm(hidden, bias=True, copies=layers)


def _bart(
    tally: Tally, decoder: Fields, kind: str, specs: _Specs, stage: range | None, has_positions: bool = True
) -> None:
    """Add the decoder of a BART or an mBART."""
    decoder.defaults, decoder.aliases = {"max_position_embeddings": 1024}, ENCODER_DECODERS[kind].aliases
    hidden, width, count = decoder.integer("hidden_size"), decoder.integer("decoder_ffn_dim"), len(specs) // 2
    layers = check_stage(range(count) if stage is None else stage, count)
    own, cross = ([specs[layer + start] for layer in layers] for start in (0, count))
    part = DecoderStage(decoder, own, cross, layers.start == 0, layers.stop == count)
    add_cross_layers(tally, part, hidden, bias=True, output_bias=True)
    tally.linear(hidden, width, bias=True, copies=len(layers))
    tally.linear(width, hidden, bias=True, copies=len(layers))
    tally.norm(hidden, bias=True, copies=3 * len(layers) + part.is_first + (part.is_last and kind == "mbart"))
    is_tied = decoder.switch("tie_word_embeddings", True)
    add_tables(tally, part, decoder.integer("vocab_size"), is_tied=is_tied)
    if part.is_first and has_positions:
        tally.add((decoder.integer("max_position_embeddings") + 2) * hidden, Kind.EMBEDDING)


_DECODERS: Mapping[str, Callable[[Tally, Fields, str, _Specs, range | None], None]] = {
    **dict.fromkeys(_CROSSED, _text_model),
    **dict.fromkeys(("bart", "mbart"), _bart),
}
