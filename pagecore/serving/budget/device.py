"""Plan of a device: weights and reserves first, then the cache in what is left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from pagecore.errors import NotEnoughMemory, ShapeError
from pagecore.models import ModelConfig, read_model_config
from pagecore.models.layers.sharing import moved
from pagecore.models.parameters import (
    Parameters,
    VisionTower,
    WeightFormat,
    count_parameters,
    medusa_bytes,
    mtp_specs,
    vision_tower,
    weight_format,
)
from pagecore.serving.budget.advice import advise, advise_contexts
from pagecore.serving.budget.images import ImageMemory, image_memory
from pagecore.serving.budget.options import Config, DeviceOptions, device_bytes
from pagecore.serving.budget.presets import GIB, LEAST_CHUNK, MIB, Preset, draft_bytes, reserved_bytes, vision_factor
from pagecore.serving.budget.stages import Stage, stages_of
from pagecore.serving.memory_classes import DevicePlan, MemoryClass
from pagecore.serving.plans import MemoryPlan, ModelPlan
from pagecore.storage import Alias, Spec
from pagecore.storage.checks import require_int

__all__ = ["plan_device"]

Planner = Callable[[Any, int, int], MemoryPlan]


@dataclass(frozen=True, slots=True)
class _Weights:
    """Weights of a stage on one rank; `parameters` and `format` are None for bytes that the caller gave."""

    nbytes: int
    parameters: Parameters | None = None
    format: WeightFormat | None = None

    @property
    def certainty(self) -> str:
        if self.parameters is None or self.format is None:
            return "given"
        text = f"{self.parameters.total:,} parameters in {self.format.name}"
        if not self.format.is_quantised:
            return f"exact: {text}"
        if not self.format.is_read:
            return f"estimate: {text} with scales; layers that a checkpoint leaves unquantised are larger"
        left = self.format.count_unquantised(self.parameters)
        return f"by quantization_config: {text} with scales" + (f", {left:,} of layers unquantised" if left else "")


@dataclass(frozen=True, slots=True)
class _Engine:
    """Arguments that the plans of all stages share."""

    config: Config
    model: ModelConfig
    memory: int
    ranks: int
    options: DeviceOptions
    preset: Preset
    tower: VisionTower | None
    plan: Planner


def plan_device(
    config: Config, model: ModelConfig, memory: int, ranks: int, options: DeviceOptions | None, plan: Planner
) -> ModelPlan:
    """Return the plan of a device with `memory` bytes: of the worst one, if there are pipeline stages.

    Parameters
    ----------
    config : str, path or dict
    model : ModelConfig
        The config as read for the cache.
    memory : int
        Bytes of the device.
    ranks : int
        Tensor-parallel ranks of a stage.
    options : DeviceOptions or None
    plan : callable
        Plans a cache from layers, bytes and ranks.

    Raises
    ------
    NotEnoughMemory
        Weights and reserves leave no memory for the cache.
    """
    options = DeviceOptions() if options is None else options
    ranks, groups = require_int("ranks", ranks), options.data_parallel
    if ranks % groups:
        raise ShapeError(f"data_parallel is {groups}; it must divide ranks, which is {ranks}")
    engine = _Engine(config, model, memory, ranks, options, options.preset(memory, ranks), vision_tower(config), plan)
    plans = [each for stage in stages_of(model, options.pipeline_stages) if (each := _plan_stage(engine, stage))]
    worst = min(plans, key=_room)
    if worst.device is None or len(plans) == 1 or worst.device.parameters is None:
        return worst
    whole = count_parameters(config, mtp=options.draft == "mtp").total
    return replace(worst, device=replace(worst.device, parameters=whole))


def _room(plan: ModelPlan) -> tuple[int, int]:
    """Return the requests that a stage holds, of the length that is the worst, and its bytes for the cache."""
    return min((context.best_requests for context in plan.memory.contexts), default=0), plan.memory.memory


def _plan_stage(engine: _Engine, stage: Stage) -> ModelPlan | None:
    """Return the plan of one stage; None for a stage of several whose layers store nothing."""
    options, memory, groups = engine.options, engine.memory, engine.options.data_parallel
    weights = _weights(engine, stage)
    reserved = _reserved(engine, stage)
    tower = engine.tower
    itemsize = 2 if weights.format is None else weights.format.other_bits // 8
    image = image_memory(tower, options.image_size, itemsize) if tower is not None and stage.is_first else None
    factor = 1.0 if tower is None else vision_factor(tower.layers, tower.hidden)
    fraction = options.static_fraction
    if fraction is None:
        fraction = max(0, memory - reserved) / memory * factor if memory else 0.0
    static = int(memory * fraction)
    if static <= weights.nbytes:
        raise _missing(engine, stage, static, weights)
    layers = _stored(engine, stage)
    if not layers and stage.count > 1:
        return None
    cache = engine.plan(layers, static - weights.nbytes, engine.ranks // groups)
    classes = (
        MemoryClass("weights", weights.nbytes, "when the model is loaded, for good", weights.certainty),
        MemoryClass("KV", cache.memory, "when the cache is made, for good", "exact: the blocks and states below"),
        _activations(reserved, engine.preset, options),
        *_images(image, options, "no vision tower" if tower is None else "the first stage has the vision tower"),
    )
    device = DevicePlan(
        device_memory=memory,
        ranks=engine.ranks,
        data_parallel=groups,
        pipeline_stages=stage.count,
        stage=stage.number,
        layers=(stage.layers.start, stage.layers.stop),
        chunked_prefill_size=engine.preset.chunked_prefill_size,
        graph_batch=engine.preset.graph_batch,
        static_fraction=fraction,
        vision_factor=factor,
        parameters=None if weights.parameters is None else weights.parameters.total,
        weight_format=None if weights.format is None else weights.format.name,
        classes=classes,
    )
    least = min((_bytes_of(cache, number) for number in range(len(cache.contexts))), default=0)
    per_image = 0 if image is None else image.activations + image.pixels + image.embeddings
    found = advise(device, weights.nbytes + least, 0 if image is None else options.images, per_image)
    if not found and any(context.best_requests == 0 for context in cache.contexts):
        found = advise_contexts(device, [_bytes_of(cache, number) for number in range(len(cache.contexts))])
    return ModelPlan(engine.model, cache, replace(device, advice=found))


def _stored(engine: _Engine, stage: Stage) -> tuple[Spec | Alias, ...]:
    """Return the specs of the layers of a stage, those of a draft last."""
    model, options = engine.model, engine.options
    if stage.count == 1:
        layers: tuple[Spec | Alias, ...] = model.layers
    else:
        layers = model.specs_of_stage(stage.layers)
    if not stage.is_last:
        return layers
    if options.draft == "mtp":
        return (*layers, *mtp_specs(engine.config, model.layers))
    if options.draft_model is None or options.draft == "medusa":
        return layers
    return (*layers, *moved(read_model_config(options.draft_model).layers, len(layers)))


def _weights(engine: _Engine, stage: Stage) -> _Weights:
    options, config = engine.options, engine.config
    if not options.counts_parameters:
        return _Weights(device_bytes("weights", options.weights))
    format = weight_format(config, str(options.weights))
    layers = None if stage.count == 1 else stage.layers
    parameters = count_parameters(config, layers=layers, mtp=options.draft == "mtp")
    return _Weights(format.nbytes(parameters, engine.ranks, options.data_parallel), parameters, format)


def _reserved(engine: _Engine, stage: Stage) -> int:
    """Return the reserved bytes; the reserve of a draft model holds its weights at least."""
    options, kind = engine.options, engine.options.draft_kind
    reserved = reserved_bytes(
        engine.preset, ranks=engine.ranks, stages=stage.count, data_parallel=options.data_parallel, draft=kind
    )
    if options.draft_model is None or not stage.is_last:
        return reserved
    if kind == "medusa":
        draft = medusa_bytes(options.draft_model, engine.config, engine.ranks)
    else:
        draft = weight_format(options.draft_model).nbytes(count_parameters(options.draft_model), engine.ranks)
    return reserved + max(0, draft - draft_bytes(kind))


def _activations(reserved: int, preset: Preset, options: DeviceOptions) -> MemoryClass:
    parts = [f"prefill of {preset.chunked_prefill_size:,} tokens", f"graphs of up to {preset.graph_batch:,} requests"]
    if options.data_parallel > 1:
        parts.append(f"{options.data_parallel} groups of attention")
    if options.draft_kind is not None:
        parts.append(f"a draft ({options.draft_kind})")
    return MemoryClass("activations", reserved, "in each step: " + ", ".join(parts), "rule of SGLang, not of the model")


def _images(image: ImageMemory | None, options: DeviceOptions, without: str) -> list[MemoryClass]:
    names = ("vision activations", "pixels", "multimodal embeddings")
    if image is None:
        return [MemoryClass(name, 0, "never", f"exact: {without}") for name in names]
    count, cached = options.images, device_bytes("embedding_cache", options.embedding_cache)
    what = f"{count:,} images of {image.size:,} x {image.size:,} pixels"
    return [
        MemoryClass(names[0], count * image.activations, "while images are encoded", f"estimate: widest layer, {what}"),
        MemoryClass(
            names[1], count * image.pixels, "from arrival until images are encoded", f"exact for {what} in float32"
        ),
        MemoryClass(
            names[2],
            count * image.embeddings + cached,
            "until the prompt is computed; a cache for good",
            f"exact for {count:,} x {image.tokens:,} tokens, and the cache",
        ),
    ]


def _bytes_of(cache: MemoryPlan, number: int) -> int:
    """Return the bytes of one request of a planned context, the null blocks included."""
    context = cache.contexts[number]
    blocks = sum(
        (held + 1) * group.bytes_per_block for held, group in zip(context.blocks_per_request, cache.groups, strict=True)
    )
    slots = 0 if cache.states is None else (context.slots_per_request + 1) * cache.states.bytes_per_slot
    return blocks + slots


def _missing(engine: _Engine, stage: Stage, static: int, weights: _Weights) -> NotEnoughMemory:
    """Return the error for weights that leave no memory for a cache."""
    memory, ranks, options = engine.memory, engine.ranks, engine.options
    where = f" on each of {ranks} ranks" if ranks > 1 else ""
    what = f"{stage} of {engine.model.model_type}" if stage.count > 1 else engine.model.model_type
    text = f"device_memory is {_size(memory)}, and the weights of {what} take {_size(weights.nbytes)}{where}"
    smaller = _smaller_steps(engine) if options.static_fraction is None else []
    if weights.nbytes > memory:
        text += f": {_size(weights.nbytes - memory)} are missing for the weights alone"
    elif static == 0 and options.static_fraction is None:
        remedies = ", or ".join([*smaller, "a device with more memory"])
        return NotEnoughMemory(f"{text}, but the reserves take {_size(_reserved(engine, stage))}; use {remedies}")
    else:
        text += (
            f", of {_size(static)} that the reserves leave: {_size(weights.nbytes - static)} are missing, and the "
            "cache needs more"
        )
        if smaller:
            text += f"; use {' and '.join(smaller)}"
    return NotEnoughMemory(text + "; use more ranks or pipeline stages, or weights of fewer bits (fp8, int4)")


def _smaller_steps(engine: _Engine) -> list[str]:
    """Return the sizes of steps for which less would be reserved: a large chunk, and a graph that was asked for."""
    smaller = []
    if engine.preset.chunked_prefill_size > LEAST_CHUNK:
        smaller.append(f"a chunked_prefill_size of {LEAST_CHUNK}")
    if engine.options.graph_batch:
        smaller.append(f"a graph_batch below {engine.options.graph_batch}")
    return smaller


def _size(nbytes: int) -> str:
    """Return bytes for messages; those of small models and devices in MiB."""
    return f"{nbytes / GIB:.2f} GiB" if nbytes >= GIB // 10 else f"{nbytes / MIB:.2f} MiB"
