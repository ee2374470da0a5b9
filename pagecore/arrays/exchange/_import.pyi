from typing import Any

class Imported:
    producer: Any

class Exchange: ...

def work_stream(array: object, device: int) -> int | None: ...
