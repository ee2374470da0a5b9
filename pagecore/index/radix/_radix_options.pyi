POLICIES: tuple[str, ...]
PROTECTED_SHARE: float

def check_policy(policy: object, name: str = "policy", known: tuple[str, ...] = ...) -> str: ...
