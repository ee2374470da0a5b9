POLICIES: tuple[str, ...]
