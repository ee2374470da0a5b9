ELEMENTS: tuple[str, ...]
FORMATS: tuple[str, ...]

def latent_launch_shape(arguments: tuple[str, ...]) -> tuple[int, int]: ...
