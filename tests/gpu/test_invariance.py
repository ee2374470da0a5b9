from tests.cuda.invariance import *  # noqa: F403
