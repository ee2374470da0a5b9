"""Hits of a recorded trace for every size of the cache, block sizes, policies and tiers."""

from pagecore.serving.whatif.curves import what_if
from pagecore.serving.whatif.options import WhatIfOptions
from pagecore.serving.whatif.page import save_page
from pagecore.serving.whatif.report import Curve, WhatIf
from pagecore.serving.whatif.requests import read_requests

__all__ = ["Curve", "WhatIf", "WhatIfOptions", "read_requests", "save_page", "what_if"]
