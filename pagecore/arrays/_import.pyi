from typing import Any

class Imported:
    producer: Any

class Exchange: ...
