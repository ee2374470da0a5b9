from tests.cuda.padded_dims import *  # noqa: F403
