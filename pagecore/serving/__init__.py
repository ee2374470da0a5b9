"""Serving on top of a cache: a continuous-batching scheduler, a memory planner, trace replay, what-if, and metrics.

Names are loaded at their first use (PEP 562): importing the package loads none of its modules, so that `pagecore info`
starts fast. ``from pagecore.serving import Scheduler`` loads the scheduler alone.
"""

from typing import TYPE_CHECKING

from pagecore.lazy import lazy_names

if TYPE_CHECKING:
    from pagecore.serving.budget import DeviceOptions, DevicePlan
    from pagecore.serving.planner import plan_memory, plan_model
    from pagecore.serving.plans import MemoryPlan, ModelPlan
    from pagecore.serving.prometheus import Exporter
    from pagecore.serving.replay import ReplayOptions, ReplayReport
    from pagecore.serving.scheduling.drafts import DraftTree
    from pagecore.serving.scheduling.figures import SchedulerFigures
    from pagecore.serving.scheduling.request import QueueFull, Request, RequestError, Run, State
    from pagecore.serving.scheduling.reuse import Reuse
    from pagecore.serving.scheduling.scheduler import Scheduler
    from pagecore.serving.scheduling.speculation import Speculation
    from pagecore.serving.scheduling.step import Step, StepState
    from pagecore.serving.whatif import WhatIf, WhatIfOptions, what_if

__all__ = [
    "DeviceOptions",
    "DevicePlan",
    "DraftTree",
    "Exporter",
    "MemoryPlan",
    "ModelPlan",
    "QueueFull",
    "ReplayOptions",
    "ReplayReport",
    "Request",
    "RequestError",
    "Reuse",
    "Run",
    "Scheduler",
    "SchedulerFigures",
    "Speculation",
    "State",
    "Step",
    "StepState",
    "WhatIf",
    "WhatIfOptions",
    "plan_memory",
    "plan_model",
    "what_if",
]

_MODULES = {
    "budget": ("DeviceOptions", "DevicePlan"),
    "scheduling.drafts": ("DraftTree",),
    "scheduling.figures": ("SchedulerFigures",),
    "planner": ("plan_memory", "plan_model"),
    "plans": ("MemoryPlan", "ModelPlan"),
    "prometheus": ("Exporter",),
    "replay": ("ReplayOptions", "ReplayReport"),
    "scheduling.request": ("QueueFull", "Request", "RequestError", "Run", "State"),
    "scheduling.reuse": ("Reuse",),
    "scheduling.scheduler": ("Scheduler",),
    "scheduling.speculation": ("Speculation",),
    "scheduling.step": ("Step", "StepState"),
    "whatif": ("WhatIf", "WhatIfOptions", "what_if"),
}

if not TYPE_CHECKING:  # type checkers read the imports above, and report names that are not among them
    __getattr__, __dir__ = lazy_names(__name__, _MODULES)
