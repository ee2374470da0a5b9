"""Decoders with cross attention whose own layers are read like those of a decoder without an encoder.

`encoder_decoder` has the kin of BART and of T5. Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pagecore.errors import UnsupportedOption
from pagecore.models.config_files.fields import Fields
from pagecore.models.encoders.bart_t5 import ENCODER_DECODERS, OF_THE_ENCODER, Encoder, decoder_specs
from pagecore.models.families.attention_specs import SpecOptions, attention_specs
from pagecore.models.families.common_fields import GEMMA_2, GEMMA_3, GROUPED
from pagecore.models.families.family import Family, Heads
from pagecore.models.families.registry import FAMILIES
from pagecore.models.layer_types import FULL
from pagecore.models.layers.score_scales import root_of_scalar, unscaled
from pagecore.models.layers.windows import all_but_every_sixth_layer, every_other_layer
from pagecore.storage import AttentionSpec, CrossSpec

__all__ = ["COMPOSED", "CROSS_DECODERS", "composed_specs", "cross_decoder_specs"]

Source = Callable[[Fields], int | None]


def _no_limit(_whole: Fields) -> None:
    """Return None: the config does not limit the tokens of the encoder."""


def _in(path: str, name: str, default: int | None = None) -> Source:
    """Return a reader of a field of a part of the config, whose names are joined by dots, or `default`."""

    def source(whole: Fields) -> int | None:
        part = whole
        for inner in path.split("."):
            if not isinstance(part.given(inner), Mapping):
                return default
            part = part.inner(inner)
        return default if part.given(name) is None else part.integer(name)

    return source


def _of(name: str) -> Source:
    """Return a reader of a field of the whole config; None if it is null or missing."""
    return lambda whole: None if whole.given(name) is None else whole.integer(name)


def _patches(path: str, default: tuple[int, int] | None = None) -> Source:
    """Return a reader of the patches of an image of a vision tower, and its class token."""

    def source(whole: Fields) -> int | None:
        if not isinstance(whole.given(path), Mapping):
            return None
        part = whole.inner(path)
        if default is not None:
            part.defaults = {"image_size": default[0], "patch_size": default[1]}
        elif any(type(part.given(name)) is not int for name in ("image_size", "patch_size")):
            return None
        return (part.integer("image_size") // part.integer("patch_size")) ** 2 + 1

    return source


def _merged_patches(whole: Fields) -> int | None:
    """Return the tokens of an image of Nemotron Parse: patches, four of a line as one, and a summary."""
    if whole.given("image_size") is None:
        return None
    sides = whole.integers("image_size")
    if len(sides) != 2:
        whole.refuse(f"{whole.describe('image_size')}; it must be the height and the width of an image")
    patch = 16
    if isinstance(whole.given("encoder"), Mapping) and whole.inner("encoder").given("patch_size") is not None:
        patch = whole.inner("encoder").integer("patch_size")
    return (sides[0] // patch) * (sides[1] // patch // 4) + 1


def _same_heads(_fields: Fields, own: AttentionSpec) -> Heads:
    return Heads(own.num_query_heads or own.num_kv_heads, own.num_kv_heads, own.head_dim)


def _heads_of_dia(fields: Fields, _own: AttentionSpec) -> Heads:
    names = ("cross_num_attention_heads", "cross_num_key_value_heads", "cross_head_dim")
    queries, kv_heads, dim = map(fields.integer, names)
    if queries % kv_heads:
        fields.refuse(f"{fields.describe(names[1])}; it must divide {fields.name(names[0])}, {queries}")
    return Heads(queries, kv_heads, dim)


@dataclass(frozen=True)
class CrossDecoder:
    """A family whose decoder layers all attend to an encoder, too.

    Parameters
    ----------
    family : Family
        Fields of the decoder's own layers.
    path : str
        Field with the config of the decoder; "" if its fields are those of the model.
    sizes : mapping
        Sizes that a nested config may leave out.
    source : callable
        Returns the most tokens of the encoder from the fields of the model, or None.
    heads : callable
        Returns the heads of cross attention from the decoder's fields and the spec of the layer itself.
    """

    family: Family
    path: str = ""
    sizes: Mapping[str, object] = field(default_factory=dict)
    source: Source = _no_limit
    heads: Callable[[Fields, AttentionSpec], Heads] = _same_heads


def _sizes(hidden: int, layers: int, heads: int) -> Mapping[str, object]:
    return {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}


_DECODER = {"num_hidden_layers": "decoder_layers", "num_attention_heads": "decoder_attention_heads"}
_OF_T5 = {"head_dim": "d_kv", "num_hidden_layers": "num_layers", "num_attention_heads": "num_heads"}
_MOONSHINE = {
    "num_hidden_layers": "decoder_num_hidden_layers",
    "num_attention_heads": "decoder_num_attention_heads",
    "num_key_value_heads": "decoder_num_key_value_heads",
}
_SEAMLESS = CrossDecoder(Family({}, aliases=_DECODER), source=_of("max_position_embeddings"))
_SIZES_OF_GEMMA = _sizes(2304, 26, 8)

CROSS_DECODERS: Mapping[str, CrossDecoder] = {
    "blip": CrossDecoder(Family({}), "text_config", _sizes(768, 12, 8), _patches("vision_config", (384, 16))),
    "canary": CrossDecoder(
        Family({**GROUPED, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 1024}),
        "decoder_config",
        _sizes(1024, 8, 8),
        _in("encoder_config", "max_position_embeddings"),
    ),
    "cohere_asr": CrossDecoder(Family(GROUPED), source=_in("encoder_config", "max_position_embeddings")),
    "dia": CrossDecoder(
        Family(
            {
                "num_key_value_heads": 4,
                "head_dim": 128,
                "cross_num_attention_heads": 16,
                "cross_num_key_value_heads": 16,
                "cross_head_dim": 128,
                "max_position_embeddings": 3072,
            },
            scale=unscaled,
        ),
        "decoder_config",
        _sizes(2048, 18, 16),
        _in("encoder_config", "max_position_embeddings", 1024),
        _heads_of_dia,
    ),
    "moonshine": CrossDecoder(Family({"num_key_value_heads": None}, aliases=_MOONSHINE)),
    "moonshine_streaming": CrossDecoder(Family(GROUPED), source=_in("encoder_config", "max_position_embeddings")),
    "musicgen": CrossDecoder(Family({}), "decoder", _sizes(1024, 24, 16)),
    "pix2struct": CrossDecoder(
        Family({"head_dim": 64}, scale=unscaled, aliases=_OF_T5),
        "text_config",
        _sizes(768, 12, 12),
        _in("vision_config", "seq_len", 4096),
    ),
    "pp_formulanet": CrossDecoder(
        Family({}, aliases={"hidden_size": "d_model", **_DECODER}),
        "text_config",
        {**_sizes(512, 8, 16), "max_position_embeddings": 2560},
    ),
    "seamless_m4t": _SEAMLESS,
    "seamless_m4t_v2": _SEAMLESS,
    # Encoder and decoder take speech or text; speech is longer.
    "speecht5": CrossDecoder(
        Family({}, aliases={**_DECODER, "max_position_embeddings": "max_speech_positions"}),
        source=_of("max_speech_positions"),
    ),
    "t5gemma": CrossDecoder(
        Family(GEMMA_2, every_other_layer, scale=root_of_scalar),
        "decoder",
        _SIZES_OF_GEMMA,
        _in("encoder", "max_position_embeddings"),
    ),
    "t5gemma2": CrossDecoder(
        Family({**GEMMA_3, "attn_logit_softcapping": None}, all_but_every_sixth_layer, scale=root_of_scalar),
        "decoder",
        _SIZES_OF_GEMMA,
        _in("encoder.text_config", "max_position_embeddings"),
    ),
    "trocr": CrossDecoder(Family({}, aliases={"hidden_size": "d_model", **_DECODER})),
}
# Models made of two others, with the field that holds the decoder's config.
COMPOSED: Mapping[str, str] = {
    **dict.fromkeys(("encoder-decoder", "speech-encoder-decoder", "vision-encoder-decoder"), "decoder"),
    "florence2": "text_config",
    "nemotron_parse": "decoder",
}


def cross_decoder_specs(
    whole: Fields, model_type: str, asked: SpecOptions
) -> tuple[tuple[AttentionSpec, ...], int | None]:
    """Return the specs of a decoder's own layers, then of its cross-attention layers, and its maximum length.

    Raises
    ------
    ConfigError, UnsupportedOption
        As `specs_from_config`.
    """
    crossed = CROSS_DECODERS[model_type]
    fields = whole.inner(crossed.path) if crossed.path else whole
    fields.sizes = crossed.sizes
    return _specs(fields, model_type, crossed.family, asked, crossed.source(whole), crossed.heads)


def composed_specs(whole: Fields, model_type: str, asked: SpecOptions) -> tuple[tuple[AttentionSpec, ...], int | None]:
    """Return the specs of the decoder of a model that is made of two others, as `cross_decoder_specs`."""
    fields = whole.inner(COMPOSED[model_type])
    if model_type == "florence2":  # a BART whose encoder reads images, too
        return decoder_specs(fields, "bart", asked.dtype, asked.format)
    if model_type == "nemotron_parse":  # an mBART without positions
        encoder = Encoder(_merged_patches(whole))
        specs, _ = decoder_specs(fields, "mbart", asked.dtype, asked.format, encoder=encoder)
        return specs, _of("max_sequence_length")(whole)
    kind, source = fields.value("model_type"), _in("encoder", "max_position_embeddings")(whole)
    source = _patches("encoder")(whole) if source is None else source
    if isinstance(kind, str) and kind in ENCODER_DECODERS:
        return decoder_specs(fields, kind, asked.dtype, asked.format, encoder=Encoder(source))
    if isinstance(kind, str) and kind in CROSS_DECODERS:
        return _specs(fields, kind, CROSS_DECODERS[kind].family, asked, source, _same_heads)
    if not isinstance(kind, str) or kind not in FAMILIES or FAMILIES[kind].states or FAMILIES[kind].stores_latents:
        raise UnsupportedOption(
            f"{whole.source}: {fields.describe('model_type')}, a decoder whose cross attention is not supported; pass "
            "a list of specs"
        )
    if fields.given("add_cross_attention") is not True:
        raise UnsupportedOption(
            f"{whole.source}: {fields.describe('add_cross_attention')}, so the decoder does not attend to the encoder; "
            "set it to true"
        )
    return _specs(fields, kind, FAMILIES[kind], asked, source, _same_heads)


def _specs(
    fields: Fields,
    model_type: str,
    family: Family,
    asked: SpecOptions,
    source: int | None,
    heads: Callable[[Fields, AttentionSpec], Heads],
) -> tuple[tuple[AttentionSpec, ...], int | None]:
    fields.defaults = {"max_position_embeddings": None, "add_cross_attention": None, **family.defaults}
    fields.aliases = family.aliases
    fields.check_aliases(but=OF_THE_ENCODER)
    kinds = [FULL] * family.count_layers(fields)
    own = [
        spec for spec in attention_specs(fields, family, model_type, kinds, asked) if isinstance(spec, AttentionSpec)
    ]
    cross: list[AttentionSpec] = []
    for spec in own:
        each = heads(fields, spec)
        cross.append(
            CrossSpec(
                each.kv_heads,
                each.head_dim,
                dtype=spec.dtype,
                num_query_heads=each.queries,
                scale=spec.scale,
                softcap=spec.softcap,
                format=spec.format,
                max_tokens=source,
            )
        )
    longest = fields.value("max_position_embeddings")
    return (*own, *cross), None if longest is None else fields.integer("max_position_embeddings")
