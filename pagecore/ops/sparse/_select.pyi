from typing import Any

def select(
    scores: Any,
    budget: int,
    *,
    lens: Any,
    sinks: int = 0,
    recent: int = 0,
    threshold: int | None = None,
    stream: Any = None,
) -> tuple[Any, Any]: ...
